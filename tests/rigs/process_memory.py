"""How much memory a daemon has, as the kernel accounts for it."""

from __future__ import annotations

from pathlib import Path

from tests.rigs.child_processes import children
from tests.rigs.daemon_process import DaemonProcess


def used_bytes(daemon: DaemonProcess) -> int:
    """Private memory of the daemon and its processes, and the arena's blocks: what `[ram] capacity` covers.

    A child that has not executed its program yet runs in the daemon's memory (vfork(2)), which counts once.
    """
    own = _command(daemon.pid)
    pids = [daemon.pid, *(child for child in children(daemon.pid) if _command(child) != own)]
    arena = sum(path.stat().st_blocks * 512 for path in (daemon.arena, daemon.data))
    return arena + sum(map(_private_bytes, pids))


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _private_bytes(pid: int) -> int:
    """Proportional set size without shared memory: the arena is counted by its blocks. 0: it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    except OSError:
        return 0
    fields = dict(line.split()[:2] for line in lines)  # none of a process that is ending
    return (int(fields.get("Pss:", 0)) - int(fields.get("Pss_Shmem:", 0))) * 1024
