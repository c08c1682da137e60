"""Who a process is, and whether it still lives: pid, start time, boot id, pidfd (DESIGN 4)."""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
from pathlib import Path

from kvdepot.server.engine.identity import Liveness, ProcessIdentity

SO_PEERPIDFD = 77
"""Linux 6.5; Python's socket module has no name for it before 3.14."""
_SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_UCRED = struct.Struct("iII")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def read_boot_id() -> bytes:
    """16 bytes that change with every boot of the kernel."""
    return bytes.fromhex(_BOOT_ID.read_text().strip().replace("-", ""))


def start_ticks(pid: int) -> int | None:
    """Start time in clock ticks since boot (field 22 of /proc/PID/stat).

    None when there is no such process, or /proc hides it from this user (hidepid).
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    # The second field is the name in parentheses and may hold anything, parentheses too.
    return int(stat.rpartition(b")")[2].split()[19])


def has_ended(pidfd: int) -> bool:
    """A pidfd is readable once every thread of its process has ended."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def peer_credentials(connection: socket.socket) -> tuple[int, int]:
    """(pid, uid) of who connected; pid 0 when it is in a PID namespace that is not visible from here."""
    pid, uid, _ = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return pid, uid


def peer_pidfd(connection: socket.socket, pid: int) -> int | None:
    """A pidfd of who connected, owned by the caller; None when the kernel cannot name it or it is gone.

    Raises OSError where no descriptor is left for it: a process that could be watched is not taken unwatched.
    """
    try:
        fd = connection.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
        os.set_inheritable(fd, False)
        return fd
    except OSError as error:  # a kernel before 6.5, or a peer that is already reaped
        if error.errno in _SCARCE:
            raise
    try:
        return os.pidfd_open(pid) if pid > 0 else None
    except OSError as error:
        if error.errno in _SCARCE:
            raise
        return None


def open_pidfd(pid: int) -> int | None:
    if pid <= 0:
        return None
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def watch_process(identity: ProcessIdentity, boot_id: bytes) -> tuple[Liveness, int | None]:
    """What is known of a process written down earlier, and a pidfd (the caller's) while it lives.

    The pidfd is opened before the start time is compared, so that a reused pid is never mistaken for it.
    """
    if identity.boot_id != boot_id:
        return Liveness.DEAD, None
    if identity.pid <= 0:
        return Liveness.UNKNOWN, None
    pidfd = open_pidfd(identity.pid)
    ticks = start_ticks(identity.pid)
    if ticks is None and pidfd is not None and not has_ended(pidfd):  # /proc hides it (hidepid)
        _close(pidfd)
        return Liveness.UNKNOWN, None
    if ticks is None or ticks != identity.start_ticks:
        _close(pidfd)
        return Liveness.DEAD, None
    if pidfd is None:
        return Liveness.UNKNOWN, None
    if has_ended(pidfd):
        _close(pidfd)
        return Liveness.DEAD, None
    return Liveness.ALIVE, pidfd


def liveness(identity: ProcessIdentity, boot_id: bytes) -> Liveness:
    state, pidfd = watch_process(identity, boot_id)
    _close(pidfd)
    return state


def _close(fd: int | None) -> None:
    if fd is not None:
        os.close(fd)
