"""Checks of the directories of tiers and of the arena: what the file system is, and whether it does what is needed."""

from __future__ import annotations

import mmap
import stat
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvdepot.client.ctl.doctor.findings import Check
from kvdepot.client.ctl.doctor.probe import NOT_TRIED, TEMPORARY
from kvdepot.core.proc_text import HUGETLBFS, MEMORY_KINDS, NETWORK_KINDS
from kvdepot.core.units import size_text

if TYPE_CHECKING:
    from kvdepot.client.ctl.doctor.findings import Finding
    from kvdepot.client.ctl.doctor.host import Host
    from kvdepot.client.ctl.doctor.probe import Probed
    from kvdepot.client.ctl.doctor.settings import Place
    from kvdepot.core.proc_text import Mount

SKEW_SECONDS_MAX: Final = 5.0
_FILES_MIN: Final = 10_000
_FILE_BYTES: Final = 1 << 20
"""A cautious size of an object; most are larger."""


@dataclass(frozen=True, slots=True)
class Looked:
    """A directory with what was found there, by whom.

    `daemon_uid`: whose it should be, None where that is not known.
    """

    place: Place
    probed: Probed
    mount: Mount | None
    daemon_uid: int | None = None
    asker_uid: int = 0

    @property
    def name(self) -> str:
        return self.place.name


def check_answers(place: Place, probed: Probed | None, seconds: float) -> Finding:
    """Check that a place answers. It comes first, because the other checks need the answer."""
    check = Check("answers", place.name)
    if probed is None:
        return check.fail(
            f"{place.path} does not answer within {seconds:g} s",
            "the mount hangs: see to its server or device (`dmesg`), or unmount it with `umount -l`",
        )
    if probed.denied:
        return check.skipped(f"{place.path}: {probed.looking}: ask as the daemon's user or as root")
    if probed.looking:
        return check.fail(
            f"{place.path}: {probed.looking}", "look at the device: `dmesg`, `smartctl -a`, or its server"
        )
    return check.ok(place.path)


def check_there(looked: Looked) -> Finding:
    check, place, probed = Check("directory", looked.name), looked.place, looked.probed
    if probed.is_there and not probed.is_directory:
        return check.fail(f"{place.path} is no directory", "name a directory, or move away what is there")
    if probed.is_there:
        begins = probed.is_empty and probed.on_root_filesystem
        if place.kind == "shared" and begins and not place.on_root_filesystem:
            return check.fail(
                f"{place.path} is empty and lies on the file system of /: its mount is late, or missing",
                "mount it; to begin a shared directory just there, set on_root_filesystem = true",
            )
        return check.ok("is there")
    if place.kind == "disk":
        return check.ok(f"is not there yet, the daemon makes it in {probed.resolved}")
    return check.fail(f"{place.path} is not there", "mount it, or make it: no daemon does")


def check_owner(looked: Looked) -> Finding:
    """Check owner and mode only: the daemon's user may be another one than the caller."""
    check, probed, path = Check("permissions", looked.name), looked.probed, looked.place.path
    if not probed.is_there:
        return check.skipped("the directory is not there")
    shown = f"of uid {probed.uid}, mode {probed.mode:04o}"
    if looked.place.is_of_all_users:
        if probed.mode & stat.S_IWOTH and not probed.mode & stat.S_ISVTX:
            return check.warn(f"{shown}: without the sticky bit every user can rename the arena", f"chmod 1777 {path}")
    elif others := _others(looked):
        refused = looked.place.kind != "ram" and probed.mode & stat.S_IWOTH
        fix = f"chmod go-w {path}, and let it belong to the daemon's user"
        return (check.fail if refused else check.warn)(f"{shown}: {others} can create and replace files in it", fix)
    if looked.daemon_uid is None:
        return check.skipped("no daemon answers, so its user is not known")
    shown = f"{shown}; the daemon's uid is {looked.daemon_uid}"
    if looked.daemon_uid == 0 or probed.mode & stat.S_IRWXO & ~stat.S_IROTH == stat.S_IWOTH | stat.S_IXOTH:
        return check.ok(shown)
    owners = probed.mode & stat.S_IRWXU == stat.S_IRWXU
    if probed.uid == looked.daemon_uid and owners:
        return check.ok(shown)
    if probed.uid != looked.daemon_uid and probed.mode & stat.S_IWGRP:
        return check.ok(f"{shown}: by its group")
    if looked.place.is_of_all_users:
        return check.fail(shown, f"chmod 1777 {path}, or name a directory of the daemon's user by [ram] path")
    return check.fail(shown, f"chown {looked.daemon_uid} {path} && chmod 0700 {path}")


