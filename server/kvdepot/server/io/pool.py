"""The I/O workers of one path: who gets which job when, what becomes of those that do not answer.

Everything here runs on the loop's thread and never blocks. What a worker was lent comes
back only when it answered or is proven dead (I6): a worker that misses a deadline is killed
and not waited for, its loans stay, and another takes its place.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final

from kvdepot.server.io.breaker import Breaker, BreakerState
from kvdepot.server.io.crew import Crew
from kvdepot.server.io.jobs import Answer, Job, Priority, Probe
from kvdepot.server.io.path_answers import FAILING as FAILING  # part of this interface
from kvdepot.server.io.path_answers import READS, WRITES, PathAnswers
from kvdepot.server.io.task_loans import TaskLoans
from kvdepot.server.io.tasks import CRASHES_MAX, Task, TaskQueue, pack
from kvdepot.server.io.worker_jobs import Worker
from kvdepot.server.io.worker_process import WorkerProcess, WorkerSettings
from kvdepot.server.io.workers_room import processes_max as processes_max  # part of this interface
from kvdepot.server.io.workers_room import worker_reserve_bytes as worker_reserve_bytes
from kvdepot.server.platform.guard import tier_guard
from kvdepot.server.platform.progress import Progress
from kvdepot.server.storage.base import IoOutcome, Loan, UnknownWorker, WorkerRegistry

_ANSWERING: Final = frozenset({IoOutcome.OK, IoOutcome.NO_SPACE, IoOutcome.READ_ONLY})
"""Answers to a probe of a path that can be read at least; whether it can be written is the tier's to find out."""
_PROBE: Final = Probe(".probe")
_DEATH_SECONDS = 1.0
"""How long killed workers are waited for: they die at once, or hang in the kernel."""
QUICK_SECONDS: Final = 0.02
"""An object that takes less is quick. A load waits for what was handed out before it, twice this at most."""


