"""The arena's layout: what lies where in the shared memory that is the RAM tier.

The arena is three files in memory: the tables with a superblock, the generations of the rows, and the data. The
first two *are* the daemon's columns: there is no second copy in its heap, so a restarted daemon finds what the last one
knew (docs/formats/arena.md).

Only the daemon has the tables: they hold names and keys. Engines get a descriptor that can only read generations.
Every store that publishes something is one aligned store of at most 8 bytes, made
last, so a SIGKILL between any two instructions leaves either the old or the new truth.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
from kvdepot.core.arena_purpose import NO_PURPOSE, freed_in, purpose_in, with_purpose

MAGIC = b"KVDARENA"
GENERATIONS_MAGIC = b"KVDGENER"
FORMAT_VERSION = 4
"""Of tables whose data has several parts, or memory that was freed, which a daemon of version 3 would use again."""
COMPATIBLE_SINCE = 3
GENERATIONS_VERSION = 3
PAGE_BYTES = 4096
COLUMN_ALIGN_BYTES = 64
FILE_ALIGN_BYTES = 2 << 20
"""All files can lie on hugetlbfs with pages of this size."""
NO_ROW = 0xFFFF_FFFF
ROW_BYTES_MEAN = 64 << 10
"""Rows are planned for objects of this size and more; smaller ones run out of rows before bytes."""
ROWS_MAX = 8 << 20
LENT_ROWS_MAX = 1 << 18
SIZE_BYTES_MAX = 1 << 47
"""More than a process can map."""

Buffer = memoryview
Column = npt.NDArray[Any]
Columns = tuple[tuple[str, str], ...]
"""(name, numpy dtype) in file order."""


class RowState(IntEnum):
    """State of a row of the extent table (one row is one extent)."""

    FREE = 0
    RESERVED = 1  # lent to a writer; generation is odd
    COMMITTED = 2  # head of a published object; generation is even
    CONTINUATION = 3  # a further extent of the object whose head links here
    DYING = 4  # unindexed, its bytes are free once nobody is lent them


class RowFlag(IntEnum):
    """Bits of a row in the extent table."""

    SUMMED = 1  # `sum_lo`, `sum_hi` hold XXH3-128 of the payload
    VERIFIED = 2  # summed or checked by the daemon whose run is in `run`


class LentMode(IntEnum):
    """What a process of a loan may do with the extents."""

    FREE = 0
    READ = 1
    WRITE = 2
    CHECKSUM = 3  # the daemon's own I/O worker reads it


GENERATION = ("generation", "<u8")
"""The column of the extent table that engines read: it has a file of its own."""
EXTENT_COLUMNS: Columns = (
    ("offset", "<u8"),  # bytes from the start of the data
    ("length", "<u8"),  # bytes of payload in this extent (the extent itself is rounded up to pages)
    ("key", "V16"),  # chunk key
    ("parent", "V16"),  # chunk key of the parent chunk, zeros for the root
    ("sum_lo", "<u8"),
    ("sum_hi", "<u8"),
    ("boundary", "<u4"),  # tokens
    ("next", "<u4"),  # row of the object's next extent, NO_ROW at its end
    ("run", "<u4"),  # the daemon run that verified it
    ("namespace", "<u2"),  # slot of the namespace table
    ("kind", "u1"),
    ("flags", "u1"),
    ("state", "u1"),
)
LENT_COLUMNS: Columns = (
    ("lease", "<u8"),
    ("row", "<u4"),  # head row of the object
    ("index", "<u4"),  # the object's index within the call that made the lease
    ("session", "<u2"),  # slot of the session table
    ("mode", "u1"),  # LentMode; written last, FREE means the entry is empty
)
SESSION_COLUMNS: Columns = (
    ("engine", "V16"),  # digest of the engine's id
    ("used", "u1"),
)
ATTACHMENT_COLUMNS: Columns = (
    ("boot", "V16"),  # the kernel's boot id
    ("start", "<u8"),  # start time of the process, clock ticks since boot; with pid 0 the kernel's number of it
    ("pid", "<u4"),  # in the daemon's PID namespace, 0 when unknown
    ("rank", "<i4"),  # -1: none
    ("session", "<u2"),
    ("used", "u1"),  # 1: by a worker, 2: by the scheduler
)
NAMESPACE_COLUMNS: Columns = (
    ("id", "V16"),
    ("label", "V96"),  # UTF-8, zero padded; for people
    ("used", "u1"),
)
SESSIONS_MAX = 1024
ATTACHMENTS_MAX = 8192
NAMESPACES_MAX = 1024

# magic, version, compatible since, arena id, size, rows, lent rows, boot id, then device and inode of the files of
# generations and data; then their XXH3-64; then the run.
_IDENTITY = struct.Struct("<8sIIQQII16sQQQQ")
_DIVIDED = struct.Struct("<8sIIQQII16sQQ16sQ")
"""Of version 4. The same up to the file of the generations, then the digest of the tenants and the number of parts."""
_PART = struct.Struct("<QQQ")
"""Size, device and inode."""
PARTS_MAX = 64
NO_DIGEST = bytes(16)
_FORMER = {1: struct.Struct("<8sIIQQII16s"), 2: struct.Struct("<8sIIQQII16sQQ")}
"""Of former formats, which had the generations in the tables: 1 had the data behind them, 2 in a file of its own."""
_SUM_AND_RUN = struct.Struct("<QQ")
SUPERBLOCK_BYTES = _IDENTITY.size + _SUM_AND_RUN.size
_GENERATIONS_HEADER = struct.Struct("<8sIIQQ")
"""Magic, version, compatible since, arena id, rows."""
FileId = tuple[int, int]
"""(st_dev, st_ino): an engine can write an id into the data, and cannot give a file another inode."""
NO_FILE: FileId = (0, 0)


class ArenaFormatError(ValueError):
    """The bytes are not an arena this version can adopt. The message says which field."""


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def _is_odd(part_bytes: int) -> bool:
    """Return whether a part of the data cannot have huge pages, or is empty."""
    return part_bytes <= 0 or part_bytes % FILE_ALIGN_BYTES != 0


def _column_bytes(dtype: str, rows: int) -> int:
    return _round_up(np.dtype(dtype).itemsize * rows, COLUMN_ALIGN_BYTES)


def _table_bytes(columns: Columns, rows: int) -> int:
    """Return the size of a table in whole pages, so that the next table starts on a page."""
    return _round_up(sum(_column_bytes(dtype, rows) for _, dtype in columns), PAGE_BYTES)


@dataclass(frozen=True, slots=True)
class ArenaLayout:
    """Sizes and offsets in bytes, all derived from three numbers. ArenaFormatError if these cannot be."""

    size_bytes: int
    rows: int
    lent_rows: int
    former: bool = False  # of a former format: the generations are the first column of the extent table
    divided: tuple[int, ...] = ()  # the sizes of the files of the data; empty: it is one file

    def __post_init__(self) -> None:
        for name, value, most in (
            ("size_bytes", self.size_bytes, SIZE_BYTES_MAX),
            ("rows", self.rows, ROWS_MAX),
            ("lent_rows", self.lent_rows, LENT_ROWS_MAX),
        ):
            if not 1 <= value <= most:
                raise ArenaFormatError(f"arena layout: {name} is {value}, not 1 to {most}")
        if self.size_bytes % PAGE_BYTES:
            raise ArenaFormatError(f"arena layout: size_bytes is {self.size_bytes}, no multiple of {PAGE_BYTES}")
        if self.data_bytes < PAGE_BYTES:
            raise ArenaFormatError(
                f"arena layout: {self.size_bytes} bytes have no room beside tables of {self.overhead_bytes} bytes"
            )
        if self.divided and (sum(self.divided) != self.data_bytes or any(map(_is_odd, self.divided))):
            raise ArenaFormatError(f"arena layout: parts of {self.divided} bytes are no parts of {self.data_bytes}")

    @staticmethod
    def plan(
        size_bytes: int, rows: int | None = None, lent_rows: int | None = None, divided: Sequence[int] = ()
    ) -> ArenaLayout:
        """Return the layout of an arena whose files have `size_bytes` together, rounded down to pages."""
        if rows is None:
            rows = min(max(size_bytes // ROW_BYTES_MEAN, 1024), ROWS_MAX)
        if lent_rows is None:
            lent_rows = min(rows, LENT_ROWS_MAX)
        return ArenaLayout(size_bytes // PAGE_BYTES * PAGE_BYTES, rows, lent_rows, divided=tuple(divided))

    @property
    def extents_offset(self) -> int:
        return PAGE_BYTES

    @property
    def extent_columns(self) -> Columns:
        """Return the columns of the extent table that lie in the file of the tables."""
        return (GENERATION, *EXTENT_COLUMNS) if self.former else EXTENT_COLUMNS

    @property
    def lent_offset(self) -> int:
        return self.extents_offset + _table_bytes(self.extent_columns, self.rows)

    @property
    def sessions_offset(self) -> int:
        return self.lent_offset + _table_bytes(LENT_COLUMNS, self.lent_rows)

    @property
    def attachments_offset(self) -> int:
        return self.sessions_offset + _table_bytes(SESSION_COLUMNS, SESSIONS_MAX)

    @property
    def namespaces_offset(self) -> int:
        return self.attachments_offset + _table_bytes(ATTACHMENT_COLUMNS, ATTACHMENTS_MAX)

    @property
    def tables_bytes(self) -> int:
        """Return the size of the file of the tables."""
        end = self.namespaces_offset + _table_bytes(NAMESPACE_COLUMNS, NAMESPACES_MAX)
        return _round_up(end, FILE_ALIGN_BYTES)

    @property
    def generations_bytes(self) -> int:
        """Return the size of the file of the generations."""
        if self.former:
            return 0
        return _round_up(PAGE_BYTES + _table_bytes((GENERATION,), self.rows), FILE_ALIGN_BYTES)

    @property
    def data_bytes(self) -> int:
        """Return the size of all data together."""
        return self.size_bytes - self.tables_bytes - self.generations_bytes

    @property
    def parts(self) -> tuple[int, ...]:
        """Return the size of each file of the data."""
        return self.divided or (self.data_bytes,)

    @property
    def part_starts(self) -> tuple[int, ...]:
        """Return where each part starts, counted over all data."""
        return tuple(accumulate(self.parts[:-1], initial=0))

    @property
    def overhead_bytes(self) -> int:
        """Return what the arena takes besides its data."""
        return self.size_bytes - self.data_bytes


@dataclass(frozen=True, slots=True)
class Superblock:
    """The first page of the tables. All down to `tenants`, but `run`, is written once, when the arena is made."""

    arena_id: int  # random; extents of one arena mean nothing in another
    layout: ArenaLayout
    run: int  # counts daemon runs on this arena
    boot: bytes  # boot id, 16 bytes
    generations_file: FileId = NO_FILE
    data_files: tuple[FileId, ...] = (NO_FILE,)
    """Of each part of the data."""
    tenants: bytes = NO_DIGEST
    """Says which tenants the parts belong to, if there are several."""
    purpose: bytes = NO_PURPOSE
    """Says what the operator asked for. With the same purpose, an arena of another size is kept."""
    freed_from: tuple[int, ...] = ()
    """From which byte on each part was freed, so that drivers may have other pages pinned. Empty: nothing was."""

    @property
    def version(self) -> int:
        """Return the format's version."""
        return FORMAT_VERSION if self.layout.divided or self.freed_from else COMPATIBLE_SINCE

    def pack(self) -> bytes:
        """Return the bytes to write at offset 0.

        The run follows the checksum, in an aligned word of its own. So a write of a later run over an earlier
        one can be cut short anywhere, and the superblock stays valid.
        """
        layout = self.layout
        sizes = layout.size_bytes, layout.rows, layout.lent_rows
        fields = MAGIC, self.version, self.version, self.arena_id, *sizes, self.boot, *self.generations_file
        if self.version == FORMAT_VERSION:
            identity = _DIVIDED.pack(*fields, self.tenants, len(layout.parts))
            parts = zip(layout.parts, self.data_files, strict=True)
            identity += b"".join(_PART.pack(size_bytes, *file) for size_bytes, file in parts)
        else:
            identity = _IDENTITY.pack(*fields, *self.data_files[0])
        identity += _SUM_AND_RUN.pack(xxhash.xxh3_64_intdigest(identity), self.run)
        return with_purpose(identity, self.purpose, self.freed_from, self.arena_id)

    @staticmethod
    def unpack(page: bytes | memoryview) -> Superblock:
        """Return the superblock in a page. Raise ArenaFormatError, which names the first field that is wrong."""
        if len(page) < SUPERBLOCK_BYTES:
            raise ArenaFormatError(f"superblock: {len(page)} bytes are too short")
        magic, version, compatible = struct.unpack_from("<8sII", page)
        if magic != MAGIC:
            raise ArenaFormatError("superblock: magic is not KVDARENA")
        # Before the sum: a later format may have another one.
        if compatible > FORMAT_VERSION:
            raise ArenaFormatError(
                f"superblock: format {version} is readable since {compatible}, this is {FORMAT_VERSION}"
            )
        if version < COMPATIBLE_SINCE:
            raise ArenaFormatError(f"superblock: format {version} is too old, this is {FORMAT_VERSION}")
        size_bytes = _divided_bytes(page) if (divided := compatible > COMPATIBLE_SINCE) else _IDENTITY.size
        identity, rest = bytes(page[:size_bytes]), bytes(page[size_bytes : size_bytes + _SUM_AND_RUN.size])
        if len(rest) < _SUM_AND_RUN.size:
            raise ArenaFormatError(f"superblock: {len(page)} bytes are too short")
        total, run = _SUM_AND_RUN.unpack(rest)
        if total != xxhash.xxh3_64_intdigest(identity):
            raise ArenaFormatError("superblock: checksum does not match")
        fields = (_DIVIDED if divided else _IDENTITY).unpack_from(identity)
        _, _, _, arena_id, size, rows, lent_rows, boot, device, inode, *more = fields
        sizes: tuple[int, ...] = ()
        files: tuple[FileId, ...] = ((more[0], more[1]),)
        if divided:
            sizes, *ids = zip(*_PART.iter_unpack(identity[_DIVIDED.size :]), strict=True)
            files = tuple(zip(*ids, strict=True))
        layout = ArenaLayout(size, rows, lent_rows, divided=sizes if len(sizes) > 1 else ())
        also = more[0] if divided else NO_DIGEST, purpose_in(page, arena_id), freed_in(page, arena_id, layout.parts)
        found = Superblock(arena_id, layout, run, boot, (device, inode), files, *also)
        if divided and (found.version != FORMAT_VERSION or layout.parts != sizes):
            raise ArenaFormatError(f"superblock: format {version} of one part, and what was freed is not known")
        return found

    @staticmethod
    def unpack_former(page: bytes) -> Superblock | None:
        """Return the superblock of an arena of a former format, which cannot be adopted; None if it is not one."""
        for version, struct_ in _FORMER.items():
            identity = page[: struct_.size]
            if len(page) < struct_.size + _SUM_AND_RUN.size:
                continue
            magic, found, _, arena_id, size, rows, lent_rows, boot, *file = struct_.unpack(identity)
            total, run = _SUM_AND_RUN.unpack_from(page, struct_.size)
            if magic != MAGIC or found != version or total != xxhash.xxh3_64_intdigest(identity):
                continue
            try:
                layout = ArenaLayout(size, rows, lent_rows, former=True)
            except ArenaFormatError:
                continue
            return Superblock(arena_id, layout, run, boot, data_files=((file[0], file[1]) if file else NO_FILE,))
        return None


