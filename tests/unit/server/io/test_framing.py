"""Frames of child processes: all messages come back, nothing but FrameError comes of anything else, all is bounded."""

from __future__ import annotations

import contextlib
import io
import struct
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvdepot.core.bounds import AtMost, Count
from kvdepot.core.elements import ElementRun
from kvdepot.core.object_keys import KeyRing
from kvdepot.core.objectfile import Codec, ObjectName
from kvdepot.server.io import checksum_wire, peer_wire, scout_wire
from kvdepot.server.io.checksum_wire import Compare, Compared, Sum, Summed
from kvdepot.server.io.framing import HEAD, FrameError, Framing, Signed
from kvdepot.server.io.jobs import (
    ANSWER_BYTES_MAX,
    ANSWERS,
    APPEND_BYTES_MAX,
    DETAIL_BYTES_MAX,
    EXTENTS_MAX,
    FILE_NAME_BYTES_MAX,
    FILES_MAX,
    FILES_PER_STAT,
    JOB_BYTES_MAX,
    JOBS,
    PARTS_MAX,
    UNKNOWN,
    Allocate,
    Answer,
    Append,
    Job,
    Part,
    Probe,
    PublishFile,
    Quarantine,
    ReadFile,
    ReadObject,
    Remove,
    ServePeer,
    StatFiles,
    TouchFiles,
    WriteObject,
)
from kvdepot.server.io.stream_wire import OPENING, Opening
from kvdepot.server.storage.base import IoOutcome
from kvdepot.server.tiers.disk import messages
from kvdepot.server.tiers.shared import links

