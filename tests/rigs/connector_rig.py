"""What tests of the connector stand on: prompts, what engines answer to them, and a gate in the copies."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from kvdepot.client.copy.base import CopyBatch, Direction
from kvdepot.client.copy.cpu import CpuCopier
from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue

from tests.fakes.scripted_engine import BLOCK, ScriptedEngine, next_token
from tests.rigs.patience import Deadline, patient, wait_until

Make = Callable[..., ScriptedEngine]
PATIENCE_SECONDS = 20.0
TRANSPORTS = pytest.mark.parametrize("streams", [False, True], ids=["shm", "stream"])


def prompt(blocks: float, seed: int = 0) -> list[int]:
    return [(seed * 131 + i * 7) % 1000 for i in range(int(blocks * BLOCK))]


def cold(tokens: list[int], count: int = 4) -> list[int]:
    """What any correct engine answers."""
    known = list(tokens)
    for _ in range(count):
        known.append(next_token(known))
    return known[len(tokens) :]


def evict(engine: ScriptedEngine, objects: int = 1 << 20) -> None:
    """Let the daemon evict so many objects, or all, as above its high watermark."""
    ram = engine.depot.engine._ram
    ram.evictor.evict_to(ram.rooms[0], 0, objects, "watermark")


def rank_copier(engine: ScriptedEngine, rank: int) -> CpuCopier:
    worker: Any = engine.workers[rank].worker_side
    copier: CpuCopier = worker._copies._copier
    return copier


def count_stats(engine: ScriptedEngine, name: str) -> Counter[str]:
    """Count what the ranks tell vLLM from now on under this name, by label."""
    found: Counter[str] = Counter()

    def observe(stats: Any) -> None:
        if stats.kv_connector_stats:
            found.update(stats.kv_connector_stats["counters"].get(name, {}))

    engine.observe = observe
    return found


def step_until(engine: ScriptedEngine, what: str, condition: Callable[[], object]) -> None:
    deadline = Deadline(PATIENCE_SECONDS)
    while not condition():
        assert not deadline.is_over(), what
        engine.step()


def set_priorities(engine: ScriptedEngine, prefill_tokens: int) -> None:
    """Let vLLM schedule by priority, and cut prompts into so many tokens a step (0: into a step's)."""
    scheduler = engine.scheduler
    scheduler.policy = SchedulingPolicy.PRIORITY
    scheduler.waiting = create_request_queue(scheduler.policy)
    scheduler.kv_holding_waiting = create_request_queue(scheduler.policy)
    scheduler.scheduler_config.long_prefill_token_threshold = prefill_tokens


class Gate:
    """Stops the copies of one direction between batches until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._tokens = threading.Semaphore(0)
        self._open = threading.Event()
        self._open.set()
        self._reached = threading.Event()
        self._lock = threading.Lock()
        self._standing = 0  # threads that are stopped
        self.copied = 0
        split, copy = CopyBatch.split, CpuCopier.copy
        self._bytes = 16 << 20
        self._direction = Direction.LOAD
        self._copier: CpuCopier | None = None

        def gated(copier: CpuCopier, arena: Any, batch: Any, direction: Any) -> None:
            concerned = direction is self._direction and self._copier in (None, copier)
            if concerned and not self._open.is_set():
                self._stand(1)
                self._reached.set()
                while not self._open.is_set() and not self._tokens.acquire(timeout=0.01):
                    pass
                self._stand(-1)
            with self._lock:
                self.copied += concerned
            copy(copier, arena, batch, direction)

        monkeypatch.setattr(CpuCopier, "copy", gated)
        monkeypatch.setattr(CopyBatch, "split", lambda batch, size=0: split(batch, size or self._bytes))

    def close(
        self,
        batch_bytes: int = 16 << 20,
        direction: Direction = Direction.LOAD,
        copier: CpuCopier | None = None,
    ) -> None:
        """`copier`: of one rank only."""
        self._direction = direction
        self._copier = copier
        self._reached.clear()
        self._bytes = batch_bytes
        self.copied = 0
        self._open.clear()

    def reached(self, seconds: float = 5) -> bool:
        return self._reached.wait(patient(seconds))

    def _stand(self, change: int) -> None:
        with self._lock:
            self._standing += change

    def let_through(self, copies: int) -> None:
        """Until as many stand at the next one: between two copies a load that is given up may end, and rightly."""
        before, standing = self.copied, self._standing
        for _ in range(copies):
            self._tokens.release()
        wait_until(lambda: self.copied >= before + copies, "they are copied", pause_seconds=0.001)
        deadline = Deadline(5)
        while self._standing < standing and not deadline.is_over():  # a rank that has copied all stands no more
            time.sleep(0.001)
        assert self._standing, "none stands at the next copy"

    def open(self) -> None:
        self._open.set()
