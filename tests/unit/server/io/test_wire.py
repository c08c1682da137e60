"""Jobs and answers on the wire: all come back, nothing but WireError comes of anything else, nothing is unbounded."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvdepot.core.objectfile import Codec, ObjectName
from kvdepot.server.io.jobs import (
    FILES_PER_LOOK_UP,
    UNKNOWN,
    Allocate,
    Answer,
    Append,
    Job,
    LookUpFiles,
    Part,
    Probe,
    PublishFile,
    Quarantine,
    ReadFile,
    ReadObject,
    Remove,
    TouchFiles,
    WriteObject,
)
from kvdepot.server.io.wire import (
    ANSWER_BYTES_MAX,
    APPEND_BYTES_MAX,
    DETAIL_BYTES_MAX,
    EXTENTS_MAX,
    FILE_NAME_BYTES_MAX,
    FRAME,
    JOB_BYTES_MAX,
    PARTS_MAX,
    WireError,
    body_bytes,
    pack_answer,
    pack_job,
    take_answers,
    unpack_answer,
    unpack_job,
)
from kvdepot.server.tiers.base import IoOutcome

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
jobs: st.SearchStrategy[Job] = st.one_of(
    st.builds(ReadObject, parts, names, u64, st.none() | extents),
    st.builds(
        WriteObject, parts, names, u64, st.sampled_from([int(codec) for codec in Codec]), u64, extents,
        st.none() | sums, st.booleans(),
    ),
    st.builds(Append, files, u62, st.binary(max_size=300), st.booleans()),
    st.builds(Allocate, files, u62, u62),
    st.builds(Remove, st.lists(files, max_size=5).map(tuple)),
    st.builds(Quarantine, parts, files),
    st.builds(Probe, files, st.booleans(), st.just("") | files),
    st.builds(LookUpFiles, st.lists(files, max_size=5).map(tuple)),
    st.builds(TouchFiles, st.lists(files, max_size=5).map(tuple)),
    st.builds(ReadFile, files, names, st.none() | extents, files),
    st.builds(
        PublishFile, files, files, u64, names, st.sampled_from([int(codec) for codec in Codec]), u64, extents,
        st.none() | sums, st.booleans(), files,
    ),
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


@given(u64, jobs)
def test_any_job_comes_back(number: int, job: Job) -> None:
    frame = pack_job(number, job)
    assert body_bytes(frame[: FRAME.size], JOB_BYTES_MAX) == (number, len(frame) - FRAME.size)
    assert unpack_job(frame[FRAME.size :]) == job


@given(st.lists(st.tuples(u64, answers), max_size=4), st.data())
def test_any_answers_come_back_however_the_stream_is_cut(sent: list[tuple[int, Answer]], data: st.DataObject) -> None:
    stream = b"".join(pack_answer(number, answer) for number, answer in sent)
    cut = data.draw(st.integers(0, len(stream)))
    received = bytearray(stream[:cut])
    found = take_answers(received)
    received += stream[cut:]
    assert found + take_answers(received) == sent
    assert not received


@pytest.mark.requirement("I4")
@given(st.binary(max_size=400))
def test_bytes_that_are_no_job_are_refused(body: bytes) -> None:
    try:
        job = unpack_job(body)
    except WireError:
        return
    assert unpack_job(pack_job(0, job)[FRAME.size :]) == job


@pytest.mark.requirement("I4")
@given(jobs, st.data())
def test_a_damaged_job_is_refused_or_another_job(job: Job, data: st.DataObject) -> None:
    body = bytearray(pack_job(0, job)[FRAME.size :])
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    del body[data.draw(st.integers(0, len(body))) :]
    with contextlib.suppress(WireError):
        unpack_job(bytes(body))


@pytest.mark.requirement("I4")
@given(answers, st.data())
def test_a_damaged_answer_is_refused_or_another_answer(answer: Answer, data: st.DataObject) -> None:
    frame = bytearray(pack_answer(3, answer))
    frame[data.draw(st.integers(0, len(frame) - 1))] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(WireError):
        for _, damaged in take_answers(frame):
            assert damaged.seconds >= 0  # counters take it


@pytest.mark.requirement("I4")
@given(st.binary(max_size=4000))
def test_bytes_that_are_no_answers_are_refused_or_waited_for(stream: bytes) -> None:
    received = bytearray(stream)
    try:
        take_answers(received)
    except WireError:
        return
    assert len(received) < ANSWER_BYTES_MAX


@pytest.mark.requirement("I4")
@pytest.mark.parametrize("length", [0, FRAME.size, JOB_BYTES_MAX + 1, (1 << 32) - 1])
def test_the_length_of_a_frame_is_bounded_before_it_is_read(length: int) -> None:
    with pytest.raises(WireError, match=str(length)):
        body_bytes(FRAME.pack(length, 1), JOB_BYTES_MAX)


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
        ReadObject((), NAME, 0, ((0, 1),) * (EXTENTS_MAX + 1)),
        ReadObject((Part("s", 1 << 63, 1),), NAME, 0, None),
        ReadObject((), NAME, 1 << 64, None),
        Probe("x" * (FILE_NAME_BYTES_MAX + 1), write=True),
        Remove(("s",) * 5000),
        LookUpFiles(("s",) * (FILES_PER_LOOK_UP + 1)),
    ],
    ids=lambda job: type(job).__name__,
)
def test_a_job_over_a_limit_is_refused_before_it_is_sent(job: Job) -> None:
    with pytest.raises(WireError):
        pack_job(1, job)


@pytest.mark.parametrize("file", ["", "/etc/passwd", "../x", "a/../../x", "a//b", "./a", "a/", "a\0b"])
def test_no_file_outside_the_directory_is_named(file: str) -> None:
    with pytest.raises(WireError):
        pack_job(1, Probe(file, write=True))
    name = file.encode()
    with pytest.raises(WireError):
        unpack_job(bytes([7, len(name)]) + name + b"\1")


def test_the_largest_jobs_fit_in_a_frame() -> None:
    parts = tuple(Part("segments/00000.seg", number << 12, 4096) for number in range(PARTS_MAX))
    many = ReadObject(parts, NAME, 1, tuple((number << 12, 4096) for number in range(EXTENTS_MAX)))
    assert unpack_job(pack_job(1, many)[FRAME.size :]) == many
    assert len(pack_job(1, Append("j", 0, bytes(APPEND_BYTES_MAX), sync=True))) <= JOB_BYTES_MAX


def test_the_longest_answer_fits_in_a_frame() -> None:
    answer = Answer(IoOutcome.OK, "d" * DETAIL_BYTES_MAX, lengths=(1 << 60,) * FILES_PER_LOOK_UP)
    assert take_answers(bytearray(pack_answer(1, answer))) == [(1, answer)]


def test_a_detail_is_cut_between_characters() -> None:
    answer = Answer(IoOutcome.OK, "ü" * DETAIL_BYTES_MAX)
    frame = pack_answer(1, answer)
    assert len(frame) <= ANSWER_BYTES_MAX
    assert unpack_answer(frame[FRAME.size :]).detail == "ü" * (DETAIL_BYTES_MAX // 2)
