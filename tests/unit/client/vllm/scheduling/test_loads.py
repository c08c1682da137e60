"""A load that was given up before the daemon's answer: its lease must not wait for the engine's next step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from kvdepot.client.endpoint import Endpoint
from kvdepot.client.vllm.base.metadata import StepMeta
from kvdepot.client.vllm.base.settings import Settings
from kvdepot.client.vllm.scheduling.events import KvEvents
from kvdepot.client.vllm.scheduling.loads import Loads
from kvdepot.client.vllm.scheduling.local_reuse import LocalReuse
from kvdepot.client.vllm.scheduling.requests import RequestState
from kvdepot.client.vllm.scheduling.speculative import SpeculativeAcquires
from kvdepot.core.calls import AcquireOutcome, AcquireReply, Kind
from kvdepot.core.planner import GroupSpec, Planner

CHUNK = 256
LEASE = 77


class SlowSession:
    """Takes calls and answers when the test says so."""

    def __init__(self) -> None:
        self.answers: list[Callable[[Any], None]] = []
        self.released: list[int] = []

    def new_lease_id(self) -> int:
        return LEASE

    def submit(self, call: Any, timeout_seconds: float, done: Callable[[Any], None]) -> None:
        self.answers.append(done)

    def release(self, lease_ids: list[int], *, used: bool) -> None:
        assert not used
        self.released += lease_ids


@pytest.fixture
def session() -> SlowSession:
    return SlowSession()


def started(session: SlowSession) -> tuple[Loads, RequestState]:
    planner = Planner([GroupSpec(Kind.ATTENTION, 32, rank_block_bytes=(4096,))], CHUNK)
    namespaces: Any = SimpleNamespace(registered_id=b"n" * 16, epoch_number=0)
    stub: Any = session
    settings, counters = Settings(Endpoint("/unused")), Counter[str]()
    # Hardly used: with attention alone, the local hit is all that there is.
    blocks: Any = SimpleNamespace(cached_block_hash_to_block=None)
    local_reuse = LocalReuse(blocks, planner, (0,), 16, 0, blocks)
    loads = Loads(
        stub, namespaces, planner, settings, lambda: 0.0, counters, KvEvents(planner, blocks, (0,), 16, None),
        SpeculativeAcquires(stub, planner, settings, counters, local_reuse), local_reuse, (0,), 1,
    )  # fmt: skip
    request: Any = SimpleNamespace(request_id="r", num_preemptions=0, block_hashes=[])
    state = RequestState(request, 0.0, store_epoch=0)
    state.keys.append(b"k" * 16)
    state.offered = (0, CHUNK)
    loads.allocated(state, CHUNK)
    return loads, state


@pytest.mark.requirement("I5")
def test_the_lease_of_an_aborted_load_is_released_before_the_daemon_has_answered(session: SlowSession) -> None:
    loads, state = started(session)
    loads.finished(state)
    assert loads.pending()  # vLLM must hear of it: the engine has to take one more step
    meta = StepMeta()
    loads.build(meta, None)
    assert meta.failed_loads == ["r"]
    assert session.released == [LEASE]
    assert not loads.pending()
    session.answers[0](AcquireReply(AcquireOutcome.GRANTED))
    assert session.released == [LEASE]


@pytest.mark.requirement("I5")
def test_a_refused_load_has_no_lease_to_release(session: SlowSession) -> None:
    loads, _ = started(session)
    session.answers[0](AcquireReply(AcquireOutcome.MISSING))
    meta = StepMeta()
    loads.build(meta, None)
    assert (meta.failed_loads, session.released) == (["r"], [])
