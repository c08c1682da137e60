"""Parsers of the kernel's texts: mountinfo and the files of memory cgroups (proc(5), cgroups(7)).

The kernel writes bytes, not text. A name may have any byte; bytes that are not UTF-8 are kept by `surrogateescape`, as
in all paths of Python. Lines end with a newline and fields with a blank, not with the other characters at which
`str.split` splits. A line that proc(5) does not define is ignored. Nothing here raises.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

HUGETLBFS: Final = "hugetlbfs"
MEMORY_KINDS: Final = frozenset({"tmpfs", HUGETLBFS, "ramfs", "devtmpfs"})
"""File systems whose files are memory."""
NETWORK_KINDS: Final = (
    "nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "glusterfs", "fuse.glusterfs", "9p", "beegfs",
)  # fmt: skip
"""File systems that other nodes have too."""
UNLIMITED_BYTES: Final = 1 << 60
"""cgroup v1 says "no limit" with a number near 2**63."""
_OCTAL: Final = re.compile(rb"\\([0-3][0-7]{2})")
_FIXED_FIELDS: Final = 6
_DELETED: Final = "//deleted"


@dataclass(frozen=True, slots=True)
class Mount:
    """`root`: what of the file system `device` lies at `point`.

    `options`: of the mount and of the file system, `name` or `name=value`.
    """

    point: str
    kind: str
    options: frozenset[str]
    device: str = ""
    root: str = "/"
    number: int = 0
    parent: int = 0

    def value(self, name: str) -> str:
        """Return the value of a mount option; empty without the option or without a value."""
        return next((one.partition("=")[2] for one in self.options if one.startswith(f"{name}=")), "")

    @property
    def place_is_told(self) -> bool:
        """Return whether `root` can be trusted: the kernel writes "/" for every NFS mount (`nfs_show_path`)."""
        return self.kind not in ("nfs", "nfs4")

    @property
    def may_hang(self) -> bool:
        """Return whether access to the mount may wait for ever. If the mount at / hangs, everything waits anyway."""
        return self.point != "/" and (self.kind in (*NETWORK_KINDS, "autofs") or self.kind.startswith("fuse"))


class CgroupFiles(NamedTuple):
    """A folder below the mount of the cgroups, and the names of what it says of memory."""

    folder: str
    limit: str
    used: str
    cache: str


def mounts(mountinfo: bytes) -> list[Mount]:
    """Return the mounts of /proc/PID/mountinfo, in its order."""
    return [mount for line in mountinfo.split(b"\n") if (mount := _mount(line)) is not None]


def mount_of(path: str, found: Sequence[Mount]) -> Mount | None:
    """Return the mount that holds an absolute path without links.

    The kernel goes from mount to mount, and so does this: a mount on a folder covers what was mounted below that
    folder before.
    """
    numbers = {mount.number for mount in found}
    below = [mount for mount in found if mount.parent not in numbers or mount.parent == mount.number]
    best: Mount | None = None
    while covering := [mount for mount in below if is_below(path, mount.point)]:
        best = min(covering, key=lambda mount: len(mount.point))
        below = [mount for mount in found if mount.parent == best.number != mount.number]
        found = [mount for mount in found if mount is not best]
    return best


def is_below(path: str, folder: str) -> bool:
    """Return whether the path is the folder, or in it."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def place_on_device(path: str, mount: Mount) -> str:
    """Return the path within the mount's file system. It is the same for all mounts of that file system."""
    rest = path.removeprefix(mount.point.rstrip("/")).strip("/")
    root = mount.root.removesuffix(_DELETED).rstrip("/")
    return f"{root}/{rest}" if rest else root or "/"


def memory_cgroups(cgroup: bytes) -> Iterator[CgroupFiles]:
    """Return the memory cgroups of /proc/PID/cgroup, of versions 1 and 2, each with all its ancestors."""
    for line in cgroup.split(b"\n"):
        fields = line.split(b":", 2)
        if len(fields) < 3 or (b"memory" not in fields[1].split(b",") and fields[1]):
            continue
        controllers, folder = _decoded(fields[1]), _decoded(fields[1])
        names = _VERSION_1 if controllers else _VERSION_2
        yield CgroupFiles(folder, *names)
        parts = [part for part in _decoded(fields[2]).split("/") if part]
        for part in parts if ".." not in parts else ():  # out of this process's sight (cgroup_namespaces(7))
            folder = f"{folder}/{part}" if folder else part
            yield CgroupFiles(folder, *names)


def number(text: bytes | None) -> int | None:
    """Return the number in a file's text; None without a file, or for "max"."""
    text = (text or b"").strip()
    return int(text) if text.isdigit() else None


def labelled(text: bytes | None, label: str) -> str | None:
    """Return the text after a label and its colon or blank, in the first such line; None if there is none."""
    for line in (text or b"").split(b"\n"):
        rest = line.removeprefix(label.encode())
        if rest != line and rest[:1] in (b":", b" "):
            return _decoded(rest[1:].strip())
    return None


def amount(text: bytes | None, label: str) -> int | None:
    """Return the number of a line such as `MemTotal:  16 kB`; None if there is no such line."""
    return number((labelled(text, label) or "").partition(" ")[0].encode("utf-8", "surrogateescape"))


_VERSION_1: Final = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2: Final = ("memory.max", "memory.current", "inactive_file")


def _mount(line: bytes) -> Mount | None:
    fields = line.split(b" ")
    try:
        end = fields.index(b"-", _FIXED_FIELDS)  # optional fields, of any number, end with it
        own, parent = int(fields[0]), int(fields[1])
        kind, super_options = fields[end + 1], fields[end + 3 :]
    except (ValueError, IndexError):
        return None
    options = b",".join([fields[5], *super_options]).split(b",")
    return Mount(
        _name(fields[4]), _name(kind), frozenset(_name(option) for option in options if option),
        device=_name(fields[2]), root=_name(fields[3]), number=own, parent=parent,
    )  # fmt: skip


def _name(field: bytes) -> str:
    return _decoded(_OCTAL.sub(lambda match: bytes([int(match[1], 8)]), field))


def _decoded(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")
