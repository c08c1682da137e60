"""Rebuild the index of an adopted arena from the extent table, in a few numpy operations per level of the tree.

One Python call a row would keep a daemon with a million objects from serving for a quarter of a minute.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
from kvdepot.core.arena import NAMESPACES_MAX, Column
from kvdepot.core.calls import Kind
from kvdepot.server.depot.tree.index import NONE
from kvdepot.server.depot.tree.tree import Tree

_Numbers = npt.NDArray[np.int64]
_Flags = npt.NDArray[np.bool_]
_NO_KIND: Final = 0xFF


def rebuild_index(tree: Tree, heads: _Numbers) -> tuple[_Flags, _Flags]:
    """Make nodes for these heads, which are sound and have distinct names.

    Return which of them have no path to the root, and which contradict another object of their
    chunk or their parent. Neither is in the index.

    Attention makes paths, or the first kind of a namespace without it. Which one it is, only the disks may know: they
    may have all of its attention.
    """
    rows, index = tree.ram.rows, tree.index
    slots, kinds, boundaries = rows.namespaces[heads], rows.kinds[heads], rows.boundaries[heads]
    keys, parents = _words(rows.keys)[heads], _words(rows.parents)[heads]
    first, member = _chunks(slots, keys, boundaries, kinds)
    torn = (parents != parents[first[member]]).any(axis=1) | (boundaries != boundaries[first[member]])
    path_kinds = np.full(NAMESPACES_MAX, _NO_KIND, np.uint8)
    np.minimum.at(path_kinds, slots, kinds)
    has_path = np.zeros(len(first), np.bool_)
    makes_path = kinds == (int(Kind.ATTENTION) if tree.disks else path_kinds[slots])
    has_path[member[~torn & makes_path]] = True

    nodes = index.add_many(slots[first], keys[first], boundaries[first])
    above = _parents(tree, slots[first], parents[first], nodes)
    root: _Flags = np.logical_not(parents[first].any(axis=1))
    followed = (above >= 0) & has_path[above]
    deeper = boundaries[first] > boundaries[first[above]]
    orphaned = _orphaned(above, root, followed & deeper)
    torn |= (followed & ~deeper & ~root)[member]

    for node in nodes[orphaned].tolist():
        index.remove(node)
    index.link_many(nodes[~orphaned], np.where(root, NONE, nodes[above])[~orphaned])
    kept = ~orphaned[member] & ~torn
    for kind in Kind:
        chosen = kept & (kinds == kind)
        index.set_rows(kind, nodes[member[chosen]], heads[chosen])
    index.count_children_in_ram()
    for slot, count in zip(*np.unique(slots[first][~orphaned], return_counts=True), strict=True):
        namespace = tree.namespaces.by_slot[int(slot)]
        namespace.nodes += int(count)
        namespace.path_kind = int(path_kinds[slot])
        namespace.kinds = tuple(np.unique(kinds[slots == slot]).tolist())
    return orphaned[member], torn


def offer_for_eviction(tree: Tree) -> None:
    """Tell the policy about every node, parents first, and about every unit that may go."""
    index, evictor, now = tree.index, tree.ram.evictor, tree.clock()
    nodes = index.nodes()
    boundaries = index.boundaries_of(nodes)
    tree.usable.rebuild(nodes, index.parents_of(nodes), boundaries)
    for node in nodes[np.argsort(boundaries, kind="stable")].tolist():
        parent = index.parent(node)
        evictor.policy.on_commit(node, now, parent, index.mark(node))
        if tree.usable.usable(node) and parent != NONE and not tree.usable.usable(parent):
            evictor.policy.on_end(node)  # states do not lie at every chunk there: a request ended or branched
        evictor.update_candidate(node)


def _words(column: Column) -> npt.NDArray[np.uint64]:
    """Return keys as two words each."""
    return column.view("<u8").reshape(-1, 2)


def _chunks(
    slots: npt.NDArray[np.uint16],
    keys: npt.NDArray[np.uint64],
    boundaries: npt.NDArray[np.uint32],
    kinds: npt.NDArray[np.uint8],
) -> tuple[_Numbers, _Numbers]:
    """Return the first object of each chunk, and the chunk of each object."""
    order = np.lexsort((kinds, boundaries, keys[:, 1], keys[:, 0], slots))
    new = np.ones(len(order), np.bool_)
    new[1:] = (slots[order][1:] != slots[order][:-1]) | (keys[order][1:] != keys[order][:-1]).any(axis=1)
    member = np.empty(len(order), np.int64)
    member[order] = np.cumsum(new) - 1
    return order[new], member


def _parents(tree: Tree, slots: npt.NDArray[np.uint16], parents: npt.NDArray[np.uint64], nodes: _Numbers) -> _Numbers:
    """Return the chunk before each, -1 where there is none. `nodes` are consecutive, in the order of the chunks."""
    above = np.full(len(slots), -1, np.int64)
    for slot in np.unique(slots):
        chosen = slots == slot
        found = tree.index.find_many(int(slot), parents[chosen].tobytes())
        above[chosen] = np.where(found != NONE, found - nodes[0], -1)
    return above


def _orphaned(above: _Numbers, root: _Flags, followed: _Flags) -> _Flags:
    """Return the chunks with a gap above them, by pointer jumping: each step doubles the distance."""
    orphaned = ~root & ~followed
    ancestor = np.where(orphaned | root, np.arange(len(above)), above)
    while True:
        orphaned |= orphaned[ancestor]
        further = ancestor[ancestor]
        if (further == ancestor).all():
            return orphaned
        ancestor = further