def _others(looked: Looked) -> str:
    """Return who can write to a directory that should be the daemon's alone; empty for nobody.

    A group that can write to a shared tier is no finding: the daemons of other nodes may have other users.
    """
    if looked.probed.mode & stat.S_IWOTH:
        return "every user"
    return "its group" if looked.place.kind != "shared" and looked.probed.mode & stat.S_IWGRP else ""


def check_file_system(looked: Looked) -> Finding:
    check, kind = Check("file system", looked.name), looked.place.kind
    if looked.mount is None:
        return check.skipped("/proc/self/mountinfo does not tell the mount")
    found = looked.mount.kind
    shown = f"{found}, mounted at {looked.mount.point}"
    if kind == "ram":
        if found in MEMORY_KINDS:
            return check.ok(shown)
        return check.fail(
            f"{shown}: the arena would lie on a device", "set [ram] path to a directory on tmpfs or hugetlbfs"
        )
    if found in MEMORY_KINDS:
        return check.warn(f"{shown}: this is memory, gone at the next boot", "name a directory on a device")
    if found == "overlay":
        return check.warn(f"{shown}: gone with the container", "mount a volume there")
    if kind == "disk" and found in NETWORK_KINDS:
        return check.warn(
            f"{shown}: a tier of kind disk is one daemon's alone, and made for local devices", 'use kind = "shared"'
        )
    if kind == "shared" and found not in NETWORK_KINDS and not found.startswith("fuse"):
        return check.warn(f"{shown}: other nodes cannot see it", "mount a file system that all nodes have there")
    return check.ok(shown)


def check_options(looked: Looked) -> Finding:
    """noexec, nosuid, nodev do not matter: nothing but files of data lies there."""
    check, mount = Check("mount options", looked.name), looked.mount
    if mount is None:
        return check.skipped("/proc/self/mountinfo does not tell the mount")
    if "ro" in mount.options:
        return check.fail(
            f"{mount.point} is mounted read-only",
            f"mount -o remount,rw {mount.point} (`dmesg` has why, if the kernel did it); "
            "under systemd see ReadWritePaths in docs/install.md",
        )
    if mount.kind not in ("nfs", "nfs4"):
        return check.ok("rw")
    return _check_nfs(check, looked, mount)


def _check_nfs(check: Check, looked: Looked, mount: Mount) -> Finding:
    local = {"nolock", "local_lock=all", "local_lock=posix"} & mount.options
    if looked.place.kind == "disk" and local:
        return check.fail(
            f"{', '.join(sorted(local))}: locks hold on this node only, so that two daemons could take this directory",
            'mount it without these, or use kind = "shared", which needs no locks',
        )
    soft = {"soft", "softerr"} & mount.options
    if soft:
        return check.warn(
            f"{', '.join(sorted(soft))}: writes that the server does not take in time are lost, and files torn",
            "mount it hard: the daemon has deadlines of its own ([[tier]] deadline) and waits for no server",
        )
    if looked.place.kind == "shared" and mount.value("lookupcache") not in ("pos", "positive", "none"):
        return check.warn(
            "no lookupcache=positive: what other nodes store is found up to a minute late",
            "mount it with lookupcache=positive (docs/formats/shared.md, Absent names)",
        )
    return check.ok("rw, as is good for NFS")


