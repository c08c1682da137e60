"""Processes that stand still. SIGSTOP takes effect thread by thread: until then, the other threads may still work."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.rigs.patience import wait_until


def stop(pid: int) -> None:
    """Stop a process, and return when none of its threads runs any more."""
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: _stands_still(pid), f"process {pid} stands still")


@contextmanager
def stopped(*pids: int) -> Iterator[None]:
    """Stop processes, and let them continue at the end, also after a failure. They may be killed meanwhile."""
    try:
        for pid in pids:
            stop(pid)
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def state(pid: int) -> str:
    """Return one letter of proc(5) for a process or thread: R, S, D, T, Z; empty when there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def _stands_still(pid: int) -> bool:
    """Return whether each thread is stopped, ended, or hangs in the kernel (D), where it cannot be stopped."""
    try:
        threads = [int(thread.name) for thread in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return True
    return all(state(thread) in ("", "T", "t", "D", "Z", "X") for thread in threads)
