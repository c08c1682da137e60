"""A terminal that shows one screen after the other and gives its keys. It is left as it was found, whatever happens."""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import tty
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

from kvdepot.core.bars import ASCII, BLOCKS
from rich.control import Control
from rich.screen import Screen
from rich.text import Text

if TYPE_CHECKING:
    from types import FrameType, TracebackType

    from kvdepot.core.bars import Glyphs
    from rich.console import Console

ENDING: Final = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT})
_HANDLED: Final = (*ENDING, signal.SIGTSTP, signal.SIGCONT, signal.SIGWINCH)
_PLAIN: Final = frozenset({"dumb", "linux", "unknown"})
"""Kinds of terminals whose fonts may lack block characters."""
_KEYS_MAX: Final = 64
_ESCAPE: Final = b"\x1b"
"""Begins what arrows and function keys send, which has letters too."""
_WOKEN: Final = 0
"""No signal has this number."""


@dataclass(frozen=True, slots=True)
class Input:
    """What has happened: keys, signals that end a program, or another reason to show a screen."""

    keys: str = ""
    ended_by: signal.Signals | None = None


def glyphs_of(console: Console) -> Glyphs:
    plain = console.is_terminal and os.environ.get("TERM", "") in _PLAIN
    return ASCII if plain or console.options.ascii_only else BLOCKS


def is_live(console: Console) -> bool:
    """Return whether screens can replace each other."""
    return sys.stdout.isatty() and console.is_terminal and not console.is_dumb_terminal


class Terminal:
    """Has the terminal between `__enter__` and `__exit__`. Signals that end or stop the process leave it first."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._keyboard = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
        self._found: list[Any] | None = None  # attributes of the keyboard
        self._handlers: dict[signal.Signals, Any] = {}
        self._wakeup_before = -1
        self._woken, self._waking = -1, -1

    @property
    def keys(self) -> bool:
        """Return whether somebody can press any."""
        return self._keyboard is not None

    def __enter__(self) -> Self:
        self._woken, self._waking = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._wakeup_before = signal.set_wakeup_fd(self._waking, warn_on_full_buffer=False)
        if self._keyboard is not None:
            self._found = termios.tcgetattr(self._keyboard)
        try:
            for number in _HANDLED:
                self._handlers[number] = signal.signal(number, _noted)
            self._take()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()

    def _end(self) -> None:
        try:
            self._leave()
        finally:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(self._wakeup_before)
            os.close(self._woken)
            os.close(self._waking)

    def _take(self) -> None:
        """Take the terminal, also if it was taken before."""
        if self._keyboard is not None:
            tty.setcbreak(self._keyboard, termios.TCSADRAIN)
        self._console.set_alt_screen(True)
        self._console.show_cursor(False)

    def _leave(self) -> None:
        with suppress(OSError):  # of a terminal that is gone
            self._console.show_cursor(True)
            self._console.set_alt_screen(False)
        if self._keyboard is not None and self._found is not None:
            with suppress(termios.error):
                termios.tcsetattr(self._keyboard, termios.TCSADRAIN, self._found)

    def wake(self) -> None:
        """Let `wait` return. Any thread may call it."""
        with suppress(OSError):  # it is full, or closed
            os.write(self._waking, bytes([_WOKEN]))

    def draw(self, lines: list[Text]) -> None:
        with self._console:  # one write
            self._console.control(Control.home())
            self._console.print(Screen(Text("\n").join(lines)), end="")

    def wait(self) -> Input:
        """Wait for a key, a signal or `wake`."""
        readers = [self._woken] if self._keyboard is None else [self._woken, self._keyboard]
        ready, _, _ = select.select(readers, [], [])
        keys = ""
        if self._keyboard in ready and self._keyboard is not None:
            typed = os.read(self._keyboard, _KEYS_MAX)
            if not typed:  # the terminal is gone
                return Input(ended_by=signal.SIGHUP)
            keys = "" if _ESCAPE in typed else typed.decode("ascii", "ignore")
        numbers = os.read(self._woken, select.PIPE_BUF) if self._woken in ready else b""
        ended_by = next((signal.Signals(number) for number in numbers if number in ENDING), None)
        if ended_by is None and signal.SIGTSTP in numbers:
            self._stop()
        elif ended_by is None and signal.SIGCONT in numbers:
            self._take()
        return Input(keys, ended_by)

    def _stop(self) -> None:
        """Stop the process, as ^Z does, with the terminal as it was found."""
        self._leave()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTSTP)  # returns once the process continues
        signal.signal(signal.SIGTSTP, _noted)
        self._take()


def _noted(number: int, frame: FrameType | None) -> None:
    """Do nothing: the number of the signal is in the pipe."""
