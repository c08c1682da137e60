"""Which objects of a prompt's chunks may be served now, in RAM or out of a lower tier."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from kvdepot.core.arena import NO_ROW
from kvdepot.core.calls import Kind
from kvdepot.server.engine.index import NONE, Nodes
from kvdepot.server.engine.lower_tier import LowerTier
from kvdepot.server.engine.namespaces import Namespace
from kvdepot.server.engine.space import Space
from kvdepot.server.engine.tiering import Tiering
from kvdepot.server.tiers.base import NO_HANDLE

Flags = npt.NDArray[np.bool_]


class Presence:
    """`nodes` are one a chunk, NONE where the index knows none; every answer has one flag each."""

    def __init__(self, space: Space, tiering: Tiering) -> None:
        self._space = space
        self._tiering = tiering

    def in_ram(self, namespace: Namespace, nodes: Nodes) -> dict[Kind, Flags]:
        """By kind: RAM would give it."""
        rows = self._space.rows
        return {Kind(kind): rows.visible_many(self.rows_at(nodes, kind)) for kind in namespace.object_bytes}

    def promotable(self, nodes: Nodes, kind: int) -> Flags:
        """A lower tier would give it, RAM having none, one on its way, or one that is not verified yet."""
        space, rows = self._space, self.rows_at(nodes, kind)
        found = held_by(space, self._tiering.readable, nodes, kind)
        held = np.flatnonzero(found & (rows != NO_ROW))
        reading, unverified = self._tiering.promotions.reading, space.rows.unverified
        found[held] = [reading(row) or unverified(row) for row in rows[held].tolist()]
        return found

    def rows_at(self, nodes: Nodes, kind: int) -> Nodes:
        """Head rows, NO_ROW where there is none."""
        rows = np.full(len(nodes), NO_ROW, np.int64)
        known = nodes != NONE
        rows[known] = self._space.index.rows[kind - 1][nodes[known]]
        return rows


def held_by(space: Space, tiers: Sequence[LowerTier], nodes: Nodes, kind: int) -> Flags:
    """Which of the objects any of these tiers has."""
    known = nodes != NONE
    found = np.zeros(len(nodes), np.bool_)
    for tier in tiers:
        found[known] |= space.index.handles[tier.number][kind - 1][nodes[known]] != NO_HANDLE
    return found
