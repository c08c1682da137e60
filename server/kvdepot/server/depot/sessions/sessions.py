"""Sessions and attachments: which processes may touch what a session is lent.

In the tables a session exists before its first attachment, and an attachment before
anything is lent; at the end lent entries go first, then the attachment, then the session.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Final

import numpy as np
from kvdepot.core import limits
from kvdepot.core.arena import ATTACHMENTS_MAX, SESSIONS_MAX, ArenaTables
from kvdepot.core.errors import (
    EngineIdInUse,
    InvalidArgument,
    LimitExceeded,
    NoRoom,
    NotReady,
    NotScheduler,
    UnknownSession,
)
from kvdepot.core.limits import check_limit
from kvdepot.server.depot.sessions.session import (
    NO_RANK,
    WORKER_NUMBERS,
    WORKER_PREFIX,
    WORKERS_MAX,
    Attachment,
    Session,
    engine_digest,
)
from kvdepot.server.depot.sessions.shares import share_of
from kvdepot.server.depot.types import Attached, AttachmentInfo, Membership, Owner, ProcessIdentity, TenantBudget, Watch

_USED: Final = 1
_SCHEDULER: Final = 2
"""In the attachment table's `used`: the process is the scheduler, with or without a rank."""
LENT_SESSIONS_MAX: Final = 32
"""Sessions of one process that are lent something. Those it has left stay until it dies; a process has one engine."""
LENT_ELSEWHERE: Final = f"{LENT_SESSIONS_MAX} other sessions of this process are lent extents: end it, or release them"
_FREE_SLOTS: Final = 16
"""With fewer left, sessions that nobody is connected to and that are lent nothing go before grace."""
_FULL: Final = "`kvdepotctl status` lists sessions and their processes: end engines that are not needed, then retry"


