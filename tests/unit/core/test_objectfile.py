"""The on-medium format: the page docs/formats/object.md, golden files, and every kind of damaged header (P6)."""

from __future__ import annotations

import re
import struct
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from kvdepot.core.limits import OBJECT_BYTES_MAX
from kvdepot.core.object_keys import NO_KEYS, key_id
from kvdepot.core.objectfile import (
    FORMAT_VERSION,
    HEADER_BYTES,
    MAGIC,
    PLAIN_VERSION,
    Codec,
    Damage,
    ObjectDamageError,
    ObjectHeader,
    ObjectName,
    authenticated,
    fields_as_found,
    object_bytes,
    payload_sum,
    worth_bytes_max,
)
from kvdepot.server.io.codecs import decode
from kvdepot.server.io.macs import mac_of
from kvdepot.server.storage.base import DAMAGED, IoOutcome

from tests.rigs.golden_objects import FILES, KEYED_FILES, KEYS, golden_name, golden_object, golden_payload

PAGE = (Path(__file__).resolve().parents[3] / "docs/formats/object.md").read_text()
SUM_AT = 16
KIND_AT, CODEC_AT, RAW_AT, STORED_AT = 72, 73, 96, 104

ids = st.binary(min_size=16, max_size=16)
u64 = st.integers(0, (1 << 64) - 1)
u128 = st.integers(0, (1 << 128) - 1)
names = st.builds(
    ObjectName, ids, ids, ids, st.integers(0, 255), st.integers(0, (1 << 32) - 1), st.integers(1, OBJECT_BYTES_MAX)
)


@st.composite
def headers(draw: st.DrawFn) -> ObjectHeader:
    name = draw(names)
    codec = draw(st.sampled_from(Codec)) if worth_bytes_max(name.raw_bytes) else Codec.NONE
    stored = name.raw_bytes if codec is Codec.NONE else draw(st.integers(1, worth_bytes_max(name.raw_bytes)))
    key_id, mac = draw(st.binary(min_size=8, max_size=8)), draw(st.binary(min_size=32, max_size=32))
    return ObjectHeader(name, codec, stored, draw(u128), draw(u128), draw(u64), draw(u64), draw(ids), key_id, mac)


NAME = ObjectName(b"n" * 16, b"k" * 16, b"p" * 16, 1, 512, 100_000)
HEADER = ObjectHeader(NAME, Codec.LZ4, 50_000, 1 << 100, 2 << 100, 7, 1_795_000_000)
KEYED = replace(HEADER, key_id=b"key id..", mac=bytes(range(32)))


def damage_of(page: bytes) -> Damage:
    with pytest.raises(ObjectDamageError) as refused:
        ObjectHeader.unpack(page)
    return refused.value.damage


def summed(page: bytes) -> bytes:
    """The page with a header checksum that holds."""
    total = xxhash.xxh3_64_intdigest(page[:SUM_AT] + page[SUM_AT + 8 :])
    return page[:SUM_AT] + struct.pack("<Q", total) + page[SUM_AT + 8 :]


def patched(offset: int, form: str, value: object) -> bytes:
    page = bytearray(HEADER.pack())
    struct.pack_into("<" + form, page, offset, value)
    return summed(bytes(page))


def documented() -> list[tuple[int, int, str]]:
    table = PAGE.split("## Header\n")[1].split("\n## ")[0]
    return [(int(at), int(size), text) for at, size, text in re.findall(r"^\| (\d+) \| (\d+) \| (.+) \|$", table, re.M)]


@given(headers())
def test_a_header_says_what_was_packed(header: ObjectHeader) -> None:
    page = header.pack()
    assert len(page) == HEADER_BYTES
    assert ObjectHeader.unpack(page) == header
    assert ObjectHeader.unpack(memoryview(page)) == header


def test_the_page_describes_the_header() -> None:
    rows = documented()
    assert [at + size for at, size, _ in rows] == [at for at, _, _ in rows[1:]] + [HEADER_BYTES]
    page = KEYED.pack()
    said = {text.split(",")[0].split(":")[0]: page[at : at + size] for at, size, text in rows}
    number = {text: int.from_bytes(value, "little") for text, value in said.items()}
    assert said["magic"] == MAGIC
    assert (number["format version"], number["compatible since"]) == (FORMAT_VERSION, 1)
    assert (said["namespace id"], said["chunk key"]) == (NAME.namespace, NAME.key)
    assert said["chunk key of the parent chunk"] == NAME.parent
    assert (number["kind"], number["codec"], number["boundary"]) == (NAME.kind, Codec.LZ4, NAME.boundary_tokens)
    assert (number["sequence"], number["creation time"]) == (HEADER.sequence, HEADER.created_at)
    assert (number["raw length"], number["stored length"]) == (NAME.raw_bytes, HEADER.stored_bytes)
    assert (number["raw sum"], number["stored sum"]) == (HEADER.raw_sum, HEADER.stored_sum)
    assert (said["key id"], said["MAC"]) == (KEYED.key_id, KEYED.mac)
    assert not any(page[at : at + size] != bytes(size) for at, size, text in rows if text == "zeros")


