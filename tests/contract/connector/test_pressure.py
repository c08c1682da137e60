"""The connector under pressure: little credit, few blocks, resets and sleep in the middle, a greedy neighbour (P7)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from kvdepot.client.copy.base import Direction
from kvdepot.client.vllm.scheduling import stores as stores_module
from kvdepot.client.vllm.scheduling.pins import PINNED_PART
from kvdepot.core.calls import ReserveCall
from vllm.v1.request import RequestStatus

from tests.fakes.direct_session import DirectDepot
from tests.fakes.drafting_engine import DraftingEngine
from tests.fakes.scripted_engine import BLOCK, ScriptedEngine
from tests.rigs.connector_rig import PATIENCE_SECONDS, Gate, Make, cold, prompt, step_until
from tests.rigs.patience import patient
from tests.rigs.seeds import drawn

OBJECT_BYTES = 4096
"""A chunk of the scripted engine's attention in the arena: two layers of 1024 bytes, in a page."""


@pytest.fixture
def depot(request: pytest.FixtureRequest) -> DirectDepot:
    return DirectDepot(**getattr(request, "param", {}))


def of_depot(**config: Any) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("depot", [config], indirect=True, ids=[""])


@contextmanager
def stalled(engine: ScriptedEngine) -> Iterator[None]:
    """The copies of this one engine stand still; the thread that makes them is a rank's own."""
    go_on = threading.Event()
    for copies in engine.copies:
        begin = copies._do
        copies._do = lambda op, mark, begin=begin: (go_on.wait(patient(PATIENCE_SECONDS)), begin(op, mark))
    try:
        yield
    finally:
        go_on.set()


# --- credit


@pytest.mark.requirement("P7")
@of_depot(credit_bytes=2 * OBJECT_BYTES)
def test_stores_without_credit_are_dropped_and_counted_and_delay_nobody(
    make: Make, depot: DirectDepot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores_module, "RETRY_SECONDS", 0.001)
    engine = make()
    tokens, other = prompt(6.5), prompt(5.5, seed=1)
    with stalled(engine):
        ids = [engine.add(tokens), engine.add(other)]
        step_until(engine, "answered", lambda: all(len(engine.outputs[each]) == 4 for each in ids))
        step_until(engine, "given up", lambda: engine.side.counters["store_dropped_later"] == 6 + 5 - 2)
        assert depot.lent() == 2, "no more than the credit is lent"
    engine.run()
    assert engine.side.counters["stored_objects"] == 2
    assert [engine.outputs[each] for each in ids] == [cold(tokens), cold(other)]
    engine.assert_clean()


@pytest.mark.requirement("P7")
@of_depot(credit_bytes=4 * OBJECT_BYTES, loads_in_flight=2)
def test_an_engine_that_holds_all_it_may_takes_nothing_from_its_neighbour(make: Make, depot: DirectDepot) -> None:
    prompts = [prompt(5.5, seed) for seed in range(4)]
    first = make()
    for tokens in prompts:
        first.generate(tokens)
    greedy, modest = make(settings={"loads_in_flight": 48}), make()
    with stalled(greedy):
        loading = [greedy.add(tokens) for tokens in prompts]
        step_until(greedy, "refused", lambda: len(greedy.failed_reports) == 2)
        storing = greedy.add(prompt(9.5, seed=50), max_tokens=1)
        step_until(greedy, "storing", lambda: depot.lent() == 2 * 5 + 4)
        assert modest.generate(prompts[3]) == cold(prompts[3])
        assert list(modest.hits.values()) == [5 * BLOCK], "it loads"
        fresh = prompt(4.5, seed=60)
        assert modest.generate(fresh) == cold(fresh)
        assert modest.side.counters["stored_objects"] == 4, "and stores, four being its credit"
        modest.assert_clean(lent=2 * 5 + 4)
    greedy.run()
    assert [greedy.outputs[each] for each in loading] == [cold(tokens) for tokens in prompts]
    assert greedy.outputs[storing] == cold(prompt(9.5, seed=50), 1)
    greedy.assert_clean()


# --- blocks


@pytest.mark.requirement("P7")
def test_what_waits_for_a_grant_takes_no_block_from_the_engine(make: Make) -> None:
    """A pool of 12 blocks, 15 requests of 6, and a depot that never answers: all are weakly held, and reused."""
    engine = make(blocks=12)
    engine.depot.held.add(ReserveCall)
    prompts = [prompt(5.5, seed) for seed in range(15)]
    ids = [engine.add(tokens) for tokens in prompts]
    step_until(engine, "answered", lambda: all(len(engine.outputs[each]) == 4 for each in ids))
    assert engine.side.holds.held_blocks
    assert engine.pool.get_num_free_blocks() == 11, "a weak hold counts as free"
    assert [engine.outputs[each] for each in ids] == [cold(tokens) for tokens in prompts]
    engine.depot.held.clear()
    engine.session.let_go()
    engine.run()
    assert engine.side.counters["store_dropped_reused"] >= 13 * 5
    assert engine.side.counters["stored_objects"] <= 2 * 5
    engine.assert_clean()
    other = make()
    assert [other.generate(tokens) for tokens in prompts] == [cold(tokens) for tokens in prompts]


