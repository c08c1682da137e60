"""Syntax trees of Python files, each parsed once in a process."""

from __future__ import annotations

import ast
import gc
from functools import cache
from pathlib import Path


@cache
def parsed(path: Path) -> ast.Module:
    """Nothing is collected meanwhile: a collection looks at all trees that were made so far."""
    gc.disable()
    try:
        return ast.parse(path.read_text())
    finally:
        gc.enable()
