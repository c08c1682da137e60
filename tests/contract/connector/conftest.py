"""Engines on one depot, a gate in their copies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kvdepot.client.vllm.scheduling import sides
from vllm.v1.metrics.prometheus import unregister_vllm_metrics

from tests.fakes.direct_session import DirectDepot
from tests.fakes.scripted_engine import ScriptedEngine, model_folder
from tests.rigs.connector_rig import Gate, Make


@pytest.fixture
def depot() -> DirectDepot:
    return DirectDepot()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of all these engines."""
    return model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def make(depot: DirectDepot, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Starts engines on one depot, and ends them."""
    monkeypatch.setattr(sides, "cache_path", lambda: tmp_path / "digests.json")
    engines: list[ScriptedEngine] = []

    def start(kind: type[ScriptedEngine] = ScriptedEngine, **options: Any) -> ScriptedEngine:
        engines.append(kind(depot, folder, monkeypatch, **options))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


@pytest.fixture
def own_registry() -> Iterator[None]:
    """What the test's engines export ends with it."""
    yield
    unregister_vllm_metrics()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)
