"""Sliding windows and latent attention against vLLM's real scheduler: exactly what a boundary needs is moved.

The fake engine's forward checks every block that its next token looks back at, and that
nobody has written into the null block.
"""

from __future__ import annotations

from typing import Any

import pytest
from kvdepot.client.copy.base import Direction
from kvdepot.client.copy.cpu import CpuCopier
from kvdepot.client.vllm.worker.copy_thread import CopyThread
from kvdepot.core.calls import AcquireCall, Kind

from tests.fakes.scripted_engine import BLOCK, ScriptedEngine
from tests.rigs.connector_rig import Make, cold, prompt

CHUNK = 2 * BLOCK
WINDOWS = [(17,), (32,), (33,), (34,), (50,), (200,), (20, 50)]
"""Tokens: one block back exactly; below, at and above a whole chunk; over two; beyond the prompt; two groups."""
SETTINGS = {"chunk_tokens": CHUNK}


def needed_blocks(window: int, boundary: int) -> int:
    """A token at `boundary` attends to the window - 1 tokens before it."""
    return boundary // BLOCK - max(boundary - window + 1, 0) // BLOCK


def loaded_blocks(engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch) -> dict[int, list[int]]:
    """Per planner group the engine's blocks that loads write from now on."""
    written: dict[int, list[int]] = {}
    load = CopyThread._load

    def seen(thread: CopyThread, op: Any) -> list[int]:
        for copied in op.objects:
            for span in copied.spans:
                written.setdefault(span.group, []).extend(span.block_ids)
        return load(thread, op)

    monkeypatch.setattr(CopyThread, "_load", seen)
    return written


@pytest.mark.requirement("D2")
@pytest.mark.parametrize("full", [True, False], ids=["mixed", "windows alone"])
@pytest.mark.parametrize("step_tokens", [2048, 48], ids=["one step", "many steps"])
@pytest.mark.parametrize("windows", WINDOWS, ids=str)
def test_only_the_blocks_inside_the_window_are_loaded(
    make: Make, monkeypatch: pytest.MonkeyPatch, windows: tuple[int, ...], step_tokens: int, full: bool
) -> None:
    tokens = prompt(12.5)
    engine = make(windows=windows, full=full, settings=SETTINGS, step_tokens=step_tokens, blocks=128)
    assert engine.generate(tokens) == cold(tokens)
    engine.reset()
    written = loaded_blocks(engine, monkeypatch)
    assert engine.generate(tokens) == cold(tokens)
    assert list(engine.hits.values()) == [0, 12 * BLOCK]
    expected = [12] * full + [needed_blocks(window, 12 * BLOCK) for window in windows]
    assert [len(set(written[group])) for group in range(len(expected))] == expected
    assert all(0 not in blocks for blocks in written.values())
    engine.assert_clean()


@pytest.mark.requirement("D2")
@pytest.mark.parametrize("windows", WINDOWS, ids=str)
def test_every_boundary_of_a_prompt_can_be_resumed_at(make: Make, windows: tuple[int, ...]) -> None:
    tokens = prompt(12.5)
    first = make(windows=windows, settings=SETTINGS, step_tokens=48, blocks=128)
    first.generate(tokens)
    second = make(windows=windows, settings=SETTINGS, step_tokens=48, blocks=128)
    for blocks in range(2, 13, 2):
        part = [*tokens[: blocks * BLOCK], 5, 6, 7]
        assert second.generate(part) == cold(part)
        second.reset()
    assert list(second.hits.values()) == [blocks * BLOCK for blocks in range(2, 13, 2)]
    for engine in (first, second):
        engine.assert_clean()


@pytest.mark.requirement("C5")
@pytest.mark.parametrize("window", [20, 32, 50])
@pytest.mark.parametrize("local", [1, 2, 5, 8, 9, 11])
def test_a_local_hit_and_a_deeper_external_tail_are_one_hit(make: Make, local: int, window: int) -> None:
    tokens = prompt(12.5)
    engine = make(windows=(window,), settings=SETTINGS, blocks=128)
    engine.generate(tokens)
    engine.reset()
    engine.depot.present = False
    engine.generate(tokens[: local * BLOCK + 1], max_tokens=1)
    engine.depot.present = True
    engine.settle()
    assert engine.generate(tokens) == cold(tokens)
    assert list(engine.hits.values()) == [0, 0, 12 * BLOCK]
    engine.assert_clean()


