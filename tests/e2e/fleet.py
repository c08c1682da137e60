"""One daemon and the engines of a test session, whole again at the start of each test."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future, wait
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvdepot.client.ctl.calls import connect
from kvdepot.client.ctl.explaining import record_lines
from kvdepot.client.endpoint import Endpoint
from kvdepot.core.errors import NotFound
from kvdepot.core.report import SessionStatus

from demo.daemon import Daemon, DaemonProcessError, Served
from demo.engine import (
    LOAD_ALWAYS,
    Adapter,
    Answer,
    Engine,
    EngineOptions,
    EngineProcessError,
    depot_connector,
    start_process,
)
from demo.scenarios import await_lookups
from demo.toys import Toy, make_toy, prompt
from tests.e2e.forked import start_forked
from tests.rigs.patience import Deadline, patience

CONFIGURATION = 'capacity = "1GiB"\n'
"""Room for all that the tests of a session store: nothing goes that one of them expects to find."""
LOOKUP_TIMEOUT_SECONDS = 5.0
"""Tests share their cores: with the default of 0.05 a delay would look like a miss."""
FREE_CORES = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""vLLM would have the ranks of all engines compute, and import, on the same core. Numba drafts for ngram, and sets
OpenMP's number of threads to its own: on a busy machine each operation would wait for the thread that has no core."""
TRIES = 4
TOLD_TIMEOUT_SECONDS = 10.0


START_TIMEOUT_SECONDS = 240.0
ATTACH_TIMEOUT_SECONDS = 60.0