def test_the_page_names_every_outcome_and_codec() -> None:
    reading = PAGE.split("## Reading\n")[1].split("\n## ")[0]
    assert set(re.findall(r"\| `(\w+)` \|$", reading, re.M)) == {str(damage) for damage in Damage}
    for codec in Codec:
        assert f"{int(codec)} {codec.name.lower().replace('_', '-')}" in PAGE


def test_a_header_without_a_key_is_one_of_version_1() -> None:
    assert int.from_bytes(HEADER.pack()[8:12], "little") == PLAIN_VERSION
    assert int.from_bytes(KEYED.pack()[8:12], "little") == FORMAT_VERSION
    assert not any(HEADER.pack()[160:])


@given(headers())
def test_a_mac_covers_the_whole_page_but_itself_and_the_checksum(header: ObjectHeader) -> None:
    page = header.pack()
    covered = authenticated(page)
    assert covered == page[:16] + bytes(8) + page[24:168] + bytes(32) + page[200:]
    assert covered == authenticated(memoryview(replace(header, mac=bytes(32)).pack()))


def test_every_damage_is_an_outcome_of_the_tiers() -> None:
    assert frozenset(map(IoOutcome, Damage)) | {IoOutcome.TORN, IoOutcome.BAD_PLACE} == DAMAGED


@pytest.mark.requirement("P6")
def test_no_flipped_bit_of_a_header_passes() -> None:
    page = bytearray(HEADER.pack())
    seen = set()
    for bit in range(8 * HEADER_BYTES):
        page[bit >> 3] ^= 1 << (bit & 7)
        seen.add(damage_of(bytes(page)))
        page[bit >> 3] ^= 1 << (bit & 7)
    assert seen == {Damage.MAGIC, Damage.VERSION, Damage.HEADER}


@pytest.mark.requirement("P6")
@given(st.integers(0, HEADER_BYTES - 1))
def test_a_cut_header_is_too_short(length: int) -> None:
    assert damage_of(HEADER.pack()[:length]) is Damage.TOO_SHORT


@given(st.binary(max_size=2 * HEADER_BYTES) | st.binary(max_size=4096).map(lambda tail: (MAGIC + tail).ljust(4096)))
def test_any_bytes_are_refused_by_name(page: bytes) -> None:
    assert damage_of(page) in Damage


@given(st.binary(max_size=160), st.integers(8, 200))
def test_any_fields_behind_a_good_checksum_are_refused_or_within_limits(noise: bytes, at: int) -> None:
    page = bytearray(HEADER.pack())
    page[at : at + len(noise)] = noise
    try:
        header = ObjectHeader.unpack(summed(bytes(page)))
    except ObjectDamageError as refused:
        assert refused.damage in Damage
    else:
        assert 0 < header.stored_bytes <= header.name.raw_bytes <= OBJECT_BYTES_MAX


@pytest.mark.requirement("P6")
def test_another_versions_header() -> None:
    assert damage_of(patched(12, "I", FORMAT_VERSION + 1)) is Damage.VERSION
    assert damage_of(patched(8, "I", 0)) is Damage.VERSION
    # Readable since this version: its new fields lie where this one has zeros.
    assert ObjectHeader.unpack(summed(patched(8, "I", 9)[:200] + b"new" + bytes(3893))) == HEADER


def test_a_later_versions_other_checksum_is_a_version_not_a_broken_header() -> None:
    page = bytearray(patched(12, "I", FORMAT_VERSION + 1))
    page[SUM_AT] ^= 1
    assert damage_of(bytes(page)) is Damage.VERSION


@pytest.mark.requirement("P6")
@pytest.mark.parametrize(
    ("offset", "form", "value", "damage"),
    [
        (CODEC_AT, "B", 3, Damage.CODEC),
        (RAW_AT, "Q", 0, Damage.LENGTH),
        (RAW_AT, "Q", OBJECT_BYTES_MAX + 1, Damage.LENGTH),
        (RAW_AT, "Q", (1 << 64) - 1, Damage.LENGTH),
        (STORED_AT, "Q", 0, Damage.LENGTH),
        (STORED_AT, "Q", NAME.raw_bytes, Damage.LENGTH),  # a codec that saves nothing is not used
        (STORED_AT, "Q", (1 << 64) - 1, Damage.LENGTH),
        (CODEC_AT, "B", 0, Damage.LENGTH),  # not coded, but shorter
    ],
)
def test_hostile_lengths(offset: int, form: str, value: int, damage: Damage) -> None:
    assert damage_of(patched(offset, form, value)) is damage