@pytest.mark.requirement("D3")
@pytest.mark.parametrize("windows", [(17,), (50,), (20, 50)], ids=str)
def test_bytes_granted_are_what_the_geometry_predicts(make: Make, windows: tuple[int, ...]) -> None:
    tokens = prompt(40.5)
    first, second = (make(windows=windows, settings=SETTINGS, blocks=256) for _ in range(2))
    first.generate(tokens)
    counters = second.depot.engine.counters
    before = counters.get("granted_read_bytes")
    assert second.generate(tokens) == cold(tokens)
    moved = counters.get("granted_read_bytes") - before
    page = 1024  # of one layer
    reach = max(-(-(window - 1) // BLOCK) * BLOCK for window in windows)
    objects = -(-reach // CHUNK)
    of_windows = objects * sum(min(CHUNK // BLOCK, -(-(window - 1) // BLOCK)) * page for window in windows)
    assert moved == 40 * 2 * page + of_windows
    all_full = 40 * (2 + len(windows)) * page
    assert moved < all_full * 0.75
    acquired = next(call for call in second.depot.calls[::-1] if isinstance(call, AcquireCall))
    assert acquired.kinds.count(Kind.WINDOW) == objects


@pytest.mark.requirement("D4")
def test_a_full_local_hit_moves_nothing(make: Make) -> None:
    engine = make(windows=(50,), settings=SETTINGS)
    tokens = prompt(6.5)
    engine.generate(tokens)
    stored = engine.depot.engine.counters.get("granted_write_bytes")
    assert engine.generate(tokens) == cold(tokens)
    assert list(engine.hits.values()) == [0, 6 * BLOCK]
    assert engine.depot.count(AcquireCall) == 0
    assert engine.depot.engine.counters.get("granted_write_bytes") == stored > 0
    engine.assert_clean()


@pytest.mark.requirement("D5")
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", [Kind.ATTENTION, Kind.WINDOW])
def test_one_group_that_fails_on_one_rank_fails_the_whole_load(
    make: Make, monkeypatch: pytest.MonkeyPatch, kind: Kind, rank: int
) -> None:
    tokens = prompt(8.5)
    make(windows=(50,), ranks=2, settings=SETTINGS).generate(tokens)
    engine = make(windows=(50,), ranks=2, settings=SETTINGS)
    worker: Any = engine.workers[rank].worker_side
    copier = worker._copies._copier
    layers = set(worker._layers.of_group(engine.side.planner.groups_of(kind)[0]))
    copy = CpuCopier.copy

    def broken(own: CpuCopier, arena: Any, batch: Any, direction: Any) -> None:
        if own is copier and direction is Direction.LOAD and layers & set(batch.layers.tolist()):
            raise OSError("no such memory")
        copy(own, arena, batch, direction)

    monkeypatch.setattr(CpuCopier, "copy", broken)
    request_id = engine.add(tokens)
    engine.run()
    assert engine.failed_reports == [request_id]
    assert not engine.loaded_reports
    assert engine.hits[request_id] == 0
    assert engine.outputs[request_id] == cold(tokens)
    assert engine.depot.count(AcquireCall) == 1
    assert engine.depot.lent() == 0


def test_a_small_pool_with_preemptions_stays_right(make: Make) -> None:
    tokens = [prompt(6.5, seed) for seed in range(4)]
    make(windows=(20, 50), settings=SETTINGS).generate(tokens[0])
    engine = make(windows=(20, 50), settings=SETTINGS, blocks=40)
    ids = [engine.add(each, max_tokens=40) for each in tokens]
    engine.run()
    assert [engine.outputs[i] for i in ids] == [cold(each, 40) for each in tokens]
    engine.assert_clean()


def test_windows_and_states_in_one_model(make: Make) -> None:
    tokens = prompt(9.5)
    engine = make(windows=(50,), hybrid=True)
    assert engine.generate(tokens) == cold(tokens)
    engine.reset()
    assert engine.generate(tokens) == cold(tokens)
    assert list(engine.hits.values()) == [0, 9 * BLOCK]
    engine.assert_clean()


@pytest.mark.requirement("P12")
def test_latent_attention_is_stored_once_and_loaded_by_every_rank(make: Make) -> None:
    tokens = prompt(6.5)
    engine = make(latent=True, ranks=2, windows=(33,), settings=SETTINGS)
    planner = engine.side.planner
    assert [group.replicated for group in planner.groups] == [True, False]
    assert planner.object_bytes(Kind.ATTENTION) == 2 * 2 * 1024  # layers, blocks: one rank's bytes
    assert planner.object_bytes(Kind.WINDOW) == 2 * 2 * 1024  # ranks, blocks
    assert engine.generate(tokens) == cold(tokens)
    engine.reset()
    assert engine.generate(tokens) == cold(tokens)
    assert list(engine.hits.values()) == [0, 6 * BLOCK]
    engine.assert_clean()


@pytest.mark.requirement("P12", "I1")
def test_every_rank_stores_its_own_heads_of_a_group_whose_first_layer_is_a_latent(make: Make) -> None:
    """vLLM's scheduler has the spec of the first layer for the whole group."""
    tokens = prompt(6.5)
    engine = make(mixed=True, ranks=2, settings=SETTINGS)
    assert engine.generate(tokens) == cold(tokens)
    engine.reset()
    assert engine.generate(tokens) == cold(tokens)
    assert list(engine.hits.values()) == [0, 6 * BLOCK]
    engine.assert_clean()


@pytest.mark.requirement("P11", "I1")
def test_a_request_that_is_aborted_during_its_load_stores_nothing(make: Make) -> None:
    """vLLM counts the tokens of a load as computed from its allocation on, and hands the blocks over at the abort."""
    tokens = prompt(6.5)
    make(windows=(40,), settings=SETTINGS).generate(tokens)
    engine = make(windows=(40,), settings=SETTINGS)
    engine.depot.held.add(AcquireCall)
    request_id = engine.add(tokens)
    state, request = engine.side._requests[request_id], engine.requests[request_id]
    while not request.num_computed_tokens:
        engine.step()
    engine.abort(request_id)
    assert all(kind is Kind.ATTENTION for _, kind in state.stored), "which the daemon is known to have"
    assert not engine.side.stores.open_requests
    engine.depot.held.clear()
    engine.session.let_go()
    engine.run()
    engine.settle()
    engine.assert_clean()
