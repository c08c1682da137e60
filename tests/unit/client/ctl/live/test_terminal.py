"""The terminal of `top`: left as it was found after an error, what keys do, and terminals that cannot show all."""

from __future__ import annotations

import os
import pty
import signal
import sys
import termios
from collections.abc import Iterator
from dataclasses import dataclass
from io import TextIOWrapper
from typing import TextIO

import pytest
from kvdepot.client.ctl.live.frame import View
from kvdepot.client.ctl.live.terminal import Input, Terminal, glyphs_of
from kvdepot.client.ctl.live.watching import INTERVALS, pressed
from kvdepot.core.bars import ASCII, BLOCKS, Glyphs
from rich.console import Console
from rich.text import Text

LEFT = b"\x1b[?1049l"


@dataclass(frozen=True, slots=True)
class Sides:
    """A terminal: the descriptor of the person, and the files of the program."""

    person: int
    stdin: TextIO
    stdout: TextIO

    def console(self) -> Console:
        return Console(file=self.stdout, force_terminal=True, width=80, height=24, legacy_windows=False)

    def shown(self) -> bytes:
        """Return what was written until the terminal was left."""
        found = b""
        while LEFT not in found:
            found += os.read(self.person, 1 << 16)
        return found


@pytest.fixture
def sides(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sides]:
    monkeypatch.setenv("TERM", "xterm")
    person, program = pty.openpty()
    with os.fdopen(program, encoding="utf-8") as stdin, os.fdopen(os.dup(program), "w", encoding="utf-8") as stdout:
        monkeypatch.setattr(sys, "stdin", stdin)
        yield Sides(person, stdin, stdout)
    os.close(person)


@pytest.mark.requirement("O1")
def test_an_exception_leaves_the_terminal_and_the_signals_as_they_were(sides: Sides) -> None:
    attributes = termios.tcgetattr(sides.stdin)
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    with pytest.raises(ZeroDivisionError), Terminal(sides.console()) as terminal:
        assert terminal.keys
        assert termios.tcgetattr(sides.stdin) != attributes
        terminal.draw([Text("a line")])
        raise ZeroDivisionError
    assert termios.tcgetattr(sides.stdin) == attributes
    assert {number: signal.getsignal(number) for number in signal.valid_signals()} == handlers
    shown = sides.shown()
    order = [shown.index(part) for part in (b"\x1b[?1049h", b"a line", b"\x1b[?25h", LEFT)]
    assert order == sorted(order)


@pytest.mark.requirement("O1")
def test_a_terminal_that_cannot_be_taken_is_left_as_it_was(sides: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    attributes, handler = termios.tcgetattr(sides.stdin), signal.getsignal(signal.SIGTERM)
    console = sides.console()

    def fail(*_: object) -> bool:
        raise OSError

    monkeypatch.setattr(console, "set_alt_screen", fail)
    with pytest.raises(OSError), Terminal(console):
        pass
    assert termios.tcgetattr(sides.stdin) == attributes
    assert signal.getsignal(signal.SIGTERM) == handler


def test_a_wait_ends_with_keys_signals_and_other_threads_and_escapes_are_no_keys(sides: Sides) -> None:
    with Terminal(sides.console()) as terminal:
        os.write(sides.person, b"pm")
        assert terminal.wait() == Input("pm")
        os.write(sides.person, b"\x1bOP")
        assert terminal.wait() == Input("")
        terminal.wake()
        assert terminal.wait() == Input()
        signal.raise_signal(signal.SIGWINCH)
        assert terminal.wait() == Input()
        signal.raise_signal(signal.SIGTERM)
        assert terminal.wait() == Input(ended_by=signal.SIGTERM)


@pytest.mark.parametrize(
    ("kind", "encoding", "is_terminal", "glyphs"),
    [
        ("xterm", "utf-8", True, BLOCKS), ("xterm", "ascii", True, ASCII), ("linux", "utf-8", True, ASCII),
        ("dumb", "utf-8", True, ASCII), ("dumb", "utf-8", False, BLOCKS), ("dumb", "ascii", False, ASCII),
    ],
)  # fmt: skip
def test_only_a_terminal_that_has_block_characters_gets_them(
    kind: str, encoding: str, is_terminal: bool, glyphs: Glyphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", kind)
    file = TextIOWrapper(open(os.devnull, "wb"), encoding=encoding)  # noqa: PTH123, SIM115 - closed with the wrapper
    with file:
        assert glyphs_of(Console(file=file, force_terminal=is_terminal, legacy_windows=False)) is glyphs


@pytest.mark.requirement("O1")
def test_keys_choose_the_view() -> None:
    view = View(2.0)
    assert pressed(view, "p") == View(2.0, paused=True)
    assert pressed(view, "m") == View(2.0, all_time=True)
    assert pressed(view, "r") == View(2.0, only_misses=True)
    assert pressed(pressed(view, "?"), "p") == view, "any key ends the help"
    assert pressed(view, "z") == view
    for key in "pmr":
        assert pressed(pressed(view, key), key) == view
    intervals = {"+": view, "-": view}
    for key in intervals:
        for _ in INTERVALS:
            intervals[key] = pressed(intervals[key], key)
    assert (intervals["+"].interval_seconds, intervals["-"].interval_seconds) == (INTERVALS[-1], INTERVALS[0])
    assert pressed(View(3.0), "+").interval_seconds == 5.0
    assert pressed(View(3.0), "-").interval_seconds == 2.0
    assert pressed(View(0.1), "-").interval_seconds == 0.1
    assert pressed(View(90.0), "+").interval_seconds == 90.0
