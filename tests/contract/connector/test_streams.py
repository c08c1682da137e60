"""The connector by streams, where its proxy does not do what it should: vLLM's real scheduler, a real proxy process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from kvdepot.client.transports import stream
from kvdepot.client.transports.stream import StreamArena

from tests.fakes.scripted_engine import BLOCK
from tests.rigs.connector_rig import PATIENCE_SECONDS, Make, cold, prompt, step_until
from tests.rigs.patience import Deadline


@pytest.mark.requirement("P5")
@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_a_load_from_a_proxy_that_does_not_answer_is_computed_and_never_written_late(make: Make, how: str) -> None:
    tokens = prompt(9.5)
    make().generate(tokens)
    engine = make(streams=True, settings={"load_timeout_seconds": 0.5})
    (proxy,) = engine.proxies
    proxy.suspend() if how == "stopped" else proxy.kill()
    limit = Deadline(0.5 + 1 + PATIENCE_SECONDS)
    request_id = engine.add(tokens)
    engine.run()
    assert engine.outputs[request_id] == cold(tokens)
    assert engine.failed_reports == [request_id]
    assert not limit.is_over()
    if how == "stopped":
        proxy.resume()  # what it still sends finds nobody
    engine.settle()
    engine.run()  # the forward checks the blocks
    engine.assert_clean()


@pytest.mark.requirement("I6")
def test_a_store_in_doubt_is_acknowledged_only_after_the_proxys_death_and_delays_nobody(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "STORE_SECONDS_MAX", 0.3)
    tokens = prompt(9.5)
    engine = make(streams=True)
    (proxy,) = engine.proxies
    proxy.suspend()
    first = engine.add(tokens)
    step_until(engine, "the proxy was not given up", lambda: proxy.arena.ended)
    engine.settle()
    assert engine.outputs[first] == cold(tokens), "no request waits for a store"
    assert engine.depot.lent() == 9, "nothing is given back while the proxy could write"
    assert engine.side.holds.pinned_blocks
    again = engine.add(prompt(5.5, seed=2))
    step_until(engine, "another request", lambda: len(engine.outputs[again]) == 4)
    assert engine.depot.lent() >= 9
    proxy.kill()
    engine.run()
    engine.settle()
    engine.assert_clean()
    assert engine.side.counters["stored_objects"] == 0


@pytest.mark.requirement("P5")
def test_a_store_that_hangs_delays_no_load(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = prompt(9.5)
    make().generate(tokens)
    engine = make(streams=True)
    (proxy,) = engine.proxies
    begun = threading.Event()

    def never(arena: StreamArena, *_: object) -> Iterator[object]:
        """Messages of a store of which the first one never comes."""
        begun.set()
        while not arena.ended:
            time.sleep(0.01)
        yield from ()

    monkeypatch.setattr(StreamArena, "_messages", never)
    storing = engine.add(prompt(3.5, seed=7))
    step_until(engine, "the store did not begin", begun.is_set)
    loading = engine.add(tokens)
    step_until(engine, "the load waits for the store", lambda: engine.loaded_reports)
    assert engine.loaded_reports == [loading]
    assert not proxy.arena.ended
    proxy.kill()
    engine.run()
    engine.settle()
    assert engine.hits[loading] == 9 * BLOCK
    assert engine.outputs[loading] == cold(tokens)
    assert engine.outputs[storing] == cold(prompt(3.5, seed=7))
    engine.assert_clean()
