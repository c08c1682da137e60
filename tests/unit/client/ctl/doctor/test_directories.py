"""`kvdepotctl doctor` of directories: each check fails where it should, and says what to do."""

from __future__ import annotations

import mmap
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from kvdepot.client.ctl.doctor import directories, probe
from kvdepot.client.ctl.doctor.directories import Looked
from kvdepot.client.ctl.doctor.examination import look_at
from kvdepot.client.ctl.doctor.findings import Finding, Outcome
from kvdepot.client.ctl.doctor.host import Host
from kvdepot.client.ctl.doctor.probe import TEMPORARY, Probed
from kvdepot.client.ctl.doctor.settings import Place
from kvdepot.core.proc_text import Mount
from kvdepot.core.units import size_text

from tests.rigs.patience import Deadline

GIB = 1 << 30
PATH = "/mnt/tier"
GOOD = Probed(
    PATH, is_there=True, is_directory=True, mode=0o700, uid=990, free_bytes=80 * GIB, total_bytes=100 * GIB,
    free_files=10**6, total_files=10**7, writing="",
)  # fmt: skip
EXT4 = Mount(PATH, "ext4", frozenset({"rw", "relatime"}))
TMPFS = Mount("/dev/shm", "tmpfs", frozenset({"rw", "nosuid", "noexec"}))
NFS = Mount(PATH, "nfs4", frozenset({"rw", "hard", "lookupcache=pos", "vers=4.2"}))
HUGE = Mount("/mnt/huge", "hugetlbfs", frozenset({"rw", "pagesize=2M"}))
ALL_USERS = Place("ram", "ram", "/dev/shm", 40 * GIB, "kvdepot-*-a.arena", is_of_all_users=True)
RAM = Looked(ALL_USERS, replace(GOOD, mode=0o1777), TMPFS, 990)
OWN_RAM = Looked(Place("ram", "ram", "/mnt/ram", 40 * GIB, "kvdepot-*-a.arena"), GOOD, TMPFS, 990)
DISK = Looked(Place("nvme", "disk", PATH, 50 * GIB, "*"), GOOD, EXT4, 990)
SHARED = Looked(Place("nfs", "shared", PATH, 50 * GIB, keyed=True), GOOD, NFS, 990)
UNKEYED = replace(SHARED, place=replace(SHARED.place, keyed=False))


def seen(looked: Looked, mount: Mount | None = None, **changed: object) -> Looked:
    return replace(looked, probed=replace(looked.probed, **changed), mount=mount or looked.mount)  # type: ignore[arg-type]


def nfs(*options: str) -> Mount:
    return replace(NFS, options=frozenset({"rw", *options}))


@pytest.mark.parametrize("looked", [RAM, OWN_RAM, DISK, SHARED], ids=lambda looked: looked.name)
def test_what_is_well_is_ok(looked: Looked) -> None:
    checks = {"ram": directories.OF_RAM, "disk": directories.OF_TIERS, "shared": directories.OF_SHARED}
    findings = [check(looked) for check in checks[looked.place.kind]]
    assert {one.outcome for one in findings} == {Outcome.OK}
    assert len({one.check for one in findings}) == len(findings)


@pytest.mark.requirement("S5")
def test_a_shared_tier_on_a_local_file_system_has_a_note_of_its_key() -> None:
    found = directories.check_key(seen(UNKEYED, EXT4))
    assert found.outcome is Outcome.OK and "can have wrong bytes served" in found.message


