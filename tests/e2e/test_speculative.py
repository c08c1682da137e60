"""Speculative decoding: a load of the daemon gives the tokens and the accepted drafts of the engine's own hit."""

from __future__ import annotations

import pytest

from tests.e2e.fleet import Fleet
from tests.e2e.speculation import DENSE_CHUNK, next_turn, outcome, runs

ENGINES = ("draft_model",)


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
