"""The daemon's child processes, as it makes them: a module, a stream socket, some descriptors.

A child imports what is on the disk when it starts. After an upgrade in place that is another version, to which jobs and
answers may mean something else. So none is started then, and one that starts meanwhile ends (`lifeline.check_code`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from kvdepot.proto.loaded_code import LoadedCode
from kvdepot.server.io.lifeline import CODE, PACKAGES

_LOADED: Final = LoadedCode(*PACKAGES)
_OF_THE_DAEMON: Final = (signal.SIGINT, signal.SIGTERM)
"""To a whole group (a terminal's ^C, a supervisor): the daemon drains first, and ends its children itself."""


def spawn(
    module: str, arguments: Callable[[int], Sequence[object]], fds: Sequence[int] = (), *, niceness: int = 0
) -> tuple[subprocess.Popen[bytes], socket.socket, int]:
    """Start a child. Return its process, our end of its socket, and its pidfd.

    Nothing is left if one of them cannot be had, or if kvdepot was replaced on the disk (OSError). `arguments` gets the
    number of the child's end of the socket; the child inherits that and `fds`. With `-P` it imports nothing from the
    current directory, in which another user may have placed a module. `niceness`, more than the caller's, is set from
    here: the child's imports take 0.1 s of CPU before it could. To start a child takes 1.1 ms, measured. That is not
    worth a thread, which would also have to outlive the child (prctl(2): the parent of PR_SET_PDEATHSIG is a thread).
    """
    _LOADED.check("this daemon")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with contextlib.ExitStack() as undo:
        undo.enter_context(ours)
        ours.setblocking(False)
        with theirs, _blocked(_OF_THE_DAEMON):
            process = subprocess.Popen(
                [sys.executable, "-Pm", module, *map(str, arguments(theirs.fileno()))],
                pass_fds=(*fds, theirs.fileno()),
                stdin=subprocess.DEVNULL,
                env={**os.environ, CODE: _LOADED.digest},
            )
        undo.callback(process.wait)
        undo.callback(process.kill)
        os.setpriority(os.PRIO_PROCESS, process.pid, os.getpriority(os.PRIO_PROCESS, 0) + niceness)
        pidfd = os.pidfd_open(process.pid)
        undo.pop_all()
    return process, ours, pidfd


@contextlib.contextmanager
def _blocked(signals: Sequence[signal.Signals]) -> Iterator[None]:
    """Block these signals while a child is made.

    A child inherits the mask of the thread that made it. The mask holds from the child's first instruction, before the
    child could ignore anything.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