u32 = st.integers(0, (1 << 32) - 1)
u62 = st.integers(0, (1 << 62) - 1)
u64 = st.integers(0, (1 << 64) - 1)
sums = st.integers(0, (1 << 128) - 1)
sixteen = st.binary(min_size=16, max_size=16)
file_names = st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=20).filter(
    lambda name: name not in (".", "..")
)
files = st.lists(file_names, min_size=1, max_size=3).map("/".join)
parts = st.lists(st.builds(Part, files, u62, u62), max_size=4).map(tuple)
extents = st.lists(st.tuples(u62, u62), max_size=4).map(tuple)
names = st.builds(ObjectName, sixteen, sixteen, sixteen, st.integers(0, 255), u32, st.integers(1, 64 << 30))
rings = st.builds(
    KeyRing,
    st.lists(st.binary(min_size=32, max_size=32), max_size=8).map(tuple),
    st.lists(st.binary(min_size=8, max_size=8), max_size=4).map(tuple),
)
jobs: st.SearchStrategy[Job | ServePeer] = st.one_of(
    st.builds(ReadObject, parts, names, u64, st.none() | extents),
    st.builds(
        WriteObject, parts, names, u64, st.sampled_from([int(codec) for codec in Codec]), u64, extents,
        st.none() | sums, st.booleans(),
    ),
    st.builds(Append, files, u62, st.binary(max_size=300), st.booleans()),
    st.builds(Allocate, files, u62, u62),
    st.builds(Remove, st.lists(files, max_size=5).map(tuple)),
    st.builds(Quarantine, parts, files),
    st.builds(Probe, files, st.none() | files),
    st.builds(StatFiles, st.lists(files, max_size=5).map(tuple)),
    st.builds(TouchFiles, st.lists(files, max_size=5).map(tuple)),
    st.builds(ReadFile, files, names, st.none() | extents, files, st.lists(sums, max_size=2).map(tuple), rings),
    st.builds(
        PublishFile, files, files, u64, names, st.sampled_from([int(codec) for codec in Codec]), u64, extents,
        st.none() | sums, st.booleans(), files, rings,
    ),
    st.builds(ServePeer, st.text(st.characters(codec="utf-8"), max_size=20)),
)  # fmt: skip
answers = st.builds(
    Answer,
    st.sampled_from(IoOutcome),
    st.text(max_size=200),
    u64,
    sums,
    sums,
    st.floats(0, 1e6),
    st.booleans(),
    st.booleans(),
    st.lists(st.integers(UNKNOWN, 1 << 62), max_size=5).map(tuple),
)
NAME = ObjectName(bytes(16), bytes(16), bytes(16), 1, 256, 4096)
places = st.lists(st.tuples(u64, u64, u64), max_size=4).map(tuple)
texts = st.text(st.characters(codec="utf-8"), max_size=20)
run = st.builds(ElementRun, st.sampled_from(["", "int8"]), st.integers(0, 1 << 20), st.integers(0, 99))
runs = st.lists(run, max_size=3)
several = st.lists(texts, max_size=3).map(tuple)
wanted = st.lists(st.builds(peer_wire.Wanted, sixteen, sixteen, st.integers(0, 255)), max_size=3).map(tuple)
located = st.builds(peer_wire.Located, st.lists(st.integers(-1, 64 << 30), max_size=3).map(tuple))
refused = st.builds(peer_wire.Refused, st.sampled_from(peer_wire.Refusal))
lenders = st.builds(peer_wire.Lender, st.binary(max_size=400), sums, u64)
useful = st.builds(scout_wire.Useful, st.builds(scout_wire.At, texts, u32), u64)
FRAMINGS: list[tuple[Framing[Any], st.SearchStrategy[Any]]] = [
    (JOBS, jobs),
    (ANSWERS, answers),
    (checksum_wire.JOBS, st.builds(Sum, u64, extents) | st.builds(Compare, extents, extents, runs.map(tuple))),
    (
        checksum_wire.ANSWERS,
        st.builds(Summed, u64, u64, u64) | st.builds(Compared, st.booleans(), u64, u64, st.just(0.5)),
    ),
    (OPENING, st.builds(Opening, u64, sixteen)),
    (
        messages.REQUESTS,
        st.builds(messages.Begin, texts, u64) | st.builds(messages.Open, places, extents, st.integers(-1, 1 << 20))
        | st.builds(messages.Compact, u64, u64) | st.builds(messages.Sync),
    ),
    (
        messages.MESSAGES,
        st.builds(messages.Failed, texts, texts) | st.builds(messages.Claims, extents) | st.builds(messages.Done)
        | st.builds(messages.Compacted, u64, u64, u64, texts)
        | st.builds(
            messages.Opened, texts, *[u64] * 9, st.lists(st.tuples(files, u64), max_size=3).map(tuple),
            st.lists(texts, max_size=3).map(tuple), texts, texts, st.lists(u64, max_size=3).map(tuple),
        ),
    ),
    (links.TO_COORDINATOR, st.builds(links.Published, u64, u64, texts, st.booleans())),
    (
        links.FROM_COORDINATOR,
        st.builds(links.Failed, texts)
        | st.builds(
            links.Report, texts, texts, st.booleans(), u64, u64, u64, u64, st.booleans(), u64, texts, texts,
            st.none() | st.floats(0, 1e6), u64,
        ),
    ),
    (
        peer_wire.FROM_READER,
        st.builds(peer_wire.Locate, wanted) | st.builds(peer_wire.Pull, names)
        | st.builds(peer_wire.Borrow, names) | st.builds(peer_wire.Return),
    ),
    (
        peer_wire.TO_READER,
        located | refused | st.builds(peer_wire.Leased, st.integers(1, 64 << 30), sums, u64)
        | st.builds(peer_wire.Lent, sums, u64, lenders, extents) | st.builds(peer_wire.Returned),
    ),
    (
        peer_wire.TO_DAEMON,
        st.builds(peer_wire.AskLocate, several, wanted) | st.builds(peer_wire.AskPull, several, names, st.booleans())
        | st.builds(peer_wire.Ended, u64, st.sampled_from(peer_wire.Sent), u64)
        | st.builds(peer_wire.Unconnected, st.just("limit"), u64),
    ),
    (
        peer_wire.FROM_DAEMON,
        located | refused
        | st.builds(peer_wire.Granted, u64, sums, u64, st.just(0.5), extents, st.none() | lenders),
    ),
    (scout_wire.TO_SCOUT, st.builds(scout_wire.Find, st.binary(max_size=99))),
    (
        scout_wire.FROM_SCOUT,
        st.builds(scout_wire.Found, st.lists(useful, max_size=scout_wire.FOUND_MAX).map(tuple)),
    ),
    (peer_wire.TO_LENDER, st.builds(peer_wire.Serve, st.booleans())),
    (peer_wire.FROM_LENDER, lenders),
]  # fmt: skip
framed = st.sampled_from(FRAMINGS).flatmap(lambda pair: st.tuples(st.just(pair[0]), pair[1]))


def unpack(framing: Framing[Any], frame: bytes) -> Any:
    ((_, message),) = framing.take(bytearray(frame))
    return message


