"""What the kernel says of the threads that an answer waits for (ADR 73)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import get_native_id
from types import SimpleNamespace
from typing import Any

import pytest
from kvdepot.client.vllm.scheduling import answering_threads
from kvdepot.client.vllm.scheduling.answering_threads import AnsweringThreads

from tests.rigs.patience import Deadline, wait_until


def of(session: int = 0, daemon: int = 0) -> AnsweringThreads:
    threads: Any = SimpleNamespace(threads=(session, daemon))
    return AnsweringThreads(threads)


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return a folder that takes the place of the kernel: `STAT/THREAD` and `SCHEDSTAT/THREAD`."""
    for name in ("stat", "schedstat"):
        (tmp_path / name).mkdir()
        monkeypatch.setattr(answering_threads, f"_{name.upper()}", str(tmp_path / name / "{}"))
    return tmp_path


@pytest.fixture
def child() -> Iterator[subprocess.Popen[str]]:
    """Yield a process that computes when it gets a line, and without end."""
    command = [sys.executable, "-c", "input()\nwhile True: pass"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, text=True) as started:
        yield started
        started.kill()


def test_a_thread_that_has_no_processor_of_its_own_is_starved() -> None:
    other = "import os\nos.sched_setaffinity(0, {%d})\nwhile True: pass"
    mine, threads = os.sched_getaffinity(0), of()
    cpu, before = min(mine), threads.starved_seconds()
    rivals = [subprocess.Popen([sys.executable, "-c", other % cpu]) for _ in range(2)]
    try:
        os.sched_setaffinity(0, {cpu})
        until = Deadline(60)
        while threads.starved_seconds() - before < 0.2:
            assert not until.is_over()
    finally:
        os.sched_setaffinity(0, mine)
        for rival in rivals:
            rival.kill()
            rival.wait()


def test_a_thread_of_which_the_kernel_does_not_say_how_long_counts_as_none(says: Path) -> None:
    (says / "schedstat" / "3").write_text("123 2500000000 7\n")
    for text in (None, "", "1 x 2", "5"):
        if text is not None:
            (says / "schedstat" / "1").write_text(text)
        assert of(1, 3).starved_seconds() == 2.5


def test_the_waits_of_all_three_threads_count(says: Path) -> None:
    for thread, nanoseconds in ((3, 2_500_000_000), (4, 1_000_000_000), (get_native_id(), 500_000_000)):
        (says / "schedstat" / str(thread)).write_text(f"1 {nanoseconds} 1\n")
    assert of(3, 4).starved_seconds() == 4.0


def test_a_daemon_that_computes_is_ready_and_one_that_sleeps_or_has_gone_is_not(child: subprocess.Popen[str]) -> None:
    threads = of(daemon=child.pid)
    wait_until(lambda: not threads.is_ready(), "it waits for its line")
    assert child.stdin is not None
    child.stdin.write("\n")
    child.stdin.flush()
    wait_until(threads.is_ready, "it computes")
    child.kill()
    child.wait()
    assert not threads.is_ready()


@pytest.mark.parametrize(
    ("text", "expected"),
    [("7 (kvdepotd) R 1 7", True), ("7 (a) R (b) S 1 7", False), ("7 (a) S) R 1 7", True), ("7", False), ("", False)],
)
def test_the_state_stands_behind_a_name_with_any_characters(says: Path, text: str, expected: bool) -> None:
    (says / "stat" / "7").write_text(text)
    assert of(7).is_ready() is of(0, 7).is_ready() is expected
