"""The arena's layout: what lies where in the shared memory that is the RAM tier.

The arena is one file (a memfd, or a file on tmpfs): a superblock, tables, then the
data region. The tables *are* the daemon's columns: there is no second copy in its
heap, so a restarted daemon finds what the last one knew (docs/formats/arena.md).

Only the daemon writes the tables. Engines map the same file and read generations.
Every store that publishes something is one aligned 8-byte store made last, so a
SIGKILL between any two instructions leaves either the old or the new truth.
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
FORMAT_VERSION = 1
COMPATIBLE_SINCE = 1
PAGE_BYTES = 4096
DATA_ALIGN_BYTES = 2 << 20
NO_ROW = 0xFFFF_FFFF

Buffer = memoryview
Column = npt.NDArray[Any]


class RowState(IntEnum):
    """State of a row of the extent table (one row is one extent)."""

    FREE = 0
    RESERVED = 1  # lent to a writer; generation is odd
    COMMITTED = 2  # head of a published object; generation is even
    CONTINUATION = 3  # a further extent of the object whose head links here
    DYING = 4  # unindexed, its bytes are free once nobody is lent them


class RowFlag(IntEnum):
    SUMMED = 1  # `sum_lo`, `sum_hi` hold XXH3-128 of the payload
    VERIFIED = 2  # summed or checked by the daemon whose run is in `run`


class LentMode(IntEnum):
    FREE = 0
    READ = 1
    WRITE = 2
    CHECKSUM = 3  # the daemon's own I/O worker reads it


# name, dtype, components. `generation` is first: engines read it by (offset, row) alone.
EXTENT_COLUMNS: tuple[tuple[str, str, int], ...] = (
    ("generation", "<u8", 1),
    ("offset", "<u8", 1),  # bytes from the start of the arena
    ("length", "<u8", 1),  # bytes of payload in this extent (the extent itself is rounded up to pages)
    ("key", "V16", 1),  # chunk key
    ("parent", "V16", 1),  # chunk key of the parent chunk, zeros for the root
    ("sum_lo", "<u8", 1),
    ("sum_hi", "<u8", 1),
    ("boundary", "<u4", 1),  # tokens
    ("next", "<u4", 1),  # row of the object's next extent, NO_ROW at its end
    ("run", "<u4", 1),  # the daemon run that verified it
    ("namespace", "<u2", 1),  # slot of the namespace table
    ("kind", "u1", 1),
    ("flags", "u1", 1),
    ("state", "u1", 1),
)
LENT_COLUMNS: tuple[tuple[str, str, int], ...] = (
    ("lease", "<u8", 1),
    ("row", "<u4", 1),  # head row of the object
    ("index", "<u4", 1),  # the object's index within the call that made the lease
    ("session", "<u2", 1),  # slot of the session table
    ("mode", "u1", 1),  # LentMode; written last, FREE means the entry is empty
)
SESSION_COLUMNS: tuple[tuple[str, str, int], ...] = (
    ("engine", "V16", 1),  # digest of the engine's id
    ("used", "u1", 1),
)
ATTACHMENT_COLUMNS: tuple[tuple[str, str, int], ...] = (
    ("boot", "V16", 1),  # the kernel's boot id
    ("start", "<u8", 1),  # start time of the process, clock ticks since boot
    ("pid", "<u4", 1),  # in the daemon's PID namespace, 0 when unknown
    ("rank", "<i4", 1),  # -1: scheduler only
    ("session", "<u2", 1),
    ("used", "u1", 1),
)
NAMESPACE_COLUMNS: tuple[tuple[str, str, int], ...] = (
    ("id", "V16", 1),
    ("label", "V96", 1),  # UTF-8, zero padded; for people
    ("used", "u1", 1),
)
SESSIONS_MAX = 1024
ATTACHMENTS_MAX = 8192
NAMESPACES_MAX = 1024

_SUPERBLOCK = struct.Struct("<8sIIQQIIQQ16s")
_SUM = struct.Struct("<Q")


class ArenaFormatError(ValueError):
    """The bytes are not an arena this version can adopt. The message says which field."""


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def _table_bytes(columns: tuple[tuple[str, str, int], ...], rows: int) -> int:
    return sum(_round_up(np.dtype(dtype).itemsize * rows, 64) for _, dtype, _ in columns)


@dataclass(frozen=True, slots=True)
class ArenaLayout:
    """Sizes and offsets, all derived from three numbers (bytes unless named otherwise)."""

    size_bytes: int
    rows: int
    lent_rows: int

    @staticmethod
    def plan(size_bytes: int, rows: int | None = None, lent_rows: int | None = None) -> ArenaLayout:
        """Layout of an arena file of exactly `size_bytes`; one row per 64 KiB unless told otherwise."""
        if rows is None:
            rows = min(max(size_bytes // (64 << 10), 1024), 8 << 20)
        if lent_rows is None:
            lent_rows = min(rows, 1 << 18)
        layout = ArenaLayout(
            _round_up(size_bytes, PAGE_BYTES) if size_bytes % PAGE_BYTES else size_bytes, rows, lent_rows
        )
        if layout.data_bytes < PAGE_BYTES:
            raise ArenaFormatError(
                f"an arena of {size_bytes} bytes has no room beside its tables of {layout.data_offset} bytes"
            )
        return layout

    @property
    def extents_offset(self) -> int:
        return PAGE_BYTES

    @property
    def lent_offset(self) -> int:
        return self.extents_offset + _round_up(_table_bytes(EXTENT_COLUMNS, self.rows), PAGE_BYTES)

    @property
    def sessions_offset(self) -> int:
        return self.lent_offset + _round_up(_table_bytes(LENT_COLUMNS, self.lent_rows), PAGE_BYTES)

    @property
    def attachments_offset(self) -> int:
        return self.sessions_offset + _round_up(_table_bytes(SESSION_COLUMNS, SESSIONS_MAX), PAGE_BYTES)

    @property
    def namespaces_offset(self) -> int:
        return self.attachments_offset + _round_up(_table_bytes(ATTACHMENT_COLUMNS, ATTACHMENTS_MAX), PAGE_BYTES)

    @property
    def data_offset(self) -> int:
        end = self.namespaces_offset + _round_up(_table_bytes(NAMESPACE_COLUMNS, NAMESPACES_MAX), PAGE_BYTES)
        return _round_up(end, DATA_ALIGN_BYTES)

    @property
    def data_bytes(self) -> int:
        return (self.size_bytes - self.data_offset) // PAGE_BYTES * PAGE_BYTES


@dataclass(frozen=True, slots=True)
class Superblock:
    arena_id: int  # random; extents of one arena mean nothing in another
    layout: ArenaLayout
    run: int  # counts daemon runs on this arena
    boot: bytes  # boot id, 16 bytes

    def pack(self) -> bytes:
        body = _SUPERBLOCK.pack(
            MAGIC, FORMAT_VERSION, COMPATIBLE_SINCE, self.arena_id, self.layout.size_bytes,
            self.layout.rows, self.layout.lent_rows, self.run, 0, self.boot,
        )  # fmt: skip
        return body + _SUM.pack(xxhash.xxh3_64_intdigest(body))

    @staticmethod
    def unpack(page: bytes | memoryview) -> Superblock:
        """Raises ArenaFormatError naming the first field that is wrong."""
        if len(page) < _SUPERBLOCK.size + _SUM.size:
            raise ArenaFormatError(f"superblock: {len(page)} bytes are too short")
        body = bytes(page[: _SUPERBLOCK.size])
        magic, version, compatible, arena_id, size, rows, lent_rows, run, _, boot = _SUPERBLOCK.unpack(body)
        if magic != MAGIC:
            raise ArenaFormatError("superblock: magic is not KVDARENA")
        if compatible > FORMAT_VERSION:
            raise ArenaFormatError(
                f"superblock: format {version} is readable since {compatible}, this is {FORMAT_VERSION}"
            )
        (total,) = _SUM.unpack(bytes(page[_SUPERBLOCK.size : _SUPERBLOCK.size + _SUM.size]))
        if total != xxhash.xxh3_64_intdigest(body):
            raise ArenaFormatError("superblock: checksum does not match")
        return Superblock(arena_id, ArenaLayout(size, rows, lent_rows), run, boot)


class Table:
    """Named columns over a slice of the arena; `table.name` is a numpy view, never a copy."""

    def __init__(self, buffer: Buffer, offset_bytes: int, columns: tuple[tuple[str, str, int], ...], rows: int) -> None:
        self.rows = rows
        self._columns: dict[str, Column] = {}
        at = offset_bytes
        for name, dtype, _ in columns:
            kind = np.dtype(dtype)
            self._columns[name] = np.frombuffer(buffer, dtype=kind, count=rows, offset=at)
            at += _round_up(kind.itemsize * rows, 64)

    def __getitem__(self, name: str) -> Column:
        return self._columns[name]


class ArenaTables:
    """The five tables of a mapped arena. `buffer` must stay alive and, for the daemon, be writable."""

    def __init__(self, buffer: Buffer, layout: ArenaLayout) -> None:
        self.layout = layout
        self.extents = Table(buffer, layout.extents_offset, EXTENT_COLUMNS, layout.rows)
        self.lent = Table(buffer, layout.lent_offset, LENT_COLUMNS, layout.lent_rows)
        self.sessions = Table(buffer, layout.sessions_offset, SESSION_COLUMNS, SESSIONS_MAX)
        self.attachments = Table(buffer, layout.attachments_offset, ATTACHMENT_COLUMNS, ATTACHMENTS_MAX)
        self.namespaces = Table(buffer, layout.namespaces_offset, NAMESPACE_COLUMNS, NAMESPACES_MAX)


def generations(buffer: Buffer, layout: ArenaLayout) -> memoryview:
    """The generation column as u64s, for readers: `generations(...)[row]` is one aligned load."""
    start = layout.extents_offset
    return buffer[start : start + 8 * layout.rows].cast("Q")
