"""The planner on geometries worked out by hand: P1, P11, P12, C1 to C5, D2 to D4."""

from __future__ import annotations

import time

import pytest
from kvdepot.core import limits
from kvdepot.core.calls import Kind
from kvdepot.core.errors import LimitExceeded, PlannerError
from kvdepot.core.planner import BlockSpan, GroupSpec, PlannedObject, Planner

A, W, S = Kind.ATTENTION, Kind.WINDOW, Kind.STATE


def attention(block: int = 16, *sizes: int, replicated: bool = False) -> GroupSpec:
    return GroupSpec(A, block, rank_block_bytes=sizes or (100,), replicated=replicated)


def window(block: int, tokens: int, *sizes: int) -> GroupSpec:
    return GroupSpec(W, block, window_tokens=tokens, rank_block_bytes=sizes or (10,))


def state(block: int, *sizes: int) -> GroupSpec:
    return GroupSpec(S, block, rank_block_bytes=sizes or (1000,))


HYBRID = (state(384), state(384), state(384), attention(384))


# P1: refusals and defaults


@pytest.mark.requirement("P1")
def test_refuses_no_groups() -> None:
    with pytest.raises(PlannerError, match="no KV-cache groups"):
        Planner(())


@pytest.mark.requirement("P1")
def test_refuses_a_chunk_that_is_no_multiple_of_the_lcm() -> None:
    with pytest.raises(PlannerError, match=r"chunk_tokens 400 is no multiple of 96, .* the nearest multiple is 384"):
        Planner((attention(32), window(48, 100)), 400)


@pytest.mark.requirement("P1")
def test_refuses_a_scheduler_block_that_is_no_multiple_of_the_lcm() -> None:
    with pytest.raises(PlannerError, match=r"scheduler block of 64 tokens is no multiple of 96, .*\[32, 48\]"):
        Planner((attention(32), window(48, 100)), scheduler_block_tokens=64)
    assert Planner((attention(32),), scheduler_block_tokens=64).scheduler_block_tokens == 64
    with pytest.raises(PlannerError, match="chunk_tokens 96 is no multiple of 64"):
        Planner((attention(32),), 96, scheduler_block_tokens=64)


@pytest.mark.requirement("P1")
@pytest.mark.parametrize("chunk", [0, -16])
def test_refuses_a_chunk_that_is_not_positive(chunk: int) -> None:
    with pytest.raises(PlannerError, match=f"chunk_tokens {chunk} is not positive"):
        Planner((attention(),), chunk)


@pytest.mark.requirement("P1")
@pytest.mark.parametrize(
    ("group", "message"),
    [
        (attention(0), "group 1: a block of 0 tokens"),
        (attention(-16), "group 1: a block of -16 tokens"),
        (GroupSpec(A, 16), r"group 1: blocks of \[\] bytes"),
        (attention(16, 0), r"group 1: blocks of \[0\] bytes"),
        (attention(16, 8, -1), r"group 1: blocks of \[8, -1\] bytes"),
        (attention(16, 8, 8, replicated=True), "group 1 is replicated: it has one part, not 2"),
        (window(16, 1), "group 1: a window of 1 tokens"),
        (window(16, -4), "group 1: a window of -4 tokens"),
        (GroupSpec(A, 16, window_tokens=8, rank_block_bytes=(1,)), "attention has no window, but window_tokens is 8"),
    ],
)
def test_refuses_sizes_that_are_not_positive(group: GroupSpec, message: str) -> None:
    with pytest.raises(PlannerError, match=message):
        Planner((attention(16, 5, replicated=True), group))


@pytest.mark.requirement("P1")
def test_refuses_groups_that_disagree_on_ranks() -> None:
    with pytest.raises(PlannerError, match="number of ranks: 1, 2"):
        Planner((attention(16, 5), attention(16, 5, 5)))


@pytest.mark.requirement("P1")
def test_refuses_more_than_the_limits() -> None:
    with pytest.raises(LimitExceeded, match="KV-cache groups"):
        Planner((attention(),) * (limits.GROUPS_MAX + 1))
    with pytest.raises(LimitExceeded, match="ranks of group 0"):
        Planner((attention(16, *[1] * (limits.RANKS_MAX + 1)),))
    with pytest.raises(LimitExceeded, match="bytes of one attention object"):
        Planner((attention(16, limits.OBJECT_BYTES_MAX),))
    with pytest.raises(LimitExceeded, match="chunk_tokens"):
        Planner((attention(16),), limits.CHUNK_TOKENS_MAX + 16)


