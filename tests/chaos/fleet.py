"""The engines of a chaos run, as the harness sees them: processes to start, stop and kill, and what they report."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Final

from tests.chaos import rank, scheduler
from tests.chaos.messages import Command, Report
from tests.chaos.models import Model
from tests.rigs.patience import patience

_STOP_SECONDS: Final = 10.0
_QUIET_SECONDS_MAX: Final = 60.0
"""Without a report of a process that was not stopped."""
_ENDED: Final = {0, scheduler.RANK_DIED, -signal.SIGKILL}
_PRELOADED: Final = ["tests.chaos.harness"]
"""All that a process imports, the module that the run was started by too: it is imported again in every one."""


class Engine:
    """One engine. Restarted, it is the same one with other processes."""

    def __init__(self, engine_id: str, model: Model, endpoint: str, seed: int, plant: bool) -> None:
        self.engine_id = engine_id
        self.model = model
        self._endpoint = endpoint
        self._seed = seed
        self._plant = plant
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOADED)  # torch is imported once, not once a process
        self._starts = 0
        self._before: Counter[str] = Counter()  # of processes that have ended
        self._counts: dict[Connection, Counter[str]] = {}
        self._heard_at: dict[Connection, float] = {}
        self._commands: Connection | None = None
        self.processes: list[multiprocessing.process.BaseProcess] = []  # scheduler first
        self.stopped: set[int] = set()
        self.last: Report = Report()
        self.paused = False

    def start(self) -> None:
        assert not self.processes
        self._starts += 1
        self.last = Report()
        ranks: list[Connection] = []
        theirs: list[Connection] = []
        for number in range(self.model.world_size):
            ours, ops = self._context.Pipe()
            ranks.append(ours)
            theirs.append(ops)
            self._spawn(rank.main, self.engine_id, self.model.label, number, self._seed, self._plant, ops)
        commands, self._commands = self._context.Pipe(duplex=False)
        draw = f"{self._seed} {self.engine_id} {self._starts}"
        self._spawn(scheduler.main, self.engine_id, self.model.label, self._seed, draw, ranks, commands)
        self.processes.reverse()
        for connection in (*ranks, *theirs, commands):
            connection.close()
        self.command(Command.PAUSE if self.paused else Command.GO_ON)

    def _spawn(self, main: Callable[..., None], *arguments: object) -> None:
        ours, reports = self._context.Pipe(duplex=False)
        process = self._context.Process(target=main, args=(self._endpoint, *arguments, reports), daemon=True)
        process.start()
        reports.close()
        self._counts[ours] = Counter()
        self._heard_at[ours] = time.monotonic()
        self.processes.append(process)

    @property
    def pids(self) -> list[int]:
        """Scheduler first, then the ranks from the last one to the first."""
        return [process.pid for process in self.processes if process.pid is not None]

    @property
    def alive(self) -> bool:
        return bool(self.processes) and all(process.is_alive() for process in self.processes)

    @property
    def counts(self) -> Counter[str]:
        return sum(self._counts.values(), self._before.copy())

    def command(self, command: Command) -> None:
        self.paused = command is Command.PAUSE
        self.last = Report()
        if self._commands is not None:
            with contextlib.suppress(ConnectionError):
                self._commands.send(command)

    def signal(self, pid: int, number: signal.Signals) -> None:
        """To one of its processes; one that has ended is left alone: its pid may be another's by now."""
        for process in self.processes:
            if process.pid == pid and process.exitcode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
                if number is signal.SIGKILL:
                    process.join(_STOP_SECONDS * patience())  # the fork server may be late, and `repair` looks once
        if number is signal.SIGSTOP:
            self.stopped.add(pid)
        elif number is signal.SIGCONT:
            self.stopped.discard(pid)

    def kill(self) -> list[str]:
        """All that is left of it. Answers what was wrong with how its processes had ended before."""
        wrong = []
        for process in self.processes:
            if process.exitcode is not None and process.exitcode not in _ENDED:
                wrong.append(f"I3: a process of {self.engine_id} ended with {process.exitcode}")
            process.kill()
            process.join(_STOP_SECONDS * patience())
        self.stopped.clear()
        wrong += self.read()
        for connection, counts in self._counts.items():
            self._before += counts
            connection.close()
        self._counts.clear()
        self._heard_at.clear()
        self.processes.clear()
        return wrong

    def read(self) -> list[str]:
        """Take in reports. Answers findings."""
        findings = []
        for connection in self._counts:
            with contextlib.suppress(EOFError, OSError):  # ended, or killed over half a report
                while connection.poll():
                    report: Report = connection.recv()
                    self._counts[connection] = report.counts or self._counts[connection]
                    self._heard_at[connection] = time.monotonic()
                    if report.state:
                        self.last = report
                    if report.finding:
                        findings.append(f"{self.engine_id}: {report.finding}")
        silent = time.monotonic() - min(self._heard_at.values(), default=time.monotonic())
        if self.alive and not self.stopped and silent > _QUIET_SECONDS_MAX * patience():
            findings.append(f"I2: a process of {self.engine_id} is silent for {silent:.0f} s")
        return findings

    def go_on(self) -> None:
        """No process is stopped."""
        for pid in list(self.stopped):
            self.signal(pid, signal.SIGCONT)
        self._heard_at = dict.fromkeys(self._heard_at, time.monotonic())

    def end(self) -> list[str]:
        """Orderly."""
        self.go_on()
        self.command(Command.STOP)
        for process in self.processes:
            process.join(_STOP_SECONDS * patience())
        left = [process.pid for process in self.processes if process.exitcode is None]
        wrong = [f"I3: {self.engine_id} does not end: processes {left}"] if left else []
        return wrong + self.kill()


class Fleet:
    """All engines."""

    def __init__(self, models: Mapping[str, Model], endpoint: str, seed: int, *, plant: bool = False) -> None:
        self.engines = [Engine(engine_id, model, endpoint, seed, plant) for engine_id, model in models.items()]

    def start(self) -> None:
        for engine in self.engines:
            engine.start()

    def read(self) -> list[str]:
        return [finding for engine in self.engines for finding in engine.read()]

    @property
    def idle(self) -> bool:
        """As of what was reported since they were told to pause."""
        return all(engine.last.idle and engine.alive for engine in self.engines)

    @property
    def counts(self) -> Counter[str]:
        return sum((engine.counts for engine in self.engines), Counter())

    def repair(self) -> list[str]:
        """Engines that lost a process lose the others too, as theirs do, and start anew."""
        findings = []
        for engine in self.engines:
            engine.go_on()
            if not engine.alive:
                findings += engine.kill()
                engine.start()
        return findings

    def command(self, command: Command) -> None:
        for engine in self.engines:
            engine.command(command)

    def end(self) -> list[str]:
        return [finding for engine in self.engines for finding in engine.end()]

    def close(self) -> None:
        for engine in self.engines:
            engine.kill()
