"""Runs pytest many times, each in a fork of one process that has imported what takes long, and nothing of kvdepot.

A program of its own, in the copy of the tree: `python -m tests.mutants.forks`. It reads one task a line, and answers
each with the exit code, or null when the time was over. It ends with its standard input.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import select
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pytest

from tests.mutants.watching import Noted, Noting, Trying

_PR_SET_CHILD_SUBREAPER: Final = 36


def serve() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # what tests leave behind becomes a child of this
    answers = os.fdopen(os.dup(1), "w")
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    while line := sys.stdin.readline():
        task = json.loads(line)
        code = _run(task)
        if task["tests"] is None and code is not None:
            _import(Noted.read(Path(task["report"])).imported)
        print(json.dumps(code), file=answers, flush=True)


def _import(names: list[str]) -> None:
    """What the tests have imported: the next ones find it. Some cannot be imported by their names."""
    for name in names:
        with suppress(Exception):
            importlib.import_module(name)


def _run(task: dict[str, Any]) -> int | None:
    process = os.fork()
    if process == 0:
        _test(task)
    pidfd = os.pidfd_open(process)
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.register(0, select.POLLHUP)  # nobody waits for an answer any more
    seconds = task["seconds"]
    events = poll.poll(None if seconds is None else 1000 * seconds)
    os.close(pidfd)
    ended = any(descriptor == pidfd for descriptor, _ in events)
    status = _end(process)
    return os.waitstatus_to_exitcode(status) if ended else None


def _end(process: int) -> int:
    """It and what it has started, in whatever session, end; its status."""
    status = 0
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    while pids := [int(pid) for pid in children.read_text().split()]:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for pid in pids:
            _, ended = os.waitpid(pid, 0)
            status = ended if pid == process else status
    return status


def _test(task: dict[str, Any]) -> None:
    """Ends this process."""
    code = 3
    try:
        os.setsid()
        output = os.open(task["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        report, tests = Path(task["report"]), task["tests"]
        plugin = Noting(Path.cwd(), report) if tests is None else Trying(tests, report)
        code = int(pytest.main(task["arguments"], plugins=[plugin]))
        sys.stdout.flush()
    finally:
        os._exit(code)


if __name__ == "__main__":
    serve()
