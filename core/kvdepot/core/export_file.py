"""The file that `kvdepotctl export` writes and `import` reads: docs/formats/export.md.

The file is a stream without seeks, so that it can be a pipe. A reader never takes more memory than the largest object
of the namespace that the file names, whatever the file says.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import BinaryIO, Final

import xxhash
from kvdepot.core.errors import InvalidArgument
from kvdepot.core.kinds import Kind
from kvdepot.core.limits import SPEC_BYTES_MAX
from kvdepot.core.objectfile import (
    HEADER_BYTES,
    PAGE_BYTES,
    Codec,
    Damage,
    ObjectDamageError,
    ObjectHeader,
    ObjectName,
    header_sum,
    object_bytes,
    payload_sum,
)

HEAD_MAGIC: Final = b"KVDEXPRT"
END_MAGIC: Final = b"KVDEXEND"
FORMAT_VERSION: Final = 1
COMPATIBLE_SINCE: Final = 1

_READ_BYTES_MAX: Final = 16 << 20
_PREFIX: Final = struct.Struct("<8sII")  # magic, version, compatible since; then the sum
_SUM: Final = struct.Struct("<Q")
_HEAD: Final = struct.Struct("<16sQQ16sQQ")
_END: Final = struct.Struct("<QQQ")
_BODY_AT: Final = _PREFIX.size + _SUM.size


@dataclass(frozen=True, slots=True)
class ExportHead:
    """`spec` is the namespace's, as bytes of the protocol's message `NamespaceSpec`.

    `objects` and `raw_bytes` are what was there when the export began: it may have got less.
    """

    namespace_id: bytes
    spec: bytes
    created_at: int  # unix seconds
    objects: int
    raw_bytes: int


@dataclass(frozen=True, slots=True)
class ExportEnd:
    """How much is in the file, and how many objects were not got. Without it a file was cut short."""

    objects: int
    raw_bytes: int
    left_out: int


@dataclass(frozen=True, slots=True)
class ExportedObject:
    """An object in an export, with its payload."""

    name: ObjectName
    payload: bytes | bytearray | memoryview  # raw


class ExportWriter:
    """Objects have to come with parents before their children, or `import` cannot place them."""

    def __init__(self, file: BinaryIO, head: ExportHead) -> None:
        """Write the head of the file. Raise OSError, as all methods do."""
        self._file = file
        self._created_at = head.created_at
        self.objects = 0
        self.raw_bytes = 0
        body = _HEAD.pack(
            head.namespace_id, head.created_at, len(head.spec), xxhash.xxh3_128_digest(head.spec), head.objects,
            head.raw_bytes,
        )  # fmt: skip
        file.write(_page(HEAD_MAGIC, body))
        file.write(head.spec + bytes(-len(head.spec) % PAGE_BYTES))

    def add(self, one: ExportedObject, raw_sum: int) -> None:
        """Append an object. `raw_sum` is the XXH3-128 of the payload."""
        size_bytes = len(one.payload)
        header = ObjectHeader(one.name, Codec.NONE, size_bytes, raw_sum, raw_sum, 0, self._created_at)
        self._file.write(header.pack())
        self._file.write(one.payload)
        self._file.write(bytes(-size_bytes % PAGE_BYTES))
        self.objects += 1
        self.raw_bytes += size_bytes

    def end(self, left_out: int) -> None:
        self._file.write(_page(END_MAGIC, _END.pack(self.objects, self.raw_bytes, left_out)))


class ExportReader:
    """`end` is known when all objects were read; None: the file is cut short, and `cut_short` may say more.

    A payload that does not have its sum leaves one object out (`damaged`). After a header that does not hold nobody
    can tell where the next one begins, so that ends it.
    """

    def __init__(self, file: BinaryIO) -> None:
        """Read the head. Raise InvalidArgument if the file is no export, or has a later format."""
        self._file = file
        self.head = self._read_head()
        self.end: ExportEnd | None = None
        self.damaged: dict[Damage, int] = {}
        self.cut_short = ""  # why there is no end, or not all that it says
        self._met = 0

    def _read_head(self) -> ExportHead:
        body = _unpage(HEAD_MAGIC, self._read(PAGE_BYTES))
        namespace_id, created_at, spec_bytes, spec_sum, objects, raw_bytes = _HEAD.unpack(body[: _HEAD.size])
        if spec_bytes > SPEC_BYTES_MAX:
            raise InvalidArgument(f"the file's head: a spec of {spec_bytes} bytes")
        spec = self._read(spec_bytes + -spec_bytes % PAGE_BYTES)[:spec_bytes]
        if len(spec) < spec_bytes or xxhash.xxh3_128_digest(spec) != spec_sum:
            raise InvalidArgument("the file's head: the spec of its namespace is damaged or cut short")
        return ExportHead(namespace_id, spec, created_at, objects, raw_bytes)

    def objects(self, object_bytes_of: Mapping[Kind, int]) -> Iterator[ExportedObject]:
        """Yield each whole object whose checksum holds.

        `object_bytes_of` has the size of each kind. A payload of another size is not read into memory.
        """
        while True:
            page = self._read(HEADER_BYTES)
            if not page:
                return
            if page.startswith(END_MAGIC):
                self._take_end(page)
                return
            try:
                header = ObjectHeader.unpack(page)
                size_bytes = self._checked_bytes(header, object_bytes_of)
            except ObjectDamageError as error:
                self.cut_short = f"{error}"
                return
            stored = self._read_pieces(object_bytes(size_bytes) - HEADER_BYTES)
            payload = memoryview(stored)[:size_bytes]
            if len(payload) < size_bytes:
                self.cut_short = f"payload: {len(payload)} of {size_bytes} bytes"
                return
            self._met += 1
            if payload_sum((payload,)) != header.raw_sum:
                self.damaged[Damage.CORRUPT] = self.damaged.get(Damage.CORRUPT, 0) + 1
                continue
            yield ExportedObject(header.name, payload)

    def _checked_bytes(self, header: ObjectHeader, object_bytes_of: Mapping[Kind, int]) -> int:
        """Return the payload's size. Raise ObjectDamageError for a header that is not one of this file's."""
        name = header.name
        if name.namespace != self.head.namespace_id:
            raise ObjectDamageError(Damage.IDENTITY, f"an object of namespace {name.namespace.hex()}")
        if name.raw_bytes != {int(kind): size_bytes for kind, size_bytes in object_bytes_of.items()}.get(name.kind):
            raise ObjectDamageError(Damage.LENGTH, f"an object of kind {name.kind} with {name.raw_bytes} bytes")
        if header.codec is not Codec.NONE:
            raise ObjectDamageError(Damage.CODEC, f"codec {header.codec} in an export")
        return name.raw_bytes

    def _take_end(self, page: bytes) -> None:
        try:
            self.end = ExportEnd(*_END.unpack(_unpage(END_MAGIC, page)[: _END.size]))
            if self._met != self.end.objects:
                self.cut_short = f"it has {self._met} of the {self.end.objects} objects that its end says"
        except InvalidArgument as error:
            self.cut_short = error.message

    def _read(self, size_bytes: int) -> bytes:
        """Return `size` bytes, or fewer at the end of the file. A pipe may give less at a time."""
        return bytes(self._read_pieces(size_bytes))

    def _read_pieces(self, size_bytes: int) -> bytearray:
        """Read as `_read` does. A read takes its memory before there is a byte, and a header may announce too much."""
        data = bytearray()
        while part := self._file.read(min(size_bytes - len(data), _READ_BYTES_MAX)):
            data += part
        return data


def _page(magic: bytes, body: bytes) -> bytes:
    prefix = _PREFIX.pack(magic, FORMAT_VERSION, COMPATIBLE_SINCE)
    rest = body.ljust(PAGE_BYTES - _BODY_AT, b"\0")
    return prefix + _SUM.pack(header_sum(prefix, rest)) + rest


def _unpage(magic: bytes, page: bytes) -> bytes:
    """Return what follows the checksum. Raise InvalidArgument."""
    if len(page) < PAGE_BYTES or not page.startswith(magic):
        raise InvalidArgument("this is no export", advice="`kvdepotctl export` writes one")
    _, version, compatible = _PREFIX.unpack(page[: _PREFIX.size])
    if compatible > FORMAT_VERSION:
        raise InvalidArgument(f"an export of format {version}, not {FORMAT_VERSION}", advice="upgrade kvdepotctl")
    if _SUM.unpack(page[_PREFIX.size : _BODY_AT])[0] != header_sum(page[: _PREFIX.size], page[_BODY_AT:]):
        raise InvalidArgument("a page of the file does not have its checksum")
    return page[_BODY_AT:]