@pytest.mark.requirement("C3")
def test_refuses_a_recurrent_block_that_is_the_whole_context_and_names_the_setting() -> None:
    with pytest.raises(PlannerError, match=r"group 1 .* 8192 tokens .* mamba_cache_mode=\"align\""):
        Planner((attention(16), state(8192)), context_tokens=8192)
    assert Planner((attention(16), state(384)), context_tokens=8192).chunk_tokens == 384


@pytest.mark.requirement("P1")
def test_refuses_one_checkpoint_a_prompt_with_chunks_above_the_scheduler_block() -> None:
    with pytest.raises(PlannerError, match=r"block of 384 tokens .* chunk_tokens 768; set chunk_tokens to 384"):
        Planner(HYBRID, 768, retention_interval=0)
    assert Planner(HYBRID, 384, retention_interval=0).chunk_tokens == 384
    assert Planner(HYBRID, 768, retention_interval=768).chunk_tokens == 768
    assert Planner((attention(16),), 768, retention_interval=0).chunk_tokens == 768  # nothing recurrent


@pytest.mark.requirement("P1")
@pytest.mark.parametrize(
    ("groups", "chunk"),
    [
        ((attention(16),), 256),
        ((attention(16), window(48, 100)), 288),
        ((attention(256),), 256),
        ((attention(384),), 384),
        (HYBRID, 384),
        ((attention(16), state(64)), 64),
    ],
)
def test_default_chunk(groups: tuple[GroupSpec, ...], chunk: int) -> None:
    assert Planner(groups).chunk_tokens == chunk


@pytest.mark.requirement("P1")
def test_kinds_and_the_kind_that_marks_the_path() -> None:
    assert Planner(HYBRID).kinds == (A, S)
    assert Planner(HYBRID).path_kind is A
    assert Planner((window(16, 64), state(64))).path_kind is W
    assert Planner((state(64),)).path_kind is S
    assert Planner((attention(16, 1, 2), state(64, 3, 4))).ranks == 2
    assert Planner((attention(16, 1, replicated=True),)).ranks == 0


@pytest.mark.requirement("P1")
def test_parts_belong_to_their_kind_and_rank() -> None:
    planner = Planner((attention(16, 5, 5), state(16, 7, 7)))
    with pytest.raises(PlannerError, match="group 1 is of kind state, not attention"):
        planner.part_range(A, 1, 0)
    for rank in (-1, 2):
        with pytest.raises(PlannerError, match=f"ranks 0 to 1, not rank {rank}"):
            planner.part_range(A, 0, rank)


@pytest.mark.requirement("P1")
@pytest.mark.parametrize("boundary", [-384, 100, 385])
def test_refuses_what_is_no_boundary(boundary: int) -> None:
    with pytest.raises(PlannerError, match=f"{boundary} tokens are no boundary: chunks have 384"):
        Planner(HYBRID).objects(boundary)


# P12: unequal groups


@pytest.mark.requirement("P12")
def test_blocks_of_16_and_1056() -> None:
    planner = Planner((attention(16, 100), state(1056, 9000)))
    assert (planner.scheduler_block_tokens, planner.chunk_tokens) == (1056, 1056)
    assert (planner.blocks_in_object(0), planner.blocks_in_object(1)) == (66, 1)
    assert (planner.object_bytes(A), planner.object_bytes(S)) == (6600, 9000)
    plan = planner.load_plan(0, 2112)
    assert plan.objects == (
        PlannedObject(0, A, (BlockSpan(0, 0, 0, 66),)),
        PlannedObject(1, A, (BlockSpan(0, 0, 66, 66),)),
        PlannedObject(1, S, (BlockSpan(1, 0, 1, 1),)),
    )


