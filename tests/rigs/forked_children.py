"""Fork the children of a daemon, too, where the daemon is a copy (`tests/rigs/forked_program.py`).

Most of what a daemon with a disk costs is the imports of its children. Here a process beside the daemon, its nursery,
has imported them and forks. A child is one of the daemon's all the same, which waits for it and whose death ends it:
what forks the child ends at once, and the daemon inherits it. The child has the command, descriptors, signals and
limits that `subprocess.Popen` would give it. Its memory differs, which it shares with the nursery, and its seed of
`hash()`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import importlib
import os
import pickle
import resource
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, NoReturn

from kvdepot.proto.loaded_code import LoadedCode
from kvdepot.server.io import child, lifeline
from kvdepot.server.io.lifeline import CODE, PACKAGES, die_with

MODULES: Final = (
    "kvdepot.server.io.checksum_worker", "kvdepot.server.io.peer_server", "kvdepot.server.io.stream_proxy",
    "kvdepot.server.io.worker", "kvdepot.server.tiers.disk.opener", "kvdepot.server.tiers.shared.coordinator.main",
)  # fmt: skip
"""That a daemon starts by `child.spawn`. One that is missing here is a fresh process."""
NAME: Final = "nursery of tests.rigs.forked_children"
"""Of the process that a fresh daemon does not have."""
_PR_SET_CHILD_SUBREAPER: Final = 36
_PR_SET_DUMPABLE: Final = 4
_FDS_MAX: Final = 64
_MESSAGE_BYTES: Final = 64 << 10


def preload() -> None:
    for name in MODULES:
        importlib.import_module(name)


def begin() -> None:
    """Fork this daemon's children from now on. Called before it has a second thread."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    daemon = os.getpid()
    if not os.fork():
        ours.close()
        _serve(theirs, daemon)
    theirs.close()
    nursery = _Nursery(ours)
    child.__dict__["subprocess"] = SimpleNamespace(Popen=nursery.start, DEVNULL=subprocess.DEVNULL)
    # A fork has the daemon's code, whatever somebody writes to the disk while tests run.
    child.__dict__["_LOADED"] = SimpleNamespace(check=lambda what: None, digest="")


class _Nursery:
    """The daemon's end."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._asking = threading.Lock()

    def start(
        self, command: Sequence[str], *, pass_fds: Sequence[int], stdin: int, env: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        """As `subprocess.Popen`. Raises OSError if the host has no room for a process."""
        module = command[2]
        if module not in MODULES or len(pass_fds) > _FDS_MAX:
            on_disk = LoadedCode(*PACKAGES).digest
            return subprocess.Popen(command, pass_fds=pass_fds, stdin=stdin, env={**env, CODE: on_disk})
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        umask = int(Path("/proc/self/status").read_text().partition("Umask:")[2].split()[0], 8)
        message = pickle.dumps((list(command), list(pass_fds), env, Path.cwd(), umask, mask))
        with self._asking, _subreaper():
            socket.send_fds(self._connection, [message], list(pass_fds))
            pid = int(self._connection.recv(32))
        if pid < 0:
            raise OSError(-pid, os.strerror(-pid))
        return Child(pid, command)


@contextlib.contextmanager
def _subreaper() -> Iterator[None]:
    """Let this process inherit a child. Only for now: the arena's holder is meant to be nobody's."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


class Child(subprocess.Popen[bytes]):
    """One that this process has not started itself."""

    def __init__(self, pid: int, command: Sequence[str]) -> None:
        self.pid = pid
        self.args = command
        self.returncode = None
        self.stdin = self.stdout = self.stderr = None
        self._child_created = True
        self._waitpid_lock = threading.Lock()
        self._sigint_wait_secs = 0.25


def _serve(connection: socket.socket, daemon: int) -> NoReturn:
    """Fork children until the daemon ends."""
    try:
        die_with(daemon)
        _show([NAME])
        for number in (signal.SIGINT, signal.SIGTERM):  # to the whole group: the daemon's to handle
            signal.signal(number, signal.SIG_IGN)
        while True:
            message, fds, _, _ = socket.recv_fds(connection, _MESSAGE_BYTES, _FDS_MAX)
            if not message:
                os._exit(0)
            try:
                answer = _fork(daemon, message, fds)
            except OSError as error:
                answer = -(error.errno or errno.EIO)
            for fd in fds:
                os.close(fd)
            connection.send(str(answer).encode())
    except BaseException:  # noqa: BLE001 - nobody above: the daemon's code is there
        traceback.print_exc()
        os._exit(1)


def _fork(daemon: int, message: bytes, fds: list[int]) -> int:
    """The pid of a child of the daemon's: it has become one, and has its command, when this returns."""
    told, tell = os.pipe()
    middle = os.fork()
    if not middle:
        middle = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            pid = -(error.errno or errno.EIO)
        if not pid:
            _become(daemon, middle, message, fds)
        os.write(tell, str(pid).encode())
        os._exit(0)
    os.close(tell)
    os.waitpid(middle, 0)
    with os.fdopen(told) as answer:
        return int(answer.read())  # to the end: until the child has closed what is not its own


def _become(daemon: int, middle: int, message: bytes, fds: list[int]) -> NoReturn:
    code: Any = 1
    try:
        command, numbers, environment, directory, umask, mask = pickle.loads(message)
        while os.getppid() == middle:  # until what forked this one has ended
            time.sleep(0.0002)
        if os.getppid() != daemon:  # which was killed just now
            sys.exit(0)
        lifeline.__dict__["LoadedCode"] = lambda *_: SimpleNamespace(is_of=lambda _: True)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(directory)
        os.umask(umask)
        for name in dir(resource):
            if name.startswith("RLIMIT_"):
                resource.setrlimit(getattr(resource, name), resource.prlimit(daemon, getattr(resource, name)))
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)
        _show(command)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _take(fds, numbers)
        module = command[2]
        sys.argv = [str(sys.modules[module].__file__), *command[3:]]
        del sys.modules[module]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as ended:
        code = ended.code
        if code is not None and not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:  # noqa: BLE001 - as the interpreter does it
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code or 0)


def _take(fds: list[int], numbers: list[int]) -> None:
    """Have these descriptors under their numbers, and none other but the streams."""
    above = max(numbers, default=2) + 1
    held = [fcntl.fcntl(fd, fcntl.F_DUPFD, above) for fd in fds]
    before = 3
    for fd in [*sorted(held), 1 << 20]:
        os.closerange(before, fd)
        before = fd + 1
    for fd, number in zip(held, numbers, strict=True):
        os.dup2(fd, number, inheritable=True)
        os.close(fd)
    with Path(os.devnull).open() as nothing:
        os.dup2(nothing.fileno(), 0)


def _show(command: Sequence[str]) -> None:
    """Have /proc say this command: it is in the memory where the kernel put the server's."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    text = b"\0".join(map(os.fsencode, command))[: end - start - 1]
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, text, len(text))
