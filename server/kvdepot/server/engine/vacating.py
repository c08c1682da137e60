"""Making a slot of the namespace table free: what an idle namespace has goes, from the leaves of its paths up."""

from __future__ import annotations

from collections.abc import Iterable

from kvdepot.server.engine.index import NONE
from kvdepot.server.engine.namespaces import Namespace
from kvdepot.server.engine.space import Space


def vacate(space: Space, namespaces: Iterable[Namespace], limit: int) -> int:
    """Make the slot of the first of these free that is no more in use then; how many nodes were dropped for it.

    Of at most `limit` nodes: where that is not enough the next call goes on.
    """
    left = limit
    for namespace in namespaces:
        if namespace.nodes:
            left -= drop_namespace(space, namespace, left)
        if not namespace.nodes and not any(account.held_bytes(namespace.slot) for account in space.accounts):
            space.namespaces.remove(namespace)
            break
        if left <= 0:
            break
    return limit - left


def drop_namespace(space: Space, namespace: Namespace, limit: int) -> int:
    """Drop at most `limit` of its nodes, from the leaves up, none that is lent; how many were dropped."""
    before, index = namespace.nodes, space.index
    for leaf in index.leaves_of(namespace.slot).tolist():
        node = leaf
        while node != NONE and index.is_leaf(node) and not space.busy(node):
            if before - namespace.nodes >= limit:
                return limit
            above = index.parent(node)
            space.drop_subtree(node)
            node = above
    return before - namespace.nodes
