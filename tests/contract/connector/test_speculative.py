"""What a lookup finds in RAM is leased with its answer: loaded a step earlier, and given back where nobody loads it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from kvdepot.client.vllm.scheduling.speculative import SPECULATIVE_MAX
from kvdepot.core.calls import AcquireCall, Kind, LocateCall

from tests.fakes.scripted_engine import BLOCK, ScriptedEngine
from tests.rigs.connector_rig import Make, cold, prompt
from tests.rigs.local_eviction import evict

SHAPES = pytest.mark.parametrize("options", [{}, {"hybrid": True}, {"ranks": 2}], ids=["dense", "hybrid", "two ranks"])
TOKENS = prompt(6.5)


def acquires(engine: ScriptedEngine) -> list[AcquireCall]:
    return [call for call in engine.depot.calls if isinstance(call, AcquireCall)]


def asked(engine: ScriptedEngine, tokens: list[int] = TOKENS) -> str:
    """A request whose lookup is not answered yet; the engine has looked what it has itself."""
    engine.depot.held.add(LocateCall)
    request_id = engine.add(tokens)
    engine.step()
    assert not acquires(engine)
    return request_id


def answered(engine: ScriptedEngine) -> None:
    """The lookup's answer comes between two steps."""
    engine.depot.held.clear()
    engine.session.let_go()


def taken(engine: ScriptedEngine) -> str:
    """A request whose lookup's answer is seen and whose load has taken the lease, which is not granted yet."""
    request_id = asked(engine)
    engine.depot.held = {AcquireCall}
    engine.session.let_go()
    engine.step()
    return request_id


def stored(make: Make, **options: Any) -> ScriptedEngine:
    """An engine that has nothing itself of what another one has stored."""
    make(**options).generate(TOKENS)
    return make(**options)


def finish(engine: ScriptedEngine, request_id: str, loaded_tokens: int) -> None:
    engine.run()
    assert engine.outputs[request_id] == cold(TOKENS)
    assert engine.hits[request_id] == loaded_tokens
    engine.settle()
    engine.assert_clean()


@pytest.mark.requirement("D4")
@SHAPES
def test_a_load_is_dispatched_in_the_step_that_allocates_it(make: Make, options: dict[str, Any]) -> None:
    engine = stored(make, **options)
    request_id = asked(engine)
    answered(engine)
    assert len(acquires(engine)) == 1, "without a step of the engine"
    assert not engine.side.loads.active
    scheduled = engine.step()
    assert [load.request_id for load in scheduled.kv_connector_metadata.loads] == [request_id]
    finish(engine, request_id, 6 * BLOCK)
    assert len(acquires(engine)) == 1
    assert engine.side.counters["speculative_loads"] == engine.side.counters["loads"] == 1


@pytest.mark.requirement("I5")
@SHAPES
def test_a_request_that_is_aborted_leaves_no_lease(make: Make, options: dict[str, Any]) -> None:
    engine = stored(make, **options)
    unanswered = asked(engine)
    engine.abort(unanswered)
    answered(engine)
    assert not acquires(engine), "nobody wants it any more"
    granted = asked(engine)
    answered(engine)
    assert engine.depot.lent()
    engine.abort(granted)
    assert not engine.depot.lent(), "at once: an engine without requests takes no step"
    engine.settle()
    engine.assert_clean()