@pytest.mark.requirement("P12")
def test_blocks_whose_lcm_is_neither() -> None:
    planner = Planner((attention(32, 1), attention(48, 10), state(96, 100)), 192)
    assert [planner.blocks_in_object(group) for group in range(3)] == [6, 4, 1]
    assert planner.object_bytes(A) == 6 + 40
    assert planner.object_spans(2, A) == (BlockSpan(0, 0, 12, 6), BlockSpan(1, 0, 8, 4))
    assert planner.object_spans(2, S) == (BlockSpan(2, 0, 5, 1),)


@pytest.mark.requirement("P12")
def test_a_replicated_single_tensor_group_lies_once_beside_sharded_ones() -> None:
    planner = Planner((attention(16, 576, replicated=True), attention(16, 10, 20, 30)), 32)
    assert planner.object_bytes(A) == 2 * 576 + 2 * 60
    assert [planner.part_range(A, 0, rank) for rank in range(3)] == [(0, 1152)] * 3
    assert [planner.part_range(A, 1, rank) for rank in range(3)] == [(1152, 1172), (1172, 1212), (1212, 1272)]


@pytest.mark.requirement("P12")
def test_groups_with_different_layer_counts_and_ranks_without_layers() -> None:
    groups = (attention(16, 300, 0), GroupSpec(A, 16, rank_block_bytes=(100, 200), layers=("a", "b", "c")))
    planner = Planner(groups, 16)
    assert [planner.part_range(A, 0, rank) for rank in range(2)] == [(0, 300), (300, 300)]
    assert [planner.part_range(A, 1, rank) for rank in range(2)] == [(300, 400), (400, 600)]


# C2: how deep a hit may be


@pytest.mark.requirement("C2")
def test_a_hit_stops_below_the_last_token() -> None:
    planner = Planner(HYBRID)
    depths = {0: 0, 1: 0, 384: 0, 385: 384, 768: 384, 769: 768, 3000: 2688, 3072: 2688, 3073: 3072}
    assert {tokens: planner.high_boundary(tokens) for tokens in depths} == depths


@pytest.mark.requirement("C6")
def test_a_hit_leaves_as_many_tokens_as_it_must() -> None:
    planner = Planner(HYBRID, computed_tokens_min=2)
    depths = {0: 0, 1: 0, 2: 0, 385: 0, 386: 384, 769: 384, 770: 768, 3000: 2688, 3073: 2688, 3074: 3072}
    assert {tokens: planner.high_boundary(tokens) for tokens in depths} == depths


# Objects and presence


@pytest.mark.requirement("P11")
def test_every_kind_of_a_boundary_must_be_there() -> None:
    planner = Planner((attention(16), window(16, 40), state(64)))
    full = {A: b"\1\1\1", W: b"\1\1\1", S: b"\1\1\1"}
    assert planner.longest_boundary(full, 0, 192) == 192
    assert planner.longest_boundary(full, 0, 191) == 128
    for kind in Kind:
        assert planner.longest_boundary({k: flags for k, flags in full.items() if k is not kind}, 0, 192) == 0
        assert planner.longest_boundary(full | {kind: b"\1\1\0"}, 0, 192) == 128
        assert planner.longest_boundary(full | {kind: b"\1\1"}, 0, 192) == 128


@pytest.mark.requirement("C1")
def test_interior_chunks_without_checkpoint_serve_deeper_boundaries() -> None:
    planner = Planner(HYBRID)
    presence = {A: b"\1" * 8, S: b"\0\0\0\1\0\0\1\0"}
    assert planner.longest_boundary(presence, 0, 10_000) == 7 * 384
    assert planner.longest_boundary(presence, 0, 7 * 384 - 1) == 4 * 384
    assert planner.longest_boundary(presence, 4 * 384, 7 * 384 - 1) == 0  # nothing deeper than what is local
    assert planner.objects(3 * 384) == [(0, A), (1, A), (2, A), (2, S)]
    plan = planner.load_plan(0, 4 * 384)
    assert [item.kind for item in plan.objects].count(S) == 1
    assert plan.objects[-1].spans == tuple(BlockSpan(group, 0, 3, 1) for group in (0, 1, 2))


@pytest.mark.requirement("D2")
def test_a_window_that_is_no_multiple_of_the_block() -> None:
    planner = Planner((window(16, 20),), 64)  # 19 tokens before: two blocks of the four
    assert planner.blocks_in_object(0) == 2
    assert planner.load_plan(0, 128).objects == (PlannedObject(1, W, (BlockSpan(0, 0, 6, 2),)),)
    assert Planner((window(16, 17),), 64).blocks_in_object(0) == 1  # exactly one block before
    assert Planner((window(16, 18),), 64).blocks_in_object(0) == 2


