"""What a process may touch of the arena on behalf of a session: found in the arena's own tables, never believed.

For the proxies (`stream_proxy`). The daemon writes the tables while they are read here; an entry of the lent table
is written before the reply that tells of it, and emptied after the rank's acknowledgement.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from kvdepot.core.arena import ArenaTables, LentMode, RowState
from kvdepot.core.calls import EXTENT_WORDS
from kvdepot.core.errors import InvalidArgument, NotLent
from kvdepot.core.limits import PIECE_BYTES_MAX

Words = npt.NDArray[np.int64]
_HEAD_STATES = {
    LentMode.READ: [RowState.COMMITTED],
    # What an audit asks for has been dying from the start; what was dropped has another generation than was granted.
    LentMode.WRITE: [RowState.RESERVED, RowState.DYING],
}


class LentExtents:
    """The arena as one session may see it. `session` is its slot.

    `data` is the part of the session's tenant. It begins at `start`, counted over all data.
    """

    def __init__(self, data: memoryview, tables: ArenaTables, session: int, start: int = 0) -> None:
        self._data = data
        self._start = start
        self._tables = tables
        self._session = session

    def to_read(self, packed: bytes) -> Reading:
        """Return parts of extents that the session is lent for reading. Raise InvalidArgument or NotLent."""
        return Reading(self._data, self._tables, *self._parts(packed, LentMode.READ))

    def to_write(self, packed: bytes) -> Writing:
        """Return parts of extents that the session has reserved. Raise InvalidArgument or NotLent."""
        return Writing(self._data, self._tables, *self._parts(packed, LentMode.WRITE))

    def _parts(self, packed: bytes, mode: LentMode) -> tuple[Words, Words, Words, Words]:
        """Return rows, offsets, lengths and generations of packed extents, each of which was checked."""
        columns = self._tables.extents
        table = np.frombuffer(packed, dtype="<i8").reshape(-1, EXTENT_WORDS).astype(np.int64)
        _, rows, offsets, lengths, generations = np.ascontiguousarray(table.T)
        # Before anything is added up: of numbers below the data's size no sum overflows.
        size_bytes = len(self._data)
        if len(table) and (table.min() < 0 or max(offsets.max(), lengths.max()) > size_bytes or not lengths.all()):
            raise InvalidArgument(f"extents: one is empty or outside the arena of {size_bytes} bytes")
        if len(table) and rows.max() >= columns.rows:
            raise InvalidArgument(f"extents: row {rows.max()} of {columns.rows}")
        starts, ends = columns["offset"][rows].astype(np.int64) - self._start, offsets + lengths
        within = (starts <= offsets) & (ends <= starts + columns["length"][rows].astype(np.int64))
        within &= ends <= size_bytes
        wrong = ~(within & np.isin(rows, self._lent_rows(rows, mode)))
        if wrong.any():
            raise NotLent(f"row {rows[wrong][0]}: not all of it is lent to this session in mode {mode.name}")
        return rows, offsets, lengths, generations

    def _lent_rows(self, asked: Words, mode: LentMode) -> Words:
        """Return the head rows that are lent and, if other rows are asked for, the rows that they link."""
        lent, columns = self._tables.lent, self._tables.extents
        heads = lent["row"][(lent["mode"] == mode) & (lent["session"] == self._session)].astype(np.int64)
        heads = heads[heads < columns.rows]
        heads = heads[np.isin(columns["state"][heads], _HEAD_STATES[mode])]
        found: Words = heads
        last: Words = heads
        while len(last) and not np.isin(asked, found).all():
            linked = columns["next"][last].astype(np.int64)
            linked = linked[linked < columns.rows]  # NO_ROW, at an object's end, is more
            last = np.setdiff1d(linked[columns["state"][linked] == RowState.CONTINUATION], found)
            found = np.concatenate([found, last])
        return found


class _Parts:
    """Checked parts of extents, one after the other. `length` is of all, in bytes."""

    def __init__(
        self, data: memoryview, tables: ArenaTables, rows: Words, offsets: Words, lengths: Words, generations: Words
    ) -> None:
        self._data = data
        self._column = tables.extents["generation"]
        self._rows = rows
        self._generations = generations.astype(np.uint64)
        self._ranges = list(zip(offsets.tolist(), lengths.tolist(), strict=True))
        self.length = int(lengths.sum())
        self.check()

    def check(self) -> None:
        """Raise NotLent if a generation is no longer the granted one. Call this before and after a copy."""
        if (self._column[self._rows] != self._generations).any():
            raise NotLent("the generation of an extent has changed")


class Reading(_Parts):
    """Parts of extents that are read, in their order."""

    def pieces(self, piece_bytes: int = PIECE_BYTES_MAX) -> Iterator[bytes]:
        """Yield the bytes in pieces of `piece_bytes`; the last one may be shorter.

        The bytes are right only if a later `check` does not raise.
        """
        gathered: list[memoryview] = []
        room = piece_bytes
        for offset, length in self._ranges:
            at, end = offset, offset + length
            while at < end:
                part = self._data[at : min(at + room, end)]
                gathered.append(part)
                at += len(part)
                room -= len(part)
                if not room:
                    yield b"".join(gathered)
                    gathered, room = [], piece_bytes
        if gathered:
            yield b"".join(gathered)


class Writing(_Parts):
    """Parts of extents that are filled, in their order."""

    def __init__(self, *checked: object) -> None:
        super().__init__(*checked)  # type: ignore[arg-type]
        self._number = 0  # of the range that is being filled
        self._filled = 0  # bytes of it
        self._missing = self.length

    def write(self, data: bytes) -> None:
        """Write the next bytes. Raise NotLent, or InvalidArgument if there is no room for all of them.

        Where this raises, nothing was written.
        """
        if len(data) > self._missing:
            raise InvalidArgument(f"data: more than the {self.length} bytes of the extents")
        self.check()
        source, at = memoryview(data), 0
        while at < len(data):
            offset, length = self._ranges[self._number]
            count = min(length - self._filled, len(data) - at)
            start = offset + self._filled
            self._data[start : start + count] = source[at : at + count]
            at += count
            self._filled += count
            if self._filled == length:
                self._number, self._filled = self._number + 1, 0
        self._missing -= len(data)

    def finish(self) -> None:
        """Raise InvalidArgument if bytes are missing, or NotLent if a generation has changed."""
        if self._missing:
            raise InvalidArgument(f"data: {self._missing} of {self.length} bytes are missing")
        self.check()
