"""The daemon's side of the holder (`holder.py`): takes what it holds at a start, and has it hold the present arena."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NoReturn

from kvdepot.core.errors import ArenaInUse
from kvdepot.server.arena import holder
from kvdepot.server.arena.arena_file import ArenaFile, KeptFiles
from kvdepot.server.config.schema import HOLD_SUFFIX
from kvdepot.server.platform.accepting import bound_socket
from kvdepot.server.platform.file_lock import LOCK_SUFFIX, FileLock
from kvdepot.server.platform.logs import LogThrottle
from kvdepot.server.platform.own_thread import in_own_thread
from kvdepot.server.platform.processes import peer_credentials

AGAIN_SECONDS: Final = 5.0
PAUSE_SECONDS: Final = 0.5
"""After the end of a holder: one that ends at once is not started in a loop."""
_ANSWER_SECONDS: Final = 3.0
_LATE_SECONDS: Final = 15.0
"""On a busy machine, where a wait is better than an arena without a holder, or RAM that begins empty."""
_MODE: Final = 0o600
_PROGRAM: Final = (sys.executable, "-I", "-S", holder.__file__)


def hold_path(arena_path: Path) -> Path:
    return arena_path.with_name(f"{arena_path.name}{HOLD_SUFFIX}")


@contextlib.contextmanager
def _short(path: Path) -> Iterator[Path]:
    """Yield a path of the same file that fits into a socket's address (unix(7)), however long its directory's is."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield Path(f"/proc/self/fd/{folder}/{path.name}")
    finally:
        os.close(folder)


def listen(arena_path: Path) -> tuple[socket.socket, FileLock]:
    """Return the socket of a new holder, and the lock that it keeps. Raise ArenaInUse if another one lives."""
    path = hold_path(arena_path)
    lock = FileLock(path.with_name(f"{path.name}{LOCK_SUFFIX}"), "the arena")
    try:
        with _short(path) as short:
            return bound_socket(short, socket.SOCK_SEQPACKET, _MODE, -1), lock
    except OSError:
        lock.close()
        raise


class Connection:
    """A connection to the holder of an arena. Raises OSError if there is none, or if it is of another user."""

    def __init__(self, arena_path: Path, answer_s: float = _ANSWER_SECONDS) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(answer_s)
        files: list[int] = []
        try:
            with _short(hold_path(arena_path)) as path:
                self.socket.connect(os.fspath(path))
            self.pid, uid, _ = peer_credentials(self.socket)
            if uid != os.geteuid():
                raise PermissionError(f"{hold_path(arena_path)} is of uid {uid}")
            message, files, flags, _ = socket.recv_fds(
                self.socket, len(holder.GREETING), holder.FILES_MAX, socket.MSG_CMSG_CLOEXEC
            )
            if message not in (holder.GREETING, holder.FORMER_GREETING) or flags & socket.MSG_CTRUNC:
                raise OSError(f"the holder said {message!r}, with {len(files)} files")
        except OSError:
            for file in files:
                os.close(file)
            self.socket.close()
            raise
        for file in files[:1]:
            os.close(file)
        self.former = message == holder.FORMER_GREETING
        """Whether it is of an earlier release: it gives what it holds, and cannot hold an arena of this one."""
        self.held: list[int] = files[1:]
        """The generations and data that it holds. The caller owns them.

        The tables count by their name alone: who deletes it wants an empty arena.
        """

    def hold(self, arena: ArenaFile) -> None:
        """Have it hold this arena, and nothing else. Raises OSError."""
        if self.former:
            raise OSError(f"the holder {self.pid} is of an earlier release: restart it")
        socket.send_fds(self.socket, [holder.HOLD], arena.files)
        if self.socket.recv(len(holder.HOLD)) != holder.HOLD:
            raise ConnectionResetError("the holder has ended")

    def close(self) -> None:
        self.socket.close()


def held_files(arena_path: Path) -> KeptFiles:
    """Return what a holder has of this arena. The caller owns the descriptors.

    A holder that does not answer for 15 s counts as none, because a start must end (I3). RAM then begins empty.
    """
    with contextlib.suppress(OSError):
        connection = Connection(arena_path, _LATE_SECONDS)
        connection.close()
        return KeptFiles(others=connection.held)
    return KeptFiles()


