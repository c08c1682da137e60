"""Records, snapshots and replay: against the tables of docs/formats/disk.md, and against damage of every kind."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kvdepot.core.objectfile import ObjectName, object_bytes
from kvdepot.server.io.framing import Framing
from kvdepot.server.tiers.disk.columns import PutColumns
from kvdepot.server.tiers.disk.layout import Store, generation_of, journal_name, snapshot_name
from kvdepot.server.tiers.disk.messages import (
    MESSAGES,
    REQUESTS,
    Begin,
    Claims,
    Compact,
    Locked,
    Objects,
    Open,
    Opened,
    Request,
)
from kvdepot.server.tiers.disk.records import (
    JOURNAL_HEADER_BYTES,
    MARK_BYTES,
    SNAPSHOT_HEADER_BYTES,
    SYNCED,
    BadFile,
    BadRecord,
    Mark,
    Put,
    RecordType,
    SnapshotHeader,
    pack_journal_header,
    pack_mark,
    pack_put,
    pack_snapshot_header,
    record_bytes,
    unpack_record,
    unpack_snapshot_header,
)
from kvdepot.server.tiers.disk.replay import Replayed, replay
from xxhash import xxh3_128_intdigest

PAGE = 4096
STORE = b"store-id-16bytes"
DOCUMENT = Path(__file__).resolve().parents[5] / "docs" / "formats" / "disk.md"


def put_of(sequence: int, address: int = 0, pages: int = 2, *, number: int | None = None, generation: int = 1) -> Put:
    """An object of so many pages, its header's among them."""
    raw_bytes = (pages - 1) * PAGE
    key = (sequence if number is None else number).to_bytes(16, "little")
    name = ObjectName(b"n" * 16, key, bytes(16), 1, 32, raw_bytes)
    return Put(name, sequence, generation, 0, raw_bytes, 11, 11, 1_800_000_000, ((address, pages * PAGE),))


def kill_of(sequence: int, generation: int = 1) -> Mark:
    return Mark(RecordType.KILL, sequence, generation)


def journal_of(records: Sequence[Put | Mark], generation: int = 1) -> bytes:
    packed = [pack_put(record) if isinstance(record, Put) else pack_mark(record) for record in records]
    return pack_journal_header(STORE, generation) + b"".join(packed)


def snapshot_of(
    puts: Sequence[Put], generation: int = 1, *, synced: int = 0, highest: int = 0, day: int = 0, claimed: int = -1
) -> bytes:
    """`claimed`: how many records its header says there are, where that is wrong."""
    body = b"".join(map(pack_put, puts))
    records = len(puts) if claimed < 0 else claimed
    header = SnapshotHeader(STORE, generation, synced, highest, 5, day, 7, records, len(body), xxh3_128_intdigest(body))
    return pack_snapshot_header(header) + body


def replayed(*records: Put | Mark, snapshot: bytes | None = None) -> Replayed:
    return replay(snapshot, [(1, journal_of(records))], STORE, 1)


def sequences(found: Replayed) -> set[int]:
    return {put.sequence for put in found.live}


# The tables


def test_the_document_has_the_sizes_of_the_code() -> None:
    sections = {part.split("\n", 1)[0]: part for part in DOCUMENT.read_text().split("\n## ")}
    rows = {
        name: [(int(at), int(size)) for at, size in re.findall(r"^\| (\d+) \| (\d+) \|", sections[name], re.MULTILINE)]
        for name in ("Records", "Journal", "Snapshot")
    }
    assert [end for end, _ in rows["Records"]][1:] == [at + size for at, size in rows["Records"]][:-1]
    assert rows["Records"][-1] == (128, 8)
    assert record_bytes(1) == 136 + 16 + 8
    assert MARK_BYTES == 24 + 8
    for name, size in (("Journal", JOURNAL_HEADER_BYTES), ("Snapshot", SNAPSHOT_HEADER_BYTES)):
        assert [at for at, _ in rows[name]][1:] == [at + length for at, length in rows[name]][:-1]
        assert sum(rows[name][-1]) == size


fragments = st.lists(st.integers(1, 8), min_size=1, max_size=6)


