"""Attention that the engine still has and states that it has not: what is loaded, copied, or computed again."""

from __future__ import annotations

from typing import Any

import pytest
from kvdepot.client.vllm import connector as connector_module
from kvdepot.core.calls import AcquireCall, Kind

from tests.fakes.scripted_engine import BLOCK, ScriptedEngine
from tests.rigs.connector_rig import Gate, Make, cold, prompt
from tests.rigs.local_eviction import CHUNKS, evict

WIDE = 1056  # tokens of a state's block where attention has 16


def broken(*_: Any, **__: Any) -> None:
    raise RuntimeError("a bug")


def last_acquired(engine: ScriptedEngine) -> list[int]:
    return list([call for call in engine.depot.calls if isinstance(call, AcquireCall)][-1].kinds)


@pytest.mark.requirement("A1")
@pytest.mark.parametrize(
    ("ranks", "streams"), [(1, False), (2, False), (2, True)], ids=["one rank", "two ranks", "two by streams"]
)
@pytest.mark.parametrize("kept", [CHUNKS, 6, 1, 0])
def test_of_a_prompt_whose_attention_is_kept_only_the_rest_is_loaded(
    make: Make, ranks: int, streams: bool, kept: int
) -> None:
    engine = make(hybrid=True, ranks=ranks, streams=streams, blocks=128)
    tokens = prompt(CHUNKS + 0.5)
    engine.generate(tokens)
    evict(engine, attention_from=kept)
    assert engine.generate(tokens) == cold(tokens)
    assert list(engine.hits.values()) == [0, CHUNKS * BLOCK], "it resumes at the deep boundary"
    assert last_acquired(engine) == [Kind.ATTENTION] * (CHUNKS - kept) + [Kind.STATE]
    assert engine.side.counters["local_reuse_tokens"] == kept * BLOCK
    assert engine.side.counters["stored_objects"] == CHUNKS + 1, "nothing is stored a second time (A3)"
    engine.assert_clean()


@pytest.mark.requirement("A1")
def test_it_resumes_below_what_is_kept_where_the_daemon_has_a_state(make: Make) -> None:
    """vLLM asks for tokens beyond the attention of a divergent hit; here the only state lies before its end."""
    tokens = prompt(CHUNKS + 0.5)
    make(hybrid=True).generate(tokens[: 4 * BLOCK + 3])
    engine = make(hybrid=True, blocks=128)
    engine.depot.present = False
    engine.generate(tokens)
    engine.depot.present = True
    engine.settle()
    shorter = [*tokens[: 4 * BLOCK], *prompt(3, seed=1)]
    assert engine.generate(shorter) == cold(shorter)
    assert list(engine.hits.values())[-1] == 4 * BLOCK
    assert last_acquired(engine) == [Kind.STATE]
    engine.assert_clean()


