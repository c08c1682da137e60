"""The what-if curves of tiers as lines for a terminal: a table whose last column is the plot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvdepot.core.bars import bar
from kvdepot.core.printable import printable
from kvdepot.core.units import duration_text, percent_text, size_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvdepot.core.bars import Glyphs
    from kvdepot.core.report import CapacityFactor, DaemonStatus, WhatIfStatus

_COLUMNS_MAX: Final = 120
_FIGURES: Final = 38
"""Columns in front of the plot."""
NOT_FULL: Final = "*"


def curve_lines(status: DaemonStatus, columns: int, glyphs: Glyphs) -> Iterator[str]:
    """Yield a table for each tier that has a curve, in at most `columns` columns, 80 or more."""
    tiers = [(tier.name, tier.what_if) for tier in status.tiers if tier.what_if is not None]
    above = ""
    for number, (name, found) in enumerate(tiers):
        if number:
            yield ""
        yield from _tier_lines(printable(name), above, found, min(columns, _COLUMNS_MAX), glyphs)
        above = f", with {printable(tiers[0][0])} as it is"
    if any(one.hit_ratio is not None and not one.full for _, found in tiers for one in found.points):
        yield f"{NOT_FULL} is not full yet: more requests may show a higher rate"
    if not tiers:
        yield "this kvdepotd gives no curves: upgrade it"


def _tier_lines(name: str, above: str, found: WhatIfStatus, columns: int, glyphs: Glyphs) -> Iterator[str]:
    span = f"{found.requests} requests in {duration_text(found.window_seconds)}"
    measured = found.measured_hit_ratio
    told = "" if measured is None else f"; measured, all tiers: {percent_text(measured)}"
    yield f"{name}{above}: {span}{told}"
    yield f"{'FACTOR':>8}{'CAPACITY':>13}{'HIT RATE':>13}"
    for one in found.points:
        figures = f"{_factor(one.factor):>8}{size_text(one.capacity_bytes):>13}"
        if one.hit_ratio is None:
            yield f"{figures}   not enough sampled requests yet ({one.sampled_requests} of {found.requests_min})"
        else:
            rate = f"{percent_text(one.hit_ratio, 1)}{' ' if one.full else NOT_FULL}"
            yield f"{figures}{rate:>14}  {bar(one.hit_ratio, columns - _FIGURES, glyphs)}"
    if found.upper_bound and any(one.hit_ratio is not None for one in found.points):
        yield "at most: this disk gets a part of it, and the table assumes everything"


def _factor(factor: float) -> str:
    return f"{factor:g}x"


def known(status: DaemonStatus) -> bool:
    """Return whether some tier has a hit ratio at its capacity."""
    return any(_at_one(one) for tier in status.tiers if tier.what_if is not None for one in tier.what_if.points)


def _at_one(one: CapacityFactor) -> bool:
    return one.factor == 1.0 and one.hit_ratio is not None
