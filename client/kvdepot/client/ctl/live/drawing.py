"""Sparklines and cells of a screen, of block characters or of ASCII."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.cells import cell_len, set_cell_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvdepot.core.bars import Glyphs


def sparkline(values: Sequence[float | None], columns: int, highest: float, glyphs: Glyphs) -> str:
    """Return the latest values, the last one at the right. `highest` has the highest level; None is a gap."""
    return "".join(_level(value, highest, glyphs) for value in values[max(len(values) - columns, 0) :]).rjust(columns)


def _level(value: float | None, highest: float, glyphs: Glyphs) -> str:
    if value is None:
        return " "
    if value <= 0 or highest <= 0:
        return glyphs.levels[0]
    above = len(glyphs.levels) - 1
    return glyphs.levels[1 + min(int(above * value / highest), above - 1)]


def cell(text: str, columns: int, glyphs: Glyphs, *, right: bool = False) -> str:
    """Return the text in so many columns. What does not fit is cut, with a mark."""
    missing = columns - cell_len(text)
    if missing < 0:
        return set_cell_size(text, columns - 1) + glyphs.cut if columns > 0 else ""
    return " " * missing + text if right else text + " " * missing