@pytest.mark.requirement("P6")
@pytest.mark.parametrize("field", [field.name for field in fields(ObjectName)])
def test_a_foreign_object_is_not_the_one_asked_for(field: str) -> None:
    HEADER.check(NAME)
    value = getattr(NAME, field)
    other = value + 1 if isinstance(value, int) else b"x" + value[1:]
    changed: dict[str, Any] = {field: other}
    with pytest.raises(ObjectDamageError) as refused:
        HEADER.check(replace(NAME, **changed))
    assert refused.value.damage is (Damage.LENGTH if field == "raw_bytes" else Damage.IDENTITY)


@pytest.mark.requirement("P6")
def test_an_earlier_occupant_is_not_the_one_asked_for() -> None:
    HEADER.check(NAME, HEADER.sequence)
    with pytest.raises(ObjectDamageError, match="sequence is 7, not 8") as refused:
        HEADER.check(NAME, HEADER.sequence + 1)
    assert refused.value.damage is Damage.IDENTITY


@pytest.mark.requirement("P6")
def test_a_cut_payload_is_too_short() -> None:
    HEADER.check_room(HEADER.stored_bytes)
    with pytest.raises(ObjectDamageError) as refused:
        HEADER.check_room(HEADER.stored_bytes - 1)
    assert refused.value.damage is Damage.TOO_SHORT


@given(headers())
def test_a_header_that_is_not_believed_is_still_shown(header: ObjectHeader) -> None:
    page = bytearray(header.pack())
    page[SUM_AT] ^= 1
    found = fields_as_found(bytes(page))
    assert (found["sequence"], found["raw_bytes"]) == (header.sequence, header.name.raw_bytes)
    assert (found["key"], found["stored_sum"]) == (header.name.key.hex(), f"{header.stored_sum:032x}")
    assert fields_as_found(bytes(page[:159])) == {}


@given(st.lists(st.binary(max_size=100), max_size=5))
def test_a_payloads_sum_does_not_depend_on_its_parts(parts: list[bytes]) -> None:
    assert payload_sum(parts) == xxhash.xxh3_128_intdigest(b"".join(parts))


def test_a_payload_longer_than_a_slice_has_one_sum() -> None:
    payload = bytes(range(251)) * 20_000
    assert payload_sum([payload]) == xxhash.xxh3_128_intdigest(payload)


@given(st.integers(1, OBJECT_BYTES_MAX))
def test_a_codec_is_used_only_where_it_saves_a_page(raw_bytes: int) -> None:
    worth = worth_bytes_max(raw_bytes)
    assert worth == 0 or object_bytes(worth) < object_bytes(raw_bytes)


@pytest.mark.parametrize("codec", Codec)
@pytest.mark.parametrize("version", [1, 2])
def test_golden_files_are_read(codec: Codec, version: int) -> None:
    keys = KEYS if version == 2 else NO_KEYS
    data = (KEYED_FILES if keys else FILES)[codec].read_bytes()
    header = ObjectHeader.unpack(data[:HEADER_BYTES])
    header.check(golden_name(codec), 0x0102030405060708)
    header.check_room(len(data) - HEADER_BYTES)
    stored = data[HEADER_BYTES : HEADER_BYTES + header.stored_bytes]
    assert header.codec is codec
    assert len(data) == object_bytes(header.stored_bytes)
    mac = mac_of(header, data[:HEADER_BYTES], keys)
    assert payload_sum([stored] if mac is None else mac.over([memoryview(stored)])) == header.stored_sum
    if mac is not None:
        mac.check(header)
        assert header.key_id == key_id(keys.keys[0])
    raw = bytearray(stored if codec is Codec.NONE else header.name.raw_bytes)
    if codec is not Codec.NONE:
        assert decode(codec, memoryview(stored), [memoryview(raw)]) is IoOutcome.OK
    assert raw == golden_payload(codec)
    assert payload_sum([raw]) == header.raw_sum


@pytest.mark.parametrize("codec", Codec)
def test_the_writer_of_today_writes_the_golden_bytes(codec: Codec) -> None:
    # What the codecs' libraries emit may change with their version and still be the same version: then the file stays,
    # is read by the test above, and this one goes for that codec.
    assert golden_object(codec) == FILES[codec].read_bytes()
    assert golden_object(codec, KEYS) == KEYED_FILES[codec].read_bytes()
