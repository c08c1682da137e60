"""Verbs that take long: what the daemon says on the way, as lines of JSON or as bars, and ^C."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import closing, nullcontext
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from kvdepot.client.ctl.as_json import echo_next
from kvdepot.client.ctl.exporting import ExportProgress
from kvdepot.client.ctl.importing import ImportProgress
from kvdepot.client.ctl.texts import escape
from kvdepot.core.control import PrefetchReply, VerifyReply
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

EXIT_STOPPED: Final = 130

Reply = TypeVar("Reply", VerifyReply, PrefetchReply, ExportProgress, ImportProgress)


@dataclass(frozen=True, slots=True)
class Bar:
    """`total` 0: nobody knows."""

    name: str
    done: int
    total: int
    text: str


class _Rate(ProgressColumn):
    """What is done in a second; empty until two replies have come."""

    def render(self, task: Task) -> Text:
        return Text(f"{task.speed:,.0f}/s" if task.speed else "")


@dataclass(frozen=True, slots=True)
class Followed(Generic[Reply]):
    """The last that the daemon said. `stopped`: its end was not waited for."""

    reply: Reply | None
    stopped: bool


def follow(
    replies: Generator[Reply, None, None], console: Console, bars: Callable[[Reply], list[Bar]], *, as_json: bool
) -> Followed[Reply]:
    """To the end, or to ^C, which ends it in the daemon too.

    With `as_json` every reply is a line; else there are bars where somebody looks at them.
    """
    shown = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _Rate(), TimeRemainingColumn(),
        TextColumn("{task.fields[text]}"), console=console, transient=True,
    )  # fmt: skip
    tasks: dict[str, TaskID] = {}
    reply: Reply | None = None
    try:
        with closing(replies), shown if console.is_terminal and not as_json else nullcontext():
            for reply in replies:
                if as_json:
                    echo_next(reply)
                    continue
                for bar in bars(reply):
                    if bar.name not in tasks:
                        tasks[bar.name] = shown.add_task(escape(bar.name), total=bar.total or None, text="")
                    shown.update(tasks[bar.name], completed=bar.done, text=bar.text)
    except KeyboardInterrupt:
        return Followed(reply, stopped=True)
    return Followed(reply, stopped=False)


def counted(found: Mapping[str, int]) -> str:
    """By reason, for people."""
    return ", ".join(f"{count} {why}" for why, count in sorted(found.items())) or "0"
