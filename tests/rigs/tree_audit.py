"""The invariant of the tree (design.md#eviction), and the flags that keep it cheap, computed anew by brute force."""

from __future__ import annotations

from kvdepot.core.calls import Kind
from kvdepot.server.depot.tree.index import NONE
from kvdepot.server.depot.tree.rows import RESERVED
from kvdepot.server.depot.tree.tree import Tree


def audit_tree(tree: Tree) -> None:
    """Assert that the flags are right, and that each node has a path and serves, is provisional or goes first."""
    index, ram = tree.index, tree.ram
    nodes = index.nodes().tolist()
    live = [node for node in nodes if not index.unlinked(node)]
    usable = {node for node in live if _usable(tree, node)}
    assert {node for node in live if tree.usable.usable(node)} == usable
    serving: set[int] = set()
    for node in usable:
        serving |= set(_path(tree, node))
    assert {node for node in live if tree.usable.serves(node)} == serving
    assert {node for node in live if tree.usable.serves_below(node)} == {
        node for node in live if any(child in serving for child in index.children(node))
    }
    excused: set[int] = set()
    for node in nodes:
        writing = any(ram.rows.state[row] == RESERVED for row in index.rows_of(node))
        kept = (
            tree.ram.busy(node)
            or tree.ram.kept(node)
            or node in tree.in_use
            or tree.ram.pinned(node, tree.path_kind(node))
        )
        if writing or kept or _goes_first(tree, node):
            excused |= set(_path(tree, node))
        whole = any(_complete(tree, node, kind) for kind in Kind)
        parent = index.parent(node) if not index.unlinked(node) else NONE
        assert not whole or parent == NONE or _has_path_object(tree, parent), "a node without a complete path"
    assert set(live) - serving <= excused, "nobody could resume at or below a node, and it does not go first"


def _path(tree: Tree, node: int) -> list[int]:
    path = []
    while node != NONE:
        path.append(node)
        node = tree.index.parent(node)
    return path


def _has_path_object(tree: Tree, node: int) -> bool:
    kind = tree.path_kind(node)
    return kind in tree.ram.kinds(node) or tree.elsewhere(node, kind)


def _usable(tree: Tree, node: int) -> bool:
    namespace = tree.namespaces.by_slot[tree.index.namespace(node)]
    if not all(_complete(tree, node, kind) for kind in namespace.kinds):
        return False
    reach = _path(tree, node)[: namespace.window_chunks]
    return Kind.WINDOW not in namespace.kinds or all(_complete(tree, at, Kind.WINDOW) for at in reach)


def _complete(tree: Tree, node: int, kind: int) -> bool:
    return tree.ram.complete(node, kind) or any(tier.has(node, kind) for tier in tree.tiers)


def _goes_first(tree: Tree, node: int) -> bool:
    """In a tier that has something of it; or in one after the other, where several have it."""
    worths = [holding.evictor.worth(node) for holding in tree.holdings]
    return 0.0 in worths or sum(worth is not None for worth in worths) > 1