@pytest.mark.requirement("D2")
def test_a_window_over_several_chunks_leaves_dead_blocks_alone() -> None:
    planner = Planner((window(16, 150), window(16, 20)), 64)  # reach 160 and 32 tokens back
    assert planner.window_chunks == 3
    assert (planner.blocks_in_object(0), planner.blocks_in_object(1)) == (4, 2)
    assert planner.objects(320) == [(2, W), (3, W), (4, W)]
    assert planner.load_plan(0, 320).objects == (
        PlannedObject(2, W, (BlockSpan(0, 2, 10, 2),)),
        PlannedObject(3, W, (BlockSpan(0, 0, 12, 4),)),
        PlannedObject(4, W, (BlockSpan(0, 0, 16, 4), BlockSpan(1, 0, 18, 2))),
    )
    assert planner.longest_boundary({W: b"\1\0\1\1\1"}, 0, 320) == 320
    assert planner.longest_boundary({W: b"\1\1\0\1\1"}, 0, 320) == 128


@pytest.mark.requirement("D3")
def test_a_sliding_window_loads_fewer_blocks_than_full_attention() -> None:
    sliding = Planner((attention(16), window(16, 512)), 256).load_plan(0, 8192)
    full = Planner((attention(16), attention(16)), 256).load_plan(0, 8192)

    def blocks(objects: tuple[PlannedObject, ...]) -> int:
        return sum(span.blocks for item in objects for span in item.spans)

    assert (blocks(sliding.objects), blocks(full.objects)) == (512 + 32, 1024)


@pytest.mark.requirement("D4")
def test_a_full_local_hit_moves_nothing() -> None:
    planner = Planner((attention(16), window(16, 40), state(64)))
    assert planner.load_plan(128, 128).objects == ()
    assert planner.load_plan(192, 128).objects == ()
    assert planner.load_plan({A: 192, W: 128, S: 128}, 128).objects == ()
    assert planner.load_plan(0, 0).objects == ()


# C5: mixed local and external


@pytest.mark.requirement("C5")
def test_a_local_hit_inside_a_chunk_loads_the_rest_of_it() -> None:
    planner = Planner((attention(16),), 64)
    assert planner.load_plan(96, 192).objects == (
        PlannedObject(1, A, (BlockSpan(0, 2, 6, 2),)),
        PlannedObject(2, A, (BlockSpan(0, 0, 8, 4),)),
    )
    assert planner.longest_boundary({A: b"\0\1\1"}, 96, 192) == 192
    assert planner.longest_boundary({A: b"\0\1\1"}, 48, 192) == 0


@pytest.mark.requirement("C5")
def test_a_local_window_needs_no_objects_below_it() -> None:
    planner = Planner((window(16, 150),), 64)
    assert planner.load_plan(256, 320).objects == (PlannedObject(4, W, (BlockSpan(0, 0, 16, 4),)),)
    assert planner.longest_boundary({W: b"\0\0\0\0\1"}, 256, 320) == 320
    assert planner.longest_boundary({W: b"\0\0\0\0\1"}, 240, 320) == 0


@pytest.mark.requirement("A1")
def test_with_attention_local_only_the_state_is_loaded() -> None:
    planner = Planner(HYBRID)
    plan = planner.load_plan({A: 7 * 384, S: 0}, 7 * 384)
    assert [(item.chunk, item.kind) for item in plan.objects] == [(6, S)]
    assert planner.longest_boundary({S: b"\0\0\0\0\0\0\1"}, {A: 7 * 384}, 10_000) == 7 * 384


@pytest.mark.requirement("C5")
@pytest.mark.parametrize("kind", [W, S])
def test_refuses_windows_and_states_that_are_local_only_beyond_the_boundary(kind: Kind) -> None:
    planner = Planner((attention(16), window(16, 40), state(64)))
    with pytest.raises(PlannerError, match=f"{kind.name.lower()}: 192 local tokens do not serve the boundary at 128"):
        planner.load_plan({kind: 192}, 128)


