"""A depot without sockets: the daemon's real engine over a real mapped arena, and a session that calls it directly.

What is scripted is time and failure: replies can be held back, lost, or refused, and the
whole depot can be absent.
"""

from __future__ import annotations

import itertools
import mmap
import os
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from random import Random
from types import MappingProxyType
from typing import Any

import numpy as np
from kvdepot.client.arena_map import ArenaMap
from kvdepot.client.calls import ChainedAcquire
from kvdepot.client.copy.base import Arena
from kvdepot.client.failures import CallFailure, FailureReason
from kvdepot.core.arena import ArenaLayout, ArenaTables
from kvdepot.core.calls import (
    AbandonCall,
    AcquireCall,
    CommitCall,
    CommitItem,
    DeclareCall,
    EndRequestCall,
    FindTiersCall,
    LocateCall,
    ReleaseCall,
    RequestEnd,
    ReserveCall,
    TokenReport,
)
from kvdepot.core.elements import Elements
from kvdepot.core.errors import EngineIdInUse, StaleEpoch, UnknownNamespace
from kvdepot.core.keys import NamespaceSpec
from kvdepot.core.objectfile import payload_sum
from kvdepot.server.depot.depot import Depot
from kvdepot.server.depot.types import Attached, DepotConfig, Membership, ProcessIdentity
from kvdepot.server.platform.identity import Liveness

from tests.rigs.memory_arena import arena_files
from tests.rigs.stream_rig import Proxy

ARENA_ID = 77
_first_leases = itertools.count(1, 1 << 32)  # of sessions: no two draw the same ids
BOOT = b"boot-id-16-bytes"


class DirectDepot:
    """One arena and one engine over it, for any number of sessions."""

    def __init__(self, data_bytes: int = 8 << 20, rows: int = 4096, **config: Any) -> None:
        overhead_bytes = ArenaLayout.plan(64 << 20, rows, rows).overhead_bytes
        self.layout = ArenaLayout.plan(overhead_bytes + data_bytes, rows, rows)
        self.arena_fds = arena_files(self.layout, ARENA_ID)
        tables_fd, column_fd, data_fd = self.arena_fds
        for descriptor in self.arena_fds:
            weakref.finalize(self, os.close, descriptor)
        self.buffer = memoryview(mmap.mmap(data_fd, self.layout.data_bytes))
        self.tables = ArenaTables(
            memoryview(mmap.mmap(tables_fd, self.layout.tables_bytes)), self.layout,
            memoryview(mmap.mmap(column_fd, self.layout.generations_bytes)),
        )  # fmt: skip
        self.now = 0.0
        self._config = DepotConfig(**({"credit_bytes": 1 << 30, "high_watermark": 1.0} | config))
        self._runs = itertools.count(1)
        self.engine = self._new_run()
        self._present = True
        self.attachments = 1  # of each session
        self.held: set[type] = set()  # replies of these calls wait for `let_go`
        self.lost: set[type] = set()  # the engine acts, the reply never comes
        self.calls: list[Any] = []
        self._pids = itertools.count(100)
        self.engines: dict[str, Any] = {}  # by id, those that are scripted
        self._processes: dict[tuple[str, int], ProcessIdentity] = {}  # by engine and rank

    def _new_run(self) -> Depot:
        run = next(self._runs)
        engine = Depot(
            self.tables,
            arena_id=ARENA_ID,
            run=run,
            clock=lambda: self.now,
            random_bytes=Random(run).randbytes,
            config=self._config,
        )
        if run > 1:
            engine.invalidation.epochs = self.engine.invalidation.epochs
            engine.adopt(lambda _: Liveness.ALIVE)
        engine.ready(self.layout.data_bytes)
        return engine

    def restart(self) -> None:
        """Begin a new run of the daemon, which keeps the arena, at a moment when nothing in it is lent."""
        assert not self.lent()
        self.engine = self._new_run()
        self.attachments += 1
        for engine in self.engines.values():
            engine.session.attach_again()

    @property
    def present(self) -> bool:
        return self._present

    @present.setter
    def present(self, present: bool) -> None:
        self.attachments += present and not self._present
        self._present = present

    def arena(self) -> ArenaMap:
        _, column_fd, data_fd = self.arena_fds
        return ArenaMap(data_fd, column_fd, self.layout.data_bytes)

    def attach(self, engine_id: str, world_size: int) -> list[Attached]:
        """Each rank's, the first one the scheduler's too. Those of an engine that is known are the same processes."""
        return [
            self.engine.attach(
                self._processes.setdefault((engine_id, rank), ProcessIdentity(next(self._pids), 1, BOOT)),
                Membership(engine_id, scheduler=rank == 0, rank=rank, world_size=world_size),
            )
            for rank in range(world_size)
        ]

    def proxy(self, attached: Attached) -> Proxy:
        """As a rank gets that cannot map the arena."""
        return Proxy(self.arena_fds, ARENA_ID, self.layout.data_bytes, attached.attachment, attached.session)

    def sum_all(self) -> None:
        """What the checksum worker does when it has time."""
        while (job := self.engine.next_to_sum()) is not None:
            raw_sum = payload_sum(self.buffer[offset : offset + length] for offset, length in job.extents)
            sum_hi, sum_lo = divmod(raw_sum, 1 << 64)
            self.engine.summed(job.row, job.generation, sum_lo, sum_hi)

    def lent(self) -> int:
        """Entries of the lent table: what the daemon believes that somebody may touch."""
        return int(np.count_nonzero(self.tables.lent["mode"]))

    def count(self, kind: type) -> int:
        return sum(isinstance(call, kind) for call in self.calls)


