"""The daemon's log: lines, and a reader that has stopped reading."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from kvdepot.server.platform import logs
from kvdepot.server.platform.logs import LINES_MAX, REPEAT_SECONDS, LogThrottle, LossyHandler, drain, make_log

from tests.rigs.patience import Deadline


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """(read end, write end), 4 KiB long."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    yield reader, writer
    for fd in (reader, writer):
        with suppress(OSError):
            os.close(fd)


def _log(writer: int) -> logging.Logger:
    log = logging.Logger("piped", logging.INFO)
    log.addHandler(LossyHandler(writer))
    return log


def _read(reader: int) -> list[str]:
    return os.read(reader, 1 << 20).decode().splitlines()


@pytest.mark.requirement("I2")
def test_a_reader_that_has_stopped_stops_nobody_who_logs(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    log = _log(writer)
    for number in range(LINES_MAX + 500):
        log.info("%06d %s", number, "x" * 93)  # 100 bytes, and the end of the line
    lines: list[str] = []
    while not lines or "dropped" not in lines[-1]:
        lines += _read(reader)
        drain(log)
    whole = "\n".join(lines[:-1]).replace("\n", "").split("x" * 93)
    numbers = [int(text) for text in whole if text]
    assert numbers == list(range(len(numbers))), "what is kept is what came first, in order"
    assert LINES_MAX <= len(numbers) < LINES_MAX + 500
    assert lines[-1] == f"log lines dropped: {LINES_MAX + 500 - len(numbers)}"


@pytest.mark.requirement("I2")
def test_the_end_of_the_process_waits_a_second_for_the_reader(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "_LAST_SECONDS", 0.1)
    reader, writer = pipe
    handler = LossyHandler(writer)
    log = logging.Logger("piped")
    log.addHandler(handler)
    for _ in range(60):
        log.warning("x" * 99)
    began, limit = time.monotonic(), Deadline(2)
    handler.flush()
    assert time.monotonic() - began >= 0.1 and not limit.is_over()
    while _read(reader) and handler._lines:
        handler.flush()
    assert not handler._lines


@pytest.mark.requirement("I3")
def test_nobody_there_and_a_full_disk_are_no_errors(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    os.close(reader)
    _log(writer).warning("to nobody")
    with Path("/dev/full").open("wb", buffering=0) as full:
        _log(full.fileno()).warning("nowhere")


def test_a_long_line_arrives_whole(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    log, text = _log(writer), "y" * 10_000
    log.warning(text)
    found = b""
    while not found.endswith(b"\n"):
        found += os.read(reader, 1 << 20)
        drain(log)
    assert found == text.encode() + b"\n"


def test_the_same_is_said_once_a_minute() -> None:
    now = 0.0
    throttle = LogThrottle(lambda: now)
    assert [throttle.due("one"), throttle.due("one"), throttle.due("another")] == [True, False, True]
    now += REPEAT_SECONDS
    assert throttle.due("one")
    for number in range(5000):
        throttle.due(str(number))
    assert len(throttle._logged_at) <= 1000


@pytest.mark.requirement("S6")
@pytest.mark.parametrize("style", ["text", "json"])
def test_what_a_client_calls_itself_is_no_second_line_and_no_command(
    capfd: pytest.CaptureFixture[str], style: str
) -> None:
    log = make_log("info", "json" if style == "json" else "text", {})
    log.info("attached: %s", "evil\x1b[2J\r2026 warning forged")
    (line,) = capfd.readouterr().err.split("\n")[:-1]
    assert line.isprintable() and "forged" in line


@pytest.mark.parametrize("style", ["text", "json"])
def test_in_the_journal_a_line_has_its_priority(capfd: pytest.CaptureFixture[str], style: str) -> None:
    found = os.fstat(2)
    for environment, journal in (
        ({"JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino}"}, True),
        ({"JOURNAL_STREAM": "1:1"}, False),  # inherited, and stderr is another file by now
        ({}, False),
    ):
        log = make_log("info", "json" if style == "json" else "text", environment)
        log.info("said")
        log.warning("two\nlines")
        log.error("failed")
        told, warned, failed = capfd.readouterr().err.splitlines()
        assert [line[:3] for line in (told, warned, failed)] == ["<6>", "<4>", "<3>"] or not journal
        assert journal == warned.startswith("<")
        if style == "json":
            assert json.loads(warned.removeprefix("<4>"))["event"] == "two\nlines"
        else:
            assert warned.endswith("warning two\\nlines")
    assert len(log.handlers) == 1


def test_a_closed_stderr_is_not_the_journal(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(logs, "_STDERR", -1)
        (handler,) = make_log("info", "text", {"JOURNAL_STREAM": "1:1"}).handlers
    record = logging.LogRecord("kvdepot", logging.INFO, "", 0, "said", None, None)
    assert not handler.format(record).startswith("<")
