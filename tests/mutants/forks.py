"""Runs pytest many times, each in a fork of one process that has imported what takes long, and nothing of kvdepot.

A program of its own, in the copy of the tree: `python -m tests.mutants.forks`. It reads one task a line, and answers
each with the exit code, or null when the time was over. It ends with its standard input.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import math
import os
import select
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pytest

from tests.mutants.watching import Noted, Noting, Trying, test_due

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_REAP_MS: Final = 50


def serve() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # what tests leave behind becomes a child of this
    answers = os.fdopen(os.dup(1), "w")
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    while line := sys.stdin.readline():
        task = json.loads(line)
        code: int | None = 0
        if "imported" in task:
            _import(task["imported"])
        else:
            code = _run(task)
        if code is not None and task.get("tests", ()) is None and Path(task["report"]).exists():
            _import(Noted.read(Path(task["report"])).imported)
        print(json.dumps(code), file=answers, flush=True)


def _import(names: list[str]) -> None:
    """What the tests have imported: the next ones find it. Some cannot be imported by their names."""
    for name in names:
        with suppress(Exception):
            importlib.import_module(name)


def _run(task: dict[str, Any]) -> int | None:
    due = Path(task["due"])
    due.unlink(missing_ok=True)
    server = os.getpid()
    process = os.fork()
    if process == 0:
        _test(task, server)
    poll = select.poll()
    poll.register(0, select.POLLHUP)  # nobody waits for an answer any more
    over = math.inf if task["seconds"] is None else time.monotonic() + task["seconds"]
    status = None
    while status is None and time.monotonic() < min(over, test_due(due)[0]) and not poll.poll(_REAP_MS):
        status = _reap(process)
    _end()
    return None if status is None else os.waitstatus_to_exitcode(status)


def _reap(process: int) -> int | None:
    """Tests wait for the end of what they have killed. The status of this process, if it has ended."""
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == process:
                return ended[1]
    return None


def _end() -> None:
    """What was started, in whatever session, ends."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    while pids := [int(pid) for pid in children.read_text().split()]:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for pid in pids:
            os.waitpid(pid, 0)


def _test(task: dict[str, Any], server: int) -> None:
    """Ends this process."""
    code = 3
    try:
        # A change that hangs would use a core for ever if the server were killed.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != server:
            return
        os.setsid()
        output = os.open(task["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        report, tests = Path(task["report"]), task["tests"]
        plugin = Noting(Path.cwd(), report) if tests is None else Trying(tests, report, Path(task["due"]))
        code = int(pytest.main(task["arguments"], plugins=[plugin]))
        sys.stdout.flush()
    finally:
        os._exit(code)


if __name__ == "__main__":
    serve()
