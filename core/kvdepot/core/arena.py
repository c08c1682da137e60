"""The arena's layout: what lies where in the shared memory that is the RAM tier.

The arena is two files in memory: the tables with a superblock, and the data. The tables *are* the daemon's
columns: there is no second copy in its heap, so a restarted daemon finds what the last one knew
(docs/formats/arena.md).

Only the daemon writes the tables. Engines get a descriptor that can only read them, and read generations.
Every store that publishes something is one aligned store of at most 8 bytes, made
last, so a SIGKILL between any two instructions leaves either the old or the new truth.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

MAGIC = b"KVDARENA"
FORMAT_VERSION = 2
COMPATIBLE_SINCE = 2
PAGE_BYTES = 4096
COLUMN_ALIGN_BYTES = 64
FILE_ALIGN_BYTES = 2 << 20
"""Both files can lie on hugetlbfs with pages of this size."""
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


# `generation` is first: engines read it knowing only the offset of the table and the row.
EXTENT_COLUMNS: Columns = (
    ("generation", "<u8"),
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

# magic, version, compatible since, arena id, size, rows, lent rows, boot id, device and inode of the data's file;
# then their XXH3-64; then the run.
_IDENTITY = struct.Struct("<8sIIQQII16sQQ")
_IDENTITY_1 = struct.Struct("<8sIIQQII16s")
_SUM_AND_RUN = struct.Struct("<QQ")
SUPERBLOCK_BYTES = _IDENTITY.size + _SUM_AND_RUN.size


class ArenaFormatError(ValueError):
    """The bytes are not an arena this version can adopt. The message says which field."""


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


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
                f"arena layout: {self.size_bytes} bytes have no room beside tables of {self.tables_bytes} bytes"
            )

    @staticmethod
    def plan(size_bytes: int, rows: int | None = None, lent_rows: int | None = None) -> ArenaLayout:
        """Return the layout of an arena whose files have `size_bytes` together, rounded down to pages."""
        if rows is None:
            rows = min(max(size_bytes // ROW_BYTES_MEAN, 1024), ROWS_MAX)
        if lent_rows is None:
            lent_rows = min(rows, LENT_ROWS_MAX)
        return ArenaLayout(size_bytes // PAGE_BYTES * PAGE_BYTES, rows, lent_rows)

    @property
    def extents_offset(self) -> int:
        return PAGE_BYTES

    @property
    def lent_offset(self) -> int:
        return self.extents_offset + _table_bytes(EXTENT_COLUMNS, self.rows)

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
    def data_bytes(self) -> int:
        """Return the size of the file of the data."""
        return self.size_bytes - self.tables_bytes


@dataclass(frozen=True, slots=True)
class Superblock:
    """The first page of the tables. All but `run` is written once, when the arena is made."""

    arena_id: int  # random; extents of one arena mean nothing in another
    layout: ArenaLayout
    run: int  # counts daemon runs on this arena
    boot: bytes  # boot id, 16 bytes
    data_file: tuple[int, int] = (0, 0)  # st_dev and st_ino: an engine can write an id in the data, and not these

    def pack(self) -> bytes:
        """Return the SUPERBLOCK_BYTES to write at offset 0.

        The run follows the checksum, in an aligned word of its own. So a write of a later run over an earlier
        one can be cut short anywhere, and the superblock stays valid.
        """
        layout = self.layout
        identity = _IDENTITY.pack(
            MAGIC, FORMAT_VERSION, COMPATIBLE_SINCE,
            self.arena_id, layout.size_bytes, layout.rows, layout.lent_rows, self.boot,
            *self.data_file,
        )  # fmt: skip
        return identity + _SUM_AND_RUN.pack(xxhash.xxh3_64_intdigest(identity), self.run)

    @staticmethod
    def unpack(page: bytes | memoryview) -> Superblock:
        """Return the superblock in a page. Raise ArenaFormatError, which names the first field that is wrong."""
        if len(page) < SUPERBLOCK_BYTES:
            raise ArenaFormatError(f"superblock: {len(page)} bytes are too short")
        identity = bytes(page[: _IDENTITY.size])
        magic, version, compatible, arena_id, size, rows, lent_rows, boot, device, inode = _IDENTITY.unpack(identity)
        if magic != MAGIC:
            raise ArenaFormatError("superblock: magic is not KVDARENA")
        # Before the sum: a later format may have another one.
        if compatible > FORMAT_VERSION:
            raise ArenaFormatError(
                f"superblock: format {version} is readable since {compatible}, this is {FORMAT_VERSION}"
            )
        if version < COMPATIBLE_SINCE:
            raise ArenaFormatError(f"superblock: format {version} is too old, this is {FORMAT_VERSION}")
        total, run = _SUM_AND_RUN.unpack(bytes(page[_IDENTITY.size : SUPERBLOCK_BYTES]))
        if total != xxhash.xxh3_64_intdigest(identity):
            raise ArenaFormatError("superblock: checksum does not match")
        return Superblock(arena_id, ArenaLayout(size, rows, lent_rows), run, boot, (device, inode))


def format_1(page: bytes) -> tuple[ArenaLayout, bytes] | None:
    """Return layout and boot id of an arena of one file, whose tables lie as they do today; None if it is not one."""
    identity = page[: _IDENTITY_1.size]
    if len(page) < _IDENTITY_1.size + _SUM_AND_RUN.size:
        return None
    magic, version, _, _, size, rows, lent_rows, boot = _IDENTITY_1.unpack(identity)
    total, _ = _SUM_AND_RUN.unpack_from(page, _IDENTITY_1.size)
    if magic != MAGIC or version != 1 or total != xxhash.xxh3_64_intdigest(identity):
        return None
    try:
        return ArenaLayout(size, rows, lent_rows), boot
    except ArenaFormatError:
        return None


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


class ArenaTables:
    """The five tables. `buffer` maps their file; it must stay alive and, for the daemon, be writable.

    ArenaFormatError when the tables are not all in `buffer`.
    """

    def __init__(self, buffer: Buffer, layout: ArenaLayout) -> None:
        if len(buffer) < layout.tables_bytes:
            raise ArenaFormatError(f"arena: {len(buffer)} bytes are mapped, its tables have {layout.tables_bytes}")
        self.layout = layout
        self.extents = Table(buffer, layout.extents_offset, EXTENT_COLUMNS, layout.rows)
        self.lent = Table(buffer, layout.lent_offset, LENT_COLUMNS, layout.lent_rows)
        self.sessions = Table(buffer, layout.sessions_offset, SESSION_COLUMNS, SESSIONS_MAX)
        self.attachments = Table(buffer, layout.attachments_offset, ATTACHMENT_COLUMNS, ATTACHMENTS_MAX)
        self.namespaces = Table(buffer, layout.namespaces_offset, NAMESPACE_COLUMNS, NAMESPACES_MAX)


def generations(buffer: Buffer, layout: ArenaLayout) -> memoryview:
    """Return the generation column as u64s, for readers: `generations(...)[row]` is one aligned load."""
    start = layout.extents_offset
    return buffer[start : start + 8 * layout.rows].cast("Q")


def checksum(extents: Table, row: int) -> int | None:
    """Return the XXH3-128 of a committed object's payload by the row of its head. None: it has none yet."""
    if not extents["flags"][row] & RowFlag.SUMMED:
        return None
    return int(extents["sum_hi"][row]) << 64 | int(extents["sum_lo"][row])