class Holding:
    """Sees to it that somebody holds the arena for the next daemon.

    A supervisor with a store for descriptors does: then no holder is started (`may_start`), because a supervisor ends
    what a service has started. One that runs already is told in any case.
    """

    def __init__(
        self, arena: ArenaFile, *, may_start: bool, count: Callable[[str], None],
        loop: asyncio.AbstractEventLoop, log: logging.Logger,
    ) -> None:  # fmt: skip
        self._arena = arena
        self._count = count
        self._may_start = may_start
        self._loop = loop
        self._log = log
        self._throttle = LogThrottle(loop.time)
        self._connection: Connection | None = None
        self._again: asyncio.Handle | None = None
        self._looking: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Find or start a holder, and stay connected until `close`. Blocks, and never raises.

        Without a holder the daemon works as well. It goes on looking for one.
        """
        self._connected(self._try())

    def close(self) -> None:
        """Leave the arena to the holder."""
        if self._again is not None:
            self._again.cancel()
        if self._looking is not None:
            self._looking.cancel()
        self._disconnect()

    def _try(self) -> Connection | Exception:
        """Return a connection to a holder of this arena, or why there is none. On any thread."""
        try:
            return self._connect()
        except (OSError, ArenaInUse, subprocess.SubprocessError) as error:
            return error

    def _connect(self) -> Connection:
        try:
            connection = Connection(self._arena.path)
        except OSError:
            if not self._may_start:
                raise
            self._start_holder()
            connection = Connection(self._arena.path)
        for file in connection.held:
            os.close(file)
        try:
            connection.hold(self._arena)
        except OSError:
            connection.close()
            raise
        return connection

    def _start_holder(self) -> None:
        """Start a holder that has the arena from its first moment, however long its start takes.

        The files wait in the queue of its listening socket. So nothing depends on a daemon that lives on.
        """
        listener, lock = listen(self._arena.path)
        with listener, lock:
            listener.listen()
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as giver:
                giver.settimeout(_ANSWER_SECONDS)
                with _short(hold_path(self._arena.path)) as path:
                    giver.connect(os.fspath(path))
                socket.send_fds(giver, [holder.HOLD], self._arena.files)
            starting = subprocess.Popen(
                (*_PROGRAM, str(listener.fileno()), hold_path(self._arena.path)),
                pass_fds=(listener.fileno(), lock.descriptor), start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        with contextlib.suppress(subprocess.TimeoutExpired):
            if code := starting.wait(_LATE_SECONDS):
                raise subprocess.CalledProcessError(code, _PROGRAM)

    def _connected(self, found: Connection | Exception) -> None:
        if isinstance(found, Exception):
            if self._may_start:
                self._count("holder_failures")
                if self._throttle.due("holder"):
                    self._log.warning("nobody holds the arena for the next daemon, which may begin empty: %s", found)
            self._again = self._loop.call_later(AGAIN_SECONDS, self._look_again)
        else:
            self._connection = found
            self._loop.add_reader(found.socket, self._ended)
            self._log.info("arena held for the next daemon by pid %d", found.pid)

    def _look_again(self) -> None:
        self._looking = self._loop.create_task(self._look())

    async def _look(self) -> None:
        """Try on another thread: a holder that hangs stops neither the daemon nor its end."""
        try:
            found = await in_own_thread(self._try)
        except OSError as error:
            found = error
        self._connected(found)

    def _ended(self) -> None:
        """Handle the end of the holder: it sends nothing of itself."""
        self._disconnect()
        self._again = self._loop.call_later(PAUSE_SECONDS, self._look_again)

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._loop.remove_reader(self._connection.socket)
            self._connection.close()
            self._connection = None


def become_holder(arena_path: Path, ready: Callable[[], None]) -> NoReturn:
    """Be the holder of an arena, whichever daemons come and go, once no other one holds it. Raise OSError.

    `ready` is called when daemons can connect.
    """
    while True:
        try:
            listener, lock = listen(arena_path)
        except ArenaInUse:
            threading.Event().wait(AGAIN_SECONDS)
            continue
        for descriptor in (listener.fileno(), lock.descriptor):
            os.set_inheritable(descriptor, True)
        listener.listen()
        ready()
        os.execv(sys.executable, [*_PROGRAM, str(listener.fileno()), str(hold_path(arena_path)), holder.STAY])  # noqa: S606 - a script of ours