AuditMark = dict[Path, int]
"""Lines by audit file."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """One request, as vLLM and as the daemon saw it."""

    answer: Answer
    served: Served

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.answer.tokens

    @property
    def external_tokens(self) -> int:
        return self.answer.external_tokens

    @property
    def local_tokens(self) -> int:
        return self.answer.local_tokens


def attached(sessions: Sequence[SessionStatus], engines: Sequence[AbstractSet[int]]) -> bool:
    """Whether each of these, by the pids of its processes, has one session with all ranks, and nobody's is left over.

    A session of another process that lives is not ours to wait for.
    """
    for processes in engines:
        own = [session for session in sessions if not processes.isdisjoint(session.pids)]
        if [(one.scheduler_attached, one.ranks_attached == one.world_size) for one in own] != [(True, True)]:
            return False
    return all(any(Path(f"/proc/{pid}").exists() for pid in session.pids) for session in sessions)


def _launch(engine: Engine) -> Future[Any]:
    try:
        return engine.launch()
    except EngineProcessError as error:
        failed: Future[Any] = Future()
        failed.set_exception(error)
        return failed


def _wait_ready(engine: Engine, launched: Future[Any]) -> None:
    deadline = Deadline(START_TIMEOUT_SECONDS)
    while not wait([launched], 1.0).done:
        if deadline.is_over():
            raise EngineProcessError(f"not ready within {START_TIMEOUT_SECONDS:.0f} s (log: {engine.log})")
    engine.wait_ready(launched)


class Fleet:
    """`engine(name)` gives a running engine with an empty cache, attached to a running, idle daemon."""

    def __init__(
        self, directory: Path, models: Path, tiers: str = "", *, of_daemon: str = "", program: Sequence[str] = ()
    ) -> None:
        """`tiers`: TOML behind the RAM tier's. `of_daemon`, `program`: as `Daemon` has them."""
        self.daemon = Daemon(CONFIGURATION + tiers, patience, of_daemon=of_daemon, program=program)
        self.directory = directory
        self.models = models
        self._options: dict[str, EngineOptions] = {}
        self._running: dict[str, Engine] = {}
        self._fresh: set[str] = set()  # of those: nobody has asked them anything yet
        self.refused: dict[str, EngineProcessError] = {}  # by engines that were started and do not serve
        self._prompts = itertools.count()

    def define(
        self,
        name: str,
        toy: Toy,
        arguments: dict[str, Any],
        *,
        model: Path | None = None,
        environment: Mapping[str, str] | None = None,
        connector_class: tuple[str, str] | None = None,
        role: str = "kv_both",
        **connector: Any,
    ) -> None:
        """Say how to start an engine.

        Args:
            model: folder of other weights than the toy's.
            connector_class: name and module of another one than kvdepot's own.
            role: vLLM's `kv_role`.
        """
        patient = {"lookup_timeout_seconds": LOOKUP_TIMEOUT_SECONDS, "lookup_min_seconds": LOOKUP_TIMEOUT_SECONDS}
        settings = {**patient, "load_weight": LOAD_ALWAYS} | connector
        transfer = depot_connector(self.daemon.endpoint, **settings) | {"kv_role": role}
        if connector_class is not None:
            transfer["kv_connector"], transfer["kv_connector_module_path"] = connector_class
        self._options[name] = EngineOptions(
            toy,
            model or make_toy(toy, self.models),
            transfer,
            arguments,
            {"KVDEPOT_AUDIT_PATH": str(self.directory / f"audit-{name}"), **FREE_CORES, **(environment or {})},
        )

    def options(self, name: str) -> EngineOptions:
        return self._options[name]

    def ensure_daemon(self) -> Daemon:
        if not self.daemon.running:
            self.daemon.start()
        return self.daemon

    def launch(self, names: Iterable[str], *, fresh: bool = False) -> None:
        """Start engines that do not run, side by side. Return when each serves or is among the `refused`.

        Args:
            fresh: whether to start them as a user does, from processes that share nothing with other engines'.
        """
        start = start_process if fresh else start_forked
        starting = {
            name: Engine(self._options[name], self.log(name), start, patience)
            for name in names
            if name not in self._running
        }
        with ExitStack() as stack:  # also where a test's timeout ends a set-up: nothing stays that no test knows
            for name, engine in starting.items():
                stack.callback(self._drop, name, engine)
            launched = {name: _launch(engine) for name, engine in starting.items()}
            for name, engine in starting.items():
                try:
                    _wait_ready(engine, launched[name])
                except EngineProcessError as error:
                    self.refused[name] = error
                    engine.kill()
                else:
                    self._running[name] = engine
                    self._fresh.add(name)

    def _drop(self, name: str, engine: Engine) -> None:
        if self._running.get(name) is not engine:
            engine.kill()

    def start(self, name: str, *, fresh: bool = False) -> Engine:
        """Start an engine that does not run. Raise EngineProcessError where it does not serve."""
        assert name not in self._running
        self.launch([name], fresh=fresh)
        if name in self.refused:
            raise self.refused.pop(name)
        return self._running[name]

    def running(self, name: str) -> Engine | None:
        """The engine as it is, whatever it is doing; None where it does not run."""
        return self._running.get(name)

    @property
    def names_running(self) -> set[str]:
        return set(self._running)

    def log(self, name: str) -> Path:
        return self.directory / f"{name}.log"

    def engine(self, name: str) -> Engine:
        try:
            return self._whole(name)
        except (DaemonProcessError, EngineProcessError) as error:
            # A test has left something behind that does not go away: that test's failure, not the next one's.
            print(f"all starts anew, with nothing stored: {name}: {error}")  # in the report of a test that fails by it
            for other in list(self._running):
                self.end(other, kill=True)
            self.daemon.kill()
            self.daemon.arena.unlink(missing_ok=True)
            return self._whole(name)

    def _whole(self, name: str) -> Engine:
        self.ensure_daemon()
        if name in self._running and not self._running[name].alive:
            self._running.pop(name).kill()
        engine = self._running.get(name) or self.start(name)
        self.wait_attached()
        if name in self._fresh:
            await_lookups(engine, self.daemon)
            self._fresh.remove(name)
        self.forget(engine)
        return engine

    def wait_attached(self) -> None:
        """Wait until the engines that run are attached, and those that have ended are not."""
        engines = [set(engine.processes()) for engine in self._running.values()]
        self.daemon.wait(
            lambda status: attached(status.sessions, engines),
            ATTACH_TIMEOUT_SECONDS,
            f"attached to {engines}",
        )

    def end(self, name: str, *, kill: bool = False) -> None:
        """Stop an engine's processes, orderly or not; `engine(name)` starts new ones."""
        engine = self._running.pop(name, None)
        if engine is not None:
            engine.kill() if kill else engine.close()

    def restart(self, name: str, *, kill: bool = False) -> Engine:
        """Start an engine anew as a user does: it computes each key again, with another seed of `hash()`."""
        self.end(name, kill=kill)
        self.start(name, fresh=True)
        return self.engine(name)

    def settle(self, **how: Any) -> None:
        self.daemon.settle(**how)

    def forget(self, engine: Engine) -> None:
        """Empty the engine's own cache, once everything it computed is committed.

        A busy engine may ask for a store's room so late that the daemon looks settled. Then the store would be lost.
        """
        engine.drain()
        self.daemon.settle()
        engine.reset_prefix_cache()

    def ask(
        self,
        engine: Engine,
        ids: Sequence[int],
        max_tokens: int = 16,
        params: dict[str, Any] | None = None,
        adapter: Adapter | None = None,
    ) -> Loaded:
        before = self.daemon.served()
        answer = engine.ask(ids, max_tokens, params, adapter)
        return Loaded(answer, self.daemon.served().since(before))

    def told(self, requests: int = TRIES, name: str = "") -> str:
        """What the daemon remembers of its latest requests whose names begin so: for a test that expected a hit."""
        with connect(Endpoint.parse(self.daemon.endpoint), TOLD_TIMEOUT_SECONDS) as operator:
            try:
                records = operator.explain(name)[:requests]
            except NotFound:
                return f"nothing of {name!r}"
            return "\n".join(line for record in records for line in record_lines(record, 120))

    def namespace_told(self) -> str:
        """Of the latest request: as many digits of its namespace's id as operators are shown."""
        return self.told(1).partition(", namespace ")[2].split()[0]

    def prompt(self, tokens: int) -> list[int]:
        """A prompt that no other test of this session uses."""
        return prompt(tokens, f"e2e-{next(self._prompts)}")

    def audited(self, name: str) -> AuditMark:
        """How much each of the engine's ranks has written so far: one file a process, in no order."""
        return {file: len(file.read_text().splitlines()) for file in self.directory.glob(f"audit-{name}.*.jsonl")}

    def audit(self, name: str, since: AuditMark) -> list[dict[str, Any]]:
        """What the ranks of an engine stored and loaded after the mark, with digests of their own blocks."""
        return [
            json.loads(line)
            for file in self.audited(name)
            for line in file.read_text().splitlines()[since.get(file, 0) :]
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with ExitStack() as stack:  # whatever one of them raises
            stack.callback(self.daemon.close)
            for name in self._running:
                stack.callback(self.end, name, kill=True)
