"""The daemon's log: one event per line, as text or JSON, on stderr.

A pipe or a terminal that nobody reads blocks a writer. The daemon must never stop serving because of its log, so
`LossyHandler` writes only what the descriptor takes at once. It keeps a bounded number of lines for later, and counts
the rest as dropped. A queue and a thread (`logging.handlers.QueueListener`) were rejected: a killed daemon would lose
its last lines, and a blocked thread could not be joined at the end.
"""

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

from kvdepot.core.printable import printable

EVENTS: Final = "kvdepot.events"
"""Logger of single objects: what became durable and what was dropped, at level debug."""
AUDIT: Final = "kvdepot.audit"
"""Logger of operators' calls, at every level of the log."""
REPEAT_SECONDS: Final = 60.0
"""Seconds for which the same line is not repeated."""
LINES_MAX: Final = 10_000
"""Lines that wait for the reader of stderr; further ones are dropped and counted."""
_STDERR: Final = 2
_LAST_SECONDS: Final = 1.0
"""Seconds to wait for the reader at the end of the process."""
_KEYS_MAX: Final = 1000
_PRIORITIES: Final = {"debug": "<7>", "info": "<6>", "warning": "<4>"}


class LogThrottle:
    """Limits repeated log lines to one per key and `REPEAT_SECONDS`. Remembers a bounded number of keys."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._logged_at: dict[str, float] = {}

    def due(self, key: str) -> bool:
        """Return whether to log a line with this key now, and remember that it was logged."""
        now = self._clock()
        if now - self._logged_at.get(key, -REPEAT_SECONDS) < REPEAT_SECONDS:
            return False
        self._logged_at = {other: at for other, at in self._logged_at.items() if now - at < REPEAT_SECONDS}
        if len(self._logged_at) < _KEYS_MAX:
            self._logged_at[key] = now
        return True


class LossyHandler(logging.Handler):
    """Writes what a descriptor takes at once, and keeps up to `LINES_MAX` lines for later. Never blocks."""

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd = fd
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)
        self._lines: deque[bytes] = deque()
        self._dropped = 0

    def emit(self, record: logging.LogRecord) -> None:
        if len(self._lines) < LINES_MAX:
            self._lines.append(self._line(record))
        else:
            self._dropped += 1
        self._write()

    def drain(self) -> None:
        """Write the waiting lines that the descriptor takes now. Any thread may call it."""
        if self._lines:
            with self.lock or nullcontext():
                self._write()

    def flush(self) -> None:
        """Write the waiting lines at the end of the process, for at most a second."""
        until = time.monotonic() + _LAST_SECONDS
        while self._lines and (remaining := until - time.monotonic()) > 0:
            self._poll.poll(remaining * 1000)
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
            except OSError:  # a full disk or a closed pipe: dropping the line is better than not serving
                written = len(line)
            self._lines[0] = line[written:]
            if not self._lines[0]:
                self._lines.popleft()
            if not self._lines and self._dropped:
                dropped, self._dropped = self._dropped, 0
                record = logging.makeLogRecord({"levelname": "WARNING", "msg": f"log lines dropped: {dropped}"})
                self._lines.append(self._line(record))


class _TextFormatter(logging.Formatter):
    """Text for people. In the journal a line has its priority, and the journal has the time."""

    def __init__(self, *, journal: bool) -> None:
        super().__init__()
        self._journal = journal

    def format(self, record: logging.LogRecord) -> str:
        level = record.levelname.lower()
        begin = _PRIORITIES.get(level, "<3>") + level if self._journal else f"{_time(record)} {level}"
        return f"{begin} {printable(self._message(record))}"

    def _message(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        return f"{text}: {self.formatException(record.exc_info)}" if record.exc_info else text


class _JsonFormatter(logging.Formatter):
    def __init__(self, *, journal: bool) -> None:
        super().__init__()
        self._journal = journal

    def format(self, record: logging.LogRecord) -> str:
        event = {"time": _time(record), "level": record.levelname.lower(), "event": record.getMessage()}
        if record.name == AUDIT:
            event |= {"event": "operator call", "audit": record.__dict__["audit"]}
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        priority = _PRIORITIES.get(record.levelname.lower(), "<3>") if self._journal else ""
        return priority + json.dumps(event)


def make_log(level: str, style: Literal["text", "json"], environment: Mapping[str, str] = os.environ) -> logging.Logger:
    """Return the daemon's logger, which writes to stderr. The loggers `EVENTS` and `AUDIT` write there too.

    Another call changes level and style, and keeps the lines that wait.
    """
    log, events, audit = (logging.getLogger(name) for name in ("kvdepotd", EVENTS, AUDIT))
    handler = next((handler for handler in log.handlers if isinstance(handler, LossyHandler)), None) or LossyHandler(
        _STDERR
    )
    make = _JsonFormatter if style == "json" else _TextFormatter
    handler.setFormatter(make(journal=_to_journal(environment)))
    for logger in (log, events, audit):
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(level.upper())
    audit.setLevel(min(audit.level, logging.INFO))
    return log


class UnhandledErrors:
    """The loop's exception handler: logs an error of a callback as one line, at most once per `REPEAT_SECONDS`."""

    def __init__(self, log: logging.Logger, clock: Callable[[], float]) -> None:
        self._log = log
        self._throttle = LogThrottle(clock)

    def __call__(self, _: object, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if self._throttle.due(f"{context.get('message')} {error!r}"):
            self._log.error("unhandled error: %s: %r", context.get("message", "no context"), error, exc_info=error)


def drain(log: logging.Logger) -> None:
    """Write the waiting lines of a log that the reader of stderr takes now."""
    for handler in log.handlers:
        if isinstance(handler, LossyHandler):
            handler.drain()


def _to_journal(environment: Mapping[str, str]) -> bool:
    """Return whether stderr is the journal (systemd.exec(5), JOURNAL_STREAM)."""
    try:
        status = os.fstat(_STDERR)
    except OSError:
        return False
    return environment.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
