"""Engines and the daemon of the end-to-end tests: started once, started again only when a test has ended them."""

from __future__ import annotations

import ctypes.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from demo.engine import ROOT
from demo.toys import DENSE, GEMMA3, GEMMA4, GPT_OSS, HYBRID, MISTRAL
from tests.e2e import speculation
from tests.e2e.fleet import Fleet

E2E_TIMEOUT_SECONDS = 300
FIRST = ("test_soak.py", "test_tensor_parallel.py")
"""Modules that take longest: where two run at once, neither waits for such a one at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # In CI a missing library fails the engine's start; elsewhere it is no fault of the code.
    missing = "CI" not in os.environ and ctypes.util.find_library("numa") is None
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.e2e)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(E2E_TIMEOUT_SECONDS))
            if missing:
                item.add_marker(pytest.mark.skip(reason="vLLM's CPU build needs libnuma1: make system-deps"))
    items.sort(key=lambda item: item.path.name not in FIRST)


@pytest.fixture(scope="session")
def fleet(shared_fleet: Fleet) -> Fleet:
    """Modules that need another daemon have one of their own by this name."""
    return shared_fleet


@pytest.fixture(scope="session")
def shared_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with Fleet(tmp_path_factory.mktemp("e2e"), ROOT / "build" / "toys") as fleet:
        fleet.define("dense", DENSE, {"block_size": 32, "max_num_seqs": 20}, load_timeout_seconds=3.0)
        # Around a router, as vLLM's roles have it: the one that computes prompts for others loads nothing.
        fleet.define("dense_producer", DENSE, {"block_size": 32}, role="kv_producer", load_weight=0)
        fleet.define("dense_consumer", DENSE, {"block_size": 32}, role="kv_consumer")
        fleet.define("streaming", DENSE, {"block_size": 32}, transport="stream")
        fleet.define("hybrid", HYBRID, {})
        # A checkpoint at each chunk, of prompts and of generated tokens; what is in one is the same.
        every_chunk = {"prefix_cache_retention_interval": 384, "max_num_batched_tokens": 384}
        fleet.define("hybrid_dense_checkpoints", HYBRID, every_chunk)
        # Its own cache can resume within a chunk.
        fleet.define("hybrid_fine", HYBRID, {"prefix_match_unit": 96})
        fleet.define("not_aligned", HYBRID, {"enable_prefix_caching": False, "mamba_cache_mode": "none"})
        fleet.define("gemma3", GEMMA3, {"block_size": 32})
        fleet.define("gemma4", GEMMA4, {"block_size": 32})
        # Short steps: windows move on while a prompt is computed.
        fleet.define("gpt_oss", GPT_OSS, {"block_size": 32, "max_num_batched_tokens": 512})
        fleet.define("mistral", MISTRAL, {"block_size": 32})
        # It keeps one adapter: another one evicts it, and its files are read again.
        one_adapter = {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 1, "max_lora_rank": 8}
        fleet.define("dense_adapters", DENSE, {"block_size": 32, **one_adapter})
        speculation.define(fleet)
        yield fleet


@pytest.fixture(scope="module", autouse=True)
def engines_of_this_module(request: pytest.FixtureRequest) -> None:
    """Its `ENGINES` start side by side, and no others go on: eight at once are too much memory."""
    engines: tuple[str, ...] = getattr(request.node.obj, "ENGINES", ())
    fleet: Fleet = request.getfixturevalue("shared_fleet")
    for name in fleet.names_running.difference(engines):
        fleet.end(name, kill=True)
    if engines:
        fleet.ensure_daemon()
        fleet.launch(engines)
