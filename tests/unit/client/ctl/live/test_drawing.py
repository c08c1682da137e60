"""Sparklines, bars and cells."""

from __future__ import annotations

import pytest
from kvdepot.client.ctl.live.drawing import cell, sparkline
from kvdepot.core.bars import ASCII, BLOCKS, Glyphs, bar
from rich.cells import cell_len


@pytest.mark.parametrize(
    ("values", "columns", "shown"),
    [
        ((), 3, "   "),
        ((0.0, 1.0, 50.0, 100.0), 4, "▁▂▅▇"),
        ((0.0, 1.0, 50.0, 100.0), 2, "▅▇"),
        ((100.0,), 3, "  ▇"),
        ((None, 0.0, None), 3, " ▁ "),
        ((300.0, -1.0), 2, "▇▁"),
        ((1.0,), 0, ""),
    ],
)
def test_a_sparkline_ends_with_the_latest_value(values: tuple[float | None, ...], columns: int, shown: str) -> None:
    assert sparkline(values, columns, 100.0, BLOCKS) == shown


def test_a_sparkline_of_nothing_is_flat() -> None:
    assert sparkline([0.0, 0.0], 2, 0.0, ASCII) == "__"


@pytest.mark.parametrize(("share", "shown"), [(0.0, "...."), (0.01, "#..."), (0.5, "##.."), (1.0, "####"), (7, "####")])
def test_a_bar_is_filled_to_the_share(share: float, shown: str) -> None:
    assert bar(share, 4, ASCII) == shown


@pytest.mark.parametrize("glyphs", [BLOCKS, ASCII])
@pytest.mark.parametrize("text", ["", "abc", "abcdef", "a long text", "漢字漢字漢字", "a漢字漢字"])
@pytest.mark.parametrize("columns", [0, 1, 2, 6, 7])
def test_a_cell_has_its_columns_whatever_the_text(text: str, columns: int, glyphs: Glyphs) -> None:
    for right in (False, True):
        shown = cell(text, columns, glyphs, right=right)
        assert cell_len(shown) == columns
        assert text in shown or shown.endswith(glyphs.cut) or not columns
