"""The I/O workers of one path: who gets which job when, what becomes of those that do not answer.

Everything here runs on the loop's thread and never blocks. What a worker was lent comes
back only when it answered or is proven dead (I6): a worker that misses a deadline is killed
and left to the kernel, its loans stay, and another takes its place.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from kvdepot.core.errors import NoRoom
from kvdepot.server.guard import tier_guard
from kvdepot.server.io.breaker import Breaker, BreakerState, Done
from kvdepot.server.io.hands import NO_NUMBER, Worker
from kvdepot.server.io.jobs import (
    Answer,
    Append,
    Job,
    Priority,
    Probe,
    PublishFile,
    ReadFile,
    ReadObject,
    WriteObject,
)
from kvdepot.server.io.tasks import CRASHES_MAX, Task, TaskQueue
from kvdepot.server.io.wire import pack_job
from kvdepot.server.io.worker_process import WorkerProcess, WorkerSettings
from kvdepot.server.io.workers_room import processes_max as processes_max  # part of this interface
from kvdepot.server.io.workers_room import worker_reserve_bytes as worker_reserve_bytes
from kvdepot.server.tiers.base import DAMAGED, IoOutcome, Loan, UnknownWorker, WorkerRegistry

FAILING: Final = frozenset({IoOutcome.IO_ERROR, IoOutcome.TIMEOUT, IoOutcome.UNREADABLE})
"""Outcomes that speak against the path, not against an object."""
_ANSWERING: Final = frozenset({IoOutcome.OK, IoOutcome.NO_SPACE, IoOutcome.READ_ONLY})
"""Answers to a probe of a path that can be read at least; whether it can be written is the tier's to find out."""
_PROVING: Final = DAMAGED | {IoOutcome.OK}
"""Outcomes of what was done to its end."""
_READS: Final = ReadObject | ReadFile
_WRITES: Final = WriteObject | PublishFile
_PROBE: Final = Probe(".probe", write=True)
_BACKOFF_SECONDS_MIN = 0.1
_BACKOFF_SECONDS_MAX = 30.0
_STABLE_SECONDS = 10.0
_START_SECONDS = 20.0
"""What the start of a worker may take. It touches nothing of the path, and so says nothing about it.

A tenth of a second of CPU, which on a host with too much to do comes late: one that is ended for it never starts.
"""
_PATIENCE_SECONDS = 1.0
"""Jobs wait so long for a worker that has to be started again."""
_DEATH_SECONDS = 1.0
"""How long killed workers are waited for: they die at once, or hang in the kernel."""
QUICK_SECONDS: Final = 0.02
"""What an object may take for that. A load waits for what was handed out before it, twice this at most."""


