"""The I/O worker: a process that reads and writes objects between a directory and the arena.

Started by the daemon as `python -m kvdepot.server.io.worker DATA SOCKET_FD PARENT_PID DIRECTORY GUARD
[BUCKET [PEER]]`. DATA: of `pack_parts`, empty if its jobs have no extents. GUARD: the token of `directory_guard`, may
be empty. BUCKET: packed `BucketSettings`, where files are the objects of a bucket. PEER: packed `PeerSettings`, where
they are the objects of another daemon. A spare worker learns only later, by `ServePeer`, which one. It does what it is
told, and ends with its parent, with its socket, or killed: it has nothing to tidy up.

Its first thread reads the socket, so that the end of the stream ends the process whatever else hangs. Two more do the
jobs, each all of one: while one waits for the medium, the other verifies (both happen without the GIL).
What that gives and costs was measured: ADR 0012.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Final

from kvdepot.core.data_mapping import unpack_parts
from kvdepot.server.io import directory_guard
from kvdepot.server.io.arena_pages import ArenaPages
from kvdepot.server.io.bucket import Bucket, BucketSettings
from kvdepot.server.io.context import Context, NixlLink
from kvdepot.server.io.direct_io import outcome_of
from kvdepot.server.io.jobs import ANSWERS, JOBS, JOBS_PER_WORKER, STARTED, Answer, Job, ServePeer
from kvdepot.server.io.lifeline import ProcessEndError, die_with, exit_code
from kvdepot.server.io.perform import perform
from kvdepot.server.storage.base import IoOutcome

_IDLE_SECONDS: Final = 5.0
"""Then files are closed: an open one keeps the blocks of what was removed."""
_WHY_CHARACTERS_MAX: Final = 100


def main(arguments: list[str]) -> int:
    parts = unpack_parts(arguments[0])
    socket_fd, parent = map(int, arguments[1:3])
    directory = arguments[3]
    entrance = Entrance(directory, arguments[4])
    packed_bucket, packed_peer = [*arguments[5:], "", ""][:2]
    bucket = Bucket(BucketSettings.unpack(packed_bucket)) if packed_bucket else None
    die_with(parent)
    for ending in (signal.SIGINT, signal.SIGTERM):  # for the daemon, which drains first, and then ends this process
        signal.signal(ending, signal.SIG_IGN)
    arena = ArenaPages(parts) if parts else None
    threading.excepthook = _end
    daemon = socket.socket(fileno=socket_fd)
    jobs: queue.SimpleQueue[tuple[int, Job]] = queue.SimpleQueue()
    sending = threading.Lock()
    path_works = threading.Event()
    if arena is not None and not packed_peer:  # its death is awaited, and takes as long as it has pages (ADR 78)
        threading.Thread(target=arena.populate, args=(path_works,), daemon=True).start()
    make_peer = _peers(packed_peer, arena) if packed_peer else None
    contexts = []
    for _ in range(JOBS_PER_WORKER):
        context = Context(directory, bucket=bucket)
        if make_peer is not None:
            context = make_peer(directory)
        elif arena is not None:
            context = Context(directory, arena.view, arena.present, bucket)
        contexts.append(context)
        serving = (jobs, context, entrance, daemon, sending, path_works)
        threading.Thread(target=_serve, args=serving, daemon=True).start()
    with sending, contextlib.suppress(ConnectionError):
        daemon.sendall(ANSWERS.pack(Answer(IoOutcome.OK), STARTED))
    stream = daemon.makefile("rb")
    while (frame := JOBS.read(stream)) is not None:
        number, job = frame
        if isinstance(job, ServePeer):
            _serve_peer(contexts, job.peer)
        else:
            jobs.put((number, job))
    return 0


def _serve_peer(contexts: Sequence[Context], packed: str) -> None:
    from kvdepot.server.io.peer_wire import PeerSettings

    settings = PeerSettings.unpack(packed)
    for context in contexts:
        if context.peer is not None:
            context.peer.use(settings)


def _peers(packed: str, arena: ArenaPages | None) -> Callable[[str], Context]:
    """Return what makes the context of a thread: it has a connection of its own, and all have one NIXL agent."""
    from kvdepot.server.io.peer_client import Peer  # TLS, which other workers never need
    from kvdepot.server.io.peer_wire import Lane, PeerSettings

    import_module("kvdepot.server.io.peer_objects")  # `perform` needs it: here, no lookup waits for the import
    settings = PeerSettings.unpack(packed)
    nixl: NixlLink | None = None
    why = settings.no_nixl
    if settings.lane is Lane.NIXL and not why and arena is not None:
        from kvdepot.server.io.nixl_agent import NixlError, ReadingAgent

        try:
            nixl = ReadingAgent(arena.view, settings.timeout_seconds)
        except NixlError as error:
            why = str(error)[:_WHY_CHARACTERS_MAX]
    if arena is None:
        return lambda directory: Context(directory, peer=Peer(settings, why))
    return lambda directory: Context(directory, arena.view, arena.present, peer=Peer(settings, why), nixl=nixl)


class Entrance:
    """The way into a guarded directory, before the first job. A thread that does jobs takes it, because it may hang."""

    def __init__(self, directory: str, guard: str) -> None:
        self._path = Path(directory, directory_guard.WORKERS_LOCK)
        self._guard = guard
        self._entering = threading.Lock()
        self._entered = not guard

    def enter(self) -> Answer | None:
        """Enter the directory. Return None if inside.

        End the process if the directory belongs to another daemon by now.
        """
        with self._entering:
            if self._entered:
                return None
            try:
                lock_fd = directory_guard.enter(self._path, self._guard)
            except OSError as error:
                return Answer(outcome_of(error), str(error))
            if lock_fd is None:
                os._exit(1)
            self._entered = True  # and the descriptor stays open, and with it the lock
            return None


def _serve(
    jobs: queue.SimpleQueue[tuple[int, Job]], context: Context, entrance: Entrance, daemon: socket.socket,
    sending: threading.Lock, path_works: threading.Event,
) -> None:  # fmt: skip
    while True:
        try:
            number, job = jobs.get(timeout=_IDLE_SECONDS)
        except queue.Empty:
            context.close()
            continue
        answer = entrance.enter() or perform(job, context)
        frame = ANSWERS.pack(answer.cut(), number)
        if answer.outcome is IoOutcome.OK:
            path_works.set()
        with sending, contextlib.suppress(ConnectionError):  # the first thread ends the process
            daemon.sendall(frame)


def _end(failure: threading.ExceptHookArgs) -> None:
    """End the process after a job that raised. The daemon sees this as any other death."""
    if isinstance(failure.exc_value, ProcessEndError):
        print(f"kvdepotd: I/O worker {os.getpid()} ends: {failure.exc_value}", file=sys.stderr)  # noqa: T201
    else:
        sys.excepthook(failure.exc_type, failure.exc_value or failure.exc_type(), failure.exc_traceback)
    os._exit(1)


if __name__ == "__main__":
    code = exit_code(main)
    sys.stderr.flush()
    os._exit(code)  # not waiting for threads that hang
