"""Dense prefill and decode engines in vLLM's roles on one daemon, with a router between them (rows A4, B1).

In float32, so that every turn's tokens are those of a serial cold run.
"""

from __future__ import annotations

import pytest

from tests.e2e.fleet import Fleet
from tests.e2e.router import Conversation

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]
ENGINES = ("dense", "dense_consumer", "dense_producer")
CHUNK = 256
BLOCK = 32


@pytest.mark.requirement("A4", "B1")
def test_dense_turns_go_back_and_forth_between_prefill_and_decode(fleet: Fleet) -> None:
    """Every turn's tokens are those of a serial cold run, by an engine that has never heard of the conversation."""
    *_, cold = (fleet.engine(name) for name in ENGINES)  # the producer loads nothing
    talk = Conversation(fleet, "dense", "dense_consumer")
    for number in range(5):
        before, seen = talk.boundary, talk.heard
        computed, answered = talk.turn(fleet.prompt(100 + 70 * number), 330)
        if number:  # all that it had heard is its own, and what comes behind it is the decode engine's
            assert computed.local_tokens == seen // BLOCK * BLOCK
            assert computed.local_tokens + computed.external_tokens == before > seen, fleet.told()
        assert answered.local_tokens + answered.external_tokens >= (talk.heard - 1) // CHUNK * CHUNK, fleet.told()
        assert talk.boundary == (len(talk.tokens) - 1) // CHUNK * CHUNK
        fleet.forget(cold)
        reference = cold.ask(talk.tokens[: talk.heard], 330)
        assert (reference.local_tokens, reference.external_tokens) == (0, 0)
        assert answered.tokens == reference.tokens
        assert computed.tokens == reference.tokens[:1]


@pytest.mark.requirement("A4")
def test_a_consumers_second_turn_hits_and_the_producers_own_caching_is_as_ever(fleet: Fleet) -> None:
    producer, consumer = fleet.engine("dense_producer"), fleet.engine("dense_consumer")
    talk = Conversation(fleet, "dense_producer", "dense_consumer")
    first = fleet.prompt(5 * CHUNK + 50)
    _, answered = talk.turn(first, 16)
    assert (answered.local_tokens, answered.external_tokens) == (0, 5 * CHUNK), fleet.told()
    fleet.forget(consumer)
    said = fleet.prompt(2 * CHUNK)
    computed, answered = talk.turn(said, 16)
    assert (computed.local_tokens, computed.external_tokens) == (len(first) // BLOCK * BLOCK, 0)
    whole = (talk.heard - 1) // CHUNK * CHUNK
    assert (answered.local_tokens, answered.external_tokens) == (0, whole), fleet.told()
    again = talk.tokens[: talk.heard]
    fleet.forget(producer)
    asked = producer.ask(again)
    assert (asked.local_tokens, asked.external_tokens, asked.tokens) == (0, 0, answered.tokens)
    hit = producer.ask(again)
    assert (hit.local_tokens, hit.tokens) == ((len(again) - 1) // BLOCK * BLOCK, answered.tokens)
