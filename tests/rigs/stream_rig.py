"""A real proxy process over an arena of the test's own: for what needs no daemon."""

from __future__ import annotations

import itertools
import logging
import os
import select
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Self

from kvdepot.client.transports.stream import StreamArena
from kvdepot.core.calls import STREAM_READY
from kvdepot.server.io.child import spawn
from kvdepot.server.io.stream_wire import OPENING, Opening

from tests.rigs.patience import patient
from tests.rigs.stopping import stop

_numbers = itertools.count()


class Proxy:
    """`arena` is the client's end. `attachment` is a slot of the arena's attachment table."""

    def __init__(
        self, arena_fds: tuple[int, int, int], arena_id: int, size_bytes: int, attachment: int, session: bytes
    ) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="kvs", dir="/tmp"))
        self.path = self.directory / f"d.sock.stream-{next(_numbers)}"
        self.process, lifeline, self._pidfd = spawn(
            "kvdepot.server.io.stream_proxy",
            lambda socket_fd: (*arena_fds, 0, socket_fd, os.getpid(), 0o600, -1, self.path),
            arena_fds,
        )
        try:
            lifeline.send(OPENING.pack(Opening(attachment, session)))
            assert select.select([lifeline], [], [], patient(30))[0], "the proxy does not start"
            assert lifeline.recv(1) == STREAM_READY, "the proxy ended"
        except BaseException:  # what does not begin must not stay either
            lifeline.close()
            self._remove()
            raise
        self.arena = StreamArena(
            arena_id=arena_id,
            size_bytes=size_bytes,
            target=f"unix:{self.path}",
            session=session,
            lifeline=lifeline,
            on_end=lambda: None,
            log=logging.getLogger("test"),
        )

    def suspend(self) -> None:
        stop(self.process.pid)

    def resume(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.arena.end()
        self._remove()

    def _remove(self) -> None:
        self.kill()
        os.close(self._pidfd)
        shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
