"""Start kvdepotd and kvdepotctl by fork, from a process that has imported them: half of a start is its imports.

What a test sees is a process of its own, with the arguments, environment, directory and streams that it asks for.
`tests/rigs/fork_server.py` says in what it differs from a fresh one.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import os
import pickle
import socket
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Final
from unittest import mock

from tests.rigs import forked_children
from tests.rigs.fork_server import Server
from tests.rigs.forked import ForkedProcess, ForkingProcess

DAEMON: Final = "kvdepot.server.daemon.app"
TOOL: Final = "kvdepot.client.ctl.app"
_LATE: Final = (
    "CACHE_DIRECTORY", "COLUMNS", "HOME", "KVDEPOT_", "LISTEN_", "NOTIFY_SOCKET", "PYTEST_", "RUNTIME_DIRECTORY",
    "STATE_DIRECTORY", "TMPDIR", "UCX_", "XDG_",
)  # fmt: skip
"""Beginnings of the names of variables that no module reads when it is imported."""
ONE_THREAD: Final = {"OPENBLAS_NUM_THREADS": "1"}
"""For servers only: NumPy's library starts its threads when it is imported."""


# --- the server


def serve(listener_fd: int, alive_fd: int, name: str) -> Callable[[], Any]:
    """Fork copies of the program that is module `name`. Return what the calling process then has to do.

    The server imports and builds all that a copy needs sooner or later. A fresh tool imports the called verb only.
    """
    atexit.register(_keep_modules)  # the first to be registered, so the last to be called
    gc.disable()
    program = importlib.import_module(name)
    if hasattr(program, "prepare"):
        program.prepare()
    if name == DAEMON:
        forked_children.preload()
    if name == TOOL:
        program.cli.verbs()
        importlib.import_module("grpc._channel")
    methods = importlib.import_module("kvdepot.proto.methods")
    for method in methods.BY_CALL.values():
        assert method.call and method.reply  # their codecs are there from now on
    gc.freeze()  # no collection of a copy writes to what it shares
    gc.enable()
    with socket.socket(fileno=listener_fd) as listener:
        return Server(listener, alive_fd, partial(_work, program), whole_groups=False).run()


def _keep_modules() -> None:
    """Let the interpreter end without taking the modules apart.

    That writes to all memory which a copy shares with its server: a third of the CPU time of a short command. All
    else of an end is as ever: threads, functions of `atexit`, streams, and what is written in C.
    """
    for name, module in list(sys.modules.items()):
        if name not in sys.builtin_module_names and name != "__main__":
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(module))
            del sys.modules[name]


def _work(program: ModuleType, data: int, _: list[int]) -> Any:
    with os.fdopen(data, "rb") as file:
        environment, directory, arguments, untouched = pickle.load(file)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    sys.argv = [str(program.__file__), *arguments]
    if program.__name__ == DAEMON and arguments[:1] == ["serve"]:
        forked_children.begin()
        if untouched:
            mock.patch("kvdepot.server.arena.populate.Populator._touch", lambda *_: 0).start()
    sys.exit(program.main())


# --- the driver's end

_servers: dict[tuple[int, str, int], ForkingProcess] = {}


def _at_import(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not name.startswith(_LATE)}


_environment: dict[str, str] = {}
"""Of this process's servers: that of no test, also where a test that changes it is the first one to need a server."""


def look_at_environment() -> None:
    """Take it over for the servers, if there is none yet. Called between tests: what they import may change it, too."""
    if not any(process == os.getpid() for process, _, _ in _servers):
        _environment.clear()
        _environment.update(_at_import(os.environ))


def _server(program: str, number: int) -> ForkingProcess:
    place = (os.getpid(), program, number)  # a fork of this process has servers of its own
    if place not in _servers or not _servers[place].serves:
        late = {name: value for name, value in os.environ.items() if name.startswith(_LATE)}
        environment = _environment | late | ONE_THREAD
        server = ForkingProcess("tests.rigs.forked_program", environment, [program], Path.cwd())
        atexit.register(server.close)
        _servers[place] = server
    return _servers[place]


def start(
    program: str,
    arguments: list[str],
    streams: tuple[int, int, int],
    environment: Mapping[str, str] = os.environ,
    server_number: int = 0,
    *,
    untouched: bool = False,
) -> ForkedProcess | None:
    """The process, or None where a variable that may be read at import is another one than for the server.

    Copies of servers with other numbers have other seeds of `hash()`. `untouched`: a daemon takes its arena for
    populated without a first touch, as it would on a kernel that knows none. Pages come with the first write.
    """
    if not _environment:
        look_at_environment()
    if _at_import(environment) != _environment:
        return None
    server = _server(program, server_number)
    command = [sys.executable, "-m", program, *arguments]
    sys.audit("subprocess.Popen", sys.executable, command, None, None)  # for those who note which tests start Python
    message = pickle.dumps((dict(environment), Path.cwd(), arguments, untouched))
    return ForkedProcess(*server.fork(list(streams), message))
