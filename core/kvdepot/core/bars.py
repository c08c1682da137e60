"""Bars of block characters or of ASCII, for the plots of terminals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Glyphs:
    """The characters of a screen. `levels`: of a sparkline, the first one is for 0."""

    levels: str
    full: str
    empty: str
    line: str
    cut: str


BLOCKS: Final = Glyphs("▁▂▃▄▅▆▇", "█", "░", "─", "…")
"""Levels without the full block, so that sparklines in two lines do not touch."""
ASCII: Final = Glyphs("_.-=+*#", "#", ".", "-", "~")


def glyphs_for(encoding: str | None) -> Glyphs:
    """Return the characters that a stream of this encoding can show."""
    try:
        BLOCKS.full.encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return ASCII
    return BLOCKS


def bar(share: float, columns: int, glyphs: Glyphs) -> str:
    """Return a bar that is filled to a share of 0 to 1. Any share above 0 fills a cell."""
    filled = max(round(columns * min(share, 1.0)), int(share > 0))
    return glyphs.full * filled + glyphs.empty * (columns - filled)
