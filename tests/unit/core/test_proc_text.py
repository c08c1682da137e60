"""Texts of /proc and of cgroups: every name that the kernel permits, and bytes that are no such text at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvdepot.client.ctl.doctor.host import Host
from kvdepot.core import proc_text
from kvdepot.server.config import memory_room

NAMES = st.one_of(
    st.binary(min_size=1, max_size=12),
    st.sampled_from(
        [b"a b", b"a\tb", b"a\nb", b"a\\b", b"\\040", b"a - tmpfs b", b"-", b" - ", b"\xff", b"\xc3\xa9", b"#", b"a\rb",
         b"\x0b", b"\x0c", b"\x1c", b"\xc2\x85", b"\xe2\x80\xa8", b" (deleted)", b"//deleted"]
    ),
).map(lambda name: name.replace(b"/", b"_").replace(b"\0", b"_"))  # fmt: skip
PATHS = st.lists(NAMES, min_size=1, max_size=3).map(lambda names: b"/" + b"/".join(names))


def kernel_text(name: bytes) -> bytes:
    """As fs/proc_namespace.c writes it."""
    return b"".join(b"\\%03o" % byte if byte in b" \t\n\\#" else bytes([byte]) for byte in name)


def line(number: int, parent: int, point: bytes, kind: str = "tmpfs", *, root: bytes = b"/", source: bytes = b"none",
         optional: bytes = b"") -> bytes:  # fmt: skip
    fields = (number, parent, kernel_text(root), kernel_text(point), optional, kind.encode(), kernel_text(source))
    return b"%d %d 0:7 %s %s rw,nosuid%s - %s %s rw,size=4k\n" % fields


ROOT = line(1, 0, b"/", "ext4")


@given(
    point=PATHS, root=PATHS, source=st.one_of(NAMES, st.just(b"")),
    optional=st.sampled_from([b"", b" shared:1", b" shared:1 master:2", b" unbindable"]),
)  # fmt: skip
def test_a_mount_of_any_name_is_found(point: bytes, root: bytes, source: bytes, optional: bytes) -> None:
    text = ROOT + line(2, 1, point, root=root, source=source, optional=optional)
    (_, mount) = found = proc_text.mounts(text)
    assert (os.fsencode(mount.point), os.fsencode(mount.root), mount.kind) == (point, root, "tmpfs")
    assert mount.options == {"rw", "nosuid", "size=4k"}
    inside = proc_text.mount_of(f"{mount.point}/x/y", found)
    beside = proc_text.mount_of(f"{mount.point}x", found)
    assert inside is mount and beside is not None and beside.kind == "ext4"


def test_a_mount_covers_what_was_mounted_below_it_before() -> None:
    covered = ROOT + line(2, 1, b"/a/b", "xfs") + line(3, 1, b"/a", "tmpfs")
    mounted_after = ROOT + line(2, 1, b"/a", "tmpfs") + line(3, 2, b"/a/b", "xfs")
    twice = ROOT + line(2, 1, b"/a", "tmpfs") + line(3, 2, b"/a", "xfs")

    def kind(text: bytes) -> str:
        mount = proc_text.mount_of("/a/b/c", proc_text.mounts(text))
        return mount.kind if mount is not None else ""

    assert (kind(covered), kind(mounted_after), kind(twice)) == ("tmpfs", "xfs", "xfs")
    assert kind(b"") == kind(line(2, 1, b"/elsewhere")) == ""


@pytest.mark.parametrize(
    ("mountinfo", "path", "place"),
    [
        (ROOT, "/a/b", "/a/b"),
        (ROOT + line(2, 1, b"/m", root=b"/data"), "/m", "/data"),
        (ROOT + line(2, 1, b"/m", root=b"/data"), "/m/x", "/data/x"),
        (ROOT + line(2, 1, b"/m", root=b"/data//deleted"), "/m/x", "/data/x"),
        (ROOT, "/", "/"),
    ],
)
def test_a_place_is_the_same_by_every_mount_of_it(mountinfo: bytes, path: str, place: str) -> None:
    mount = proc_text.mount_of(path, proc_text.mounts(mountinfo))
    assert mount is not None and proc_text.place_on_device(path, mount) == place


@given(path=PATHS.filter(lambda path: b"\n" not in path and b".." not in path.split(b"/")))
def test_cgroups_of_any_name_are_found_with_all_above_them(path: bytes) -> None:
    """The kernel makes no cgroup with a newline in its name."""
    folders = [os.fsencode(files.folder) for files in proc_text.memory_cgroups(b"0::" + path + b"\n")]
    assert folders[0] == b"" and folders[-1] == path.lstrip(b"/")
    assert len(folders) == 1 + len([part for part in path.split(b"/") if part])
    old = [os.fsencode(files.folder) for files in proc_text.memory_cgroups(b"4:memory:" + path)]
    assert old == [b"/".join(filter(None, (b"memory", folder))) for folder in folders]


def test_a_cgroup_out_of_sight_is_not_looked_for_outside_the_mount() -> None:
    assert [files.folder for files in proc_text.memory_cgroups(b"0::/../../other\n")] == [""]


def test_controllers_that_are_mounted_together_count() -> None:
    assert [files.folder for files in proc_text.memory_cgroups(b"3:cpu,memory:/\n2:cpuset:/x\n")] == ["cpu,memory"]


@given(text=st.binary(max_size=200))
def test_bytes_that_are_no_such_text_stop_nobody(text: bytes) -> None:
    proc_text.mount_of("/a/b", proc_text.mounts(text))
    list(proc_text.memory_cgroups(text))
    proc_text.number(text)
    proc_text.amount(b"MemTotal: " + text, "MemTotal")


SHAPED = st.lists(
    st.sampled_from([b" ", b" - ", b"\n", b":", b"0", b"7", b"/", b"\\040", b"\\777", b"\xff", b"tmpfs", b"memory",
                     b"-", b"\xc2\xb2", b"kB", b"unlimited"]), max_size=40,
).map(b"".join)  # fmt: skip


@given(text=SHAPED)
def test_the_daemon_and_doctor_read_whatever_the_kernel_says(
    text: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("proc")
    for name in ("mountinfo", "cgroup", "limits", "status", "environ"):
        _put(root / "proc/self" / name, text)
    _put(root / "proc/meminfo", b"MemTotal:" + text)
    _put(root / "sys/fs/cgroup/memory.max", text)
    host = Host(root)
    host.mount_of("/a/b")
    host.memory_bytes("MemTotal")
    host.memory_limits("self")
    host.limit("self", "Max open files")
    host.may_lock_memory("self")
    host.environment_of(1)
    with pytest.MonkeyPatch.context() as patch:
        for name, path in (("_MOUNTINFO", "self/mountinfo"), ("_MEMINFO", "meminfo")):
            patch.setattr(memory_room, name, root / "proc" / path)
        memory_room.file_system(Path("/tmp"))
        assert memory_room.host_bytes() > 0
        assert memory_room.memory_room().limit
        memory_room.cgroup_limits(root / "proc/self/cgroup", root / "sys/fs/cgroup")


def _put(path: Path, text: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text)


def test_what_the_kernel_does_not_say_stops_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_MOUNTINFO", "_MEMINFO"):
        monkeypatch.setattr(memory_room, name, tmp_path / "absent")
    assert memory_room.file_system(tmp_path) == ""
    assert memory_room.host_bytes() > 0
    assert memory_room.memory_room().available_bytes > 0
    assert memory_room.cgroup_limits(tmp_path / "absent", tmp_path) == []


def test_a_mount_whose_name_is_not_utf8_is_the_arena_s_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / os.fsdecode(b"m\xff - ext4 \n\\")
    folder.mkdir()
    _put(tmp_path / "mountinfo", ROOT + line(2, 1, os.fsencode(folder)))
    monkeypatch.setattr(memory_room, "_MOUNTINFO", tmp_path / "mountinfo")
    assert memory_room.file_system(folder) == "tmpfs"
    _put(tmp_path / "proc/self/mountinfo", ROOT + line(2, 1, os.fsencode(folder)))
    mount = Host(tmp_path).mount_of(str(folder))
    assert mount is not None and mount.kind == "tmpfs"


def test_a_process_s_name_adds_no_line_to_its_status(tmp_path: Path) -> None:
    _put(tmp_path / "proc/7/status", b"Name:\tx\rCapEff:\tffffffff\x1eCapEff:\tffffffff\nCapEff:\t0000000000000000\n")
    assert not Host(tmp_path).may_lock_memory("7")
