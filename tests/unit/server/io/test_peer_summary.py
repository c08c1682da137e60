"""Summaries of what a source can lend: words of names, filters, and what a reader takes (ADR 85)."""

from __future__ import annotations

import os
import random
import struct
from dataclasses import replace

import numpy as np
import pytest
from kvdepot.server.io.chunk_words import WORD_BYTES, seeds_of, words_of, words_of_names
from kvdepot.server.io.framing import HEAD, FrameError
from kvdepot.server.io.peer_summary import FULL, Filter, Summaries, summary_of
from kvdepot.server.io.peer_wire import SUMMARY_BYTES_MAX, TO_READER, Summary, SummaryWords

from tests.rigs.seeds import RUN_SEED

ARENA = 9


def drawn(count: int) -> np.ndarray:
    return np.frombuffer(random.Random(RUN_SEED).randbytes(WORD_BYTES * count), "<u8")


def test_source_and_reader_make_the_same_words() -> None:
    namespaces = [os.urandom(16) for _ in range(3)]
    names = [(namespaces[at % 3], os.urandom(16)) for at in range(300)]
    words = words_of_names(names)
    seeds = seeds_of(b"".join(namespaces))
    keys = np.frombuffer(b"".join(key for _, key in names), "<u8").reshape(-1, 2)
    assert (words_of(seeds[np.arange(300) % 3], keys) == words).all()
    for at in range(3):
        assert (words_of(seeds[at], keys[at::3]) == words[at::3]).all()
    assert len(set(words.tolist())) == 300
    assert len(words_of_names([])) == 0


@pytest.mark.parametrize("of", ["namespace", "first half", "second half"])
def test_each_part_of_a_name_makes_another_word(of: str) -> None:
    namespace, key = bytes(16), bytes(16)
    name = {
        "namespace": (b"\1" + bytes(15), key), "first half": (namespace, b"\1" + bytes(15)),
        "second half": (namespace, bytes(15) + b"\1"),
    }[of]  # fmt: skip
    one, other = words_of_names([(namespace, key), name]).tolist()
    assert 16 < (one ^ other).bit_count() < 48


def test_a_summary_has_ten_bits_a_chunk_and_few_others_seem_to_be_there() -> None:
    words = drawn(20_000)
    summary = summary_of([words[:7000].tobytes(), words[7000:].tobytes()], ARENA)
    assert (summary.chunks, summary.arena_id) == (20_000, ARENA)
    assert len(summary.bits) == pytest.approx(25_000, rel=0.001)
    known = Filter(summary)
    assert all(known.has(words.tolist()))
    others = sum(known.has([word ^ 1 for word in words.tolist()])) / len(words)
    assert 0.004 < others < 0.016
    assert known.by_chance == pytest.approx(0.0085, rel=0.1)


@pytest.mark.parametrize(("chunks", "by_chance"), [(0, 0.0), (1, 0.001), (1_000_000, 0.025), (5_000_000, 0.5)])
def test_a_summary_is_never_larger_than_its_limit_and_says_how_often_it_is_wrong(chunks: int, by_chance: float) -> None:
    words = drawn(chunks)
    summary = summary_of([words.tobytes()], ARENA)
    assert len(TO_READER.pack(summary)) <= SUMMARY_BYTES_MAX + 64
    known = Filter(summary)
    assert all(known.has(words[:1000].tolist()))
    assert known.by_chance <= by_chance
    others = [word ^ 1 for word in drawn(4000).tolist()]
    assert sum(known.has(others)) <= len(others) * by_chance + 5 * (len(others) * by_chance) ** 0.5


def test_equal_contents_have_one_version() -> None:
    words = drawn(1000)
    one, same = summary_of([words.tobytes()], ARENA), summary_of([words[::-1].tobytes()], ARENA)
    assert one == same and one.version
    assert summary_of([words[1:].tobytes()], ARENA).version != one.version


def test_the_process_that_sends_has_one_summary_a_tenant_and_never_half_of_one() -> None:
    summaries = Summaries()
    words = drawn(4)
    summaries.take(SummaryWords(0, words[:2].tobytes(), first=True, last=True))
    summaries.take(SummaryWords(1, words[2:3].tobytes(), first=True, last=False))
    summaries.take(SummaryWords(1, words[3:].tobytes(), first=False, last=True))
    of_none, of_one = summaries.of(0, ARENA), summaries.of(1, ARENA)
    assert Filter(of_none).has(words.tolist()) == [True, True, False, False]
    assert Filter(of_one).has(words.tolist()) == [False, False, True, True]
    summaries.take(SummaryWords(0, words[3:].tobytes(), first=True, last=False))
    assert summaries.of(0, ARENA) is of_none, "the next one is not complete"
    summaries.take(SummaryWords(0, b"", first=False, last=True))
    assert Filter(summaries.of(0, ARENA)).has(words.tolist()) == [False, False, False, True]
    assert summaries.of(1, ARENA) is of_one


@pytest.mark.requirement("N3")
@pytest.mark.parametrize(
    "change",
    [
        {"hashes": 0}, {"hashes": 17}, {"hashes": 1 << 40}, {"bits": b""}, {"bits": b"\1" * 7},
        {"bits": bytes(SUMMARY_BYTES_MAX + 1)}, {"version": 0},
    ],
)  # fmt: skip
def test_sizes_that_no_summary_has_are_no_message(change: dict[str, int | bytes]) -> None:
    summary = replace(summary_of([drawn(100).tobytes()], ARENA), **change)  # type: ignore[arg-type]
    with pytest.raises(FrameError):
        TO_READER.pack(summary)
    body = struct.pack("<QQQQI", summary.arena_id, summary.version, summary.chunks, summary.hashes, len(summary.bits))
    with pytest.raises(FrameError):
        TO_READER.unpack(5, body + summary.bits)


def test_the_longest_body_of_an_answer_is_bounded() -> None:
    with pytest.raises(FrameError):
        next(iter(TO_READER.take(bytearray(HEAD.pack(1 << 30, 5, 0)))))


@pytest.mark.requirement("N3")
def test_a_summary_that_has_everything_is_refused() -> None:
    for bits in (b"\xff" * 1000, b"\x7f" * 1000):
        with pytest.raises(ValueError, match="of its bits are set"):
            Filter(Summary(ARENA, 1, 5, 1, bits))
    most = Summary(ARENA, 1, 5, 1, b"\x3f" * 1000)
    assert Filter(most).by_chance == FULL


@pytest.mark.requirement("N3")
def test_random_bits_are_asked_without_harm() -> None:
    known = Filter(Summary(ARENA, 1, 1 << 60, 16, os.urandom(4096)))
    answers = known.has([0, 1, (1 << 64) - 1, *drawn(1000).tolist()])
    assert sum(answers) < 10
