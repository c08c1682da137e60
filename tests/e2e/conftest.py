"""Engines and the daemon of the end-to-end tests: started once, started again only when a test has ended them."""

from __future__ import annotations

import ctypes.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from demo.engine import ROOT
from demo.toys import DENSE, HYBRID
from tests.e2e.fleet import Fleet

E2E_TIMEOUT_SECONDS = 300


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # In CI a missing library fails the engine's start; elsewhere it is no fault of the code.
    missing = "CI" not in os.environ and ctypes.util.find_library("numa") is None
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.e2e)
            item.add_marker(pytest.mark.timeout(E2E_TIMEOUT_SECONDS))
            if missing:
                item.add_marker(pytest.mark.skip(reason="vLLM's CPU build needs libnuma1: make system-deps"))


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with Fleet(tmp_path_factory.mktemp("e2e"), ROOT / "build" / "toys") as fleet:
        fleet.define("dense", DENSE, {"block_size": 32, "max_num_seqs": 20}, load_timeout_seconds=3.0)
        fleet.define("hybrid", HYBRID, {})
        # Checkpoints at each chunk that a generated token completes; what is in one is the same.
        fleet.define("hybrid_dense_checkpoints", HYBRID, {"prefix_cache_retention_interval": 384})
        yield fleet
