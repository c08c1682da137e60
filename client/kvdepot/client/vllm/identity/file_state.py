"""Which files a path names now, and whether any of them changed after this process began (docs/adr/0046).

vLLM reads the weights before a connector exists. What is digested later is what vLLM has read only if nothing changed
in between. A change always sets the ctime of something: of a file that is written, of a file, folder or link that is
renamed into its place, of a folder that gains or loses an entry. A copy that keeps the mtime does not hide it.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Final

from kvdepot.core import proc_text

SKIPPED_FOLDERS: Final = frozenset({".cache", ".git"})
OWN_CLOCK: Final = frozenset(
    {
        "bcachefs", "btrfs", "erofs", "exfat", "ext2", "ext3", "ext4", "f2fs", "hugetlbfs", "iso9660", "jfs", "nilfs2",
        "ntfs3", "overlay", "ramfs", "reiserfs", "rootfs", "squashfs", "tmpfs", "ubifs", "udf", "vfat", "xfs", "zfs",
    }
)  # fmt: skip
"""File systems whose times are set by this kernel's clock."""
TIMES_OF_AN_IMAGE: Final = ("cramfs", "erofs", "fuse", "iso9660", "overlay", "romfs", "squashfs", "udf")
"""Prefixes of file systems on which two files may have one path, inode, size and all times, one after the other.

An overlay's layers may be such: what pulls images lazily mounts them as EROFS or FUSE.
"""
FOREIGN_CLOCK_NS: Final = 300 * 10**9
"""How far another host's clock may differ: on its file systems only what changed that much before counts as older."""
CLOCK_STEP_NS: Final = 10**9
"""A wall clock that was moved by more since may have made a new file look old."""
LINKS_MAX: Final = 40  # as the kernel's own


def _wall_ahead_ns() -> int:
    """Return the wall clock minus the time since boot: constant, unless somebody sets the clock."""
    # A process that is not run between the two readings finds too little.
    return max(time.time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME) for _ in range(8))


_WALL_AHEAD_AT_IMPORT_NS: Final = _wall_ahead_ns()


def process_started_ns() -> int:
    """Return the wall clock's time at which this process began, rounded up to the kernel's tick.

    A process reads no weights within its first tick. Raises OSError where the clock has been set since.
    """
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    ticks = os.sysconf("SC_CLK_TCK")
    started_ns = (int(fields[19]) + 1) * 10**9 // ticks + _wall_ahead_ns()
    # The kernel made this folder when somebody first looked for it, which was after the start.
    seen_ns = Path("/proc/self").stat().st_ctime_ns
    if abs(_wall_ahead_ns() - _WALL_AHEAD_AT_IMPORT_NS) > CLOCK_STEP_NS or seen_ns < started_ns - CLOCK_STEP_NS:
        raise OSError(errno.EINVAL, "the wall clock was set while this engine started")
    return started_ns


@dataclass(frozen=True, slots=True)
class Entry:
    """Something that decides which bytes a reader of the folder gets."""

    path: Path
    status: os.stat_result  # of a link: the link's own
    on_the_way: bool  # outside the folder: it counts only which folder or link it is


def _way(path: Path) -> Iterator[Entry]:
    """Every folder and link through which the kernel comes to a path. Raises OSError."""
    at, links = Path("/"), 0
    pending = list(reversed(path.absolute().parts[1:]))
    while pending:
        step = at / pending.pop()
        status = step.lstat()
        yield Entry(step, status, on_the_way=True)
        if not stat.S_ISLNK(status.st_mode):
            at = step
            continue
        links += 1
        if links > LINKS_MAX:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        target = step.readlink()
        if target.is_absolute():
            at = Path("/")
        pending.extend(reversed(target.parts[target.is_absolute() :]))


def files_below(folder: Path) -> list[Path]:
    """Return every file below a folder, sorted. Folders that are links are not followed. Raises OSError."""
    return [path for path in _below(folder) if path.is_file()]


def _below(folder: Path) -> list[Path]:
    """Everything in a folder and its folders, sorted."""
    files: list[Path] = []
    pending = [folder]
    while pending:
        inside = pending.pop()
        for path in _listed(inside, top=inside == folder):
            if path.name not in SKIPPED_FOLDERS:
                files.append(path)
                if stat.S_ISDIR(path.lstat().st_mode):
                    pending.append(path)
    return sorted(files)


def _listed(folder: Path, *, top: bool) -> list[Path]:
    try:
        return list(folder.iterdir())
    except PermissionError:
        if top:
            raise
        return []  # as `lost+found`: the engine cannot read it either


def entries(folder: Path) -> list[Entry]:
    """Return all that decides which bytes a reader of the folder gets. Raises OSError."""
    ways = {entry.path: entry for entry in _way(folder)}
    entries = [Entry(folder, folder.stat(), on_the_way=False)]
    for path in _below(folder):
        status = path.lstat()
        entries.append(Entry(path, status, on_the_way=False))
        if stat.S_ISLNK(status.st_mode):
            with _leading_nowhere():
                for entry in _way(path):
                    ways[entry.path] = entry
                entries.append(Entry(path, path.stat(), on_the_way=False))
    return [*ways.values(), *entries]


@contextmanager
def _leading_nowhere() -> Iterator[None]:
    """Links may lead to nothing, or to themselves."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise


def fingerprint(folder: Path) -> str:
    """Return a text that changes whenever a file of the folder does. Reads no file. Raises OSError."""
    total = blake2b(digest_size=16)
    for entry in entries(folder):
        status = entry.status
        times = () if entry.on_the_way else (status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        total.update(repr((str(entry.path), status.st_dev, status.st_ino, *times)).encode("utf-8", "surrogateescape"))
    return total.hexdigest()


def changed_since(folder: Path, moment_ns: int) -> Path | None:
    """Return what shows that the folder's files may have changed after a moment of the wall clock. Raises OSError."""
    limits: dict[int, int] = {}  # by device
    for entry in [*entries(folder), *_names_of_snapshot(folder)]:
        status = entry.status
        if status.st_dev not in limits:
            limits[status.st_dev] = moment_ns - (0 if file_system(entry.path) in OWN_CLOCK else FOREIGN_CLOCK_NS)
        if status.st_ctime_ns <= limits[status.st_dev]:
            continue
        gained = stat.S_ISDIR(status.st_mode) and status.st_mtime_ns == status.st_ctime_ns
        if not (entry.on_the_way and gained):  # a neighbour came or went; that it was renamed sets the ctime alone
            return entry.path
    return None


def _names_of_snapshot(folder: Path) -> Iterator[Entry]:
    """Of a snapshot in a hub's cache: the branches and tags that mean it."""
    if folder.parent.name != "snapshots":
        return
    for path in files_below(folder.parent.parent / "refs") if (folder.parent.parent / "refs").is_dir() else ():
        if path.read_text(errors="replace").strip() == folder.name:
            yield Entry(path, path.stat(), on_the_way=False)


def file_system(path: Path) -> str:
    """Return the type of the file system that a path lies in, without following a last link; empty if unknown."""
    try:
        opened = os.open(path, os.O_PATH | os.O_NOFOLLOW)
        try:
            fields = Path(f"/proc/self/fdinfo/{opened}").read_bytes().split()
        finally:
            os.close(opened)
        number = int(fields[fields.index(b"mnt_id:") + 1])
        mounts = proc_text.mounts(Path("/proc/self/mountinfo").read_bytes())
        return next((mount.kind for mount in mounts if mount.number == number), "")
    except (OSError, ValueError, IndexError):
        pass
    return ""
