"""What tests of a shared tier's files share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rigs.shared_files import Files


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Files]:
    files = Files(tmp_path)
    yield files
    files.context.close()
    files.close()
