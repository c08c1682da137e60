"""What several of these tests stand on."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def directory() -> Iterator[Path]:
    """Of a tier. Removed with the test, unlike pytest's own: tiers are large."""
    path = Path(tempfile.mkdtemp(prefix="kvddisk", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)
