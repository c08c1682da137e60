"""A directory behind FUSE that answers errors, delays or nothing at all, as a test wants (T4, T5).

`python -m tests.fakes.fuse_directory BACKING MOUNT FAULTS LET_GO LATE` serves BACKING at MOUNT; FAULTS is a JSON file,
read before every operation: {"read": 5, "write": 28, "seconds": 0.5} makes these two answer EIO and ENOSPC, late;
{"bytes_per_second": 20e6} is what reads and writes share, {"quota_bytes": 4e6} a quota that statfs does not show. Every
operation can answer every errno, but for ENOSYS of opens, `create` and `flush`, which means something else to the
kernel. {"open segments/": 1} is about paths with "segments/" in them; `open_direct` is an `open` with O_DIRECT,
`open_write` one to write, `fdatasync` an `fsync` of data.
Stopped (SIGSTOP) it is a hung mount.
"""

# ruff: noqa: PTH102, PTH104, PTH106, PTH108, PTH208 - it passes system calls on

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Self

from tests.rigs.patience import Deadline
from tests.rigs.stopping import stop

START_SECONDS = 30.0
_THREADS = 128
_LET_GO_SECONDS = 0.02
_STATUS = ("st_mode", "st_ino", "st_nlink", "st_uid", "st_gid", "st_size", "st_blocks")
_TIMES = ("st_atime", "st_mtime", "st_ctime")
_NOW = (1 << 30) - 1
"""UTIME_NOW, as it comes through."""
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
        self._let_go = self.base / "let_go"
        self._late = self.base / "late"
        self.backing.mkdir()
        self.path.mkdir()
        self.fault()
        command = [
            sys.executable,
            "-m",
            "tests.fakes.fuse_directory",
            *map(str, (self.backing, self.path, self._faults, self._let_go, self._late)),
        ]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        try:
            self._wait_mounted()
        except BaseException:  # what does not begin must not stay either
            self.close()
            raise

    def _wait_mounted(self) -> None:
        until = Deadline(START_SECONDS)
        while not os.path.ismount(self.path):
            assert self.process.poll() is None, "the FUSE server ended"
            assert not until.is_over(), "the FUSE server does not mount"
            time.sleep(0.02)

    def fault(self, **faults: float) -> None:
        """`operation=errno`, or `{"operation part/of/path": errno}`; `seconds`: what each of these, or all, take.

        `bytes_per_second`: of reads and writes together, one after the other, however many there are at once.
        What has begun takes that long, also when there is another fault by then, unless `let_go` ends it.
        """
        written = self.base / "faults.new"
        written.write_text(json.dumps(faults))
        written.rename(self._faults)

    @property
    def is_late(self) -> bool:
        """Whether there has been an operation that takes long: whoever wants it waits in the kernel."""
        return self._late.exists()

    def let_go(self) -> None:
        """Operations that take long end now."""
        self._let_go.touch()

    def hang(self) -> None:
        """Return when every thread of the server has stopped: until then some would still answer."""
        stop(self.process.pid)

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

    def __init__(self, backing: str, faults: str, let_go: str, late: str) -> None:
        self._backing = backing
        self._faults = Path(faults)
        self._let_go = Path(let_go)
        self._late = Path(late)
        self._lock = threading.Lock()
        self._free_at = 0.0

    def _at(self, path: str) -> str:
        return self._backing + path

    def _fault(self, operation: str, moved_bytes: int = 0, path: str = "") -> dict[str, Any]:
        """Return what the test wants now. Raise what it wants of this operation."""
        wanted: dict[str, Any] = json.loads(self._faults.read_text())
        if rate := wanted.get("bytes_per_second"):
            self._take(self._turn(moved_bytes / rate) - time.monotonic())
        here = (
            number
            for key, number in wanted.items()
            if key.partition(" ")[0] == operation and key.partition(" ")[2] in path
        )
        number = next(here, None)
        if number is not None or wanted.keys() == {"seconds"}:
            self._take(wanted.get("seconds", 0))
        if number:
            raise OSError(int(number), os.strerror(int(number)))
        return wanted

    def _charge(self, wanted: dict[str, Any], more_bytes: int) -> None:
        """Refuse what goes over the quota, whether it is new or written once more."""
        quota_bytes = wanted.get("quota_bytes")
        if quota_bytes is None:
            return
        taken_bytes = 0
        for path in Path(self._backing).rglob("*"):
            with contextlib.suppress(FileNotFoundError):
                taken_bytes += path.lstat().st_blocks * 512
        if taken_bytes + more_bytes > quota_bytes:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    def _turn(self, seconds: float) -> float:
        """When the medium is done with what takes it so long, after all that came before."""
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + seconds
            return self._free_at

    def _take(self, seconds: float) -> None:
        began, until = time.time(), time.monotonic() + seconds
        if seconds:
            self._late.touch()
        while (left := until - time.monotonic()) > 0 and not self._let_go_since(began):
            time.sleep(min(left, _LET_GO_SECONDS))

    def _let_go_since(self, began: float) -> bool:
        return self._let_go.exists() and self._let_go.stat().st_mtime > began

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        self._fault("getattr", path=path)
        status = os.lstat(self._at(path))
        found = {name: getattr(status, name) for name in _STATUS}
        return found | {name: getattr(status, f"{name}_ns") for name in _TIMES}

    def readdir(self, path: str, fh: int) -> list[str]:
        self._fault("readdir", path=path)
        return [".", "..", *os.listdir(self._at(path))]

    def statfs(self, path: str) -> dict[str, int]:
        self._fault("statfs", path=path)
        found = os.statvfs(self._at(path))
        return {name: getattr(found, name) for name in _ROOM}

    def open(self, path: str, flags: int) -> int:
        self._fault("open", path=path)
        if flags & os.O_DIRECT:
            self._fault("open_direct", path=path)
        if flags & os.O_ACCMODE != os.O_RDONLY:
            self._fault("open_write", path=path)
        return os.open(self._at(path), flags & ~(os.O_DIRECT | os.O_CREAT | os.O_EXCL))

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        self._fault("create", path=path)
        return os.open(self._at(path), os.O_RDWR | os.O_CREAT, mode)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        self._fault("read", size, path)
        return os.pread(fh, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        self._charge(self._fault("write", len(data), path), len(data))
        return os.pwrite(fh, data, offset)

    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        self._fault("truncate", path=path)
        os.truncate(self._at(path), length)
        return 0

    def fallocate(self, path: str, mode: int, offset: int, size: int, fh: int) -> int:
        self._charge(self._fault("fallocate", path=path), size)
        os.posix_fallocate(fh, offset, size)
        return 0

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        self._fault("fsync", path=path)
        if datasync:
            self._fault("fdatasync", path=path)
        return 0

    def fsyncdir(self, path: str, datasync: int, fh: int) -> int:
        self._fault("fsyncdir", path=path)
        return 0

    def flush(self, path: str, fh: int) -> int:
        self._fault("flush", path=path)
        return 0

    def release(self, path: str, fh: int) -> int:
        os.close(fh)
        return 0

    def mkdir(self, path: str, mode: int) -> int:
        self._fault("mkdir", path=path)
        os.mkdir(self._at(path), mode)
        return 0

    def rmdir(self, path: str) -> int:
        self._fault("rmdir", path=path)
        os.rmdir(self._at(path))
        return 0

    def unlink(self, path: str) -> int:
        self._fault("unlink", path=path)
        os.unlink(self._at(path))
        return 0

    def link(self, new: str, existing: str) -> int:
        self._fault("link", path=new)
        os.link(self._at(existing), self._at(new))
        return 0

    def utimens(self, path: str, times: tuple[int, int] | None = None) -> int:
        self._fault("utimens", path=path)
        if times is None or times[1] == _NOW:
            os.utime(self._at(path))
        else:
            os.utime(self._at(path), ns=times)
        return 0

    def rename(self, old: str, new: str) -> int:
        self._fault("rename", path=new)
        os.rename(self._at(old), self._at(new))
        return 0


def _serve(backing: str, mount: str, faults: str, let_go: str, late: str) -> None:
    import mfusepy

    mfusepy.FUSE(
        Backing(backing, faults, let_go, late), mount, foreground=True, attr_timeout=0, entry_timeout=0,
        max_threads=_THREADS,
    )  # fmt: skip


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        _serve(*sys.argv[1:6])
