"""Ranks' messages that come twice, late or out of order: no double end, no early one (rows I5, I6)."""

from __future__ import annotations

import copy
from random import Random
from typing import Any

import pytest
from kvdepot.client.copy.base import Direction
from kvdepot.client.vllm.base.metadata import RankArena, RankMeta
from kvdepot.core.calls import AbandonCall, CommitCall
from vllm.v1.outputs import KVConnectorOutput

from tests.fakes.call_orders import V1
from tests.fakes.direct_session import DirectDepot
from tests.fakes.late_words import LateWords
from tests.fakes.scripted_engine import BLOCK, ScriptedEngine
from tests.rigs.connector_rig import Gate, Make, cold, prompt, rank_copier
from tests.rigs.layout_turns import turn_layout, works
from tests.rigs.seeds import drawn


def say(engine: ScriptedEngine, *metas: RankMeta) -> None:
    for meta in metas:
        engine.connector.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=copy.deepcopy(meta)))


def heard(engine: ScriptedEngine) -> list[RankMeta]:
    """All messages of the ranks from now on."""
    metas: list[RankMeta] = []

    def note(said: list[RankMeta]) -> list[RankMeta]:
        metas.extend(copy.deepcopy(said))
        return said

    engine.deliver = note
    return metas


def ends(depot: DirectDepot) -> tuple[int, int]:
    """Commits and abandons that the daemon was sent."""
    return depot.count(CommitCall), depot.count(AbandonCall)


@pytest.mark.parametrize("direction", Direction)
def test_one_rank_that_is_heard_twice_does_not_end_what_the_other_one_still_copies(
    make: Make, depot: DirectDepot, gate: Gate, direction: Direction
) -> None:
    make(ranks=2).generate(prompt(5.5))
    engine = make(ranks=2)
    gate.close(direction=direction, copier=rank_copier(engine, 1))
    tokens = prompt(5.5) if direction is Direction.LOAD else prompt(4.5, seed=4)
    request_id = engine.add(tokens)
    metas = heard(engine)
    while not any(meta.loads or meta.stores for meta in metas):
        engine.step()
    assert gate.reached()
    said = [meta for meta in metas if meta.loads or meta.stores]
    lent, pinned, ended = depot.lent(), engine.side.holds.pinned_blocks, ends(depot)
    assert lent
    for _ in range(3):
        say(engine, *said, said[0].aggregate(said[0]))
    engine.step()
    assert (depot.lent(), engine.side.holds.pinned_blocks, ends(depot)) == (lent, pinned, ended)
    gate.open()
    engine.run()
    assert engine.outputs[request_id] == cold(tokens)
    works(engine)


@pytest.mark.parametrize("options", [{}, {"hybrid": True}, {"ranks": 2}], ids=["dense", "hybrid", "two ranks"])
def test_all_that_ranks_ever_said_said_again_changes_nothing(
    make: Make, depot: DirectDepot, options: dict[str, Any]
) -> None:
    engine = make(**options)
    metas = heard(engine)
    tokens = prompt(5.5)
    engine.generate(tokens)
    engine.reset()
    engine.generate(tokens)
    before, counted = ends(depot), engine.side.counters.copy()
    reports = engine.loaded_reports + engine.failed_reports
    for _ in range(2):
        say(engine, *metas, *reversed(metas))
        engine.settle()
    assert ends(depot) == before
    assert engine.side.counters == counted
    assert engine.loaded_reports + engine.failed_reports == reports
    assert engine.side.namespaces.ranks_ready
    works(engine)


def test_words_for_a_former_side_and_for_nobody_change_nothing(make: Make, depot: DirectDepot) -> None:
    engine = make()
    metas = heard(engine)
    engine.generate(prompt(5.5))
    turn_layout(engine)
    engine.shake_hands()
    engine.wait_attached()
    before = ends(depot)
    say(engine, *metas, RankMeta(loads={1 << 40: (1, 1)}, stores={1 << 40: (1, frozenset({0, 7}))}), RankMeta())
    engine.connector.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=None))
    assert ends(depot) == before
    works(engine)


def test_an_older_word_about_the_arena_is_none(make: Make) -> None:
    """A rank says it once: what comes late must not take the place of its last word."""
    engine = make()
    say(engine, RankMeta({0: RankArena(0, 0, 1.0)}), RankMeta({0: RankArena(99, 7, 2.0)}))
    assert engine.side.namespaces.ranks_ready
    works(engine)


@pytest.mark.parametrize("seed", drawn(range(3)))
@pytest.mark.parametrize("options", [{}, {"hybrid": True}, {"ranks": 2}], ids=["dense", "hybrid", "two ranks"])
def test_messages_twice_late_and_out_of_order_end_everything_once(
    make: Make, depot: DirectDepot, options: dict[str, Any], seed: int
) -> None:
    engine = make(**options, blocks=96)
    engine.deliver = words = LateWords(Random(seed), late=0.5, twice=0.5)
    for number in range(6):
        tokens = prompt(4.5, seed=number % 3)
        assert engine.generate(tokens) == cold(tokens)
        while engine.connector.has_pending_push_work():
            engine.step()
        engine.reset()
    reported = engine.loaded_reports + engine.failed_reports
    assert len(reported) == len(set(reported))
    words.calm()
    engine.settle()
    works(engine)


def test_a_step_that_a_rank_is_told_twice_is_done_once(
    make: Make, depot: DirectDepot, monkeypatch: pytest.MonkeyPatch
) -> None:
    twice = {"start_load_kv": 2, "wait_for_save": 2}
    order = tuple(call for call in V1 for _ in range(twice.get(call, 1)))
    engine = make(order=order)
    ops: list[int] = []
    (copies,) = engine.copies
    begin = copies._do

    def noted(op: Any, mark: object) -> None:
        ops.append(op.op_id)
        begin(op, mark)

    monkeypatch.setattr(copies, "_do", noted)
    tokens = prompt(5.5)
    for hit in (0, 5 * BLOCK):
        assert engine.generate(tokens) == cold(tokens)
        assert list(engine.hits.values())[-1] == hit
        engine.reset()
    assert ops and len(ops) == len(set(ops))
    works(engine)


def test_a_failed_load_that_a_rank_is_told_twice_is_reported_once(make: Make, depot: DirectDepot) -> None:
    """vLLM ends the engine for a request that is reported twice."""
    engine = make()
    (worker,) = engine.workers
    meta = engine.connector.build_connector_meta(engine.scheduler.schedule())
    meta.failed_loads.append("r")
    for _ in range(2):
        worker.bind_connector_metadata(meta)
        worker.start_load_kv(None)
    assert worker.get_transfer_results(set()).failed_recving == {"r"}
    worker.start_load_kv(None)
    assert not worker.get_transfer_results(set()).failed_recving