@given(framed, u64, st.data())
def test_any_message_comes_back_however_the_stream_is_cut(
    sent: tuple[Framing[Any], Any], number: int, data: st.DataObject
) -> None:
    framing, message = sent
    stream = framing.pack(message, number) + framing.pack(message)
    cut = data.draw(st.integers(0, len(stream)))
    received = bytearray(stream[:cut])
    taken = list(framing.take(received))
    received += stream[cut:]
    assert taken + list(framing.take(received)) == [(number, message), (0, message)]
    assert not received


@given(framed, u64)
def test_a_message_that_is_waited_for_comes_back_and_a_part_of_it_is_the_end(
    sent: tuple[Framing[Any], Any], number: int
) -> None:
    framing, message = sent
    frame = framing.pack(message, number)
    assert framing.read(io.BytesIO(frame)) == (number, message)
    for length in range(min(len(frame), 200)):
        assert framing.read(io.BytesIO(frame[:length])) is None


@pytest.mark.requirement("I4")
@given(framed)
def test_a_body_that_ends_anywhere_else_is_refused(sent: tuple[Framing[Any], Any]) -> None:
    framing, message = sent
    frame = framing.pack(message)
    length, kind, _ = HEAD.unpack_from(frame)
    for end in range(min(length, 300)):
        with pytest.raises(FrameError):
            framing.unpack(kind, frame[HEAD.size : HEAD.size + end])
    with pytest.raises(FrameError, match="1 bytes after its end"):
        framing.unpack(kind, frame[HEAD.size :] + b"\0")


@pytest.mark.requirement("I4")
@given(st.sampled_from(FRAMINGS), st.integers(0, 255), st.binary(max_size=400))
def test_bytes_that_are_no_body_are_refused(
    pair: tuple[Framing[Any], st.SearchStrategy[Any]], kind: int, body: bytes
) -> None:
    framing, _ = pair
    try:
        message = framing.unpack(kind, body)
    except FrameError:
        return
    assert unpack(framing, framing.pack(message)) == message or message != message  # no number


@pytest.mark.requirement("I4")
@given(framed, st.data())
def test_a_damaged_frame_is_refused_or_another_message(sent: tuple[Framing[Any], Any], data: st.DataObject) -> None:
    framing, message = sent
    frame = bytearray(framing.pack(message))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] ^= data.draw(st.integers(1, 255))
    del frame[data.draw(st.integers(0, len(frame))) :]
    with contextlib.suppress(FrameError):
        for _, damaged in framing.take(frame):
            assert not isinstance(damaged, Answer) or damaged.seconds >= 0  # counters take it


@pytest.mark.requirement("I6")
def test_after_a_frame_that_is_refused_nothing_more_is_believed() -> None:
    """A worker that has sent garbage is killed, and what comes until it is dead is read as well."""
    good = ANSWERS.pack(Answer(IoOutcome.OK), 7)
    received = bytearray(HEAD.pack(0, 1, 0) + good)
    for _ in range(3):
        with pytest.raises(FrameError):
            list(ANSWERS.take(received))
        received += good


@pytest.mark.requirement("I4")
@given(st.binary(max_size=4000))
def test_bytes_that_are_no_answers_are_refused_or_waited_for(stream: bytes) -> None:
    received = bytearray(stream)
    try:
        list(ANSWERS.take(received))
    except FrameError:
        return
    assert len(received) < HEAD.size + ANSWER_BYTES_MAX


@pytest.mark.requirement("I4")
@pytest.mark.parametrize("length", [JOB_BYTES_MAX + 1, (1 << 32) - 1])
def test_the_length_of_a_frame_is_bounded_before_it_is_read(length: int) -> None:
    head = HEAD.pack(length, 0, 1)
    with pytest.raises(FrameError, match=str(length)):
        JOBS.read(io.BytesIO(head))
    with pytest.raises(FrameError, match=str(length)):
        list(JOBS.take(bytearray(head)))


@pytest.mark.requirement("I4")
def test_a_type_that_nobody_sends_is_refused() -> None:
    with pytest.raises(FrameError, match="type 1 is unknown"):
        list(ANSWERS.take(bytearray(HEAD.pack(0, 1, 0))))


