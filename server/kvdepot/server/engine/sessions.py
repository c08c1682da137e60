"""Sessions and attachments: which processes may touch what a session is lent.

In the tables a session exists before its first attachment, and an attachment before
anything is lent; at the end lent entries go first, then the attachment, then the session.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from hashlib import blake2b
from itertools import takewhile
from typing import Final

import numpy as np
from kvdepot.core import limits
from kvdepot.core.arena import ATTACHMENTS_MAX, SESSIONS_MAX, ArenaTables
from kvdepot.core.errors import EngineIdInUse, InvalidArgument, LimitExceeded, NoRoom, UnknownSession
from kvdepot.core.lifecycle import LeaseState
from kvdepot.core.limits import check_limit
from kvdepot.core.report import SessionStatus
from kvdepot.server.engine.leases import Ended, Lease, WriteLease
from kvdepot.server.engine.namespaces import Namespace
from kvdepot.server.engine.types import Attached, AttachmentInfo, ProcessIdentity, Watch

_NO_RANK: Final = -1
WORKER_PREFIX: Final = "kvdepotd/io/"
"""Engine ids of the daemon's own I/O workers; no engine may have one."""
WORKERS_MAX: Final = 256
"""Worker processes that live at once, those of earlier runs included."""
LENT_SESSIONS_MAX: Final = 32
"""Sessions of one process that are lent something. Those it has left stay until it dies; a process has one engine."""
LENT_ELSEWHERE: Final = f"{LENT_SESSIONS_MAX} other sessions of this process are lent extents: end it, or release them"
_FREE_SLOTS: Final = 16
"""With fewer left, sessions that nobody is connected to and that are lent nothing go before grace."""
_FULL: Final = "`kvdepotctl status` lists sessions and their processes: end engines that are not needed, then retry"


class Attachment:
    """One process of a session (one per rank, should a process have several)."""

    def __init__(self, slot: int, session: Session, process: ProcessIdentity, rank: int, *, scheduler: bool) -> None:
        self.slot = slot
        self.session = session
        self.process = process
        self.rank = rank
        self.scheduler = scheduler
        self.connections = 0
        self.watch: Watch | None = None

    def unwatch(self) -> None:
        """Be told of its process's death no more."""
        if self.watch is not None:
            self.watch.close()
            self.watch = None


class Session:
    """An engine's liveness. `ended`: no service any more, but processes that may live still hold extents."""

    def __init__(self, slot: int, engine: bytes, now: float) -> None:
        self.slot = slot
        self.engine = engine  # digest of the engine id
        self.engine_id = engine.hex()
        self.token = b""
        self.world_size = 0  # 0: not known yet in this run
        self.attachments: dict[int, Attachment] = {}
        self.namespaces: dict[bytes, Namespace] = {}
        self.leases: dict[int, Lease] = {}
        self.ended_leases = Ended(limits.TOMBSTONES_PER_SESSION_MAX)
        self.credit_used_bytes = 0
        self.attention_used_bytes = 0
        self.loads = 0
        self.left_bytes = 0  # of credit, and ...
        self.left_loads = 0  # ... of loads, that its processes' former sessions still have
        self.idle_since = now
        self.ended = False
        self.scheduler_died = False
        self.dead = False  # all its processes are
        self.worker = engine in _WORKER_NUMBERS  # an I/O worker of this or an earlier run

    @property
    def connected(self) -> bool:
        return any(attachment.connections for attachment in self.attachments.values())

    @property
    def ranks_attached(self) -> int:
        return len({a.rank for a in self.attachments.values() if a.connections and a.rank != _NO_RANK})

    @property
    def complete(self) -> bool:
        """Whether every rank is attached: before that nothing is reserved or acquired."""
        return self.world_size > 0 and self.ranks_attached == self.world_size

    def has(self, process: ProcessIdentity) -> bool:
        """Whether the process is proven to be one of its own."""
        return any(attachment.process.is_same(process) for attachment in self.attachments.values())

    def due(self, now: float) -> list[Lease]:
        """Leases over their deadline. All last equally long, so the dict has them in order of deadline."""
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


def engine_digest(engine_id: str) -> bytes:
    """What the session table knows an engine by, 16 bytes."""
    return blake2b(engine_id.encode(), digest_size=16).digest()


