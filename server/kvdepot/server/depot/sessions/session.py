"""One session: its processes, its leases, and what is remembered of ended ones."""

from __future__ import annotations

import struct
from collections import OrderedDict
from hashlib import blake2b
from itertools import takewhile
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from kvdepot.core import limits
from kvdepot.core.calls import AcquireCall, AcquireReply, CommitOutcome, ReserveCall, ReserveReply
from kvdepot.core.lifecycle import LeaseEvent, LeaseState, next_lease_state
from kvdepot.core.report import SessionStatus
from kvdepot.server.depot.tree.namespaces import Namespace
from kvdepot.server.depot.types import Owner, ProcessIdentity, Watch

NO_RANK: Final = -1
WORKER_PREFIX: Final = "kvdepotd/io/"
"""Engine ids of the daemon's own I/O workers; no engine may have one."""
WORKERS_MAX: Final = 256
"""Worker processes that live at once, those of earlier runs included."""
OPEN: Final = 0
"""No outcome yet for an object of a reservation."""
NO_ENTRY: Final = -1
REMEMBERED_BYTES_MAX: Final = 1 << 20
"""Of commit outcomes of ended leases, per session."""


class _Lease:
    """The part that both kinds of leases have. `deadline` is monotonic, in seconds."""

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
        """Return whether the call is the one that made this lease, and the lease is still served."""
        return isinstance(self, kind) and self.held and self.fingerprint == hash(call)

    def enter(self, event: LeaseEvent) -> None:
        """Change the state of the lease. Raise BrokenLifecycle for an event that cannot happen in its state."""
        self.state = next_lease_state(self.state, event)


class Wanted(NamedTuple):
    """Objects that a load wants, in four columns."""

    nodes: npt.NDArray[np.int64]
    kinds: npt.NDArray[np.uint8]
    rows: npt.NDArray[np.int64]  # NO_ROW: it is not in RAM
    sizes: npt.NDArray[np.int64]  # what each takes of RAM


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
        self.pending: Any = (
            None  # of a load that waits for a lower tier: a PendingAcquire, which loads.acquires alone opens
        )
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

    def finish(self, index: int, outcome: CommitOutcome) -> None:
        """Note that the object's entry was cleared, and remember why."""
        self.entries[index] = NO_ENTRY
        self.credits[index] = 0
        self.outcomes[index] = outcome
        self.open -= 1

    def outcome(self, index: int) -> int:
        """Return the outcome of an object: OPEN while it is lent, LOST if it was never granted."""
        if index >= len(self.entries):
            return CommitOutcome.LOST
        if self.entries[index] != NO_ENTRY:
            return OPEN
        return self.outcomes[index] or CommitOutcome.LOST


Lease = ReadLease | WriteLease


class Ended:
    """Ids of leases that ended, or that were released before their call arrived.

    They let the daemon refuse a late original, and give a repeated commit its first answer.
    Bounded in number and bytes. The oldest is forgotten first.
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


class Attachment:
    """One process of a session (one per rank, should a process have several)."""

    def __init__(self, slot: int, session: Session, process: ProcessIdentity, rank: int, *, scheduler: bool) -> None:
        self.slot = slot
        self.session = session
        self.process = process
        self.rank = rank
        self.scheduler = scheduler
        self.token = b""
        self.connections = 0
        self.watch: Watch | None = None

    def unwatch(self) -> None:
        """Stop watching the process. Its death is not reported any more."""
        if self.watch is not None:
            self.watch.close()
            self.watch = None


class Session:
    """The session of an engine. `ended`: it is not served any more, but processes that may live still hold extents."""

    def __init__(self, slot: int, engine: bytes, now: float) -> None:
        self.slot = slot
        self.engine = engine  # digest of owner and engine id
        self.engine_id = engine.hex()
        self.owner: Owner | None = None  # None: it was adopted, and nobody has come back yet
        self.party: int | str | None = None  # of the owner: the tenant or, without tenants, the user
        self.world_size = 0  # 0: not known yet in this run
        self.attachments: dict[int, Attachment] = {}
        self.namespaces: dict[bytes, Namespace] = {}
        self.leases: dict[int, Lease] = {}
        self.ended_leases = Ended(limits.TOMBSTONES_PER_SESSION_MAX)
        self.credit_used_bytes = 0
        self.attention_used_bytes = 0
        self.loads = 0
        self.awaited_bytes = 0  # of RAM, that its loads of lower tiers have no room for yet, and ...
        self.awaited_objects = 0  # ... their number
        self.object_bytes_max = 0  # that an object of its namespaces takes of RAM
        self.left_bytes = 0  # of credit, and ...
        self.left_loads = 0  # ... of loads, that its processes' former sessions still have
        self.token_report = 0  # number of the last one that was counted
        self.idle_since = now
        self.ended = False
        self.scheduler_died = False
        self.dead = False  # all its processes are
        self.worker = engine in WORKER_NUMBERS  # an I/O worker of this or an earlier run

    def belong_to(self, owner: Owner) -> None:
        """Note whose session it is: each call asks for the party of all sessions."""
        self.owner, self.party = owner, owner.party

    @property
    def connected(self) -> bool:
        return any(attachment.connections for attachment in self.attachments.values())

    @property
    def ranks_attached(self) -> int:
        return len({a.rank for a in self.attachments.values() if a.connections and a.rank != NO_RANK})

    @property
    def complete(self) -> bool:
        """Whether every rank is attached: before that nothing is reserved or acquired."""
        return self.world_size > 0 and self.ranks_attached == self.world_size

    def has(self, process: ProcessIdentity) -> bool:
        """Return whether the process is proven to be one of the session's own."""
        return any(attachment.process.is_same(process) for attachment in self.attachments.values())

    def due(self, now: float) -> list[Lease]:
        """Return leases over their deadline. All last equally long, so the dict has them in order of deadline."""
        return [
            lease
            for lease in takewhile(lambda lease: lease.deadline <= now, self.leases.values())
            if lease.state is not LeaseState.EXPIRED
        ]

    def status(self, credit_bytes: int) -> SessionStatus:
        attached = self.attachments.values()
        return SessionStatus(
            engine_id=self.engine_id,
            world_size=self.world_size,
            ranks_attached=self.ranks_attached,
            scheduler_attached=any(a.scheduler and a.connections for a in attached),
            credit_bytes=credit_bytes,
            credit_used_bytes=self.credit_used_bytes,
            leases=len(self.leases),
            lent_objects=sum(_lent_objects(lease) for lease in self.leases.values()),
            pids=tuple(sorted({a.process.pid for a in attached})),
        )


def _lent_objects(lease: Lease) -> int:
    return lease.open if isinstance(lease, WriteLease) else len(lease.entries)


def engine_digest(engine_id: str, owner: Owner) -> bytes:
    """Return the 16 bytes by which the session table knows an engine: an id says nothing without its owner."""
    key = struct.pack("<QQ", owner.uid, owner.pid_namespace)
    return blake2b(engine_id.encode(), digest_size=16, key=key).digest()


def _worker_digest(number: int) -> bytes:
    return blake2b(f"{WORKER_PREFIX}{number}".encode(), digest_size=16).digest()


WORKER_NUMBERS: Final = {_worker_digest(number): number for number in range(WORKERS_MAX)}
