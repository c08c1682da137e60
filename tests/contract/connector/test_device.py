"""The connector with copies by way of a device that does its work late: what is stored and loaded stays right."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from kvdepot.client.copy.device import DeviceCopier
from kvdepot.client.copy.revocable import RevocableCopier
from kvdepot.client.vllm import rank
from kvdepot.client.vllm.metadata import LoadOp, StoreOp

from tests.contract.connector.test_hybrid import CHUNKS, evict
from tests.fakes.late_device import LateDevice
from tests.fakes.scripted_engine import BLOCK
from tests.rigs.connector_rig import Make, cold, prompt


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> list[LateDevice]:
    """Of the ranks that start, in order."""
    made: list[LateDevice] = []

    def copier(views: Sequence[torch.Tensor], *_: Any) -> DeviceCopier:
        made.append(LateDevice())
        return DeviceCopier(views, made[-1])

    monkeypatch.setattr(rank, "_copier", copier)
    return made


@pytest.mark.requirement("P4")
@pytest.mark.parametrize("hybrid", [False, True], ids=["dense", "hybrid"])
def test_what_one_engine_stored_another_one_loads(make: Make, devices: list[LateDevice], hybrid: bool) -> None:
    engine, other = make(hybrid=hybrid), make(hybrid=hybrid)
    for seed in range(4):
        tokens = prompt(5.5, seed)
        assert engine.generate(tokens) == cold(tokens)
        assert other.generate(tokens) == cold(tokens)
    assert list(other.hits.values()) == [5 * BLOCK] * 4
    engine.assert_clean()
    other.assert_clean()
    assert len(devices) == 2 and all(device.ran and not device.in_flight for device in devices)


@pytest.mark.requirement("A1")
def test_what_is_kept_moves_on_the_device_and_the_rest_is_loaded_behind_it(
    make: Make, devices: list[LateDevice]
) -> None:
    engine = make(hybrid=True, ranks=2, blocks=128)
    tokens = prompt(CHUNKS + 0.5)
    engine.generate(tokens)
    evict(engine, attention_from=6)
    assert engine.generate(tokens) == cold(tokens)
    assert list(engine.hits.values()) == [0, CHUNKS * BLOCK]
    assert engine.side.counters["kept_tokens"] == 6 * BLOCK
    engine.assert_clean()
    assert not any(device.in_flight for device in devices)


@pytest.mark.requirement("P4")
def test_streams_carry_what_a_device_copies(make: Make, devices: list[LateDevice]) -> None:
    engine, other = make(streams=True), make(streams=True)
    tokens = prompt(5.5)
    assert engine.generate(tokens) == cold(tokens)
    assert other.generate(tokens) == cold(tokens)
    assert list(other.hits.values()) == [5 * BLOCK]
    other.assert_clean()
    assert all(device.ran and not device.pinned for device in devices)


@pytest.mark.requirement("P8")
def test_a_device_without_memory_for_copies_costs_hits_and_nothing_else(
    make: Make, devices: list[LateDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, other = make(), make()
    tokens = prompt(5.5)
    assert engine.generate(tokens) == cold(tokens)

    def out_of_memory(*_: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(LateDevice, "memory", out_of_memory)
    assert other.generate(tokens) == cold(tokens)
    (worker,) = other.workers
    assert worker.failures.counts == {"copy:RuntimeError": 1}
    worker.failures.counts.clear()
    other.assert_clean()


@pytest.mark.parametrize("kind", [LoadOp, StoreOp])
def test_what_a_device_was_given_is_done_before_kv_memory_goes(
    make: Make, devices: list[LateDevice], monkeypatch: pytest.MonkeyPatch, kind: type
) -> None:
    """A copy that has returned is only queued: here KV memory goes between that and the wait for it."""
    make().generate(prompt(9.5))
    engine = make()
    (copies,), device = engine.copies, devices[-1]
    queued, suspended = threading.Event(), threading.Event()
    copy = DeviceCopier.copy

    def late(own: DeviceCopier, *batch: Any) -> None:
        copy(own, *batch)
        queued.set()

    wait = RevocableCopier.wait

    def until_suspended(own: RevocableCopier) -> None:
        assert suspended.wait(20)
        wait(own)

    monkeypatch.setattr(DeviceCopier, "copy", late)
    monkeypatch.setattr(RevocableCopier, "wait", until_suspended)
    tokens = prompt(9.5) if kind is LoadOp else prompt(5.5, seed=3)
    request_id = engine.add(tokens)
    while not queued.is_set():
        engine.step()
    assert device.in_flight
    revoke = RevocableCopier.revoke

    def revoking(own: RevocableCopier, seconds: float) -> bool:
        ended = revoke(own, seconds)
        assert not device.in_flight, "KV memory goes now"
        suspended.set()
        return ended

    monkeypatch.setattr(RevocableCopier, "revoke", revoking)
    if kind is StoreOp:
        engine.abort(request_id)
    engine.discard()
    engine.restore()
    assert suspended.is_set() and copies is engine.copies[0]
    engine.run()
    assert engine.failed_reports == ([request_id] if kind is LoadOp else [])
    if kind is LoadOp:
        assert engine.outputs[request_id] == cold(tokens)
    engine.reset()
    assert engine.generate(prompt(9.5)) == cold(prompt(9.5))
    assert list(engine.hits.values())[-1] == 9 * BLOCK
    engine.assert_clean()