class Sessions:
    """The session and attachment tables and their live part."""

    def __init__(
        self, tables: ArenaTables, *, clock: Callable[[], float], random_bytes: Callable[[int], bytes], grace: float,
        tenants: Mapping[str, TenantBudget],
    ) -> None:  # fmt: skip
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
        self._tenants = tenants
        self.by_slot: dict[int, Session] = {}
        self.by_token: dict[bytes, Attachment] = {}
        self.attachments: dict[int, Attachment] = {}
        self._by_process: defaultdict[ProcessIdentity, list[Attachment]] = defaultdict(list)

    # Adopting

    def configure(self, *, grace: float, lease_deadline: float, tenants: Mapping[str, TenantBudget]) -> None:
        """Set grace and lease deadline, in seconds, and the budgets of tenants.

        Existing leases expire no later than new ones, because `due` needs them in that order.
        """
        self._grace_seconds = grace
        self._tenants = tenants
        latest = self._clock() + lease_deadline
        for session in self.by_slot.values():
            for lease in session.leases.values():
                lease.deadline = min(lease.deadline, latest)

    def load(self, dead: Callable[[ProcessIdentity], bool]) -> set[int]:
        """Read the tables of an earlier run.

        Takes the sessions with a process that may live and returns their slots. `clear_gone`
        clears the others, after what they were lent was cleared. A session whose scheduler has died meanwhile is to
        end like one whose scheduler dies while a daemon runs: no other process can say what its workers still write.
        """
        now = self._clock()
        without_scheduler = set[int]()
        for slot in self._used_slots(self._used):
            session_slot = self._session[slot]
            if session_slot >= SESSIONS_MAX or not self._session_used[session_slot]:
                continue
            process = ProcessIdentity(self._pid[slot], self._start[slot], self._boots[slot].tobytes())
            rank = self._rank[slot]
            scheduler = self._used[slot] == _SCHEDULER or rank == NO_RANK
            if dead(process):
                if scheduler:
                    without_scheduler.add(session_slot)
                continue
            session = self.by_slot.get(session_slot)
            if session is None:
                session = Session(session_slot, self._engines[session_slot].tobytes(), now)
                self.by_slot[session_slot] = session
            self._enter(Attachment(slot, session, process, rank, scheduler=scheduler))
        for session in self.by_slot.values():
            session.scheduler_died = session.slot in without_scheduler
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
        """Return the session whose scheduler has this token.

        Raise UnknownSession where this run has no such token, and NotScheduler for the token of a rank.
        """
        attachment = self.by_token.get(token)
        if attachment is None:
            raise UnknownSession("this daemon run knows no such session")
        if not attachment.scheduler:
            raise NotScheduler(f"{attachment.process} is rank {attachment.rank} and not the scheduler of its engine")
        return attachment.session

    def expired_for(self, engine: bytes, process: ProcessIdentity) -> Session | None:
        """Return the current session of this engine if it expired, else None.

        Such a session is without connections for longer than grace, and is not a session of this process.
        """
        session = self._current(engine, process)
        if session is None or session.connected or session.has(process):
            return None
        return session if self._clock() - session.idle_since >= self._grace_seconds else None

    def check(
        self, process: ProcessIdentity, member: Membership, client: ProcessIdentity | None = None
    ) -> Session | None:
        """Return the session that a process would join, None for a new one. Raise where it is refused."""
        _check(member)
        engine = engine_digest(member.engine_id, member.owner)
        session = self._current(engine, process) or self._revivable(engine, process)
        if session is not None:
            own = process, client or process
            _check_tenant(session, own, member.owner)
            _check_conflicts(session, own, member)
        else:
            self._check_lent(process)
        if session is None or _joinable(session, process, member.rank) is None:
            self._check_share(member.owner, new=session is None)
        return session

    def attach(self, process: ProcessIdentity, member: Membership, client: ProcessIdentity | None = None) -> Attached:
        session = self.check(process, member, client)
        rank = member.rank
        attachment = None if session is None else _joinable(session, process, rank)
        slot = self._free_attachment() if attachment is None else attachment.slot  # a session without one never ends
        if session is None:
            session = self._open(engine_digest(member.engine_id, member.owner))
        session.engine_id = member.engine_id
        session.belong_to(member.owner)
        session.world_size = member.world_size
        session.ended = False
        attachment = attachment or self._add(slot, session, process, rank)
        if not attachment.token:
            attachment.token = self._random_bytes(limits.SESSION_TOKEN_BYTES)
            self.by_token[attachment.token] = attachment
        if rank != NO_RANK and attachment.rank != rank:
            self._rank[attachment.slot] = rank
            attachment.rank = rank
        if member.scheduler:
            attachment.scheduler = True
            self._used[attachment.slot] = _SCHEDULER
        attachment.connections += 1
        return Attached(attachment.token, attachment.slot)

    def open_worker(self, process: ProcessIdentity) -> Attachment:
        """Open a session for an I/O worker of this run. Raise NoRoom."""
        taken = {session.engine for session in self.by_slot.values() if session.worker}
        engine = next((engine for engine in WORKER_NUMBERS if engine not in taken), None)
        if engine is None:
            raise NoRoom(f"{WORKERS_MAX} I/O workers live already", advice="end those that hang")
        slot = self._free_attachment()
        attachment = self._add(slot, self._open(engine), process, NO_RANK)
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
        """Stop watching all processes. Deaths are not reported any more."""
        for attachment in self.attachments.values():
            attachment.unwatch()

    def may_borrow(self, session: Session) -> bool:
        """Return whether other sessions do not lend too much to this session's processes.

        Note what other sessions without a connection have.
        """
        known = {a.process for a in session.attachments.values() if a.process.known}
        others = self._lent_to(known) - {session}
        left = [one for one in others if not one.connected]
        session.left_bytes = sum(one.credit_used_bytes for one in left)
        session.left_loads = sum(one.loads for one in left)
        return bool(session.leases) or len(others) < LENT_SESSIONS_MAX

    def _lent_to(self, processes: Iterable[ProcessIdentity]) -> set[Session]:
        """Return the sessions with one of these processes that are lent something."""
        attachments = chain.from_iterable(self._by_process.get(process, ()) for process in processes)
        return {attachment.session for attachment in attachments if attachment.session.leases}

    def of_party(self, party: int | str | None) -> list[Session]:
        """Return the sessions of a tenant or, without tenants, a user. Adopted ones are nobody's yet."""
        return [one for one in self.by_slot.values() if one.party is not None and one.party == party]

    def hold_extents(self) -> bool:
        """Return whether an engine in service holds a lease: it may be copying."""
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
        """Return ended sessions without leases and connections. Whether their processes live does not matter."""
        return [
            session
            for session in self.by_slot.values()
            if session.ended and not session.leases and not session.connected
        ]

    def crowding(self, owner: Owner) -> Iterable[Session]:
        """Return sessions to end before grace, so that there are slots for others. The longest idle ones come first.

        A party that is about to attach and has its share of the tables ends its own ones.
        """
        own, share = self.of_party(owner.party), share_of(owner, self._tenants)
        attachments = sum(len(one.attachments) for one in own)
        if len(own) >= share.sessions or attachments >= share.attachments:
            return _longest_idle(own, _FREE_SLOTS)
        wanted = max(
            _FREE_SLOTS - SESSIONS_MAX + len(self.by_slot), _FREE_SLOTS - ATTACHMENTS_MAX + len(self.attachments)
        )
        return _longest_idle(self.by_slot.values(), wanted)

    def end(self, session: Session) -> None:
        """End the service under the tokens of the session."""
        session.ended = True
        for attachment in session.attachments.values():
            self._forget_token(attachment)

    def remove_attachment(self, attachment: Attachment) -> None:
        """Free the slot of an attachment. From now on the death of its process is not reported."""
        attachment.unwatch()
        self._forget_token(attachment)
        self._used[attachment.slot] = 0
        del self.attachments[attachment.slot]
        del attachment.session.attachments[attachment.slot]
        of_process = self._by_process[attachment.process]
        of_process.remove(attachment)
        if not of_process:
            del self._by_process[attachment.process]

    def _forget_token(self, attachment: Attachment) -> None:
        self.by_token.pop(attachment.token, None)
        attachment.token = b""

    def remove(self, session: Session) -> None:
        """Free the slot of a session that is lent nothing and has no attachment."""
        assert not session.attachments, "a session outlives its attachments"
        self._session_used[session.slot] = 0
        del self.by_slot[session.slot]

    # Within

    def _current(self, engine: bytes, process: ProcessIdentity) -> Session | None:
        """Return the engine's session in service, or None.

        An earlier run can leave several. Then this is the session of the process, if it has one.
        """
        current = [session for session in self.by_slot.values() if session.engine == engine and not session.ended]
        return next((session for session in current if session.has(process)), next(iter(current), None))

    def _revivable(self, engine: bytes, process: ProcessIdentity) -> Session | None:
        """Return a session of the process that ended only because it was out of reach beyond grace, or None."""
        for session in self.by_slot.values():
            if session.engine == engine and not session.scheduler_died and session.has(process):
                return session
        return None

    def _check_lent(self, process: ProcessIdentity) -> None:
        """Check a process before it gets one more session. Raise LimitExceeded."""
        lent = len(self._lent_to({process})) if process.known else 0
        if lent >= LENT_SESSIONS_MAX:
            raise LimitExceeded(
                "sessions of one process that are lent extents", lent + 1, LENT_SESSIONS_MAX,
                advice="end the process, or have its engines release what they hold before they go",
            )  # fmt: skip

    def _check_share(self, owner: Owner, *, new: bool) -> None:
        """Check a party's part of the tables before it gets one more attachment. Raise LimitExceeded.

        Args:
            owner: of the process that attaches.
            new: whether the attachment needs a new session.
        """
        own, share = self.of_party(owner.party), share_of(owner, self._tenants)
        attachments, whose = sum(len(session.attachments) for session in own), owner.party_name
        if new and len(own) >= share.sessions:
            raise LimitExceeded(f"sessions of {whose}", len(own) + 1, share.sessions, advice=_FULL)
        if attachments >= share.attachments:
            raise LimitExceeded(f"attachments of {whose}", attachments + 1, share.attachments, advice=_FULL)

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
        self._used[slot] = _USED
        attachment = Attachment(slot, session, process, rank, scheduler=False)
        self._enter(attachment)
        return attachment

    def _enter(self, attachment: Attachment) -> None:
        self.attachments[attachment.slot] = attachment.session.attachments[attachment.slot] = attachment
        self._by_process[attachment.process].append(attachment)


