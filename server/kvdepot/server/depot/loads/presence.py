"""Which objects of a prompt's chunks may be served now, in RAM or out of a lower tier."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from kvdepot.core.arena import NO_ROW
from kvdepot.core.calls import Kind, Nearest
from kvdepot.server.depot.tiering.tiering import Tiering
from kvdepot.server.depot.tree.index import NONE, Index, Nodes
from kvdepot.server.depot.tree.lower_tier import LowerTier
from kvdepot.server.depot.tree.namespaces import Namespace
from kvdepot.server.depot.tree.rows import COMMITTED, Rows
from kvdepot.server.storage.base import NO_HANDLE

Flags = npt.NDArray[np.bool_]
Tiers = npt.NDArray[np.uint8]
"""A `Nearest` a chunk."""


class Presence:
    """Presence by chunk. `nodes` has one node a chunk, NONE where the index knows none. Answers have one flag each."""

    def __init__(self, index: Index, rows: Rows, tiering: Tiering) -> None:
        self._index = index
        self._rows = rows
        self._tiering = tiering

    def in_ram(self, namespace: Namespace, nodes: Nodes) -> dict[Kind, Flags]:
        """Return, by kind, which of these nodes have an object that RAM would give."""
        rows = self._rows
        return {Kind(kind): rows.visible_many(self.rows_at(nodes, kind)) for kind in namespace.object_bytes}

    def promotable(self, nodes: Nodes, kind: int) -> Flags:
        """Return which of these nodes have an object of this kind that a lower tier would give.

        RAM has no copy of it, a copy that is being read, or a copy that is not verified yet.
        """
        rows = self.rows_at(nodes, kind)
        found = held_by(self._index, self._tiering.readable, nodes, kind)
        held = np.flatnonzero(found & (rows != NO_ROW))
        reading, unverified = self._tiering.promotions.reading, self._rows.unverified
        found[held] = [reading(row) or unverified(row) for row in rows[held].tolist()]
        return found

    def nearest(self, nodes: Nodes, tiers: Sequence[LowerTier]) -> Tiers:
        """Return where the attention of these nodes is, whether or not it can be served at the moment."""
        rows = self.rows_at(nodes, Kind.ATTENTION)
        nearest = np.full(len(nodes), Nearest.ABSENT, np.uint8)
        nearest[held_by(self._index, tiers, nodes, Kind.ATTENTION)] = Nearest.BELOW_RAM
        in_ram = np.flatnonzero(rows != NO_ROW)
        nearest[in_ram[self._rows.states[rows[in_ram]] == COMMITTED]] = Nearest.RAM
        return nearest

    def rows_at(self, nodes: Nodes, kind: int) -> Nodes:
        """Return the head rows, NO_ROW where there is none."""
        rows = np.full(len(nodes), NO_ROW, np.int64)
        known = nodes != NONE
        rows[known] = self._index.rows[kind - 1][nodes[known]]
        return rows


def held_by(index: Index, tiers: Sequence[LowerTier], nodes: Nodes, kind: int) -> Flags:
    """Return which of the objects any of these tiers has."""
    known = nodes != NONE
    found = np.zeros(len(nodes), np.bool_)
    for tier in tiers:
        found[known] |= index.handles[tier.number][kind - 1][nodes[known]] != NO_HANDLE
    return found
