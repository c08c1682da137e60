"""What an engine may read and write: refusals at start, and weights that change in place."""

from __future__ import annotations

import pytest

from demo.engine import EngineProcessError
from demo.toys import DENSE
from tests.e2e.fleet import Fleet

pytestmark = pytest.mark.long
ENGINES = ("dense", "not_aligned")


@pytest.mark.requirement("C3")
def test_a_recurrent_model_that_is_not_in_align_mode_is_refused(fleet: Fleet) -> None:
    assert "not_aligned" in fleet.refused
    assert 'mamba_cache_mode="align"' in fleet.log("not_aligned").read_text()


@pytest.mark.requirement("P3")
def test_hashes_that_no_other_process_repeats_are_refused(fleet: Fleet) -> None:
    fleet.define("xxhash", DENSE, {"prefix_caching_hash_algo": "xxhash"})
    with pytest.raises(EngineProcessError):
        fleet.start("xxhash")
    assert "set PYTHONHASHSEED" in fleet.log("xxhash").read_text()


OUTPUT_TOKENS = 1800
"""Enough for a request to be alive while a busy daemon stores its prompt."""


@pytest.mark.requirement("I1d")
def test_weights_changed_in_place_share_nothing_with_what_was_there(fleet: Fleet) -> None:
    engine = fleet.engine("dense")
    base = fleet.prompt(1500)
    cold = engine.ask(base)
    fleet.daemon.settle()

    # A plain reset is no change of weights.
    engine.reset_prefix_cache()
    assert fleet.ask(engine, base).external_tokens == 1280

    # A request that is alive across the change stores nothing; nothing stored before is served after.
    before = fleet.daemon.settle().tiers[0].objects
    alive = engine.begin([fleet.prompt(1540)], OUTPUT_TOKENS)
    fleet.daemon.wait(lambda status: status.tiers[0].objects >= before + 6, 60, "storing the prompt")
    engine.reset_connector()
    assert not alive.done()
    stored = fleet.daemon.settle().tiers[0].objects
    (done,) = engine.finish(alive)
    assert (done.error, len(done.tokens)) == ("", OUTPUT_TOKENS)
    assert fleet.daemon.settle().tiers[0].objects == stored
    engine.reset_prefix_cache()
    after = fleet.ask(engine, base)
    assert (after.external_tokens, after.tokens) == (0, cold.tokens)
    changed = fleet.prompt(1500)
    engine.ask(changed)
    fleet.forget(engine)
    assert fleet.ask(engine, changed).external_tokens == 1280

    # The same weights' next process is on base weights: it reads what belongs to them, and nothing else.
    engine = fleet.restart("dense", kill=True)
    assert fleet.ask(engine, changed).external_tokens == 0
    again = fleet.ask(engine, base)
    assert (again.external_tokens, again.tokens) == (1280, cold.tokens)
