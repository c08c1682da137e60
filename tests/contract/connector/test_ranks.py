"""Several ranks: all of them or none, and one that is late, fails or never answers harms nobody."""

from __future__ import annotations

import time

import pytest
from kvdepot.client.copy.base import Direction
from kvdepot.client.vllm.scheduling.negative import NEGATIVE_SECONDS
from kvdepot.core.calls import AcquireCall

from tests.fakes.broken_copies import break_copies
from tests.fakes.scripted_engine import BLOCK
from tests.rigs.connector_rig import Gate, Make, cold, prompt, rank_copier
from tests.rigs.patience import wait_until

LOAD_TIMEOUT_SECONDS = 3.0


@pytest.mark.requirement("P11")
def test_an_object_that_one_rank_could_not_write_is_no_hit(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(ranks=2)
    tokens = prompt(4.5)
    break_copies(monkeypatch, rank_copier(engine, 1), Direction.STORE)
    engine.generate(tokens)
    assert engine.depot.engine.counters.get("committed_objects.committed") == 0
    assert engine.depot.lent() == 0
    assert engine.side.holds.pinned_blocks == 0
    other = make(ranks=2)
    assert other.generate(tokens) == cold(tokens)
    assert list(other.hits.values()) == [0]


@pytest.mark.requirement("D5", "P8")
@pytest.mark.parametrize("hybrid", [False, True], ids=["dense", "hybrid"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_load_that_fails_on_one_rank_fails_once_and_is_recomputed_on_all(
    make: Make, monkeypatch: pytest.MonkeyPatch, hybrid: bool, rank: int
) -> None:
    tokens = prompt(4.5)
    make(ranks=2, hybrid=hybrid).generate(tokens)
    engine = make(ranks=2, hybrid=hybrid)
    break_copies(monkeypatch, rank_copier(engine, rank), Direction.LOAD)
    asked = engine.depot.count(AcquireCall)
    request_id = engine.add(tokens)
    engine.run()
    assert engine.failed_reports == [request_id]
    assert engine.depot.count(AcquireCall) == asked + 1
    assert engine.outputs[request_id] == cold(tokens)
    assert engine.depot.lent() == 0
    counters = engine.depot.engine.counters
    assert (counters.get("hit_tokens"), counters.get("released_loads.unused")) == (0, 1), "it was no hit"


@pytest.mark.requirement("P5", "I1")
@pytest.mark.parametrize("hybrid", [False, True], ids=["dense", "hybrid"])
def test_a_load_ends_by_its_deadline_although_one_rank_is_held_up_and_that_rank_writes_nothing_later(
    make: Make, gate: Gate, hybrid: bool
) -> None:
    """Rank 1's copying thread hangs in a store: it cannot begin the load, and finds nothing to do when it goes on."""
    tokens, other = prompt(6.5), prompt(3.5, 1)
    make(ranks=2, hybrid=hybrid).generate(tokens)
    engine = make(ranks=2, hybrid=hybrid, settings={"load_timeout_seconds": LOAD_TIMEOUT_SECONDS})
    gate.close(direction=Direction.STORE, copier=rank_copier(engine, 1))
    storing = engine.add(other, max_tokens=1)
    wait_until(lambda: bool(engine.step()) and gate.reached(0), "rank 1 stores nothing")
    request_id = engine.add(tokens)
    wait_until(lambda: bool(engine.step()) and request_id not in engine.scheduler.requests, "not recomputed")
    assert engine.failed_reports == [request_id]
    assert engine.hits[request_id] == 0
    assert engine.outputs[request_id] == cold(tokens)
    assert engine.outputs[storing] == cold(other, 1)
    freed = [block for block in engine.pool.blocks if not block.ref_cnt and not block.is_null]
    memory = engine.memories[1]
    for block in freed:
        for name in memory.caches:
            memory.block(name, block.block_id).fill_(0x5A)
    gate.open()
    engine.run()
    assert all((memory.block(name, block.block_id) == 0x5A).all() for block in freed for name in memory.caches)
    engine.assert_clean()
    assert engine.scheduler.reset_prefix_cache()
    time.sleep(NEGATIVE_SECONDS)
    again = [engine.add(tokens), engine.add(other)]
    engine.run()
    assert [engine.hits[one] for one in again] == [6 * BLOCK, 3 * BLOCK]
    assert [engine.outputs[one] for one in again] == [cold(tokens), cold(other)]


@pytest.mark.requirement("P4", "P2")
@pytest.mark.parametrize("hybrid", [False, True], ids=["dense", "hybrid"])
def test_stages_of_a_pipeline_store_and_load_their_own_layers_and_no_other_shape_does(make: Make, hybrid: bool) -> None:
    """With `hybrid` the second stage has no layer of the recurrent groups."""
    tokens = prompt(6.5)
    first, second = (make(ranks=2, pipeline=True, hybrid=hybrid) for _ in range(2))
    assert first.generate(tokens) == cold(tokens)
    assert second.generate(tokens) == cold(tokens)
    assert (list(first.hits.values()), list(second.hits.values())) == ([0], [6 * BLOCK])
    split, whole = make(ranks=2, hybrid=hybrid), make(hybrid=hybrid)
    assert split.generate(tokens) == whole.generate(tokens) == cold(tokens)
    assert (list(split.hits.values()), list(whole.hits.values())) == ([0], [0])
    for engine in (first, second, split, whole):
        engine.assert_clean()
