"""The screen of `top`, as a function of what it shows: 80x24 columns and rows hold all of it, more hold more."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvdepot.client.ctl.explaining import table_lines
from kvdepot.client.ctl.live.drawing import cell
from kvdepot.client.ctl.live.traffic import traffic
from kvdepot.client.ctl.overview import filled, short_letters, state_of, verdict_lines
from kvdepot.client.ctl.rates import Rates
from kvdepot.core.bars import bar
from kvdepot.core.explanation import MEANING, answer
from kvdepot.core.misses import miss_reason
from kvdepot.core.printable import printable
from kvdepot.core.records import Outcome
from kvdepot.core.units import count_text, duration_text, size_text
from rich.cells import cell_len
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvdepot.client.ctl.live.history import Figures
    from kvdepot.core.bars import Glyphs
    from kvdepot.core.records import RequestRecord
    from kvdepot.core.report import SessionStatus, TierStatus

_COLUMNS_MIN: Final = 80
"""A narrower screen is cut at the right."""
COLUMNS_MAX: Final = 200
"""A wider screen is not filled."""
_WIDE, _WIDEST = 120, 160
_LABEL: Final = 14
_TIER_NAME: Final = 33
_TALL: Final = 30
_OUTCOME: Final = max(map(len, Outcome)) + 2
_GAP: Final = 3
"""Columns between two lists side by side."""
KEYS: Final = "q quit   p pause   + - interval   m misses   r requests   ? help"
HELP: Final = """
q       quit
p       pause, and continue
+ -     ask the daemon less often, or more often
m       count misses since the daemon started, or of the last minutes
r       show only requests that missed, or all
?       this help; any key ends it

NOW     is between the last two answers of the daemon. A sparkline has a column
        for each two answers, and the peak has the highest level.
IN      is since top started, or the last five minutes.
FROM    is what supplied tokens that engines did not compute.
LOADED  are bytes of RAM that the daemon lent to engines for loads; STORED are
        those for stores.
LOAD TIME is of loads that supplied tokens, as engines report them at the end
        of requests. Percentiles are interpolated in a histogram.
LENT    are objects that an engine reads or writes now.

