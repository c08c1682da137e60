"""The kinds of objects.

This is a module of its own, because I/O workers need nothing else of `kvdepot.core.calls`, and start often.
"""

from __future__ import annotations

from enum import IntEnum


class Kind(IntEnum):
    """What an object holds (design.md#words)."""

    ATTENTION = 1
    WINDOW = 2
    STATE = 3