@pytest.mark.requirement("C5")
@pytest.mark.parametrize("local", [8, -16])
def test_refuses_local_tokens_that_are_no_multiple_of_a_block(local: int) -> None:
    with pytest.raises(PlannerError, match=f"{local} local tokens are no multiple of a block of 16"):
        Planner((attention(16),), 64).load_plan(local, 128)


# Stores


def kinds_by_chunk(objects: tuple[PlannedObject, ...]) -> list[tuple[int, Kind]]:
    return [(item.chunk, item.kind) for item in objects]


@pytest.mark.requirement("C1")
def test_stores_a_checkpoint_exactly_where_it_was_offered() -> None:
    planner = Planner(HYBRID)
    plan = planner.store_plan(set(), 3 * 384 + 5, {768: {0: 70, 1: 71, 2: 72}})
    assert kinds_by_chunk(plan.objects) == [(0, A), (1, A), (1, S), (2, A)]
    assert plan.objects[2].block_ids == (70, 71, 72)
    assert plan.objects[2].spans == tuple(BlockSpan(group, 0, 1, 1) for group in (0, 1, 2))
    assert plan.unused_offers == ()


@pytest.mark.requirement("P11")
def test_an_offer_without_one_of_the_groups_makes_no_checkpoint() -> None:
    planner = Planner(HYBRID)
    offers = {384: {0: 1, 1: 2}, 500: {0: 1, 1: 2, 2: 3}, 1152: {0: 1, 1: 2, 2: 3}, 0: {0: 1, 1: 2, 2: 3}}
    plan = planner.store_plan(set(), 1151, offers)
    assert kinds_by_chunk(plan.objects) == [(0, A), (1, A)]
    assert plan.unused_offers == (0, 384, 500, 1152)


@pytest.mark.requirement("C1")
def test_stores_nothing_twice() -> None:
    planner = Planner(HYBRID)
    offers = {768: {0: 70, 1: 71, 2: 72}}
    once = planner.store_plan(set(), 900, offers)
    assert planner.store_plan(set(kinds_by_chunk(once.objects)), 900, offers).objects == ()
    assert kinds_by_chunk(planner.store_plan({(0, A), (1, S)}, 900, offers).objects) == [(1, A)]
    assert kinds_by_chunk(planner.store_plan(set(), 900, offers, first_chunk=1).objects) == [(1, A), (1, S)]


@pytest.mark.requirement("C1")
def test_stores_only_what_is_fully_computed() -> None:
    planner = Planner((attention(16),), 64)
    assert planner.store_plan(set(), 63, {}).objects == ()
    assert kinds_by_chunk(planner.store_plan(set(), 64, {}).objects) == [(0, A)]


@pytest.mark.requirement("D2")
def test_stores_windows_only_where_every_block_is_alive() -> None:
    planner = Planner((attention(16), window(16, 20), window(32, 40)), 64)  # objects of 2 and 2 blocks
    stored = {(chunk, A) for chunk in range(4)}

    def chunks(alive: dict[int, int] | None) -> list[int]:
        return [item.chunk for item in planner.store_plan(stored, 256, {}, alive_from=alive).objects]

    assert chunks({1: 0, 2: 0}) == [0, 1, 2, 3]
    assert chunks({1: 2, 2: 0}) == [0, 1, 2, 3]  # the first two of a chunk's four blocks may be dead
    assert chunks({1: 3, 2: 0}) == [1, 2, 3]
    assert chunks({1: 0, 2: 1}) == [1, 2, 3]
    assert chunks({1: 14, 2: 6}) == [3]
    assert chunks({1: 15, 2: 0}) == []
    assert chunks({1: 0}) == []
    assert chunks(None) == []


@pytest.mark.requirement("P1")
def test_an_adversarial_presence_of_a_million_tokens_is_linear() -> None:
    """Every second window missing under a window of many chunks: a quadratic search would take a minute."""
    planner = Planner((attention(16), window(16, 1 << 20), state(64)))
    chunks = limits.KEYS_PER_CALL_MAX
    presence = {A: b"\1" * chunks, W: b"\1\0" * (chunks // 2), S: b"\1" * chunks}
    started = time.thread_time()
    assert planner.longest_boundary(presence, 0, chunks * 64) == 64
    assert time.thread_time() - started < 5
