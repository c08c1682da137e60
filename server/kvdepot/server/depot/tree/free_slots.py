"""Free slots of the namespace table by dropping what idle namespaces have."""

from __future__ import annotations

from collections.abc import Iterable

from kvdepot.server.depot.tree.index import NONE
from kvdepot.server.depot.tree.namespaces import Namespace
from kvdepot.server.depot.tree.tree import Tree


def free_slot(tree: Tree, namespaces: Iterable[Namespace], limit: int) -> int:
    """Free one namespace slot by dropping idle namespaces in order. Return the number of nodes dropped.

    At most `limit` nodes are dropped. Where that is not enough, the next call continues.
    """
    left = limit
    for namespace in namespaces:
        left -= tree.ram.drop_detached_of(namespace.slot, left)
        if namespace.nodes and left > 0:
            left -= drop_namespace(tree, namespace, left)
        if not namespace.nodes and not any(holding.account.held_bytes(namespace.slot) for holding in tree.holdings):
            tree.namespaces.remove(namespace)
            break
        if left <= 0:
            break
    return limit - left


def drop_namespace(tree: Tree, namespace: Namespace, limit: int) -> int:
    """Drop at most `limit` nodes of the namespace, from the leaves up, none that is lent. Return their number."""
    before, index = namespace.nodes, tree.index
    for leaf in index.leaves_of(namespace.slot).tolist():
        node = leaf
        while node != NONE and index.is_leaf(node) and not tree.ram.busy(node):
            if before - namespace.nodes >= limit:
                return limit
            above = index.parent(node)
            tree.drop_subtree(node)
            node = above
    return before - namespace.nodes
