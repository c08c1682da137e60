"""What the nodes of a shared directory may write: limits that are granted once and never taken back (ADR 0018). Pure.

A node's *published* bytes are what its writes that are over have taken; its *limit* is how far published bytes and
writes in progress may go together. With the used bytes of a count (a scan of the directory) and what each node had
published when it began, at any moment

    used <= counted used + sum over nodes (limit - published when the count began),

because every byte that the count did not meet belongs to a write that was not over by then. The ledger keeps
the right side at or below the capacity, so nobody has to ask before a write.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kvdepot.core.objectfile import PAGE_BYTES

NODES_MAX: Final = 1_024
_FIRST_SHARE: Final = 256
"""Of the capacity: a node's least quota grant, so that a run that writes nothing holds little."""
_FIRST_BYTES: Final = 64 << 20
_FIRST_SHARE_MAX: Final = 16
_CEILING_SHARE: Final = 8
"""Of the capacity: what all nodes together may hold without having used it, roughly."""
_WANTS_SHARE: Final = 4
"""Of the capacity: what nodes that wait for room may hold together beyond what they would have anyway. Without an end
of it, all objects would be deleted for what somebody wants and can never be given."""
_AHEAD: Final = 4
"""Rounds of writing for which a quota grant is meant to last: the way to a node takes two or three heartbeats."""


@dataclass(slots=True)
class Share:
    """A node's share. `counted_bytes`: how much of what it published the used bytes surely include."""

    limit_bytes: int = 0
    counted_bytes: int = 0
    left: bool = False  # it writes no more, but may have since the last count


@dataclass(frozen=True, slots=True)
class Count:
    """What was known when a count began."""

    published: Mapping[str, int]
    left: frozenset[str]


class Ledger:
    """The limits of all nodes, which never exceed the capacity."""

    def __init__(self, capacity_bytes: int, used_bytes: int | None = None) -> None:
        """Start without nodes. `used_bytes` None: never counted, so nothing is handed out."""
        self.capacity_bytes = capacity_bytes
        self.used_bytes = used_bytes
        self.shares: dict[str, Share] = {}
        self._before: dict[str, int] = {}

    @property
    def committed_bytes(self) -> int:
        """Return the most that the directory may hold if every node writes all that it may."""
        unused = sum(max(share.limit_bytes - share.counted_bytes, 0) for share in self.shares.values())
        return (self.used_bytes or 0) + unused

    @property
    def free_bytes(self) -> int:
        if self.used_bytes is None:
            return 0
        return max(self.capacity_bytes - self.committed_bytes, 0)

    def estimate(self, published: Mapping[str, int]) -> int:
        """Return the used bytes now, as far as the nodes have reported.

        The count may already include what was published during it. The ledger proves that no more than fits was
        published, so the capacity bounds what is added.
        """
        shares, used_bytes = self.shares.items(), self.used_bytes or 0
        told_bytes = sum(max(published.get(node, 0) - share.counted_bytes, 0) for node, share in shares)
        return used_bytes + min(told_bytes, max(self.capacity_bytes - used_bytes, 0))

    def meet(self, node: str, limit_bytes: int) -> None:
        """Add a node that registered, with the limit that it says it has. A ledger may be older than that limit."""
        share = self.shares.get(node)
        if share is None:
            if len(self.shares) >= NODES_MAX:
                return
            share = self.shares[node] = Share()
        share.limit_bytes = max(share.limit_bytes, limit_bytes)
        share.left = False

    def leave(self, node: str) -> None:
        """Mark a node that has nothing in progress and will never write again.

        What it had is free after a count that begins now.
        """
        if node in self.shares:
            self.shares[node].left = True

    @property
    def leaving(self) -> bool:
        """Return whether a count would free what nodes had that have left."""
        return any(share.left for share in self.shares.values())

    def begin_count(self, published: Mapping[str, int]) -> Count:
        """Begin a count. `published` was read before the directory is looked at."""
        return Count(dict(published), frozenset(node for node, share in self.shares.items() if share.left))

    def end_count(self, count: Count, used_bytes: int) -> None:
        self.used_bytes = used_bytes
        for node in count.left:
            if node in self.shares and self.shares[node].left:
                del self.shares[node]
        for node, share in self.shares.items():  # one that is not in the count keeps what an earlier count met
            share.counted_bytes = max(share.counted_bytes, count.published.get(node, 0))

    def deleted(self, size_bytes: int) -> None:
        """Subtract bytes that are no longer in the directory."""
        if self.used_bytes is not None:
            self.used_bytes = max(self.used_bytes - size_bytes, 0)

    def taken(self, size_bytes: int) -> None:
        """Add bytes that no node's share has."""
        if self.used_bytes is not None:
            self.used_bytes += size_bytes

    def hand_out(self, published: Mapping[str, int], wanted: Mapping[str, int] | None = None) -> bool:
        """Raise the limits of these living nodes, those first that have least. Return False if a node got too little.

        No node gets more than half of what is left, so that something is left for the next one.
        """
        living = [node for node in published if node in self.shares and not self.shares[node].left]
        wishes = {node: self._wish(node, published, len(living)) for node in living}
        spare = self.capacity_bytes // _WANTS_SHARE
        left = spare - sum(max(self._unused(node, published) - wish, 0) for node, wish in wishes.items())
        enough = True
        for node in sorted(living, key=lambda node: (self._unused(node, published), node)):
            unused, wish = self._unused(node, published), wishes[node]
            more = min((wanted or {}).get(node, 0), spare) - max(unused, wish)
            if 0 < more <= left:  # else it waits until others have used what they hold
                wish, left = max(unused, wish) + more, left - more
            if wish > unused:
                granted = min(wish - unused, self.free_bytes // 2) // PAGE_BYTES * PAGE_BYTES
                self.shares[node].limit_bytes += granted
                enough = enough and granted + PAGE_BYTES > wish - unused
        self._before = dict(published)
        return enough

    def _unused(self, node: str, published: Mapping[str, int]) -> int:
        return self.shares[node].limit_bytes - published[node]

    def _wish(self, node: str, published: Mapping[str, int], living: int) -> int:
        capacity = self.capacity_bytes
        first = max(capacity // _FIRST_SHARE, min(_FIRST_BYTES, capacity // _FIRST_SHARE_MAX))
        ceiling = max(first, capacity // _CEILING_SHARE // living)
        lately = published[node] - self._before.get(node, 0)
        return min(max(_AHEAD * lately, first), ceiling)
