"""The scheduler process of an engine: a real session with the daemon, and requests that load and store prompts.

Each request is a generator that yields what it waits for. All calls into the client library are timed: none may
wait for anything, and none may raise.
"""

from __future__ import annotations

import os
import random
import struct
import time
import traceback
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from kvdepot.client.calls import Call
from kvdepot.client.endpoint import Endpoint
from kvdepot.client.failures import CallFailure
from kvdepot.client.session import DepotSession
from kvdepot.core.calls import (
    AcquireCall,
    AcquireOutcome,
    AcquireReply,
    CommitOutcome,
    Kind,
    LocateCall,
    LocateReply,
    ReserveCall,
    ReserveOutcome,
    ReserveReply,
)

from tests.chaos.messages import Command, Copied, Fill, Free, Load, Placed, RankOp, Report, Store
from tests.chaos.models import BLOCKS, MODELS, Model
from tests.chaos.process_clock import ProcessClock, queued_seconds
from tests.rigs.known_objects import Known, prompt
from tests.rigs.patience import patience

REQUESTS_MAX = 3
LOCATE_SECONDS = 0.5
LOAD_SECONDS = 4.0
RESERVE_SECONDS = 3.0
CALL_SECONDS_MAX = 1.0
"""No call of the client may take this long of the process's own time: each only posts to a queue (I2)."""
LATE_SECONDS_MAX = 5.0
"""How long after its timeout a call may stay without an answer."""
TORN_SHARE, IDLE_SHARE = 0.04, 0.02
FRESH_SHARE = 0.03
"""Of requests, for prompts that nobody has stored: where a daemon has room for all others, engines store on."""
STEP_SECONDS = 0.01
UNSERVED_SECONDS = 0.1
"""What a request without a daemon takes: the machine is left to those who restart one."""
REPORT_SECONDS = 0.2
RANK_DIED = 3
"""Exit code: without one of its ranks no engine goes on."""

Waiting = Generator[Callable[[], bool], None, None]


