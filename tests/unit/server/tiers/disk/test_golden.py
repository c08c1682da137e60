"""Journal, snapshot and store of format version 1, written once: read today, and written today with the same bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import xxhash
from kvdepot.core.objectfile import Codec, ObjectName
from kvdepot.server.tiers.disk.layout import Store
from kvdepot.server.tiers.disk.records import (
    SYNCED,
    Mark,
    Put,
    RecordType,
    SnapshotHeader,
    pack_journal_header,
    pack_mark,
    pack_put,
    pack_snapshot_header,
)
from kvdepot.server.tiers.disk.replay import replay

FOLDER = Path(__file__).resolve().parents[4] / "golden" / "disk-v1"
STORE = Store(bytes(range(16)), 1 << 20)
GENERATION = 7
SEQUENCE = GENERATION << 40


def numbered_put(number: int, generation: int) -> Put:
    """Sizes that no codec would make, but different in every field."""
    stored_bytes = 5_000 * number
    place = 1_000_000 * 4096 * number
    pages = 1 + -(-stored_bytes // 4096)
    fragments = ((place, 4096), (place + 8192, 4096 * (pages - 1))) if number % 2 else ((place, 4096 * pages),)
    name = ObjectName(
        bytes([0x10 + number]) * 16, bytes([0x20 + number]) * 16, bytes([0x30 + number]) * 16, number % 3 + 1,
        256 * number, 6_000 * number,
    )  # fmt: skip
    return Put(
        name, SEQUENCE + number, generation, Codec(number % 3), stored_bytes, (0x40 << 120) + number,
        (0x50 << 120) + number, 1_795_000_000 + number, fragments, unproven=number == 2,
    )  # fmt: skip


OLD = [numbered_put(number, GENERATION - 1) for number in (1, 2)]
NEW = [numbered_put(number, GENERATION) for number in (3, 4)]


def snapshot() -> bytes:
    records = b"".join(map(pack_put, OLD))
    header = SnapshotHeader(
        STORE.store_id, GENERATION, synced_sequence=SEQUENCE + 1, highest_sequence=SEQUENCE + 2,
        scrub_position=SEQUENCE, day=20_775, day_bytes=40_960, records=len(OLD), body_bytes=len(records),
        body_sum=xxhash.xxh3_128_intdigest(records),
    )  # fmt: skip
    return pack_snapshot_header(header) + records


def journal() -> bytes:
    records = [
        pack_put(NEW[0]),
        pack_mark(Mark(RecordType.KILL, OLD[0].sequence, GENERATION)),
        pack_mark(Mark(RecordType.SCRUB, SEQUENCE + 1, GENERATION)),
        pack_put(NEW[1]),
        pack_mark(Mark(RecordType.CLOSE, SEQUENCE + 4, GENERATION, SYNCED)),
    ]
    return pack_journal_header(STORE.store_id, GENERATION) + b"".join(records)


FILES = {"store.json": STORE.pack, "00000007.snap": snapshot, "00000007.log": journal}


def golden(name: str) -> bytes:
    return (FOLDER / name).read_bytes()


def test_golden_files_of_version_1_are_read() -> None:
    assert Store.unpack(golden("store.json")) == STORE
    found = replay(golden("00000007.snap"), [(GENERATION, golden("00000007.log"))], STORE.store_id, GENERATION)
    assert list(found.live) == [OLD[1], *NEW]
    assert (found.closed, found.stopped) == (True, "")
    assert (found.synced_sequence, found.highest_sequence) == (SEQUENCE + 1, SEQUENCE + 4)
    assert (found.scrub_position, found.day) == (SEQUENCE + 1, 20_775)


def test_a_golden_journal_without_its_snapshot_is_read() -> None:
    found = replay(None, [(GENERATION, golden("00000007.log"))], STORE.store_id, GENERATION)
    assert list(found.live) == NEW


@pytest.mark.parametrize("name", FILES)
def test_the_writer_of_today_writes_the_golden_bytes(name: str) -> None:
    assert FILES[name]() == golden(name)


def test_every_field_of_a_record_counts() -> None:
    """A field that pack_put left out would come back the same from both."""
    changed = [
        replace(NEW[0], name=replace(NEW[0].name, parent=bytes(16))),
        replace(NEW[0], created_at=1), replace(NEW[0], codec=2), replace(NEW[0], raw_sum=1),
        replace(NEW[0], stored_sum=1), replace(NEW[0], unproven=True), replace(NEW[0], generation=1),
    ]  # fmt: skip
    assert len({pack_put(record) for record in (*changed, NEW[0])}) == len(changed) + 1
