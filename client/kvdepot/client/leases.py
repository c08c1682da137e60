"""The leases that a session has to end: from the first call for a lease to the daemon's confirmation of its end."""

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
        """Return the next id. Never 0, which is the protocol's "none"."""
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
        """Open a lease: a call that may make it is about to be sent."""
        self._open[lease_id] = None

    def granted(self, lease_id: int, indices: Iterable[int]) -> None:
        """Note the objects, at least one, that the answer to a reservation granted."""
        self._open[lease_id] = set(indices)

    def confirmed(self, lease_id: int, indices: Iterable[int]) -> None:
        """Note that the daemon has confirmed the end of these objects of a reservation."""
        outstanding = self._open.get(lease_id)
        if outstanding is not None:
            outstanding.difference_update(indices)
            if not outstanding:
                self.ended(lease_id)

    def ended(self, lease_id: int) -> None:
        """Close a lease: the daemon has confirmed its end, or never made it."""
        self._open.pop(lease_id, None)
