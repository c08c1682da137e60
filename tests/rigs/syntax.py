"""Syntax trees of Python files, each parsed once in a process."""

from __future__ import annotations

import ast
import gc
from functools import cache
from pathlib import Path


@cache
def parsed(path: Path) -> ast.Module:
    """It stays until the process ends, so no collection of garbage has to look at it: that took most of the time."""
    gc.disable()
    try:
        return ast.parse(path.read_text())
    finally:
        gc.freeze()
        gc.enable()
