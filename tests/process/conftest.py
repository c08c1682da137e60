"""What several of these tests stand on."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rigs.daemon_process import DaemonProcess


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    """For all tests of a module, none of which ends it or counts what others did."""
    with DaemonProcess() as running:
        yield running


@pytest.fixture
def new_daemon() -> Iterator[DaemonProcess]:
    """For one test, which may end it."""
    with DaemonProcess() as running:
        yield running


@pytest.fixture
def directory() -> Iterator[Path]:
    """Of a tier. Removed with the test, unlike pytest's own: tiers are large."""
    path = Path(tempfile.mkdtemp(prefix="kvddisk", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)
