"""What a worker does with each job, on real files: objects, damage (P6), journals, faults (T5)."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from kvdepot.core.objectfile import HEADER_BYTES, Codec, ObjectDamageError, ObjectHeader, object_bytes, payload_sum
from kvdepot.server.io import direct_io
from kvdepot.server.io.context import Context
from kvdepot.server.io.jobs import Allocate, Append, Part, Probe, Quarantine, ReadObject, Remove
from kvdepot.server.io.perform import perform
from kvdepot.server.storage.base import DAMAGED, IoOutcome

from tests.rigs.io_rig import MIB, PAGE, PATTERN, SEGMENT, IoRig, object_name, pattern, verify_only


def _open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


each_codec = pytest.mark.parametrize("codec", list(Codec), ids=lambda codec: codec.name)


@pytest.fixture
def context(rig: IoRig) -> Iterator[Context]:
    context = Context(os.fspath(rig.directory), rig.arena)
    yield context
    context.close()


@each_codec
@pytest.mark.parametrize("raw_bytes", [1, PAGE - 1, PAGE, PAGE + 1, MIB + 3 * PAGE, 3 * MIB + 5])
@pytest.mark.parametrize("fragments", [1, 3])
def test_what_was_written_is_read_back_into_other_extents(
    rig: IoRig, context: Context, codec: Codec, raw_bytes: int, fragments: int
) -> None:
    write = rig.write(1, raw_bytes, codec, fragments=fragments if raw_bytes > 3 * PAGE else 1, offset=8 * PAGE)
    written = perform(write, context)
    assert (written.outcome, written.raw_sum) == (IoOutcome.OK, write.raw_sum)
    assert written.direct

    read = rig.read_of(write)
    answer = perform(read, context)
    assert replace(answer, seconds=0) == replace(written, seconds=0)
    assert read.extents is not None
    assert rig.taken(read.extents) == pattern(raw_bytes, 1)
    assert replace(perform(verify_only(read), context), seconds=0) == replace(written, seconds=0)


@each_codec
def test_a_read_leaves_the_pages_around_its_extents_alone(rig: IoRig, context: Context, codec: Codec) -> None:
    write = rig.write(1, MIB + 5, codec)
    perform(write, context)
    read = rig.read_of(write, fragments=3)
    assert perform(read, context).outcome is IoOutcome.OK
    assert read.extents is not None
    for offset, length in read.extents:
        end = offset + -(-length // PAGE) * PAGE
        assert bytes(rig.arena[end : end + PAGE]) == bytes([PATTERN]) * PAGE


def test_the_padding_is_zeros_whatever_lies_behind_the_extent(rig: IoRig, context: Context) -> None:
    write = rig.write(1, PAGE + 7)
    (offset, length) = write.extents[0]
    rig.arena[offset + length : offset + 2 * PAGE] = bytes([PATTERN]) * (PAGE - 7)
    assert perform(write, context).outcome is IoOutcome.OK
    assert rig.segment.read_bytes()[HEADER_BYTES + length : 3 * PAGE] == bytes(PAGE - 7)
    assert rig.arena[offset + length] == PATTERN


def test_what_a_codec_saves_stays_unwritten(rig: IoRig, context: Context) -> None:
    rig.segment.write_bytes(bytes([PATTERN]) * MIB * 2)
    write = rig.write(1, MIB, Codec.BITSHUFFLE_LZ4)
    answer = perform(write, context)
    assert answer.stored_bytes < MIB - PAGE
    stored = rig.segment.read_bytes()
    assert set(stored[object_bytes(answer.stored_bytes) :]) == {PATTERN}

    trimmed = (Part(SEGMENT, 0, object_bytes(answer.stored_bytes)),)
    read = replace(rig.read_of(write), parts=trimmed)
    assert perform(read, context).outcome is IoOutcome.OK
    assert read.extents is not None
    assert rig.taken(read.extents) == pattern(MIB, 1)


@pytest.mark.requirement("I4")
def test_an_object_too_long_for_the_scratch_memory_is_stored_as_it_is(
    rig: IoRig, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    context.coded_bytes_max = MIB
    write = rig.write(1, MIB + 2 * PAGE, Codec.LZ4)
    assert perform(write, context).stored_bytes == MIB + 2 * PAGE
    assert perform(rig.read_of(write), context).outcome is IoOutcome.OK


@pytest.mark.parametrize("buffered", [False, True])
def test_parts_may_lie_anywhere_and_in_several_files(rig: IoRig, context: Context, buffered: bool) -> None:
    context.files.direct = not buffered
    (rig.directory / "segments/00001.seg").write_bytes(bytes(MIB))
    write = rig.write(3, 5 * PAGE + 9, fragments=2)
    parts = (Part(SEGMENT, 9 * PAGE, PAGE), Part("segments/00001.seg", 0, 3 * PAGE), Part(SEGMENT, PAGE, 3 * PAGE))
    write = replace(write, parts=parts, sync=True)
    assert perform(write, context).outcome is IoOutcome.OK
    assert perform(rig.read_of(write), context).outcome is IoOutcome.OK
    assert perform(verify_only(rig.read_of(write)), context).outcome is IoOutcome.OK


@pytest.mark.requirement("I1")
def test_a_copy_in_ram_that_changed_is_not_written(rig: IoRig, context: Context) -> None:
    write = rig.write(1, MIB)
    rig.arena[write.extents[0][0]] ^= 1
    assert perform(write, context).outcome is IoOutcome.CORRUPT
    assert rig.segment.read_bytes()[:PAGE] == bytes(PAGE)
    unknown = perform(replace(write, raw_sum=None), context)
    assert unknown.outcome is IoOutcome.OK
    assert unknown.raw_sum == payload_sum([rig.taken(write.extents)])


# P6: every kind of damage has an outcome of its own.


def _flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def _old_version(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[8:12] = (0).to_bytes(4, "little")
    path.write_bytes(data)


DAMAGES: list[tuple[str, IoOutcome, Callable[[Path], object]]] = [
    ("zero_length", IoOutcome.TOO_SHORT, lambda path: os.truncate(path, 0)),
    ("in_the_header", IoOutcome.TOO_SHORT, lambda path: os.truncate(path, 100)),
    ("truncated", IoOutcome.TOO_SHORT, lambda path: os.truncate(path, HEADER_BYTES + MIB // 3)),
    ("truncated_by_a_page", IoOutcome.TOO_SHORT, lambda path: os.truncate(path, HEADER_BYTES + PAGE * 2)),
    ("magic", IoOutcome.MAGIC, lambda path: _flip(path, 3)),
    ("old_version", IoOutcome.VERSION, _old_version),
    ("header_bit", IoOutcome.HEADER, lambda path: _flip(path, 60)),
    ("header_padding_bit", IoOutcome.HEADER, lambda path: _flip(path, HEADER_BYTES - 1)),
    ("first_payload_bit", IoOutcome.CORRUPT, lambda path: _flip(path, HEADER_BYTES)),
    ("payload_bit", IoOutcome.CORRUPT, lambda path: _flip(path, HEADER_BYTES + MIB // 3)),
    ("deleted", IoOutcome.GONE, lambda path: path.unlink()),
    ("folder_deleted", IoOutcome.GONE, lambda path: path.parent.rename(path.parent.with_name("elsewhere"))),
]


@pytest.mark.requirement("P6")
@each_codec
@pytest.mark.parametrize(("outcome", "damage"), [case[1:] for case in DAMAGES], ids=[case[0] for case in DAMAGES])
@pytest.mark.parametrize("verify", [False, True], ids=["read", "verify"])
def test_damage_is_told_apart(
    rig: IoRig, context: Context, codec: Codec, outcome: IoOutcome, damage: Callable[[Path], object], verify: bool
) -> None:
    write = rig.write(1, MIB + 5, codec)
    perform(write, context)
    damage(rig.segment)
    read = rig.read_of(write)
    answer = perform(verify_only(read) if verify else read, context)
    assert answer.outcome is outcome
    assert answer.detail


@pytest.mark.requirement("P6")
@pytest.mark.parametrize(
    ("outcome", "field", "value"),
    [
        (IoOutcome.IDENTITY, "namespace", bytes(16)),
        (IoOutcome.IDENTITY, "key", bytes(16)),
        (IoOutcome.IDENTITY, "parent", bytes(16)),
        (IoOutcome.IDENTITY, "kind", 2),
        (IoOutcome.IDENTITY, "boundary_tokens", 77),
    ],
)
def test_a_foreign_object_is_told_apart(
    rig: IoRig, context: Context, outcome: IoOutcome, field: str, value: object
) -> None:
    write = rig.write(1, MIB)
    perform(write, context)
    read = rig.read_of(write)
    assert perform(replace(read, name=replace(read.name, **{field: value})), context).outcome is outcome  # type: ignore[arg-type]


@pytest.mark.requirement("P6")
@each_codec
def test_another_sequence_or_another_length_is_told_apart(rig: IoRig, context: Context, codec: Codec) -> None:
    write = rig.write(1, MIB, codec)
    perform(write, context)
    read = rig.read_of(write)
    assert perform(replace(read, sequence=write.sequence + 1), context).outcome is IoOutcome.IDENTITY
    assert perform(replace(read, sequence=0), context).outcome is IoOutcome.OK
    longer = replace(read.name, raw_bytes=MIB + PAGE)
    wrong = ReadObject((Part(SEGMENT, 0, 2 * MIB),), longer, write.sequence, ((16 * MIB, MIB + PAGE),))
    assert perform(wrong, context).outcome is IoOutcome.LENGTH


@pytest.mark.requirement("P6")
def test_a_codec_that_refuses_what_its_checksum_covers_is_told_apart(rig: IoRig, context: Context) -> None:
    raw_bytes, stored = MIB, pattern(PAGE, 5)
    name = object_name(1, raw_bytes)
    header = ObjectHeader(name, Codec.LZ4, PAGE, 1, payload_sum([stored]), 0, 0)
    rig.segment.write_bytes(header.pack() + stored + bytes(MIB))
    read = ReadObject((Part(SEGMENT, 0, object_bytes(PAGE)),), name, 0, ((0, raw_bytes),))
    assert perform(read, context).outcome is IoOutcome.CODEC


@pytest.mark.requirement("P6", "T5")
@pytest.mark.parametrize(
    ("number", "outcome"),
    [
        (errno.EACCES, IoOutcome.UNREADABLE),
        (errno.EPERM, IoOutcome.UNREADABLE),
        (errno.ENOENT, IoOutcome.GONE),
        (errno.ESTALE, IoOutcome.GONE),
        (errno.EIO, IoOutcome.IO_ERROR),
        (errno.ENOTCONN, IoOutcome.IO_ERROR),
        (errno.EMFILE, IoOutcome.IO_ERROR),
        (errno.ENOSPC, IoOutcome.NO_SPACE),
        (errno.EDQUOT, IoOutcome.NO_SPACE),
        (errno.EROFS, IoOutcome.READ_ONLY),
    ],
)
@pytest.mark.parametrize("call", ["open", "preadv", "pwritev"])
def test_what_the_medium_refuses_is_told_apart(
    rig: IoRig, context: Context, monkeypatch: pytest.MonkeyPatch, number: int, outcome: IoOutcome, call: str
) -> None:
    write = rig.write(1, MIB)
    perform(write, context)
    context.close()

    def refuse(*_: Any, **__: Any) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, refuse)
    answer = perform(write if call == "pwritev" else rig.read_of(write), context)
    assert answer.outcome is outcome
    assert os.fspath(rig.segment) in answer.detail or call == "open"
    assert answer.direct


headers = st.builds(
    ObjectHeader,
    st.just(object_name(1, 40 * PAGE + 5)) | st.builds(object_name, st.just(1), st.integers(1, 64 << 30)),
    st.sampled_from(Codec),
    st.integers(1, 50 * PAGE) | st.integers(1, 64 << 30),
    st.just(0) | st.integers(0, (1 << 128) - 1),
    st.just(0) | st.integers(0, (1 << 128) - 1),
    st.just(8),
    st.just(0),
)


@pytest.mark.requirement("P6", "I1")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    header=headers.map(ObjectHeader.pack) | st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES),
    payload=st.integers(0, 3).map(lambda seed: pattern(50 * PAGE, seed)),
    held=st.just(52 * PAGE) | st.integers(0, 52 * PAGE),
    room=st.sampled_from([41, 41, 60, 40, 20, 1, 0]),
    true_sum=st.booleans(),
    verify=st.booleans(),
)
def test_whatever_lies_on_the_medium_is_refused_within_bounds(
    rig: IoRig, context: Context, header: bytes, payload: bytes, held: int, room: int, true_sum: bool, verify: bool
) -> None:
    """Also bytes whose header is whole, and whose sums hold: only what was written under this name is the object."""
    name = object_name(1, 40 * PAGE + 5)
    if true_sum and header[:8] == b"KVDOBJCT":
        claimed = ObjectHeader.unpack(header).stored_bytes if _whole(header) else 0
        total = payload_sum([payload[:claimed]])
        header = ObjectHeader(name, Codec.LZ4, min(claimed, 39 * PAGE) or 1, 1, total, 8, 0).pack()
    rig.segment.write_bytes((header + payload)[:held])
    extents = ((16 * MIB, name.raw_bytes),)
    rig.arena[16 * MIB - PAGE : 16 * MIB + 50 * PAGE] = bytes([PATTERN]) * 51 * PAGE
    read = ReadObject((Part(SEGMENT, 0, room * PAGE),), name, 8, None if verify else extents)
    answer = perform(read, context)
    event(answer.outcome)
    assert answer.outcome in DAMAGED | {IoOutcome.IO_ERROR}
    assert rig.arena[16 * MIB - PAGE : 16 * MIB] == bytes([PATTERN]) * PAGE
    assert rig.arena[16 * MIB + 41 * PAGE : 16 * MIB + 50 * PAGE] == bytes([PATTERN]) * 9 * PAGE


def _whole(header: bytes) -> bool:
    try:
        ObjectHeader.unpack(header)
    except ObjectDamageError:
        return False
    return True


# Short requests, refused O_DIRECT, open files.


def test_short_reads_and_writes_are_continued(rig: IoRig, context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    real_read, real_write = os.preadv, os.pwritev

    def half(buffers: list[memoryview]) -> list[memoryview]:
        return [buffers[0][: max(len(buffers[0]) // 2 // PAGE, 1) * PAGE]]

    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: real_read(fd, half(buffers), offset))
    monkeypatch.setattr(os, "pwritev", lambda fd, buffers, offset: real_write(fd, half(buffers), offset))
    write = rig.write(1, MIB + 5, fragments=3)
    assert perform(write, context).outcome is IoOutcome.OK
    assert perform(rig.read_of(write, fragments=2), context).outcome is IoOutcome.OK


def test_a_write_that_writes_nothing_is_an_error(rig: IoRig, context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwritev", lambda fd, buffers, offset: 0)
    assert perform(rig.write(1, MIB), context).outcome is IoOutcome.IO_ERROR


def test_objects_in_more_fragments_than_one_request_takes(rig: IoRig, context: Context) -> None:
    write = rig.write(1, 1100 * PAGE + 3, fragments=1100)
    assert perform(write, context).outcome is IoOutcome.OK
    assert perform(rig.read_of(write, fragments=1050), context).outcome is IoOutcome.OK


@pytest.mark.parametrize("where", ["open", "request"])
def test_a_path_that_refuses_o_direct_is_used_through_the_page_cache_and_says_so(
    rig: IoRig, context: Context, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    real_open, real_write = os.open, os.pwritev

    def refusing_open(path: str, flags: int, *rest: int, **named: Any) -> int:
        if where == "open" and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT")
        return real_open(path, flags, *rest, **named)

    def refusing_write(fd: int, buffers: list[memoryview], offset: int) -> int:
        if int(Path(f"/proc/self/fdinfo/{fd}").read_text().split("flags:")[1].split()[0], 8) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT")
        return real_write(fd, buffers, offset)

    monkeypatch.setattr(os, "open", refusing_open)
    monkeypatch.setattr(os, "pwritev", refusing_write)
    write = rig.write(1, MIB + 5, fragments=2)
    answer = perform(write, context)
    assert (answer.outcome, answer.direct) == (IoOutcome.OK, False)
    again = perform(rig.read_of(write), context)
    assert (again.outcome, again.direct) == (IoOutcome.OK, False)


@pytest.mark.requirement("I4")
def test_open_files_are_bounded(rig: IoRig, context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_io, "OPEN_FILES_MAX", 3)
    before = _open_files()
    for number in range(8):
        (rig.directory / f"{number}.seg").write_bytes(bytes(2 * PAGE))
        write = replace(rig.write(1, PAGE), parts=(Part(f"{number}.seg", 0, 2 * PAGE),))
        assert perform(write, context).outcome is IoOutcome.OK
        assert _open_files() <= before + 3
    context.close()
    assert _open_files() == before


@pytest.mark.requirement("T5")
def test_a_file_that_was_replaced_is_opened_anew(rig: IoRig, context: Context) -> None:
    write = rig.write(1, MIB)
    perform(write, context)
    data = rig.segment.read_bytes()
    rig.segment.unlink()
    assert perform(write, context).outcome is IoOutcome.GONE
    rig.segment.write_bytes(data)
    assert perform(rig.read_of(write), context).outcome is IoOutcome.OK


@pytest.mark.parametrize(
    "change",
    [
        {"extents": ((0, MIB - 1),)},  # not the raw length
        {"extents": ((100, MIB),)},  # not aligned
        {"extents": ((31 * MIB + PAGE, MIB),)},  # beyond the arena
        {"extents": ((0, 5), (PAGE, MIB - 5))},  # a broken page in the middle
        {"parts": (Part(SEGMENT, 0, MIB),)},  # no room
        {"parts": (Part(SEGMENT, 7, 2 * MIB),)},  # not aligned
    ],
)
def test_a_job_that_contradicts_itself_is_refused_untouched(
    rig: IoRig, context: Context, change: dict[str, Any]
) -> None:
    write = replace(rig.write(1, MIB), **change)
    answer = perform(write, context)
    assert answer.outcome is IoOutcome.IO_ERROR
    assert "refused" in answer.detail
    assert not any(rig.segment.read_bytes()[: 2 * MIB])


def test_a_context_without_an_arena_refuses_extents(rig: IoRig) -> None:
    answer = perform(rig.write(1, PAGE), Context(os.fspath(rig.directory)))
    assert answer.outcome is IoOutcome.IO_ERROR


# Journals and files.


@pytest.mark.parametrize("sync", [False, True])
def test_records_are_appended_behind_what_is_there(rig: IoRig, context: Context, sync: bool) -> None:
    journal = rig.directory / "journal/1.log"
    assert perform(Append("journal/1.log", 0, b"first", sync), context).outcome is IoOutcome.OK
    assert perform(Append("journal/1.log", 5, b"second", sync), context).outcome is IoOutcome.OK
    assert journal.read_bytes() == b"firstsecond"
    for wrong in (0, 3, 20):
        answer = perform(Append("journal/1.log", wrong, b"third", sync), context)
        assert answer.outcome is IoOutcome.IO_ERROR
        assert "11 bytes" in answer.detail
    assert journal.read_bytes() == b"firstsecond"


def test_an_append_to_a_journal_that_is_gone_makes_no_new_one(rig: IoRig, context: Context) -> None:
    assert perform(Append("journal/1.log", 5, b"second", sync=False), context).outcome is IoOutcome.GONE
    assert not (rig.directory / "journal").exists()


@pytest.mark.requirement("T5")
@pytest.mark.parametrize("failing", ["pwrite", "fdatasync"])
def test_an_append_that_fails_half_way_is_undone(
    rig: IoRig, context: Context, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    journal = rig.directory / "1.log"
    journal.write_bytes(b"first")
    real = os.pwrite

    def three_bytes_of_room(fd: int, data: memoryview, offset: int) -> int:
        if offset >= 8:
            raise OSError(errno.ENOSPC, "full")
        return real(fd, data[:3], offset)

    def refuse(fd: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, failing, three_bytes_of_room if failing == "pwrite" else refuse)
    assert perform(Append("1.log", 5, b"second", sync=True), context).outcome is IoOutcome.NO_SPACE
    assert journal.read_bytes() == b"first"


def test_a_segment_is_allocated_with_all_its_blocks(rig: IoRig, context: Context) -> None:
    path = rig.directory / "segments/00007.seg"
    for length in (3 * MIB, 2 * MIB, 2 * MIB):
        assert perform(Allocate("segments/00007.seg", length), context).outcome is IoOutcome.OK
        assert path.stat().st_size == length
        assert path.stat().st_blocks * 512 >= length
    assert perform(Remove(("segments/00007.seg", "segments/00008.seg")), context).outcome is IoOutcome.OK
    assert not path.exists()


@pytest.mark.requirement("T5")
def test_a_segment_without_room_leaves_nothing(rig: IoRig, context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, length: int) -> None:
        os.ftruncate(fd, PAGE)
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert perform(Allocate("new.seg", MIB), context).outcome is IoOutcome.NO_SPACE
    assert not (rig.directory / "new.seg").exists()
    (rig.directory / "old.seg").write_bytes(b"data")
    assert perform(Allocate("old.seg", MIB), context).outcome is IoOutcome.NO_SPACE
    assert (rig.directory / "old.seg").read_bytes() == b"data"


def test_a_removed_file_gives_its_blocks_back(rig: IoRig, context: Context) -> None:
    write = rig.write(1, MIB)
    perform(write, context)
    perform(Remove((SEGMENT,)), context)
    held = [os.fspath(fd.resolve()) for fd in Path("/proc/self/fd").iterdir()]
    assert not any(SEGMENT in name for name in held)


@pytest.mark.requirement("P6")
def test_damaged_bytes_are_copied_as_they_are(rig: IoRig, context: Context) -> None:
    write = rig.write(1, 5 * MIB + 5, offset=PAGE)
    perform(write, context)
    _flip(rig.segment, 3 * MIB)
    answer = perform(Quarantine(write.parts, "quarantine/1.kvd"), context)
    assert (answer.outcome, answer.stored_bytes) == (IoOutcome.OK, object_bytes(5 * MIB + 5))
    copy = (rig.directory / "quarantine/1.kvd").read_bytes()
    assert copy == rig.segment.read_bytes()[PAGE : PAGE + object_bytes(5 * MIB + 5)]


@pytest.mark.requirement("P6")
def test_what_can_be_read_of_an_unreadable_object_is_copied(
    rig: IoRig, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = rig.write(1, 9 * MIB)
    real = os.preadv

    def bad_block(fd: int, buffers: list[memoryview], offset: int) -> int:
        if offset >= 8 * MIB:
            raise OSError(errno.EIO, "bad block")
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", bad_block)
    answer = perform(Quarantine(write.parts, "quarantine/1.kvd"), context)
    assert (answer.outcome, answer.stored_bytes) == (IoOutcome.OK, 8 * MIB)
    assert "bad block" in answer.detail
    os.truncate(rig.segment, 5 * MIB)
    assert perform(Quarantine(write.parts, "quarantine/2.kvd"), context).stored_bytes == 5 * MIB


@pytest.mark.requirement("T5")
def test_a_quarantine_without_room_leaves_nothing(
    rig: IoRig, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "pwrite", full)
    assert perform(Quarantine((Part(SEGMENT, 0, MIB),), "q"), context).outcome is IoOutcome.NO_SPACE
    assert not (rig.directory / "q").exists()


def test_a_probe_writes_and_leaves_nothing(rig: IoRig, context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    before = sorted(rig.directory.iterdir())
    assert perform(Probe(".probe"), context).outcome is IoOutcome.OK
    assert sorted(rig.directory.iterdir()) == before
    monkeypatch.setattr(os, "pread", lambda fd, length, offset: bytes(length))
    assert perform(Probe(".probe"), context).outcome is IoOutcome.IO_ERROR


@pytest.mark.requirement("T5")
def test_probes_of_a_path_in_trouble_all_say_the_same(tmp_path: Path) -> None:
    details: list[str] = []
    for _ in range(2):
        prober = threading.Thread(
            target=lambda: details.append(perform(Probe(".probe"), Context(f"{tmp_path}/gone")).detail)
        )
        prober.start()
        prober.join()
    assert details[0] == details[1] != ""


@pytest.mark.requirement("T5")
def test_nothing_makes_a_directory_that_is_gone(tmp_path: Path) -> None:
    context = Context(os.fspath(tmp_path / "gone"))
    for job in (Allocate("segments/1.seg", PAGE), Append("journal/1", 0, b"x", sync=True), Probe(".p")):
        assert perform(job, context).outcome is IoOutcome.GONE
    assert not (tmp_path / "gone").exists()