EMPTY = seen(SHARED, on_root_filesystem=True, is_empty=True)
Check = Callable[[Looked], Finding]
BAD: list[tuple[Check, Looked, str, str, str]] = [
    (directories.check_there, seen(DISK, is_directory=False), "fail", "is no directory", "move away"),
    (directories.check_there, seen(SHARED, is_there=False, resolved="/mnt"), "fail", "is not there", "mount it"),
    (directories.check_there, EMPTY, "fail", "its mount is late", "on_root_filesystem"),
    (directories.check_owner, seen(DISK, uid=1000), "fail", "the daemon's uid is 990", "chown 990 /mnt/tier"),
    (directories.check_owner, seen(DISK, mode=0o500), "fail", "mode 0500", "chmod 0700"),
    (directories.check_owner, seen(RAM, mode=0o755, uid=0), "fail", "mode 0755", "chmod 1777 /dev/shm"),
    (directories.check_owner, seen(RAM, mode=0o777, uid=0), "warn", "without the sticky bit", "chmod 1777 /dev/shm"),
    (directories.check_owner, seen(OWN_RAM, mode=0o1777), "warn", "every user can create", "chmod go-w /mnt/ram"),
    (directories.check_owner, seen(DISK, mode=0o1777), "fail", "every user can create", "chmod go-w /mnt/tier"),
    (directories.check_owner, seen(SHARED, mode=0o777), "fail", "every user can create", "chmod go-w /mnt/tier"),
    (directories.check_owner, seen(DISK, uid=0, mode=0o770), "warn", "its group can create", "chmod go-w /mnt/tier"),
    (directories.check_file_system, seen(RAM, EXT4), "fail", "on a device", "[ram] path"),
    (directories.check_file_system, seen(DISK, TMPFS), "warn", "this is memory", "on a device"),
    (directories.check_file_system, seen(DISK, Mount("/", "overlay", frozenset())), "warn", "container", "a volume"),
    (directories.check_file_system, seen(DISK, NFS), "warn", "one daemon's alone", 'kind = "shared"'),
    (directories.check_file_system, seen(SHARED, EXT4), "warn", "other nodes cannot see it", "all nodes"),
    (directories.check_options, seen(DISK, Mount(PATH, "xfs", frozenset({"ro"}))), "fail", "read-only", "remount,rw"),
    (directories.check_options, seen(DISK, nfs("nolock")), "fail", "nolock: locks hold on this node", "shared"),
    (directories.check_options, seen(DISK, nfs("local_lock=all")), "fail", "two daemons", "shared"),
    (directories.check_options, seen(SHARED, nfs("soft")), "warn", "soft: writes", "mount it hard"),
    (directories.check_options, seen(SHARED, nfs("hard")), "warn", "up to a minute late", "lookupcache=positive"),
    (directories.check_room, seen(RAM, free_bytes=39 * GIB), "fail", "40.00 GiB are", "remount,size=SIZE /dev/shm"),
    (directories.check_room, seen(DISK, total_bytes=49 * GIB), "fail", "free of 49.00 GiB", "nine tenths"),
    (directories.check_room, seen(DISK, total_bytes=49 * GIB), "fail", "above the file system", "nine tenths"),
    (directories.check_room, seen(DISK, free_bytes=10 * GIB, held_bytes=39 * GIB), "warn", "read-only", "make room"),
    (directories.check_files, seen(DISK, free_files=0), "fail", "0 are free", "inodes"),
    (directories.check_files, seen(SHARED, free_files=20_000), "warn", "51200 may be needed", "inodes"),
    (directories.check_writable, seen(DISK, writing="Input/output error"), "fail", "Input/output error", "permissions"),
    (directories.check_rename, seen(DISK, rename="Invalid argument"), "fail", "no atomic", "another file system"),
    (directories.check_direct, seen(DISK, direct="Invalid argument"), "warn", "page cache", "ext4 or xfs"),
    (directories.check_clock, seen(SHARED, ahead_seconds=-90.0), "warn", "90.0 s behind", "NTP"),
    (directories.check_key, UNKEYED, "warn", "no key_file, on nfs4", "set key_file on all nodes"),
    (directories.check_key, seen(UNKEYED, Mount(PATH, "fuse.ceph", frozenset())), "warn", "fuse.ceph", "key_file"),
]  # fmt: skip


@pytest.mark.parametrize(("check", "looked", "outcome", "message", "fix"), BAD)
def test_what_is_wrong_is_said_with_its_fix(check: Check, looked: Looked, outcome: str, message: str, fix: str) -> None:
    found = check(looked)
    assert (found.outcome, found.subject) == (outcome, looked.name)
    assert message in found.message and fix in found.fix


@pytest.mark.parametrize(
    ("check", "looked", "message"),
    [
        (directories.check_there, seen(DISK, is_there=False, resolved="/mnt"), "the daemon makes it in /mnt"),
        (directories.check_room, seen(RAM, free_bytes=4 * GIB, held_bytes=36 * GIB), "36.00 GiB are held"),
        (directories.check_room, seen(DISK, free_bytes=GIB, held_bytes=50 * GIB), "50.00 GiB are held"),
        (directories.check_files, seen(DISK, total_files=0, free_files=0), "no limit"),
        (directories.check_files, seen(DISK, free_files=500, held_bytes=GIB), "500 are free"),
        (directories.check_owner, seen(SHARED, uid=0, mode=0o770), "by its group"),
        (directories.check_there, seen(SHARED, on_root_filesystem=True), "is there"),
    ],
)
def test_what_only_looks_wrong_is_ok(check: Check, looked: Looked, message: str) -> None:
    found = check(looked)
    assert found.outcome is Outcome.OK and message in found.message


def test_a_file_system_that_does_not_tell_its_size_is_not_too_small() -> None:
    assert directories.check_room(seen(DISK, total_bytes=0, free_bytes=0)).outcome is Outcome.SKIPPED


