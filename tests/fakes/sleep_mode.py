"""What vLLM 0.33 calls when an engine sleeps, wakes up, or gives its KV memory back, in its order.

v1/engine/core.py and v1/worker/gpu_worker.py. Not called here: what concerns no connector.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Sequence
from typing import Any

import torch
from vllm.v1.request import RequestStatus

GONE = 0x6E
"""What KV memory has in it after a sleep, and while nobody may touch it."""


class SleepMode:
    """For `ScriptedEngine`."""

    scheduler: Any
    connector: Any
    workers: Sequence[Any]
    _pipeline: bool
    memories: Sequence[Any]
    _asleep: Sequence[torch.Tensor] = ()  # each rank's KV memory, as it was when it was taken away

    def run(self, steps: int = 20_000) -> None:
        raise NotImplementedError

    def facts(self) -> dict[tuple[int, int], Any]:
        """What the ranks say of themselves, as vLLM collects it."""
        said = enumerate(worker.get_handshake_metadata() for worker in self.workers)
        return {(rank, 0) if self._pipeline else (0, rank): found for rank, found in said if found is not None}

    def shake_hands(self, ranks: int | None = None) -> None:
        """v1/engine/core.py, _set_kv_connector_handshake_metadata: at the start, and in 0.33 at each wake-up."""
        if facts := pickle.loads(pickle.dumps(dict(list(self.facts().items())[:ranks]))):
            self.connector.set_xfer_handshake_metadata_pp_aware(facts)

    def _reset_caches(self) -> None:
        self.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)  # the pause, which is waited for
        self.run()
        assert self.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)

    def discard(self) -> None:
        """Worker.discard, and the half of Worker.sleep: KV memory goes, and nobody touches it from here on."""
        for worker in self.workers:
            worker.unregister_kv_caches()
        self._asleep = [memory.fill(GONE) for memory in self.memories]

    def restore(self) -> None:
        """Worker.wake_up, for "kv_cache". Nothing of before is in KV memory."""
        for worker, memory, asleep in itertools.zip_longest(self.workers, self.memories, self._asleep):
            assert asleep is None or torch.equal(memory.raw, asleep), "somebody has written into memory that was gone"
            worker.restore_kv_caches()
        self._asleep = ()

    def sleep(self, level: int = 1) -> None:
        """EngineCore.sleep."""
        if level >= 1:
            self._reset_caches()
            self.discard()

    def release_kv_cache_memory(self) -> None:
        """EngineCore.release_kv_cache_memory."""
        self._reset_caches()
        self.discard()

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """EngineCore.wake_up."""
        if tags is None or "kv_cache" in tags:
            self.restore()
            self.shake_hands()

    def change_weights(self) -> None:
        """What was computed before is wrong from now on, wherever it lies. Nobody tells the connector."""
        for memory in self.memories:
            memory.weights += 1
