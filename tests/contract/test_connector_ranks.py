"""Several ranks: all of them or none, and one that is late, fails or never answers harms nobody."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from kvdepot.client.copy.base import Direction
from kvdepot.client.copy.cpu import CpuCopier
from kvdepot.client.vllm import connector as connector_module
from kvdepot.client.vllm.negative import NEGATIVE_SECONDS
from kvdepot.core.calls import AcquireCall

from tests.contract.connector_fixtures import Gate, Make, cold, depot, folder, gate, make, prompt, rank_copier
from tests.daemon_process import DaemonProcess
from tests.engine_client import wait_until
from tests.fakes.direct_session import Depot
from tests.fakes.scripted_engine import BLOCK, ScriptedEngine
from tests.raw_client import status_of

__all__ = ["depot", "folder", "gate", "make"]  # fixtures

LOAD_TIMEOUT_SECONDS = 3.0


class LiveEngine(ScriptedEngine):
    """On a real daemon, by the client's own session and attachments."""

    def __init__(
        self, daemon: DaemonProcess, folder: Path, monkeypatch: pytest.MonkeyPatch, depot: Any, **options: Any
    ) -> None:
        super().__init__(depot, folder, monkeypatch, settings={"endpoint": daemon.endpoint}, **options)

    def _connect(self, monkeypatch: pytest.MonkeyPatch, streams: bool) -> None: ...


def break_copies(monkeypatch: pytest.MonkeyPatch, broken: CpuCopier, direction: Direction) -> None:
    copy = CpuCopier.copy

    def disturbed(copier: CpuCopier, arena: Any, batch: Any, way: Any) -> None:
        if copier is broken and way is direction:
            raise OSError("no such memory")
        copy(copier, arena, batch, way)

    monkeypatch.setattr(CpuCopier, "copy", disturbed)