kvdepotctl explain ID says more of a request, kvdepotctl health of a problem.
""".strip("\n")


@dataclass(frozen=True, slots=True)
class View:
    """What the operator has chosen to see, and what a screen says of `top` itself."""

    interval_seconds: float
    paused: bool = False
    all_time: bool = False  # misses since the daemon started
    only_misses: bool = False
    helping: bool = False
    keys: bool = True  # somebody can press them
    no_answer: str = ""  # since when there is none, and why


def frame(figures: Figures, view: View, columns: int, rows: int, glyphs: Glyphs) -> list[Text]:
    """Return at most `rows` lines of at most `columns` columns, the earliest first."""
    laid_out = min(max(columns, _COLUMNS_MIN), COLUMNS_MAX)
    foot = [_footer(view, laid_out, glyphs)] if view.keys else []
    body = _body(figures, view, laid_out, rows - len(foot), glyphs)[: rows - len(foot)]
    if foot:
        body += [Text()] * (rows - len(foot) - len(body))
    lines = [*body, *foot]
    for line in lines:
        line.truncate(columns)
    return lines


def _body(figures: Figures, view: View, columns: int, rows: int, glyphs: Glyphs) -> list[Text]:
    status = figures.look.status
    head, *problems = _head(figures, view, columns)
    if view.helping:
        return [head, Text(), *map(Text, HELP.splitlines())]
    flow = traffic(figures, columns, glyphs, tall=rows >= _TALL, wide=columns >= _WIDE)
    misses = _misses(figures, view)
    records = [one for one in figures.look.records if not view.only_misses or one.outcome is Outcome.MISS]
    beside = max(len(misses), len(status.sessions), 1)
    wanted = [len(problems), len(status.tiers), beside, max(len(records), 1)]
    some, tiers, pair, requests = _shares(rows - 1 - len(flow) - 3, wanted)
    if some < len(problems):
        _, *problems = _head(figures, view, columns, some)
    lines = [head, *problems, *(_headed(flow, glyphs))]
    lines += _headed([*_tiers(figures, columns, tiers, glyphs)], glyphs)
    left = (columns - _GAP) // 2
    reasons = _headed([*_reasons(figures, view, misses, left, pair, glyphs)], glyphs)
    engines = _headed([*_engines(status.sessions, columns - _GAP - left, pair, glyphs)], glyphs)
    for number in range(pair + 1):
        line = reasons[number].copy() if number < len(reasons) else Text()
        line.pad_right(left + _GAP - line.cell_len)
        lines.append(line.append_text(engines[number]) if number < len(engines) else line)
    lines += _headed([*_requests(records[:requests], view, columns, glyphs)], glyphs)
    return [Text(line.plain, "dim") if view.no_answer and line is not head else line for line in lines]


def _head(figures: Figures, view: View, columns: int, problem_lines: int | None = None) -> list[Text]:
    """Return the verdict and its problems, or that there is no answer."""
    if view.no_answer:
        return [Text(f"no answer {view.no_answer}; trying again. The figures are old", "red")]
    limit = None if problem_lines is None else max(problem_lines - 1, 0)  # one more says how many are left out
    lines = [Text.from_markup(line) for line in verdict_lines(figures.look.status, columns, limit)]
    return lines if problem_lines is None else lines[: problem_lines + 1]


def _shares(rows: int, wanted: Sequence[int]) -> list[int]:
    """Divide rows among lists: to each in turn one, as long as it wants more."""
    given = [0] * len(wanted)
    while rows > 0 and given != list(wanted):
        for number, want in enumerate(wanted):
            if rows > 0 and given[number] < want:
                given[number] += 1
                rows -= 1
    return given


def _headed(lines: list[Text], glyphs: Glyphs) -> list[Text]:
    """Fill the gaps of the first line, which names the columns, with a line."""
    head = re.sub(r" {4,}", lambda gap: f" {glyphs.line * (len(gap[0]) - 2)} ", f"{lines[0].plain}    ")
    width = lines[0].cell_len
    first = Text(head[:width], "bold")
    first.highlight_regex(rf"{re.escape(glyphs.line)}+", "not bold dim")
    return [first, *lines[1:]]


def _tiers(figures: Figures, columns: int, rows: int, glyphs: Glyphs) -> Iterator[Text]:
    tiers = figures.look.status.tiers
    label, cells = _LABEL, 18
    if columns >= _WIDEST:
        label = min(max(_LABEL, *(cell_len(printable(tier.name)) + 1 for tier in tiers), 0), _TIER_NAME)
        cells = _LABEL + 40 - label
    after = f"{'READ/S':>12}{'WRITTEN/S':>13}{'EVICTED/S':>11}{'OBJECTS':>9}" if columns >= _WIDE else ""
    head = f"{'TIERS':<{label}}{'':<{cells + 8}}{'USED':<26}STATE"
    yield Text(f"{head:<{columns - len(after)}}{after}")
    shown = tiers if len(tiers) <= rows else tiers[: max(rows - 1, 0)]
    for tier in shown:
        line = Text(cell(printable(tier.name), label - 1, glyphs) + " ")
        used = f"{size_text(tier.used_bytes)} of {size_text(tier.capacity_bytes)}"
        line.append(f"{bar(filled(tier), cells, glyphs)}{100 * filled(tier):4.0f} %  {used:<26}")
        moved = _moved(tier, figures) if after else ""
        state, style = state_of(tier)
        reason = f": {tier.reason}" if tier.reason and columns >= _WIDEST else ""
        line.append(cell(printable(state + reason), columns - len(moved) - line.cell_len, glyphs), style)
        yield line.append(moved)
    if rows and len(shown) < len(tiers):
        yield Text(f"and {len(tiers) - len(shown)} more: kvdepotctl status --wide")


def _moved(tier: TierStatus, figures: Figures) -> str:
    moved = (figures.now or Rates(0.0, {})).moved(tier)
    read, written = size_text(moved["read_bytes"]), size_text(moved["written_bytes"])
    return f"{read:>12}{written:>13}{moved['evicted_objects']:>11.1f}{count_text(tier.objects):>9}"


def _misses(figures: Figures, view: View) -> dict[str, float]:
    """Return the lookups that missed by reason, the most frequent first."""
    rates = Rates.since_start(figures.look.status) if view.all_time else figures.recent
    return rates.grown_by_label("misses.")


def _reasons(
    figures: Figures, view: View, misses: dict[str, float], columns: int, rows: int, glyphs: Glyphs
) -> Iterator[Text]:
    since = "SINCE THE START" if view.all_time else f"IN {duration_text(figures.recent.seconds)}"
    wide = columns >= _WIDEST // 2
    cells = 17 if wide else columns - 16 - 8
    yield Text(f"{f'MISSES {since}':<{columns}}")
    if not misses:
        yield Text("none")
        return
    shown = list(misses.items()) if len(misses) <= rows else list(misses.items())[: max(rows - 1, 0)]
    most = max(misses.values())
    for reason, count in shown:
        meaning = f"  {MEANING[miss_reason(reason)]}" if wide else ""
        line = f"{cell(printable(reason), 16, glyphs)}{bar(count / most, cells, glyphs)}{count_text(count):>8}"
        yield Text(cell(line + meaning, columns, glyphs))
    if rows and len(shown) < len(misses):
        yield Text(f"and {len(misses) - len(shown)} more reasons")


def _engines(sessions: Sequence[SessionStatus], columns: int, rows: int, glyphs: Glyphs) -> Iterator[Text]:
    after = f"{'RANKS':>8}{'LEASES':>8}{'LENT':>9}"
    wide = columns >= _WIDE // 2 - _GAP
    after += f"{'CREDIT USED':>16}" if wide else ""
    letters = max(short_letters([one.engine_id for one in sessions]), len("ENGINES")) if sessions else len("ENGINES")
    room = min(letters, columns - len(after))
    yield Text(f"{'ENGINES':<{room}}{after}".ljust(columns))
    if not sessions:
        yield Text("none is attached")
        return
    shown = sessions if len(sessions) <= rows else sessions[: max(rows - 1, 0)]
    for one in shown:
        short = printable(one.engine_id[:letters])
        # Long ids of engines that differ at the end.
        line = Text(cell(short if cell_len(short) <= room else glyphs.cut + short[1 - room :], room, glyphs))
        ranks = f"{one.ranks_attached}/{one.world_size}"
        line.append(f"{ranks:>8}", "yellow" if one.ranks_attached < one.world_size else "default")
        line.append(f"{one.leases:>8}{count_text(one.lent_objects):>9}")
        line.append(f"{size_text(one.credit_used_bytes):>16}" if wide else "")
        yield line
    if rows and len(shown) < len(sessions):
        yield Text(f"and {len(sessions) - len(shown)} more: kvdepotctl status --wide")


def _requests(records: Sequence[RequestRecord], view: View, columns: int, glyphs: Glyphs) -> Iterator[Text]:
    """Yield the table of `kvdepotctl requests`, with what became of each request; where there is room, in words."""
    title = "MISSES" if view.only_misses else "REQUESTS"
    if not records:
        yield Text(f"{title:<{columns}}")
        yield Text("none of the latest requests has missed" if view.only_misses else "none is remembered")
        return
    words = columns >= _WIDEST
    room = columns - _OUTCOME if not words else _WIDE - 10 - _OUTCOME
    head, *lines = table_lines(records, room)
    width = max(map(len, (head, *lines)))
    yield Text(f"{title:<{_OUTCOME}}{head:<{width}}{'  WHAT HAPPENED' if words else ''}".ljust(columns))
    for record, line in zip(records, lines, strict=True):
        text = Text(f"{record.outcome:<{_OUTCOME}}", _OUTCOME_STYLES.get(record.outcome, "default"))
        text.append(printable(line), "default not bold")
        if words:
            text.pad_right(_OUTCOME + width + 2 - text.cell_len)
            text.append(cell(printable(answer(record)), columns - text.cell_len, glyphs), "default not bold")
        yield text


_OUTCOME_STYLES: Final = {Outcome.HIT: "bold", Outcome.RUNNING: "dim"}


def _footer(view: View, columns: int, glyphs: Glyphs) -> Text:
    asks = "paused" if view.paused else f"every {view.interval_seconds:g} s"
    gap = " " * max(columns - len(KEYS) - len(asks), 2)
    line = Text(cell(KEYS + gap + asks, columns, glyphs), "reverse")
    line.highlight_regex(r"(?:^|(?<=   ))(\S|\+ -)(?= )", "bold")
    return line
