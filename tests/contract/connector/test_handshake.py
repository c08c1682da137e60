"""What vLLM says at its start, said again: the same, something else, or nonsense (row I1)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from kvdepot.client.vllm.base.metadata import RankFacts, RankMeta
from kvdepot.client.vllm.base.operations import LayerFacts
from kvdepot.client.vllm.scheduling.sides import SchedulerSides
from kvdepot.core.errors import PlannerError
from vllm.v1.core.block_pool import BlockPool

from tests.fakes.direct_session import DirectDepot
from tests.fakes.rank_memory import RankMemory
from tests.fakes.scripted_engine import BLOCK, ScriptedEngine
from tests.rigs.connector_rig import Gate, Make, cold, prompt
from tests.rigs.layout_turns import turn_layout, works
from tests.rigs.under_way import belongings, let_go, threads, under_way

Facts = dict[Any, Any]


def committed(depot: DirectDepot) -> int:
    return int(depot.engine.counters.get("committed_objects.committed"))


def begun(sides: SchedulerSides) -> bool:
    return sides.current is not None


def move_caches(engine: ScriptedEngine) -> None:
    """The engine has other tensors of the same layout now, with nothing in them."""
    layouts = [memory.layout for memory in engine.memories]
    weights = [memory.weights for memory in engine.memories]
    engine.memories = [RankMemory(layout, rank) for rank, layout in enumerate(layouts)]
    for worker, memory, version in zip(engine.workers, engine.memories, weights, strict=True):
        memory.weights = version
        worker.register_kv_caches(memory.caches)


def turn_while_copying(engine: ScriptedEngine, gate: Gate) -> None:
    """Copies that have begun are waited for; they end when it has begun to wait."""
    opener = threading.Timer(0.1, gate.open)
    opener.start()
    turn_layout(engine)
    opener.join()


@pytest.mark.parametrize("options", [{}, {"hybrid": True}, {"ranks": 2}], ids=["dense", "hybrid", "two ranks"])
@pytest.mark.parametrize("phase", ["reserving", "storing"])
def test_other_facts_close_the_side_and_the_next_one_keeps_the_epoch(
    make: Make, depot: DirectDepot, gate: Gate, phase: str, options: dict[str, Any]
) -> None:
    engine = make(**options)
    assert engine.connector.reset_cache()
    engine.wait_attached()
    former, epoch, session = engine.side, engine.session.specs[-1].epoch, engine.session
    assert epoch
    request_id = under_way(engine, depot, gate, phase)
    turn_while_copying(engine, gate)
    engine.shake_hands()
    assert engine.side is not former
    let_go(engine, depot, gate)
    engine.run()
    engine.settle()
    assert engine.session is session and len(depot.engine._sessions.by_slot) == 1
    assert engine.session.specs[-1].epoch == epoch
    assert engine.session.specs[-1].namespace_id() != engine.session.specs[-2].namespace_id()
    assert not engine.connector.sides.former
    assert former.over and not former.holds.pinned_blocks
    assert engine.outputs[request_id] == cold(prompt(5.5, seed=3), 2 * BLOCK)
    works(engine)


@pytest.mark.parametrize("phase", ["looked up", "acquiring", "loading"])
@pytest.mark.parametrize(("ranks", "streams"), [(1, False), (2, False), (1, True)], ids=["one", "two", "stream"])
def test_a_load_of_the_former_side_is_reported_once(
    make: Make, depot: DirectDepot, gate: Gate, phase: str, ranks: int, streams: bool
) -> None:
    make(ranks=ranks).generate(prompt(9.5))
    engine = make(ranks=ranks, streams=streams)
    request_id = under_way(engine, depot, gate, phase)
    turn_while_copying(engine, gate)
    engine.shake_hands()
    let_go(engine, depot, gate)
    engine.run()
    assert engine.outputs[request_id] == cold(prompt(9.5), 2 * BLOCK)
    assert engine.failed_reports == ([request_id] if phase != "looked up" else [])
    assert not engine.loaded_reports, "what another layout has stored is none of this one's"
    assert engine.side.counters["loads"] == 0
    works(engine)


def test_the_former_side_s_answers_acknowledgements_and_watchers_change_nothing(
    make: Make, depot: DirectDepot, gate: Gate
) -> None:
    engine = make()
    request_id = under_way(engine, depot, gate, "reserving")
    engine.abort(request_id)
    assert engine.side.holds.held_blocks
    former, running = engine.side, threads(engine)
    turn_layout(engine)
    engine.shake_hands()
    assert engine.side.holds.held_blocks == 0, "nothing is watched any more"
    before = belongings(engine) | {"former": 0, "requests": 0, "leases": 0, "lent": 0, "threads": running}
    counted = engine.side.counters.copy()
    engine.session.let_go()  # the daemon's grant comes now
    engine.session.poll()
    engine.reset()  # every block's watcher is called
    engine.settle()
    assert former.over
    assert belongings(engine) == before
    assert engine.side.counters == counted
    depot.held.clear()
    works(engine)


def test_engines_of_both_layouts_share_nothing(make: Make, depot: DirectDepot) -> None:
    engine, other = make(), make()
    tokens = prompt(5.5)
    engine.generate(tokens)
    turn_layout(engine)
    engine.shake_hands()
    engine.reset()
    assert engine.generate(tokens) == cold(tokens)
    assert other.generate(tokens) == cold(tokens)
    assert (list(engine.hits.values()), list(other.hits.values())) == ([0, 0], [5 * BLOCK])


def test_an_epoch_that_began_while_there_was_no_side_is_not_forgotten(make: Make, depot: DirectDepot) -> None:
    """Facts that serve nobody, then sleep, new weights, and the right facts again."""
    engine = make()
    tokens = prompt(5.5)
    engine.generate(tokens)
    engine.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): replace(engine.facts()[0, 0], problem="broken")})
    assert engine.side is None
    assert engine.generate(prompt(3.5, seed=4)) == cold(prompt(3.5, seed=4)), "nobody waits for the cache"
    engine.sleep()
    engine.change_weights()
    engine.wake_up()
    engine.wait_attached()
    assert engine.generate(tokens) == cold(tokens)
    assert list(engine.hits.values())[-1] == 0
    works(engine)


def test_a_session_stays_as_long_as_ranks_copy_for_any_side_of_it(make: Make, depot: DirectDepot, gate: Gate) -> None:
    """The second side has nothing in hand when it ends, and the first one's copy is still under way."""
    engine = make()
    request_id = under_way(engine, depot, gate, "storing")
    said = engine.facts()
    other = {place: replace(found, software=(*found.software, ("kernel", "7"))) for place, found in said.items()}
    broken = {place: replace(found, problem="broken") for place, found in said.items()}
    for facts in (other, broken):
        engine.connector.set_xfer_handshake_metadata_pp_aware(facts)
    assert engine.side is None
    engine.step()
    assert engine.connector.sides.former and engine.connector.sides.session == engine.session, "it is not closed"
    gate.open()
    engine.run()
    assert engine.outputs[request_id] == cold(prompt(5.5, seed=3), 2 * BLOCK)
    engine.settle()
    assert not engine.connector.sides.former and engine.connector.sides.session is None
    engine.shake_hands()
    engine.wait_attached()
    works(engine)