@pytest.mark.requirement("I4")
@pytest.mark.parametrize(
    "job",
    [
        Append("j", 0, bytes(APPEND_BYTES_MAX + 1), sync=False),
        Append("j", -1, b"", sync=False),
        Append("j", 1 << 63, b"", sync=False),
        Allocate("s", -1),
        Allocate("s", 1 << 64),
        ReadObject((Part("s", 0, 1),) * (PARTS_MAX + 1), NAME, 0, None),
        ReadObject(tuple(Part(f"s{number}", 0, 1) for number in range(FILES_MAX + 1)), NAME, 0, None),
        ReadObject((), NAME, 0, ((0, 1),) * (EXTENTS_MAX + 1)),
        ReadObject((Part("s", 1 << 63, 1),), NAME, 0, None),
        ReadObject((), NAME, 1 << 64, None),
        Probe("x" * (FILE_NAME_BYTES_MAX + 1)),
        Remove(("s",) * 5000),
        StatFiles(("s",) * (FILES_PER_STAT + 1)),
        TouchFiles(("s",) * (FILES_PER_STAT + 1)),
    ],
    ids=lambda job: type(job).__name__,
)
def test_a_job_over_a_limit_is_refused_before_it_is_sent(job: Job) -> None:
    with pytest.raises(FrameError):
        JOBS.pack(job, 1)


@pytest.mark.requirement("I4")
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("outcome", b"\xff"), ("detail", b"\x02\0\0\0\xc3("), ("detail", struct.pack("<I", 2000) + bytes(2000)),
        ("seconds", struct.pack("<d", -1)), ("seconds", struct.pack("<d", float("inf"))),
        ("seconds", struct.pack("<d", float("nan"))), ("lengths", struct.pack("<Iq", 1, UNKNOWN - 1)),
        ("lengths", struct.pack("<I", FILES_PER_STAT + 1) + bytes(8 * FILES_PER_STAT + 8)),
        ("requests", struct.pack("<q", UNKNOWN - 1)),
    ],
)  # fmt: skip
def test_a_worker_that_lies_is_refused(field: str, value: bytes) -> None:
    """Its answer as another table lays it out, with one field of the bytes that it may have sent."""
    fields = {
        "outcome": b"\0", "detail": bytes(4), "stored_bytes": bytes(8), "stored_sum": bytes(16), "raw_sum": bytes(16),
        "seconds": bytes(8), "direct": b"\1", "already_there": b"\0", "lengths": bytes(4),
        "replaced": b"\0", "requests": struct.pack("<q", UNKNOWN), "received_bytes": bytes(8), "source_id": bytes(8),
        "lane": bytes(4),
    }  # fmt: skip
    assert ANSWERS.unpack(0, b"".join(fields.values())) == Answer(IoOutcome.OK)
    with pytest.raises(FrameError):
        ANSWERS.unpack(0, b"".join((fields | {field: value}).values()))


@pytest.mark.requirement("I4")
def test_a_part_of_a_file_that_the_job_does_not_name_is_refused() -> None:
    job = Quarantine((Part("s", 4096, 8192),), "q")
    frame = JOBS.pack(job)
    place = struct.pack("<IQQ", 0, 4096, 8192)
    assert frame.count(place) == 1
    for index, offset, length in ((1, 4096, 8192), (0, 1 << 63, 0), (0, 1 << 62, 1 << 62)):
        with pytest.raises(FrameError, match=f"{length} bytes at {offset} of file {index} of 1"):
            unpack(JOBS, frame.replace(place, struct.pack("<IQQ", index, offset, length)))


@pytest.mark.parametrize("file", ["", "/etc/passwd", "../x", "a/../../x", "a//b", "./a", "a/", "a\0b", "..", "a/.."])
def test_no_file_outside_the_directory_is_named(file: str) -> None:
    with pytest.raises(FrameError):
        JOBS.pack(Probe(file))
    name = file.encode()
    with pytest.raises(FrameError):
        JOBS.unpack(KIND_OF_PROBE, struct.pack("<I", len(name)) + name + b"\0")


KIND_OF_PROBE = HEAD.unpack_from(JOBS.pack(Probe("a")))[1]


@pytest.mark.parametrize("file", ["...", "a/..b", ".a", "a\n", "\n", "ü/" + "x" * 255, "a/\udcff"])
def test_any_other_name_is(file: str) -> None:
    assert unpack(JOBS, JOBS.pack(Probe(file, file))) == Probe(file, file)


def test_the_largest_jobs_fit_in_a_frame() -> None:
    parts = tuple(Part("segments/00000.seg", number << 12, 4096) for number in range(PARTS_MAX))
    many = ReadObject(parts, NAME, 1, tuple((number << 12, 4096) for number in range(EXTENTS_MAX)))
    assert unpack(JOBS, JOBS.pack(many)) == many
    assert len(JOBS.pack(Append("j", 0, bytes(APPEND_BYTES_MAX), sync=True))) <= JOB_BYTES_MAX


