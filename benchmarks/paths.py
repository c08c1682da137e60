"""Where the sources are, for a machine on which nothing is installed."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_PACKAGES = ("client", "core", "proto", "server")


def add_sources() -> None:
    """Make kvdepot importable from the sources, unless it is installed."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    if not _installed():
        sys.path[1:1] = [str(ROOT / package) for package in _PACKAGES]


def _installed() -> bool:
    """Return whether the code can be imported. An editable installation has a folder `kvdepot` of files alone."""
    try:
        return find_spec("kvdepot.core") is not None
    except ModuleNotFoundError:
        return False


def environment() -> dict[str, str]:
    """The environment of a child process that imports what this one does."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "PYTHONUNBUFFERED": "1"}
