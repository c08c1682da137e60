"""What the checks read of this machine: files below /proc, /sys, /etc and /run, which a test puts somewhere else.

Nothing here touches a device that could hang; that is `probe`'s, in a process of its own.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from stat import S_ISREG
from string import hexdigits
from typing import Final

from kvdepot.core import proc_text
from kvdepot.core.proc_text import Mount

_CAP_IPC_LOCK: Final = 14
_GPU: Final = re.compile(r"nvidia\d+|kfd")


@dataclass(frozen=True, slots=True)
class Host:
    """`root`: in place of /. `uid`: who asks."""

    root: Path = Path("/")
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    uid: int = field(default_factory=os.geteuid)

    def path(self, absolute: str) -> Path:
        return self.root / absolute.lstrip("/")

    def data(self, absolute: str) -> bytes | None:
        """None where it cannot be read."""
        try:
            return self.path(absolute).read_bytes()
        except OSError:
            return None

    def small_file(self, absolute: str, size_bytes: int) -> bytes | None:
        """Return a regular file's bytes; None where it cannot be read, is larger, or is another kind of file."""
        try:
            fd = os.open(self.path(absolute), os.O_RDONLY | os.O_NONBLOCK)
        except OSError:
            return None
        with os.fdopen(fd, "rb") as file:
            if not S_ISREG(os.fstat(fd).st_mode):
                return None
            data = file.read(size_bytes + 1)
        return data if len(data) <= size_bytes else None

    def link(self, absolute: str) -> str:
        """Return where a symbolic link leads; empty where that cannot be read."""
        try:
            return os.fspath(self.path(absolute).readlink())
        except OSError:
            return ""

    def text(self, absolute: str) -> str | None:
        """Likewise."""
        data = self.data(absolute)
        return None if data is None else os.fsdecode(data)

    def names(self, absolute: str) -> list[str]:
        """Return the names in a directory; none where it cannot be read."""
        try:
            return sorted(one.name for one in self.path(absolute).iterdir())
        except OSError:
            return []

    def gpu_devices(self) -> list[str]:
        """Return the device files that show GPUs: one for each of NVIDIA's, and one for all of AMD's."""
        return [f"/dev/{name}" for name in self.names("/dev") if _GPU.fullmatch(name)]

    def chosen(self, absolute: str) -> str:
        """Return the word in brackets of a file that lists what can be chosen; empty where it cannot be read."""
        return (self.text(absolute) or "").partition("[")[2].partition("]")[0]

    def number(self, absolute: str) -> int | None:
        return proc_text.number(self.data(absolute))

    def memory_bytes(self, name: str) -> int | None:
        """Return a line of /proc/meminfo in bytes; the file counts in KiB."""
        count = proc_text.amount(self.data("/proc/meminfo"), name)
        return None if count is None else count * 1024

    def user_of(self, pid: int) -> int | None:
        """Return the effective user of a process, or None."""
        users = (proc_text.labelled(self.data(f"/proc/{pid}/status"), "Uid") or "").split()
        return int(users[1]) if len(users) > 1 and users[1].isdecimal() else None

    def limit(self, process: str, name: str) -> int | float | None:
        """Return the soft limit of a process (a pid, or `self`), named as in /proc/PID/limits, or None."""
        limits = self.data(f"/proc/{process}/limits")
        unlimited = (proc_text.labelled(limits, name) or "").startswith("unlimited")
        return float("inf") if unlimited else proc_text.amount(limits, name)

    def may_lock_memory(self, process: str) -> bool:
        """Whether it has CAP_IPC_LOCK, to which no limit applies."""
        effective = proc_text.labelled(self.data(f"/proc/{process}/status"), "CapEff")
        known = effective is not None and set(effective) <= set(hexdigits)
        return known and bool(int(effective or "0", 16) >> _CAP_IPC_LOCK & 1)

    def memory_limits(self, process: str) -> list[tuple[str, int]]:
        """(cgroup, bytes) of each memory cgroup with a limit that the process is in, versions 1 and 2 (cgroups(7))."""
        found = []
        for files in proc_text.memory_cgroups(self.data(f"/proc/{process}/cgroup") or b""):
            folder = f"/sys/fs/cgroup/{files.folder}".rstrip("/")
            limit = self.number(f"{folder}/{files.limit}")
            if limit is not None and limit < proc_text.UNLIMITED_BYTES:
                found.append((folder, limit))
        return found

    def environment_of(self, pid: int) -> dict[str, str] | None:
        """None where it may not be read, or the process is gone."""
        text = self.text(f"/proc/{pid}/environ")
        return None if text is None else dict(one.partition("=")[::2] for one in text.split("\0") if one)

    def mount_of(self, resolved: str, process: str = "self") -> Mount | None:
        """Return the mount of a path without links (proc(5), mountinfo), as a process sees it, or else this process.

        A service that systemd confines has other mounts: what is writable here may be read-only there.
        """
        return proc_text.mount_of(resolved, self._mounts(process) or self._mounts("self"))

    def _mounts(self, process: str) -> list[Mount]:
        return proc_text.mounts(self.data(f"/proc/{process}/mountinfo") or b"")
