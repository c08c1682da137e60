"""Chunks at which requests in progress end: eviction spares them (design.md#paths)."""

from __future__ import annotations

from collections import Counter

from kvdepot.server.depot.tree.index import Index


class InUse:
    """Count the requests that end at each chunk, by namespace slot and key.

    By key, not by node: a request may end at a chunk that has no node yet, or whose node comes back.
    """

    def __init__(self, index: Index) -> None:
        self._index = index
        self._requests: Counter[tuple[int, bytes]] = Counter()

    def __contains__(self, node: int) -> bool:
        """Return whether a request in progress ends at the node."""
        return (self._index.namespace(node), self._index.key(node)) in self._requests

    def enter(self, slot: int, key: bytes) -> None:
        self._requests[(slot, key)] += 1

    def leave(self, slot: int, key: bytes) -> bool:
        """End one request's use of the chunk. Return whether no request ends there any more."""
        at = (slot, key)
        self._requests[at] -= 1
        if self._requests[at]:
            return False
        del self._requests[at]
        return True
