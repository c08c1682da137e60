"""How the disk tier's journal and snapshots are packed: docs/formats/disk.md. Pure: bytes in, values out.

Whatever is unpacked here may be damaged or hostile: every field is checked, and nothing is
allocated by a length that was not compared with the bytes at hand.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from typing import Final

import xxhash
from kvdepot.core.allocator import GRANULE_BYTES, Extent
from kvdepot.core.limits import OBJECT_BYTES_MAX
from kvdepot.core.objectfile import ObjectName, object_bytes

FORMAT_VERSION: Final = 1
COMPATIBLE_SINCE: Final = 1
STORE_ID_BYTES: Final = 16
FRAGMENTS_MAX: Final = 1024
SEQUENCE_BITS: Final = 40
"""Below the generation that an opening took: writes of one opening."""
GENERATION_MAX: Final = (1 << 64 - SEQUENCE_BITS) - 1
ADDRESS_MAX: Final = 1 << 56
KINDS: Final = (1, 2, 3)

_MASK64 = (1 << 64) - 1
_PREFIX = struct.Struct("<IBBHQQ")
_PUT = struct.Struct("<16s16s16sBBHIQQQQQQQ")
_FRAGMENT = struct.Struct("<QQ")
_SUM = struct.Struct("<Q")
_JOURNAL = struct.Struct("<8sII16sQ16x")
_SNAPSHOT = struct.Struct("<8sII16sQQQQQQQQQQ8x")
_JOURNAL_MAGIC = b"KVDJOURN"
_SNAPSHOT_MAGIC = b"KVDSNAPS"
_PUT_BYTES = _PREFIX.size + _PUT.size

MARK_BYTES: Final = _PREFIX.size + _SUM.size
"""A record without an object: KILL, SCRUB, CLOSE."""
JOURNAL_HEADER_BYTES: Final = _JOURNAL.size + _SUM.size
SNAPSHOT_HEADER_BYTES: Final = _SNAPSHOT.size + _SUM.size
RECORD_BYTES_MAX: Final = _PUT_BYTES + FRAGMENTS_MAX * _FRAGMENT.size + _SUM.size


class RecordType(IntEnum):
    """The types of a journal's records."""

    PUT = 1
    KILL = 2
    SCRUB = 3
    CLOSE = 4


UNPROVEN: Final = 1
"""Flag of a PUT: not known to have been synced before a power loss."""
SYNCED: Final = 1
"""Flag of a CLOSE: every object was on the device before it."""


class BadRecord(ValueError):  # noqa: N818 - says what it found
    """The bytes are no record of this journal. The message says which field."""


class BadFile(ValueError):  # noqa: N818 - says what it found
    """The bytes are no journal or no complete snapshot of this store. The message says which field."""


@dataclass(frozen=True, slots=True)
class Put:
    """One object on the device."""

    name: ObjectName
    sequence: int
    generation: int
    codec: int
    stored_bytes: int
    stored_sum: int
    raw_sum: int
    created_at: int  # unix seconds
    fragments: tuple[Extent, ...]
    unproven: bool = False

    @property
    def medium_bytes(self) -> int:
        return object_bytes(self.stored_bytes)


@dataclass(frozen=True, slots=True)
class Mark:
    """A record without an object."""

    type: RecordType
    sequence: int
    generation: int
    flags: int = 0


@dataclass(frozen=True, slots=True)
class SnapshotHeader:
    """The fields of a snapshot's header."""

    store_id: bytes
    generation: int
    synced_sequence: int
    highest_sequence: int
    scrub_position: int
    day: int
    day_bytes: int
    records: int
    body_bytes: int
    body_sum: int


def record_bytes(fragments: int) -> int:
    """Return the length of a PUT."""
    return _PUT_BYTES + fragments * _FRAGMENT.size + _SUM.size


def pack_put(put: Put) -> bytes:
    name = put.name
    prefix = _PREFIX.pack(
        record_bytes(len(put.fragments)), RecordType.PUT, UNPROVEN if put.unproven else 0, len(put.fragments),
        put.sequence, put.generation,
    )  # fmt: skip
    body = _PUT.pack(
        name.namespace, name.key, name.parent, name.kind, put.codec, 0, name.boundary_tokens, name.raw_bytes,
        put.stored_bytes, put.stored_sum & _MASK64, put.stored_sum >> 64, put.raw_sum & _MASK64, put.raw_sum >> 64,
        put.created_at,
    )  # fmt: skip
    return _summed(prefix + body + b"".join(_FRAGMENT.pack(*fragment) for fragment in put.fragments))


def pack_mark(mark: Mark) -> bytes:
    return _summed(_PREFIX.pack(MARK_BYTES, mark.type, mark.flags, 0, mark.sequence, mark.generation))


def unpack_record(data: memoryview, at: int) -> tuple[Put | Mark, int]:
    """Return the record at an offset and the offset of the next one. Raise BadRecord."""
    kind, flags, fragments, length, sequence, generation = check_record(data, at)
    end = at + length
    if kind != RecordType.PUT:
        return Mark(RecordType(kind), sequence, generation, flags), end
    return _unpack_put(data, at, flags, fragments, sequence, generation), end


