"""Log lines of the daemon: subject, what happened, values, in lower case."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

SERVER = Path(__file__).parents[3] / "server/kvdepot/server"
ROOMS = ("arena", "attach", "config", "daemon", "observe", "offline", "platform", "rpc")
LEVELS = frozenset({"debug", "info", "warning", "error", "exception", "critical"})
SUBJECT = re.compile(r"(?:%s:? ?)?[a-z]")
"""A word in lower case, or a value that a word follows: `tier nvme: ...`, `%s switched ...`."""


def formats(source: str) -> Iterator[tuple[int, str | None]]:
    """Yield (line, format) of each call of a log; None for a format that is no literal."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LEVELS:
            receiver = node.func.value
            name = receiver.attr if isinstance(receiver, ast.Attribute) else getattr(receiver, "id", "")
            if name.lower().endswith("log"):
                first = node.args[0]
                for choice in (first.body, first.orelse) if isinstance(first, ast.IfExp) else (first,):
                    text = choice.value if isinstance(choice, ast.Constant) else None
                    yield node.lineno, text if isinstance(text, str) else None


def problems(source: str) -> list[str]:
    """Return what is wrong with the log lines of a module."""
    texts = list(formats(source))
    return [
        f"line {line}: {text!r}"
        for line, text in texts
        if text is None or not SUBJECT.match(text) or text.endswith(".") or "\n" in text
    ]


@pytest.mark.parametrize("room", ROOMS)
def test_a_log_line_is_a_subject_what_happened_and_values(room: str) -> None:
    for path in sorted((SERVER / room).rglob("*.py")):
        assert problems(path.read_text()) == [], path


def test_other_log_lines_are_refused() -> None:
    for line in ('"Tier opened"', '"%s"', '"tier opened."', 'f"tier {name}"', '"a" if b else "C"', '"two\\nlines"'):
        assert len(problems(f"self._log.info({line})")) == 1, line
    assert problems('log.error("tier %s: opened, %d objects", name, 1)') == []
    assert sum(1 for path in SERVER.rglob("*.py") for _ in formats(path.read_text())) > 60
