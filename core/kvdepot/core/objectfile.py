"""The format of an object on a device: its header, and what a reader checks (docs/formats/object.md).

A segment of a disk tier and a file of a shared tier have the same format. Pure: this module reads no device, and no
input makes it allocate more than a header.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Annotated, Final

import xxhash
from kvdepot.core.bounds import AtMost, Between, ChunkKey, NamespaceId
from kvdepot.core.limits import OBJECT_BYTES_MAX
from kvdepot.core.object_keys import NO_KEY_ID

MAGIC: Final = b"KVDOBJCT"
PLAIN_VERSION: Final = 1
"""Of an object without a MAC, as before there were any."""
FORMAT_VERSION: Final = 2
COMPATIBLE_SINCE: Final = 1
READABLE_SINCE: Final = 1
"""Oldest format version that this code reads."""
HEADER_BYTES: Final = 4096
PAGE_BYTES: Final = 4096
NOT_STATED: Final = bytes(16)
"""A part table digest that nobody took."""
MAC_BYTES: Final = 32
NO_MAC: Final = bytes(MAC_BYTES)

_PREFIX = struct.Struct("<8sII")  # magic, version, compatible since; then the sum
_SUM = struct.Struct("<Q")
_BODY = struct.Struct("<16s16s16sBBHIQQQQ16s16s16s8s32s")
_FIELDS = (
    "namespace", "key", "parent", "kind", "codec", "zeros", "boundary_tokens", "sequence", "created_at", "raw_bytes",
    "stored_bytes", "raw_sum", "stored_sum", "parts_digest", "key_id", "mac",
)  # fmt: skip
_BODY_AT = _PREFIX.size + _SUM.size
_MAC_END = _BODY_AT + _BODY.size
_MAC_AT = _MAC_END - MAC_BYTES
_REST = bytes(HEADER_BYTES - _MAC_END)
_SLICE_BYTES = 4 << 20
"""XXH3 runs without the GIL, but a signal is only handled between slices."""


class Codec(IntEnum):
    """How a payload is stored; the number is in every header."""

    NONE = 0
    LZ4 = 1
    BITSHUFFLE_LZ4 = 2


class Damage(StrEnum):
    """What is wrong with an object; distinct, because each has another cause and its own counter."""

    TOO_SHORT = "too_short"  # the device ends before the object does
    MAGIC = "magic"
    VERSION = "version"
    HEADER = "header"  # the header's own checksum
    IDENTITY = "identity"  # a whole object, but another one
    LENGTH = "length"  # raw length is not what the namespace says, or the lengths contradict each other
    CODEC = "codec"  # unknown, or it refuses bytes whose sum held
    CORRUPT = "corrupt"  # the payload's checksum
    # Of keys (ADR 68). The last two prove nothing against the file: who asks may have other keys than its writer.
    FORGED = "forged"  # checksums hold, and the MAC does not
    UNKEYED = "unkeyed"  # no MAC, and the tier has a key
    UNKNOWN_KEY = "unknown_key"  # a MAC of a key that the reader does not have


class ObjectDamageError(ValueError):
    """The bytes are not the object they should be. `damage` is the counter's label, the message names the field."""

    def __init__(self, damage: Damage, detail: str) -> None:
        super().__init__(detail)
        self.damage = damage


@dataclass(frozen=True, slots=True)
class ObjectName:
    """Identity of an object wherever it lies; also what its header on a device must say."""

    namespace: NamespaceId
    key: ChunkKey
    parent: ChunkKey  # zeros for a first chunk
    kind: Annotated[int, AtMost(0xFF)]  # a `kvdepot.core.calls.Kind`
    boundary_tokens: Annotated[int, AtMost(0xFFFF_FFFF)]
    raw_bytes: Annotated[int, Between(1, OBJECT_BYTES_MAX)]  # of the payload in RAM


@dataclass(frozen=True, slots=True)
class ObjectHeader:
    """All that a header says; sums are XXH3-128 as integers, `created_at` is unix seconds."""

    name: ObjectName
    codec: Codec
    stored_bytes: int
    raw_sum: int
    stored_sum: int
    sequence: int
    created_at: int
    parts_digest: bytes = NOT_STATED
    key_id: bytes = NO_KEY_ID
    mac: bytes = NO_MAC

    @property
    def keyed(self) -> bool:
        """Return whether the object has a MAC."""
        return self.key_id != NO_KEY_ID

    def pack(self) -> bytes:
        """Return the HEADER_BYTES of the header."""
        name = self.name
        prefix = _PREFIX.pack(MAGIC, FORMAT_VERSION if self.keyed else PLAIN_VERSION, COMPATIBLE_SINCE)
        body = _BODY.pack(
            name.namespace, name.key, name.parent, name.kind, self.codec, 0, name.boundary_tokens,
            self.sequence, self.created_at, name.raw_bytes, self.stored_bytes,
            self.raw_sum.to_bytes(16, "little"), self.stored_sum.to_bytes(16, "little"), self.parts_digest,
            self.key_id, self.mac,
        ) + _REST  # fmt: skip
        return prefix + _SUM.pack(header_sum(prefix, body)) + body

    @staticmethod
    def unpack(page: bytes | memoryview) -> ObjectHeader:
        """Return the header of a page, after checks 1 to 6, which need the header alone. Raise ObjectDamageError."""
        if len(page) < HEADER_BYTES:
            raise ObjectDamageError(Damage.TOO_SHORT, f"header: {len(page)} of {HEADER_BYTES} bytes")
        prefix, body = bytes(page[: _PREFIX.size]), page[_BODY_AT:HEADER_BYTES]
        magic, version, compatible = _PREFIX.unpack(prefix)
        if magic != MAGIC:
            raise ObjectDamageError(Damage.MAGIC, f"header: magic is {magic!r}")
        if compatible > FORMAT_VERSION or version < READABLE_SINCE:
            raise ObjectDamageError(
                Damage.VERSION, f"header: format {version}, readable since {compatible}; this is {FORMAT_VERSION}"
            )
        if _SUM.unpack(page[_PREFIX.size : _BODY_AT])[0] != header_sum(prefix, body):
            raise ObjectDamageError(Damage.HEADER, "header: checksum does not match")
        return _parsed(body)

    def check(self, expected: ObjectName, sequence: int = 0) -> None:
        """Check that the header is that of the requested object (checks 7 and 8).

        `sequence` 0: any. Raise ObjectDamageError.
        """
        name = self.name
        for field, found, wanted in (
            ("namespace", name.namespace, expected.namespace),
            ("chunk key", name.key, expected.key),
            ("parent", name.parent, expected.parent),
            ("kind", name.kind, expected.kind),
            ("boundary", name.boundary_tokens, expected.boundary_tokens),
            ("sequence", self.sequence, sequence or self.sequence),
        ):
            if found != wanted:
                raise ObjectDamageError(Damage.IDENTITY, f"{field} is {_shown(found)}, not {_shown(wanted)}")
        if name.raw_bytes != expected.raw_bytes:
            raise ObjectDamageError(Damage.LENGTH, f"raw length is {name.raw_bytes}, not {expected.raw_bytes}")

    def check_room(self, payload_bytes: int) -> None:
        """Check 11: `payload_bytes` lie after the header. Raises ObjectDamageError."""
        if self.stored_bytes > payload_bytes:
            raise ObjectDamageError(Damage.TOO_SHORT, f"payload: {payload_bytes} of {self.stored_bytes} bytes")