def check_room(looked: Looked) -> Finding:
    check, place, probed = Check("room", looked.name), looked.place, looked.probed
    if looked.mount is not None and looked.mount.kind == HUGETLBFS:
        return check.skipped("huge pages are counted apart")
    due_bytes = max(place.needed_bytes - probed.held_bytes, 0)
    shown = (
        f"{size_text(place.needed_bytes)} are needed, {size_text(probed.held_bytes)} are held,"
        f" {size_text(probed.free_bytes)} are free of {size_text(probed.total_bytes)}"
    )
    if place.kind == "ram":
        if due_bytes <= probed.free_bytes:
            return check.ok(shown)
        if place.is_of_all_users and looked.asker_uid not in (0, looked.daemon_uid):
            return check.skipped(f"{shown} as far as uid {looked.asker_uid} sees: ask as the daemon's user or as root")
        needed = size_text(probed.total_bytes + due_bytes - probed.free_bytes)
        point = looked.mount.point if looked.mount else place.path
        return check.fail(shown, f"lower [ram] capacity, or mount -o remount,size=SIZE {point}, of at least {needed}")
    if not probed.total_bytes:
        return check.skipped("the file system does not tell its size")
    if place.needed_bytes > probed.total_bytes:
        return check.fail(
            f"{shown}: the capacity is above the file system",
            "lower the tier's capacity to nine tenths of the file system",
        )
    if place.held and due_bytes > probed.free_bytes:
        return check.warn(f"{shown}: the tier will be read-only when it is full", "make room, or lower its capacity")
    return check.ok(shown)


