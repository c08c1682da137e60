"""The client's small parts: endpoints, back-off, breaker, packed extents, mapping an arena."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator

import pytest
from kvdepot.client.arena_map import ArenaMap, Population
from kvdepot.client.backoff import Backoff
from kvdepot.client.endpoint import Endpoint, EndpointError
from kvdepot.client.extents import ExtentError, parse_extents
from kvdepot.client.liveness import LivenessBreaker
from kvdepot.core.arena import PAGE_BYTES, ArenaFormatError, GenerationsHeader
from kvdepot.core.units import size_text


def test_an_endpoint_names_both_sockets() -> None:
    endpoint = Endpoint.parse("unix:///run/kvdepot/kvdepot.sock")
    assert endpoint.grpc_target == "unix:/run/kvdepot/kvdepot.sock"
    assert endpoint.attach_path == "/run/kvdepot/kvdepot.sock.attach"
    assert str(endpoint) == "unix:///run/kvdepot/kvdepot.sock"


@pytest.mark.parametrize(
    ("text", "says"),
    [("tcp://h:1", "unix://"), ("unix://relative", "absolute"), ("", "unix://"), ("unix:///" + "x" * 100, "107")],
)
def test_an_endpoint_that_cannot_be_used_is_refused_with_what_to_write(text: str, says: str) -> None:
    with pytest.raises(EndpointError, match=says):
        Endpoint.parse(text)


def test_back_off_doubles_to_its_bound_with_jitter_and_starts_again() -> None:
    draws = iter([0.0, 0.0, 0.0, 0.999, 0.999, 0.0])
    backoff = Backoff(0.1, 0.5, lambda: next(draws))
    waits = [backoff.next_seconds() for _ in range(5)]
    assert waits[:3] == pytest.approx([0.05, 0.1, 0.2])
    assert all(0.25 <= wait <= 0.5 for wait in waits[3:])
    backoff.reset()
    assert backoff.next_seconds() == pytest.approx(0.05)


def test_a_breaker_opens_after_several_unanswered_calls_over_some_time_and_any_answer_closes_it() -> None:
    now = [0.0]
    breaker = LivenessBreaker(3, 1.0, lambda: now[0])

    def unanswered_at(seconds: float) -> bool:
        now[0] = seconds
        return breaker.unanswered()

    assert [unanswered_at(seconds) for seconds in (10.0, 10.1, 10.2)] == [False] * 3, "a burst on a busy machine"
    assert [unanswered_at(seconds) for seconds in (11.1, 11.2)] == [True, False], "it opens once"
    assert bool(breaker.open) is True
    breaker.answered()
    assert bool(breaker.open) is False
    assert not unanswered_at(20.0)
    assert bool(breaker.open) is False


def packed(*fragments: tuple[int, int, int, int, int]) -> bytes:
    return b"".join(struct.pack("<5Q", *fragment) for fragment in fragments)


def test_packed_extents_become_fragments_by_object() -> None:
    found = parse_extents(packed((2, 9, 4096, 100, 3), (2, 11, 8192, 50, 5), (4, 1, 0, 10, 7)), 1 << 20)
    assert found.fragments == {2: (0, 2), 4: (2, 3)}
    assert found.fragmented
    assert found.starts.tolist() == [0, 100, 150]
    assert [found.size_bytes(index) for index in (2, 4)] == [150, 10]
    assert found.granted([4, 2]) == ([1, 9, 11], [7, 3, 5])
    assert parse_extents(b"", 1 << 20).fragments == {}


@pytest.mark.requirement("I1")
@pytest.mark.parametrize(
    "wrong",
    [
        b"\0" * 39,
        packed((0, 0, 1 << 20, 1, 1)),
        packed((0, 0, (1 << 20) - 1, 2, 1)),
        packed((0, 0, 1 << 63, 1, 1)),
        packed((0, 0, 4096, 0, 1)),
        packed((0, 0, 0, 1, 1), (1, 0, 0, 1, 1), (0, 0, 0, 1, 1)),
    ],
)
def test_extents_that_cannot_be_true_are_refused(wrong: bytes) -> None:
    with pytest.raises(ExtentError):
        parse_extents(wrong, 1 << 20)


@pytest.fixture
def data() -> Iterator[int]:
    descriptor = os.memfd_create("data")
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def column() -> Iterator[int]:
    descriptor = os.memfd_create("generations")
    yield descriptor
    os.close(descriptor)


DATA_BYTES = 6 << 20


@pytest.mark.requirement("I1")
def test_what_is_no_arena_is_not_mapped(data: int, column: int) -> None:
    def is_refused(why: str) -> None:
        with pytest.raises(ArenaFormatError, match=why):
            ArenaMap(data, column, DATA_BYTES)

    is_refused("short")
    os.ftruncate(column, PAGE_BYTES)
    is_refused("magic")
    os.ftruncate(data, DATA_BYTES)
    os.pwrite(column, GenerationsHeader(1, 64).pack(), 0)
    is_refused("shorter")
    os.ftruncate(column, PAGE_BYTES + 8 * 64)
    os.ftruncate(data, DATA_BYTES - 4096)
    is_refused("shorter")
    os.ftruncate(data, DATA_BYTES)
    assert ArenaMap(data, column, DATA_BYTES).arena_id == 1


@pytest.mark.requirement("T1")
def test_only_pages_that_the_daemon_has_populated_are_touched(data: int, column: int) -> None:
    os.ftruncate(column, PAGE_BYTES + 8 * 64)
    os.ftruncate(data, DATA_BYTES)
    os.pwrite(column, GenerationsHeader(1, 64).pack(), 0)
    arena = ArenaMap(data, column, DATA_BYTES)
    population = Population(arena, os.dup(data))
    piece = 1 << 20
    assert population.step(piece) not in (0.0, None), "no page of six million bytes: not yet"
    assert os.fstat(data).st_blocks == 0
    half = DATA_BYTES // 2
    os.pwrite(data, b"\0" * half, 0)
    steps = 0
    while population.step(piece) == 0.0:
        steps += 1
    assert steps == half // piece
    os.pwrite(data, b"\0" * half, half)
    while (wait := population.step(piece)) == 0.0:
        steps += 1
    assert wait is None
    assert steps == DATA_BYTES // piece
    arena.close()
    assert population.step(piece) is None
    population.close()


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (3 << 30, "3.00 GiB"), (1 << 60, "1024.00 PiB")],
)
def test_sizes_are_printed_for_people(size_bytes: int, text: str) -> None:
    assert size_text(size_bytes) == text
