"""The connector with copies by way of a device that does its work late: what is stored and loaded stays right."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from kvdepot.client.arena_map import ArenaMap
from kvdepot.client.copy import device as device_module
from kvdepot.client.copy import pinning
from kvdepot.client.copy.backend import Way
from kvdepot.client.copy.base import Direction
from kvdepot.client.copy.device import DeviceCopier
from kvdepot.client.copy.revocable import RevocableCopier
from kvdepot.client.vllm.base.operations import LoadOp, StoreOp
from kvdepot.client.vllm.worker import rank

from tests.fakes.late_device import LateDevice
from tests.fakes.rank_memory import RankMemory
from tests.fakes.scripted_engine import BLOCK
from tests.rigs.connector_rig import TRANSPORTS, Make, cold, count_stats, prompt
from tests.rigs.local_eviction import CHUNKS, evict
from tests.rigs.patience import patient


class Raises:
    """In place of a method of a device."""

    def __init__(self, *_: Any) -> None:
        raise OSError("libcuda.so.1: cannot open shared object file")


@pytest.fixture(params=Way)
def devices(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> list[LateDevice]:
    """Of the ranks that start, in order. All of the arena can be pinned from the start."""
    made: list[LateDevice] = []

    def copier(views: Sequence[torch.Tensor], *_: Any) -> DeviceCopier:
        made.append(LateDevice())
        return DeviceCopier(views, made[-1], way=request.param)

    monkeypatch.setattr(rank, "_copier", copier)
    monkeypatch.setattr(ArenaMap, "pinnable", property(lambda arena: arena.buffer))
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
    assert all(device.entered for device in devices)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The arena of these tests is many pieces."""
    monkeypatch.setattr(pinning, "PIECE_BYTES", 1 << 20)
    monkeypatch.setattr(device_module, "PIECE_BYTES", 1 << 20)


