"""How much memory there is for the RAM tier: host, cgroup (v1 and v2) and file system."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

MIB = 1 << 20
PROCESS_RESERVE_BYTES = 160 * MIB
"""Private memory of the daemon and its checksum worker (docs/adr/0005).

Measured 2026-11-21: 50 MiB with an empty index, 7 more with 60,000 objects; the rest is for 4 MiB messages in flight.
"""
RESERVE_DIVISOR = 64
"""Per byte of capacity: two page tables of 8 bytes a page (measured 14 MiB for 3.8 GiB), and the index's nodes."""
CAPACITY_BYTES_MIN = 320 * MIB
_UNLIMITED_BYTES = 1 << 60  # cgroup v1 says "no limit" with a number near 2**63
_MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "hugetlbfs", "devtmpfs"})


OPENER_RESERVE_BYTES = 32 * MIB
"""Private memory of a tier's opening process while it is idle, as it is between openings."""
KEEPER_RESERVE_BYTES = 32 * MIB
"""Private memory of a shared tier's keeper without what it notes of files."""
FILE_RESERVE_BYTES = 96
"""What a janitor notes of a file, while it puts them in order (ADR 0018)."""
HANDLE_RESERVE_BYTES = 200
"""What an object that only a lower tier has takes of the daemon's memory: its node, and its entry in the tier."""


def arena_bytes_of(capacity_bytes: int, tiers_reserve_bytes: int = 0) -> int:
    """Size of the arena file within a capacity: `[ram].capacity` covers everything (row T1).

    `tiers_reserve_bytes`: private memory that the tiers below RAM take.
    """
    arena = capacity_bytes - PROCESS_RESERVE_BYTES - tiers_reserve_bytes - capacity_bytes // RESERVE_DIVISOR
    return arena // (2 * MIB) * (2 * MIB)


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes a new arena could take, and which limit says so."""

    available_bytes: int
    limit: str


def memory_room() -> Room:
    """The tightest of the host's available memory and the cgroups' limits."""
    rooms = [Room(_meminfo("MemAvailable"), "available memory of the host")]
    rooms += [Room(limit - used, f"memory limit of cgroup {path}") for path, limit, used in cgroup_limits()]
    return min(rooms, key=lambda room: room.available_bytes)


def directory_room(directory: Path) -> Room:
    found = os.statvfs(directory)
    return Room(found.f_bavail * found.f_frsize, f"free space of {directory}")


def host_bytes() -> int:
    return _meminfo("MemTotal")


def directory_bytes(directory: Path) -> int:
    """Size of the file system that holds `directory`."""
    found = os.statvfs(directory)
    return found.f_blocks * found.f_frsize


def is_memory_file_system(directory: Path) -> bool:
    """Whether files in `directory` live in memory rather than on a disk."""
    return _file_system(directory.resolve()) in _MEMORY_FILE_SYSTEMS


def cgroup_limits(
    proc: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")
) -> list[tuple[str, int, int]]:
    """(cgroup, limit, used) in bytes of every limited memory cgroup this process is in, v2 and v1.

    Inactive page cache does not count as used: the kernel gives it up (the working set of kubelet's definition).
    """
    found = []
    for line in proc.read_text().splitlines() if proc.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        names = _VERSION_2 if not controllers else _VERSION_1
        for folder in _with_parents(mount / controllers, path):
            limit, used = _number(folder / names.limit), _number(folder / names.used)
            if limit is not None and used is not None and limit < _UNLIMITED_BYTES:
                cache_bytes = _field(folder / "memory.stat", names.cache)
                found.append((str(folder), limit, max(used - cache_bytes, 0)))
    return found


class _Names(NamedTuple):
    limit: str
    used: str
    cache: str


_VERSION_1 = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = _Names("memory.max", "memory.current", "inactive_file")


def _with_parents(root: Path, path: str) -> list[Path]:
    folders = [root]
    for part in Path(path.lstrip("/")).parts:
        folders.append(folders[-1] / part)
    return folders


def _number(path: Path) -> int | None:
    """None where there is no such file, or it says "max"."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _field(path: Path, name: str) -> int:
    """The number behind `name` in a file of lines "name number"; 0 where it is not."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(number) for key, _, number in (line.partition(" ") for line in lines) if key == name), 0)


def _meminfo(field: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == field:
            return int(rest.split()[0]) * 1024
    raise OSError(f"/proc/meminfo has no {field}")


def _file_system(path: Path) -> str:
    """Type of the mount that holds `path` (proc(5), mountinfo)."""
    best, kind = -1, ""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, rest = line.partition(" - ")
        mount = Path(fields.split()[4].replace("\\040", " "))
        if len(mount.parts) >= best and path.is_relative_to(mount):
            best, kind = len(mount.parts), rest.split()[0]
    return kind