class Scheduler:
    def __init__(
        self, model: Model, session: DepotSession, ranks: Sequence[Connection], seed: int, rng: random.Random
    ) -> None:
        self._model = model
        self._session = session
        self._namespace = model.spec.namespace_id()
        self._ranks = ranks
        self._seed = seed
        self._rng = rng
        self._clock = ProcessClock()
        self._free = [list(range(BLOCKS)) for _ in model.spec.groups]
        self._running: dict[Waiting, Callable[[], bool]] = {}
        self._copies: dict[int, list[Copied]] = {}
        self._numbers = 0
        self._fresh = 2 * rng.randrange(model.prompts, 1 << 30)
        self._requests = 0
        self._commits = 0  # not answered yet
        self._begin_at = 0.0
        self.paused = False
        self.counts: Counter[str] = Counter()
        self.findings: list[str] = []

    # --- the loop

    def step(self) -> None:
        self._timed("poll", self._session.poll)
        for connection in self._ranks:
            while connection.poll():
                done: Copied = connection.recv()
                self._copies[done.number].append(done)
        for request, ready in list(self._running.items()):
            if ready():
                self._advance(request)
        if not self.paused and len(self._running) < REQUESTS_MAX and time.monotonic() >= self._begin_at:
            self._begin_at = time.monotonic() + self._rng.uniform(0, 0.03)
            self._advance(self._request())

    def _advance(self, request: Waiting) -> None:
        try:
            self._running[request] = next(request)
        except StopIteration:
            self._running.pop(request, None)

    @property
    def idle(self) -> bool:
        session = self._session
        return not (self._running or self._commits or session.open_leases or session.unconfirmed)

    @property
    def state(self) -> str:
        session = self._session
        return (
            f"{len(self._running)} requests, {self._commits} commits, {session.open_leases} open leases,"
            f" {session.unconfirmed} unconfirmed, attached {session.attached} ({session.refusal})"
        )

    @property
    def served(self) -> bool:
        """As a connector: nothing is asked for before every rank is attached."""
        session = self._session
        return (
            session.attached
            and session.registered(self._namespace)
            and session.ranks_attached == self._model.world_size
        )

    def _timed(self, name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        queued, began, cpu = queued_seconds(), self._clock(), time.thread_time()
        answer = call(*arguments)
        took = max(self._clock() - began - (queued_seconds() - queued), time.thread_time() - cpu)
        if took > CALL_SECONDS_MAX:
            self.findings.append(f"I2: {name} took {took:.2f} s of the scheduler's thread")
        return answer

    # --- requests

    def _request(self) -> Waiting:
        self._requests += 1
        request_id = f"request-{self._requests}"
        objects = prompt(self._model.spec, self._seed, self.draw_prompt())
        if not self.served:
            self.counts["unserved_requests"] += 1
            until = time.monotonic() + UNSERVED_SECONDS
            yield lambda: time.monotonic() > until
            return
        loaded = yield from self._load(request_id, objects)
        rest = [known for known in objects if known.boundary > loaded]
        if rest:
            yield from self._store(request_id, rest)
        self._timed("end_request", self._session.end_request, request_id)
        self.counts["requests"] += 1

    def draw_prompt(self) -> int:
        """A number: of the model's prompts, the first ones most often, or a fresh one, twice (`write = second_use`)."""
        if self._rng.random() >= FRESH_SHARE:
            return int(self._model.prompts * self._rng.random() ** 2)
        self._fresh += 1
        return self._fresh // 2

    def _load(self, request_id: str, objects: list[Known]) -> Generator[Callable[[], bool], None, int]:
        """Tokens that were loaded."""
        keys = b"".join(known.key for known in objects if known.kind is Kind.ATTENTION)
        found = yield from self._ask(LocateCall(b"", self._namespace, keys, 1 << 30, request_id), LOCATE_SECONDS)
        if not isinstance(found, LocateReply) or not found.boundary_tokens:
            return 0
        self.counts["located"] += 1
        boundary = found.boundary_tokens
        wanted = [one for one in objects if one.boundary <= boundary]
        wanted = [one for one in wanted if one.kind is Kind.ATTENTION or one.boundary == boundary]
        kinds = {one.kind for one in wanted if one.boundary == boundary}
        if boundary not in {one.boundary for one in wanted} or kinds != set(self._model.planner.kinds):
            self.findings.append(
                f"I7: {boundary} tokens of {objects[-1].key.hex()} were offered, which no engine stores"
            )
            return 0
        lease_id = self._session.new_lease_id()
        acquire = AcquireCall(
            b"", lease_id, self._namespace, b"".join(one.key for one in wanted),
            bytes(one.kind for one in wanted), request_id,
        )  # fmt: skip
        reply = yield from self._ask(acquire, LOAD_SECONDS)
        if not isinstance(reply, AcquireReply) or reply.outcome is not AcquireOutcome.GRANTED:
            self.counts["load_not_granted"] += 1
            return 0
        placed = yield from self._place(wanted)
        number = self._number()
        deadline = time.monotonic() + LOAD_SECONDS
        copies = yield from self._copy(Load(number, reply.arena_id, reply.extents, placed, deadline))
        self._timed("release", self._session.release, [lease_id])
        self._give_back(placed)
        failed = [copied.why for copied in copies if not copied.ok]
        if failed:
            self.counts[f"load_failed {failed[0]}"] += 1
            return 0
        self.counts["hits"] += 1
        self.counts["hit_tokens"] += boundary
        return boundary

    def _store(self, request_id: str, objects: list[Known]) -> Waiting:
        placed = yield from self._place(objects)
        self._send(Fill(placed))
        lease_id = self._session.new_lease_id()
        call = ReserveCall(
            b"", lease_id, self._namespace,
            keys=b"".join(one.key for one in objects), parents=b"".join(one.parent for one in objects),
            kinds=bytes(one.kind for one in objects),
            boundaries=struct.pack(f"<{len(objects)}I", *(one.boundary for one in objects)), request_id=request_id,
        )  # fmt: skip
        reply = yield from self._ask(call, RESERVE_SECONDS)
        granted = []
        if isinstance(reply, ReserveReply):
            outcomes = [ReserveOutcome(outcome) for outcome in reply.outcomes]
            self.counts.update(f"reserve_{outcome.name.lower()}" for outcome in outcomes)
            granted = [at for at, outcome in enumerate(outcomes) if outcome is ReserveOutcome.GRANTED]
        if granted:
            assert isinstance(reply, ReserveReply)
            yield from self._write(lease_id, reply, tuple(placed[at] for at in granted))
        self._give_back(placed)

    def _write(self, lease_id: int, reply: ReserveReply, objects: tuple[Placed, ...]) -> Waiting:
        indices = [one.index for one in objects]
        draw = self._rng.random()
        if draw < IDLE_SHARE:  # the source was reused before a rank saw it
            self._timed("abandon", self._session.abandon, lease_id)
            return
        torn = draw < IDLE_SHARE + TORN_SHARE
        copies = yield from self._copy(Store(self._number(), reply.arena_id, reply.extents, objects, torn))
        if torn or not all(copied.ok for copied in copies):
            self.counts["torn_stores" if torn else "failed_stores"] += 1
            self._timed("abandon", self._session.abandon, lease_id, indices)
            return
        self._commits += 1
        self._timed("commit", self._session.commit, lease_id, indices, self._committed)

    def _committed(self, outcomes: bytes) -> None:
        self._commits -= 1
        for outcome in outcomes:
            self.counts[f"commit_{CommitOutcome(outcome).name.lower()}"] += 1

    def _ask(self, call: Call, timeout_seconds: float) -> Generator[Callable[[], bool], None, Any]:
        got: list[Any] = []
        began = self._clock()
        self._timed("submit", self._session.submit, call, timeout_seconds, got.append)

        def over() -> bool:
            if not got and self._clock() > began + timeout_seconds + LATE_SECONDS_MAX * patience():
                got.append(None)
                self.findings.append(f"I3: {type(call).__name__} was not answered by its timeout: {self.state}")
            return bool(got)

        yield over
        if isinstance(got[0], CallFailure):
            self.counts[f"failed {type(call).__name__} {got[0].reason.value}"] += 1
        return got[0]

    # --- blocks and ranks

    def _place(self, objects: Iterable[Known]) -> Generator[Callable[[], bool], None, tuple[Placed, ...]]:
        planner = self._model.planner
        placed = []
        for index, known in enumerate(objects):
            blocks = []
            for group in planner.groups_of(known.kind):
                count = planner.blocks_in_object(group)
                free = self._free[group]
                if len(free) < count:
                    yield lambda free=free, count=count: len(free) >= count  # type: ignore[misc]
                blocks.append((group, tuple(free.pop(0) for _ in range(count))))
            placed.append(Placed(index, known, tuple(blocks)))
        return tuple(placed)

    def _give_back(self, placed: Sequence[Placed]) -> None:
        blocks = [(group, block) for one in placed for group, ids in one.blocks for block in ids]
        self._send(Free(tuple(blocks)))
        for group, block in blocks:
            self._free[group].append(block)

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers

    def _copy(self, op: Load | Store) -> Generator[Callable[[], bool], None, list[Copied]]:
        copies: list[Copied] = []
        self._copies[op.number] = copies
        self._send(op)
        yield lambda: len(copies) == len(self._ranks)
        del self._copies[op.number]
        return copies

    def _send(self, op: RankOp) -> None:
        for connection in self._ranks:
            connection.send(op)


def main(
    endpoint: str, engine_id: str, label: str, seed: int, draw: str,
    ranks: list[Connection], commands: Connection, reports: Connection,
) -> None:  # fmt: skip
    """The process. Ends when it is told to, with the harness, or with one of its ranks."""
    model = MODELS[label]
    session = DepotSession(
        Endpoint.parse(endpoint), engine_id, world_size=model.world_size, confirm_timeout_seconds=0.5
    )
    session.start()
    session.register(model.spec)
    one = Scheduler(model, session, ranks, seed, random.Random(draw))
    said_at = 0.0
    try:
        while True:
            while commands.poll():
                command = commands.recv()
                if command is Command.STOP:
                    session.close()
                    return
                one.paused = command is Command.PAUSE
            try:
                one.step()
            except (EOFError, ConnectionError):
                os._exit(RANK_DIED)
            except Exception:  # noqa: BLE001 - I3: whatever it is, it is a finding
                one.findings.append(f"I3: scheduler of {engine_id}: {traceback.format_exc()}")
            if one.findings or time.monotonic() > said_at + REPORT_SECONDS:
                said_at = time.monotonic()
                report = Report(counts=Counter(one.counts), idle=one.paused and one.idle, state=one.state)
                for finding in one.findings or [""]:
                    reports.send(replace(report, finding=finding))
                one.findings.clear()
            time.sleep(STEP_SECONDS)
    except (EOFError, ConnectionError):  # the harness is gone
        os._exit(0)
