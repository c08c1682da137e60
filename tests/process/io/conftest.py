"""What tests of I/O workers share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rigs.io_rig import IoRig


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[IoRig]:
    rig = IoRig(tmp_path)
    yield rig
    rig.close()
