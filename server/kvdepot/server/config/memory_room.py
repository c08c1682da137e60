"""The memory for the RAM tier: what host, cgroup (v1 and v2) and file system allow."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from kvdepot.core import proc_text

MIB = 1 << 20
CAPACITY_BYTES_MIN = 320 * MIB
_MOUNTINFO = Path("/proc/self/mountinfo")
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/proc/self/cgroup")
OPENER_RESERVE_BYTES = 32 * MIB
"""Private memory of a tier's opening process while it is idle, as it is between openings."""
COORDINATOR_RESERVE_BYTES = 32 * MIB
"""Private memory of a shared tier's coordinator without what it notes of files."""
PEER_RESERVE_BYTES = 16 * MIB
"""What TLS and the names of certificates take of a worker of a peer tier."""
OWNERS_RESERVE_BYTES = 32 * MIB
"""What a tier of several peers knows of who has what: 65,536 objects with the names of their files."""
SCOUT_RESERVE_BYTES = 48 * MIB
"""Private memory of the scout of a tier of several peers, without summaries."""
SUMMARY_SHARE = 1 << 15
"""The words of a summary in the process that sends take this part of RAM: 8 bytes for an object of 256 KiB."""
NIXL_RESERVE_BYTES = 32 * MIB
"""What NIXL takes of a process that uses it: NumPy, its own memory, and the buffers of UCX. Measured: 15 to 24 MiB."""
PEER_SERVER_RESERVE_BYTES = 32 * MIB
"""What the process that sends to peers has for its connections, in addition to what a worker has."""
FILE_RESERVE_BYTES = 96
"""What a janitor notes of a file, while it puts them in order (ADR 0018)."""
HANDLE_RESERVE_BYTES = 200
"""What an object that only a lower tier has takes of the daemon's memory: its node, and its entry in the tier."""


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes a new arena could take, and which limit says so."""

    available_bytes: int
    limit: str


def memory_room() -> Room:
    """Return the tightest of the host's available memory and the cgroups' limits, as far as the kernel tells them."""
    rooms = [Room(limit - used, f"memory limit of cgroup {path}") for path, limit, used in cgroup_limits()]
    available_bytes = _host_bytes("MemAvailable")
    rooms.append(Room(host_bytes() if available_bytes is None else available_bytes, "available memory of the host"))
    return min(rooms, key=lambda room: room.available_bytes)


def in_memory_alone(directory: Path, *, sealed: bool) -> bool:
    """Return whether an arena's data takes no room of its directory's file system: hugetlbfs reserves its pages."""
    return sealed and file_system(directory) != proc_text.HUGETLBFS


def directory_room(directory: Path) -> Room:
    found = _statvfs(directory)
    return Room(found.f_bavail * found.f_frsize, f"free space of {directory}")


def host_bytes() -> int:
    return _host_bytes("MemTotal") or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def directory_bytes(directory: Path) -> int:
    """Return the size of the file system that holds `directory`."""
    found = _statvfs(directory)
    return found.f_blocks * found.f_frsize


def _statvfs(directory: Path) -> os.statvfs_result:
    """Return the room of a directory, or of the one in which it will be created."""
    try:
        return os.statvfs(directory)
    except FileNotFoundError:
        return os.statvfs(directory.parent)


def read_mounts() -> list[proc_text.Mount]:
    """Return the mounts that this process sees; none if the kernel does not tell."""
    return proc_text.mounts(_read(_MOUNTINFO) or b"")


def file_system(directory: Path) -> str:
    """Return the type of the mount that holds `directory`; empty where the kernel does not tell."""
    mount = proc_text.mount_of(os.path.realpath(directory), read_mounts())
    return mount.kind if mount is not None else ""


def cgroup_limits(proc: Path = _CGROUP, mount: Path = Path("/sys/fs/cgroup")) -> list[tuple[str, int, int]]:
    """Return (cgroup, limit, used) in bytes of each limited memory cgroup of this process, v2 and v1.

    Inactive page cache does not count as used: the kernel gives it up (the working set of kubelet's definition).
    """
    found = []
    for files in proc_text.memory_cgroups(_read(proc) or b""):
        folder = mount / files.folder
        limit, used = (proc_text.number(_read(folder / name)) for name in (files.limit, files.used))
        if limit is not None and used is not None and limit < proc_text.UNLIMITED_BYTES:
            cache_bytes = proc_text.amount(_read(folder / "memory.stat"), files.cache) or 0
            found.append((str(folder), limit, max(used - cache_bytes, 0)))
    return found


def _host_bytes(field: str) -> int | None:
    """Return a value of /proc/meminfo, which counts in KiB."""
    count = proc_text.amount(_read(_MEMINFO), field)
    return None if count is None else count * 1024


def _read(path: Path) -> bytes | None:
    """Return the bytes of a file; None if it cannot be read, because missing facts must not stop a start."""
    try:
        return path.read_bytes()
    except OSError:
        return None
