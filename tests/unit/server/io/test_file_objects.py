"""Objects that are files of their own: published, looked up, read, quarantined, on real files (P6, T3, T5)."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kvdepot.core.objectfile import HEADER_BYTES, Codec, ObjectHeader, ObjectName, object_bytes
from kvdepot.server.io import direct_io, file_objects, objects
from kvdepot.server.io.context import Context
from kvdepot.server.io.jobs import ABSENT, UNKNOWN, Answer, Probe, StatFiles, TouchFiles
from kvdepot.server.io.perform import perform
from kvdepot.server.platform import beneath
from kvdepot.server.storage import shared_layout as layout
from kvdepot.server.storage.base import IoOutcome
from kvdepot.server.storage.shared_layout import object_file

from tests.rigs.io_rig import MIB, PAGE, pattern
from tests.rigs.shared_files import Files

HOUR = 3600


def _age(path: Path) -> None:
    os.utime(path, (1_000, 1_000))


def _flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


# Publishing


@pytest.mark.parametrize("codec", list(Codec), ids=lambda codec: codec.name)
@pytest.mark.parametrize("raw_bytes", [1, PAGE, PAGE + 1, 3 * MIB + 5])
@pytest.mark.parametrize("buffered", [False, True])
def test_what_was_published_is_read_back(files: Files, codec: Codec, raw_bytes: int, buffered: bool) -> None:
    files.context.files.direct = not buffered
    job = files.stored(1, raw_bytes, codec)
    assert files.read(job) == (IoOutcome.OK, pattern(raw_bytes, 1))
    stored = ObjectHeader.unpack(files.path(job).read_bytes()[:HEADER_BYTES]).stored_bytes
    assert files.path(job).stat().st_size == object_bytes(stored)


@pytest.mark.requirement("T3")
def test_a_file_is_whole_or_not_there(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under its name from the rename on, and what was before has the name of a temporary."""
    seen: list[list[str]] = []
    real = os.rename

    def rename(old: str, new: str, **folders: int) -> None:
        seen.append(files.files())
        real(old, new, **folders)

    monkeypatch.setattr(os, "rename", rename)
    job = files.stored(1)
    assert all(job.file not in names and job.temporary in names for names in seen)
    assert job.file in files.files() and job.temporary not in files.files()


def test_a_namespace_is_described_by_whoever_makes_its_folder(files: Files) -> None:
    job = files.stored(1)
    described = files.path(job).parents[1] / layout.NAMESPACE
    assert job.name.namespace.hex() in described.read_text()
    described.write_text("more is known")
    other = files.job(1)
    files.publish(replace(other, name=replace(other.name, key=bytes(16)), file=object_file(
        replace(other.name, key=bytes(16)))))  # fmt: skip
    assert described.read_text() == "more is known"


@pytest.mark.requirement("T3")
def test_what_is_there_is_not_written_again_but_refreshed(files: Files) -> None:
    job = files.stored(1)
    before = files.path(job).stat()
    _age(files.path(job))
    for raw_sum in (job.raw_sum, None):
        again = files.publish(replace(job, temporary=".tmp/other-1.tmp", raw_sum=raw_sum))
        assert (again.outcome, again.already_there, again.raw_sum) == (IoOutcome.OK, True, job.raw_sum)
    after = files.path(job).stat()
    assert after.st_ino == before.st_ino and after.st_mtime > HOUR


@pytest.mark.requirement("T3")
def test_the_sum_of_an_answer_is_the_ram_copy_s_also_where_another_node_s_bytes_differ(files: Files) -> None:
    job = files.stored(1, PAGE)
    files.arena[job.extents[0][0]] ^= 1
    again = files.publish(replace(job, temporary=".tmp/other-1.tmp", raw_sum=None))
    assert again.already_there and again.raw_sum != job.raw_sum