def test_what_is_cached_from_before_the_epoch_is_not_stored_by_the_next_side(make: Make, depot: DirectDepot) -> None:
    """The engine's own reset fails where a request runs, and what it keeps is of the former weights."""
    engine = make()
    tokens = prompt(6.5)
    engine.generate(tokens)
    running = engine.add(prompt(2.5, seed=5), max_tokens=30)
    for _ in range(3):
        engine.step()
    assert engine.scheduler.reset_prefix_cache(reset_connector=True) is False
    turn_layout(engine)
    engine.shake_hands()
    engine.wait_attached()
    engine.run()
    assert running not in engine.scheduler.requests
    before = committed(depot)
    engine.generate([*tokens, *prompt(2.5, seed=1)])
    assert (list(engine.hits.values())[-1], committed(depot)) == (6 * BLOCK, before), "its own, of before"


def narrower(facts: RankFacts) -> RankFacts:
    first: LayerFacts = facts.layers[0]
    return replace(facts, layers=(replace(first, dtype="uint8"), *facts.layers[1:]))


def thinner(facts: RankFacts) -> RankFacts:
    """Half the bytes of each layer."""
    return replace(facts, layers=tuple(replace(layer, block_bytes=layer.block_bytes // 2) for layer in facts.layers))


NONSENSE: dict[str, Callable[[Facts], Any]] = {
    "nothing": lambda _: {},
    "none": lambda facts: dict.fromkeys(facts),
    "no mapping": lambda _: None,
    "another connector's": lambda facts: dict.fromkeys(facts, object()),
    "one rank": lambda facts: {(0, 0): facts[0, 0]},
    "one rank, none of the other": lambda facts: {(0, 0): facts[0, 0], (0, 1): None},
    "one rank twice": lambda facts: dict.fromkeys(facts, facts[0, 0]),
    "a rank too many": lambda facts: facts | {(0, 2): replace(facts[0, 1], rank=2)},
    "another type": lambda facts: {place: narrower(found) for place, found in facts.items()},
    "another type of one rank": lambda facts: facts | {(0, 1): narrower(facts[0, 1])},
    "other sizes": lambda facts: {place: thinner(found) for place, found in facts.items()},
    "no layers": lambda facts: {place: replace(found, layers=()) for place, found in facts.items()},
    "layers of no group": lambda facts: {
        place: replace(found, layers=tuple(replace(layer, group=9) for layer in found.layers))
        for place, found in facts.items()
    },
    "layers that are none": lambda facts: {place: replace(found, layers=(7,)) for place, found in facts.items()},
    "another host": lambda facts: facts | {(0, 1): replace(facts[0, 1], boot_id="other")},
    "a rank that cannot copy": lambda facts: facts | {(0, 1): replace(facts[0, 1], problem="no numba")},
    "ranks that are swapped": lambda facts: {
        place: replace(found, rank=1 - found.rank) for place, found in facts.items()
    },
}


@pytest.mark.parametrize("nonsense", NONSENSE)
def test_a_wrong_repetition_serves_and_stores_nothing_wrong_and_raises_nothing(
    make: Make, depot: DirectDepot, nonsense: str
) -> None:
    engine, other = make(ranks=2), make(ranks=2)
    tokens = prompt(5.5)
    engine.generate(tokens)
    engine.connector.set_xfer_handshake_metadata_pp_aware(NONSENSE[nonsense](engine.facts()))
    wrong = {spec.namespace_id() for spec in engine.session.specs[1:]}
    for again in (tokens, prompt(4.5, seed=2), prompt(4.5, seed=2)):
        engine.settle()
        engine.reset()
        assert engine.generate(again) == cold(again)
    stored = {status.namespace_id: sum(status.objects.values()) for status in depot.engine.status().namespaces}
    assert not any(stored.get(namespace) for namespace in wrong), "nothing is stored by facts that are no rank's"
    # And with the right ones everything is as before.
    engine.shake_hands()
    engine.wait_attached()
    engine.run()
    engine.reset()
    assert engine.generate(tokens) == cold(tokens)
    assert list(engine.hits.values())[-1] == 5 * BLOCK
    assert other.generate(tokens) == cold(tokens)
    assert list(other.hits.values()) == [5 * BLOCK]
    for connector in (engine.connector, *engine.workers):
        connector.failures.counts.clear()
    engine.assert_clean()


def test_the_first_word_may_come_in_parts(make: Make) -> None:
    """A repetition completes it. Until then nobody is served, and nothing is raised."""
    engine = make(ranks=2, wait=False, heard=1)
    assert engine.side is None
    engine.generate(prompt(3.5))
    engine.shake_hands()
    engine.wait_attached()
    works(engine)


def test_weights_that_change_before_the_first_word_begin_an_epoch(make: Make) -> None:
    engine = make(ranks=2, wait=False, heard=1)
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.shake_hands()
    engine.wait_attached()
    assert engine.session.specs[-1].epoch.startswith("random:")


def test_at_the_start_a_geometry_that_cannot_work_is_still_refused(make: Make) -> None:
    engine = make(wait=False)
    engine.connector.sides._facts = None
    engine.connector._shook_hands = False
    facts = {place: thinner(replace(found, layers=())) for place, found in engine.facts().items()}
    with pytest.raises(PlannerError):
        engine.connector.set_xfer_handshake_metadata_pp_aware(facts)


@pytest.mark.parametrize("streams", [False, True], ids=["shm", "stream"])
def test_other_tensors_of_the_same_layout_are_copied_from_then_on(make: Make, streams: bool) -> None:
    engine = make(ranks=2, streams=streams)
    tokens = prompt(5.5)
    engine.generate(tokens)
    side = engine.side
    for _ in range(3):
        engine.reset()
        before = [memory.fill(0x11) for memory in engine.memories]
        old = engine.memories
        move_caches(engine)
        engine.shake_hands()
        assert engine.generate(tokens) == cold(tokens)
        assert list(engine.hits.values())[-1] == 5 * BLOCK
        assert all(torch.equal(memory.raw, was) for memory, was in zip(old, before, strict=True))
    assert engine.side is side
    engine.assert_clean()


@pytest.mark.parametrize("phase", ["loading", "storing"])
def test_copies_of_tensors_that_are_replaced_end_and_are_reported_once(
    make: Make, depot: DirectDepot, gate: Gate, phase: str
) -> None:
    make().generate(prompt(9.5))
    engine = make()
    request_id = under_way(engine, depot, gate, phase)
    if phase == "storing":
        engine.abort(request_id)
    old = engine.memories
    opener = threading.Timer(0.1, gate.open)
    opener.start()
    move_caches(engine)
    opener.join()
    before = [memory.fill(0x11) for memory in old]
    engine.shake_hands()
    engine.run()
    assert all(torch.equal(memory.raw, was) for memory, was in zip(old, before, strict=True))
    if phase == "loading":
        assert engine.outputs[request_id] == cold(prompt(9.5), 2 * BLOCK)
        assert (engine.failed_reports, engine.loaded_reports) == ([request_id], [])
    works(engine)


def test_caches_that_cannot_be_copied_are_a_problem_and_no_exception(make: Make) -> None:
    engine = make()
    tokens = prompt(5.5)
    engine.generate(tokens)
    (worker,), (memory,) = engine.workers, engine.memories
    worker.register_kv_caches({name: [cache] for name, cache in memory.caches.items()})
    for _ in range(2):  # before anybody has said so, and after
        engine.settle()
        engine.reset()
        assert engine.generate(tokens) == cold(tokens)
        engine.shake_hands()
    worker.register_kv_caches(memory.caches)
    engine.shake_hands()
    engine.wait_attached()
    engine.reset()
    assert engine.generate(tokens) == cold(tokens)
    assert list(engine.hits.values())[-1] == 5 * BLOCK
    works(engine)


def test_another_block_pool_ends_the_side_and_the_same_one_does_not(make: Make, depot: DirectDepot, gate: Gate) -> None:
    engine = make()
    assert engine.connector.reset_cache()
    request_id = under_way(engine, depot, gate, "reserving")
    engine.abort(request_id)
    former, stores = engine.side, engine.side.stores
    engine.connector.bind_gpu_block_pool(engine.pool)
    assert engine.side is former and former.stores is stores and former.holds.held_blocks
    engine.connector.bind_gpu_block_pool(BlockPool(64, enable_caching=True, hash_block_size=BLOCK))
    assert engine.side is not former and not former.holds.held_blocks
    engine.connector.bind_gpu_block_pool(engine.pool)
    let_go(engine, depot, gate)
    engine.wait_attached()
    assert len({spec.epoch for spec in engine.session.specs[1:]}) == 1
    works(engine)


@pytest.mark.requirement("I3")
def test_a_side_begins_when_the_engine_has_given_its_block_pool(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """vLLM gives it before the handshake. An engine that gives it later loses hits until then."""
    engine = make()
    sides, facts = engine.connector.sides, engine.facts()
    late = SchedulerSides(sides._config, sides._kv_cache_config, sides._settings, sides._group_ids, loads_on=True)
    late.handshake(facts)
    assert not begun(late) and "until the engine gives its block pool" in caplog.text
    late.bind_pool(engine.pool)
    assert begun(late)
    late.close()


@pytest.mark.parametrize("known", [1, 2])
def test_facts_that_are_known_are_other_ones_where_the_number_of_ranks_is_another_one(
    make: Make, depot: DirectDepot, known: int
) -> None:
    """One rank that says what it said is all of an engine of one, and a part of an engine of two."""
    engine = make(ranks=known)
    former = engine.side
    epoch = former.namespaces.spec.epoch
    engine.connector._vllm_config.parallel_config.world_size = 3 - known
    engine.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): engine.facts()[0, 0]})
    assert engine.side is not former
    assert former.over and former.session.closed and not former.session.waited_for
    if known == 2:
        assert engine.side.namespaces.spec.epoch == epoch
    assert engine.generate(prompt(3.5)) == cold(prompt(3.5))
    assert committed(depot) == 0


def test_caches_that_are_registered_again_are_there(make: Make) -> None:
    """A later vLLM may say so instead of `restore_kv_caches`."""
    engine = make(ranks=2)
    for worker in engine.workers:
        worker.unregister_kv_caches()
    for worker, memory in zip(engine.workers, engine.memories, strict=True):
        worker.register_kv_caches(memory.caches)
    works(engine)


def test_what_ends_twice_has_ended(make: Make) -> None:
    engine = make(ranks=2)
    engine.generate(prompt(3.5))
    for connector in (*engine.workers, engine.connector):
        connector.unregister_kv_caches()
        connector.unregister_kv_caches()
        connector.restore_kv_caches()
        connector.restore_kv_caches()
    works(engine)
    for connector in (*engine.workers, engine.connector):
        connector.shutdown()
        connector.shutdown()
        connector.unregister_kv_caches()
        connector.restore_kv_caches()
        assert not connector.failures.counts


def test_a_scheduler_side_whose_engine_has_no_kv_memory_offers_and_stores_nothing(
    make: Make, depot: DirectDepot
) -> None:
    make().generate(prompt(5.5))
    engine = make()
    engine.connector.unregister_kv_caches()
    assert engine.generate(prompt(5.5)) == cold(prompt(5.5))
    before = committed(depot)
    engine.generate(prompt(4.5, seed=6))
    assert (list(engine.hits.values()), committed(depot)) == ([0, 0], before)
    engine.connector.restore_kv_caches()
    engine.reset()
    assert engine.generate(prompt(5.5)) == cold(prompt(5.5))
    assert list(engine.hits.values())[-1] == 5 * BLOCK
    works(engine)


@pytest.mark.requirement("I3")
@pytest.mark.parametrize("error", [OSError("no thread"), RuntimeError("can't start new thread"), PlannerError("no")])
def test_a_start_without_threads_or_sockets_ends_no_engine(
    make: Make, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    connector = make().connector

    def fails(_: Any) -> None:
        raise error

    monkeypatch.setattr(connector.sides, "handshake", fails)
    connector._shook_hands = False
    with pytest.raises(PlannerError) if isinstance(error, PlannerError) else nullcontext():
        connector.set_xfer_handshake_metadata_pp_aware({})
    assert bool(connector.failures.counts) != isinstance(error, PlannerError)


@pytest.mark.requirement("I3")
def test_an_acknowledgement_that_fails_loses_no_other_of_its_message(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    side, heard = make().side, list[int]()

    def fails(op_id: int, *_: Any, **__: Any) -> None:
        heard.append(op_id)
        raise RuntimeError("a bug")

    monkeypatch.setattr(side.loads, "acknowledged", fails)
    monkeypatch.setattr(side.stores, "acknowledged", fails)
    with pytest.raises(RuntimeError):
        side.output(RankMeta(loads={1: (1, 0), 2: (1, 0)}, stores={3: (1, frozenset()), 4: (1, frozenset())}))
    assert heard == [1, 2, 3, 4]
