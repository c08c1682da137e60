"""Answers of the daemon that make no sense, grow old or come late, against vLLM's real scheduler."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from kvdepot.client.copy.base import Direction
from kvdepot.client.vllm.base.metadata import StepMeta
from kvdepot.client.vllm.scheduling.offers import RENEWALS_MAX
from kvdepot.core.calls import (
    AcquireCall,
    AcquireOutcome,
    AcquireReply,
    EndRequestCall,
    LocateCall,
    ReserveCall,
    ReserveReply,
)

from tests.fakes.scripted_engine import BLOCK, ScriptedEngine
from tests.rigs.connector_rig import Gate, Make, cold, prompt
from tests.rigs.patience import Deadline


@pytest.mark.requirement("I3")
@pytest.mark.parametrize("name", ["x" * 600, "é" * 300, "\ud800"], ids=["long", "long in utf-8", "surrogate"])
def test_a_request_id_that_fits_no_call_is_shortened(make: Make, name: str) -> None:
    """Users may choose the ids: what the daemon hears is a digest, the same in every call."""
    engine, other = make(), make()
    engine.name = name
    tokens = prompt(4.5)
    assert engine.generate(tokens) == cold(tokens)
    ids = {call.request_id for call in engine.depot.calls if isinstance(call, ReserveCall | EndRequestCall)}
    assert len(ids) == 1
    assert ids.pop().encode().startswith(b"digest-")
    assert other.generate(tokens) == cold(tokens)
    assert list(other.hits.values()) == [4 * BLOCK]
    engine.assert_clean()


@pytest.mark.requirement("I5")
@pytest.mark.parametrize(
    "wrong",
    [
        lambda reply: replace(reply, outcomes=reply.outcomes[:-1]),
        lambda reply: replace(reply, outcomes=reply.outcomes + reply.outcomes),
        lambda reply: replace(reply, outcomes=b"\xee" * len(reply.outcomes)),
        lambda reply: replace(reply, extents=reply.extents[:-1]),
    ],
    ids=["few", "many", "unknown", "cut"],
)
def test_an_answer_to_reserve_that_makes_no_sense_leaves_no_lease_and_no_hold(make: Make, wrong: Any) -> None:
    engine = make()
    serve = engine.session._serve

    def bend(call: Any) -> Any:
        reply = serve(call)
        return wrong(reply) if isinstance(reply, ReserveReply) else reply

    engine.session._serve = bend  # type: ignore[method-assign]
    tokens = prompt(4.5)
    assert engine.generate(tokens) == cold(tokens)
    assert engine.side.counters["store_dropped_malformed"] >= 4
    engine.assert_clean()


def _stored(make: Make, count: int) -> list[list[int]]:
    """Prompts that the depot has in full."""
    prompts = [prompt(4.5, seed) for seed in range(1, count + 1)]
    first = make()
    for tokens in prompts:
        first.generate(tokens)
    return prompts


@pytest.mark.requirement("P7")
def test_more_loads_than_may_be_in_flight_wait_and_are_loaded_too(make: Make) -> None:
    prompts = _stored(make, 5)
    engine = make(settings={"loads_in_flight": 1})
    ids = [engine.add(tokens) for tokens in prompts]
    while engine.scheduler.has_requests():
        engine.step()
        assert engine.side.loads.active <= 1
    assert [engine.outputs[request_id] for request_id in ids] == [cold(tokens) for tokens in prompts]
    assert [engine.hits[request_id] for request_id in ids] == [4 * BLOCK] * 5
    assert engine.depot.count(AcquireCall) == 5, "none was refused"
    assert not engine.failed_reports
    engine.assert_clean()


@pytest.mark.requirement("P7")
def test_beyond_the_lookup_timeout_the_answer_is_nothing(make: Make, gate: Gate) -> None:
    prompts = _stored(make, 2)
    engine = make(settings={"loads_in_flight": 1, "lookup_timeout_seconds": 0.05})
    gate.close()
    blocked = engine.add(prompts[0])
    engine.step()
    assert gate.reached()
    waiting = engine.add(prompts[1])
    limit = Deadline(10)
    while not engine.outputs[waiting]:
        engine.step()
        assert not limit.is_over()
    assert engine.hits[waiting] == 0
    gate.open()
    engine.run()
    assert engine.hits[blocked] == 4 * BLOCK
    assert engine.outputs[waiting] == cold(prompts[1])
    assert not engine.failed_reports
    engine.assert_clean()


class Ageing:
    """The connector's clock, put forward by the test."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self.ahead = 0.0
        engine.side.offers._clock = lambda: time.monotonic() + self.ahead


