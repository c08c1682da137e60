"""Prefetch requests that wait for one lower tier."""

from __future__ import annotations

from collections.abc import Collection
from heapq import heapify, heappop, heappush
from typing import Final

from kvdepot.server.depot.tiering.prefetch_requests import PrefetchRequest

_OVER_MAX: Final = 64
"""Requests that are over and still in a queue, in addition to as many as there are of others."""


class PrefetchQueue:
    """In the order of their arrival, but for rooms that are full: nobody waits for another tenant's part.

    A turn costs O(rooms + log requests). A request that is over leaves when its turn comes.
    """

    def __init__(self, rooms: int) -> None:
        self._waiting: list[list[tuple[int, PrefetchRequest]]] = [[] for _ in range(rooms)]  # by room

    def __bool__(self) -> bool:
        return any(self._waiting)

    def push(self, request: PrefetchRequest) -> None:
        heappush(self._waiting[request.room], (request.number, request))

    def first(self, full: Collection[int]) -> PrefetchRequest | None:
        """Return the next request whose room is not among these."""
        heads = [queue[0] for room, queue in enumerate(self._waiting) if queue and room not in full]
        return min(heads)[1] if heads else None

    def leave(self, request: PrefetchRequest) -> None:
        """Remove a request if it is the first of its room; else it has left before."""
        queue = self._waiting[request.room]
        if queue and queue[0][1] is request:
            heappop(queue)

    def tidy(self, requests: int) -> None:
        """Remove what is over before its turn, where `requests` are not: a tier may be busy with loads for long."""
        for room, queue in enumerate(self._waiting):
            if len(queue) > 2 * requests + _OVER_MAX:
                self._waiting[room] = [entry for entry in queue if not entry[1].over]
                heapify(self._waiting[room])
