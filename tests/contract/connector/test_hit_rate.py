"""The token hit rate: each prompt counts once, by what supplied its tokens, and the daemon counts as its engines do."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kvdepot.core.calls import EndRequestCall
from kvdepot.core.hit_rate import HitRate

from tests.fakes.frontend import Frontend
from tests.fakes.scripted_engine import BLOCK, ScriptedEngine
from tests.rigs.connector_rig import Make, prompt

TOKENS = prompt(10.5)
pytestmark = pytest.mark.usefixtures("own_registry")


def told(engine: ScriptedEngine) -> HitRate:
    """What the daemon has counted."""
    return HitRate.of(engine.depot.engine.counters.snapshot())


@pytest.mark.requirement("O2")
@pytest.mark.parametrize(("hybrid", "ranks"), [(False, 1), (True, 2)], ids=["dense", "hybrid of two ranks"])
def test_each_token_of_a_prompt_counts_once_by_what_supplied_it(make: Make, hybrid: bool, ranks: int) -> None:
    engine = make(hybrid=hybrid, ranks=ranks)
    frontend = Frontend(engine)
    engine.generate(TOKENS)
    assert told(engine) == HitRate(len(TOKENS), {}, 0)
    engine.reset()
    engine.generate(prompt(4.5))
    engine.generate(TOKENS)  # 4 chunks of the engine's own, and 6 from RAM
    engine.generate(TOKENS)
    short = prompt(0.5)
    engine.generate(short)
    asked = 3 * len(TOKENS) + len(prompt(4.5)) + len(short)
    # A hybrid engine has stored a state at the end of its prompt alone, so the shorter prompt is computed.
    served = {"engine": 14 * BLOCK, "ram": (6 if hybrid else 10) * BLOCK}
    assert told(engine) == HitRate(asked, served, 0), "nothing is known of the prefill rate"
    found = frontend.samples()
    assert found["prompt_tokens_total", ""] == asked
    assert {source: found["served_tokens_total", source] for source in served} == served
    assert engine.depot.count(EndRequestCall) == 5, "a request that is shorter than a chunk is reported too"


@pytest.mark.requirement("O2")
def test_saved_seconds_are_loaded_tokens_by_the_prefill_rate_also_if_it_is_known_later(make: Make) -> None:
    engine = make()
    engine.generate(TOKENS)
    engine.reset()
    engine.generate(TOKENS)
    assert told(engine).saved_seconds == 0
    engine.side.prefill_rate.token_seconds = 0.001
    engine.generate(TOKENS)
    assert told(engine).saved_seconds == pytest.approx(10 * BLOCK * 0.001), "the engine's own tokens are not counted"


@pytest.mark.requirement("O2")
def test_prompts_of_an_outage_are_counted_after_it(make: Make) -> None:
    engine = make()
    engine.depot.present = False
    for _ in range(3):
        engine.generate(TOKENS)
    assert not told(engine).prompt_tokens
    engine.depot.present = True
    engine.wait_attached()
    engine.generate(TOKENS)
    assert told(engine).prompt_tokens == 4 * len(TOKENS)


@pytest.mark.requirement("O2")
def test_a_load_that_failed_saves_nothing_and_a_request_that_never_ran_asked_for_nothing(make: Make) -> None:
    engine = make()
    engine.generate(TOKENS)
    engine.reset()
    request_id = engine.add(TOKENS)
    engine.abort(request_id)
    engine.run()
    assert told(engine).prompt_tokens == len(TOKENS)
    engine.side.loads._settings = replace(engine.side.loads._settings, load_timeout_seconds=0.0)
    engine.generate(TOKENS)
    assert told(engine) == HitRate(2 * len(TOKENS), {}, 0)
