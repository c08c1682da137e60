"""What `status` and `health` print first: the verdict, its problems, and the daemon on a screen of 80x24."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Final

from kvdepot.client.ctl.texts import escape
from kvdepot.core.health import DISABLED
from kvdepot.core.hit_rate import HitRate
from kvdepot.core.units import duration_text, short_count_text, size_text
from kvdepot.core.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from kvdepot.core.report import DaemonStatus, SessionStatus, TierStatus
    from kvdepot.core.verdict import Problem
    from rich.console import Console

RUNBOOK: Final = "docs/operations.md#"
_STYLES: Final = {Verdict.OK: "green", Verdict.WARN: "yellow", Verdict.ERR: "red", Verdict.UNKNOWN: "default"}
_INDENT: Final = 12
"""Of the texts after their labels."""
_BAR_NARROW, _BAR_WIDE = 12, 20
_WIDE_COLUMNS: Final = 100
_PROBLEM_LINES: Final = 7
_TIERS: Final = 5
_NAMESPACES: Final = 3
_ENGINE_ID_LETTERS: Final = 8


def print_overview(status: DaemonStatus, console: Console) -> None:
    """Print the state of the daemon in at most 23 lines of 80 columns. What finds no room is counted."""
    print_verdict(status, console, lines_max=_PROBLEM_LINES)
    _print_row(console, "hit rate", str(HitRate.of(status.counters)))
    for tier in status.tiers[:_TIERS]:
        _print_tier(tier, console)
    if len(status.tiers) > _TIERS:
        _print_row(console, "", f"and {len(status.tiers) - _TIERS} more tiers: kvdepotctl status --wide")
    _print_engines(status.sessions, console)
    _print_namespaces(status, console)


def print_verdict(status: DaemonStatus, console: Console, lines_max: int | None = None) -> None:
    """Print the verdict, and its problems in at most `lines_max` lines."""
    for line in verdict_lines(status, console.width, lines_max):
        _print(console, line)


def verdict_lines(status: DaemonStatus, width: int, lines_max: int | None = None) -> Iterator[str]:
    """Yield the verdict, and its problems in at most `lines_max` lines: rich's markup, without a line break."""
    health = status.health
    count = len(health.problems)
    verdict = health.verdict.value or f"{'ready' if status.ready else 'not ready'}, no verdict from this version"
    problems = f"  {count} problem{'s' * (count != 1)}" if count else ""
    daemon = f"kvdepotd {escape(status.daemon_version)}, up {duration_text(status.uptime_seconds)}"
    gap = " " * max(width - len(verdict + problems + daemon), 2)
    yield f"[{_STYLES[health.verdict]}]{verdict}[/]{problems}{gap}{daemon}"
    left = lines_max
    for number, problem in enumerate(health.problems):
        lines = list(_problem_lines(problem, max(len(one.code) for one in health.problems), width))
        if left is not None and len(lines) > left:
            yield f"  and {count - number} more: kvdepotctl health"
            return
        left = None if left is None else left - len(lines)
        code, style = escape(problem.code), "red" if problem.error else "yellow"
        yield f"  [{style}]{code}[/]{escape(lines[0][2 + len(problem.code) :])}"
        yield from map(escape, lines[1:])


def _problem_lines(problem: Problem, code_letters: int, width: int) -> Iterator[str]:
    """Yield what is wrong and what to do, in one line if there is room."""
    first, indent = f"  {problem.code:<{code_letters}} ", " " * (code_letters + 3)
    page = RUNBOOK + problem.anchor
    remedy = f"-> {problem.fix}; {page}" if problem.fix else f"-> {page}"
    together = f"{first}{problem.message} {remedy}"
    if len(together) <= width:
        yield together
        return
    yield from _wrapped(first + problem.message, indent, width)
    yield from _wrapped(indent + remedy, indent, width)


def _print_row(console: Console, label: str, text: str) -> None:
    for line in _wrapped(f"{label:<{_INDENT}}{text}", " " * _INDENT, console.width):
        _print(console, escape(line))


def filled(tier: TierStatus) -> float:
    """Return how full a tier is: 0 to 1."""
    return min(tier.used_bytes / tier.capacity_bytes, 1.0) if tier.capacity_bytes else 0.0


def state_of(tier: TierStatus) -> tuple[str, str]:
    """Return the state of a tier in a word, and its style."""
    state = "disabled" if tier.breaker in DISABLED else tier.state
    return state, "default" if state in ("ready", "growing", "") else "yellow"


def _print_tier(tier: TierStatus, console: Console) -> None:
    used = f"{size_text(tier.used_bytes)} of {size_text(tier.capacity_bytes)}"
    cells = _BAR_WIDE if console.width >= _WIDE_COLUMNS else _BAR_NARROW
    bar = "#" * round(cells * filled(tier))
    state, style = state_of(tier)
    after = "" if state in ("ready", "") else f"   {state}"
    objects = short_count_text(tier.objects)
    label, figures = f"{tier.name:<{_INDENT - 1}} ", f"{used:<22} {bar:.<{cells}}  {objects:>7} objects"
    if len(label + figures + after) > console.width:  # a name may have 32 letters
        _print(console, escape(label))
        label = " " * _INDENT
    _print(console, f"{escape(label + figures)}[{style}]{escape(after)}[/]")


def _print_engines(sessions: Sequence[SessionStatus], console: Console) -> None:
    if not sessions:
        _print_row(console, "engines", "none is attached")
        return
    letters = short_letters([session.engine_id for session in sessions])
    texts = [f"{one.engine_id[:letters]} {one.ranks_attached}/{one.world_size} ranks" for one in sessions]
    shown = list(_fitting(texts, console.width - _INDENT))
    _print_row(console, "engines", ", ".join(shown))
    if len(shown) < len(texts):
        _print_row(console, "", f"and {len(texts) - len(shown)} more: kvdepotctl status --wide")


def _fitting(texts: Iterable[str], room: int) -> Iterator[str]:
    """Yield the texts that fit, and at least one."""
    for number, text in enumerate(texts):
        room -= len(text) + 2
        if room < 0 and number:
            return
        yield text


def short_letters(ids: Sequence[str]) -> int:
    """Return how many letters tell the ids apart, and at least as many as one remembers."""
    longest = max(map(len, ids))
    return next(
        (letters for letters in range(_ENGINE_ID_LETTERS, longest) if len({one[:letters] for one in ids}) == len(ids)),
        longest,
    )


def _print_namespaces(status: DaemonStatus, console: Console) -> None:
    if not status.namespaces:
        _print_row(console, "namespaces", "none is known")
        return
    biggest = sorted(status.namespaces, key=lambda one: -one.size_bytes)
    for number, one in enumerate(biggest[:_NAMESPACES]):
        text = f"{'' if number else 'namespaces':<{_INDENT}}{one.namespace_id.hex()[:12]} {one.label}"
        cut = text if len(text) <= console.width else text[: console.width - 3] + "..."
        _print(console, escape(cut))
    if len(biggest) > _NAMESPACES:
        _print_row(console, "", f"and {len(biggest) - _NAMESPACES} more: kvdepotctl ls")


def _wrapped(text: str, indent: str, width: int) -> list[str]:
    return textwrap.wrap(
        text, max(width, len(indent) + 20), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False,
        drop_whitespace=True, replace_whitespace=False,
    )  # fmt: skip


def _print(console: Console, line: str) -> None:
    console.print(line, soft_wrap=True, highlight=False)