_WORKER_NUMBERS: Final = {engine_digest(f"{WORKER_PREFIX}{number}"): number for number in range(WORKERS_MAX)}


class Sessions:
    """The session and attachment tables and their live part."""

    def __init__(
        self, tables: ArenaTables, *, clock: Callable[[], float], random_bytes: Callable[[int], bytes], grace: float
    ) -> None:
        self._engines = tables.sessions["engine"].view("u1").reshape(-1, 16)
        self._session_used = tables.sessions["used"].data
        columns = tables.attachments
        self._boots = columns["boot"].view("u1").reshape(-1, 16)
        self._start = columns["start"].data
        self._pid = columns["pid"].data
        self._rank = columns["rank"].data
        self._session = columns["session"].data
        self._used = columns["used"].data
        self._clock = clock
        self._random_bytes = random_bytes
        self._grace_seconds = grace
        self.by_slot: dict[int, Session] = {}
        self.by_token: dict[bytes, Session] = {}
        self.attachments: dict[int, Attachment] = {}

    # Adopting

    def configure(self, *, grace: float, lease_deadline: float) -> None:
        """Seconds. Leases of before end by themselves no later than new ones: `due` needs them in that order."""
        self._grace_seconds = grace
        latest = self._clock() + lease_deadline
        for session in self.by_slot.values():
            for lease in session.leases.values():
                lease.deadline = min(lease.deadline, latest)

    def load(self, dead: Callable[[ProcessIdentity], bool]) -> set[int]:
        """Read the tables of an earlier run.

        Takes the sessions with a process that may live and returns their slots. `clear_gone`
        clears the others, after what they were lent was cleared.
        """
        now = self._clock()
        for slot in self._used_slots(self._used):
            session_slot = self._session[slot]
            if session_slot >= SESSIONS_MAX:
                continue
            process = ProcessIdentity(self._pid[slot], self._start[slot], self._boots[slot].tobytes())
            if not self._session_used[session_slot] or dead(process):
                continue
            session = self.by_slot.get(session_slot)
            if session is None:
                session = Session(session_slot, self._engines[session_slot].tobytes(), now)
                self.by_slot[session_slot] = session
            rank = self._rank[slot]
            attachment = Attachment(slot, session, process, rank, scheduler=rank == _NO_RANK)
            session.attachments[slot] = attachment
            self.attachments[slot] = attachment
        return set(self.by_slot)

    def clear_gone(self) -> None:
        """Mark as unused what `load` did not take."""
        for slot in self._used_slots(self._used) - self.attachments.keys():
            self._used[slot] = 0
        for slot in self._used_slots(self._session_used) - self.by_slot.keys():
            self._session_used[slot] = 0

    @staticmethod
    def _used_slots(column: memoryview) -> set[int]:
        return set(np.flatnonzero(np.asarray(column)).tolist())

    # Attaching

    def of(self, token: bytes) -> Session:
        """Raises UnknownSession."""
        session = self.by_token.get(token)
        if session is None:
            raise UnknownSession("this daemon run knows no such session")
        return session

    def expired_for(self, engine_id: str, process: ProcessIdentity) -> Session | None:
        """The current session of this engine id if it is without connections beyond grace and not this process's."""
        session = self._current(engine_digest(engine_id), process)
        if session is None or session.connected or session.has(process):
            return None
        return session if self._clock() - session.idle_since >= self._grace_seconds else None

    def attach(
        self,
        process: ProcessIdentity,
        engine_id: str,
        *,
        scheduler: bool,
        rank: int,
        world_size: int,
        client: ProcessIdentity | None = None,
    ) -> Attached:
        _check(engine_id, scheduler, rank, world_size)
        engine = engine_digest(engine_id)
        session = self._current(engine, process) or self._revivable(engine, process)
        if session is not None:
            self._check_conflicts(session, (process, client or process), scheduler, rank, world_size)
        else:
            self._check_lent(process)
        attachment = None if session is None else _joinable(session, process, rank)
        slot = self._free_attachment() if attachment is None else attachment.slot  # a session without one never ends
        if session is None:
            session = self._open(engine)
        session.engine_id = engine_id
        session.world_size = world_size
        session.ended = False
        if not session.token:
            session.token = self._random_bytes(limits.SESSION_TOKEN_BYTES)
            self.by_token[session.token] = session
        attachment = attachment or self._add(slot, session, process, rank)
        if rank != _NO_RANK and attachment.rank != rank:
            self._rank[attachment.slot] = rank
            attachment.rank = rank
        # What an earlier run knew of a process without a rank is only that it was the scheduler.
        attachment.scheduler |= scheduler
        attachment.connections += 1
        return Attached(session.token, attachment.slot)

    def open_worker(self, process: ProcessIdentity) -> Attachment:
        """A session for an I/O worker of this run. Raises NoRoom."""
        taken = {session.engine for session in self.by_slot.values() if session.worker}
        engine = next((engine for engine in _WORKER_NUMBERS if engine not in taken), None)
        if engine is None:
            raise NoRoom(f"{WORKERS_MAX} I/O workers live already", advice="end those that hang")
        slot = self._free_attachment()
        attachment = self._add(slot, self._open(engine), process, _NO_RANK)
        attachment.connections = 1  # the daemon holds its pipe: no grace runs out
        return attachment

    def disconnected(self, slot: int) -> None:
        attachment = self.attachments.get(slot)
        if attachment is None or not attachment.connections:
            return
        attachment.connections -= 1
        if not attachment.session.connected:
            attachment.session.idle_since = self._clock()

    def infos(self) -> tuple[AttachmentInfo, ...]:
        return tuple(AttachmentInfo(a.slot, a.process, a.rank, a.connections) for a in self.attachments.values())

    def watch(self, slot: int, watch: Watch) -> None:
        """Take over what tells of the death of an attachment's process. One is enough."""
        attachment = self.attachments[slot]
        if attachment.watch is None:
            attachment.watch = watch
        else:
            watch.close()

    def unwatch(self) -> None:
        """Be told of no death any more."""
        for attachment in self.attachments.values():
            attachment.unwatch()

    def may_borrow(self, session: Session) -> bool:
        """Whether its processes are not lent too much by other sessions; notes what those without a connection have."""
        known = {a.process for a in session.attachments.values() if a.process.known}
        others = [one for one in self._lent_to(known) if one is not session]
        left = [one for one in others if not one.connected]
        session.left_bytes = sum(one.credit_used_bytes for one in left)
        session.left_loads = sum(one.loads for one in left)
        return bool(session.leases) or len(others) < LENT_SESSIONS_MAX

    def _lent_to(self, processes: Collection[ProcessIdentity]) -> list[Session]:
        """Sessions with one of these processes that are lent something."""
        return [
            session
            for session in self.by_slot.values()
            if session.leases and any(a.process in processes for a in session.attachments.values())
        ]

    def hold_extents(self) -> bool:
        """Whether an engine in service holds a lease: it may be copying."""
        return any(session.leases and not session.ended and not session.worker for session in self.by_slot.values())

    # Ending

    def idle_beyond_grace(self) -> Iterable[Session]:
        now = self._clock()
        return [
            session
            for session in self.by_slot.values()
            if not session.ended
            and not session.worker
            and not session.connected
            and now - session.idle_since >= self._grace_seconds
        ]

    def over(self) -> Iterable[Session]:
        """Ended sessions that are lent nothing: whether their processes live matters to nobody."""
        return [
            session
            for session in self.by_slot.values()
            if session.ended and not session.leases and not session.connected
        ]

    def crowding(self) -> Iterable[Session]:
        """Sessions to end before grace, so that there are slots for others: those without use for the longest time."""
        wanted = max(
            _FREE_SLOTS - SESSIONS_MAX + len(self.by_slot), _FREE_SLOTS - ATTACHMENTS_MAX + len(self.attachments)
        )
        if wanted <= 0:
            return []
        idle = [one for one in self.by_slot.values() if not (one.connected or one.leases or one.worker)]
        return sorted(idle, key=lambda session: session.idle_since)[:wanted]

    def end(self, session: Session) -> None:
        """No service any more under its token."""
        session.ended = True
        self.by_token.pop(session.token, None)
        session.token = b""

    def remove_attachment(self, attachment: Attachment) -> None:
        """Its slot is free. From now on nobody tells of its process."""
        attachment.unwatch()
        self._used[attachment.slot] = 0
        del self.attachments[attachment.slot]
        del attachment.session.attachments[attachment.slot]

    def remove(self, session: Session) -> None:
        """Nothing is lent to it and it has no attachment."""
        assert not session.attachments, "a session outlives its attachments"
        self._session_used[session.slot] = 0
        del self.by_slot[session.slot]

    # Within

    def _current(self, engine: bytes, process: ProcessIdentity) -> Session | None:
        """The engine's session in service; of several, as an earlier run can leave them, the process's own."""
        current = [session for session in self.by_slot.values() if session.engine == engine and not session.ended]
        return next((session for session in current if session.has(process)), next(iter(current), None))

    def _revivable(self, engine: bytes, process: ProcessIdentity) -> Session | None:
        """A session that ended only because it was out of reach for longer than grace."""
        for session in self.by_slot.values():
            if session.engine == engine and not session.scheduler_died and session.has(process):
                return session
        return None

    def _check_conflicts(
        self, session: Session, own: tuple[ProcessIdentity, ...], scheduler: bool, rank: int, world_size: int
    ) -> None:
        if session.world_size not in (0, world_size):
            raise EngineIdInUse(
                f"engine {session.engine_id} has {session.world_size} workers, this process says {world_size}"
            )
        for other in session.attachments.values():
            if any(other.process.is_same(process) for process in own):
                continue
            if scheduler and other.scheduler:
                raise EngineIdInUse(f"{other.process} is already the scheduler of an engine with this id")
            if rank != _NO_RANK and other.rank == rank:
                raise EngineIdInUse(f"{other.process} is already rank {rank} of an engine with this id")

    def _check_lent(self, process: ProcessIdentity) -> None:
        """Before it gets one more session. Raises LimitExceeded."""
        lent = len(self._lent_to({process})) if process.known else 0
        if lent >= LENT_SESSIONS_MAX:
            raise LimitExceeded(
                "sessions of one process that are lent extents", lent + 1, LENT_SESSIONS_MAX,
                advice="end the process, or have its engines release what they hold before they go",
            )  # fmt: skip

    def _open(self, engine: bytes) -> Session:
        slot = next((slot for slot in range(SESSIONS_MAX) if slot not in self.by_slot), None)
        if slot is None:
            raise NoRoom(f"all {SESSIONS_MAX} sessions are in use", advice=_FULL)
        session = Session(slot, engine, self._clock())
        self._engines[slot] = list(engine)
        self._session_used[slot] = 1
        self.by_slot[slot] = session
        return session

    def _free_attachment(self) -> int:
        slot = next((slot for slot in range(ATTACHMENTS_MAX) if slot not in self.attachments), None)
        if slot is None:
            raise NoRoom(f"all {ATTACHMENTS_MAX} attachments are in use", advice=_FULL)
        return slot

    def _add(self, slot: int, session: Session, process: ProcessIdentity, rank: int) -> Attachment:
        self._boots[slot] = list(process.boot_id)
        self._start[slot] = process.start_ticks
        self._pid[slot] = process.pid
        self._rank[slot] = rank
        self._session[slot] = session.slot
        self._used[slot] = 1
        attachment = Attachment(slot, session, process, rank, scheduler=False)
        session.attachments[slot] = attachment
        self.attachments[slot] = attachment
        return attachment


def _check(engine_id: str, scheduler: bool, rank: int, world_size: int) -> None:
    if not engine_id:
        raise InvalidArgument("engine_id is empty")
    if engine_id.startswith(WORKER_PREFIX):
        raise InvalidArgument(f"engine_id {engine_id!r} is one of the daemon's own")
    check_limit("bytes of an engine_id", len(engine_id.encode()), limits.ENGINE_ID_BYTES_MAX)
    if world_size < 1:
        raise InvalidArgument(f"world_size is {world_size}")
    check_limit("ranks of one engine", world_size, limits.RANKS_MAX)
    if not _NO_RANK <= rank < world_size:
        raise InvalidArgument(f"rank {rank} is not one of the {world_size} ranks")
    if rank == _NO_RANK and not scheduler:
        raise InvalidArgument("the process is neither the scheduler nor a rank")


def _joinable(session: Session, process: ProcessIdentity, rank: int) -> Attachment | None:
    """The process's attachment with this rank, else one where either side names no rank."""
    own = [a for a in session.attachments.values() if a.process.is_same(process)]
    for attachment in own:
        if attachment.rank == rank:
            return attachment
    return next((a for a in own if rank == _NO_RANK or a.rank == _NO_RANK), None)