@pytest.mark.requirement("A1")
def test_by_vllm_s_own_switch_such_a_request_would_be_computed_again(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Why `supports_divergent_local_hybrid_hits` stays off (ADR 23): it never asks for a state alone."""
    monkeypatch.setattr(connector_module.KVDepotConnector, "supports_divergent_local_hybrid_hits", True)
    engine = make(hybrid=True, blocks=128)
    tokens = prompt(CHUNKS + 0.5)
    engine.generate(tokens)
    evict(engine)
    engine.generate(tokens)
    assert list(engine.hits.values()) == [0, 0]


@pytest.mark.requirement("A2")
def test_without_an_offer_no_request_resumes_where_there_is_no_state(make: Make) -> None:
    engine = make(hybrid=True, blocks=128)
    tokens = prompt(CHUNKS + 0.5)
    engine.depot.present = False
    engine.generate(tokens)
    evict(engine)
    assert engine.generate(tokens) == cold(tokens)
    assert list(engine.hits.values()) == [0, 0]
    engine.depot.present = True
    engine.settle()
    engine.assert_clean()


@pytest.mark.requirement("A1")
@pytest.mark.parametrize("how", ["refused", "late", "aborted", "reset"])
def test_what_was_kept_is_let_go_however_the_load_ends(make: Make, how: str) -> None:
    engine = make(hybrid=True, blocks=128, settings={"load_timeout_seconds": 0.2 if how == "late" else 30})
    tokens = prompt(CHUNKS + 0.5)
    engine.generate(tokens)
    evict(engine)
    engine.depot.held.add(AcquireCall)
    request_id = engine.add(tokens)
    engine.step()
    assert engine.side.holds.pinned_blocks == CHUNKS
    if how == "aborted":
        engine.abort(request_id)
    elif how == "reset":
        engine.connector.reset_cache()
    elif how == "refused":
        engine.depot.present = False
        engine.depot.held.clear()
        engine.session.let_go()
    engine.run()
    assert engine.outputs[request_id] in (cold(tokens), [])
    engine.depot.present = True
    engine.depot.held.clear()
    engine.session.let_go()
    engine.settle()
    engine.assert_clean()


@pytest.mark.requirement("A1")
def test_what_is_kept_is_copied_no_sooner_than_the_step_after_it_was_found(make: Make) -> None:
    """It may be what another request computes in that step, on a device that has not done so yet."""
    engine = make(hybrid=True, blocks=128)
    tokens = prompt(CHUNKS + 0.5)
    engine.generate(tokens)
    evict(engine)
    engine.add(tokens)
    steps = [engine.step().kv_connector_metadata for _ in range(2)]
    assert [len(meta.loads) for meta in steps] == [0, 1]
    assert [len(move.sources) for move in steps[1].loads[0].moves] == [CHUNKS]
    engine.run()
    engine.assert_clean()


@pytest.mark.requirement("A1")
@pytest.mark.parametrize("unpins", [True, False])
def test_what_is_kept_is_not_copied_if_another_connector_brought_it(
    make: Make, monkeypatch: pytest.MonkeyPatch, unpins: bool
) -> None:
    """Another one loads it in the step that finds it: whose it is, that step's end says."""
    engine = make(hybrid=True, blocks=128)
    tokens = prompt(CHUNKS + 0.5)
    engine.generate(tokens)
    evict(engine)
    request_id = engine.add(tokens)
    engine.step()
    kept = engine.side.loads._active[request_id].reused.block_ids
    engine.side.provenance.foreign([kept] * len(engine.layout.kv_cache_groups), 0, len(kept) * BLOCK)
    if not unpins:
        monkeypatch.setattr(engine.side.loads.local_reuse, "release", broken)
    engine.run()
    assert engine.failed_reports == [request_id], "reported, whatever fails besides"
    assert engine.outputs[request_id] == cold(tokens)
    assert engine.depot.lent() == 0
    assert sum(engine.connector.failures.counts.values()) == (not unpins)


def test_no_more_is_pinned_than_copies_may_pin(make: Make) -> None:
    engine = make(hybrid=True, blocks=128, settings={"max_pinned_blocks": 4})
    tokens = prompt(CHUNKS + 0.5)
    engine.generate(tokens)
    evict(engine)
    assert engine.generate(tokens) == cold(tokens)
    assert last_acquired(engine) == [Kind.ATTENTION] * (CHUNKS - 4) + [Kind.STATE]
    engine.assert_clean()


@pytest.mark.requirement("A1")
def test_what_is_kept_cannot_be_reused_while_it_is_copied(make: Make, gate: Gate) -> None:
    engine = make(hybrid=True, blocks=64)
    tokens = prompt(CHUNKS + 0.5)
    engine.generate(tokens)
    evict(engine)
    gate.close()
    request_id = engine.add(tokens)
    engine.step()
    engine.step()
    assert gate.reached()
    others = [prompt(12.5, seed) for seed in range(1, 5)]
    ids = [engine.add(each) for each in others]
    for _ in range(50):
        engine.step()
    gate.open()
    engine.run()
    assert engine.outputs[request_id] == cold(tokens)
    assert [engine.outputs[i] for i in ids] == [cold(each) for each in others]
    engine.assert_clean()


@pytest.mark.requirement("A1")
def test_attention_is_kept_where_windows_are_gone(make: Make) -> None:
    engine = make(windows=[40], blocks=128)
    tokens = prompt(CHUNKS + 0.5)
    engine.generate(tokens)
    evict(engine)
    assert engine.generate(tokens) == cold(tokens)
    assert list(engine.hits.values()) == [0, CHUNKS * BLOCK]
    assert last_acquired(engine) == [Kind.WINDOW] * 3
    engine.assert_clean()


def test_of_a_dense_model_nothing_is_looked_for_behind_its_hit(make: Make) -> None:
    engine = make(hybrid=False)
    tokens = prompt(CHUNKS + 0.5)
    engine.generate(tokens)
    evict(engine, attention_from=3)
    assert engine.generate(tokens) == cold(tokens)
    assert last_acquired(engine) == [Kind.ATTENTION] * (CHUNKS - 3)
    assert not engine.side.counters["local_reuse_tokens"]
    engine.assert_clean()


# P12: blocks of very different sizes. vLLM then hashes by the smaller one, and resumes within the larger one.


@pytest.mark.requirement("P12")
@pytest.mark.parametrize("chunks", [1, 3])
def test_attention_blocks_of_16_and_states_of_1056(make: Make, chunks: int) -> None:
    options: dict[str, Any] = {"hybrid": True, "state_block": WIDE, "blocks": 512, "step_tokens": 4 * WIDE}
    engine, other = make(**options), make(**options)
    tokens = prompt((chunks * WIDE + 300) / BLOCK)
    assert engine.generate(tokens) == cold(tokens)
    assert other.generate(tokens) == cold(tokens)
    assert list(other.hits.values()) == [chunks * WIDE]
    assert last_acquired(other) == [Kind.ATTENTION] * chunks + [Kind.STATE]
    evict(other, attention_from=0)
    assert other.generate(tokens) == cold(tokens)
    assert list(other.hits.values())[1] == chunks * WIDE
    for one in (engine, other):
        one.assert_clean()


@pytest.mark.requirement("P12", "A1")
def test_of_many_small_blocks_only_the_state_is_loaded(make: Make) -> None:
    engine = make(hybrid=True, state_block=64, blocks=256)
    tokens = prompt(22.5)
    engine.generate(tokens)
    evict(engine, attention_from=22)
    assert engine.generate(tokens) == cold(tokens)
    assert list(engine.hits.values()) == [0, 5 * 64]
    assert last_acquired(engine) == [Kind.STATE]
    assert engine.side.counters["local_reuse_tokens"] == 5 * 64
    engine.assert_clean()


@pytest.mark.requirement("C5")
@pytest.mark.parametrize("local", range(1, 12))
def test_a_tail_of_the_engine_s_own_gives_way_to_a_deeper_boundary(make: Make, local: int) -> None:
    """The engine resumes at every 16 tokens, the daemon at every 64: tails are never offered, nor in the way."""
    engine = make(hybrid=True, state_block=64, blocks=256, retention=64, step_tokens=64)
    tokens = prompt(13.5)
    engine.generate(tokens)
    engine.reset()
    engine.depot.present = False
    engine.generate(tokens[: local * BLOCK + 1], max_tokens=1)
    engine.depot.present = True
    engine.settle()
    assert engine.generate(tokens) == cold(tokens)
    assert list(engine.hits.values()) == [0, 0, 3 * 64], "of 13 blocks that it has computed"
    engine.assert_clean()


def test_a_tail_below_a_chunk_is_the_engine_s_own_and_computed_again_elsewhere(make: Make) -> None:
    first, second = (make(hybrid=True, state_block=64, blocks=256) for _ in range(2))
    tokens = prompt(6.5)
    for engine, hits in ((first, [0, 6 * BLOCK]), (second, [64, 6 * BLOCK])):
        assert [engine.generate(tokens), engine.generate(tokens)] == [cold(tokens)] * 2
        assert list(engine.hits.values()) == hits
        engine.assert_clean()
