"""The index of an adopted arena, made from the extent table in a few numpy operations a level of the tree's depth.

One Python call a row would keep a daemon with a million objects from serving for a quarter of a minute.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
from kvdepot.core.arena import NAMESPACES_MAX, Column
from kvdepot.core.calls import Kind
from kvdepot.server.engine.index import NONE
from kvdepot.server.engine.space import Space

_Numbers = npt.NDArray[np.int64]
_Flags = npt.NDArray[np.bool_]
_NO_KIND: Final = 0xFF


def plant(space: Space, heads: _Numbers) -> tuple[_Flags, _Flags]:
    """Nodes for these heads, which are sound by themselves and have distinct names.

    Returns which of them have no path to the root, and which contradict another object of their
    chunk or their parent. Neither is in the index.
    """
    rows, index = space.rows, space.index
    slots, kinds, boundaries = rows.namespaces[heads], rows.kinds[heads], rows.boundaries[heads]
    keys, parents = _words(rows.keys)[heads], _words(rows.parents)[heads]
    first, member = _chunks(slots, keys, boundaries, kinds)
    torn = (parents != parents[first[member]]).any(axis=1) | (boundaries != boundaries[first[member]])
    path_kinds = np.full(NAMESPACES_MAX, _NO_KIND, np.uint8)
    np.minimum.at(path_kinds, slots, kinds)
    has_path = np.zeros(len(first), np.bool_)
    has_path[member[~torn & (kinds == path_kinds[slots])]] = True

    nodes = index.add_many(slots[first], keys[first], boundaries[first])
    above = _parents(space, slots[first], parents[first], nodes)
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
        namespace = space.namespaces.by_slot[int(slot)]
        namespace.nodes += int(count)
        namespace.path_kind = int(path_kinds[slot])
        namespace.kinds = tuple(np.unique(kinds[slots == slot]).tolist())
    return orphaned[member], torn


def offer_for_eviction(space: Space) -> None:
    """Tell the policy of every node, parents first, and of every unit that may go."""
    index, now = space.index, space.clock()
    nodes = index.nodes()
    boundaries = index.boundaries_of(nodes)
    space.usable.plant(nodes, index.parents_of(nodes), boundaries)
    for node in nodes[np.argsort(boundaries, kind="stable")].tolist():
        parent = index.parent(node)
        space.policy.on_commit(node, now, parent, index.mark(node))
        if space.usable.usable(node) and parent != NONE and not space.usable.usable(parent):
            space.policy.on_end(node)  # states do not lie at every chunk there: a request ended or branched
        space.evictor.settle(node)


def _words(column: Column) -> npt.NDArray[np.uint64]:
    """Keys as two words each."""
    return column.view("<u8").reshape(-1, 2)


def _chunks(
    slots: npt.NDArray[np.uint16],
    keys: npt.NDArray[np.uint64],
    boundaries: npt.NDArray[np.uint32],
    kinds: npt.NDArray[np.uint8],
) -> tuple[_Numbers, _Numbers]:
    """One number a chunk: the object that speaks for each, and the chunk of each object."""
    order = np.lexsort((kinds, boundaries, keys[:, 1], keys[:, 0], slots))
    new = np.ones(len(order), np.bool_)
    new[1:] = (slots[order][1:] != slots[order][:-1]) | (keys[order][1:] != keys[order][:-1]).any(axis=1)
    member = np.empty(len(order), np.int64)
    member[order] = np.cumsum(new) - 1
    return order[new], member


def _parents(space: Space, slots: npt.NDArray[np.uint16], parents: npt.NDArray[np.uint64], nodes: _Numbers) -> _Numbers:
    """The chunk before each, -1 where there is none. `nodes` follow each other in the order of the chunks."""
    above = np.full(len(slots), -1, np.int64)
    for slot in np.unique(slots):
        chosen = slots == slot
        found = space.index.find_many(int(slot), parents[chosen].tobytes())
        above[chosen] = np.where(found != NONE, found - nodes[0], -1)
    return above


def _orphaned(above: _Numbers, root: _Flags, followed: _Flags) -> _Flags:
    """Chunks with a break anywhere on their way up, by pointer jumping: each step doubles the distance looked up."""
    orphaned = ~root & ~followed
    ancestor = np.where(orphaned | root, np.arange(len(above)), above)
    while True:
        orphaned |= orphaned[ancestor]
        further = ancestor[ancestor]
        if (further == ancestor).all():
            return orphaned
        ancestor = further