def check_files(looked: Looked) -> Finding:
    """Inodes: a disk tier has some thousand files at most, a shared one a file an object."""
    check, place, probed = Check("inodes", looked.name), looked.place, looked.probed
    if not probed.total_files:
        return check.ok("the file system has no limit of them")
    needed = {"ram": 2, "disk": _FILES_MIN}.get(place.kind, max(place.needed_bytes // _FILE_BYTES, _FILES_MIN))
    shown = f"{probed.free_files} are free, {needed} may be needed"
    if not probed.free_files:
        return check.fail(shown, "remove files, or create the file system again with more inodes")
    if probed.free_files < needed and not probed.held_bytes:
        return check.warn(shown, "remove files, or create the file system again with more inodes")
    return check.ok(shown)


def check_writable(looked: Looked) -> Finding:
    """`Probed.writing` is of who asks, which is not always the daemon's user."""
    check, probed = Check("write", looked.name), looked.probed
    if reason := _not_tried(looked):
        return check.skipped(reason)
    if probed.writing_denied and looked.asker_uid != looked.daemon_uid:
        return check.skipped(f"{probed.writing} for uid {looked.asker_uid}: ask as the daemon's user")
    if probed.writing:
        return check.fail(
            f"no file can be made: {probed.writing}",
            f"permissions, quota or room of {looked.place.path}; `dmesg`",
        )
    return check.ok(f"two files {TEMPORARY}* were made and removed")


def check_rename(looked: Looked) -> Finding:
    check = Check("rename", looked.name)
    if reason := _not_written(looked):
        return check.skipped(reason)
    if looked.probed.rename:
        return check.fail(
            f"no atomic replacement: {looked.probed.rename}",
            "what is published could be seen half: use another file system",
        )
    return check.ok("replaces a file at once")


def check_direct(looked: Looked) -> Finding:
    check = Check("direct I/O", looked.name)
    if reason := _not_written(looked):
        return check.skipped(reason)
    if looked.probed.direct:
        return check.warn(
            f"not past the page cache: {looked.probed.direct}",
            "it works without, at the price of copies and of memory for the page cache: use ext4 or xfs",
        )
    if looked.mount is not None and looked.mount.kind in NETWORK_KINDS:
        return check.ok(f"not used on {looked.mount.kind}: a killed worker's read could still arrive")
    return check.ok("O_DIRECT works")


def check_clock(looked: Looked) -> Finding:
    check, ahead = Check("clock", looked.name), looked.probed.ahead_seconds
    if reason := _not_written(looked):
        return check.skipped(reason)
    shown = f"{abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} this machine's"
    if abs(ahead) > SKEW_SECONDS_MAX:
        return check.warn(
            f"the server's clock is {shown}: ages and dates are shown wrong, nothing expires by it",
            "set both by NTP (`timedatectl`)",
        )
    return check.ok(f"agrees with the server's within {SKEW_SECONDS_MAX:g} s")


def check_key(looked: Looked) -> Finding:
    """Check that nobody but the nodes can write objects that are served. On a local file system this is the mode's."""
    check = Check("key", looked.name)
    if looked.place.keyed:
        return check.ok("objects have a MAC: a forged one is not served")
    if looked.mount is None:
        return check.skipped("/proc/self/mountinfo does not tell the mount")
    if looked.mount.kind not in NETWORK_KINDS and not looked.mount.kind.startswith("fuse"):
        return check.ok(
            f"none, on {looked.mount.kind}: who may write to {looked.place.path} can have wrong bytes served"
        )
    return check.warn(
        f"no key_file, on {looked.mount.kind}: the server, and who may write to it, can have wrong bytes served",
        "set key_file on all nodes (docs/operations.md, Keys of a shared tier)",
    )


_MAKES_HUGE_PAGES = ("always", "within_size")
"""Values of tmpfs's option `huge` that need no advice, which nobody gives for an arena."""


_SHMEM_ENABLED: Final = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"
_MAKES_HUGE_MEMORY: Final = (*_MAKES_HUGE_PAGES, "advise", "force")
"""Values of `shmem_enabled` with which sealed data has huge pages: the daemon gives the advice."""


def check_huge_pages(looked: Looked, host: Host) -> Finding:
    check, mount, sealed = Check("huge pages", looked.name), looked.mount, looked.place.sealed
    if mount is None or mount.kind != HUGETLBFS:
        huge = mount.value("huge") if mount is not None else ""
        if sealed and (chosen := host.chosen(_SHMEM_ENABLED)) in _MAKES_HUGE_MEMORY:
            return check.ok(f"the kernel is asked for them: shmem_enabled={chosen}, pages of {_thp_text(host)}")
        if not sealed and huge in _MAKES_HUGE_PAGES:
            return check.ok(f"the arena's file system is asked for them: huge={huge}, pages of {_thp_text(host)}")
        shown = f"not used: the arena's pages are of {size_text(mmap.PAGESIZE)}"
        if gpus := host.gpu_devices():
            return check.warn(
                f"{shown}, and this node has GPUs ({', '.join(gpus)}): pinning the arena for them takes longer, and"
                " more of their memory",
                f"{f'echo advise > {_SHMEM_ENABLED}' if sealed else _remount(mount)}; then stop the daemon, remove the"
                " arena's file, and start the daemon",
            )
        return check.ok(f"{shown}; with huge pages an object is fewer requests to a disk")
    page_bytes = _page_bytes(mount, host)
    folder = f"/sys/kernel/mm/hugepages/hugepages-{page_bytes >> 10}kB"
    free, reserved = host.number(f"{folder}/free_hugepages"), host.number(f"{folder}/resv_hugepages")
    if free is None:
        return check.skipped(f"{folder} cannot be read")
    due = -(-max(looked.place.needed_bytes - looked.probed.held_bytes, 0) // page_bytes)
    if sealed and looked.daemon_uid is not None:
        return check.ok(f"the running daemon has its pages of {size_text(page_bytes)}")
    free -= reserved or 0
    shown = f"{due} more pages of {size_text(page_bytes)} are needed, {free} are free"
    if due <= free:
        return check.ok(shown)
    total = (host.number(f"{folder}/nr_hugepages") or 0) + due - free
    return check.fail(shown, f"echo {total} > {folder}/nr_hugepages (or at boot), or lower [ram] capacity")


def _remount(mount: Mount | None) -> str:
    if mount is not None and mount.kind == "tmpfs":
        return f"mount -o remount,huge=within_size {mount.point}"
    return "set [ram] path to a directory on a tmpfs with huge=within_size, or on hugetlbfs"


def _thp_text(host: Host) -> str:
    """Return the size of a huge page of tmpfs."""
    page_bytes = host.number("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
    return size_text(page_bytes) if page_bytes else "some MiB"


def _page_bytes(mount: Mount, host: Host) -> int:
    """Of a hugetlbfs, as the mount says it: `pagesize=2M`."""
    text = mount.value("pagesize")
    if text[:-1].isdecimal() and text[-1] in "KMG":
        return int(text[:-1]) << {"K": 10, "M": 20, "G": 30}[text[-1]]
    return host.memory_bytes("Hugepagesize") or 2 << 20


def _not_tried(looked: Looked) -> str:
    return "not tried: --read-only, or the directory is not there" if looked.probed.writing == NOT_TRIED else ""


def _not_written(looked: Looked) -> str:
    return _not_tried(looked) or ("no file can be made" if looked.probed.writing else "")


OF_RAM: Final[tuple[Callable[[Looked], Finding], ...]] = (
    check_there, check_owner, check_file_system, check_options, check_room, check_files,
)  # fmt: skip
OF_TIERS: Final = (*OF_RAM, check_writable, check_rename, check_direct)
OF_SHARED: Final = (*OF_TIERS, check_clock, check_key)
