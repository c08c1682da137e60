"""Reports to a shared tier which paths are used: its janitor keeps what was used last (design.md#shared-tiers)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
from kvdepot.core.calls import Kind
from kvdepot.server.depot.tree.index import NONE, Index
from kvdepot.server.depot.tree.namespaces import Namespaces
from kvdepot.server.storage.base import NO_HANDLE, SharedTier

_EVERY_SECONDS: Final = 1800
"""How often at most the tier is told of a path; it touches a file hourly."""


class Recency:
    """The recency of one tier. Constant time for a path that was reported lately, else linear in what was not reported.

    The path to a reported node was reported at the same time. So the way up ends there.
    """

    def __init__(
        self, index: Index, namespaces: Namespaces, clock: Callable[[], float], number: int, tier: SharedTier
    ) -> None:
        """Make the state of one shared tier. `number` is the tier's place in the index's columns."""
        self._index = index
        self._namespaces = namespaces
        self._clock = clock
        self._number = number
        self._tier = tier
        # By node, in whole seconds of the clock from 1 on. The node's number may have been another one's: then it is
        # told of later.
        self._passed = np.zeros(index.capacity, np.uint32).data
        self._ended = np.zeros(index.capacity, np.uint32).data

    def used(self, end: int) -> None:
        """Report the path to this node as used: a request resumed here, or something was stored below."""
        now = int(self._clock()) + 1
        oldest = max(now - _EVERY_SECONDS, 0)
        if self._ended[end] > oldest:
            return
        self._ended[end] = now
        index, number = self._index, self._number
        namespace = self._namespaces.by_slot[index.namespace(end)]
        path_kind = namespace.path_kind
        handles: list[int] = []  # children first
        at, depth = end, 0
        while at != NONE and (depth < namespace.window_chunks or self._passed[at] <= oldest):
            for kind in namespace.kinds[::-1]:
                needed = kind == path_kind or not depth or (kind == Kind.WINDOW and depth < namespace.window_chunks)
                if needed and (handle := index.handle(number, at, kind)) != NO_HANDLE:
                    handles.append(handle)
            self._passed[at] = now
            at, depth = index.parent(at), depth + 1
        if handles:
            self._tier.used(handles[::-1])