def _waits(engine: ScriptedEngine, tokens: list[int]) -> tuple[str, Ageing]:
    """A request whose lookup was answered minutes ago, when it comes out of the queue."""
    request_id = engine.add(tokens)
    for _ in range(3):
        engine.side.loads.build(engine.side.build(_nothing_scheduled()), None)
    clock = Ageing(engine)
    clock.ahead = 100.0
    return request_id, clock


def _nothing_scheduled() -> Any:
    return _scheduled({})


def _scheduled(tokens: dict[str, int]) -> Any:
    return SimpleNamespace(kv_connector_block_state=None, scheduled_new_reqs=[], num_scheduled_tokens=tokens)


@pytest.mark.requirement("I2")
def test_a_step_that_somebody_may_wait_for_is_not_idle(make: Make) -> None:
    side = make().side
    steps = [{}, {"r": 1}, {}, {}]

    def idle() -> list[bool]:
        metas = [StepMeta() for _ in steps]
        for meta, tokens in zip(metas, steps, strict=True):
            side.add_loads(meta, _scheduled(tokens))
        return [meta.idle for meta in metas]

    assert idle() == [True, False, False, True], "behind a step that computes, its tokens may be on their way yet"
    side._alone = False
    assert not any(idle())


@pytest.mark.requirement("P8")
def test_an_old_answer_is_asked_for_again_before_it_is_offered(make: Make) -> None:
    (tokens,) = _stored(make, 1)
    engine = make()
    request_id, _ = _waits(engine, tokens)
    serve = engine.session._serve

    def half_is_gone(call: Any) -> Any:
        if isinstance(call, LocateCall):
            call = replace(call, keys=call.keys[:32])
        if isinstance(call, AcquireCall) and len(call.kinds) > 2:
            return AcquireReply(AcquireOutcome.MISSING)
        return serve(call)

    engine.session._serve = half_is_gone  # type: ignore[method-assign]
    engine.run()
    assert engine.outputs[request_id] == cold(tokens)
    assert engine.hits[request_id] == 2 * BLOCK
    assert not engine.failed_reports
    engine.assert_clean()


@pytest.mark.requirement("P5")
def test_an_old_answer_that_is_not_renewed_in_time_is_not_used(make: Make) -> None:
    (tokens,) = _stored(make, 1)
    engine = make()
    request_id, _ = _waits(engine, tokens)
    engine.depot.held.add(LocateCall)
    limit = Deadline(10)
    while not engine.outputs[request_id]:
        engine.step()
        assert not limit.is_over()
    assert engine.hits[request_id] == 0
    engine.depot.held.clear()
    engine.session.let_go()
    engine.run()
    assert engine.depot.count(AcquireCall) == 0
    engine.assert_clean()


@pytest.mark.requirement("P5")
def test_steps_slower_than_answers_age_do_not_keep_a_request_for_ever(make: Make) -> None:
    (tokens,) = _stored(make, 1)
    engine = make()
    request_id, clock = _waits(engine, tokens)
    for _ in range(5):
        clock.ahead += 10.0
        engine.step()
    assert engine.depot.count(AcquireCall) == 1
    engine.run()
    assert engine.hits[request_id] == 4 * BLOCK
    assert engine.outputs[request_id] == cold(tokens)
    engine.assert_clean()


@pytest.mark.requirement("I2")
def test_a_queue_of_old_answers_is_not_asked_for_all_at_once(make: Make) -> None:
    prompts = _stored(make, 3)
    engine = make()
    ids = [_waits(engine, tokens)[0] for tokens in prompts for _ in range(8)]
    before = engine.depot.count(LocateCall)
    engine.step()
    assert 0 < engine.depot.count(LocateCall) - before <= RENEWALS_MAX
    engine.run()
    assert all(engine.outputs[request_id] for request_id in ids)
    assert engine.side.offers._renewals == 0
    engine.assert_clean()


@pytest.mark.requirement("I2")
def test_copies_in_progress_pin_a_quarter_of_a_small_pool_at_most(make: Make, gate: Gate) -> None:
    engine = make(blocks=24)
    gate.close(direction=Direction.STORE)
    engine.add(prompt(12.5), max_tokens=1)
    most = 0
    for _ in range(6):
        engine.step()
        most = max(most, engine.side.holds.pinned_blocks)
    assert most == 6
    gate.open()
    engine.run()
    assert engine.side.counters["stored_objects"] == 12
    engine.assert_clean()
