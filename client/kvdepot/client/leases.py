"""Which leases this session owes the daemon an end for: from the asking to the daemon's confirmation."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

LEASE_BITS = 63


class LeaseIds:
    """Ids that no other session of the same engine draws: they count up from a random 63-bit start."""

    def __init__(self, start: int) -> None:
        """`start`: 63 random bits."""
        self._next = start

    def draw(self) -> int:
        """Never 0 (the protocol's "none")."""
        self._next = (self._next + 1) % (1 << LEASE_BITS) or 1
        return self._next


class LeaseBook:
    """Open leases. A reader's lease ends at once; a reservation ends when each granted object has ended.

    An unanswered lease is open: the daemon may have granted it although its reply was lost.
    """

    def __init__(self) -> None:
        self._open: dict[int, set[int] | None] = {}  # None: unanswered, or a reader's

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, lease_id: int) -> bool:
        return lease_id in self._open

    def ids(self) -> tuple[int, ...]:
        return tuple(self._open)

    def ask(self, lease_id: int) -> None:
        """A call that may make this lease is about to be sent."""
        self._open[lease_id] = None

    def granted(self, lease_id: int, indices: Iterable[int]) -> None:
        """The reservation's answer: these objects, one at least, are ours to write."""
        self._open[lease_id] = set(indices)

    def settled(self, lease_id: int, indices: Iterable[int]) -> None:
        """The daemon has confirmed the end of these objects of a reservation."""
        outstanding = self._open.get(lease_id)
        if outstanding is not None:
            outstanding.difference_update(indices)
            if not outstanding:
                self.ended(lease_id)

    def ended(self, lease_id: int) -> None:
        """The daemon has confirmed the end of the whole lease, or never made it."""
        self._open.pop(lease_id, None)
