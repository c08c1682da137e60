"""A directory behind FUSE that answers errors, delays or nothing at all, as a test wants (T4, T5).

`python -m tests.fakes.fuse_directory BACKING MOUNT FAULTS` serves BACKING at MOUNT; FAULTS is a JSON file, read
before every operation: {"read": 5, "write": 28, "seconds": 0.5} makes these two answer EIO and ENOSPC, late.
Stopped (SIGSTOP) it is a hung mount.
"""

# ruff: noqa: PTH102, PTH104, PTH106, PTH108, PTH208 - it passes system calls on

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Self

START_SECONDS = 10.0
_STATUS = ("st_mode", "st_ino", "st_nlink", "st_uid", "st_gid", "st_size", "st_blocks")
_ROOM = ("f_bavail", "f_bfree", "f_blocks", "f_bsize", "f_frsize")


def why_no_fuse() -> str:
    """Empty where FUSE can be used."""
    try:
        import mfusepy  # noqa: F401
    except (ImportError, OSError) as error:
        return f"mfusepy cannot be used: {error} (Debian: fuse3)"
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "/dev/fuse cannot be opened (root is missing, or the device)"
    return ""


class FuseDirectory:
    """A mounted directory, and the process that serves it."""

    def __init__(self) -> None:
        self.base = Path(tempfile.mkdtemp(prefix="kvdfuse", dir="/tmp"))
        self.backing = self.base / "backing"
        self.path = self.base / "mount"
        self._faults = self.base / "faults"
        self.backing.mkdir()
        self.path.mkdir()
        self.fault()
        command = [
            sys.executable,
            "-m",
            "tests.fakes.fuse_directory",
            *map(str, (self.backing, self.path, self._faults)),
        ]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        until = time.monotonic() + START_SECONDS
        while not os.path.ismount(self.path):
            assert self.process.poll() is None, "the FUSE server ended"
            assert time.monotonic() < until, "the FUSE server does not mount"
            time.sleep(0.02)

    def fault(self, **faults: float) -> None:
        """`operation=errno`, and `seconds` that every faulty operation, or with none all of them, takes."""
        written = self.base / "faults.new"
        written.write_text(json.dumps(faults))
        written.rename(self._faults)

    def hang(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def close(self) -> None:
        """Kills the server first: that is what ends requests that hang."""
        self.process.kill()
        self.process.wait()
        subprocess.run(["umount", "-l", str(self.path)], check=False, stderr=subprocess.DEVNULL)
        subprocess.run(["rm", "-rf", "--one-file-system", str(self.base)], check=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Backing:
    """The operations of mfusepy: passes everything on to `backing`, unless there is a fault."""

    use_ns = True

    def __init__(self, backing: str, faults: str) -> None:
        self._backing = backing
        self._faults = Path(faults)

    def _at(self, path: str) -> str:
        return self._backing + path

    def _fault(self, operation: str) -> None:
        wanted = json.loads(self._faults.read_text())
        number = wanted.get(operation)
        if number is not None or wanted.keys() == {"seconds"}:
            time.sleep(wanted.get("seconds", 0))
        if number:
            raise OSError(int(number), os.strerror(int(number)))

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        status = os.lstat(self._at(path))
        return {name: getattr(status, name) for name in dir(status) if name.startswith("st_") and "time" not in name}

    def readdir(self, path: str, fh: int) -> list[str]:
        return [".", "..", *os.listdir(self._at(path))]

    def statfs(self, path: str) -> dict[str, int]:
        found = os.statvfs(self._at(path))
        return {name: getattr(found, name) for name in _ROOM}

    def open(self, path: str, flags: int) -> int:
        self._fault("open")
        return os.open(self._at(path), flags & ~(os.O_DIRECT | os.O_CREAT | os.O_EXCL))

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        self._fault("create")
        return os.open(self._at(path), os.O_RDWR | os.O_CREAT, mode)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        self._fault("read")
        return os.pread(fh, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        self._fault("write")
        return os.pwrite(fh, data, offset)

    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        os.truncate(self._at(path), length)
        return 0

    def fallocate(self, path: str, mode: int, offset: int, size: int, fh: int) -> int:
        self._fault("fallocate")
        os.posix_fallocate(fh, offset, size)
        return 0

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        self._fault("fsync")
        return 0

    def release(self, path: str, fh: int) -> int:
        os.close(fh)
        return 0

    def mkdir(self, path: str, mode: int) -> int:
        os.mkdir(self._at(path), mode)
        return 0

    def rmdir(self, path: str) -> int:
        os.rmdir(self._at(path))
        return 0

    def unlink(self, path: str) -> int:
        self._fault("unlink")
        os.unlink(self._at(path))
        return 0

    def rename(self, old: str, new: str) -> int:
        os.rename(self._at(old), self._at(new))
        return 0


def _serve(backing: str, mount: str, faults: str) -> None:
    import mfusepy

    mfusepy.FUSE(Backing(backing, faults), mount, foreground=True, attr_timeout=0, entry_timeout=0)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        _serve(*sys.argv[1:4])
