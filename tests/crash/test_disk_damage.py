"""P6 through the daemon: whatever is done to the files of its disk tier, an object is served whole or is a miss."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import xxhash
from kvdepot.core.calls import AcquireOutcome
from kvdepot.core.objectfile import FORMAT_VERSION, HEADER_BYTES, ObjectHeader
from kvdepot.server.io.jobs import Part
from kvdepot.server.offline.store_files import layout_as_found
from kvdepot.server.tiers.disk.layout import segment_name

from tests.rigs.disk_daemon import TIER, DiskDaemon
from tests.rigs.known_objects import Known, KnownEngine, dense
from tests.rigs.patience import wait_until
from tests.rigs.raw_client import CHUNK_TOKENS

SPEC = dense(200_000)
OBJECTS = 24
PAGE = 4096
GRANTED, MISSING = AcquireOutcome.GRANTED, AcquireOutcome.MISSING


@dataclass(frozen=True, slots=True)
class Place:
    """Where an object lies."""

    known: Known
    sequence: int
    parts: tuple[Part, ...]

    @property
    def segments(self) -> set[str]:
        return {part.file for part in self.parts}


@pytest.fixture
def world() -> Iterator[DiskDaemon]:
    """Started; its scrubber is off, so that damage stays where it is until it is met."""
    with DiskDaemon(tables='[scrub]\nrate = "0MiB/s"\n') as running:
        yield running


def _fill(world: DiskDaemon) -> list[Known]:
    """Objects without parents or children."""
    with _engine(world) as engine:
        objects = [engine.prompt(10 * number, 1)[0] for number in range(OBJECTS)]
        for known in objects:
            assert engine.put([known]) == 1
    wait_until(lambda: world.tier().objects == OBJECTS, "all is written")
    return objects


def _engine(world: DiskDaemon) -> KnownEngine:
    return KnownEngine(world.daemon.socket, SPEC)


def _places(world: DiskDaemon, objects: list[Known]) -> list[Place]:
    """The daemon does not run."""
    verdict = world.fsck()
    layout = layout_as_found(verdict.store)
    puts = {put.name.key: put for put in verdict.index.puts}
    return [
        Place(known, put.sequence, layout.parts(put.fragments, put.medium_bytes))
        for known in objects
        for put in [puts[known.key]]
    ]


def _stopped_without_arena(world: DiskDaemon) -> list[Place]:
    objects = _fill(world)
    assert world.daemon.stop() == 0
    world.drop_arena()
    return _places(world, objects)


def _read(world: DiskDaemon, part: Part, offset: int, length: int) -> bytes:
    with (world.root / part.file).open("rb") as file:
        return os.pread(file.fileno(), length, part.offset + offset)


def _write(world: DiskDaemon, part: Part, offset: int, data: bytes) -> None:
    with (world.root / part.file).open("r+b") as file:
        os.pwrite(file.fileno(), data, part.offset + offset)


def _flip(offset: int) -> Callable[[DiskDaemon, Place], None]:
    def flip(world: DiskDaemon, place: Place) -> None:
        (found,) = _read(world, place.parts[0], offset, 1)
        _write(world, place.parts[0], offset, bytes([found ^ 0x04]))

    return flip


def _zero(start: int, length: int) -> Callable[[DiskDaemon, Place], None]:
    return lambda world, place: _write(world, place.parts[0], start, bytes(length))


def _header(change: Callable[[ObjectHeader], ObjectHeader]) -> Callable[[DiskDaemon, Place], None]:
    """Another header, with a checksum that holds."""

    def rewrite(world: DiskDaemon, place: Place) -> None:
        header = ObjectHeader.unpack(_read(world, place.parts[0], 0, HEADER_BYTES))
        _write(world, place.parts[0], 0, change(header).pack())

    return rewrite


def _named(header: ObjectHeader, **other: Any) -> ObjectHeader:
    return replace(header, name=replace(header.name, **other))


def _version(world: DiskDaemon, place: Place) -> None:
    """A header of a version to come that this one cannot read."""
    page = bytearray(_read(world, place.parts[0], 0, HEADER_BYTES))
    page[8:16] = (FORMAT_VERSION + 1).to_bytes(4, "little") * 2
    _write(world, place.parts[0], 0, _summed(page))


def _codec(world: DiskDaemon, place: Place) -> None:
    page = bytearray(_read(world, place.parts[0], 0, HEADER_BYTES))
    page[73] = 77
    _write(world, place.parts[0], 0, _summed(page))


def _summed(page: bytearray) -> bytes:
    page[16:24] = xxhash.xxh3_64_intdigest(bytes(page[:16] + page[24:])).to_bytes(8, "little")
    return bytes(page)


def _exchange_payload(world: DiskDaemon, place: Place) -> None:
    """The pages of the payload in another order."""
    first, second = (_read(world, place.parts[0], at, PAGE) for at in (HEADER_BYTES, HEADER_BYTES + PAGE))
    _write(world, place.parts[0], HEADER_BYTES, second + first)


DAMAGES: dict[str, tuple[str, Callable[[DiskDaemon, Place], None]]] = {
    "bit flipped in the header": ("header", _flip(60)),
    "bit flipped in the header's zeros": ("header", _flip(3000)),
    "bit flipped in the magic": ("magic", _flip(2)),
    "bit flipped in the payload": ("corrupt", _flip(HEADER_BYTES + 100_001)),
    "bit flipped in its last byte": ("corrupt", _flip(HEADER_BYTES + 199_999)),
    "header zeroed": ("magic", _zero(0, HEADER_BYTES)),
    "payload zeroed": ("corrupt", _zero(HEADER_BYTES, 200_000)),
    "a page of the payload zeroed": ("corrupt", _zero(HEADER_BYTES + 5 * PAGE, PAGE)),
    "pages exchanged": ("corrupt", _exchange_payload),
    "foreign namespace": ("identity", _header(lambda h: _named(h, namespace=b"another-namespac"))),
    "foreign key": ("identity", _header(lambda h: _named(h, key=b"another-chunk-ke"))),
    "an earlier write": ("identity", _header(lambda h: replace(h, sequence=h.sequence - 1))),
    "another length": ("length", _header(lambda h: replace(_named(h, raw_bytes=PAGE), stored_bytes=PAGE))),
    "unknown codec": ("codec", _codec),
    "another version": ("version", _version),
}  # fmt: skip


@pytest.mark.requirement("P6")
def test_every_kind_of_damage_is_a_miss_with_its_reason_and_quarantined(world: DiskDaemon) -> None:
    places = _stopped_without_arena(world)
    world.start()  # opened, all of it is on the medium for certain: a stop has only some seconds to see to that
    assert world.daemon.stop() == 0
    damaged = dict(zip(DAMAGES, (place for place in places if len(place.parts) == 1), strict=False))
    assert damaged.keys() == DAMAGES.keys()
    for name, place in damaged.items():
        DAMAGES[name][1](world, place)
    world.start()
    with _engine(world) as engine:
        for name, place in damaged.items():
            reason = DAMAGES[name][0]
            counter = f"tier_damaged_objects.{TIER}/{reason}"
            before = world.counter(counter)
            assert engine.locate([place.known.key]) == CHUNK_TOKENS
            assert engine.get([place.known]) is MISSING, name
            assert world.counter(counter) == before + 1, name
            assert engine.locate([place.known.key]) == 0, "a miss from now on"
        for place in places:
            assert place in damaged.values() or engine.get([place.known]) is GRANTED
        _check_quarantine(world, {damaged[name].sequence: DAMAGES[name][0] for name in damaged})
        for place in damaged.values():  # and it can be stored again
            assert engine.put([place.known]) == 1
            assert engine.get([place.known]) is GRANTED
    assert world.tier().state == "ready"
    world.wait_written()
    assert world.daemon.stop() == 0
    assert world.fsck().whole


def _check_quarantine(world: DiskDaemon, expected: dict[int, str]) -> None:
    folder = world.root / "quarantine"

    def kept() -> dict[int, str]:
        parts = [path.stem.split("-") for path in folder.glob("*.kvd")]
        return {int(sequence, 16): reason for _, sequence, reason in parts}

    wait_until(lambda: kept() == expected, f"{kept()} is {expected}")
    assert world.tier().quarantined_bytes > 0


@pytest.mark.requirement("P6")
def test_what_a_power_loss_explains_is_torn_not_corrupt(world: DiskDaemon) -> None:
    """After a crash nobody has said that the bytes were on the medium."""
    objects = _fill(world)
    world.daemon.kill()
    world.drop_arena()
    place = _places(world, objects)[3]
    _flip(HEADER_BYTES + 77)(world, place)
    world.start()
    with _engine(world) as engine:
        assert engine.get([place.known]) is MISSING
        assert world.counter(f"tier_damaged_objects.{TIER}/torn") == 1
        assert [engine.get([known]) for known in objects].count(GRANTED) == OBJECTS - 1


@pytest.mark.requirement("P6")
def test_a_segment_truncated_while_it_serves(world: DiskDaemon) -> None:
    places = _stopped_without_arena(world)
    world.start()
    victim = places[5]
    cut = victim.parts[0]
    with (world.root / cut.file).open("r+b") as file:
        file.truncate(cut.offset + PAGE)
    gone = {place.known for place in places if _lies_behind(place, cut)}
    assert victim.known in gone
    with _engine(world) as engine:
        outcomes = {place.known: engine.get([place.known]) for place in places}
        assert {known for known, outcome in outcomes.items() if outcome is not GRANTED} == gone
        assert world.counter(f"tier_damaged_objects.{TIER}/too_short") == len(gone)


def _lies_behind(place: Place, cut: Part) -> bool:
    return any(part.file == cut.file and part.offset + part.length > cut.offset + PAGE for part in place.parts)


@pytest.mark.requirement("P6")
def test_a_segment_deleted_between_lookup_and_load(world: DiskDaemon) -> None:
    """Its objects are misses, the others are served again once the index was read anew, and it can be written to."""
    places = _stopped_without_arena(world)
    world.start()
    with _engine(world) as engine:
        victim = places[4]
        assert engine.locate([victim.known.key]) == CHUNK_TOKENS
        (world.root / victim.parts[0].file).unlink()
        assert engine.get([victim.known]) is MISSING
        assert world.counter(f"tier_reads.{TIER}/gone") == 1
        world.wait_state("ready")
        gone = {place.known for place in places if victim.parts[0].file in place.segments}
        served = {place.known for place in places if engine.get([place.known]) is GRANTED}
        assert served == {place.known for place in places} - gone
        assert engine.put([victim.known]) == 1
        wait_until(lambda: world.tier().objects == len(served) + 1, "it is written")


@pytest.mark.requirement("P6")
@pytest.mark.parametrize("damage", ["truncated", "deleted", "empty"])
def test_a_segment_damaged_while_no_daemon_ran(world: DiskDaemon, damage: str) -> None:
    places = _stopped_without_arena(world)
    victim = places[5].parts[0]
    path: Path = world.root / victim.file
    if damage == "deleted":
        path.unlink()
    else:
        os.truncate(path, victim.offset + PAGE if damage == "truncated" else 0)
    cut = replace(victim, offset=0 if damage != "truncated" else victim.offset)
    gone = {place.known for place in places if _lies_behind(place, cut)}
    world.start()
    with _engine(world) as engine:
        for place in places:
            assert engine.get([place.known]) is (MISSING if place.known in gone else GRANTED)
        for known in gone:
            assert engine.put([known]) == 1
    assert f"{len(gone)} objects lie outside" in world.daemon.log


@pytest.mark.requirement("P6")
def test_an_index_that_cannot_be_read_is_an_empty_tier_and_said_so(world: DiskDaemon) -> None:
    places = _stopped_without_arena(world)
    for folder in ("journal", "snapshots"):
        for path in (world.root / folder).iterdir():
            path.write_bytes(b"\xff" * 100)
    world.start()
    assert world.tier().objects == 0
    assert "no snapshot counts" in world.daemon.log
    with _engine(world) as engine:
        assert {engine.get([place.known]) for place in places} == {MISSING}
        assert engine.put([places[0].known]) == 1
        wait_until(lambda: world.tier().objects == 1, "it is written")


@pytest.mark.requirement("P6")
def test_the_first_segment_has_the_first_objects(world: DiskDaemon) -> None:
    """What the tests above rely on: several objects share a segment, and several segments are in use."""
    places = _stopped_without_arena(world)
    segments = [segment for place in places for segment in place.segments]
    assert segment_name(0) in segments
    assert 1 < len(set(segments)) < len(places)
