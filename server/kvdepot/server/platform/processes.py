"""The identity of a process, and whether it lives: pid, start time, boot id, pidfd (design.md#attachments)."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import socket
import struct
from functools import cache
from pathlib import Path

from kvdepot.server.platform.identity import Liveness, ProcessIdentity

SO_PEERPIDFD = 77
"""Linux 6.5; Python's socket module has no name for it before 3.14."""
_PIDFD_GET_PID_NAMESPACE = 0xFF05
"""Linux 6.11."""
_NO_DESCRIPTOR = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
_UCRED = struct.Struct("iII")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def read_boot_id() -> bytes:
    """Return 16 bytes that change with every boot of the kernel."""
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
    """Return whether the process has ended: a pidfd is readable once every thread of its process has ended."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def peer_credentials(connection: socket.socket) -> tuple[int, int, int]:
    """Return (pid, uid, gid) of the peer; pid 0 if it is in a PID namespace that is not visible from here."""
    pid, uid, gid = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return pid, uid, gid


def pid_namespace(pid: int, pidfd: int | None) -> int:
    """Return the inode of a process's PID namespace; 0 if the kernel does not show it.

    The kernel shows it to the process's own user and to CAP_SYS_PTRACE. The caller proves afterwards that the process
    has not ended: else the pid may be another's.
    """
    if pidfd is not None:
        with contextlib.suppress(OSError):
            namespace = fcntl.ioctl(pidfd, _PIDFD_GET_PID_NAMESPACE, 0)
            try:
                return os.fstat(namespace).st_ino
            finally:
                os.close(namespace)
    try:
        return Path(f"/proc/{pid}/ns/pid").stat().st_ino if pid > 0 else 0
    except OSError:
        return 0


def peer_pidfd(connection: socket.socket, pid: int) -> int | None:
    """Return a pidfd of the peer, owned by the caller; None if the kernel cannot name it or the peer is gone.

    Raise OSError without a descriptor: the peer's death would go unnoticed.
    """
    try:
        fd = connection.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
        os.set_inheritable(fd, False)
        return fd
    except OSError as error:
        if error.errno in _NO_DESCRIPTOR:
            raise
        return open_pidfd(pid)  # a kernel before 6.5, or a peer that is already reaped


def open_pidfd(pid: int) -> int | None:
    """Return a pidfd, owned by the caller; None without such a process. Raise OSError without a descriptor."""
    if pid <= 0:
        return None
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno in _NO_DESCRIPTOR:
            raise
        return None


def process_number(pidfd: int) -> int:
    """Return the kernel's number of a process, unique in this boot and independent of PID namespaces.

    It is the inode of the pidfd from Linux 6.9 on. Before, all pidfds have the inode of every anonymous file: 0.
    """
    found = os.fstat(pidfd)
    return 0 if found.st_dev == _anonymous_device() else found.st_ino


@cache
def _anonymous_device() -> int:
    fd = os.eventfd(0)
    try:
        return os.fstat(fd).st_dev
    finally:
        os.close(fd)


def identify(pid: int, pidfd: int | None, boot_id: bytes) -> ProcessIdentity:
    """Return the identity of a process that `pidfd` holds, or of a child that is not reaped yet.

    A process that /proc hides (hidepid), or of another PID namespace (pid 0), has no pid here, and its number if
    there is one. Raise OSError.
    """
    ticks = start_ticks(pid) if pid > 0 else None
    if ticks is not None:
        return ProcessIdentity(pid, ticks, boot_id)
    return ProcessIdentity(0, 0 if pidfd is None else process_number(pidfd), boot_id)


def watch_process(identity: ProcessIdentity, boot_id: bytes) -> tuple[Liveness, int | None]:
    """Return what is known of a process recorded earlier, and a pidfd, owned by the caller, while it lives.

    The pidfd is opened before the start time is compared, so that a reused pid is never mistaken for it.
    """
    if identity.boot_id != boot_id:
        return Liveness.DEAD, None
    if identity.pid <= 0:
        return Liveness.UNKNOWN, None
    try:
        pidfd = open_pidfd(identity.pid)
    except OSError:
        return Liveness.UNKNOWN, None
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