@pytest.mark.parametrize("check", [directories.check_writable, directories.check_rename, directories.check_direct])
def test_what_was_not_tried_is_skipped(check: Check) -> None:
    assert check(seen(DISK, writing=probe.NOT_TRIED)).outcome is Outcome.SKIPPED
    assert directories.check_owner(replace(DISK, daemon_uid=None)).outcome is Outcome.SKIPPED


def test_what_the_asker_may_not_write_the_daemon_may() -> None:
    denied = replace(seen(DISK, writing="Permission denied", writing_denied=True), asker_uid=1000)
    assert "ask as the daemon's user" in directories.check_writable(denied).message
    assert directories.check_rename(denied).outcome is Outcome.SKIPPED
    assert directories.check_writable(replace(denied, asker_uid=990)).outcome is Outcome.FAIL


def test_who_may_not_look_into_the_arena_s_directory_says_nothing_of_its_room() -> None:
    full = seen(RAM, free_bytes=39 * GIB)
    assert "ask as the daemon's user" in directories.check_room(replace(full, asker_uid=1000)).message
    assert directories.check_room(replace(full, asker_uid=990)).outcome is Outcome.FAIL
    assert directories.check_room(replace(seen(OWN_RAM, free_bytes=GIB), asker_uid=1000)).outcome is Outcome.FAIL


def test_huge_pages_are_counted(tmp_path: Path) -> None:
    folder = tmp_path / "sys/kernel/mm/hugepages/hugepages-2048kB"
    folder.mkdir(parents=True)
    for name, count in (("free", 1000), ("nr", 1024), ("resv", 10)):
        (folder / f"{name}_hugepages").write_text(f"{count}\n")
    host, looked = Host(tmp_path), seen(RAM, HUGE)
    found = directories.check_huge_pages(looked, host)
    assert found.outcome is Outcome.FAIL and "20480 more pages of 2.00 MiB are needed, 990 are free" in found.message
    assert f"echo {1024 + 20480 - 990} > /sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages" in found.fix
    assert directories.check_huge_pages(seen(looked, held_bytes=40 * GIB), host).outcome is Outcome.OK
    sealed = replace(looked, place=replace(looked.place, sealed=True))
    assert directories.check_huge_pages(sealed, host).outcome is Outcome.OK, "the daemon that answers has them"
    assert directories.check_huge_pages(replace(sealed, daemon_uid=None), host).outcome is Outcome.FAIL
    assert directories.check_huge_pages(looked, Host(tmp_path / "none")).outcome is Outcome.SKIPPED
    assert directories.check_room(looked).outcome is Outcome.SKIPPED


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("huge=within_size", "asked for them: huge=within_size, pages of 2.00 MiB"),
        ("huge=always", "asked for them"),
        ("huge=advise", "not used"),
        ("rw", "not used"),
    ],
)
def test_huge_pages_of_tmpfs_are_an_option_of_its_mount(tmp_path: Path, option: str, message: str) -> None:
    folder = tmp_path / "sys/kernel/mm/transparent_hugepage"
    folder.mkdir(parents=True)
    (folder / "hpage_pmd_size").write_text("2097152\n")
    looked = replace(RAM, mount=replace(TMPFS, options=TMPFS.options | {option}))
    found = directories.check_huge_pages(looked, Host(tmp_path))
    assert found.outcome is Outcome.OK and message in found.message


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ("advise", "asked for them: shmem_enabled=advise, pages of 2.00 MiB"),
        ("within_size", "asked for them"),
        ("never", "not used"),
        ("deny", "not used"),
    ],
)
def test_huge_pages_of_sealed_data_are_the_kernel_s_choice(tmp_path: Path, chosen: str, message: str) -> None:
    """Whatever the mount says."""
    folder = tmp_path / "sys/kernel/mm/transparent_hugepage"
    folder.mkdir(parents=True)
    (folder / "hpage_pmd_size").write_text("2097152\n")
    values = ("always", "within_size", "advise", "never", "deny", "force")
    (folder / "shmem_enabled").write_text(" ".join(f"[{one}]" if one == chosen else one for one in values))
    mount = replace(TMPFS, options=TMPFS.options | {"huge=within_size"})
    sealed = replace(RAM, place=replace(RAM.place, sealed=True), mount=mount)
    found = directories.check_huge_pages(sealed, Host(tmp_path))
    assert found.outcome is Outcome.OK and message in found.message
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    warned = directories.check_huge_pages(sealed, Host(tmp_path))
    assert warned.outcome is (Outcome.OK if "asked" in message else Outcome.WARN)
    assert "asked" in message or "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled" in warned.fix