def check_record(data: memoryview, at: int) -> tuple[int, int, int, int, int, int]:
    """Return (type, flags, fragments, length, sequence, generation) of a record.

    Raise BadRecord if its checksum is wrong.
    """
    if len(data) - at < MARK_BYTES:
        raise BadRecord(f"{len(data) - at} bytes are too short for a record")
    length, kind, flags, fragments, sequence, generation = _PREFIX.unpack_from(data, at)
    if kind == RecordType.PUT:
        fine = 1 <= fragments <= FRAGMENTS_MAX and length == record_bytes(fragments)
    else:
        fine = RecordType.KILL <= kind <= RecordType.CLOSE and not fragments and length == MARK_BYTES
    if not fine:
        raise BadRecord(f"length {length} does not fit a record of type {kind} with {fragments} fragments")
    end = at + length - _SUM.size
    if end + _SUM.size > len(data):
        raise BadRecord(f"a record of {length} bytes is cut at {len(data) - at}")
    if _SUM.unpack_from(data, end)[0] != xxhash.xxh3_64_intdigest(data[at:end]):
        raise BadRecord("the sum does not hold")
    return kind, flags, fragments, length, sequence, generation


def _unpack_put(data: memoryview, at: int, flags: int, fragments: int, sequence: int, generation: int) -> Put:
    (namespace, key, parent, kind, codec, zero, boundary, raw_bytes, stored_bytes,
     stored_low, stored_high, raw_low, raw_high, created_at) = _PUT.unpack_from(data, at + _PREFIX.size)  # fmt: skip
    if kind not in KINDS or zero or not boundary:
        raise BadRecord(f"kind {kind} or boundary {boundary} cannot be")
    if not 0 < stored_bytes <= raw_bytes <= OBJECT_BYTES_MAX:
        raise BadRecord(f"lengths {stored_bytes} stored, {raw_bytes} raw cannot be")
    return Put(
        ObjectName(namespace, key, parent, kind, boundary, raw_bytes),
        sequence, generation, codec, stored_bytes,
        stored_low | stored_high << 64, raw_low | raw_high << 64, created_at,
        _fragments(data, at + _PUT_BYTES, fragments, object_bytes(stored_bytes)),
        bool(flags & UNPROVEN),
    )  # fmt: skip


def _fragments(data: memoryview, at: int, count: int, total_bytes: int) -> tuple[Extent, ...]:
    found = tuple(_FRAGMENT.unpack_from(data, at + index * _FRAGMENT.size) for index in range(count))
    for address, length in found:
        if address % GRANULE_BYTES or length % GRANULE_BYTES or not length or address + length > ADDRESS_MAX:
            raise BadRecord(f"no fragment can have {length} bytes at {address}")
        total_bytes -= length
    if total_bytes:
        raise BadRecord(f"the fragments have {-total_bytes} bytes too many")
    if count > 1:
        ordered = sorted(found)
        if any(low[0] + low[1] > high[0] for low, high in pairwise(ordered)):
            raise BadRecord("the fragments overlap")
    return found


def pack_journal_header(store_id: bytes, generation: int) -> bytes:
    return _summed(_JOURNAL.pack(_JOURNAL_MAGIC, FORMAT_VERSION, COMPATIBLE_SINCE, store_id, generation))


def check_journal_header(data: memoryview, store_id: bytes, generation: int) -> None:
    """Raise BadFile unless these bytes start the journal of that generation."""
    _check_header(data, _JOURNAL_MAGIC, JOURNAL_HEADER_BYTES)
    _, _, _, found_store, found_generation = _JOURNAL.unpack_from(data)
    _check_identity(found_store, found_generation, store_id, generation)


def pack_snapshot_header(header: SnapshotHeader) -> bytes:
    return _summed(
        _SNAPSHOT.pack(
            _SNAPSHOT_MAGIC, FORMAT_VERSION, COMPATIBLE_SINCE, header.store_id, header.generation,
            header.synced_sequence, header.highest_sequence, header.scrub_position, header.day, header.day_bytes,
            header.records, header.body_bytes, header.body_sum & _MASK64, header.body_sum >> 64,
        )
    )  # fmt: skip


def unpack_snapshot_header(data: memoryview, store_id: bytes, generation: int) -> SnapshotHeader:
    """Return a snapshot's header. Raise BadFile unless these bytes are the complete snapshot of that generation."""
    _check_header(data, _SNAPSHOT_MAGIC, SNAPSHOT_HEADER_BYTES)
    (_, _, _, found_store, found_generation, synced, highest, scrub, day, day_bytes, records, body_bytes,
     sum_low, sum_high) = _SNAPSHOT.unpack_from(data)  # fmt: skip
    _check_identity(found_store, found_generation, store_id, generation)
    header = SnapshotHeader(
        found_store, found_generation, synced, highest, scrub, day, day_bytes, records, body_bytes,
        sum_low | sum_high << 64,
    )  # fmt: skip
    body = data[SNAPSHOT_HEADER_BYTES:]
    if len(body) != header.body_bytes:
        raise BadFile(f"{len(body)} bytes of records instead of {header.body_bytes}")
    if xxhash.xxh3_128_intdigest(body) != header.body_sum:
        raise BadFile("the sum of the records does not hold")
    return header


def _check_header(data: memoryview, magic: bytes, length: int) -> None:
    if len(data) < length:
        raise BadFile(f"{len(data)} bytes are too short for a header")
    found, _, since = struct.unpack_from("<8sII", data)
    if found != magic:
        raise BadFile(f"magic {found!r}")
    if since > FORMAT_VERSION:
        raise BadFile(f"needs format version {since}, this is {FORMAT_VERSION}")
    end = length - _SUM.size
    if _SUM.unpack_from(data, end)[0] != xxhash.xxh3_64_intdigest(data[:end]):
        raise BadFile("the header's sum does not hold")


def _check_identity(found_store: bytes, found_generation: int, store_id: bytes, generation: int) -> None:
    if found_store != store_id:
        raise BadFile(f"is of store {found_store.hex()}")
    if found_generation != generation:
        raise BadFile(f"is of generation {found_generation}")


def _summed(data: bytes) -> bytes:
    return data + _SUM.pack(xxhash.xxh3_64_intdigest(data))
