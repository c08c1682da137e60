"""An engine of processes that do nothing: what a fork server forks, without vLLM.

It answers as `demo.engine_process` does. Its core and its worker are started by multiprocessing, as vLLM starts them.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

_OPEN: list[Connection] = []


def facts() -> dict[str, Any]:
    """What a process finds around it."""
    return {
        "pid": os.getpid(),
        "parent": os.getppid(),
        "group": os.getpgrp(),
        "hash": hash("seed"),
        "environment": dict(os.environ),
        "directory": str(Path.cwd()),
        "random": [random.random(), float(np.random.random())],
        "files": {fd.name: str(fd.readlink()) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()},
    }


def start(target: Any, name: str, *, daemon: bool) -> tuple[Any, Any]:
    """A process that sends something over its end of a pipe, and what it has sent. It ends when this one does."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    started = spawn.Process(target=target, args=(there,), name=name, daemon=daemon)
    started.start()
    there.close()
    _OPEN.append(here)
    return started, here.recv()


def work(parent: Connection) -> None:
    parent.send(facts())
    with contextlib.suppress(EOFError):
        parent.recv()


def core(parent: Connection) -> None:
    _, found = start(work, "Worker", daemon=True)
    parent.send([facts(), found])
    with contextlib.suppress(EOFError):
        parent.recv()


def main(arguments: dict[str, Any]) -> None:
    print("a line of the log", file=sys.stderr, flush=True)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    processes = [facts()]
    if arguments.get("core"):
        started, found = start(core, "EngineCore", daemon=False)
        processes += found
    print(json.dumps({"id": 0, "ok": {"processes": processes}}), file=answers, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "await_core":
            started.join()
            print(json.dumps({"id": command["id"], "ok": started.exitcode}), file=answers, flush=True)
        else:
            assert command["do"] == "close"
            print(json.dumps({"id": command["id"], "ok": None}), file=answers, flush=True)
            _OPEN.clear()
            sys.exit(7)