class IoPool:
    """I/O workers of one path; see `submit`.

    Counts: `io_answers.<outcome>`; `io_bytes.read` and `.written`; `io_seconds.read`, `.write`, `.other` (in workers);
    `io_workers.started`, `.overdue`, `.abandoned`, `.crashed`; `io_breaker_openings`; `io_buffered_jobs` (without
    O_DIRECT); `io_failed_callbacks`.
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
        """Build a pool without workers. `registry` None is for a pool that is never given a loan (a journal's).

        `deadline_seconds` count from when a worker has a job and a thread for it, while this process runs.
        `changed` is called when `usable` or `direct` changed.
        `failing` outcomes, so many in a row as the breaker says, disable the path; `probe` re-enables it.
        """
        self.breaker = breaker
        self._workers_max = workers
        self._deadline_seconds = deadline_seconds
        self._loop = loop
        self._log = log
        self._guard = guard = tier_guard(str(settings.directory), count, log, loop.time)
        self._count = guard.safe("a count", count)
        self._changed = guard.safe("a change of state", changed)
        self._answers = PathAnswers(
            breaker, settings.directory, failing=failing, log=log, count=self._count,
            changed=self._changed_soon,
        )  # fmt: skip
        self._probe_job = probe
        self._quick_seconds = quick_seconds
        self._queue = TaskQueue()
        self._loans = TaskLoans(guard)
        self._numbers = 0
        self._crew = Crew(
            settings, listener=self, registry=registry, loop=loop, log=log, count=self._count, guard=guard
        )
        self._probe_timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._progress = Progress()
        self._told_usable = False

    @property
    def direct(self) -> bool:
        """Return whether the path takes O_DIRECT. Otherwise its files go through the page cache."""
        return self._answers.direct

    @property
    def in_flight(self) -> int:
        """Return the number of jobs that workers have and have not answered."""
        return sum(len(worker.inflight) for worker in self._crew.workers.values())

    @property
    def queued(self) -> int:
        """Return the number of jobs that no worker has yet."""
        return len(self._queue)

    @property
    def queued_bytes(self) -> int:
        """Return the payload bytes of the queued jobs."""
        return self._queue.payload_bytes

    @property
    def starting(self) -> int:
        """Return the number of workers that have not started yet."""
        return sum(not worker.up for worker in self._crew.workers.values())

    @property
    def usable(self) -> bool:
        """Return whether jobs are taken. If not, every job is answered CANCELLED, because of `why_unusable`."""
        return not self.why_unusable

    @property
    def why_unusable(self) -> str:
        """Return why no jobs are taken; empty while they are taken."""
        if self._closed:
            return "the pool is closed"
        if not self.breaker.closed:
            return f"disabled: {self.breaker.reason}"
        return self._crew.why_none_serves

    @property
    def abandoned(self) -> int:
        """Return the number of killed workers that still hang in the kernel. What they were lent stays lent."""
        return sum(worker.killed for worker in self._crew.leaving)

    @property
    def pids(self) -> tuple[int, ...]:
        """Return the pid of every process that may still touch something."""
        return tuple(process.pid for process in self._crew.workers)

    def start(self) -> None:
        """Make the workers; where the host has no room for one now, try again later."""
        self._fill()

    def renew(self, guard: str, peer: str = "") -> None:
        """Make new workers, also the first ones. They enter the directory with this token, and open their own files.

        `peer`: packed `PeerSettings` for them. The workers of before finish their jobs in flight.
        """
        self._crew.renew(guard, peer)
        self._crew.retire()
        self._fill()

    def serve_peer(self, path: Path, peer: str) -> None:
        """Have the workers, which have had no job yet, serve this peer: `renew`, for spare workers."""
        self._answers.path = path
        self._crew.serve_peer(path, peer)

    def submit(
        self,
        job: Job,
        *,
        priority: Priority,
        done: Callable[[Answer], None],
        loan: Loan | None = None,
        deadline_seconds: float | None = None,
    ) -> None:
        """Queue a job after those of its priority. `done` is called once, on the loop's thread, never from in here.

        `loan` (of the job's extents) begins when a worker gets the job, and has ended when `done` is called. It ends
        and begins again if the worker died and another one tries the job. Except:
        TIMEOUT: the worker may still touch the extents; the loan ends when the worker is proven dead.
        CANCELLED: the loan was refused or could not begin, the job is over a limit of `jobs`, or the path is
        disabled. This time no worker was told of the job.
        IO_ERROR: also when a second worker crashed over it (for an Append the first one that ended).
        """
        seconds = self._deadline_seconds if deadline_seconds is None else deadline_seconds
        task = self._task(job, priority, done, loan, seconds)
        why = self.why_unusable or pack(task, self._guard)
        if why:
            self._answer_soon(task, Answer(IoOutcome.CANCELLED, why))
            return
        self._queue.put(task)
        self._dispatch()

    async def close(self, seconds: float = 3.0) -> int:
        """Cancel the queue, let jobs in flight finish for `seconds`, end the workers.

        Takes at most `seconds` and one more, whatever the kernel does. Returns how many workers hang on, killed; what
        they were lent stays written down as lent, as after a crash.
        """
        await self._end_workers(seconds)
        self._crew.forget()
        await asyncio.sleep(0)  # the last answers
        return len(self._crew.workers)

    async def leave(self, seconds: float = 3.0) -> None:
        """Close while the daemon runs. Return when all workers are proven dead, and so all loans have ended.

        Nothing else would prove that a worker that hangs in the kernel is dead. So this waits without a limit, until
        it is cancelled. `close` then ends what is left.
        """
        await self._end_workers(seconds)
        await self._progress.until(lambda: not self._crew.workers)

    async def _end_workers(self, seconds: float) -> None:
        self._closed = True
        self._crew.close()
        if self._probe_timer is not None:
            self._probe_timer.cancel()
        self._cancel_queue()
        await self._progress.until(lambda: not self.in_flight, seconds)
        for worker in tuple(self._crew.workers.values()):
            for task in tuple(worker.inflight.values()):
                self._expire(worker, task, "the pool was closed")
            self._crew.kill(worker)
        await self._progress.until(lambda: not self._crew.workers, _DEATH_SECONDS)

    # Jobs: queue, hand out, answer.

    def _task(
        self, job: Job, priority: Priority, done: Callable[[Answer], None], loan: Loan | None, deadline_seconds: float
    ) -> Task:
        self._numbers += 1
        return Task(self._numbers, job, b"", priority, done, loan, deadline_seconds)

    def _dispatch(self) -> None:
        while self._queue and (worker := self._crew.free(self._quick_seconds)) is not None:
            task = self._queue.take()
            try:
                why = self._loans.begin(task, worker.number)
            except UnknownWorker as error:
                self._queue.put(task, first=True)
                self._replace(worker, str(error))
                continue
            if why:
                self._answer_soon(task, Answer(IoOutcome.CANCELLED, why))
            else:
                self._assign(worker, task)

    def _replace(self, worker: Worker, why: str) -> None:
        """Replace a worker to which nothing can be lent.

        Each of its jobs would fail, and it would be the next worker that is free.
        """
        self._count("io_failed_callbacks", 1)
        self._crew.leave(worker)
        if not worker.inflight:
            self._crew.kill(worker)
        self._crew.start_later(worker, why)
        self._loop.call_soon(self._fill)

    def _assign(self, worker: Worker, task: Task) -> None:
        worker.inflight[task.number] = task
        if worker.up:
            self._watch(worker)
        if not self._guard.call("sending a job", worker.process.send, task.frame):
            task.crashes += 1
            self._crew.kill(worker)

    def _watch(self, worker: Worker) -> None:
        for task in worker.begun():
            if task.timer is None:
                task.watch(self._loop, task.deadline_seconds, self._overdue, worker, task)

    def _cancel_queue(self) -> None:
        while self._queue:
            task = self._queue.take()
            self._answer_soon(task, Answer(IoOutcome.CANCELLED, self.why_unusable))

    def _answer_soon(self, task: Task, answer: Answer) -> None:
        self._loop.call_soon(self._answer, task, answer)

    def _answer(self, task: Task, answer: Answer) -> None:
        self._count(f"io_answers.{answer.outcome}", 1)
        self._progress.moved()
        self._guard.call(f"the answer to {type(task.job).__name__}", task.done, answer)

    def _judge(self, job: Job, outcome: IoOutcome, why: str) -> None:
        if self._answers.judge(job, outcome, why):
            self._disable()

    # What becomes of jobs in flight.

    def started(self, worker: WorkerProcess) -> None:
        its = self._crew.started(worker)
        self._watch(its)  # a probe
        self._tell()
        self._dispatch()

    def answered(self, worker: WorkerProcess, number: int, answer: Answer) -> None:
        self._guard.call("taking an answer", self._answered, worker, number, answer)

    def _answered(self, worker: WorkerProcess, number: int, answer: Answer) -> None:
        its = self._crew.workers[worker]
        task = its.inflight.pop(number, None)
        if task is None:  # too late for its deadline, but not for the loan
            loan = its.kept.pop(number, None)
            if loan is not None:
                self._loans.end(loan)
            return
        self._take_back(task)
        self._watch(its)
        if isinstance(task.job, READS | WRITES):
            its.took(answer.seconds, self._quick_seconds)
        self._answers.note(task.job, answer)
        self._judge(task.job, answer.outcome, answer.detail)
        if its in self._crew.leaving and not its.inflight:
            self._crew.kill(its)
        self._answer(task, answer)
        self._dispatch()

    def broken(self, worker: WorkerProcess, why: str) -> None:
        """End a worker like one that crashed."""
        self._log.error("I/O worker %d of %s: %s", worker.pid, self._answers.path, why)
        self._crew.leave(self._crew.workers[worker])
        worker.kill()

    def died(self, worker: WorkerProcess, status: int) -> None:
        its = self._crew.remove(worker)
        for loan in its.kept.values():
            self._loans.end(loan)
        for task in its.inflight.values():
            if task.timer is not None and not its.killed:  # begun: it may have ended of this job
                task.crashes += 1
            self._take_back(task)
        self._crew.unregister(its)
        why = f"I/O worker {worker.pid} ended with {status}"
        if not its.killed:
            self._count("io_workers.crashed", 1)
            self._crew.start_later(its, why)
        for task in reversed(its.inflight.values()):  # each goes before all others
            if task.repeatable:
                self._queue.put(task, first=True)
            else:
                self._judge(task.job, IoOutcome.IO_ERROR, why)
                self._answer_soon(task, Answer(IoOutcome.IO_ERROR, why))
        self._fill()
        self._progress.moved()

    def _take_back(self, task: Task) -> None:
        task.unwatch()
        if task.loan is not None:
            self._loans.end(task.loan)

    def _overdue(self, worker: Worker, task: Task) -> None:
        why = f"no answer from I/O worker {worker.process.pid} within {task.deadline_seconds:g} s"
        if not worker.killed:
            self._count("io_workers.overdue", 1)
            if self.breaker.closed:  # else it is a probe of a path that is disabled already
                self._log.warning("%s: %s; it is killed", self._answers.path, why)
        self._crew.kill(worker)
        self._judge(task.job, IoOutcome.TIMEOUT, why)
        self._expire(worker, task, why)
        for other in worker.inflight.values():
            if other.timer is None:  # it was not begun, which only the death of the worker proves
                other.watch(self._loop, _DEATH_SECONDS, self._expire, worker, other, why)
        self._fill()

    def _expire(self, worker: Worker, task: Task, why: str) -> None:
        """Answer without the worker, who keeps the loan."""
        task.unwatch()
        del worker.inflight[task.number]
        if task.loan is not None:
            worker.kept[task.number] = task.loan
        self._answer_soon(task, Answer(IoOutcome.TIMEOUT, why))

    # Workers: made, replaced, ended.

    def _fill(self) -> None:
        """Start as many workers as there should be, unless too many processes already hang."""
        while (
            self.breaker.closed and not self._closed and not self._crew.waits
            and len(self._crew.serving) < self._workers_max
            and len(self._crew.workers) < 2 * self._workers_max
        ):  # fmt: skip
            worker = self._crew.spawn()
            if worker is None:
                break
            self._crew.serving.append(worker)
        if self.usable:
            self._dispatch()
        else:
            self._cancel_queue()
        self._tell()

    def _changed_soon(self) -> None:
        self._loop.call_soon(self._changed)

    def _tell(self) -> None:
        if self.usable != self._told_usable:
            self._told_usable = self.usable
            self._changed_soon()

    def start_overdue(self, worker: Worker, why: str) -> None:
        for task in tuple(worker.inflight.values()):  # a probe
            self._expire(worker, task, why)
        self._fill()

    # The breaker.

    def _disable(self) -> None:
        """Disable the path. Its workers end too: those after the probe open their own files."""
        self._count("io_breaker_openings", 1)
        self._log.warning("%s is disabled: %s", self._answers.path, self.breaker.reason)
        self._crew.retire()
        self._cancel_queue()
        self._probe_later()
        self._tell()

    def _probe_later(self) -> None:
        if not self._closed:
            self._probe_timer = self._loop.call_later(self.breaker.probe_in_seconds, self._probe)

    def _probe(self) -> None:
        """Probe the path with an extra worker. Other workers may hang, or hold files of a mount that is gone."""
        self._probe_timer = None
        self.breaker.start_probe()
        if len(self._crew.workers) >= processes_max(self._workers_max):
            self._probed(Answer(IoOutcome.TIMEOUT, f"all {len(self._crew.workers)} workers hang in the kernel"))
            return
        self._crew.prober = worker = self._crew.spawn()
        if worker is None:
            self._probed(Answer(IoOutcome.IO_ERROR, "no worker can be started"))
            return
        task = self._task(self._probe_job, Priority.TEND, self._probed, None, self._deadline_seconds)
        task.crashes = CRASHES_MAX
        if why := pack(task, self._guard):
            self._probed(Answer(IoOutcome.IO_ERROR, why))
        else:
            self._assign(worker, task)

    def _probed(self, answer: Answer) -> None:
        prober, self._crew.prober = self._crew.prober, None
        if self._closed or self.breaker.state is not BreakerState.PROBING:
            return
        if answer.outcome not in _ANSWERING:
            self.breaker.probe_failed(f"{answer.outcome}: {answer.detail}")
            if prober is not None:
                self._crew.kill(prober)
            self._probe_later()
            return
        self.breaker.probe_worked()
        self._log.warning("%s is re-enabled", self._answers.path)
        if prober is not None:
            self._crew.serving.append(prober)
        self._fill()
