"""The model of engines on real daemons."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.scripted_engine import model_folder


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"))