class DirectSession:
    """Stands in for `DepotSession`. Replies arrive in `poll`, as there."""

    def __init__(self, depot: DirectDepot, engine_id: str, world_size: int) -> None:
        self.depot = depot
        self._engine_id = engine_id
        self.refusal = ""
        self.ranks: list[Attached] = []
        try:
            self.ranks = depot.attach(engine_id, world_size)
        except EngineIdInUse as error:
            self.refusal = str(error)
        self._token = self.ranks[0].session if self.ranks else b""
        self._registered: set[bytes] = set()
        self._void: dict[bytes, int] = {}
        self._due: deque[tuple[Callable[[Any], None], Any]] = deque()
        self._waiting: list[tuple[Callable[[Any], None], Any, ChainedAcquire | None]] = []
        self._forgone: set[int] = set()
        self._leases = itertools.count(next(_first_leases))
        self.specs: list[NamespaceSpec] = []
        self.started = self.closed = self.waited_for = False
        self.computed = 0  # requests because of an outage
        self.threads = 0, 0  # it has none

    def attach_again(self) -> None:
        """To a new run of the daemon, as the same processes. Calls of the former run get no answer any more."""
        if self.closed or not self.ranks:
            return
        lost = [done for done, _, _ in self._waiting]
        self._waiting = []
        self._due += [(done, CallFailure(FailureReason.UNAVAILABLE)) for done in lost]
        self.ranks = self.depot.attach(self._engine_id, len(self.ranks))
        self._token = self.ranks[0].session
        self.depot.engine.declare(DeclareCall(self._token, ()))
        registered, self._registered = self._registered, set()
        for spec in self.specs:
            if spec.namespace_id() in registered:
                self._register(spec)

    def start(self) -> None:
        """The daemon takes back what a session's first call does not declare."""
        assert not self.started
        self.started = True
        if self.ranks:
            self.depot.engine.declare(DeclareCall(self._token, ()))

    def close(self, timeout_seconds: float = 1.0) -> None:
        """Beside a daemon that hangs it takes seconds: whoever calls it waits for the daemon."""
        self.waited_for = True
        self.end(timeout_seconds)

    def end(self, timeout_seconds: float = 1.0) -> None:
        if not self.closed:
            self.closed = True
            for attached in self.ranks:
                self.depot.engine.disconnected(attached.attachment)

    @property
    def attached(self) -> bool:
        return self.depot.present and not self.closed and bool(self.ranks)

    @property
    def attachments(self) -> int:
        return self.depot.attachments

    def register(self, spec: NamespaceSpec, elements: Elements = MappingProxyType({})) -> None:
        self.specs.append(spec)
        self._elements = elements
        self._register(spec)

    def _register(self, spec: NamespaceSpec) -> None:
        namespace = spec.namespace_id()
        self._registered.discard(namespace)
        if not self.attached:
            return
        try:
            self.depot.engine.register_namespace(self._token, spec, self._elements)
        except StaleEpoch as stale:
            self._void[namespace] = stale.bumps
        else:
            self._registered.add(namespace)

    def bumps_wanted(self, namespace: bytes) -> int | None:
        return self._void.get(namespace)

    def forget(self, namespace: bytes) -> None:
        self._registered.discard(namespace)

    def registered(self, namespace: bytes) -> bool:
        return namespace in self._registered

    def new_lease_id(self) -> int:
        return next(self._leases)

    def submit(
        self, call: Any, timeout_seconds: float, done: Callable[[Any], None], then: ChainedAcquire | None = None
    ) -> None:
        del timeout_seconds
        self.depot.calls.append(call)
        if not self.attached:
            self._due.append((done, CallFailure(FailureReason.UNAVAILABLE)))
            return
        try:
            reply = self._serve(call)
        except UnknownNamespace as error:
            self._due.append((done, CallFailure(FailureReason.LOST, error.code)))
            self._register(self.specs[-1])
            return
        if type(call) in self.depot.lost:
            self._end_lease(call)
            self._due.append((done, CallFailure(FailureReason.DEADLINE)))
        elif type(call) in self.depot.held:
            self._waiting.append((done, reply, then))
        else:
            self._answer(done, reply, then)

    def _answer(self, done: Callable[[Any], None], reply: Any, then: ChainedAcquire | None) -> None:
        made = then.make(reply) if then is not None and then.lease_id not in self._forgone else None
        self._due.append((done, reply))
        if then is not None and made is not None:
            self.submit(made, then.timeout_seconds, then.done)

    def cancel(self, lease_id: int) -> None:
        self._forgone.add(lease_id)
        self.release([lease_id], used=False)

    def _serve(self, call: Any) -> Any:
        engine = self.depot.engine
        later: Any = {LocateCall: engine.locate, AcquireCall: engine.acquire}.get(type(call))
        values = {field: getattr(call, field) for field in type(call).__dataclass_fields__}
        call = type(call)(**{**values, "session": self._token})
        if later is None:
            return engine.find_tiers(call) if isinstance(call, FindTiersCall) else engine.reserve(call)
        replies: list[Any] = []
        later(call, replies.append)
        (reply,) = replies  # at once: there is no tier below RAM
        return reply

    def _end_lease(self, call: Any) -> None:
        if isinstance(call, AcquireCall):
            self.release([call.lease_id], used=False)
        elif isinstance(call, ReserveCall):
            self.abandon(call.lease_id)

    def let_go(self) -> None:
        """Deliver the replies that were held back, at the next poll."""
        waiting, self._waiting = self._waiting, []
        for done, reply, then in waiting:
            self._answer(done, reply, then)

    def release(self, lease_ids: Sequence[int], *, used: bool = True, doubted: bool = False) -> None:
        leases = tuple(lease_ids)
        self.depot.engine.release(ReleaseCall(self._token, leases, () if used else leases, leases if doubted else ()))
        self.depot.sum_all()

    def commit(self, lease_id: int, indices: Sequence[int], done: Callable[[bytes], None] | None = None) -> None:
        call = CommitCall(self._token, (_item(lease_id, indices),))
        self.depot.calls.append(call)
        outcomes = self.depot.engine.commit(call).outcomes[0]
        self.depot.sum_all()
        if done is not None:
            self._due.append((done, outcomes))

    def abandon(self, lease_id: int, indices: Sequence[int] = ()) -> None:
        call = AbandonCall(self._token, (_item(lease_id, indices),))
        self.depot.calls.append(call)
        self.depot.engine.abandon(call)

    def end_request(self, request_id: str, end: RequestEnd, tokens: TokenReport) -> None:
        call = EndRequestCall(self._token, request_id, end, tokens)
        self.depot.calls.append(call)
        self.depot.engine.end_request(call)

    def count_computed(self) -> None:
        self.computed += 1

    def poll(self) -> int:
        count = len(self._due)
        for _ in range(count):
            done, value = self._due.popleft()
            done(value)
        return count


class DirectAttachment:
    """Stands in for a rank's `Attachment`. Without a proxy the arena is mapped."""

    def __init__(self, depot: DirectDepot, proxy: Proxy | None = None) -> None:
        self._depot = depot
        self._proxy = proxy
        self._arena = depot.arena() if proxy is None else proxy.arena
        self.gone = False

    def start(self) -> None: ...

    @property
    def arena(self) -> Arena | None:
        return self._arena

    @property
    def session(self) -> bytes | None:
        return b"token" if self._depot.present and not self.gone else None

    def close(self) -> None:
        if self._proxy is not None:
            self._proxy.close()


def _item(lease_id: int, indices: Sequence[int]) -> CommitItem:
    return CommitItem(lease_id, np.asarray(list(indices), dtype="<u4").tobytes())
