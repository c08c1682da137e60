"""A load that is read back and is wrong ends the copies of its rank, whatever becomes of that load afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from kvdepot.client.arena_map import ArenaMap
from kvdepot.client.copy.backend import Way
from kvdepot.client.copy.base import CopyBatch, Direction
from kvdepot.client.copy.device import DeviceCopier
from kvdepot.client.vllm.base.operations import LoadOp, StoreOp

from benchmarks.day_one.copies import filled
from tests.fakes.late_device import LateDevice
from tests.rigs.copy_rank import BLOCK_BYTES, BLOCKS, GENERATION, LOAD_SECONDS, Rank, expected, stored
from tests.rigs.memory_arena import granted

After = Callable[[Rank], None]


def _miss_deadline(rank: Rank) -> None:
    rank.now += LOAD_SECONDS + 1


def _cancel(rank: Rank) -> None:
    rank.thread.submit([], [], [rank.ops])


def _suspend(rank: Rank) -> None:
    rank.thread._kv.revoked = True


def _fail_once(rank: Rank) -> None:
    """The device cannot tell once whether a copy has ended."""
    wait = rank.device.wait

    def failing(_: object) -> None:
        rank.device.wait = wait  # type: ignore[method-assign]
        raise RuntimeError("an event")

    rank.device.wait = failing  # type: ignore[assignment,method-assign]


def _reuse(rank: Rank) -> None:
    """The daemon has given the extents to somebody else, who writes."""
    granted(rank.attachment.arena)[0] = GENERATION + 1


@pytest.fixture
def batches_of_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    split = CopyBatch.split
    monkeypatch.setattr(CopyBatch, "split", lambda batch: split(batch, BLOCK_BYTES))


def rank_that_reads_back(arena: ArenaMap, way: Way, after: After, monkeypatch: pytest.MonkeyPatch) -> Rank:
    """Its first batch puts wrong bytes, and `after` happens as soon as that was seen."""
    rank = Rank(LateDevice(), arena, filled((BLOCKS, BLOCK_BYTES), torch.uint8), way, read_back=100)
    arena.buffer[: 2 * BLOCK_BYTES] = np.random.default_rng(1).bytes(2 * BLOCK_BYTES)
    copy, verify = DeviceCopier.copy, DeviceCopier.verify

    def wrong(copier: DeviceCopier, memory: Any, batch: CopyBatch, direction: Direction) -> None:
        monkeypatch.setattr(DeviceCopier, "copy", copy)
        copy(copier, memory, CopyBatch(batch.layers, batch.blocks + 1, *_rest(batch)), direction)

    def seen(copier: DeviceCopier, memory: Any, batch: CopyBatch) -> bool:
        monkeypatch.setattr(DeviceCopier, "verify", verify)
        right = verify(copier, memory, batch)
        after(rank)
        return right

    monkeypatch.setattr(DeviceCopier, "copy", wrong)
    monkeypatch.setattr(DeviceCopier, "verify", seen)
    return rank


def _rest(batch: CopyBatch) -> tuple[Any, Any, Any]:
    return batch.skips, batch.offsets, batch.lengths


@pytest.mark.requirement("I1", "G3")
@pytest.mark.usefixtures("batches_of_a_block")
@pytest.mark.parametrize("way", Way)
@pytest.mark.parametrize("after", [_miss_deadline, _cancel, _suspend, _fail_once], ids=lambda after: after.__name__)
def test_a_wrong_byte_that_was_seen_ends_the_copies_whatever_happens_to_its_load(
    arena: ArenaMap, way: Way, after: After, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = rank_that_reads_back(arena, way, after, monkeypatch)
    (outcome,) = rank.do(LoadOp, 8, 0)
    assert outcome.failed == {0} and outcome.verified is False
    assert rank.failures.counts["verify:WrongBytesError"] == 1
    rank.now, started = 0.0, rank.device.started
    for kind in (StoreOp, LoadOp):
        (outcome,) = rank.do(kind, 16, 4 * BLOCK_BYTES)
        assert outcome.failed == {0} and rank.device.started == started


@pytest.mark.requirement("I1")
def test_a_load_that_was_read_back_counts_if_its_memory_goes_before_the_report(arena: ArenaMap) -> None:
    rank = Rank(LateDevice(), arena, filled((BLOCKS, BLOCK_BYTES), torch.uint8), read_back=100)
    rank.submit(LoadOp, 8, 0)
    rank.run_next()
    rank.thread.suspend()
    (outcome,) = rank.thread.take_done()
    assert outcome.suspended and outcome.failed == {0} and outcome.verified is True


@pytest.mark.usefixtures("batches_of_a_block")
@pytest.mark.parametrize("way", Way)
def test_extents_that_are_reused_while_a_load_is_read_back_say_nothing_about_the_rank(
    arena: ArenaMap, way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = rank_that_reads_back(arena, way, _reuse, monkeypatch)
    (outcome,) = rank.do(LoadOp, 8, 0)
    assert outcome.failed == {0} and outcome.verified is None and not rank.failures.counts
    (outcome,) = rank.do(LoadOp, 8, 0)
    assert not outcome.failed and outcome.verified is True
    assert stored(arena, 0, 2) == expected(rank.copier._layers[0], [8, 9])
