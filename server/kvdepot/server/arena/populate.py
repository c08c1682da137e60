"""The pages of the arena's data, allocated and touched piece by piece by a few threads (design.md#arena).

A first touch costs ten times a copy, so it happens before an extent is granted: the ready
part grows from the data's start and serves meanwhile.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import heapq
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

MADV_POPULATE_WRITE = 23
"""Linux 5.14: fault the pages in, writable, without changing them; an error instead of SIGBUS (madvise(2))."""
PIECE_BYTES = 32 << 20
RETRY_SECONDS = 60.0
"""How soon to try again where there was no room: somebody else may have had it for a moment."""
_MLOCK_ONFAULT = 1
_NO_ROOM = {errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFAULT}


@dataclass(frozen=True, slots=True)
class Growth:
    """How far the arena is populated. `reason`: why it does not grow now; it is tried again. `done`: it is whole."""

    ready_bytes: int
    done: bool
    reason: str = ""
    locked: bool = False


class Populator:
    """Populates the mapped data from its start; `report` is called from its threads, in growing order.

    What an adopted arena has already costs a fraction of a first touch: it is only mapped and locked here.
    Where there is no room the growth pauses with a reason: what is ready stays in service. Where the limits
    allow it the whole mapping is marked beforehand, so that a page is locked into memory by
    the fault that makes it: locking piece by piece afterwards walks every page once more and
    took a third of the time (docs/benchmarks.md).
    """

    def __init__(
        self,
        *,
        fd: int,
        address: int,
        size_bytes: int,
        threads: int,
        report: Callable[[Growth], None],
        memory_alone: bool = False,
        lock_too: tuple[tuple[int, int], ...] = (),
        retry_seconds: float = RETRY_SECONDS,
    ) -> None:
        self._fd = fd
        self._address = address
        self._size = size_bytes
        self._threads_max = threads
        self._report = report
        self._memory_alone = memory_alone  # no file system has a limit
        self._retry_seconds = retry_seconds
        self._lock_too = lock_too  # (address, length) of what has its pages already: the tables
        self._pieces = list(range(0, size_bytes, PIECE_BYTES))  # a heap: those that have no pages, and nobody tries
        self._finished: set[int] = set()
        self._ready = 0
        self._reason = ""
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._locked = False
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        self._libc.mlock2.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        self._thread = threading.Thread(target=self._run, name="populate", daemon=True)

    def start(self) -> None:
        self._mark_locked()
        self._thread.start()

    def stop(self) -> None:
        """Stop after the pieces in progress, each of which takes a fraction of a second."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _mark_locked(self) -> None:
        for address, length in self._lock_too:
            self._libc.mlock2(address, length, _MLOCK_ONFAULT)
        self._locked = self._locked or not self._libc.mlock2(self._address, self._size, _MLOCK_ONFAULT)

    def _run(self) -> None:
        """Run rounds of all threads until the arena is whole. After a round without room, one piece must work first."""
        while not self._stop.is_set():
            self._round()
            if not self._pieces:
                self._tell(done=True)
                return
            while self._reason and not self._stop.wait(self._retry_seconds):
                self._mark_locked()  # memory may have been short for that as well
                self._reason = ""
                self._step()

    def _round(self) -> None:
        """Run one round. This thread takes part, so that a host without room for more threads still populates."""
        threads: list[threading.Thread] = []
        with contextlib.suppress(RuntimeError):  # can't start new thread
            for number in range(1, self._threads_max):
                thread = threading.Thread(target=self._work, name=f"populate-{number}", daemon=True)
                thread.start()
                threads.append(thread)
        self._work()
        for thread in threads:
            thread.join()

    def _work(self) -> None:
        while not self._stop.is_set() and not self._reason and self._step():
            pass

    def _step(self) -> bool:
        """Populate the first remaining piece. Return False if there is none."""
        with self._lock:
            if not self._pieces:
                return False
            piece = heapq.heappop(self._pieces)
        try:
            reason = self._populate(piece, min(PIECE_BYTES, self._size - piece))
        except Exception as error:  # noqa: BLE001 - a piece that is lost would never be tried again
            reason = f"the arena's bytes from {piece} on: {error!r}"
        self._finish(piece, reason)
        return True

    def _populate(self, offset: int, length: int) -> str:
        """Populate a piece. Return why it has no pages; empty if it has.

        Of a file they are allocated first, so that the limit of its file system is no fault. Of memory they are not: an
        allocation by descriptor does not know that this mapping asks for huge pages.
        """
        code = errno.EINVAL
        if not self._memory_alone or (code := self._touch(offset, length)) == errno.EINVAL:
            try:
                os.posix_fallocate(self._fd, offset, length)
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    return f"the arena's file cannot grow beyond {offset} bytes: {error.strerror}"
                return f"no room for more than {offset} of {self._size} bytes: {error.strerror}"
            code = 0 if self._memory_alone else self._touch(offset, length)
        if code not in (0, errno.EINVAL):  # EINVAL, before 5.14: allocated is enough, the first writer touches
            return f"no room for more than {offset} of {self._size} bytes: {os.strerror(code)}"
        return ""

    def _touch(self, offset: int, length: int) -> int:
        """Fault pages in. Return the error's number, or 0."""
        failed = self._libc.madvise(self._address + offset, length, MADV_POPULATE_WRITE)
        return ctypes.get_errno() if failed else 0

    def _finish(self, piece: int, reason: str) -> None:
        with self._lock:
            changed = False
            if reason:
                heapq.heappush(self._pieces, piece)
                changed = self._pieces[0] == piece  # the first without room: threads find them out of order
                if changed:
                    self._reason = reason
            else:
                self._finished.add(piece)
                while self._ready in self._finished:
                    self._finished.remove(self._ready)
                    self._ready += PIECE_BYTES
                    changed = True
            if changed:
                self._tell(done=False)

    def _tell(self, *, done: bool) -> None:
        self._report(Growth(min(self._ready, self._size), done, self._reason, self._locked))
