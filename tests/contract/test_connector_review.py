"""What a second review of the connector found, against vLLM's real scheduler."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from kvdepot.core.calls import EndRequestCall, ReserveCall, ReserveReply

from tests.contract.connector_fixtures import Make, cold, depot, folder, make, prompt
from tests.fakes.scripted_engine import BLOCK

__all__ = ["depot", "folder", "make"]  # fixtures


@pytest.mark.parametrize("name", ["x" * 600, "é" * 300, "\ud800"], ids=["long", "long in utf-8", "surrogate"])
def test_i3_a_request_id_that_fits_no_call_is_shortened(make: Make, name: str) -> None:
    """Users may choose the ids: what the daemon hears is a digest, the same in every call."""
    engine, other = make(), make()
    engine.name = name
    tokens = prompt(4.5)
    assert engine.generate(tokens) == cold(tokens)
    ids = {call.request_id for call in engine.depot.calls if isinstance(call, ReserveCall | EndRequestCall)}
    assert len(ids) == 1
    assert ids.pop().encode().startswith(b"digest-")
    assert other.generate(tokens) == cold(tokens)
    assert list(other.hits.values()) == [4 * BLOCK]
    engine.assert_clean()


@pytest.mark.parametrize(
    "wrong",
    [
        lambda reply: replace(reply, outcomes=reply.outcomes[:-1]),
        lambda reply: replace(reply, outcomes=reply.outcomes + reply.outcomes),
        lambda reply: replace(reply, outcomes=b"\xee" * len(reply.outcomes)),
        lambda reply: replace(reply, extents=reply.extents[:-1]),
    ],
    ids=["few", "many", "unknown", "cut"],
)
def test_i5_an_answer_to_reserve_that_makes_no_sense_leaves_no_lease_and_no_hold(make: Make, wrong: Any) -> None:
    engine = make()
    serve = engine.session._serve

    def bend(call: Any) -> Any:
        reply = serve(call)
        return wrong(reply) if isinstance(reply, ReserveReply) else reply

    engine.session._serve = bend  # type: ignore[method-assign]
    tokens = prompt(4.5)
    assert engine.generate(tokens) == cold(tokens)
    assert engine.side.counters["store_dropped_malformed"] >= 4
    engine.assert_clean()
