"""DESIGN 5's invariant of the tree, and the flags that keep it cheap, computed anew by brute force."""

from __future__ import annotations

from kvdepot.core.calls import Kind
from kvdepot.server.engine.index import NONE
from kvdepot.server.engine.rows import RESERVED
from kvdepot.server.engine.space import Space


def audit_tree(space: Space) -> None:
    """Assert that the flags are right, and that each node has a path and serves, is provisional or goes first."""
    index = space.index
    nodes = index.nodes().tolist()
    live = [node for node in nodes if not index.cut_off(node)]
    usable = {node for node in live if _usable(space, node)}
    assert {node for node in live if space.usable.usable(node)} == usable
    serving: set[int] = set()
    for node in usable:
        serving |= set(_path(space, node))
    assert {node for node in live if space.usable.serves(node)} == serving
    assert {node for node in live if space.usable.serves_below(node)} == {
        node for node in live if any(child in serving for child in index.children(node))
    }
    excused: set[int] = set()
    for node in nodes:
        writing = any(space.rows.state[row] == RESERVED for row in index.rows_of(node))
        kept = space.busy(node) or space.kept(node) or space.stands(node) or space.pinned(node, space.path_kind(node))
        if writing or kept or _goes_first(space, node):
            excused |= set(_path(space, node))
        whole = any(_complete(space, node, kind) for kind in Kind)
        parent = index.parent(node) if not index.cut_off(node) else NONE
        assert not whole or parent == NONE or _has_path_object(space, parent), "a node without a complete path"
    assert set(live) - serving <= excused, "nobody could resume at or below a node, and it does not go first"


def _path(space: Space, node: int) -> list[int]:
    path = []
    while node != NONE:
        path.append(node)
        node = space.index.parent(node)
    return path


def _has_path_object(space: Space, node: int) -> bool:
    kind = space.path_kind(node)
    return space.has(node, kind) or space.elsewhere(node, kind)


def _usable(space: Space, node: int) -> bool:
    namespace = space.namespaces.by_slot[space.index.namespace(node)]
    if not all(_complete(space, node, kind) for kind in namespace.kinds):
        return False
    reach = _path(space, node)[: namespace.window_chunks]
    return Kind.WINDOW not in namespace.kinds or all(_complete(space, at, Kind.WINDOW) for at in reach)


def _complete(space: Space, node: int, kind: int) -> bool:
    return space.complete(node, kind) or any(tier.has(node, kind) for tier in space.tiers)


def _goes_first(space: Space, node: int) -> bool:
    """In a tier that has something of it; or in one after the other, where several have it."""
    worths = [evictor.worth(node) for evictor in (space.evictor, *(tier.evictor for tier in space.tiers))]
    return 0.0 in worths or sum(worth is not None for worth in worths) > 1