def _divided_bytes(page: bytes | memoryview) -> int:
    """Return the size of the identity of version 4."""
    parts: int = _DIVIDED.unpack_from(page)[-1]
    if not 1 <= parts <= PARTS_MAX:
        raise ArenaFormatError(f"superblock: the data has {parts} parts, not 1 to {PARTS_MAX}")
    return _DIVIDED.size + parts * _PART.size


@dataclass(frozen=True, slots=True)
class GenerationsHeader:
    """The first page of the generations' file: all that engines read of an arena besides generations."""

    arena_id: int
    rows: int

    def pack(self) -> bytes:
        return _GENERATIONS_HEADER.pack(
            GENERATIONS_MAGIC, GENERATIONS_VERSION, GENERATIONS_VERSION, self.arena_id, self.rows
        )  # fmt: skip

    @staticmethod
    def unpack(page: bytes | memoryview) -> GenerationsHeader:
        """Return the header in a page. Raise ArenaFormatError, which names the first field that is wrong."""
        if len(page) < _GENERATIONS_HEADER.size:
            raise ArenaFormatError(f"generations: {len(page)} bytes are too short")
        magic, version, compatible, arena_id, rows = _GENERATIONS_HEADER.unpack_from(page)
        if magic != GENERATIONS_MAGIC:
            raise ArenaFormatError("generations: magic is not KVDGENER")
        if compatible > GENERATIONS_VERSION or version < GENERATIONS_VERSION:
            raise ArenaFormatError(
                f"generations: format {version} is readable since {compatible}, this is {GENERATIONS_VERSION}"
            )
        if not 1 <= rows <= ROWS_MAX:
            raise ArenaFormatError(f"generations: rows is {rows}, not 1 to {ROWS_MAX}")
        return GenerationsHeader(arena_id, rows)

    @property
    def file_bytes(self) -> int:
        """Return how long the file is at least."""
        return PAGE_BYTES + 8 * self.rows


