"""A rank whose copies fail."""

from __future__ import annotations

from typing import Any

import pytest
from kvdepot.client.copy.base import Direction
from kvdepot.client.copy.cpu import CpuCopier


def break_copies(monkeypatch: pytest.MonkeyPatch, broken: CpuCopier, direction: Direction) -> None:
    copy = CpuCopier.copy

    def disturbed(copier: CpuCopier, arena: Any, batch: Any, way: Any) -> None:
        if copier is broken and way is direction:
            raise OSError("no such memory")
        copy(copier, arena, batch, way)

    monkeypatch.setattr(CpuCopier, "copy", disturbed)
