"""`top` on a terminal: keys change the view, the daemon's answers the figures."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from kvdepot.client.ctl.live.frame import View, frame
from kvdepot.client.ctl.live.history import History, Look
from kvdepot.client.ctl.live.polling import Poller, look
from kvdepot.client.ctl.live.terminal import Terminal, glyphs_of
from kvdepot.core.units import duration_text

if TYPE_CHECKING:
    import signal

    from kvdepot.client.ctl.calls import Operator
    from kvdepot.client.ctl.live.history import Figures
    from kvdepot.client.ctl.live.polling import NoAnswer
    from rich.console import Console

INTERVALS: Final = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
"""Seconds, of the keys + and -."""
PRINTED_ROWS: Final = 40
_QUIT: Final = frozenset("qQ")


def watch(operator: Operator, console: Console, interval_seconds: float, count: int | None) -> signal.Signals | None:
    """Show the daemon until somebody quits, or until there were `count` intervals. Return the signal that ended it.

    Raise grpc.RpcError if the daemon does not answer the first time.
    """
    history = History(look(operator))
    view, done, glyphs = View(interval_seconds), 0, glyphs_of(console)
    with Terminal(console) as terminal, Poller(operator, interval_seconds, terminal.wake) as poller:
        view = replace(view, keys=terminal.keys)
        while count is None or done < count:
            columns, rows = console.size
            terminal.draw(frame(history.figures(), view, columns, rows, glyphs))
            given = terminal.wait()
            if given.ended_by is not None:
                return given.ended_by
            for key in given.keys:
                if key in _QUIT and not view.helping:
                    return None
                view = pressed(view, key)
            poller.set(view.interval_seconds, paused=view.paused)
            for answer in poller.answers():
                if isinstance(answer, Look):
                    history.add(answer)
                    done += 1
                view = replace(view, no_answer="" if isinstance(answer, Look) else _silence(answer))
    return None


def _silence(answer: NoAnswer) -> str:
    return f"for {duration_text(time.monotonic() - answer.since)} ({answer.code})"


def pressed(view: View, key: str) -> View:
    """Return the view after a key."""
    if view.helping:
        return replace(view, helping=False)
    match key:
        case "p" | "P":
            return replace(view, paused=not view.paused)
        case "m" | "M":
            return replace(view, all_time=not view.all_time)
        case "r" | "R":
            return replace(view, only_misses=not view.only_misses)
        case "?" | "h":
            return replace(view, helping=True)
        case "+" | "=":
            longer = [seconds for seconds in INTERVALS if seconds > view.interval_seconds]
            return replace(view, interval_seconds=min(longer, default=view.interval_seconds))
        case "-" | "_":
            shorter = [seconds for seconds in INTERVALS if seconds < view.interval_seconds]
            return replace(view, interval_seconds=max(shorter, default=view.interval_seconds))
    return view


def print_frame(figures: Figures, console: Console, interval_seconds: float) -> None:
    """Print a screen after what was printed before: without keys, and only as high as it has to be."""
    rows = console.height - 1 if console.is_terminal else PRINTED_ROWS  # a prompt follows
    for line in frame(figures, View(interval_seconds, keys=False), console.width, rows, glyphs_of(console)):
        line.rstrip()
        console.print(line, soft_wrap=True, highlight=False)
