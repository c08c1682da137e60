"""The connector's two sides: a load that ends while it is cancelled, idle steps, a reuse, others' handshakes."""

from __future__ import annotations

import logging
import time
from types import SimpleNamespace
from typing import Any

import pytest
from kvdepot.client.vllm.base.metadata import StepMeta
from kvdepot.client.vllm.base.operations import LoadOp
from kvdepot.client.vllm.connector import KVDepotConnector
from kvdepot.client.vllm.scheduling.namespaces import Namespaces
from kvdepot.client.vllm.scheduling.pins import BlockHolds
from kvdepot.client.vllm.scheduling.sides import SchedulerSides
from kvdepot.client.vllm.worker.copy_outcome import CopyOutcome
from kvdepot.client.vllm.worker.layers import RankLayers
from kvdepot.client.vllm.worker.worker import LOADS_WAIT_SECONDS, WorkerSide
from vllm.v1.core.block_pool import BlockPool

from tests.fakes.idle_attachment import IdleAttachment


class DoneCopies:
    """A copying thread that has finished a load since the last step."""

    def __init__(self, *done: CopyOutcome) -> None:
        self._done = list(done)
        self.waits: list[float] = []

    def wait_for_loads(self, seconds: float) -> None:
        self.waits.append(seconds)

    def submit(self, *_: Any) -> None: ...

    def take_done(self) -> list[CopyOutcome]:
        done, self._done = self._done, []
        return done


@pytest.mark.requirement("I1d")
@pytest.mark.parametrize("cancelled", [True, False])
def test_a_load_cancelled_between_its_copy_and_its_report_does_not_succeed(cancelled: bool) -> None:
    """The copy ends, the weights change, the next step reports: the bytes are of the old weights."""
    load = LoadOp(7, "r", time.monotonic() + 60, 1, b"", ())
    rank: Any = WorkerSide(0, IdleAttachment(), None, RankLayers((), ()))
    rank._running = DoneCopies(CopyOutcome(load, frozenset()))
    rank.start_loads(StepMeta(cancelled_loads=[7] if cancelled else []))
    results = rank.results()
    assert results.finished_recving == {"r"}
    assert results.failed_recving == ({"r"} if cancelled else set())
    assert rank.take_meta().loads == {7: (1, int(cancelled))}


@pytest.mark.requirement("I2")
@pytest.mark.parametrize(("idle", "loads"), [(True, True), (True, False), (False, True)])
def test_only_a_step_that_computes_nothing_waits_for_the_loads_that_begin_in_it(idle: bool, loads: bool) -> None:
    rank: Any = WorkerSide(0, IdleAttachment(), None, RankLayers((), ()))
    rank._running = copies = DoneCopies()
    rank.start_loads(StepMeta(idle=idle, loads=[object()] if loads else []))  # type: ignore[list-item]
    rank.results()
    assert copies.waits == ([LOADS_WAIT_SECONDS] if idle and loads else [])
    assert LOADS_WAIT_SECONDS <= 0.002, "about a turn of an engine without work"


def test_two_connectors_in_one_engine_both_hear_of_a_reuse() -> None:
    """vLLM keeps one callback a block, and a second connector of the same engine would replace the first one's."""
    pool = BlockPool(5, enable_caching=True, hash_block_size=16)
    first, second = BlockHolds.of(pool), BlockHolds.of(pool)
    block = pool.get_new_blocks(1)
    held = [holds.hold((block[0].block_id,)) for holds in (first, second)]
    pool.free_blocks(block)
    pool.get_new_blocks(4)
    assert [hold.alive for hold in held] == [False, False]
    assert BlockHolds.of(BlockPool(5, enable_caching=True, hash_block_size=16)) is not first


@pytest.mark.requirement("I3")
def test_another_connectors_handshake_turns_kvdepot_off_and_raises_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Under MultiConnector the ranks answer with the first child's metadata, whoever that is."""
    connector = KVDepotConnector.__new__(KVDepotConnector)
    connector.sides = sides = SchedulerSides.__new__(SchedulerSides)
    sides.current = None
    sides._world_size = 1
    with caplog.at_level(logging.ERROR, logger="vllm.kvdepot"):
        connector.set_xfer_handshake_metadata_pp_aware({(0, 0): SimpleNamespace(agent_name="another")})
    assert sides.current is None


@pytest.mark.requirement("I3")
def test_a_configuration_that_cannot_be_read_is_a_problem_and_no_exception() -> None:
    def build() -> Any:
        raise TypeError("a foreign object")

    session: Any = SimpleNamespace(attached=True, refusal="", registered=lambda _: False)
    namespaces = Namespaces(session, build, 1, logging.getLogger("test"), lambda: "x", lambda: 0.0)
    namespaces.update()
    assert "a foreign object" in namespaces.problem
    assert namespaces.registered_id is None
