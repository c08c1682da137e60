"""What an object holds. By itself: I/O workers need it of all that `kvdepot.core.calls` has, and start often."""

from __future__ import annotations

from enum import IntEnum


class Kind(IntEnum):
    """What an object holds (DESIGN 2)."""

    ATTENTION = 1
    WINDOW = 2
    STATE = 3