def _check(member: Membership) -> None:
    engine_id, rank, world_size = member.engine_id, member.rank, member.world_size
    if not engine_id:
        raise InvalidArgument("engine_id is empty")
    if engine_id.startswith(WORKER_PREFIX):
        raise InvalidArgument(f"engine_id {engine_id!r} is one of the daemon's own")
    check_limit("bytes of an engine_id", len(engine_id.encode()), limits.ENGINE_ID_BYTES_MAX)
    if world_size < 1:
        raise InvalidArgument(f"world_size is {world_size}")
    check_limit("ranks of one engine", world_size, limits.RANKS_MAX)
    if not NO_RANK <= rank < world_size:
        raise InvalidArgument(f"rank {rank} is not one of the {world_size} ranks")
    if rank == NO_RANK and not member.scheduler:
        raise InvalidArgument("the process is neither the scheduler nor a rank")


def _check_conflicts(session: Session, own: tuple[ProcessIdentity, ...], member: Membership) -> None:
    """Refuse a process whose place another one has. `own`: the process, and the one that it stands for."""
    if session.world_size not in (0, member.world_size):
        raise EngineIdInUse(
            f"engine {session.engine_id} has {session.world_size} workers, this process says {member.world_size}"
        )
    for other in session.attachments.values():
        if any(other.process.is_same(process) for process in own):
            continue
        if member.scheduler and other.scheduler:
            raise EngineIdInUse(f"{other.process} is already the scheduler of an engine with this id")
        if member.rank != NO_RANK and other.rank == member.rank:
            raise EngineIdInUse(f"{other.process} is already rank {member.rank} of an engine with this id")


