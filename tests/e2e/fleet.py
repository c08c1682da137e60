"""One daemon and the engines of a test session, whole again at the start of each test."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from demo.daemon import Daemon, DaemonProcessError, Served
from demo.engine import Answer, Engine, EngineOptions, EngineProcessError, depot_connector
from demo.scenarios import await_lookups
from demo.toys import Toy, make_toy, prompt

CONFIGURATION = 'capacity = "512MiB"\n'
LOOKUP_TIMEOUT_SECONDS = 2.0
"""Tests share their cores: with the default of 0.05 a delay would look like a miss."""

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


class Fleet:
    """`engine(name)` gives a running engine with an empty cache, attached to a running, idle daemon."""

    def __init__(self, directory: Path, models: Path, tiers: str = "") -> None:
        """`tiers`: TOML behind the RAM tier's."""
        self.daemon = Daemon(CONFIGURATION + tiers)
        self.directory = directory
        self._models = models
        self._options: dict[str, EngineOptions] = {}
        self._running: dict[str, Engine] = {}
        self._prompts = itertools.count()

    def define(self, name: str, toy: Toy, arguments: dict[str, Any], **connector: Any) -> None:
        settings = {"lookup_timeout_seconds": LOOKUP_TIMEOUT_SECONDS} | connector
        self._options[name] = EngineOptions(
            toy,
            make_toy(toy, self._models),
            depot_connector(self.daemon.endpoint, **settings),
            arguments,
            {"KVDEPOT_AUDIT_PATH": str(self.directory / f"audit-{name}")},
        )

    def options(self, name: str) -> EngineOptions:
        return self._options[name]

    def ensure_daemon(self) -> Daemon:
        if not self.daemon.running:
            self.daemon.start()
        return self.daemon

    def start(self, name: str) -> Engine:
        """A fresh process of an engine that does not run."""
        assert name not in self._running
        engine = self._running[name] = Engine(self._options[name], self.directory / f"{name}.log")
        return engine.start()

    def engine(self, name: str) -> Engine:
        try:
            return self._whole(name)
        except (DaemonProcessError, EngineProcessError):
            # A test has left something behind that does not go away: that test's failure, not the next one's.
            for other in list(self._running):
                self.end(other, kill=True)
            self.daemon.kill()
            self.daemon.arena.unlink(missing_ok=True)
            return self._whole(name)

    def _whole(self, name: str) -> Engine:
        self.ensure_daemon()
        if name in self._running and not self._running[name].alive:
            self._running.pop(name).kill()
        fresh = name not in self._running
        engine = self.start(name) if fresh else self._running[name]
        self.daemon.wait_attached(len(self._running))
        if fresh:
            await_lookups(engine, self.daemon)
        self.forget(engine)
        return engine

    def end(self, name: str, *, kill: bool = False) -> None:
        """Stop an engine's processes, orderly or not; `engine(name)` starts new ones."""
        engine = self._running.pop(name, None)
        if engine is not None:
            engine.kill() if kill else engine.close()

    def restart(self, name: str, *, kill: bool = False) -> Engine:
        self.end(name, kill=kill)
        return self.engine(name)

    def settle(self, **how: Any) -> None:
        self.daemon.settle(**how)

    def forget(self, engine: Engine) -> None:
        """Empty the engine's own cache, once everything it computed is committed."""
        self.daemon.settle()
        engine.reset_prefix_cache()

    def ask(self, engine: Engine, ids: Sequence[int], max_tokens: int = 16) -> Loaded:
        before = self.daemon.served()
        answer = engine.ask(ids, max_tokens)
        return Loaded(answer, self.daemon.served().since(before))

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
        for name in list(self._running):
            self.end(name)
        self.daemon.close()
