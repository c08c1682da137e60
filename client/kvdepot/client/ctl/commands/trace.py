"""`kvdepotctl trace`: record lookups, and replay them against other tiers, policies and chunks."""

from __future__ import annotations

import fcntl
import os
import stat
import subprocess
import sys
import time
from contextlib import ExitStack, closing, contextmanager, nullcontext
from typing import TYPE_CHECKING, Final

import click
from kvdepot.client.ctl.calls import connect
from kvdepot.client.ctl.commands.options import STREAM, SecondsType, file_errors
from kvdepot.core.trace_file import TraceWriter
from kvdepot.core.units import percent_text
from rich.console import Console

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import TextIO

    from kvdepot.client.endpoint import Endpoint

REPLAY: Final = (sys.executable, "-P", "-m", "kvdepot.server.daemon.entry", "replay")
"""The daemon's own program: it has the engine that is asked.

`-P`: Python would import from the current directory first, in which another user may have placed a module.
"""


@click.group()
def trace() -> None:
    """Record and replay lookups."""


@trace.command()
@click.argument("file", type=click.Path(dir_okay=False, allow_dash=True))
@click.option("--seconds", type=SecondsType(min=0.1), help="Stop after this many seconds. [default: at ^C]")
@click.pass_obj
def record(connection: tuple[Endpoint, float], file: str, seconds: float | None) -> int:
    """Record what engines look up.

    Writes the first lookup of each request to FILE (-: stdout), one line each, until ^C. The trace has no prompt text:
    chunks are numbers, equal for equal prefixes. Recording does not slow engines down. A former FILE is replaced once
    the daemon answers.
    """
    console = Console(stderr=True)
    writer, until = TraceWriter(), time.monotonic() + (seconds or float("inf"))
    lost = 0
    shown = console.status("recording") if console.is_terminal else nullcontext()
    with connect(*connection) as operator, closing(operator.record_trace()) as parts, ExitStack() as opened:
        try:
            status, out = None, None
            for part in parts:
                if out is None:  # not earlier: without a daemon a former recording stays
                    out, status = opened.enter_context(_replaced(file)), opened.enter_context(shown)
                    out.write(writer.head())
                out.writelines(writer.lines(part))
                out.flush()
                lost = part.lost
                if status is not None:
                    status.update(_told(writer, lost))
                if time.monotonic() >= until:
                    break
        except KeyboardInterrupt:
            pass
    console.print(_told(writer, lost))
    return 0


@contextmanager
def _replaced(file: str) -> Iterator[TextIO]:
    """Open FILE, empty, for one recording: the numbers of two would mean different chunks. Raise ClickException."""
    if file == STREAM:
        yield sys.stdout
        return
    with file_errors(file), open(file, "a", encoding="utf-8") as out:  # noqa: PTH123 - also /dev/fd/3
        if stat.S_ISREG(os.fstat(out.fileno()).st_mode):
            _lock(file, out)
            out.truncate(0)
        yield out


def _lock(file: str, out: TextIO) -> None:
    try:
        fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise click.ClickException(f"{file}: another recording writes to it") from None
    except OSError:  # a file system without locks
        return


@trace.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def replay(arguments: tuple[str, ...]) -> int:
    """Replay a trace against other tiers.

    Reports what the lookups of a trace would have hit with other capacities, policies and chunk sizes. Takes the
    options of `kvdepotd replay`, and needs the extra `server`. It calls no daemon.
    """
    return subprocess.run([*REPLAY, *arguments], check=False).returncode


def _told(writer: TraceWriter, lost: int) -> str:
    share = writer.offered_tokens / writer.tokens if writer.tokens else 0.0
    said = (
        f"{writer.requests} requests, {writer.chunks} different chunks,"
        f" {percent_text(share, 1)} of {writer.tokens} tokens offered"
    )
    return f"{said}, {lost} requests lost: the reader was too slow" if lost else said
