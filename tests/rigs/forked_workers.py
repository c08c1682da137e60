"""Fork pytest's workers from a process that has imported what they need: `pytest -n 4 --preload torch`.

Each worker would import the same, for 10 s of a core, and all test modules, for another 15 s where no run has compiled
their assertions before. `tests/rigs/fork_server.py` says in what a copy differs from a
fresh process. All workers of a run have the same seed of `hash()`; each run has another one.

execnet starts a program for each worker and talks to its streams. That program is this module: it passes its streams
to a copy, and the exit status of the copy is its own.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import pickle
import shlex
import socket
import sys
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from typing import Any

import pytest

from tests.rigs.fork_server import STREAMS, Client, NoForkError, Server
from tests.rigs.forked import ForkingProcess, log_of
from tests.rigs.forked_program import ONE_THREAD


def command_of(modules: Sequence[str], tests: Sequence[str] = ()) -> str:
    """Start a server that imports these. Return the command that execnet runs instead of Python.

    Args:
        tests: what pytest is called with to find the modules of tests.
    """
    server = ForkingProcess("tests.rigs.forked_workers", os.environ | ONE_THREAD, [",".join(modules), *tests])
    atexit.register(server.close)
    return shlex.join([sys.executable, "-m", "tests.rigs.forked_workers", server.client.address])


class _ModulesAlone:
    """Has pytest import the modules of tests, and make no tests of them."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_pycollect_makeitem(self) -> list[pytest.Item]:
        return []


def serve(listener_fd: int, alive_fd: int, modules: str, *tests: str) -> Callable[[], Any]:
    """Fork workers. Return what the calling process then has to do."""
    gc.disable()
    for name in modules.split(","):
        importlib.import_module(name)
    if tests:  # a module that fails is imported again by each worker, which then tells why
        pytest.main(["--collect-only", "-q", *tests], plugins=[_ModulesAlone()])
    sys.stdout.flush()  # a copy speaks with execnet there
    gc.freeze()  # no collection of a worker writes to what it shares
    gc.enable()
    with socket.socket(fileno=listener_fd) as listener:
        return Server(listener, alive_fd, _work, whole_groups=False).run()


def _work(data: int, _: list[int]) -> Any:
    with os.fdopen(data, "rb") as file:
        program, environment = pickle.load(file)
    for name in ONE_THREAD:  # what a test starts has the environment of the run
        del os.environ[name]
        os.environ.update({name: environment[name]} if name in environment else {})
    sys.argv = ["-c"]
    return exec(program, {"__name__": "__main__"})


def main(address: str, program: str) -> int:
    """Have a worker forked that runs `program`, and wait for its end."""
    try:
        _, status, _ = Client(address, {}).fork(list(STREAMS), 0, pickle.dumps((program, dict(os.environ))), None)
    except NoForkError as refused:
        sys.exit(f"no worker: {refused}\n{log_of(address).read_text()}")
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in STREAMS[:2]:  # whose ends the worker alone has to have
        os.dup2(nothing, stream)
    code: int = forkserver.read_signed(status)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[-1]))
