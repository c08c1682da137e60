"""Telling a shared tier which paths are used: its janitor keeps what was used last (DESIGN 5 and 6)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
from kvdepot.core.calls import Kind
from kvdepot.server.engine.index import NONE
from kvdepot.server.tiers.base import NO_HANDLE, SharedTier

if TYPE_CHECKING:
    from kvdepot.server.engine.lower_tier import LowerTier
    from kvdepot.server.engine.space import Space

_EVERY_SECONDS: Final = 1800
"""How often at most the tier is told of a path; it touches a file hourly."""


class Recency:
    """One tier's. Constant time for a path of which the tier was told lately, else linear in what it was not told of.

    Of whatever it was told, it was told of the path to it at the same time: there the way up ends.
    """

    def __init__(self, space: Space, lower: LowerTier, tier: SharedTier) -> None:
        self._space = space
        self._lower = lower
        self._tier = tier
        # By node, in whole seconds of the clock from 1 on. The node's number may have been another one's: then it is
        # told of later.
        self._passed = np.zeros(space.index.capacity, np.uint32).data
        self._ended = np.zeros(space.index.capacity, np.uint32).data

    def used(self, end: int) -> None:
        """A request resumed at this node, or something was stored below it."""
        now = int(self._space.clock()) + 1
        oldest = max(now - _EVERY_SECONDS, 0)
        if self._ended[end] > oldest:
            return
        self._ended[end] = now
        index, path_kind = self._space.index, self._space.path_kind(end)
        namespace = self._space.namespaces.by_slot[index.namespace(end)]
        handles: list[int] = []  # children first
        at, depth = end, 0
        while at != NONE and (depth < namespace.window_chunks or self._passed[at] <= oldest):
            for kind in namespace.kinds[::-1]:
                needed = kind == path_kind or not depth or (kind == Kind.WINDOW and depth < namespace.window_chunks)
                if needed and (handle := self._lower.handle(at, kind)) != NO_HANDLE:
                    handles.append(handle)
            self._passed[at] = now
            at, depth = index.parent(at), depth + 1
        if handles:
            self._tier.used(handles[::-1])
