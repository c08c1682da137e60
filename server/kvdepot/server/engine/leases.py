"""Leases and what is remembered of ended ones."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
from kvdepot.core.calls import AcquireCall, AcquireReply, CommitOutcome, ReserveCall, ReserveReply
from kvdepot.core.lifecycle import LeaseEvent, LeaseState, next_lease_state

if TYPE_CHECKING:
    from kvdepot.server.engine.acquires import PendingAcquire
    from kvdepot.server.engine.sessions import Session

OPEN: Final = 0
"""No outcome yet for an object of a reservation."""
NO_ENTRY: Final = -1
REMEMBERED_BYTES_MAX: Final = 1 << 20
"""Of commit outcomes of ended leases, per session."""


class _Lease:
    """What both kinds have. `deadline` is monotonic, in seconds."""

    __slots__ = ("deadline", "fingerprint", "id", "session", "state")

    def __init__(self, session: Session, lease_id: int, fingerprint: int, deadline: float) -> None:
        self.session = session
        self.id = lease_id
        self.fingerprint = fingerprint
        self.deadline = deadline
        self.state = LeaseState.HELD

    @property
    def held(self) -> bool:
        """Whether it is still served; its extents stay lent either way."""
        return self.state is LeaseState.HELD

    def repeats(self, kind: type[_Lease], call: AcquireCall | ReserveCall) -> bool:
        """Whether the call is the one that made it, and it is still served."""
        return isinstance(self, kind) and self.held and self.fingerprint == hash(call)

    def enter(self, event: LeaseEvent) -> None:
        """Raises BrokenLifecycle for what cannot happen to it."""
        self.state = next_lease_state(self.state, event)


class ReadLease(_Lease):
    """A reader's pin: one lent entry an object. `pending` while some of them are being read into RAM.

    `hit_tokens`: that a request need not compute once it has them. `request_id`: of that request, if it has one.
    """

    __slots__ = ("entries", "hit_tokens", "pending", "reply", "request_id")

    def __init__(
        self,
        session: Session,
        lease_id: int,
        entries: npt.NDArray[np.uint32],
        fingerprint: int,
        reply: AcquireReply | None,
        deadline: float,
        request_id: str = "",
    ) -> None:
        super().__init__(session, lease_id, fingerprint, deadline)
        self.entries = entries
        self.request_id = request_id
        self.hit_tokens = 0
        self.pending: PendingAcquire | None = None
        self.reply = reply


class WriteLease(_Lease):
    """A reservation. Per object index: its lent entry (NO_ENTRY: nothing is lent), its outcome, its credit."""

    __slots__ = ("credits", "entries", "open", "outcomes", "reply")

    def __init__(self, session: Session, lease_id: int, objects: int, fingerprint: int, deadline: float) -> None:
        super().__init__(session, lease_id, fingerprint, deadline)
        self.entries = [NO_ENTRY] * objects
        self.credits = [0] * objects  # bytes; negative: of an attention object
        self.outcomes = bytearray(objects)  # a CommitOutcome, OPEN or, for what was abandoned, LOST
        self.open = 0  # entries in use
        self.reply: ReserveReply | None = None

    def settle(self, index: int, outcome: CommitOutcome) -> None:
        """The object's entry was cleared; remember why."""
        self.entries[index] = NO_ENTRY
        self.credits[index] = 0
        self.outcomes[index] = outcome
        self.open -= 1

    def outcome(self, index: int) -> int:
        """OPEN while lent; LOST for what was never granted."""
        if index >= len(self.entries):
            return CommitOutcome.LOST
        if self.entries[index] != NO_ENTRY:
            return OPEN
        return self.outcomes[index] or CommitOutcome.LOST


Lease = ReadLease | WriteLease


class Ended:
    """Ids of leases that ended, or that were given back before their call arrived.

    A late original is refused by it, and a repeated commit gets its first answer. Bounded
    in number and bytes, the oldest is forgotten first.
    """

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        self._outcomes: OrderedDict[int, bytes] = OrderedDict()
        self._bytes = 0

    def __contains__(self, lease_id: int) -> bool:
        return lease_id in self._outcomes

    def __len__(self) -> int:
        return len(self._outcomes)

    def add(self, lease_id: int, outcomes: bytes = b"") -> None:
        self._bytes += len(outcomes) - len(self._outcomes.pop(lease_id, b""))
        self._outcomes[lease_id] = outcomes
        while len(self._outcomes) > self._count_max or self._bytes > REMEMBERED_BYTES_MAX:
            _, forgotten = self._outcomes.popitem(last=False)
            self._bytes -= len(forgotten)

    def outcome(self, lease_id: int, index: int) -> int:
        outcomes = self._outcomes.get(lease_id, b"")
        return (outcomes[index] if index < len(outcomes) else 0) or CommitOutcome.LOST
