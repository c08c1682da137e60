"""Hybrid prefill and decode engines on one daemon, and what they tell each other through a router (rows A4, B1)."""

from __future__ import annotations

import pytest

from tests.e2e.fleet import Fleet
from tests.e2e.router import Conversation

ENGINES = ("hybrid", "hybrid_dense_checkpoints")
CHUNK = 384


@pytest.mark.requirement("A4", "B1")
def test_hybrid_prefill_reuses_in_turn_2_what_decode_has_generated(fleet: Fleet) -> None:
    prefill, decode = (fleet.engine(name) for name in ENGINES)
    talk = Conversation(fleet, *ENGINES)
    first = fleet.prompt(2 * CHUNK + 40)
    computed, answered = talk.turn(first, 400)
    assert (computed.local_tokens, computed.external_tokens) == (0, 0)
    # Asked at once, before the other engine's stores were committed: it waited for them.
    assert (answered.local_tokens, answered.external_tokens) == (0, 2 * CHUNK), fleet.told()
    assert talk.boundary == 3 * CHUNK
    own = decode.ask(first, 400)
    assert (own.local_tokens, own.tokens) == (2 * CHUNK, answered.tokens)

    computed, _ = talk.turn(fleet.prompt(30), 16)
    # Of the prompt the prefill engine has its own, of the answer what the decode engine has stored.
    assert (computed.local_tokens, computed.external_tokens) == (2 * CHUNK, CHUNK), fleet.told()
    second = [*first, *answered.tokens, *fleet.prompt(30)]
    own = decode.ask(second)  # a hit of the checkpoint that it kept itself
    assert own.local_tokens == 3 * CHUNK
    hit = prefill.ask(second)
    assert (hit.local_tokens, hit.tokens) == (3 * CHUNK, own.tokens)
    fleet.forget(prefill)
    loaded = fleet.ask(prefill, second)
    assert loaded.external_tokens == loaded.served.tokens == 3 * CHUNK
    assert loaded.tokens == own.tokens
