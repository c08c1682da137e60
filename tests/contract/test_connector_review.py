"""What a second review of the connector found, against vLLM's real scheduler."""

from __future__ import annotations

import pytest
from kvdepot.core.calls import EndRequestCall, ReserveCall

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