def _check_tenant(session: Session, own: tuple[ProcessIdentity, ...], owner: Owner) -> None:
    """Refuse a process of the same user in another tenant, by its groups. `own`: as in `_check_conflicts`.

    The tables do not say the tenant of an adopted session. A process that was in it before does.
    """
    if session.owner is None:
        if owner.tenant is not None and not any(map(session.has, own)):
            raise NotReady(
                f"{owner} has an engine with this id, whose tenant is not known until a process of it attaches again"
            )
    elif session.owner.tenant != owner.tenant:
        raise EngineIdInUse(f"{owner} has an engine with this id in another tenant")


def _longest_idle(sessions: Iterable[Session], count: int) -> list[Session]:
    """Return up to so many sessions that nobody is connected to and that are lent nothing."""
    idle = [one for one in sessions if not (one.connected or one.leases or one.worker)]
    return sorted(idle, key=lambda session: session.idle_since)[: max(count, 0)]


def _joinable(session: Session, process: ProcessIdentity, rank: int) -> Attachment | None:
    """Return the process's attachment with this rank, else one where either side names no rank, else None."""
    own = [a for a in session.attachments.values() if a.process.is_same(process)]
    for attachment in own:
        if attachment.rank == rank:
            return attachment
    return next((a for a in own if rank == NO_RANK or a.rank == NO_RANK), None)