@st.composite
def puts(draw: st.DrawFn) -> Put:
    lengths = [pages * PAGE for pages in draw(fragments)]
    total = sum(lengths)
    if total == PAGE:
        lengths, total = [2 * PAGE], 2 * PAGE
    stored = draw(st.integers(total - 2 * PAGE + 1, total - PAGE))
    raw = draw(st.integers(stored, 1 << 36))
    at, places = 0, []
    for length in lengths:
        at += draw(st.integers(0, 1 << 20)) * PAGE
        places.append((at, length))
        at += length
    sixteen = st.binary(min_size=16, max_size=16)
    kind, boundary = draw(st.sampled_from([1, 2, 3])), draw(st.integers(1, 1 << 31))
    name = ObjectName(draw(sixteen), draw(sixteen), draw(sixteen), kind, boundary, raw)
    sums = st.integers(0, (1 << 128) - 1)
    words = st.integers(0, (1 << 64) - 1)
    return Put(
        name, draw(words), draw(words), draw(st.integers(0, 255)), stored, draw(sums), draw(sums), draw(words),
        tuple(draw(st.permutations(places))), draw(st.booleans()),
    )  # fmt: skip


@given(puts())
def test_records_come_back_as_they_were(put: Put) -> None:
    packed = pack_put(put)
    assert unpack_record(memoryview(packed), 0) == (put, len(packed))
    assert len(packed) == record_bytes(len(put.fragments))
    assert put.medium_bytes == object_bytes(put.stored_bytes) == sum(length for _, length in put.fragments)


@pytest.mark.requirement("P6")
@given(puts(), st.integers(0, 1 << 16), st.integers(0, 7))
def test_any_flipped_bit_of_a_record_is_noticed(put: Put, at: int, bit: int) -> None:
    packed = bytearray(pack_put(put))
    packed[at % len(packed)] ^= 1 << bit
    with pytest.raises(BadRecord):
        unpack_record(memoryview(packed), 0)


@given(st.binary(max_size=400))
def test_any_bytes_are_a_record_or_refused(data: bytes) -> None:
    with pytest.raises(BadRecord):
        unpack_record(memoryview(data), 0)


@given(st.binary(max_size=300), st.integers(0, 3))
def test_any_bytes_are_a_snapshot_or_refused(data: bytes, generation: int) -> None:
    with pytest.raises(BadFile):
        unpack_snapshot_header(memoryview(data), STORE, generation)


@given(st.binary(max_size=600))
@example(b'{"format": "kvdepot disk"}')
@example(b'{"store_id": 5, "segment_bytes": 1, "format": "kvdepot disk", "version": 1}')
@example(b'{"store_id": "' + b"ab" * 16 + b'", "segment_bytes": 1e300, "format": "kvdepot disk", "version": 1}')
@example(b"[" * 4096)
def test_any_bytes_are_a_store_or_refused(data: bytes) -> None:
    with pytest.raises(BadFile):
        Store.unpack(data)


@pytest.mark.parametrize("segment_bytes", [-(1 << 20), 0, 1, (1 << 20) + 4096, (1 << 40) + (1 << 20)])
def test_segments_of_an_impossible_length_are_refused(segment_bytes: int) -> None:
    with pytest.raises(BadFile, match=f"segments of {segment_bytes} bytes"):
        Store.unpack(Store(STORE, segment_bytes).pack())


def test_a_store_comes_back_as_it_was() -> None:
    store = Store(STORE, 1 << 20)
    assert Store.unpack(store.pack()) == store


def test_file_names_have_their_generation() -> None:
    assert generation_of(Path(journal_name(17)).name) == 17
    assert generation_of(Path(snapshot_name(17)).name) == generation_of("00000017.snap.tmp") == 17
    assert [generation_of(name) for name in ("17.log", "abc.log", "0000000x.snap", "")] == [None] * 4


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kind", 0), ("kind", 4), ("boundary_tokens", 0), ("raw_bytes", PAGE - 1), ("raw_bytes", (64 << 30) + 1),
    ],
)  # fmt: skip
def test_records_with_impossible_names_are_refused(field: str, value: int) -> None:
    put = put_of(1)
    name = replace(put.name, **{field: value})  # type: ignore[arg-type]
    with pytest.raises(BadRecord):
        unpack_record(memoryview(pack_put(replace(put, name=name))), 0)


