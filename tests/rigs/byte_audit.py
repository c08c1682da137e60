"""Each byte that the connector loads or stores is what the request's own prefix must have, read as it is copied."""

from __future__ import annotations

from collections import Counter, defaultdict
from random import Random
from typing import Any

import pytest
from kvdepot.client.vllm.base.operations import LoadOp, ObjectCopy, StoreOp
from kvdepot.client.vllm.scheduling.requests import RequestState
from kvdepot.core.calls import Kind

from tests.fakes.mixed_engine import MixedEngine, Voice
from tests.fakes.rank_memory import RankMemory
from tests.fakes.scripted_engine import BLOCK
from tests.rigs.connector_histories import Watch

Owners = defaultdict[bytes, set[str]]
"""Requests by the keys that the connector gave their chunks."""


def note_owners(monkeypatch: pytest.MonkeyPatch) -> Owners:
    """Follow from now on which keys requests have. Who audits bytes must not ask whether the keys are right."""
    owners, update = Owners(set), RequestState.update_keys

    def noted(state: RequestState, *arguments: int) -> int:
        known = update(state, *arguments)
        for key in state.keys:
            owners[key].add(state.request_id)
        return known

    monkeypatch.setattr(RequestState, "update_keys", noted)
    return owners


class ByteWatch(Watch):
    """Audits all that the ranks copy. Some of their loads fail, of which some have written by then."""

    engine: MixedEngine

    def __init__(self, engine: MixedEngine, owners: Owners, random: Random) -> None:
        self._owners = owners
        self._random = random
        self.failing = 0.0  # part of the loads
        self.wrong: list[str] = []
        self._squeezed: list[Any] = []
        self._left = self._squeezed_steps = 0
        self.loaded: Counter[Voice] = Counter()  # objects
        self._chunk_tokens = engine.side.planner.chunk_tokens
        super().__init__(engine)

    def _watch(self, worker: Any) -> None:
        super()._watch(worker)
        copies, memory = worker.worker_side._copies, self.engine.memories[self.engine.workers.index(worker)]
        load, store = copies._load, copies._store

        def loading(op: LoadOp) -> list[int]:
            fails = self._random.random() < self.failing
            failed: list[int] = [each.index for each in op.objects] if fails else load(op)
            if fails and self._random.random() < 0.5:
                self._scribble(memory, op)
            if not failed:
                self._check_loaded(memory, op)
            return failed

        def storing(op: StoreOp) -> list[int]:
            self._check_stored(memory, op)
            failed: list[int] = store(op)
            return failed

        copies._load, copies._store = loading, storing

    def squeeze(self, left: int, steps: int) -> None:
        """Leave so few blocks in each of the next steps, as if other requests had taken the rest."""
        pool = self.engine.pool
        pool.free_blocks(self._squeezed)
        self._left, self._squeezed_steps = left, steps
        self._squeezed = pool.get_new_blocks(max(pool.get_num_free_blocks() - left, 0)) if steps else []

    def check(self, scheduled: Any) -> None:
        self.squeeze(self._left, max(self._squeezed_steps - 1, 0))
        super().check(scheduled)
        assert not self.wrong, self.wrong[0]

    def finish(self) -> None:
        self.squeeze(0, 0)
        super().finish()
        assert not self.wrong, self.wrong[0]

    def _named(self, copied: ObjectCopy) -> bool:
        return copied.key in self._owners

    def _check_loaded(self, memory: RankMemory, op: LoadOp) -> None:
        for copied in op.objects:
            self.loaded[self.engine.voices[op.request_id]] += 1
            if not self._right(memory, copied, op.request_id):
                self.wrong.append(f"{op.request_id}: wrong bytes are loaded up to {copied.boundary_tokens}")

    def _check_stored(self, memory: RankMemory, op: StoreOp) -> None:
        for copied in op.objects:
            own = self._owners[copied.key] & self.engine.requests.keys()
            if not any(self._right(memory, copied, request_id) for request_id in own):
                self.wrong.append(f"{own}: wrong bytes are stored up to {copied.boundary_tokens}")

    def _right(self, memory: RankMemory, copied: ObjectCopy, request_id: str) -> bool:
        """Whether all blocks of an object have what a request's tokens up to its boundary must have."""
        prefix, content = self.engine.prefix(request_id), self.engine.content(request_id)
        for span in copied.spans:
            group = memory.layout.kv_cache_groups[span.group]
            window = getattr(group.kv_cache_spec, "sliding_window", None) or self._chunk_tokens + 1
            in_object = min(self._chunk_tokens, -(-(window - 1) // BLOCK) * BLOCK)
            first = (copied.boundary_tokens - in_object) // BLOCK
            for name in group.layer_names:
                if copied.kind == Kind.STATE:
                    (block_id,) = span.block_ids
                    if not memory.holds("state", name, block_id, prefix(copied.boundary_tokens), content):
                        return False
                    continue
                for index, block_id in enumerate(span.block_ids, first + span.object_block):
                    if not memory.holds("kv", name, block_id, prefix((index + 1) * BLOCK), content):
                        return False
        return True

    @staticmethod
    def _scribble(memory: RankMemory, op: LoadOp) -> None:
        """Write what is of no prefix."""
        for copied in op.objects:
            for span in copied.spans:
                for name in memory.layout.kv_cache_groups[span.group].layer_names:
                    for block_id in span.block_ids:
                        memory.block(name, block_id).fill_(0x5A)
