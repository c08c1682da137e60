"""Holds on vLLM's real block pool: weak ones end at reuse, strong ones prevent it, and all come back."""

from __future__ import annotations

from typing import Any

import pytest
from kvdepot.client.vllm.scheduling.pins import BlockHolds
from vllm.v1.core.block_pool import BlockPool

BLOCKS = 9  # one of them the null block


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(BLOCKS, enable_caching=True, hash_block_size=16)


@pytest.fixture
def holds(pool: BlockPool) -> BlockHolds:
    return BlockHolds(pool)


def ids(blocks: list[Any]) -> tuple[int, ...]:
    return tuple(block.block_id for block in blocks)


def test_a_weak_hold_leaves_the_count_of_free_blocks_alone(pool: BlockPool, holds: BlockHolds) -> None:
    blocks = pool.get_new_blocks(3)
    hold = holds.hold(ids(blocks))
    assert [block.ref_cnt for block in blocks] == [1, 1, 1]
    pool.free_blocks(blocks)
    assert pool.get_num_free_blocks() == BLOCKS - 1
    assert holds.readable(hold)


def test_reuse_of_one_block_ends_every_hold_on_it(pool: BlockPool, holds: BlockHolds) -> None:
    blocks = pool.get_new_blocks(3)
    both = [holds.hold(ids(blocks[:2])), holds.hold(ids(blocks[1:]))]
    pool.free_blocks(blocks)
    pool.get_new_blocks(BLOCKS - 1)
    assert not any(hold.alive for hold in both)
    assert not holds.held_blocks or all(not hold.alive for hold in both)


def test_a_second_hold_does_not_take_the_first_ones_watcher(pool: BlockPool, holds: BlockHolds) -> None:
    """vLLM keeps one callback a block: two interested parties must both hear of the reuse."""
    block = pool.get_new_blocks(1)
    first, second = holds.hold(ids(block)), holds.hold(ids(block))
    holds.drop(second)
    pool.free_blocks(block)
    pool.get_new_blocks(BLOCKS - 1)
    assert not first.alive


def test_a_pin_keeps_the_block_until_it_is_given_back(pool: BlockPool, holds: BlockHolds) -> None:
    blocks = pool.get_new_blocks(2)
    hold = holds.hold(ids(blocks))
    pool.free_blocks(blocks)
    pinned = holds.pin(hold)
    assert holds.pinned_blocks == 2
    assert pool.get_num_free_blocks() == BLOCKS - 3
    with pytest.raises(ValueError, match="free blocks"):
        pool.get_new_blocks(BLOCKS - 1)
    holds.unpin(pinned)
    assert holds.pinned_blocks == 0
    assert pool.get_num_free_blocks() == BLOCKS - 1


def test_a_stale_call_for_a_block_nobody_holds_any_more_is_ignored(pool: BlockPool, holds: BlockHolds) -> None:
    block = pool.get_new_blocks(1)
    old = holds.hold(ids(block))
    holds.drop(old)
    pool.free_blocks(block)
    again = pool.get_new_blocks(BLOCKS - 1)
    new = holds.hold(ids(block))
    assert holds.readable(new)
    pool.free_blocks(again)
    assert holds.readable(new)
    pool.get_new_blocks(BLOCKS - 1)
    assert not new.alive


def test_a_reset_of_the_prefix_cache_ends_weak_holds(pool: BlockPool, holds: BlockHolds) -> None:
    block = pool.get_new_blocks(1)
    hold = holds.hold(ids(block))
    pool.free_blocks(block)
    assert pool.reset_prefix_cache()
    assert not hold.alive


def test_a_hash_that_moves_away_makes_the_bytes_unreadable(pool: BlockPool, holds: BlockHolds) -> None:
    """Align mode moves a state's hash to a copy before it overwrites the block in place: no reuse is reported."""
    (block,) = pool.get_new_blocks(1)
    block.set_block_hash(b"hash" + bytes(4), 16)
    hold = holds.hold((block.block_id,))
    assert holds.readable(hold)
    block.reset_hash()
    assert hold.alive
    assert not holds.readable(hold)


def test_only_real_referenced_blocks_can_be_held(pool: BlockPool, holds: BlockHolds) -> None:
    (block,) = pool.get_new_blocks(1)
    assert holds.holdable((block.block_id,))
    assert not holds.holdable((0,))
    assert not holds.holdable((BLOCKS + 3,))
    pool.free_blocks([block])
    assert not holds.holdable((block.block_id,))