@pytest.mark.parametrize(
    "fragments",
    [
        ((0, PAGE),), ((0, 3 * PAGE),), ((1, 2 * PAGE),), ((0, PAGE), (0, PAGE)), ((0, 2 * PAGE), (PAGE, 0)),
        ((1 << 60, 2 * PAGE),), ((0, PAGE - 1), (PAGE, PAGE + 1)),
    ],
)  # fmt: skip
def test_records_with_impossible_places_are_refused(fragments: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(BadRecord):
        unpack_record(memoryview(pack_put(replace(put_of(1), fragments=fragments))), 0)


@given(st.lists(puts(), max_size=5), st.randoms(use_true_random=False))
def test_columns_say_what_the_records_say(some: list[Put], random: Random) -> None:
    columns = PutColumns.unpacked([pack_put(put) for put in some])
    assert list(columns) == some
    assert columns.packed() == [pack_put(put) for put in some]
    assert columns.medium_bytes().tolist() == [put.medium_bytes for put in some]
    rows = [random.randrange(len(some)) for _ in range(4)] if some else []
    assert list(columns.select(np.array(rows, np.int64))) == [some[row] for row in rows]
    assert [put for part in columns.slices(2) for put in part] == some
    found = [(start, end, row) for row, put in enumerate(some) for start, end in [(a, a + n) for a, n in put.fragments]]
    assert sorted(zip(*(column.tolist() for column in columns.places()), strict=True)) == sorted(found)


IMPOSSIBLE = [
    replace(put_of(1), name=replace(put_of(1).name, kind=4)),
    replace(put_of(1), name=replace(put_of(1).name, boundary_tokens=0)),
    replace(put_of(1), name=replace(put_of(1).name, raw_bytes=PAGE - 1)),
    replace(put_of(1), name=replace(put_of(1).name, raw_bytes=(64 << 30) + 1)),
    replace(put_of(1), name=replace(put_of(1).name, raw_bytes=(1 << 63) + 5)),
    replace(put_of(1), stored_bytes=0),
    replace(put_of(1), stored_bytes=(1 << 64) - 5),
    replace(put_of(1), fragments=((0, PAGE),)),
    replace(put_of(1), fragments=((1, 2 * PAGE),)),
    replace(put_of(1), fragments=((1 << 56, 2 * PAGE),)),
    replace(put_of(1), fragments=(((1 << 64) - PAGE, 2 * PAGE),)),
    replace(put_of(1), fragments=((0, PAGE), (0, PAGE))),
]


@pytest.mark.requirement("P6")
@pytest.mark.parametrize("put", IMPOSSIBLE)
def test_an_impossible_record_ends_the_replay_or_the_snapshot(put: Put) -> None:
    bad = replace(put, sequence=2)
    found = replayed(put_of(1, 64 * PAGE), bad, put_of(3, 128 * PAGE))
    assert sequences(found) == {1}
    with pytest.raises(BadRecord) as why:
        unpack_record(memoryview(pack_put(bad)), 0)
    assert found.stopped.endswith(str(why.value))
    with pytest.raises(BadFile, match="record 1"):
        replay(snapshot_of([put_of(1, 64 * PAGE), bad]), [], STORE, 1)


# Replay


def test_a_kill_ends_the_write_it_names() -> None:
    found = replayed(put_of(1), put_of(2, 8 * PAGE), kill_of(1))
    assert sequences(found) == {2}
    assert not found.stopped
    assert found.highest_sequence == 2


def test_a_put_ends_what_it_overlaps_even_when_it_is_dead_itself() -> None:
    found = replayed(put_of(1, 0, 4), put_of(2, 8 * PAGE, 4), put_of(3, 3 * PAGE, 6), kill_of(3))
    assert not len(found.live)
    assert found.overlapped == 2


@pytest.mark.parametrize("cells", [1, 3, 1000])
def test_overlaps_are_found_however_many_are_looked_at_at_once(cells: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvdepot.server.tiers.disk.replay._CELLS_AT_ONCE", cells)
    small = [put_of(number, 2 * number * PAGE) for number in range(2, 20)]
    assert sequences(replayed(put_of(1, 0, 64), *small)) == set(range(2, 20))
    large = put_of(99, 8 * PAGE, 8)
    assert sequences(replayed(*small, large)) == {2, 3, *range(8, 20), 99}


def test_a_write_of_a_lower_sequence_does_not_end_a_later_one() -> None:
    assert sequences(replayed(put_of(5, 0, 4), put_of(3, 2 * PAGE, 4))) == {5}


def test_of_two_writes_of_one_object_the_later_lives() -> None:
    assert sequences(replayed(put_of(1, 0, number=7), put_of(2, 8 * PAGE, number=7))) == {2}


def test_only_a_closed_journal_is_followed() -> None:
    close = Mark(RecordType.CLOSE, 9, 1)
    second = (2, journal_of([put_of(2, 8 * PAGE, generation=2)], 2))
    closed = replay(None, [(1, journal_of([put_of(1), close])), second], STORE, 0)
    assert sequences(closed) == {1, 2}
    assert closed.highest_sequence == 9
    cut = replay(None, [(1, journal_of([put_of(1)])), second], STORE, 0)
    assert sequences(cut) == {1}


def test_the_index_is_clean_only_when_the_last_journal_says_so() -> None:
    synced = Mark(RecordType.CLOSE, 9, 1, SYNCED)
    assert replayed(put_of(1), synced).closed
    assert not replayed(put_of(1)).closed
    assert not replayed(put_of(1), Mark(RecordType.CLOSE, 9, 1)).closed
    assert replayed(put_of(1), synced, put_of(2, 8 * PAGE)).stopped


def test_records_of_another_generation_or_repeated_ones_stop_the_replay() -> None:
    assert sequences(replayed(put_of(1), put_of(2, 8 * PAGE, generation=2))) == {1}
    assert sequences(replayed(put_of(1), put_of(1, 8 * PAGE), put_of(3, 16 * PAGE))) == {1}


def test_the_day_is_counted_with_what_died_meanwhile() -> None:
    day = 1_800_000_000 // 86_400
    later = replace(put_of(3, 16 * PAGE), created_at=1_800_000_000 + 86_400)
    assert replayed(put_of(1), put_of(2, 8 * PAGE), kill_of(1)).day_bytes == 4 * PAGE
    found = replayed(put_of(1), later)
    assert (found.day, found.day_bytes) == (day + 1, 2 * PAGE)
    found = replay(snapshot_of([], day=day), [(1, journal_of([put_of(1)]))], STORE, 1)
    assert found.day_bytes == 7 + 2 * PAGE


def test_a_snapshot_counts_only_when_it_is_complete() -> None:
    whole = snapshot_of([put_of(1), put_of(2, 8 * PAGE)], synced=2, highest=2)
    assert sequences(replay(whole, [], STORE, 1)) == {1, 2}
    for length in range(len(whole)):
        with pytest.raises(BadFile):
            replay(whole[:length], [], STORE, 1)
    with pytest.raises(BadFile, match="instead of"):
        replay(whole + bytes(8), [], STORE, 1)
    with pytest.raises(BadFile, match="2 records instead of 3"):
        replay(snapshot_of([put_of(1), put_of(2)], claimed=3), [], STORE, 1)
    with pytest.raises(BadFile, match="store"):
        replay(whole, [], b"another-store-id", 1)
    with pytest.raises(BadFile, match="generation"):
        replay(whole, [], STORE, 2)


@pytest.mark.requirement("P6")
@given(st.integers(0, 1 << 20), st.integers(0, 7))
def test_any_flipped_bit_of_a_snapshot_is_noticed(at: int, bit: int) -> None:
    whole = bytearray(snapshot_of([put_of(1), put_of(2, 8 * PAGE)], synced=2, highest=2))
    whole[at % len(whole)] ^= 1 << bit
    with pytest.raises(BadFile):
        replay(bytes(whole), [], STORE, 1)


def history(random: Random, length: int) -> list[Put | Mark]:
    """Records as a tier would write them: a KILL before its bytes are used again."""
    records: list[Put | Mark] = []
    live: dict[int, Put] = {}
    used: dict[int, int] = {}  # page -> sequence
    for sequence in range(1, length):
        if live and random.random() < 0.45:
            victim = random.choice(list(live))
            for address, size in live.pop(victim).fragments:
                for page in range(address // PAGE, (address + size) // PAGE):
                    del used[page]
            records.append(kill_of(victim))
            continue
        pages, start = random.randint(2, 5), random.randrange(24)
        if any(page in used for page in range(start, start + pages)):
            continue
        put = put_of(sequence, start * PAGE, pages)
        live[sequence] = put
        used.update(dict.fromkeys(range(start, start + pages), sequence))
        records.append(put)
    return records


def model(records: Sequence[Put | Mark]) -> set[int]:
    live: set[int] = set()
    for record in records:
        if isinstance(record, Put):
            live.add(record.sequence)
        else:
            live.discard(record.sequence)
    return live


@settings(max_examples=150)
@given(st.randoms(use_true_random=False), st.integers(1, 60), st.floats(0, 1), st.sampled_from(["cut", "flip", "junk"]))
def test_replay_is_the_prefix_that_is_whole_whatever_happens_to_the_tail(
    random: Random, length: int, where: float, damage: str
) -> None:
    records = history(random, length)
    data = journal_of(records)
    at = int(where * len(data))
    if damage == "cut":
        data = data[:at]
    elif damage == "flip" and data[at:]:
        data = data[:at] + bytes([data[at] ^ (1 << random.randrange(8))]) + data[at + 1 :]
    else:
        data = data[:at] + random.randbytes(random.randrange(200))
    found = replay(None, [(1, data)], STORE, 0)
    # Which records end before the damage?
    lengths = [record_bytes(1) if isinstance(record, Put) else MARK_BYTES for record in records]
    whole = max(sum(end <= at for end in accumulate(lengths, initial=JOURNAL_HEADER_BYTES)) - 1, 0)
    assert sequences(found) == model(records[:whole])
    pages: set[int] = set()
    for put in found.live:
        for address, size in put.fragments:
            its = set(range(address // PAGE, (address + size) // PAGE))
            assert not its & pages, "two live objects overlap"
            pages |= its


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 30), st.integers(2, 6), st.booleans()), max_size=25))
def test_no_two_live_objects_overlap_whatever_the_records_say(rows: list[tuple[int, int, int, bool]]) -> None:
    records: list[Put | Mark] = []
    for sequence, page, pages, kill in rows:
        records.append(kill_of(sequence) if kill else put_of(sequence, page * PAGE, pages))
    pages_used: set[int] = set()
    for put in replay(None, [(1, journal_of(records))], STORE, 0).live:
        its = {page for address, size in put.fragments for page in range(address // PAGE, (address + size) // PAGE)}
        assert not its & pages_used
        pages_used |= its


@settings(max_examples=60)
@given(st.randoms(use_true_random=False), st.integers(1, 60), st.integers(0, 60))
def test_a_snapshot_and_the_rest_of_the_journal_are_the_whole_journal(random: Random, length: int, cut: int) -> None:
    records = history(random, length)
    before, after = records[:cut], [replace(record, generation=2) for record in records[cut:]]
    first = replay(None, [(1, journal_of(before))], STORE, 0)
    middle = snapshot_of(list(first.live), 2, highest=first.highest_sequence)
    assert sequences(replay(middle, [(2, journal_of(after, 2))], STORE, 2)) == model(records)


# Messages with the opening process


@pytest.mark.parametrize(
    "message",
    [
        Begin("token", 5), Open(((5, 0, PAGE),), ((8 * PAGE, PAGE),)), Compact(3, 1 << 60), Locked("token", 1 << 40),
        Claims(((0, PAGE), (PAGE, 3 * PAGE))),
        Opened("ab", 1 << 20, 3, 4, 5, 6, 7, 8, 9, 10, (("quarantine/x", 5),), ("note",), "why", "no_space", (7,)),
    ],
)  # fmt: skip
def test_messages_arrive_in_any_pieces(message: object) -> None:
    received = bytearray()
    arrived = []
    framing: Framing[Any] = REQUESTS if isinstance(message, Request) else MESSAGES
    for byte in framing.pack(message) * 2:
        received.append(byte)
        arrived += [message for _, message in framing.take(received)]
    assert arrived == [message, message]


def test_objects_are_sent_as_columns_and_arrive_whole() -> None:
    several = replace(put_of(3), fragments=((40 * PAGE, PAGE), (24 * PAGE, PAGE)))
    puts = [put_of(1), several, replace(put_of(2, 8 * PAGE), unproven=True)]
    sent = bytearray(MESSAGES.pack(Objects(PutColumns.of(puts))))
    ((_, arrived),) = MESSAGES.take(sent)
    assert isinstance(arrived, Objects)
    assert list(arrived.puts) == puts
