"""One event, one line: for people, or as JSON. Nobody who logs waits for whoever reads stderr."""

from __future__ import annotations

import json
import logging
import os
import select
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from datetime import UTC, datetime
from typing import Any, Final, Literal

EVENTS: Final = "kvdepot.events"
"""Name of the logger that is told what became durable and what is gone, at level debug."""
REPEAT_SECONDS: Final = 60.0
"""How often at most the same is said."""
LINES_MAX: Final = 10_000
"""Of the log that wait for their reader; further ones are lost, and counted."""
_STDERR: Final = 2
_LAST_SECONDS: Final = 1.0
"""What the reader is given at the end."""
_SAID_MAX: Final = 1000
_PRIORITIES: Final = {"debug": "<7>", "info": "<6>", "warning": "<4>"}


class Seldom:
    """Whether to say something again."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._said: dict[str, float] = {}

    def due(self, what: str) -> bool:
        """True once in `REPEAT_SECONDS`."""
        now = self._clock()
        if now - self._said.get(what, -REPEAT_SECONDS) < REPEAT_SECONDS:
            return False
        self._said = {text: at for text, at in self._said.items() if now - at < REPEAT_SECONDS}
        if len(self._said) < _SAID_MAX:
            self._said[what] = now
        return True


class LossyHandler(logging.Handler):
    """Writes what a descriptor takes at once and keeps the rest, for later and up to a bound.

    A pipe or a terminal that nobody reads stops whoever writes to it: the daemon would stop serving for its log.
    """

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd = fd
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)
        self._lines: deque[bytes] = deque()
        self._lost = 0

    def emit(self, record: logging.LogRecord) -> None:
        if len(self._lines) < LINES_MAX:
            self._lines.append(self._line(record))
        else:
            self._lost += 1
        self._write()

    def drain(self) -> None:
        """What waits and can be written by now. Any thread."""
        if self._lines:
            with self.lock or nullcontext():
                self._write()

    def flush(self) -> None:
        """At the end of the process: all that waits, but not for long."""
        until = time.monotonic() + _LAST_SECONDS
        while self._lines and (left := until - time.monotonic()) > 0:
            self._poll.poll(left * 1000)
            self.drain()

    def _line(self, record: logging.LogRecord) -> bytes:
        return self.format(record).encode("utf-8", "backslashreplace") + b"\n"

    def _write(self) -> None:
        while self._lines and self._poll.poll(0):  # a pipe that is ready takes PIPE_BUF bytes
            line = self._lines[0]
            try:
                written = os.write(self._fd, line[: select.PIPE_BUF])
            except BlockingIOError:
                return
            except OSError:  # a full disk, or nobody is there: the log is not what the daemon is for
                written = len(line)
            self._lines[0] = line[written:]
            if not self._lines[0]:
                self._lines.popleft()
            if not self._lines and self._lost:
                lost, self._lost = self._lost, 0
                record = logging.makeLogRecord({"levelname": "WARNING", "msg": f"{lost} lines of this log are lost"})
                self._lines.append(self._line(record))


class _TextFormatter(logging.Formatter):
    """In the journal a line has its priority, and the time is the journal's."""

    def __init__(self, *, journal: bool) -> None:
        super().__init__()
        self._journal = journal

    def format(self, record: logging.LogRecord) -> str:
        level = record.levelname.lower()
        begin = _PRIORITIES.get(level, "<3>") + level if self._journal else f"{_time(record)} {level}"
        return f"{begin} {_one_line(self._message(record))}"

    def _message(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        return f"{text}: {self.formatException(record.exc_info)}" if record.exc_info else text


class _JsonFormatter(logging.Formatter):
    def __init__(self, *, journal: bool) -> None:
        super().__init__()
        self._journal = journal

    def format(self, record: logging.LogRecord) -> str:
        event = {"time": _time(record), "level": record.levelname.lower(), "event": record.getMessage()}
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        priority = _PRIORITIES.get(record.levelname.lower(), "<3>") if self._journal else ""
        return priority + json.dumps(event)


def make_log(level: str, style: Literal["text", "json"], environment: Mapping[str, str] = os.environ) -> logging.Logger:
    """The daemon's logger, writing to stderr. What tiers tell of single objects goes there too, at level debug.

    Called again, it goes on with what still waits.
    """
    log, events = logging.getLogger("kvdepotd"), logging.getLogger(EVENTS)
    handler = next((one for one in log.handlers if isinstance(one, LossyHandler)), None) or LossyHandler(_STDERR)
    make = _JsonFormatter if style == "json" else _TextFormatter
    handler.setFormatter(make(journal=_to_journal(environment)))
    for one in (log, events):
        one.handlers = [handler]
        one.propagate = False
        one.setLevel(level.upper())
    return log


class UnhandledErrors:
    """The loop's exception handler: what a callback raised is one line, and the same at most once in a while."""

    def __init__(self, log: logging.Logger, clock: Callable[[], float]) -> None:
        self._log = log
        self._seldom = Seldom(clock)

    def __call__(self, _: object, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if self._seldom.due(f"{context.get('message')} {error!r}"):
            self._log.error("%s: %r", context.get("message", "unhandled"), error, exc_info=error)


def drain(log: logging.Logger) -> None:
    """What waits for the reader of stderr, and can be written by now."""
    for handler in log.handlers:
        if isinstance(handler, LossyHandler):
            handler.drain()


def _to_journal(environment: Mapping[str, str]) -> bool:
    """Whether stderr is the journal's (systemd.exec(5), JOURNAL_STREAM)."""
    try:
        found = os.fstat(_STDERR)
    except OSError:
        return False
    return environment.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")


def _one_line(text: str) -> str:
    return text.replace("\n", "\\n")
