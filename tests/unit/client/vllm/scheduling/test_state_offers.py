"""Offers of recurrent states that wait for their key, on vLLM's real block pool."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from kvdepot.client.vllm.base import compat
from kvdepot.client.vllm.scheduling.pins import BlockHolds
from kvdepot.client.vllm.scheduling.requests import RequestState
from kvdepot.client.vllm.scheduling.state_offers import BOUNDARIES_MAX, StateOffers
from kvdepot.core.calls import Kind
from kvdepot.core.planner import GroupSpec, Planner
from vllm.v1.core.block_pool import BlockPool

CHUNK = 16
BLOCKS = 9  # one of them the null block
GROUPS = (5, 7)  # the engine's ids of the planner's groups 1 and 2
PLANNER = Planner([GroupSpec(Kind.ATTENTION, CHUNK, 0, (1,)), *[GroupSpec(Kind.STATE, CHUNK, 0, (1,))] * 2], CHUNK)


class Rig:
    """A pool, its holds, and the offers of one request."""

    def __init__(self, blocks: int = BLOCKS) -> None:
        self.pool = BlockPool(blocks, enable_caching=True, hash_block_size=CHUNK)
        self.holds = BlockHolds(self.pool)
        self.counters: Counter[str] = Counter()
        self.offers = StateOffers(PLANNER, self.holds, [3, *GROUPS], CHUNK, self.counters)
        self.state = self.request()

    @staticmethod
    def request(name: str = "r") -> RequestState:
        hashes = [b"%s at %d" % (name.encode(), end) for end in range(CHUNK, 9 * CHUNK, CHUNK)]
        request: Any = SimpleNamespace(request_id=name, block_hashes=hashes)
        return RequestState(request, 0.0)

    def block(self, group: int, boundary: int, *, named: bool = True) -> Any:
        """A block of a running request with the state at a boundary."""
        (block,) = self.pool.get_new_blocks(1)
        if named:
            name = compat.block_name(self.state.request.block_hashes[boundary // CHUNK - 1], group)
            self.pool._insert_block_hash(name, block, num_tokens=boundary)
        return block

    def offer(self, boundary: int, groups: tuple[int, ...] = GROUPS) -> list[Any]:
        blocks = [self.block(group, boundary) for group in groups]
        self.offers.add(
            self.state, [(group, block.block_id, boundary) for group, block in zip(groups, blocks, strict=True)]
        )
        return blocks

    def ready(self, computed: int) -> dict[int, dict[int, int]]:
        return {boundary: dict(groups) for boundary, groups in self.offers.ready(self.state, computed).items()}

    @property
    def dropped(self) -> dict[str, int]:
        return {name.removeprefix("store_dropped_"): count for name, count in self.counters.items()}


@pytest.fixture
def rig() -> Rig:
    return Rig()


@pytest.mark.requirement("C4")
def test_an_offer_waits_until_its_key_is_known_and_is_taken_once(rig: Rig) -> None:
    blocks = rig.offer(32)
    assert rig.ready(16) == {}
    assert rig.state in rig.offers
    assert [block.ref_cnt for block in blocks] == [1, 1], "held weakly"
    rig.pool.free_blocks(blocks)  # the request steps over the boundary
    ids = [block.block_id for block in blocks]
    assert rig.ready(32) == {32: {1: ids[0], 2: ids[1]}}
    hold = rig.offers.take(rig.state, 1)
    assert list(hold.block_ids) == ids
    assert rig.holds.readable(hold)
    assert rig.state not in rig.offers
    assert rig.ready(32) == {}
    rig.holds.drop(hold)
    assert not rig.holds.held_blocks
    assert not rig.dropped


@pytest.mark.requirement("I7")
def test_a_boundary_waits_for_the_offers_of_all_groups(rig: Rig) -> None:
    first = rig.offer(32, GROUPS[:1])
    assert rig.ready(64) == {}
    second = rig.offer(32, GROUPS[1:])
    assert rig.ready(64) == {32: {1: first[0].block_id, 2: second[0].block_id}}


@pytest.mark.requirement("I1")
def test_an_offer_whose_block_is_reused_is_dropped_and_counted(rig: Rig) -> None:
    rig.pool.free_blocks(rig.offer(32))
    rig.pool.get_new_blocks(BLOCKS - 1)
    assert rig.ready(32) == {}
    assert rig.dropped == {"reused": 1}
    assert not rig.holds.held_blocks


@pytest.mark.requirement("I1")
def test_an_offer_whose_hash_moves_is_dropped_and_the_new_block_takes_its_place(rig: Rig) -> None:
    """In align mode vLLM copies a state before it goes on in its block, and offers the copy."""
    blocks = rig.offer(32)
    (copy,) = rig.pool.get_new_blocks(1)
    rig.pool.move_block_hashes(blocks[1], copy)
    offers = rig.offers
    offers.add(rig.state, [(GROUPS[1], copy.block_id, 32)])
    assert rig.ready(32) == {32: {1: blocks[0].block_id, 2: copy.block_id}}
    rig.pool.move_block_hashes(copy, blocks[1])
    assert rig.ready(32) == {}
    assert rig.dropped == {"reused": 1}


@pytest.mark.requirement("I1")
@pytest.mark.parametrize("taken", ["unnamed", "another prefix", "another group", "null", "no hash", "not a chunk"])
def test_a_block_that_does_not_have_the_state_is_not_held(rig: Rig, taken: str) -> None:
    """vLLM may free an offered block in the same step, and give it to another request."""
    boundary = {"no hash": 16 * CHUNK, "not a chunk": 24}.get(taken, 32)
    block = rig.block(GROUPS[0], 32, named=taken != "unnamed")
    if taken == "another prefix":
        other = compat.block_name(rig.request("other").request.block_hashes[1], GROUPS[0])
        rig.pool._maybe_evict_cached_block(block)
        rig.pool._insert_block_hash(other, block, num_tokens=32)
    block_id = 0 if taken == "null" else block.block_id
    rig.offers.add(rig.state, [(GROUPS[taken == "another group"], block_id, boundary)])
    assert rig.state not in rig.offers
    assert not rig.holds.held_blocks


@pytest.mark.requirement("C4")
def test_a_block_that_is_free_and_still_has_its_name_is_held(rig: Rig) -> None:
    """Accepted drafts step over a boundary: vLLM registers its state, frees the block, and then offers it."""
    blocks = [rig.block(group, 32) for group in GROUPS]
    rig.pool.free_blocks(blocks)
    rig.offers.add(rig.state, [(group, block.block_id, 32) for group, block in zip(GROUPS, blocks, strict=True)])
    assert 32 in rig.ready(32)
    assert rig.pool.get_num_free_blocks() == BLOCKS - 1
    rig.pool.get_new_blocks(BLOCKS - 1)
    assert rig.ready(32) == {}


@pytest.mark.requirement("A3")
def test_a_state_that_needs_no_store_is_not_held(rig: Rig) -> None:
    rig.state.stored.add((1, Kind.STATE))
    rig.offer(32)  # vLLM offers what was loaded
    assert rig.state not in rig.offers
    rig.offer(48)
    rig.state.stored.add((2, Kind.STATE))  # another way than by this offer
    assert rig.ready(48) == {}
    assert not rig.holds.held_blocks
    assert not rig.dropped


@pytest.mark.requirement("I4")
def test_only_so_many_boundaries_of_a_request_wait(rig: Rig) -> None:
    for chunk in range(1, BOUNDARIES_MAX + 3):
        rig.offer(chunk * CHUNK, GROUPS[:1])  # the other group never offers
        assert rig.ready(8 * CHUNK) == {}
    assert rig.holds.held_blocks == BOUNDARIES_MAX
    assert rig.dropped == {"incomplete": 2}


@pytest.mark.requirement("C4")
def test_boundaries_that_can_be_stored_do_not_count_among_those_that_wait() -> None:
    rig, boundaries = Rig(20), [chunk * CHUNK for chunk in range(1, 8)]
    for boundary in boundaries:
        rig.offer(boundary)
    assert [*rig.ready(7 * CHUNK)] == boundaries
    assert not rig.dropped


@pytest.mark.requirement("P11")
@pytest.mark.parametrize("how", ["request", "all", "adapter"])
def test_offers_are_dropped_with_their_request(rig: Rig, how: str) -> None:
    adapter = ("name", "/path")
    rig.state.adapter = adapter
    rig.offer(32)
    rig.offers.drop(rig.request("other"), "finished")
    rig.offers.drop_adapter(("another", "/path"), "adapter")
    assert rig.holds.held_blocks == 2
    match how:
        case "request":
            rig.offers.drop(rig.state, "finished")
        case "all":
            rig.offers.drop_all("epoch")
        case _:
            rig.offers.drop_adapter(adapter, "adapter")
    assert not rig.holds.held_blocks
    assert rig.ready(32) == {}
    assert list(rig.dropped.values()) == [1]


def test_a_joined_hold_is_readable_as_long_as_its_parts_were(rig: Rig) -> None:
    first, second = (rig.block(group, 32) for group in GROUPS)
    holds = [rig.holds.hold((block.block_id,)) for block in (first, second)]
    joined = rig.holds.join(holds)
    assert not any(hold.alive for hold in holds)
    assert rig.holds.readable(joined)
    rig.pool.free_blocks([second])
    rig.pool.get_new_blocks(BLOCKS - 2)
    assert not rig.holds.readable(joined)
    rig.holds.drop(joined)
    dead = rig.holds.hold((first.block_id,))
    rig.pool.free_blocks([first])
    rig.pool.get_new_blocks(1)
    assert not rig.holds.readable(rig.holds.join([dead]))
    assert not rig.holds.held_blocks