@pytest.mark.usefixtures("small_pieces")
def test_with_pin_start_the_arena_is_pinned_before_the_engine_goes_on(
    make: Make, devices: list[LateDevice], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    engine = make(ranks=2, settings={"pin": "start"}, wait=False)
    arenas = [copies._attachment.arena for copies in engine.copies]
    sizes = [arena.size_bytes for arena in arenas if arena is not None]
    assert sizes == [sum(device.pinned) for device in devices] and len(sizes) == 2
    assert [line for line in caplog.messages if "pinned" in line] == [
        f"kvdepot: pinned {size} of the arena's {size} bytes at start, in 0.0 s" for size in sizes
    ]
    engine.wait_attached()
    assert engine.generate(prompt(5.5)) == cold(prompt(5.5))


@pytest.mark.requirement("I3")
@pytest.mark.usefixtures("small_pieces")
def test_an_engine_starts_where_the_arena_cannot_be_pinned(
    make: Make, devices: list[LateDevice], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(LateDevice, "pin", lambda *_: False)
    engine = make(settings={"pin": "start"})
    assert "can be pinned; copies are slower" in caplog.text
    assert engine.generate(prompt(5.5)) == cold(prompt(5.5))


@pytest.mark.requirement("I3")
@pytest.mark.usefixtures("small_pieces")
def test_an_engine_starts_where_pinning_fails(
    make: Make, devices: list[LateDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> bool:
        raise OSError("the driver says no")

    monkeypatch.setattr(LateDevice, "pin", broken)
    engine = make(settings={"pin": "start"})
    (worker,) = engine.workers
    assert worker.failures.counts["prepare:OSError"]
    worker.failures.counts.clear()


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
    assert engine.side.counters["local_reuse_tokens"] == 6 * BLOCK
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
    engine = make()
    tokens = prompt(5.5)
    assert engine.generate(tokens) == cold(tokens)

    def out_of_memory(*_: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(LateDevice, "memory", out_of_memory)
    other = make(wait=False)
    (facts,) = other.facts().values()
    assert facts.problem == "out of memory"
    assert other.generate(tokens) == cold(tokens)
    assert not any(other.hits.values())


@pytest.mark.requirement("I1", "G3")
@pytest.mark.parametrize("runs_ahead", [False, True], ids=["sync", "async"])
@TRANSPORTS
def test_a_load_that_put_wrong_bytes_is_computed_and_the_rank_copies_no_more(
    make: Make, devices: list[LateDevice], monkeypatch: pytest.MonkeyPatch, runs_ahead: bool, streams: bool
) -> None:
    engine, other = (make(runs_ahead=runs_ahead, streams=streams) for _ in range(2))
    assert engine.generate(prompt(5.5)) == cold(prompt(5.5))
    copy = DeviceCopier.copy

    def wrong(own: DeviceCopier, arena: Any, batch: Any, direction: Direction) -> None:
        """The pieces of two blocks change places."""
        copy(own, arena, replace(batch, blocks=batch.blocks[::-1].copy()), direction)

    monkeypatch.setattr(DeviceCopier, "copy", wrong)
    tokens, found = prompt(5.5), count_stats(other, "verified_loads")
    request_id = other.add(tokens)
    other.run()
    assert other.outputs[request_id] == cold(tokens)
    assert other.failed_reports == [request_id]
    (worker,) = other.workers
    assert worker.failures.counts == {"verify:WrongBytesError": 1}
    monkeypatch.undo()
    assert other.generate(prompt(7.5)) == cold(prompt(7.5)), "nothing is loaded or stored any more"
    assert worker.failures.counts.total() == 1
    assert found == {"wrong": 1}
    worker.failures.counts.clear()


@pytest.mark.requirement("I1", "P10")
@pytest.mark.parametrize("limit", [0, 2])
@TRANSPORTS
def test_as_many_loads_are_read_back_as_the_setting_says(
    make: Make, devices: list[LateDevice], monkeypatch: pytest.MonkeyPatch, limit: int, streams: bool
) -> None:
    engine = make(streams=streams)
    for seed in range(3):
        engine.generate(prompt(5.5, seed))
    other = make(streams=streams, settings={"verify_first_loads": limit})
    found, verify, read_back = count_stats(other, "verified_loads"), DeviceCopier.verify, []

    def counted(own: DeviceCopier, arena: Any, batch: Any) -> bool:
        read_back.append(own)
        return verify(own, arena, batch)

    monkeypatch.setattr(DeviceCopier, "verify", counted)
    for seed in range(3):
        assert other.generate(prompt(5.5, seed)) == cold(prompt(5.5, seed))
        assert len(read_back) == found["right"] == min(seed + 1, limit)
    assert list(other.hits.values()) == [5 * BLOCK] * 3
    assert set(found) <= {"right"}


@pytest.mark.requirement("I1")
def test_other_kv_caches_than_at_the_start_end_the_copies_of_a_device(make: Make, devices: list[LateDevice]) -> None:
    """A self-test takes blocks that hold nothing, and the former copies still have the arena pinned."""
    engine = make()
    tokens = prompt(5.5)
    assert engine.generate(tokens) == cold(tokens)
    memory = RankMemory(engine.layout, 0)
    (worker,) = engine.workers
    before = memory.raw.clone()
    worker.register_kv_caches(memory.caches)
    (facts,) = engine.facts().values()
    assert "other KV caches" in facts.problem
    assert torch.equal(memory.raw, before) and len(devices) == 1


def _lose_all_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LateDevice, "transfer", lambda *_, **__: None)
    monkeypatch.setattr(LateDevice, "shuffle", lambda *_: None)
    monkeypatch.setattr(LateDevice, "run", lambda *_: None)


def _raise_on(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda monkeypatch: monkeypatch.setattr(LateDevice, name, Raises)


@pytest.mark.requirement("I1", "I3", "G1")
@pytest.mark.parametrize(
    ("broken", "problem"),
    [
        (_lose_all_work, "the self-test of copies failed"),
        (_raise_on("enter"), "libcuda"),
        (_raise_on("wait"), "libcuda"),
    ],
    ids=["wrong bytes", "no driver", "a failed device"],
)
def test_an_engine_whose_ranks_fail_their_self_test_runs_without_kvdepot(
    make: Make,
    devices: list[LateDevice],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    broken: Callable[[pytest.MonkeyPatch], None],
    problem: str,
) -> None:
    broken(monkeypatch)
    engine = make(wait=False, ranks=2)
    assert all(problem in facts.problem for facts in engine.facts().values()) and len(engine.facts()) == 2
    assert "stores and loads nothing" in caplog.text and problem in caplog.text
    for seed in (0, 1):
        assert engine.generate(prompt(5.5, seed)) == cold(prompt(5.5, seed))
    assert not (any(engine.hits.values()) or engine.loaded_reports or engine.failed_reports)
    assert not any(worker.failures.counts for worker in engine.workers)


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

    def until_suspended(own: RevocableCopier, direction: Direction | None = None) -> None:
        assert suspended.wait(patient(20))
        wait(own, direction)

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