@pytest.mark.parametrize(
    ("devices", "named"),
    [
        (["nvidia0", "nvidia12", "nvidiactl", "nvidia-uvm"], "(/dev/nvidia0, /dev/nvidia12)"),
        (["kfd", "dri", "null"], "(/dev/kfd)"),
        (["nvidiactl", "0", "null"], ""),
        ([], ""),
    ],
)
def test_an_arena_of_small_pages_on_a_node_with_gpus_is_a_warning(
    tmp_path: Path, devices: list[str], named: str
) -> None:
    (tmp_path / "dev").mkdir()
    for name in devices:
        (tmp_path / "dev" / name).touch()
    host = Host(tmp_path)
    found = directories.check_huge_pages(RAM, host)
    assert found.outcome is (Outcome.WARN if named else Outcome.OK)
    assert f"the arena's pages are of {size_text(mmap.PAGESIZE)}" in found.message
    if named:
        assert named in found.message
        assert "mount -o remount,huge=within_size /dev/shm" in found.fix and "remove the arena's file" in found.fix
        assert found.runbook.endswith("#huge-pages")
    huge = replace(RAM, mount=replace(TMPFS, options=TMPFS.options | {"huge=within_size"}))
    assert directories.check_huge_pages(huge, host).outcome is Outcome.OK


def test_a_node_with_gpus_and_an_arena_on_a_disk_is_told_where_huge_pages_are(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    found = directories.check_huge_pages(seen(RAM, EXT4), Host(tmp_path))
    assert found.outcome is Outcome.WARN and "set [ram] path" in found.fix


# The probe, in its own process


def place(path: Path, kind: str = "disk", held: str = "*") -> Place:
    return Place("one", kind, str(path), GIB, held)


def test_a_probe_tries_what_a_tier_does_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "segment").write_bytes(b"x" * 8192)
    (probed,) = look_at([place(tmp_path)], 20, writing=True)
    assert probed is not None
    assert (probed.looking, probed.writing, probed.rename) == ("", "", "")
    assert probed.is_there and probed.uid == os.geteuid() and probed.total_bytes > 0
    assert probed.held_bytes >= 8192
    assert abs(probed.ahead_seconds) < 1
    assert [one.name for one in tmp_path.iterdir()] == ["segment"]


def test_a_probe_that_may_not_write_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probed = probe.probe(str(tmp_path / "later" / "on"), "*", write=True)
    assert (probed.is_there, probed.resolved, probed.writing) == (False, str(tmp_path), probe.NOT_TRIED)
    (tmp_path / "file").touch()
    assert not probe.probe(str(tmp_path / "file"), "", write=True).is_directory
    monkeypatch.setattr(Path, "write_bytes", _refuse)
    assert probe.probe(str(tmp_path), "*", write=True).writing == "Read-only file system"


def _refuse(*_: object) -> int:
    raise OSError(30, "Read-only file system")


def test_a_rename_that_replaces_nothing_and_a_clock_that_is_ahead_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "rename", lambda *_: None)
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    probed = probe.probe(str(tmp_path), "", write=True)
    assert probed.rename == "a rename over a file does not replace it"
    assert probed.ahead_seconds > 10**6
    assert not list(tmp_path.glob(f"{TEMPORARY}*"))


def test_a_probe_that_hangs_is_given_up_and_the_others_are_not(tmp_path: Path) -> None:
    program = "import sys, time; time.sleep(60 if sys.argv[1].endswith('hung') else 0); print('{\"resolved\": \"/\"}')"
    limit = Deadline(20)
    hung, good = look_at(
        [place(tmp_path / "hung"), place(tmp_path)], 5.0, writing=False, command=[sys.executable, "-I", "-c", program]
    )
    assert not limit.is_over()
    assert hung is None and good == Probed("/")
    found = directories.check_answers(place(tmp_path), None, 2.0)
    assert found.outcome is Outcome.FAIL and "does not answer within 2 s" in found.message and "umount -l" in found.fix


def test_a_directory_that_cannot_be_looked_at_is_a_failure_or_the_askers_lack_of_permission(tmp_path: Path) -> None:
    bad = directories.check_answers(place(tmp_path), Probed("/x", looking="Stale file handle"), 1)
    assert bad.outcome is Outcome.FAIL and "Stale file handle" in bad.message
    denied = directories.check_answers(place(tmp_path), Probed("/x", looking="Permission denied", denied=True), 1)
    assert denied.outcome is Outcome.SKIPPED and "as root" in denied.message
    crash = look_at([place(tmp_path)], 20, writing=False, command=[sys.executable, "-c", "raise SystemExit('broken')"])
    assert crash == [Probed(str(tmp_path), looking="broken")]
    other = look_at([place(tmp_path)], 20, writing=False, command=[sys.executable, "-c", "print('other')"])
    assert other == [Probed(str(tmp_path), looking="the answer is no JSON: 'other'")]
