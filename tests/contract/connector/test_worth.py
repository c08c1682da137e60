"""What the daemon is told so that it can weigh a load against computing, and what a request may ask of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from kvdepot.client.vllm.scheduling.prefill_rate import REQUESTS_MIN, TOKENS_MIN
from kvdepot.core.calls import LocateCall, LocateReply
from kvdepot.core.misses import MissReason

from tests.fakes.direct_session import DirectDepot
from tests.fakes.scripted_engine import BLOCK, ScriptedEngine
from tests.rigs.connector_rig import Make, cold, prompt


def asked(depot: DirectDepot) -> list[LocateCall]:
    return [call for call in depot.calls if isinstance(call, LocateCall)]


def wanting(tokens: object) -> dict[str, Any]:
    return {"extra_args": {"kv_transfer_params": {"max_load_tokens": tokens}}}


def costly(engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, miss: str = "") -> None:
    """What the daemon has is on a tier below RAM, and not worth reading if `miss` says so."""
    serve = engine.session._serve

    def answer(call: Any) -> Any:
        reply = serve(call)
        if isinstance(reply, LocateReply) and miss and not call.local_tokens:
            return replace(reply, boundary_tokens=0, miss=miss)
        return replace(reply, estimate_seconds=0.5) if isinstance(reply, LocateReply) else reply

    monkeypatch.setattr(engine.session, "_serve", answer)


def test_the_engines_own_speed_is_told_once_it_is_measured_by_the_setting_that_scales_it(
    make: Make, depot: DirectDepot
) -> None:
    engine = make(blocks=256, settings={"load_weight": 2.0})
    blocks = TOKENS_MIN / BLOCK + 0.5
    for seed in range(REQUESTS_MIN):
        engine.generate(prompt(blocks, seed))
    assert [call.token_seconds for call in asked(depot)] == [0.0] * REQUESTS_MIN
    assert engine.side.prefill_rate.token_seconds > 0
    engine.generate(prompt(blocks, 99))
    assert asked(depot)[-1].token_seconds > 0
    prefill_rate = engine.side.prefill_rate
    prefill_rate.token_seconds = 0.25
    engine.generate(prompt(blocks, 100))
    assert asked(depot)[-1].token_seconds == 0.5
    engine.assert_clean()


@pytest.mark.parametrize("miss", ["", MissReason.NOT_WORTH_IT])
def test_what_the_engine_has_itself_is_told_where_it_decides(
    make: Make, depot: DirectDepot, monkeypatch: pytest.MonkeyPatch, miss: str
) -> None:
    tokens = prompt(10.5)
    make().generate(tokens)
    engine = make()
    engine.generate(prompt(3.5))
    engine.side.prefill_rate.token_seconds = 1e-3
    costly(engine, monkeypatch, miss)
    del depot.calls[:]
    assert engine.generate(tokens) == cold(tokens)
    assert [call.local_tokens for call in asked(depot)] == [0, 3 * BLOCK]
    assert list(engine.hits.values())[-1] == 10 * BLOCK
    engine.assert_clean()


def test_nobody_asks_twice_where_there_is_nothing_to_weigh(
    make: Make, depot: DirectDepot, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = prompt(10.5)
    make().generate(tokens)
    engine = make()
    engine.generate(prompt(3.5))
    del depot.calls[:]
    engine.side.prefill_rate.token_seconds = 1e-3
    engine.generate(tokens)
    assert len(asked(depot)) == 1, "all of it is in RAM"
    del depot.calls[:]
    other = make()
    costly(other, monkeypatch)
    other.generate(prompt(3.5))
    other.generate(tokens)
    assert len(asked(depot)) == 2, "the engine is not measured"


def test_declined_for_its_cost_is_a_miss_with_its_reason(
    make: Make, depot: DirectDepot, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = prompt(10.5)
    make().generate(tokens)
    engine = make()
    costly(engine, monkeypatch, MissReason.NOT_WORTH_IT)
    assert engine.generate(tokens) == cold(tokens)
    assert engine.side.counters[f"misses.{MissReason.NOT_WORTH_IT}"] == 1
    assert len(asked(depot)) == 2 and list(engine.hits.values()) == [0]


@pytest.mark.requirement("P9")
@pytest.mark.parametrize(("most", "blocks"), [(0, 0), (BLOCK - 1, 0), (4 * BLOCK + 3, 4), (1 << 30, 10), ("many", 10)])
def test_max_load_tokens_of_a_request_is_respected(make: Make, most: object, blocks: int) -> None:
    tokens = prompt(10.5)
    make().generate(tokens)
    engine = make()
    request = engine.add(tokens, params=wanting(most))
    engine.run()
    assert engine.outputs[request] == cold(tokens)
    assert engine.hits[request] == blocks * BLOCK
    assert engine.side.counters[f"misses.{MissReason.NOT_WORTH_IT}"] == (blocks == 0)
    engine.assert_clean()


@pytest.mark.requirement("P9")
def test_max_load_tokens_counts_from_what_the_engine_has_itself(make: Make) -> None:
    tokens = prompt(10.5)
    make().generate(tokens)
    engine = make()
    engine.generate(prompt(3.5))
    request = engine.add(tokens, params=wanting(4 * BLOCK))
    engine.run()
    assert engine.outputs[request] == cold(tokens)
    assert engine.hits[request] == (3 + 4) * BLOCK
    engine.assert_clean()


@pytest.mark.requirement("P9")
def test_max_load_tokens_of_a_hybrid_model_leads_to_a_boundary_with_a_state(make: Make) -> None:
    tokens = prompt(10.5)
    make(hybrid=True, retention=BLOCK, step_tokens=2 * BLOCK).generate(tokens)
    engine = make(hybrid=True)
    request = engine.add(tokens, params=wanting(5 * BLOCK))
    engine.run()
    assert engine.outputs[request] == cold(tokens)
    assert 0 < engine.hits[request] <= 5 * BLOCK
    engine.assert_clean()