@pytest.mark.requirement("P6")
@pytest.mark.parametrize("damage", ["short", "header", "foreign"])
def test_a_damaged_file_in_the_way_is_quarantined_and_replaced(files: Files, damage: str) -> None:
    job = files.stored(1)
    other = files.stored(4)
    data = {
        "short": files.path(job).read_bytes()[:-PAGE],
        "header": b"x" + files.path(job).read_bytes()[1:],
        "foreign": files.path(other).read_bytes(),
    }[damage]
    files.path(job).write_bytes(data)
    again = files.job(1)
    answer = files.publish(again)
    assert (answer.outcome, answer.already_there) == (IoOutcome.OK, False)
    assert files.read(job) == (IoOutcome.OK, pattern(2 * MIB, 1))
    (quarantined,) = files.files(layout.QUARANTINE)
    assert (files.directory / quarantined).read_bytes() == data


@pytest.mark.requirement("I1")
def test_a_copy_in_ram_that_changed_is_not_published(files: Files) -> None:
    job = files.job(1)
    files.arena[job.extents[0][0]] ^= 1
    assert files.publish(job).outcome is IoOutcome.CORRUPT
    assert files.files() == [layout.MARKER]


@pytest.mark.requirement("T5")
@pytest.mark.parametrize(
    ("call", "number", "outcome"),
    [
        ("pwritev", errno.ENOSPC, IoOutcome.NO_SPACE),
        ("pwritev", errno.EDQUOT, IoOutcome.NO_SPACE),
        ("pwritev", errno.EIO, IoOutcome.IO_ERROR),
        ("fdatasync", errno.EIO, IoOutcome.IO_ERROR),
        ("rename", errno.EROFS, IoOutcome.READ_ONLY),
        ("rename", errno.EACCES, IoOutcome.UNREADABLE),
        ("rename", errno.ENOENT, IoOutcome.IO_ERROR),
    ],
)
def test_a_publication_that_fails_leaves_nothing(
    files: Files, monkeypatch: pytest.MonkeyPatch, call: str, number: int, outcome: IoOutcome
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(number, "injected")

    monkeypatch.setattr(os, call, fail)
    assert files.publish(files.job(1, sync=True)).outcome is outcome
    assert [file for file in files.files() if not file.endswith(layout.NAMESPACE)] == [layout.MARKER]


def test_a_synced_publication_is_durable_with_the_names_of_its_new_folders(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(Path(f"/proc/self/fd/{fd}").resolve()))
    job = files.job(1, sync=True)
    assert files.publish(job).outcome is IoOutcome.OK
    folder = files.path(job).parent
    assert set(synced) == {folder, folder.parent, files.directory}


@pytest.mark.parametrize("where", ["open", "request", "file system"])
def test_a_path_that_refuses_o_direct_is_used_through_the_page_cache(
    files: Files, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    real_open, real_write = os.open, os.pwritev

    def refuse_open(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if flags & os.O_DIRECT:  # as some do: the file is there, and the call failed
            os.close(real_open(path, flags & ~os.O_DIRECT, mode, dir_fd=dir_fd))
            raise OSError(errno.EINVAL, "injected", path)
        return real_open(path, flags, mode, dir_fd=dir_fd)

    def refuse_write(fd: int, buffers: list[memoryview], offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "injected")
        return real_write(fd, buffers, offset)

    if where == "open":
        monkeypatch.setattr(os, "open", refuse_open)
    elif where == "request":
        monkeypatch.setattr(os, "pwritev", refuse_write)
    else:
        monkeypatch.setattr(direct_io, "file_system", lambda fd: 0x6969)  # NFS
    job = files.job(1)
    answer = files.publish(job)
    assert (answer.outcome, answer.direct) == (IoOutcome.OK, False)
    assert files.read(job) == (IoOutcome.OK, pattern(2 * MIB, 1))


@pytest.mark.requirement("T5")
def test_what_did_not_get_its_full_length_is_not_published(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    real = objects.write_object

    def cut(*arguments: Any) -> Answer:
        job, *_ = arguments
        answer = real(*arguments)
        os.truncate(files.directory / job.parts[0].file, HEADER_BYTES)
        return answer

    monkeypatch.setattr(file_objects, "write_object", cut)
    assert files.publish(files.job(1)).outcome is IoOutcome.IO_ERROR
    assert files.files() == [layout.MARKER]


@pytest.mark.requirement("T5")
def test_nothing_is_written_where_the_directory_is_not(files: Files, tmp_path: Path) -> None:
    job = files.job(1)
    assert files.publish(replace(job, device=job.device + 1)).outcome is IoOutcome.GONE
    assert files.files() == [layout.MARKER]
    empty = tmp_path / "empty"
    empty.mkdir()
    context = Context(os.fspath(empty), files.arena)
    assert perform(job, context).outcome is IoOutcome.GONE
    assert perform(Probe(layout.PROBE), context).outcome is IoOutcome.GONE
    assert not list(empty.iterdir())


def test_what_a_dead_worker_left_is_replaced(files: Files) -> None:
    job = files.job(1)
    (files.directory / job.temporary).write_bytes(bytes(9 * MIB))
    assert files.publish(job).outcome is IoOutcome.OK
    assert files.read(job) == (IoOutcome.OK, pattern(2 * MIB, 1))


# Reading


def _headed(change: Callable[[ObjectHeader], ObjectHeader]) -> Callable[[bytes], bytes]:
    return lambda data: change(ObjectHeader.unpack(data[:HEADER_BYTES])).pack() + data[HEADER_BYTES:]


def _named(**changes: Any) -> Callable[[ObjectHeader], ObjectHeader]:
    return lambda header: replace(header, name=replace(header.name, **changes))


def _longer(header: ObjectHeader) -> ObjectHeader:
    longer = header.name.raw_bytes + PAGE
    return replace(header, name=replace(header.name, raw_bytes=longer), stored_bytes=longer)


DAMAGES: dict[str, tuple[IoOutcome, Callable[[bytes], bytes]]] = {
    "zero length": (IoOutcome.TOO_SHORT, lambda _: b""),
    "cut in the header": (IoOutcome.TOO_SHORT, lambda data: data[:100]),
    "cut in the payload": (IoOutcome.TOO_SHORT, lambda data: data[: len(data) // 2 + 5]),
    "magic": (IoOutcome.MAGIC, lambda data: b"x" + data[1:]),
    "later version": (IoOutcome.VERSION, lambda data: data[:12] + (1 << 30).to_bytes(4, "little") + data[16:]),
    "old version": (IoOutcome.VERSION, lambda data: data[:8] + bytes(4) + data[12:]),
    "bit of the header": (IoOutcome.HEADER, lambda data: data[:100] + bytes([data[100] ^ 1]) + data[101:]),
    "bit of the payload": (IoOutcome.CORRUPT, lambda data: data[:9_000] + bytes([data[9_000] ^ 1]) + data[9_001:]),
    "foreign namespace": (IoOutcome.IDENTITY, _headed(_named(namespace=b"another-namespac"))),
    "foreign key": (IoOutcome.IDENTITY, _headed(_named(key=b"another-key....."))),
    "foreign kind": (IoOutcome.IDENTITY, _headed(_named(kind=3))),
    "another length": (IoOutcome.LENGTH, _headed(_longer)),
    "another length and parent": (
        IoOutcome.IDENTITY,
        lambda data: _headed(_longer)(_headed(_named(parent=b"another-parent.."))(data)),
    ),
    "impossible length": (IoOutcome.LENGTH, _headed(lambda header: replace(header, stored_bytes=1))),
}


@pytest.mark.requirement("P6")
@pytest.mark.parametrize("raw_bytes", [5 * PAGE, 10 * MIB + 7], ids=["small", "longer than scratch"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_each_damage_is_a_miss_of_its_own_kind_and_quarantined(files: Files, damage: str, raw_bytes: int) -> None:
    outcome, change = DAMAGES[damage]
    job = files.stored(1, raw_bytes)
    data = change(files.path(job).read_bytes())
    files.path(job).write_bytes(data)
    assert files.read(job)[0] is outcome
    assert not files.path(job).exists()
    (quarantined,) = files.files(layout.QUARANTINE)
    assert quarantined == f"{job.quarantine}.{outcome}.kvd"
    assert (files.directory / quarantined).read_bytes() == data
    assert files.read(job)[0] is IoOutcome.GONE


CLAIMS: dict[str, dict[str, Any]] = {
    "parent": {"parent": b"another-parent.."},
    "boundary": {"boundary_tokens": 7_777},
    "both": {"parent": b"another-parent..", "boundary_tokens": 7_777},
}


@pytest.mark.requirement("P6")
@pytest.mark.parametrize("codec", [Codec.NONE, Codec.BITSHUFFLE_LZ4], ids=lambda codec: codec.name)
@pytest.mark.parametrize("claim", CLAIMS)
def test_who_asks_with_other_claims_than_the_writer_s_misses_and_the_file_stays(
    files: Files, claim: str, codec: Codec
) -> None:
    """Reading and publishing alike: nothing proves which of the two is wrong, and the file may be everybody's hit."""
    job = files.stored(1, 5 * PAGE, codec)
    before = files.path(job).stat()
    wrong = replace(job, name=replace(job.name, **CLAIMS[claim]), temporary=".tmp/other-1.tmp", raw_sum=None)
    wrong = replace(wrong, extents=((0, wrong.name.raw_bytes),))
    for _ in range(2):
        assert perform(files.read_job(wrong), files.context).outcome is IoOutcome.FOREIGN
        assert files.publish(wrong).outcome is IoOutcome.FOREIGN
    after = files.path(job).stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert not files.files(layout.QUARANTINE) and not files.files(layout.TEMPORARIES)
    assert files.read(job) == (IoOutcome.OK, pattern(5 * PAGE, 1))


@pytest.mark.requirement("P6")
def test_a_coded_object_in_a_file_too_long_for_it_is_bounded_by_its_name(files: Files) -> None:
    job = files.stored(1, MIB, Codec.BITSHUFFLE_LZ4)
    with files.path(job).open("ab") as file:
        file.truncate(1 << 40)
    assert files.read(job) == (IoOutcome.OK, pattern(MIB, 1))


@pytest.mark.requirement("P6")
def test_a_missing_file_is_gone_unless_all_of_the_directory_is(files: Files) -> None:
    job = files.job(1)
    assert files.read(job)[0] is IoOutcome.GONE
    (files.directory / layout.MARKER).rename(files.directory / "elsewhere")
    assert files.read(job)[0] is IoOutcome.IO_ERROR


@pytest.mark.requirement("P6")
def test_a_stale_handle_is_gone(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    job = files.stored(1)

    def stale(*_: Any) -> int:
        raise OSError(errno.ESTALE, "injected")

    monkeypatch.setattr(os, "preadv", stale)
    assert files.read(job)[0] is IoOutcome.GONE


@pytest.mark.requirement("P6")
def test_an_unreadable_file_is_told_apart(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    job = files.stored(1)
    real = os.open

    def refuse(path: str, *arguments: Any, **more: Any) -> int:
        if path == files.path(job).name:
            raise PermissionError(errno.EACCES, "injected", path)
        return real(path, *arguments, **more)

    monkeypatch.setattr(os, "open", refuse)
    assert files.read(job)[0] is IoOutcome.UNREADABLE
    assert not files.files(layout.QUARANTINE)


@pytest.mark.requirement("I1")
def test_a_file_replaced_while_it_is_read_is_one_file_and_not_two(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another node publishes the same object, of which it computed other bytes, in the middle of a read."""
    monkeypatch.setattr(direct_io, "REQUEST_BYTES_MAX", MIB)
    raw_bytes = 5 * MIB
    job = files.stored(1, raw_bytes)
    aside = files.directory / "replacement"
    aside.write_bytes(files.path(job).read_bytes())
    _flip(aside, HEADER_BYTES + raw_bytes - 3)
    real, calls = os.preadv, []

    def read(fd: int, buffers: list[memoryview], offset: int) -> int:
        calls.append(offset)
        if len(calls) == 2:
            aside.rename(files.path(job))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", read)
    assert files.read(job) == (IoOutcome.OK, pattern(raw_bytes, 1))
    assert len(calls) >= 2


@pytest.mark.requirement("T3")
@pytest.mark.parametrize(
    ("part", "outcome"), [(3 * PAGE + 7, IoOutcome.OK), (7, IoOutcome.IO_ERROR), (0, IoOutcome.IO_ERROR)]
)
def test_a_read_that_gets_less_does_not_prove_that_a_file_is_too_short(
    files: Files, monkeypatch: pytest.MonkeyPatch, part: int, outcome: IoOutcome
) -> None:
    """A FUSE server may answer with any part. A file that is whole must not be quarantined for that."""
    job = files.stored(1, MIB + 5)
    real = os.preadv
    monkeypatch.setattr(
        os, "preadv",
        lambda fd, buffers, offset: min(real(fd, buffers, offset), part) if offset < MIB else real(fd, buffers, offset),
    )  # fmt: skip
    assert files.read(job)[0] is outcome
    assert files.path(job).exists() and not files.files(layout.QUARANTINE)


@pytest.mark.requirement("T3")
def test_quarantine_never_takes_somebody_else_s_new_file(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    job = files.stored(1)
    good = files.directory / "good"
    good.write_bytes(files.path(job).read_bytes())
    _flip(files.path(job), 9_000)
    real = os.rename

    def rename(old: str, new: str, **folders: int) -> None:
        monkeypatch.setattr(os, "rename", real)
        good.rename(files.path(job))  # published between the verdict and the rename
        real(old, new, **folders)

    monkeypatch.setattr(os, "rename", rename)
    assert files.read(job)[0] is IoOutcome.CORRUPT
    assert not files.files(layout.QUARANTINE)
    assert files.read(job) == (IoOutcome.OK, pattern(2 * MIB, 1))


def test_no_descriptor_outlives_a_job(files: Files) -> None:
    def opened() -> list[str]:
        found = [fd.resolve() for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()]
        return [os.fspath(path) for path in found if path.is_relative_to(files.directory)]

    job = files.stored(1)
    files.read(job)
    files.publish(job)
    _flip(files.path(job), 9_000)
    files.read(job)
    assert not opened()


# Look-ups and recency


def test_a_look_up_tells_lengths_and_what_is_absent(files: Files) -> None:
    job = files.stored(1)
    absent = replace(job.name, key=bytes(16))
    (files.directory / "folder.kvd").mkdir()
    asked = (object_file(absent), job.file, f"{job.file}/below", "folder.kvd")
    answer = perform(StatFiles(asked), files.context)
    assert answer.lengths == (ABSENT, object_bytes(job.name.raw_bytes), ABSENT, ABSENT)


@pytest.mark.requirement("T5")
@pytest.mark.parametrize(
    ("number", "outcome"),
    [(errno.ESTALE, IoOutcome.OK), (errno.EIO, IoOutcome.IO_ERROR), (errno.EACCES, IoOutcome.UNREADABLE)],
)
def test_only_what_says_absent_is_absent(
    files: Files, monkeypatch: pytest.MonkeyPatch, number: int, outcome: IoOutcome
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(number, "injected")

    monkeypatch.setattr(os, "stat", fail)
    answer = perform(StatFiles(("a", "b")), files.context)
    monkeypatch.undo()
    assert answer.outcome is outcome
    assert answer.lengths == ((ABSENT, ABSENT) if outcome is IoOutcome.OK else ())


@pytest.mark.requirement("T5")
@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ENAMETOOLONG])
@pytest.mark.parametrize("call", ["stat", "utime"])
def test_a_name_that_fails_leaves_the_others_of_its_job_answered(
    files: Files, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    good, bad = files.stored(1), files.stored(2)
    absent = object_file(replace(good.name, key=bytes(16)))
    names = (bad.file, good.file, absent)
    real = getattr(os, call)

    def fail(path: str, *arguments: Any, **more: Any) -> Any:
        if path == files.path(bad).name:
            raise OSError(number, "injected", path)
        return real(path, *arguments, **more)

    monkeypatch.setattr(os, call, fail)
    answer = perform(StatFiles(names) if call == "stat" else TouchFiles(names), files.context)
    monkeypatch.undo()
    length = files.path(good).stat().st_size if call == "stat" else 0
    assert (answer.outcome, answer.lengths) == (IoOutcome.OK, (UNKNOWN, length, ABSENT))
    assert bad.file in answer.detail


def test_a_touch_is_now_by_the_file_system_s_clock_and_tells_what_is_gone(files: Files) -> None:
    job = files.stored(1)
    gone = ObjectName(bytes(16), bytes(16), bytes(16), 1, 32, PAGE)
    _age(files.path(job))
    answer = perform(TouchFiles((object_file(gone), job.file)), files.context)
    assert answer.outcome is IoOutcome.OK and answer.lengths[0] == ABSENT != answer.lengths[1]
    (files.directory / "now").touch()
    assert abs((files.directory / "now").stat().st_mtime - files.path(job).stat().st_mtime) < HOUR


# Symbolic links


@pytest.mark.parametrize("openat2", [True, False])
@pytest.mark.parametrize("level", ["namespace", "shard"])
def test_an_object_is_neither_read_nor_written_through_a_symbolic_link(
    files: Files, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, level: str, openat2: bool
) -> None:
    """Somebody who may write to the directory has put it in a folder's place. The tier stays usable."""
    if not openat2:
        monkeypatch.setattr(beneath, "_OPENAT2", 1 << 20)  # no such system call: the kernel answers ENOSYS
    outside = tmp_path_factory.mktemp("outside")
    job, other = files.stored(1), files.job(4)
    folder = files.path(job).parents[0 if level == "shard" else 1]
    folder.rename(outside / "moved")
    folder.symlink_to(outside / "moved")
    before = {path: path.stat().st_mtime_ns for path in outside.rglob("*")}
    assert files.read(job)[0] is IoOutcome.GONE
    assert perform(StatFiles((job.file,)), files.context).lengths == (ABSENT,)
    assert perform(TouchFiles((job.file,)), files.context).outcome is IoOutcome.OK
    same_folder = replace(other, file=str(Path(job.file).parent / Path(other.file).name))
    refused = files.publish(same_folder)
    assert refused.outcome is IoOutcome.IO_ERROR, "GONE is said of the folder of temporaries"
    assert "symbolic link" in refused.detail and str(files.path(same_folder)) in refused.detail
    assert {path: path.stat().st_mtime_ns for path in outside.rglob("*")} == before
    assert files.files(".tmp") == []
    folder.unlink()
    (outside / "moved").rename(folder)
    assert files.read(job)[0] is IoOutcome.OK


@pytest.mark.parametrize("folder", [".tmp", ".quarantine"])
def test_temporaries_and_quarantine_are_not_followed_either(
    files: Files, tmp_path_factory: pytest.TempPathFactory, folder: str
) -> None:
    outside, job = tmp_path_factory.mktemp("outside"), files.stored(1)
    _flip(files.path(job), HEADER_BYTES + 5)
    (files.directory / folder).rmdir()
    (files.directory / folder).symlink_to(outside)
    assert files.read(job)[0] is IoOutcome.CORRUPT
    if folder == ".tmp":
        assert files.publish(files.job(2)).outcome is IoOutcome.GONE
    assert list(outside.iterdir()) == []
