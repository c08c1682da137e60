"""What a worker asks of NIXL: which bytes, how many at once, from whom, and what it never asks (ADR 82)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from kvdepot.server.io import nixl_agent
from kvdepot.server.io.nixl_agent import BATCH_BYTES, NixlError, NotReachedError, ReadingAgent, batches, in_rows
from kvdepot.server.io.peer_wire import Lender

METADATA = b"of an agent"
LENDER = Lender(METADATA, xxhash.xxh3_128_intdigest(METADATA), 1 << 40)


class Nixl:
    """NIXL's agent. `states`: what it says of each transfer, one after the other."""

    def __init__(self, states: Sequence[str] = ("PROC", "DONE")) -> None:
        self.states = states
        self.left: list[str] = []
        self.seen: list[bytes] = []
        self.read: list[tuple[list[tuple[int, int, int]], list[tuple[int, int, int]], str]] = []

    def add_remote_agent(self, metadata: bytes) -> str:
        self.seen.append(metadata)
        return f"agent {len(self.seen)}"

    def get_xfer_descs(self, places: list[tuple[int, int, int]], kind: str) -> list[tuple[int, int, int]]:
        assert kind == "DRAM"
        return places

    def initialize_xfer(self, operation: str, here: Any, there: Any, name: str) -> int:
        assert operation == "READ"
        self.read.append((here, there, name))
        self.left = list(self.states)
        return len(self.read)

    def transfer(self, _: int) -> str:
        return self.left.pop(0)

    def check_xfer_state(self, _: int) -> str:
        return self.left.pop(0) if self.left else "PROC"

    def release_xfer_handle(self, _: int) -> None:
        """It is over."""


class _Started:
    def __init__(self, nixl: Nixl) -> None:
        self.nixl = nixl
        self.base = 4096


def agent(monkeypatch: pytest.MonkeyPatch, nixl: Nixl, seconds: float = 60.0) -> ReadingAgent:
    monkeypatch.setattr(nixl_agent, "_Agent", lambda _: _Started(nixl))
    return ReadingAgent(memoryview(b""), seconds)


def test_bytes_are_read_from_the_lender_s_addresses_to_those_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    nixl = Nixl()
    reader = agent(monkeypatch, nixl)
    for _ in range(2):
        reader.read(LENDER, [(0, 100), (500, 50)], [(7, 120), (900, 30)])
    base = LENDER.base
    here, there = [(4096, 100, 0), (4596, 20, 0), (4616, 30, 0)], [(base + 7, 100, 0), (base + 107, 20, 0)]
    assert nixl.read == [(here, [*there, (base + 900, 30, 0)], "agent 1")] * 2
    assert nixl.seen == [METADATA], "a lender is added once"


@pytest.mark.requirement("N2")
@pytest.mark.parametrize("metadata", [METADATA[:-1], b"", b"garbage", METADATA + b"\0"])
def test_nixl_never_sees_metadata_that_is_not_what_was_sent(monkeypatch: pytest.MonkeyPatch, metadata: bytes) -> None:
    nixl = Nixl()
    reader = agent(monkeypatch, nixl)
    with pytest.raises(ValueError, match="metadata"):
        reader.read(Lender(metadata, LENDER.digest, LENDER.base), [(0, 9)], [(0, 9)])
    assert not nixl.seen and not nixl.read
    reader.read(LENDER, [(0, 9)], [(0, 9)])
    assert nixl.seen == [METADATA]


@pytest.mark.requirement("N1")
@pytest.mark.parametrize("states", [("ERR",), ("PROC", "ERR"), ("PROC",) * 9])
def test_a_read_that_fails_or_does_not_end_ends_the_process(
    monkeypatch: pytest.MonkeyPatch, states: tuple[str, ...]
) -> None:
    nixl = Nixl(states)
    with pytest.raises(NixlError):
        agent(monkeypatch, nixl, seconds=0.01).read(LENDER, [(0, 9)], [(0, 9)])


@pytest.mark.requirement("N1")
def test_what_nixl_raises_ends_the_process_too(monkeypatch: pytest.MonkeyPatch) -> None:
    nixl = Nixl()

    def fail(_: int) -> str:
        raise RuntimeError("NIXL_ERR_REMOTE_DISCONNECT")

    monkeypatch.setattr(nixl, "check_xfer_state", fail)
    with pytest.raises(NixlError, match="REMOTE_DISCONNECT"):
        agent(monkeypatch, nixl).read(LENDER, [(0, 9)], [(0, 9)])


@pytest.mark.requirement("T3")
def test_a_lender_that_is_not_reached_is_not_asked_again_at_once_and_ends_no_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nixl = Nixl()
    reader = agent(monkeypatch, nixl)
    add = nixl.add_remote_agent

    def fail(_: bytes) -> str:
        raise RuntimeError("NIXL_ERR_BACKEND")

    monkeypatch.setattr(nixl, "add_remote_agent", fail)
    assert not reader.why_not
    with pytest.raises(NotReachedError):
        reader.read(LENDER, [(0, 9)], [(0, 9)])
    assert reader.why_not.startswith("NIXL does not reach the peer") and not nixl.read
    monkeypatch.setattr(time, "monotonic", lambda: 1e12)
    assert not reader.why_not
    monkeypatch.setattr(nixl, "add_remote_agent", add)
    reader.read(LENDER, [(0, 9)], [(0, 9)])
    assert len(nixl.read) == 1


def test_an_agent_that_knows_many_lenders_of_before_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = agent(monkeypatch, Nixl())
    with pytest.raises(NixlError, match="lenders"):
        for number in range(1000):
            metadata = str(number).encode()
            reader.read(Lender(metadata, xxhash.xxh3_128_intdigest(metadata), 0), [(0, 9)], [(0, 9)])


extents = st.lists(st.tuples(st.integers(0, 1 << 40), st.integers(0, 1 << 28)), max_size=6)


@given(extents, st.data())
def test_all_bytes_are_in_rows_once_and_in_order(ours: list[tuple[int, int]], data: st.DataObject) -> None:
    total = sum(length for _, length in ours)
    cuts = sorted(data.draw(st.lists(st.integers(0, total), max_size=5)))
    lengths = [end - start for start, end in zip([0, *cuts], [*cuts, total], strict=True)]
    theirs = [(data.draw(st.integers(0, 1 << 40)), length) for length in lengths]
    places = list(in_rows(ours, theirs))
    assert _bytes([(at, length) for at, _, length in places]) == _bytes(ours)
    assert _bytes([(at, length) for _, at, length in places]) == _bytes(theirs)
    found = list(batches(places))
    assert _bytes([(at, length) for batch in found for at, _, length in batch]) == _bytes(ours)
    assert _bytes([(at, length) for batch in found for _, at, length in batch]) == _bytes(theirs)
    assert all(0 < sum(length for _, _, length in batch) <= BATCH_BYTES for batch in found)
    assert len(found) == -(-total // BATCH_BYTES), "each batch but the last is full"


def _bytes(extents: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The extents with neighbours as one."""
    rows: list[tuple[int, int]] = []
    for at, length in extents:
        if rows and sum(rows[-1]) == at:
            rows[-1] = rows[-1][0], rows[-1][1] + length
        elif length:
            rows.append((at, length))
    return rows


@pytest.mark.parametrize(("ours", "theirs"), [([(0, 9)], [(0, 8)]), ([], [(0, 1)]), ([(0, 4)], [(0, 4), (8, 1)])])
def test_sides_of_different_lengths_are_refused(ours: list[tuple[int, int]], theirs: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="more on one side"):
        list(in_rows(ours, theirs))
