"""One event, one line: for people, or as JSON."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Final, Literal

EVENTS: Final = "kvdepot.events"
"""Name of the logger that is told what became durable and what is gone, at level debug."""


class _TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return " ".join([_time(record), record.levelname.lower(), _one_line(self._message(record))])

    def _message(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        return f"{text}: {self.formatException(record.exc_info)}" if record.exc_info else text


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        event = {"time": _time(record), "level": record.levelname.lower(), "event": record.getMessage()}
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        return json.dumps(event)


def make_log(level: str, style: Literal["text", "json"]) -> logging.Logger:
    """The daemon's logger, writing to stderr. What tiers tell of single objects goes there too, at level debug."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter() if style == "json" else _TextFormatter())
    log, events = logging.getLogger("kvdepotd"), logging.getLogger(EVENTS)
    for one in (log, events):
        one.handlers = [handler]
        one.propagate = False
        one.setLevel(level.upper())
    return log


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")


def _one_line(text: str) -> str:
    return text.replace("\n", "\\n")