class IoPool:
    """I/O workers of one path; see `submit`.

    Counts: `io_answers.<outcome>`; `io_bytes.read` and `.written`; `io_seconds.read`, `.write`, `.other` (in workers);
    `io_workers.started`, `.abandoned`, `.crashed`; `io_breaker_openings`; `io_buffered_jobs` (without O_DIRECT);
    `io_failed_callbacks`.
    """

    def __init__(
        self,
        *,
        settings: WorkerSettings,
        workers: int,
        deadline_seconds: float,
        breaker: Breaker,
        registry: WorkerRegistry | None,
        loop: asyncio.AbstractEventLoop,
        log: logging.Logger,
        count: Callable[[str, float], None],
        changed: Callable[[], None],
        failing: frozenset[IoOutcome] = FAILING,
        probe: Probe = _PROBE,
        quick_seconds: float = QUICK_SECONDS,
    ) -> None:
        """`registry` None is for a pool that is never given a loan (a journal's).

        `deadline_seconds` count from the moment a worker has a job and a thread for it.
        `changed` is called when `usable` or `direct` changed.
        `failing` outcomes, so many in a row as the breaker says, take the path out of use; `probe` brings it back.
        """
        self.breaker = breaker
        self.direct = True
        """False: the path refused O_DIRECT, or it is not safe there; its files go through the page cache."""
        self._settings = settings
        self._workers_max = workers
        self._deadline_seconds = deadline_seconds
        self._registry = registry
        self._loop = loop
        self._log = log
        self._guard = guard = tier_guard(str(settings.directory), count, log, loop.time)
        self._count = guard.safe("a count", count)
        self._changed = guard.safe("a change of state", changed)
        self._failing = failing
        self._probe_job = probe
        self._quick_seconds = quick_seconds
        self._queue = TaskQueue()
        self._numbers = 0
        self._workers: dict[WorkerProcess, Worker] = {}
        self._serving: list[Worker] = []
        self._leaving: list[Worker] = []  # get nothing more; killed, or finishing what they have
        self._prober: Worker | None = None
        self._backoff_seconds = _BACKOFF_SECONDS_MIN
        self._respawn: asyncio.TimerHandle | None = None
        self._respawn_seconds = 0.0  # how long after the last attempt
        self._probe_timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._moved = asyncio.Event()
        self._told_usable = False

    @property
    def in_flight(self) -> int:
        """Jobs in workers' hands, not answered."""
        return sum(len(worker.hand) for worker in self._workers.values())

    @property
    def queued(self) -> int:
        """Jobs that no worker has yet."""
        return len(self._queue)

    @property
    def queued_bytes(self) -> int:
        """Their payload."""
        return self._queue.payload_bytes

    @property
    def starting(self) -> int:
        """Workers that have not started yet."""
        return sum(not worker.up for worker in self._workers.values())

    @property
    def usable(self) -> bool:
        """False: every job is answered CANCELLED, because `why_unusable`."""
        return not self.why_unusable

    @property
    def why_unusable(self) -> str:
        """Empty while jobs are taken."""
        if self._closed:
            return "the pool is closed"
        if not self.breaker.closed:
            return f"out of use: {self.breaker.reason}"
        if not self._serving and self._respawn is None:
            hang = f"all {len(self._leaving)} workers hang in the kernel"
            return hang if self._leaving else "no worker was started"
        if not self._serving and self._respawn_seconds > _PATIENCE_SECONDS:
            return "no worker can be started"
        return ""

    @property
    def abandoned(self) -> int:
        """Workers that were killed and still hang in the kernel; what they were lent stays lent."""
        return sum(worker.killed for worker in self._leaving)

    @property
    def pids(self) -> tuple[int, ...]:
        """Every process that may still touch something."""
        return tuple(process.pid for process in self._workers)

    def start(self) -> None:
        """Make the workers; where the host has no room for one now, try again later."""
        self._respawn = None
        self._fill()

    def renew(self, guard: str) -> None:
        """New workers, who enter the directory with this token and open their files anew; also the first ones.

        Those that are there finish what they have in hand.
        """
        self._settings = replace(self._settings, guard=guard)
        self._retire()
        self._fill()

    def submit(
        self,
        job: Job,
        *,
        priority: Priority,
        done: Callable[[Answer], None],
        loan: Loan | None = None,
        deadline_seconds: float | None = None,
    ) -> None:
        """Queue a job behind those of its priority. `done` is called once, on the loop's thread, never from in here.

        `loan` (of the job's extents) begins when a worker gets the job, and has ended when `done` is called; it ends
        and begins anew where the worker died and another one tries again. Except:
        TIMEOUT: the worker may still touch the extents; the loan ends when it is proven dead.
        CANCELLED: the loan was refused or could not begin, the job is over a limit of `wire`, or the path is out of
        use; this time no worker was told of the job.
        IO_ERROR: also when a second worker crashed over it (for an Append the first one that ended).
        """
        seconds = self._deadline_seconds if deadline_seconds is None else deadline_seconds
        task = self._task(job, priority, done, loan, seconds)
        why = self.why_unusable or self._pack(task)
        if why:
            self._answer_soon(task, Answer(IoOutcome.CANCELLED, why))
            return
        self._queue.put(task)
        self._dispatch()

    async def close(self, seconds: float = 3.0) -> int:
        """Cancel the queue, let what workers have in hand finish for `seconds`, end the workers.

        Takes at most `seconds` and one more, whatever the kernel does. Returns how many workers hang on, killed; what
        they were lent stays written down as lent, as after a crash.
        """
        self._closed = True
        for timer in (self._respawn, self._probe_timer):
            if timer is not None:
                timer.cancel()
        self._cancel_queue()
        await self._until(lambda: not self.in_flight, seconds)
        for worker in tuple(self._workers.values()):
            for task in tuple(worker.hand.values()):
                self._expire(worker, task, "the pool was closed")
            self._kill(worker)
        await self._until(lambda: not self._workers, _DEATH_SECONDS)
        for process in self._workers:
            process.forget()
        await asyncio.sleep(0)  # the last answers
        return len(self._workers)

    async def _until(self, reached: Callable[[], bool], seconds: float) -> None:
        until = self._loop.time() + seconds
        while not reached() and (left := until - self._loop.time()) > 0:
            self._moved.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._moved.wait(), left)

    # Jobs: queue, hand out, answer.

    def _task(
        self, job: Job, priority: Priority, done: Callable[[Answer], None], loan: Loan | None, deadline_seconds: float
    ) -> Task:
        self._numbers += 1
        return Task(self._numbers, job, b"", priority, done, loan, deadline_seconds)

    def _pack(self, task: Task) -> str:
        """Empty, or why no worker can be told of it."""
        try:
            task.frame = pack_job(task.number, task.job)
        except Exception as error:  # noqa: BLE001 - whatever it is
            self._guard.caught(f"packing {type(task.job).__name__}", error)
            return f"the job cannot be packed: {error}"
        return ""

    def _dispatch(self) -> None:
        while (worker := self._free_worker()) is not None and (task := self._queue.take()) is not None:
            try:
                why = self._lend(worker, task)
            except UnknownWorker as error:
                self._queue.put(task, first=True)
                self._replace(worker, str(error))
                continue
            if why:
                self._answer_soon(task, Answer(IoOutcome.CANCELLED, why))
            else:
                self._hand(worker, task)

    def _lend(self, worker: Worker, task: Task) -> str:
        """Empty, or why nobody is told of the task. Raises UnknownWorker."""
        try:
            lent = task.loan is None or task.loan.begin(worker.number)
        except UnknownWorker:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is
            self._guard.caught("the begin of a loan", error)
            return f"the loan could not begin: {error}"
        return "" if lent else "the loan was refused"

    def _replace(self, worker: Worker, why: str) -> None:
        """Nothing can be lent to it, so that it would have each job fail, and be the next one that is free."""
        self._count("io_failed_callbacks", 1)
        self._move(worker, self._leaving)
        if not worker.hand:
            self._kill(worker)
        self._start_later(worker, why)
        self._loop.call_soon(self._fill)

    def _free_worker(self) -> Worker | None:
        """None that is starting: until it has, another may be free."""
        quick_since = self._loop.time() - self._quick_seconds
        free = [worker for worker in self._serving if worker.up and worker.takes_more(quick_since)]
        return min(free, key=lambda worker: len(worker.hand), default=None)

    def _hand(self, worker: Worker, task: Task) -> None:
        worker.hand[task.number] = task
        if worker.up:
            self._watch(worker)
        if not self._guard.call("sending a job", worker.process.send, task.frame):
            task.crashes += 1
            self._kill(worker)

    def _watch(self, worker: Worker) -> None:
        for task in worker.begun():
            if task.timer is None:
                task.timer = self._loop.call_later(task.deadline_seconds, self._overdue, worker, task)

    def _cancel_queue(self) -> None:
        while (task := self._queue.take()) is not None:
            self._answer_soon(task, Answer(IoOutcome.CANCELLED, self.why_unusable))

    def _answer_soon(self, task: Task, answer: Answer) -> None:
        self._loop.call_soon(self._answer, task, answer)

    def _answer(self, task: Task, answer: Answer) -> None:
        self._count(f"io_answers.{answer.outcome}", 1)
        self._moved.set()
        self._guard.call(f"the answer to {type(task.job).__name__}", task.done, answer)

    def _judge(self, job: Job, outcome: IoOutcome, why: str) -> None:
        """What an answer says about the path."""
        done = Done.READ if isinstance(job, _READS) else Done.WRITE if isinstance(job, _WRITES | Append) else Done.OTHER
        if outcome not in self._failing:
            self.breaker.worked(done if outcome in _PROVING else Done.OTHER)
        elif self.breaker.failed(f"{outcome}: {why}" if why else outcome, done):
            self._take_out_of_use()

    # What becomes of jobs in workers' hands.

    def started(self, worker: WorkerProcess) -> None:
        its = self._workers[worker]
        its.up = True
        self._end_start(its)
        self._watch(its)  # a probe
        self._dispatch()

    def answered(self, worker: WorkerProcess, number: int, answer: Answer) -> None:
        self._guard.call("taking an answer", self._answered, worker, number, answer)

    def _answered(self, worker: WorkerProcess, number: int, answer: Answer) -> None:
        its = self._workers[worker]
        task = its.hand.pop(number, None)
        if task is None:  # too late for its deadline, but not for the loan
            loan = its.kept.pop(number, None)
            if loan is not None:
                self._end(loan)
            return
        self._take_back(task)
        self._watch(its)
        if isinstance(task.job, _READS | _WRITES):
            its.quick = answer.seconds < self._quick_seconds
        self._note(task.job, answer)
        self._judge(task.job, answer.outcome, answer.detail)
        if its in self._leaving and not its.hand:
            self._kill(its)
        self._answer(task, answer)
        self._dispatch()

    def broken(self, worker: WorkerProcess, why: str) -> None:
        """Ended like one that crashed."""
        self._log.error("I/O worker %d of %s: %s", worker.pid, self._settings.directory, why)
        self._move(self._workers[worker], self._leaving)
        worker.kill()

    def died(self, worker: WorkerProcess, status: int) -> None:
        its = self._workers.pop(worker)
        self._end_start(its)
        self._move(its, None)
        for loan in its.kept.values():
            self._end(loan)
        for task in its.hand.values():
            if task.timer is not None and not its.killed:  # begun: it may have ended of this job
                task.crashes += 1
            self._take_back(task)
        if self._registry is not None and its.number != NO_NUMBER:
            self._guard.call("a worker's death", self._registry.dead, its.number)
        why = f"I/O worker {worker.pid} ended with {status}"
        if not its.killed:
            self._count("io_workers.crashed", 1)
            self._start_later(its, why)
        for task in reversed(its.hand.values()):  # each goes before all others
            if task.repeatable:
                self._queue.put(task, first=True)
            else:
                self._judge(task.job, IoOutcome.IO_ERROR, why)
                self._answer_soon(task, Answer(IoOutcome.IO_ERROR, why))
        self._fill()
        self._moved.set()

    def _take_back(self, task: Task) -> None:
        self._unwatch(task)
        if task.loan is not None:
            self._end(task.loan)

    @staticmethod
    def _unwatch(task: Task) -> None:
        if task.timer is not None:
            task.timer.cancel()
            task.timer = None

    def _end(self, loan: Loan) -> None:
        self._guard.call("the end of a loan", loan.end)

    def _overdue(self, worker: Worker, task: Task) -> None:
        why = f"no answer from I/O worker {worker.process.pid} within {task.deadline_seconds:g} s"
        if not worker.killed:
            self._count("io_workers.abandoned", 1)
            if self.breaker.closed:  # else it is a probe of a path of which all is said
                self._log.warning("%s: %s; it is killed and left to the kernel", self._settings.directory, why)
        self._kill(worker)
        self._judge(task.job, IoOutcome.TIMEOUT, why)
        self._expire(worker, task, why)
        for other in worker.hand.values():
            if other.timer is None:  # it was not begun, which only the death of the worker proves
                other.timer = self._loop.call_later(_DEATH_SECONDS, self._expire, worker, other, why)
        self._fill()

    def _expire(self, worker: Worker, task: Task, why: str) -> None:
        """Answer without the worker, who keeps the loan."""
        self._unwatch(task)
        del worker.hand[task.number]
        if task.loan is not None:
            worker.kept[task.number] = task.loan
        self._answer_soon(task, Answer(IoOutcome.TIMEOUT, why))

    def _note(self, job: Job, answer: Answer) -> None:
        reads, writes = isinstance(job, _READS), isinstance(job, _WRITES)
        self._count(f"io_seconds.{'read' if reads else 'write' if writes else 'other'}", answer.seconds)
        if answer.outcome is IoOutcome.OK and (reads or writes or isinstance(job, Append)) and not answer.already_there:
            self._count("io_bytes.read" if reads else "io_bytes.written", answer.stored_bytes)
        if not answer.direct:
            self._count("io_buffered_jobs", 1)
        if self.direct and not answer.direct:
            self.direct = False
            self._log.warning("%s: no O_DIRECT here, its files go through the page cache", self._settings.directory)
            self._loop.call_soon(self._changed)

    # Workers: made, replaced, ended.

    def _fill(self) -> None:
        """As many workers as there should be, unless too many processes hang already."""
        while (
            self.breaker.closed and not self._closed and self._respawn is None
            and len(self._serving) < self._workers_max
            and len(self._workers) < 2 * self._workers_max
        ):  # fmt: skip
            worker = self._spawn()
            if worker is None:
                break
            self._serving.append(worker)
        if self.usable:
            self._dispatch()
        else:
            self._cancel_queue()
        self._tell()

    def _tell(self) -> None:
        if self.usable != self._told_usable:
            self._told_usable = self.usable
            self._loop.call_soon(self._changed)

    def _spawn(self) -> Worker | None:
        """None where there is no room for another process now; tried again later."""
        now = self._loop.time()
        try:
            process = WorkerProcess(self._settings, self._loop, self)
        except Exception as error:  # noqa: BLE001 - there is no room, or whatever it is
            self._cannot("started", error)
            return None
        worker = Worker(process, NO_NUMBER, now)
        self._workers[process] = worker
        try:
            if self._registry is not None:
                worker.number = self._registry.started(process.pid)
        except Exception as error:  # noqa: BLE001 - the table is full, or whatever it is
            self._kill(worker)
            self._cannot("registered", error)
            return None
        self._count("io_workers.started", 1)
        worker.start_timer = self._loop.call_later(_START_SECONDS, self._start_overdue, worker)
        return worker

    def _cannot(self, what: str, error: Exception) -> None:
        if not isinstance(error, OSError | NoRoom):
            self._guard.caught(f"a worker that is to be {what}", error)
        why = error.message if isinstance(error, NoRoom) else str(error)
        self._start_later(None, f"no I/O worker can be {what}: {why}")

    def _start_overdue(self, worker: Worker) -> None:
        why = f"I/O worker {worker.process.pid} has not started within {_START_SECONDS:g} s"
        self._count("io_workers.abandoned", 1)
        self._kill(worker)
        self._start_later(None, why)
        for task in tuple(worker.hand.values()):  # a probe
            self._expire(worker, task, why)
        self._fill()

    def _end_start(self, worker: Worker) -> None:
        if worker.start_timer is not None:
            worker.start_timer.cancel()

    def _start_later(self, crashed: Worker | None, why: str) -> None:
        if self._closed or self._respawn is not None:
            return
        if crashed is not None and self._loop.time() - crashed.started_at > _STABLE_SECONDS:
            self._backoff_seconds = _BACKOFF_SECONDS_MIN
        seconds = self._backoff_seconds
        self._log.warning("%s: %s; the next one starts in %.1f s", self._settings.directory, why, seconds)
        self._respawn = self._loop.call_later(seconds, self.start)
        self._respawn_seconds = seconds
        self._backoff_seconds = min(seconds * 2, _BACKOFF_SECONDS_MAX)

    def _kill(self, worker: Worker) -> None:
        """Its death is not waited for."""
        self._move(worker, self._leaving)
        self._end_start(worker)
        if not worker.killed:
            worker.killed = True
            worker.process.kill()

    def _move(self, worker: Worker, to: list[Worker] | None) -> None:
        for workers in (self._serving, self._leaving):
            if worker in workers:
                workers.remove(worker)
        if worker is self._prober:
            self._prober = None
        if to is not None:
            to.append(worker)

    # The breaker.

    def _take_out_of_use(self) -> None:
        """Workers end too: those that come after the probe open their files anew."""
        self._count("io_breaker_openings", 1)
        self._log.warning("%s is out of use: %s", self._settings.directory, self.breaker.reason)
        self._retire()
        self._cancel_queue()
        self._probe_later()
        self._tell()

    def _retire(self) -> None:
        """Serving workers get nothing more; idle ones end at once."""
        for worker in tuple(self._serving):
            if worker.hand:
                self._move(worker, self._leaving)
            else:
                self._kill(worker)

    def _probe_later(self) -> None:
        if not self._closed:
            self._probe_timer = self._loop.call_later(self.breaker.probe_in_seconds, self._probe)

    def _probe(self) -> None:
        """By a worker of its own: others may hang, or hold files of a mount that is gone."""
        self._probe_timer = None
        self.breaker.start_probe()
        if len(self._workers) >= processes_max(self._workers_max):
            self._probed(Answer(IoOutcome.TIMEOUT, f"all {len(self._workers)} workers hang in the kernel"))
            return
        self._prober = worker = self._spawn()
        if worker is None:
            self._probed(Answer(IoOutcome.IO_ERROR, "no worker can be started"))
            return
        task = self._task(self._probe_job, Priority.TEND, self._probed, None, self._deadline_seconds)
        task.crashes = CRASHES_MAX
        if why := self._pack(task):
            self._probed(Answer(IoOutcome.IO_ERROR, why))
        else:
            self._hand(worker, task)

    def _probed(self, answer: Answer) -> None:
        prober, self._prober = self._prober, None
        if self._closed or self.breaker.state is not BreakerState.PROBING:
            return
        if answer.outcome not in _ANSWERING:
            self.breaker.probe_failed(f"{answer.outcome}: {answer.detail}")
            if prober is not None:
                self._kill(prober)
            self._probe_later()
            return
        self.breaker.probe_worked()
        self._log.warning("%s is in use again", self._settings.directory)
        if prober is not None:
            self._serving.append(prober)
        self._fill()
