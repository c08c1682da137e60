"""The audit log: one JSON line for each call of an operator, in a file of its own or in the daemon's log.

A file is written by a thread, because its device may hang. A caller waits for its line, for a second at most. A line
that is late, or cannot be written, goes to the daemon's log as well, so that no line is lost and nobody waits for a
device.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final

from kvdepot.server.platform.logs import AUDIT
from kvdepot.server.platform.own_files import open_own

WAIT_SECONDS: Final = 1.0
"""For a line, before its caller is answered; and at the end, for all lines."""
WAITING_MAX: Final = 10_000
"""Lines that wait for the file; further ones go to the daemon's log alone."""
_STEP_SECONDS: Final = 0.005
"""Between two looks whether the file is closed. At its end the daemon starts no thread: there may be no room."""
_FLAGS: Final = os.O_WRONLY | os.O_APPEND | os.O_CREAT


class AuditLog:
    """Writes lines. Everything but `_run` belongs to the loop's thread."""

    def __init__(self, path: str, log: logging.Logger, count: Callable[[str], None]) -> None:
        """Open the log. Raise OSError if the file cannot be opened. Without a path, lines go to the daemon's log."""
        self._log = log
        self._count = count
        self._events = logging.getLogger(AUDIT)
        self._path = Path(path) if path else None
        self._waiting = 0
        self._ended = threading.Event()
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        if self._path is not None:
            self._fd = open_own(self._path, _FLAGS)
            threading.Thread(target=self._run, name="kvdepot-audit", daemon=True).start()

    async def write(self, fields: Mapping[str, Any], *, level: int = logging.INFO) -> None:
        """Write a line. Return when it is written, or elsewhere. `level` counts in the daemon's log alone."""
        written = self.put(fields, level=level)
        if written is None:
            return
        try:
            await asyncio.wait_for(asyncio.shield(written), WAIT_SECONDS)
        except TimeoutError:
            self._to_daemons_log(fields, "the audit file took none for 1 s")

    def put(self, fields: Mapping[str, Any], *, level: int = logging.INFO) -> asyncio.Future[None] | None:
        """Write a line, and do not wait. Return the future of its end; None if nobody has to wait."""
        if self._path is None:
            self._events.log(level, "operator call: %s", json.dumps(fields), extra={"audit": fields})
            return None
        if self._waiting >= WAITING_MAX:
            self._to_daemons_log(fields, f"{WAITING_MAX} lines wait for the audit file")
            return None
        self._waiting += 1
        loop = asyncio.get_running_loop()
        written: asyncio.Future[None] = loop.create_future()
        line = json.dumps(fields).encode() + b"\n"

        def tell(trouble: str) -> None:
            self._waiting -= 1
            if trouble:
                self._to_daemons_log(fields, trouble)
            if not written.done():
                written.set_result(None)

        def work() -> None:
            trouble = self._append(line)
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(tell, trouble)

        self._work.put(work)
        return written

    def reopen(self) -> None:
        """Open the file again, which may have been moved away. If that fails, the open one stays in use."""
        if self._path is not None:
            self._work.put(self._reopen)

    async def close(self) -> None:
        """Write the waiting lines, for at most a second, and close the file. Lines that fail are still reported."""
        if self._path is not None:
            self._work.put(None)
            until = time.monotonic() + WAIT_SECONDS
            while not self._ended.is_set() and time.monotonic() < until:  # noqa: ASYNC110 - a thread sets it
                await asyncio.sleep(_STEP_SECONDS)

    def _to_daemons_log(self, fields: Mapping[str, Any], reason: str) -> None:
        self._count("failed_audit_lines")
        self._log.error("audit line not written to its file: %s: %s", reason, json.dumps(fields))

    # The thread

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()
        os.close(self._fd)
        self._ended.set()

    def _append(self, line: bytes) -> str:
        """Return why the line is not in the file; empty if it is."""
        try:
            while line:
                line = line[os.write(self._fd, line) :]
        except OSError as error:
            return error.strerror or str(error)
        return ""

    def _reopen(self) -> None:
        assert self._path is not None
        try:
            fd = open_own(self._path, _FLAGS)
        except OSError as error:
            self._log.error("audit file not opened again: %s: %s", self._path, error.strerror or error)
            return
        os.close(self._fd)
        self._fd = fd