@pytest.mark.requirement("I5")
def test_what_the_engine_does_not_take_at_once_is_given_back_and_loaded_later(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = stored(make)
    request_id = asked(engine)
    answered(engine)
    with monkeypatch.context() as patched:
        patched.setattr(engine.scheduler.kv_cache_manager, "allocate_slots", lambda *_, **__: None)  # no block is free
        engine.step()
        assert engine.depot.lent(), "the answer may have been seen when the step's admissions were over"
        engine.step()
        assert not engine.depot.lent()
    finish(engine, request_id, 6 * BLOCK)
    assert len(acquires(engine)) == 2
    assert engine.side.counters["speculative_cancelled"] == 1
    assert engine.depot.engine.status().counters["hit_tokens"] == 6 * BLOCK


@pytest.mark.requirement("C5")
def test_a_lease_for_other_local_tokens_is_given_back(make: Make) -> None:
    engine = stored(make)
    request_id = asked(engine)
    engine.depot.held.clear()
    asked_to_compute = {"extra_args": {"kv_transfer_params": {"max_load_tokens": 0}}}
    computed = engine.add(TOKENS[: 2 * BLOCK + 1], max_tokens=1, params=asked_to_compute)
    while computed not in engine.hits:  # the engine has two blocks itself when the answer comes
        engine.step()
    engine.side.loads._speculative.looked(engine.side._requests[request_id], 0)  # as it was told before
    engine.session.let_go()
    finish(engine, request_id, 6 * BLOCK)
    assert [call.kinds.count(Kind.ATTENTION) for call in acquires(engine)] == [6, 4]
    assert not engine.side.counters["speculative_loads"]
    assert engine.depot.engine.status().counters["hit_tokens"] == 4 * BLOCK


@pytest.mark.requirement("A1")
def test_nothing_is_leased_ahead_where_the_engine_has_kept_attention(make: Make) -> None:
    """It would be more than the load needs, and the daemon would count it as given."""
    engine = make(hybrid=True, retention=BLOCK, step_tokens=BLOCK)
    engine.generate(TOKENS)
    evict(engine, attention_from=4)
    request_id = asked(engine)
    answered(engine)
    finish(engine, request_id, 6 * BLOCK)
    assert [len(call.kinds) for call in acquires(engine)] == [3]
    assert engine.side.counters["local_reuse_tokens"] == 4 * BLOCK


@pytest.mark.requirement("P8")
@pytest.mark.parametrize("how", ["refused", "lost"])
def test_a_lease_that_is_not_granted_costs_no_load(make: Make, how: str) -> None:
    engine = stored(make)
    request_id = asked(engine)
    if how == "lost":
        engine.depot.lost.add(AcquireCall)
        answered(engine)
        engine.depot.lost.clear()
    else:
        daemon = engine.depot.engine
        config = daemon._config
        daemon.configure(replace(config, loads_in_flight=0), {})
        answered(engine)
        daemon.configure(config, {})
    finish(engine, request_id, 6 * BLOCK)
    assert len(acquires(engine)) == 2
    assert not engine.failed_reports


@pytest.mark.requirement("I5")
def test_an_answer_that_comes_in_the_wrong_order_is_the_load_s(make: Make) -> None:
    """The lookup's answer is seen, the lease's is not there yet: the load waits for it, and asks for no other one."""
    engine = stored(make)
    request_id = taken(engine)
    assert engine.side.loads.active == 1
    assert engine.side.counters["speculative_loads"] == 1
    answered(engine)
    finish(engine, request_id, 6 * BLOCK)
    assert len(acquires(engine)) == 1


@pytest.mark.requirement("I5")
def test_a_load_given_up_before_its_lease_is_granted_gives_it_back(make: Make) -> None:
    engine = stored(make)
    engine.abort(taken(engine))
    engine.settle()
    assert not engine.depot.lent()
    answered(engine)
    engine.settle()
    engine.assert_clean()


@pytest.mark.requirement("I1d")
@pytest.mark.parametrize("granted", [False, True], ids=["asked", "granted"])
def test_no_lease_of_an_epoch_that_is_over_is_used(make: Make, granted: bool) -> None:
    engine = stored(make)
    request_id = asked(engine)
    if granted:
        answered(engine)
    engine.side.reset()
    answered(engine)
    assert not engine.depot.lent()
    finish(engine, request_id, 0)
    assert len(acquires(engine)) == granted


@pytest.mark.requirement("P8")
def test_a_lookup_that_is_late_is_followed_by_nothing(make: Make) -> None:
    make().generate(TOKENS)
    engine = make(settings={"lookup_timeout_seconds": 0.01})
    request_id = asked(engine)
    engine.run()
    assert engine.hits[request_id] == 0
    answered(engine)
    assert not acquires(engine)
    engine.settle()
    engine.assert_clean()


@pytest.mark.requirement("P7")
@pytest.mark.parametrize("loads_in_flight", [48, 3])
def test_of_many_requests_only_so_many_are_leased_ahead(make: Make, loads_in_flight: int) -> None:
    make().generate(TOKENS)
    engine = make(settings={"loads_in_flight": loads_in_flight}, blocks=256)
    engine.depot.held.add(LocateCall)
    requests = [engine.add(TOKENS) for _ in range(SPECULATIVE_MAX + 4)]
    engine.step()
    answered(engine)
    assert len(acquires(engine)) == min(SPECULATIVE_MAX, loads_in_flight)
    engine.run()
    assert all(engine.outputs[request_id] == cold(TOKENS) for request_id in requests)
    assert not engine.failed_reports, "none was refused because of those"
    engine.settle()
    engine.assert_clean()


@pytest.mark.requirement("P7")
def test_leases_ahead_of_requests_that_wait_do_not_cost_another_one_its_load(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a scheduler passes requests over (max_loras) whose lookups are answered."""
    engine = stored(make, settings={"loads_in_flight": 2}, blocks=256)
    waiting = {asked(engine), asked(engine)}
    config = engine.depot.engine._config
    engine.depot.engine.configure(replace(config, loads_in_flight=2), {})  # no more than the connector itself takes
    answered(engine)
    matched = engine.connector.get_num_new_matched_tokens

    def passed_over(request: Any, local_tokens: int) -> Any:
        return (None, False) if request.request_id in waiting else matched(request, local_tokens)

    with monkeypatch.context() as patched:
        patched.setattr(engine.connector, "get_num_new_matched_tokens", passed_over)
        third = engine.add(TOKENS)
        while third not in engine.hits:
            engine.step()
    assert engine.hits[third] == 6 * BLOCK
    engine.run()
    assert not engine.failed_reports
    engine.settle()
    engine.assert_clean()


def test_an_answer_that_is_asked_for_again_leases_nothing(make: Make) -> None:
    """Each such lease would count as a use of the whole prefix."""
    engine = stored(make)
    request = engine.requests[asked(engine)]
    answered(engine)
    engine.side.offers.locate(engine.side._requests[request.request_id], 0, renewal=True)
    assert not engine.depot.lent(), "what the answer before was followed by is given back"
    engine.run()
    assert len(acquires(engine)) == 2
    assert engine.hits[request.request_id] == 6 * BLOCK
    engine.settle()
    engine.assert_clean()


def test_nothing_is_leased_ahead_where_it_is_switched_off(make: Make) -> None:
    engine = stored(make, settings={"speculative_acquire": False})
    request_id = asked(engine)
    answered(engine)
    assert not acquires(engine)
    finish(engine, request_id, 6 * BLOCK)
    assert not engine.side.counters["speculative_loads"]
