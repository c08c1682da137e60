"""What tests of objects and of a shared tier's files share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rigs.io_rig import IoRig
from tests.rigs.shared_files import Files


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Files]:
    files = Files(tmp_path)
    yield files
    files.context.close()
    files.close()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[IoRig]:
    rig = IoRig(tmp_path)
    yield rig
    rig.close()
