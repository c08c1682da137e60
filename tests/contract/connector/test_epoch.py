"""An operator bumps the epoch while engines run (rows P2, I1): the connector on vLLM's scheduler and block pool."""

from __future__ import annotations

from typing import Any

import pytest
from kvdepot.client.copy.base import Direction
from kvdepot.core.calls import AcquireCall, CommitCall, CommitOutcome, LocateCall, ReserveCall

from tests.fakes.direct_session import DirectDepot
from tests.fakes.scripted_engine import BLOCK, ScriptedEngine
from tests.rigs.connector_rig import Gate, Make, cold, prompt

SHAPES = pytest.mark.parametrize("options", [{}, {"hybrid": True}, {"ranks": 2}], ids=["dense", "hybrid", "two ranks"])


def bump(depot: DirectDepot, engine: ScriptedEngine | None = None) -> None:
    """Of all namespaces, or of the one that an engine has now."""
    voiding = depot.engine.invalidation
    epochs = voiding.epochs
    voiding.begin(
        epochs.with_invalidated(engine.session.specs[-1].namespace_id()) if engine else epochs.with_all_invalidated()
    )


def committed(depot: DirectDepot) -> int:
    return int(depot.engine.counters.get("committed_objects.committed"))


def poison(depot: DirectDepot) -> None:
    """What lies in the arena is wrong from now on: whoever is served it answers wrongly."""
    depot.buffer[:] = bytes([0xA5]) * depot.layout.data_bytes


@pytest.mark.requirement("P2")
def test_an_engine_that_is_sent_weights_has_an_epoch_of_its_own_from_the_start(make: Make) -> None:
    """Of an update of them nobody tells the connector."""
    tokens = prompt(5.5)
    options: list[dict[str, Any]] = [
        {}, {}, {"weights_arrive": False}, {"settings": {"keep_across_sleep": True}},
        {"settings": {"weights_version": "1"}}, {"settings": {"weights_version": "1"}},
    ]  # fmt: skip
    engines = [make(**{"weights_arrive": True} | option) for option in options]
    for engine in engines:
        assert engine.generate(tokens) == cold(tokens)
    assert [next(iter(engine.hits.values())) for engine in engines] == [0, 0, 0, 5 * BLOCK, 0, 5 * BLOCK]
    epochs = [engine.session.specs[-1].epoch for engine in engines]
    assert [epoch.partition(":")[0] for epoch in epochs] == ["random", "random", "", "", "version", "version"]
    assert epochs[0] != epochs[1]


@pytest.mark.requirement("P2")
@SHAPES
@pytest.mark.parametrize("everywhere", [True, False], ids=["all", "one"])
def test_engines_from_before_and_after_are_served_nothing_of_before(
    make: Make, depot: DirectDepot, options: dict[str, Any], everywhere: bool
) -> None:
    before = make(**options)
    tokens = prompt(5.5)
    before.generate(tokens)
    bump(depot, None if everywhere else before)
    poison(depot)
    before.reset()  # its own prefix cache
    assert before.generate(tokens) == cold(tokens)
    assert before.generate(prompt(5.5, seed=3)) == cold(prompt(5.5, seed=3))
    after = make(**options)
    assert after.generate(tokens) == cold(tokens)
    assert {*before.hits.values(), *after.hits.values()} == {0}
    assert [spec.bumps for spec in after.session.specs] == [0, 1]
    assert before.session.specs[-1] == after.session.specs[-1]
    after.assert_clean()
    stored = make(**options)
    assert stored.generate(tokens) == cold(tokens)
    assert list(stored.hits.values()) == [5 * BLOCK], "what was stored after it"
    before.assert_clean()


@pytest.mark.requirement("P2")
@pytest.mark.parametrize("step", ["reserving", "granted", "dispatched", "after"])
def test_a_request_alive_across_it_stores_nothing(make: Make, depot: DirectDepot, gate: Gate, step: str) -> None:
    engine = make()
    gate.close(direction=Direction.STORE)
    if step != "dispatched":
        depot.held.add(ReserveCall)
    request_id = engine.add(prompt(5.5), max_tokens=4 * BLOCK)
    engine.step()
    engine.step()
    if step == "granted":
        engine.session.let_go()
        engine.session.poll()
    if step == "dispatched":
        assert gate.reached()
    bump(depot)
    depot.held.clear()
    engine.session.let_go()
    gate.open()
    engine.run()
    assert request_id not in engine.scheduler.requests
    assert committed(depot) == 0
    outcomes = {name for name in engine.side.counters if name.startswith("commit_")}
    assert outcomes <= {f"commit_{int(CommitOutcome.EXPIRED)}"}
    engine.assert_clean()
    depot.engine.tick()
    assert depot.lent() == 0
    # The next one is of the new epoch.
    engine.generate(prompt(5.5, seed=5))
    engine.generate(prompt(5.5, seed=6))
    assert committed(depot) >= 5


