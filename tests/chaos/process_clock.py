"""Time in which this process ran: a process that was stopped has lost none of it."""

from __future__ import annotations

import threading
import time
from pathlib import Path

_BEAT_SECONDS = 0.05
_SCHEDSTAT = Path("/proc/thread-self/schedstat")
_NANOSECONDS = 1e9


def queued_seconds() -> float:
    """How long this thread has waited for a processor since it began; 0 where the kernel does not say.

    A thread that sleeps a lot, as the clock's does, gets one at once; one that has just worked may wait for seconds.
    """
    try:
        return int(_SCHEDSTAT.read_text().split()[1]) / _NANOSECONDS
    except (OSError, IndexError):
        return 0.0


class ProcessClock:
    """Counts beats of a thread. So whoever waits long by this clock was not stopped, nor was the machine."""

    def __init__(self) -> None:
        self._seconds = 0.0
        threading.Thread(target=self._beat, name="process-clock", daemon=True).start()

    def __call__(self) -> float:
        return self._seconds

    def _beat(self) -> None:
        before = time.monotonic()
        while True:
            time.sleep(_BEAT_SECONDS)
            now = time.monotonic()
            self._seconds += min(now - before, 2 * _BEAT_SECONDS)
            before = now
