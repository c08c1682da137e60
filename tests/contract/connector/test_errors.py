"""Errors of the connector's own parts, and of a rank's device: no request waits for ever, and nothing stays in use."""

from __future__ import annotations

from typing import Any, Final

import pytest
from kvdepot.client.vllm.scheduling.acceptance import Acceptance
from kvdepot.client.vllm.scheduling.events import KvEvents
from kvdepot.client.vllm.scheduling.prefill_rate import PrefillRate
from kvdepot.client.vllm.scheduling.request_ends import RequestEnds
from kvdepot.client.vllm.scheduling.tier_checks import TierChecks
from kvdepot.client.vllm.scheduling.transfer_params import TransferParams
from kvdepot.client.vllm.worker.places import ObjectPlaces

from tests.fakes.raising import Injected
from tests.fakes.scripted_engine import BLOCK, ScriptedEngine
from tests.rigs.connector_rig import Make, cold, prompt, rank_copier

ONLY_TELLS: Final = [
    (Acceptance, "step"),
    (Acceptance, "finished"),
    (KvEvents, "missing"),
    (KvEvents, "stored"),
    (KvEvents, "take"),
    (ObjectPlaces, "size_bytes"),  # of the ranks' statistics
    (PrefillRate, "step"),
    (PrefillRate, "finished"),
    (RequestEnds, "count"),
    (RequestEnds, "send"),
    (TierChecks, "step"),
    (TransferParams, "params"),
]


def assert_nothing_left(engine: ScriptedEngine) -> None:
    side = engine.side
    assert not side.loads.active
    assert not side.stores.open_requests
    assert not side.holds.pinned_blocks
    assert engine.pool.get_num_free_blocks() == engine.pool.num_gpu_blocks - 1
    assert not engine.depot.lent()
    assert not any(session.leases for session in engine.depot.engine._sessions.by_slot.values())


@pytest.mark.requirement("I3", "I5")
@pytest.mark.parametrize(("kind", "name"), ONLY_TELLS, ids=lambda part: getattr(part, "__name__", part))
def test_an_error_in_what_only_tells_costs_nothing_else(
    make: Make, monkeypatch: pytest.MonkeyPatch, kind: type, name: str
) -> None:
    engine = make(events=True, drafts=2)
    called = []

    def broken(*_: Any, **__: Any) -> None:
        called.append(name)
        raise Injected(name)

    monkeypatch.setattr(kind, name, broken)
    tokens, other = prompt(6.5), prompt(4.5, 1)
    aborted = engine.add(other, 8)
    engine.step()
    engine.abort(aborted)
    assert engine.generate(tokens) == cold(tokens)
    engine.reset()
    request_id = engine.add(tokens)
    engine.requests[request_id].kv_transfer_params = {}
    engine.run()
    assert engine.outputs[request_id] == cold(tokens)
    assert called
    assert engine.hits[request_id] == 6 * BLOCK, "it is stored, and loaded"
    assert_nothing_left(engine)


@pytest.mark.requirement("I3", "I5", "I6")
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("what", ["loads", "stores"])
def test_a_device_that_gives_no_mark_fails_copies_and_loses_none(
    make: Make, monkeypatch: pytest.MonkeyPatch, what: str, ranks: int
) -> None:
    tokens = prompt(6.5)
    engine = make(ranks=ranks)
    if what == "loads":
        assert engine.generate(tokens) == cold(tokens)
        engine.reset()

    def broken() -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as broken_device:
        broken_device.setattr(rank_copier(engine, ranks - 1), "mark", broken)
        assert engine.generate(tokens) == cold(tokens)
    assert_nothing_left(engine)
    assert len(engine.failed_reports) == (what == "loads")
    engine.reset()
    assert engine.generate(tokens) == cold(tokens), "copies continue when the device does"
    assert_nothing_left(engine)
