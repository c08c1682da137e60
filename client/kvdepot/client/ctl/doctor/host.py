"""What the checks read of this machine: files below /proc, /sys, /etc and /run, which a test puts somewhere else.

Nothing here touches a medium that could hang; that is `probe`'s, in a process of its own.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

_UNLIMITED_BYTES: Final = 1 << 60  # cgroup v1 says "no limit" with a number near 2**63
_OCTAL: Final = re.compile(r"\\([0-7]{3})")
_CAP_IPC_LOCK: Final = 14


@dataclass(frozen=True, slots=True)
class Mount:
    """`options`: of the mount and of the file system, `name` or `name=value`."""

    point: str
    kind: str
    options: frozenset[str]

    def value(self, name: str) -> str:
        """Empty where the option is not there, or has none."""
        return next((one.partition("=")[2] for one in self.options if one.startswith(f"{name}=")), "")


@dataclass(frozen=True, slots=True)
class Host:
    """`root`: in place of /. `uid`: who asks."""

    root: Path = Path("/")
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    uid: int = field(default_factory=os.geteuid)

    def path(self, absolute: str) -> Path:
        return self.root / absolute.lstrip("/")

    def text(self, absolute: str) -> str | None:
        """None where it cannot be read."""
        try:
            return self.path(absolute).read_text(errors="replace")
        except OSError:
            return None

    def number(self, absolute: str) -> int | None:
        text = (self.text(absolute) or "").strip()
        return int(text) if text.isdigit() else None

    def memory_bytes(self, name: str) -> int | None:
        """A line of /proc/meminfo."""
        for line in (self.text("/proc/meminfo") or "").splitlines():
            key, _, rest = line.partition(":")
            if key == name:
                return int(rest.split()[0]) * 1024
        return None

    def limit(self, process: str, name: str) -> int | float | None:
        """The soft limit of a process (a pid, or `self`), named as in /proc/PID/limits. None: it cannot be read."""
        for line in (self.text(f"/proc/{process}/limits") or "").splitlines():
            if line.startswith(f"{name} "):
                soft = line.removeprefix(name).split()[0]
                return float("inf") if soft == "unlimited" else int(soft)
        return None

    def may_lock_memory(self, process: str) -> bool:
        """Whether it has CAP_IPC_LOCK, to which no limit applies."""
        for line in (self.text(f"/proc/{process}/status") or "").splitlines():
            if line.startswith("CapEff:"):
                return bool(int(line.split()[1], 16) >> _CAP_IPC_LOCK & 1)
        return False

    def memory_limits(self, process: str) -> list[tuple[str, int]]:
        """(cgroup, bytes) of each memory cgroup with a limit that the process is in, versions 1 and 2 (cgroups(7))."""
        found = []
        for line in (self.text(f"/proc/{process}/cgroup") or "").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers not in ("", "memory"):
                continue
            file = "memory.limit_in_bytes" if controllers else "memory.max"
            for folder in _with_parents(f"/sys/fs/cgroup/{controllers}".rstrip("/"), path):
                limit = self.number(f"{folder}/{file}")
                if limit is not None and limit < _UNLIMITED_BYTES:
                    found.append((folder, limit))
        return found

    def environment_of(self, pid: int) -> dict[str, str] | None:
        """None where it may not be read, or the process is gone."""
        text = self.text(f"/proc/{pid}/environ")
        return None if text is None else dict(one.partition("=")[::2] for one in text.split("\0") if one)

    def mount_of(self, resolved: str, process: str = "self") -> Mount | None:
        """The mount that holds a path without links (proc(5), mountinfo), as a process sees it, or else this one.

        A service that systemd confines has other mounts: what is writable here may be read-only there. Of several on
        one point the last covers.
        """
        best: Mount | None = None
        for mount in self._mounts(process) or self._mounts("self"):
            if Path(resolved).is_relative_to(mount.point) and (best is None or len(mount.point) >= len(best.point)):
                best = mount
        return best

    def _mounts(self, process: str) -> list[Mount]:
        return [_mount(line) for line in (self.text(f"/proc/{process}/mountinfo") or "").splitlines()]


def _mount(line: str) -> Mount:
    fields, _, rest = line.partition(" - ")
    words, kind = fields.split(), rest.split()
    point = _OCTAL.sub(lambda match: chr(int(match[1], 8)), words[4])
    return Mount(point, kind[0], frozenset(words[5].split(",")) | frozenset(kind[-1].split(",")))


def _with_parents(root: str, path: str) -> list[str]:
    folders = [root]
    for part in path.strip("/").split("/"):
        if part:
            folders.append(f"{folders[-1]}/{part}")
    return folders
