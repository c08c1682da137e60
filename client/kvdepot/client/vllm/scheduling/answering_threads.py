"""What the threads that an answer waits for lack of processors (docs/adr/0073, points 7 and 8)."""

from __future__ import annotations

import os
from threading import get_native_id
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kvdepot.client.session import DepotSession

_SCHEDSTAT: Final = "/proc/{}/schedstat"
_STAT: Final = "/proc/{}/stat"
_BYTES_MAX: Final = 1024


class AnsweringThreads:
    """The scheduler's thread, which is the caller's, the session's, which reads answers, and the daemon's loop.

    A thread counts as one that lacks nothing where the kernel does not say.
    """

    def __init__(self, session: DepotSession) -> None:
        self._session = session

    def starved_seconds(self) -> float:
        """Return how long they have been ready without a processor, all of them together.

        A wait counts once it is over. Source: the second number of schedstat, in ns
        (Documentation/scheduler/sched-stats.rst of Linux).
        """
        return sum(map(_starved_seconds, (get_native_id(), *self._session.threads)))

    def is_ready(self) -> bool:
        """Return whether another one than the caller's runs, or waits for a processor (`R` in proc_pid_stat(5))."""
        return any(_read(_STAT, thread).rpartition(b") ")[2].startswith(b"R") for thread in self._session.threads)


def _starved_seconds(thread: int) -> float:
    try:
        return int(_read(_SCHEDSTAT, thread).split()[1]) * 1e-9
    except (IndexError, ValueError):
        return 0.0


def _read(path: str, thread: int) -> bytes:
    """Return what the kernel says of a thread; empty if it says nothing."""
    try:
        fd = os.open(path.format(thread), os.O_RDONLY)  # of `Path`, each would take three times as long
        try:
            return os.read(fd, _BYTES_MAX)
        finally:
            os.close(fd)
    except OSError:
        return b""