class Table:
    """Named columns over a slice of the tables; `table[name]` is a numpy view, never a copy."""

    def __init__(self, buffer: Buffer, offset_bytes: int, columns: Columns, rows: int) -> None:
        self.rows = rows
        self._columns: dict[str, Column] = {}
        for name, dtype in columns:
            self._columns[name] = np.frombuffer(buffer, dtype=np.dtype(dtype), count=rows, offset=offset_bytes)
            offset_bytes += _column_bytes(dtype, rows)

    def __getitem__(self, name: str) -> Column:
        return self._columns[name]

    def join(self, other: Table) -> None:
        """Let this table have the columns of another one, of as many rows, too."""
        self._columns |= other._columns


class ArenaTables:
    """The five tables. `buffer` maps their file; it must stay alive and, for the daemon, be writable.

    `generations` maps the file with that column. None: it is not there, for whoever reads loans alone.
    ArenaFormatError when the tables are not all in the buffers.
    """

    def __init__(self, buffer: Buffer, layout: ArenaLayout, generations: Buffer | None = None) -> None:
        for name, found, size_bytes in (
            ("tables", buffer, layout.tables_bytes), ("generations", generations, layout.generations_bytes)
        ):  # fmt: skip
            if found is not None and len(found) < size_bytes:
                raise ArenaFormatError(f"arena: {len(found)} bytes are mapped, its {name} have {size_bytes}")
        self.layout = layout
        self.room_bytes = layout.parts
        """How much of each part may be used, from its start: less than all where tiers were added since."""
        self.extents = Table(buffer, layout.extents_offset, layout.extent_columns, layout.rows)
        if generations is not None:
            self.extents.join(Table(generations, PAGE_BYTES, (GENERATION,), layout.rows))
        self.lent = Table(buffer, layout.lent_offset, LENT_COLUMNS, layout.lent_rows)
        self.sessions = Table(buffer, layout.sessions_offset, SESSION_COLUMNS, SESSIONS_MAX)
        self.attachments = Table(buffer, layout.attachments_offset, ATTACHMENT_COLUMNS, ATTACHMENTS_MAX)
        self.namespaces = Table(buffer, layout.namespaces_offset, NAMESPACE_COLUMNS, NAMESPACES_MAX)


def tables_in_memory(layout: ArenaLayout) -> ArenaTables:
    """Return empty tables without files, which end with this process."""
    tables, column = (memoryview(mmap.mmap(-1, size)) for size in (layout.tables_bytes, layout.generations_bytes))
    return ArenaTables(tables, layout, column)


def generations(buffer: Buffer, rows: int) -> memoryview:
    """Return the column in the file of the generations as u64s, for readers: `[row]` is one aligned load."""
    return buffer[PAGE_BYTES : PAGE_BYTES + 8 * rows].cast("Q")