@pytest.mark.requirement("P2")
@SHAPES
def test_a_request_that_has_loaded_before_it_does_not_store_that_anew(
    make: Make, depot: DirectDepot, options: dict[str, Any]
) -> None:
    """Where the parent of what it stores is gone, a request stores from its first chunk on: here it must not."""
    tokens = prompt(5.5)
    make(**options).generate(tokens)
    engine = make(**options)
    request_id = engine.add(tokens, max_tokens=6 * BLOCK)
    while len(engine.outputs[request_id]) < 2:
        engine.step()
    assert engine.hits[request_id] == 5 * BLOCK
    bump(depot)
    before = committed(depot)
    other = engine.add(prompt(4.5, seed=7))  # whose lookup tells the engine
    engine.run()
    assert len(engine.outputs[request_id]) == 6 * BLOCK and engine.outputs[other]
    assert engine.session.specs[-1].bumps == 1
    assert committed(depot) == before
    engine.assert_clean()


@pytest.mark.requirement("P2")
@SHAPES
def test_a_load_under_way_fails_and_its_tokens_are_computed(
    make: Make, depot: DirectDepot, gate: Gate, options: dict[str, Any]
) -> None:
    tokens = prompt(9.5)
    make(**options).generate(tokens)
    engine = make(**options)
    gate.close(batch_bytes=2048)
    request_id = engine.add(tokens)
    engine.step()
    engine.step()
    assert gate.reached()
    bump(depot)
    poison(depot)
    gate.open()
    engine.run()
    assert engine.failed_reports == [request_id]
    assert engine.outputs[request_id] == cold(tokens)
    assert (engine.side.counters["loads"], engine.side.counters["loads_done"]) == (1, 0)
    engine.assert_clean()


@pytest.mark.requirement("P2")
@pytest.mark.parametrize("held", [LocateCall, AcquireCall])
def test_an_answer_from_before_leads_nowhere(make: Make, depot: DirectDepot, held: type) -> None:
    tokens = prompt(9.5)
    make().generate(tokens)
    engine = make()
    depot.held.add(held)
    request_id = engine.add(tokens)
    engine.step()
    engine.step()
    bump(depot)
    poison(depot)
    depot.held.clear()
    engine.session.let_go()
    engine.run()
    assert engine.outputs[request_id] == cold(tokens)
    engine.assert_clean()


@pytest.mark.requirement("P10")
def test_the_engine_says_why(make: Make, depot: DirectDepot, gate: Gate) -> None:
    """Where it has heard of the bump while the load was under way."""
    tokens = prompt(9.5)
    make().generate(tokens)
    engine = make()
    gate.close(batch_bytes=2048)
    engine.add(tokens)
    engine.step()
    engine.step()
    assert gate.reached()
    bump(depot)
    engine.add(prompt(3.5, seed=8))  # its lookup is what tells the engine
    engine.step()
    engine.step()
    gate.open()
    engine.run()
    counted = engine.side.counters
    assert (counted["misses.epoch_bumped"], counted["load_failed_epoch"], counted["stale.epoch"]) == (1, 1, 1)
    assert (counted["epochs"], counted["misses.weights_changed"]) == (1, 0)
    engine.assert_clean()


def test_an_engine_that_starts_after_it_begins_no_other_epoch(make: Make, depot: DirectDepot) -> None:
    bump(depot)
    engine = make()
    engine.generate(prompt(5.5))
    assert committed(depot) == 5
    assert (engine.side.namespaces.epoch_number, engine.side.counters["epochs"]) == (0, 0)
    assert depot.count(CommitCall)


@pytest.mark.requirement("P2")
@pytest.mark.parametrize("settings", [{"keep_across_sleep": True}, {"weights_version": "7"}])
def test_also_where_the_user_names_the_weights(make: Make, depot: DirectDepot, settings: dict[str, Any]) -> None:
    engine = make(settings=settings)
    tokens = prompt(5.5)
    engine.generate(tokens)
    bump(depot)
    engine.reset()
    assert engine.generate(tokens) == cold(tokens)
    assert list(engine.hits.values()) == [0, 0]
    assert engine.session.specs[-1].bumps == 1
    assert engine.session.specs[-1].epoch == engine.session.specs[0].epoch


@pytest.mark.requirement("P2")
@pytest.mark.parametrize(
    "options", [{}, {"hybrid": True}, {"windows": [3 * BLOCK]}, {"runs_ahead": True}],
    ids=["dense", "hybrid", "windows", "runs ahead"],
)  # fmt: skip
def test_what_the_engine_s_own_cache_has_of_before_does_not_come_back(
    make: Make, depot: DirectDepot, options: dict[str, Any]
) -> None:
    """The engine has loaded it, goes on to have it, and computes on it."""
    tokens, settings = prompt(6.5), {"chunk_tokens": 2 * BLOCK}
    make(**options, settings=settings).generate(tokens)
    engine = make(**options, settings=settings)
    engine.generate(tokens)
    assert list(engine.hits.values()) == [6 * BLOCK]
    bump(depot)
    engine.generate(prompt(4.5, seed=7))  # whose lookup tells the engine
    before = committed(depot)
    turn = [*tokens, *prompt(4.5, seed=1)]
    for again in (tokens, turn, turn):
        engine.generate(again)
    assert min(list(engine.hits.values())[2:]) >= 6 * BLOCK, "its own"
    assert committed(depot) == before, "neither that nor what was computed on it"
    # Computed anew it is stored, and so is what is computed on that: also behind the last whole chunk.
    engine.reset()
    engine.generate(turn)
    stored = committed(depot)
    assert stored > before
    longer = [*turn, *prompt(4.5, seed=2)]
    engine.generate(longer)
    assert list(engine.hits.values())[-1] % (2 * BLOCK), "its own hit ends within a chunk"
    assert committed(depot) > stored
    other = make(**options, settings=settings)
    assert other.generate(longer) == cold(longer)
    # Of one prompt a recurrent state is stored in the same places as without a bump.
    assert list(other.hits.values()) == [10 * BLOCK if "hybrid" in options else 14 * BLOCK]
    engine.assert_clean()
    other.assert_clean()