def test_the_longest_answer_fits_in_a_frame() -> None:
    answer = Answer(IoOutcome.OK, "d" * DETAIL_BYTES_MAX, lengths=(1 << 60,) * FILES_PER_STAT)
    assert unpack(ANSWERS, ANSWERS.pack(answer)) == answer


def test_a_detail_is_cut_between_characters() -> None:
    answer = Answer(IoOutcome.OK, "ü" * DETAIL_BYTES_MAX)
    with pytest.raises(FrameError):
        ANSWERS.pack(answer)
    frame = ANSWERS.pack(answer.cut())
    assert len(frame) <= HEAD.size + ANSWER_BYTES_MAX
    assert unpack(ANSWERS, frame).detail == "ü" * (DETAIL_BYTES_MAX // 2)
    assert Answer(IoOutcome.OK, "short").cut().detail == "short"


# Types that no message has together.


class Color(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, slots=True)
class Inner:
    small: Annotated[int, AtMost(0xFF)]
    below: Signed


@dataclass(frozen=True, slots=True)
class Outer:
    color: Color
    inners: tuple[Inner, ...]
    pair: tuple[int, str]
    maybe: Annotated[tuple[Signed, ...], Count(2)] | None
    middle: Annotated[int, AtMost(0xFFFF_FFFF)]

    def check_fields(self) -> None:
        if self.middle == 13:
            raise ValueError("13 is refused")


OUTER: Framing[Outer] = Framing(Outer, bytes_max=100)


def test_a_message_lies_in_its_body_as_the_table_says() -> None:
    message = Outer(Color.BLUE, (Inner(255, -1), Inner(0, 1)), (7, "é"), (-2,), 0xFFFF_FFFF)
    frame = OUTER.pack(message, 5)
    inners = struct.pack("<IBqBq", 2, 255, -1, 0, 1)
    body = b"\1" + inners + struct.pack("<QI", 7, 2) + "é".encode() + struct.pack("<?IqI", True, 1, -2, 0xFFFF_FFFF)
    assert frame == struct.pack("<IBQ", len(body), 0, 5) + body
    assert unpack(OUTER, frame) == message


@pytest.mark.requirement("I4")
@pytest.mark.parametrize(
    "message",
    [
        Outer(Color.RED, (), (0, ""), None, 13),
        Outer(Color.RED, (), (0, ""), None, 1 << 32),
        Outer(Color.RED, (), (0, ""), None, -1),
        Outer(Color.RED, (), (-1, ""), None, 0),
        Outer(Color.RED, (), (0, ""), (1, 2, 3), 0),
        Outer(Color.RED, (Inner(256, 0),), (0, ""), None, 0),
        Outer(Color.RED, (Inner(0, 1 << 63),), (0, ""), None, 0),
        Outer(Color.RED, (), (0, "x" * 100), None, 0),
    ],
)
def test_a_value_over_a_bound_is_refused_before_it_is_sent(message: Outer) -> None:
    with pytest.raises(FrameError):
        OUTER.pack(message)


@pytest.mark.requirement("I4")
def test_the_same_bounds_are_checked_of_what_arrives() -> None:
    frame = OUTER.pack(Outer(Color.RED, (), (0, ""), (1, 2), 12))
    with pytest.raises(FrameError, match="13 is refused"):
        unpack(OUTER, frame[:-4] + struct.pack("<I", 13))
    two, three = struct.pack("<Iqq", 2, 1, 2), struct.pack("<Iqqq", 3, 1, 2, 3)
    assert frame.count(two) == 1
    with pytest.raises(FrameError, match="3"):
        OUTER.unpack(0, frame[HEAD.size :].replace(two, three))


@pytest.mark.requirement("I4")
def test_a_count_is_bounded_by_the_body_before_entries_are_made() -> None:
    @dataclass(frozen=True, slots=True)
    class Words:
        words: tuple[int, ...]

    framing: Framing[Words] = Framing(Words, bytes_max=1 << 10)
    with pytest.raises(FrameError, match="ends before"):
        framing.unpack(0, struct.pack("<I", 0xFFFF_FFFF) + bytes(64))


def test_a_type_without_a_form_is_refused_when_the_framing_is_made() -> None:
    @dataclass(frozen=True, slots=True)
    class Odd:
        words: list[int]

    with pytest.raises(TypeError):
        Framing(Odd, bytes_max=1)