def fields_as_found(page: bytes | memoryview) -> dict[str, int | str]:
    """Return the fields of a damaged header as text, ids and checksums in hexadecimal; empty if it is cut short."""
    if len(page) < _BODY_AT + _BODY.size:
        return {}
    magic, version, compatible = _PREFIX.unpack(page[: _PREFIX.size])
    values = _BODY.unpack(page[_BODY_AT : _BODY_AT + _BODY.size])
    found = {
        "magic": magic,
        "version": version,
        "compatible_since": compatible,
        **dict(zip(_FIELDS, values, strict=True)),
    }
    for total in ("raw_sum", "stored_sum"):
        found[total] = found[total][::-1]  # as xxhsum prints it
    del found["zeros"]
    return {name: value.hex() if isinstance(value, bytes) else value for name, value in found.items()}


def authenticated(page: bytes | memoryview) -> bytes:
    """Return what a MAC covers of a header's page: all of it, with zeros for the checksum and the MAC itself."""
    return b"".join(
        (page[: _PREFIX.size], bytes(_SUM.size), page[_BODY_AT:_MAC_AT], NO_MAC, page[_MAC_END:HEADER_BYTES])
    )


def object_bytes(stored_bytes: int) -> int:
    """Return the bytes of an object on a device: header, payload, padding."""
    return HEADER_BYTES + -(-stored_bytes // PAGE_BYTES) * PAGE_BYTES


def worth_bytes_max(raw_bytes: int) -> int:
    """Return the longest stored payload for which a codec is used; 0: none."""
    return max(raw_bytes - PAGE_BYTES, 0)


def payload_sum(parts: Iterable[bytes | bytearray | memoryview]) -> int:
    """Return the XXH3-128 of a payload's parts in order."""
    state = xxhash.xxh3_128()
    for piece in sliced(parts):
        state.update(piece)
    return state.intdigest()


def sliced(parts: Iterable[bytes | bytearray | memoryview]) -> Iterator[memoryview]:
    """Yield the bytes of the parts in pieces between which a signal can be handled."""
    for part in parts:
        view = memoryview(part)
        for start in range(0, len(view), _SLICE_BYTES):
            yield view[start : start + _SLICE_BYTES]


def header_sum(prefix: bytes, body: bytes | memoryview) -> int:
    """Return the XXH3-64 of a page without the eight bytes of the checksum itself."""
    state = xxhash.xxh3_64(prefix)
    state.update(body)
    return state.intdigest()


def _parsed(body: bytes | memoryview) -> ObjectHeader:
    """Return the header of a page whose checksum holds."""
    (
        namespace, key, parent, kind, codec, _, boundary, sequence, created_at, raw_bytes, stored_bytes,
        raw_sum, stored_sum, digest, key_id, mac,
    ) = _BODY.unpack(body[: _BODY.size])  # fmt: skip
    if codec not in Codec.__members__.values():
        raise ObjectDamageError(Damage.CODEC, f"header: codec {codec} is unknown")
    header = ObjectHeader(
        ObjectName(namespace, key, parent, kind, boundary, raw_bytes),
        Codec(codec), stored_bytes, int.from_bytes(raw_sum, "little"), int.from_bytes(stored_sum, "little"),
        sequence, created_at, digest, key_id, mac,
    )  # fmt: skip
    if not 0 < raw_bytes <= OBJECT_BYTES_MAX:
        raise ObjectDamageError(Damage.LENGTH, f"header: raw length is {raw_bytes}")
    exact = header.codec is Codec.NONE
    if stored_bytes != raw_bytes if exact else not 0 < stored_bytes <= worth_bytes_max(raw_bytes):
        raise ObjectDamageError(Damage.LENGTH, f"header: {stored_bytes} bytes stored of {raw_bytes} with codec {codec}")
    return header


def _shown(value: bytes | int) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)