def test_p11_an_object_that_one_rank_could_not_write_is_no_hit(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(ranks=2)
    tokens = prompt(4.5)
    break_copies(monkeypatch, rank_copier(engine, 1), Direction.STORE)
    engine.generate(tokens)
    assert engine.depot.engine.counters.get("committed_objects.committed") == 0
    assert engine.depot.lent() == 0
    assert engine.side.holds.pinned_blocks == 0
    other = make(ranks=2)
    assert other.generate(tokens) == cold(tokens)
    assert list(other.hits.values()) == [0]


@pytest.mark.parametrize("hybrid", [False, True], ids=["dense", "hybrid"])
@pytest.mark.parametrize("rank", [0, 1])
def test_d5_p8_a_load_that_fails_on_one_rank_fails_once_and_is_recomputed_on_all(
    make: Make, monkeypatch: pytest.MonkeyPatch, hybrid: bool, rank: int
) -> None:
    tokens = prompt(4.5)
    make(ranks=2, hybrid=hybrid).generate(tokens)
    engine = make(ranks=2, hybrid=hybrid)
    break_copies(monkeypatch, rank_copier(engine, rank), Direction.LOAD)
    asked = engine.depot.count(AcquireCall)
    request_id = engine.add(tokens)
    engine.run()
    assert engine.failed_reports == [request_id]
    assert engine.depot.count(AcquireCall) == asked + 1
    assert engine.outputs[request_id] == cold(tokens)
    assert engine.depot.lent() == 0
    counters = engine.depot.engine.counters
    assert (counters.get("hit_tokens"), counters.get("released_loads.unused")) == (0, 1), "it was no hit"


@pytest.mark.parametrize("hybrid", [False, True], ids=["dense", "hybrid"])
def test_p5_i1_a_load_ends_by_its_deadline_although_one_rank_is_held_up_and_that_rank_writes_nothing_later(
    make: Make, gate: Gate, hybrid: bool
) -> None:
    """Rank 1's copying thread hangs in a store: it cannot begin the load, and finds nothing to do when it goes on."""
    tokens, other = prompt(6.5), prompt(3.5, 1)
    make(ranks=2, hybrid=hybrid).generate(tokens)
    engine = make(ranks=2, hybrid=hybrid, settings={"load_timeout_seconds": LOAD_TIMEOUT_SECONDS})
    gate.close(direction=Direction.STORE, copier=rank_copier(engine, 1))
    storing = engine.add(other, max_tokens=1)
    wait_until(lambda: bool(engine.step()) and gate.reached(0), "rank 1 stores nothing")
    request_id = engine.add(tokens)
    wait_until(lambda: bool(engine.step()) and request_id not in engine.scheduler.requests, "not recomputed")
    assert engine.failed_reports == [request_id]
    assert engine.hits[request_id] == 0
    assert engine.outputs[request_id] == cold(tokens)
    assert engine.outputs[storing] == cold(other, 1)
    freed = [block for block in engine.pool.blocks if not block.ref_cnt and not block.is_null]
    memory = engine.memories[1]
    for block in freed:
        for name in memory.caches:
            memory.block(name, block.block_id).fill_(0x5A)
    gate.open()
    engine.run()
    assert all((memory.block(name, block.block_id) == 0x5A).all() for block in freed for name in memory.caches)
    engine.assert_clean()
    assert engine.scheduler.reset_prefix_cache()
    time.sleep(NEGATIVE_SECONDS)
    again = [engine.add(tokens), engine.add(other)]
    engine.run()
    assert [engine.hits[one] for one in again] == [6 * BLOCK, 3 * BLOCK]
    assert [engine.outputs[one] for one in again] == [cold(tokens), cold(other)]


@pytest.mark.parametrize("hybrid", [False, True], ids=["dense", "hybrid"])
def test_p4_p2_stages_of_a_pipeline_store_and_load_their_own_layers_and_no_other_shape_does(
    make: Make, hybrid: bool
) -> None:
    """With `hybrid` the second stage has no layer of the recurrent groups."""
    tokens = prompt(6.5)
    first, second = (make(ranks=2, pipeline=True, hybrid=hybrid) for _ in range(2))
    assert first.generate(tokens) == cold(tokens)
    assert second.generate(tokens) == cold(tokens)
    assert (list(first.hits.values()), list(second.hits.values())) == ([0], [6 * BLOCK])
    split, whole = make(ranks=2, hybrid=hybrid), make(hybrid=hybrid)
    assert split.generate(tokens) == whole.generate(tokens) == cold(tokens)
    assert (list(split.hits.values()), list(whole.hits.values())) == ([0], [0])
    for engine in (first, second, split, whole):
        engine.assert_clean()


@pytest.fixture
def daemon() -> Iterator[DaemonProcess]:
    process = DaemonProcess()
    yield process
    process.close()


@pytest.mark.parametrize("hybrid", [False, True], ids=["dense", "hybrid"])
def test_p11_what_one_rank_never_acknowledges_is_never_published(
    daemon: DaemonProcess,
    depot: Depot,
    folder: Path,
    gate: Gate,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    hybrid: bool,
) -> None:
    """Two ranks over a real daemon: rank 0 has written its part and said so, rank 1 says nothing for good."""
    monkeypatch.setattr(connector_module, "cache_path", lambda: tmp_path / "digests.json")
    daemon.start()
    tokens = prompt(4.5)
    with (
        closing(LiveEngine(daemon, folder, monkeypatch, depot, ranks=2, hybrid=hybrid)) as engine,
        closing(LiveEngine(daemon, folder, monkeypatch, depot, ranks=2, hybrid=hybrid)) as reader,
    ):
        gate.close(direction=Direction.STORE, copier=rank_copier(engine, 1))
        request_id = engine.add(tokens, max_tokens=1)
        ops = engine.side.stores._ops
        wait_until(
            lambda: bool(engine.step()) and gate.reached(0) and any(op.ranks_done for op in ops.values()),
            "not written by rank 0 alone",
        )
        assert engine.outputs[request_id] == cold(tokens, 1)
        assert reader.generate(tokens) == cold(tokens)
        assert list(reader.hits.values()) == [0]
        engine.connector.shutdown()  # its scheduler ends, its rank is still there, and goes on later
        gate.open()
    assert status_of(daemon.socket).tiers[0].objects == 0
