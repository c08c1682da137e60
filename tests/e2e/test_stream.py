"""An engine whose rank may not map the arena: equal tokens, by way of its proxy, whatever becomes of that."""

from __future__ import annotations

import os
import signal

import pytest
from kvdepot.client.vllm.scheduling.negative import NEGATIVE_SECONDS

from demo.engine import Engine
from demo.scenarios import await_lookups
from tests.e2e.fleet import Fleet
from tests.rigs.child_processes import children


@pytest.mark.requirement("P4", "I6")
@pytest.mark.long
def test_a_streaming_engine_gets_equal_tokens_and_another_proxy_when_one_is_killed(fleet: Fleet) -> None:
    engine = fleet.engine("streaming")
    _await_stores(fleet, engine)
    ids = fleet.prompt(2000)
    cold = fleet.ask(engine, ids)
    fleet.forget(engine)
    loaded = fleet.ask(engine, ids)
    assert loaded.tokens == cold.tokens
    assert loaded.external_tokens == loaded.served.tokens == 1792
    engine.reset_prefix_cache()
    (proxy,) = _proxies(fleet)
    os.kill(proxy, signal.SIGKILL)
    fresh = fleet.prompt(1500)
    assert fleet.ask(engine, ids).tokens == cold.tokens, "by a load or computed"
    computed = fleet.ask(engine, fresh)
    fleet.daemon.wait_attached(len(fleet.daemon.status().sessions))
    assert _proxies(fleet) != [proxy]
    _await_stores(fleet, engine)
    fleet.forget(engine)
    engine.pause(NEGATIVE_SECONDS)  # a load that failed is offered to nobody for so long
    again = fleet.ask(engine, ids)
    assert (again.tokens, again.external_tokens) == (cold.tokens, 1792)
    assert fleet.ask(engine, fresh).tokens == computed.tokens
    fleet.daemon.settle()


def _await_stores(fleet: Fleet, engine: Engine) -> None:
    """A rank without its proxy stores nothing, and on a busy machine that process starts behind the first requests."""
    await_lookups(engine, fleet.daemon, counters=("granted_write_bytes",))


def _proxies(fleet: Fleet) -> list[int]:
    return children(fleet.daemon.pid, b"stream_proxy")