@pytest.mark.requirement("P7")
@pytest.mark.parametrize("hybrid", [False, True], ids=["dense", "hybrid"])
def test_pinned_blocks_of_copies_that_stand_still_preempt_nobody_for_ever(make: Make, hybrid: bool) -> None:
    engine = make(hybrid=hybrid, blocks=28 if hybrid else 16)
    prompts = [prompt(5.5, seed) for seed in range(6)]
    with stalled(engine):
        ids = [engine.add(tokens, max_tokens=20) for tokens in prompts]
        step_until(engine, "answered", lambda: all(len(engine.outputs[each]) == 20 for each in ids))
        assert 0 < engine.side.holds.pinned_blocks <= len(engine.pool.blocks) // PINNED_PART
    engine.run()
    assert [engine.outputs[each] for each in ids] == [cold(tokens, 20) for tokens in prompts]
    engine.assert_clean()


# --- resets and sleep


def _storing(engine: ScriptedEngine, stage: str, gate: Gate) -> str:
    """A request whose stores are `asked`, `granted` or `pinned`."""
    if stage == "pinned":
        gate.close(direction=Direction.STORE)
    else:
        engine.depot.held.add(ReserveCall)
    request_id = engine.add(prompt(5.5), max_tokens=40)
    for _ in range(3):
        engine.step()
    if stage == "granted":
        engine.session.let_go()
        engine.session.poll()
    if stage == "pinned":
        assert gate.reached()
        assert engine.side.holds.pinned_blocks
    return request_id


@pytest.mark.requirement("P7")
@pytest.mark.parametrize("hybrid", [False, True], ids=["dense", "hybrid"])
@pytest.mark.parametrize("stage", ["asked", "granted", "pinned"])
def test_sleep_while_stores_are_pending(
    make: Make, gate: Gate, stage: str, hybrid: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM's `EngineCore.sleep`: abort all, step until there is no work, reset everything, or raise."""
    if stage != "pinned":  # a depot that does not answer; ranks do
        monkeypatch.setattr(stores_module, "PENDING_SECONDS_MAX", patient(0.5))  # copies take longer on a busy machine
    engine = make(hybrid=hybrid)
    _storing(engine, stage, gate)
    engine.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    if stage == "pinned":
        assert engine.scheduler.has_requests(), "or it would reset with pins"
        assert not engine.scheduler.reset_prefix_cache()
        gate.open()
    step_until(engine, "nothing to do", lambda: not engine.scheduler.has_requests())
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    for memory in engine.memories:
        memory.fill(7)  # asleep: its memory is gone
    engine.depot.held.clear()
    engine.session.let_go()
    engine.settle()
    tokens = prompt(5.5)
    assert engine.generate(tokens) == cold(tokens)
    assert list(engine.hits.values()) == [0, 0], "of another epoch"
    engine.assert_clean()
    other = make(hybrid=hybrid)
    assert other.generate(tokens) == cold(tokens)


@pytest.mark.requirement("P7")
@pytest.mark.parametrize("stage", ["asked", "granted"])
def test_a_reset_of_running_requests_while_stores_are_pending(make: Make, gate: Gate, stage: str) -> None:
    engine = make()
    request_id = _storing(engine, stage, gate)
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    for memory in engine.memories:
        memory.fill(7)
    engine.depot.held.clear()
    engine.session.let_go()
    engine.run()
    assert engine.outputs[request_id] == cold(prompt(5.5), 40)
    engine.assert_clean()
    other = make()
    assert other.generate(prompt(5.5)) == cold(prompt(5.5)), "what is stored of it is right"


# --- speculative decoding


@pytest.mark.parametrize("seed", drawn(range(4)))
def test_speculated_tokens_that_turn_out_wrong_are_stored_for_nobody(make: Make, seed: int) -> None:
    """Blocks full of rejected guesses are written and never hashed: what is stored is what was accepted."""
    options: dict[str, Any] = {"method": "ngram", "draft_tokens": 3, "acceptance": 0.7, "seed": seed, "blocks": 40}
    engine, other = make(DraftingEngine, **options), make(DraftingEngine, **options)
    prompts = [prompt(2.5 + number, seed=number) for number in range(3)]
    accepted = []
    engine.observe = lambda stats: accepted.append(stats.spec_decoding_stats)
    ids = [engine.add(tokens, max_tokens=4 * BLOCK) for tokens in prompts]
    engine.run()
    assert sum(drafts.num_accepted_tokens for drafts in accepted if drafts is not None) > 10
    answers = [engine.outputs[each][: 4 * BLOCK] for each in ids]
    assert answers == [cold(tokens, 4 * BLOCK) for tokens in prompts]
    engine.assert_clean()
    for tokens, answer in zip(prompts, answers, strict=True):
        turn = [*tokens, *answer, *prompt(1, seed=9)]
        assert other.generate(turn) == cold(turn), "the forward checks each byte that was loaded"
        assert list(other.hits.values())[-1] >= (len(tokens) + len(answer) - 1) // BLOCK * BLOCK
    other.assert_clean()
