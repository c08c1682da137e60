"""Speculative decoding: a load of the daemon gives the tokens and the accepted drafts of the engine's own hit."""

from __future__ import annotations

import pytest

from tests.e2e.fleet import Fleet
from tests.e2e.speculation import DENSE_CHUNK, HYBRID_CHUNK, next_turn, outcome, runs

ENGINES = ("mtp_2", "draft_model")


@pytest.mark.requirement("C6", "C7", "P4")
def test_mtp_on_a_hybrid_model(fleet: Fleet) -> None:
    engine = fleet.engine("mtp_2")
    ids = fleet.prompt(3 * HYBRID_CHUNK + 8)
    first = runs(fleet, engine, ids)
    first.check(HYBRID_CHUNK)
    assert first.boundaries == (2 * HYBRID_CHUNK, 2 * HYBRID_CHUNK)
    assert first.cold.tokens == first.own.tokens
    turn = runs(fleet, engine, next_turn(fleet, ids, first.own))
    turn.check(HYBRID_CHUNK)
    assert turn.loaded.external_tokens == 2 * HYBRID_CHUNK

    # The next token differs after the boundary that both have: what the draft layer has before it differs too.
    other = runs(fleet, engine, [*ids[: 2 * HYBRID_CHUNK], *fleet.prompt(HYBRID_CHUNK + 8)])
    other.check(HYBRID_CHUNK)

    # With one token left to compute, vLLM would compute wrong ones.
    critical = ids[: 2 * HYBRID_CHUNK + 1]
    fleet.forget(engine)
    assert fleet.ask(engine, critical).external_tokens == 0
    fleet.forget(engine)
    assert fleet.ask(engine, ids[: 2 * HYBRID_CHUNK + 2]).external_tokens == 2 * HYBRID_CHUNK


@pytest.mark.requirement("C6", "P4")
def test_a_draft_model_that_is_a_copy_of_the_target(fleet: Fleet) -> None:
    engine = fleet.engine("draft_model")
    ids = fleet.prompt(700)
    first = runs(fleet, engine, ids)
    first.check(DENSE_CHUNK)
    turn = runs(fleet, engine, next_turn(fleet, ids, first.own))
    turn.check(DENSE_CHUNK)
    for one in (first, turn):
        assert outcome(one.cold) == outcome(one.own)
        assert one.own.prompt.accepted_tokens == one.own.prompt.draft_tokens

    # Its draft KV depends on no later token: a prompt that goes on in another way finds the whole chunks.
    other = runs(fleet, engine, [*ids[: 2 * DENSE_CHUNK], *fleet.prompt(90)])
    other.check(DENSE_CHUNK)
    assert other.loaded.external_tokens == 2 * DENSE_CHUNK