@pytest.mark.requirement("P2")
def test_what_is_loaded_after_it_counts_as_much_as_what_is_computed(make: Make, depot: DirectDepot) -> None:
    engine, other = make(), make()
    bump(depot)
    for one in (engine, other):
        one.generate(prompt(1.5, seed=7))
        one.reset()
    tokens = prompt(5.5)
    other.generate(tokens)
    engine.generate(tokens)
    assert list(engine.hits.values())[-1] == 5 * BLOCK
    stored = committed(depot)
    engine.generate([*tokens[: 5 * BLOCK], *prompt(3.5, seed=4)])
    assert committed(depot) == stored + 3


@pytest.mark.requirement("I1d")
def test_what_the_engine_keeps_where_its_own_reset_fails_is_not_stored_as_of_the_new_weights(
    make: Make, depot: DirectDepot
) -> None:
    """vLLM tells connectors of new weights although a running request keeps its blocks, and answers False."""
    engine = make()
    tokens = prompt(6.5)
    engine.generate(tokens)
    running = engine.add(prompt(2.5, seed=5), max_tokens=30)
    for _ in range(3):
        engine.step()
    assert engine.scheduler.reset_prefix_cache(reset_connector=True) is False
    assert engine.side.counters["epochs"] == 1
    engine.run()
    assert running not in engine.scheduler.requests
    before = committed(depot)
    turn = [*tokens, *prompt(2.5, seed=1)]
    engine.generate(turn)
    assert (list(engine.hits.values())[-1], committed(depot)) == (6 * BLOCK, before), "its own, of before"
    engine.reset()
    engine.generate(turn)
    assert list(engine.hits.values())[-1] == 0, "none of it is loaded"
    assert committed(depot) == before + 9, "what is computed since is stored"


@pytest.mark.requirement("I1d")
def test_also_where_the_connector_s_own_holds_let_it_fail(make: Make, depot: DirectDepot, gate: Gate) -> None:
    engine = make()
    tokens = prompt(6.5)
    gate.close(direction=Direction.STORE)
    request = engine.add(tokens)
    while not engine.side.holds.pinned_blocks or request in engine.scheduler.requests:
        engine.step()
    assert not engine.scheduler.has_unfinished_requests()
    assert engine.scheduler.reset_prefix_cache(reset_connector=True) is False
    gate.open()
    engine.run()
    before = committed(depot)
    engine.generate([*tokens, *prompt(2.5, seed=1)])
    assert (list(engine.hits.values())[-1], committed(depot)) == (6 * BLOCK, before), "its own, of before"


@pytest.mark.requirement("P2")
def test_a_tail_within_a_block_counts_as_the_rest_does(make: Make, depot: DirectDepot) -> None:
    """The connector is told of whole blocks (here of 64 tokens), and the engine resumes behind them."""
    engine = make(hybrid=True, state_block=4 * BLOCK, blocks=256)
    tokens = prompt(3.5)
    engine.generate(tokens)
    bump(depot)
    engine.generate(prompt(5.5, seed=7))  # whose lookup tells the engine
    before = committed(depot)
    turn = [*tokens, *prompt(3.5, seed=1)]
    assert engine.generate(turn) == cold(turn)
    assert list(engine.hits.values())[-1] == 3 * BLOCK, "its own, of before"
    assert committed(depot) == before
    # A tail that was computed since may be stored with what follows it.
    tokens = prompt(3.5, seed=11)
    engine.generate(tokens)
    turn = [*tokens, *prompt(3.5, seed=12)]
    assert engine.generate(turn) == cold(turn)
    assert list(engine.hits.values())[-1] == 3 * BLOCK
    assert committed(depot) > before


@pytest.mark.requirement("I1d")
@SHAPES
def test_a_copy_that_ends_after_weights_have_changed_is_never_committed(
    make: Make, depot: DirectDepot, gate: Gate, options: dict[str, Any]
) -> None:
    """Its lease is of the former namespace, which other engines with the former weights may still be served from."""
    engine = make(**options)
    gate.close(direction=Direction.STORE)
    engine.add(prompt(5.5))
    while not gate.reached(0):
        engine.step()
    assert engine.connector.reset_cache()
    gate.open()
    engine.run()
    assert depot.count(CommitCall) == 0
    assert committed(depot) == 0
    assert engine.side.counters["store_failed_copy"]
    engine.assert_clean()
