"""Loads whose bytes in RAM are compared with their checksums (`verify_loads`)."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from kvdepot.client.vllm.scheduling.negative import NEGATIVE_SECONDS
from kvdepot.core.arena import RowState
from kvdepot.core.calls import Kind

from tests.fakes.direct_session import DirectDepot
from tests.fakes.scripted_engine import BLOCK
from tests.rigs.connector_rig import Make, cold, count_stats, prompt


def change_a_byte(depot: DirectDepot) -> None:
    """Change an object of attention in RAM, as another process that has the arena can."""
    extents = depot.tables.extents
    heads = np.flatnonzero((extents["state"] == RowState.COMMITTED) & (extents["kind"] == Kind.ATTENTION))
    depot.buffer[int(extents["offset"][heads[0]])] ^= 1


@pytest.mark.requirement("I1")
@pytest.mark.parametrize("hybrid", [False, True], ids=["dense", "hybrid"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_bytes_that_somebody_has_changed_in_ram_are_found_before_they_are_used(
    make: Make, depot: DirectDepot, hybrid: bool, ranks: int
) -> None:
    engine = make(hybrid=hybrid, ranks=ranks, settings={"verify_loads": 1.0})
    tokens, found = prompt(5.5), count_stats(engine, "checked_loads")
    assert engine.generate(tokens) == cold(tokens)
    engine.settle()
    change_a_byte(depot)
    engine.reset()
    assert engine.generate(tokens) == cold(tokens)
    assert engine.side.counters["load_failed_checksum"] == 1
    engine.settle()
    assert depot.engine.counters.get("corrupt_objects") == 1, "the daemon has compared it itself"
    assert found["corrupt"] == ranks, "each of them has compared all of it"
    engine.side.loads._negative._clock = lambda: time.monotonic() + NEGATIVE_SECONDS
    for hit in (0, 5 * BLOCK):
        engine.reset()
        assert engine.generate(tokens) == cold(tokens)
        assert list(engine.hits.values())[-1] == hit, "it is gone, and then stored again"
        engine.settle()
    engine.assert_clean()


@pytest.mark.requirement("I1")
def test_without_it_they_are_used(make: Make, depot: DirectDepot) -> None:
    """The negative control: the scripted engine notices the byte."""
    engine = make()
    tokens = prompt(5.5)
    engine.generate(tokens)
    engine.settle()
    change_a_byte(depot)
    engine.reset()
    with pytest.raises(AssertionError, match="reads wrong bytes"):
        engine.generate(tokens)


def test_loads_of_objects_without_a_checksum_and_by_streams_are_not_counted(make: Make, depot: DirectDepot) -> None:
    tokens = prompt(5.5)
    cases: list[dict[str, Any]] = [{}, {"streams": True}]
    for options in cases:
        engine = make(settings={"verify_loads": 1.0}, **options)
        found = count_stats(engine, "checked_loads")
        engine.generate(tokens)
        engine.settle()
        if not options:
            depot.tables.extents["flags"][:] = 0
        engine.reset()
        assert engine.generate(tokens) == cold(tokens)
        assert not found


def test_a_share_of_the_loads_is_compared(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = iter([0.3, 0.29, 0.9])
    monkeypatch.setattr("kvdepot.client.vllm.worker.copy_thread.random.random", lambda: next(drawn))
    engine = make(settings={"verify_loads": 0.3})
    tokens, found = prompt(5.5), count_stats(engine, "checked_loads")
    for _ in range(4):
        assert engine.generate(tokens) == cold(tokens)
        engine.settle()
        engine.reset()
    assert found == {"intact": 1}
