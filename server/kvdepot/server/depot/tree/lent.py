"""The lent table: who may still touch which extents (I6).

An entry's fields are written first and its mode last; clearing is the one store
`mode = FREE`. An entry is written before the reply that tells of it. `pins` counts the
entries of each head row, so that a row's bytes return when its last entry goes.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
from kvdepot.core.arena import ArenaTables, LentMode

U32 = npt.NDArray[np.uint32]
NO_SESSION: Final = 0xFFFF
"""Session of CHECKSUM entries: the daemon itself."""
SESSION_NUMBERS: Final = NO_SESSION + 1


class LentTable:
    """Entries by number; the caller keeps the numbers it got from `lend`."""

    def __init__(self, tables: ArenaTables) -> None:
        columns = tables.lent
        self.count = tables.layout.lent_rows
        self.leases = columns["lease"]
        self.rows = columns["row"]
        self.indices = columns["index"]
        self.sessions = columns["session"]
        self.modes = columns["mode"]
        self._lease = self.leases.data
        self._row = self.rows.data
        self._index = self.indices.data
        self._session = self.sessions.data
        self._mode = self.modes.data
        self.pins: U32 = np.zeros(tables.layout.rows, np.uint32)
        self._pin = self.pins.data
        self.counts: U32 = np.zeros((max(LentMode) + 1, SESSION_NUMBERS), np.uint32)  # entries by mode and session
        self._count = self.counts.data
        self.reads, self.writes = self.counts[LentMode.READ], self.counts[LentMode.WRITE]
        self._free: U32 = np.arange(self.count, dtype=np.uint32)[::-1].copy()
        self._free_stack = self._free.data
        self.free_count = self.count

    def rebuild(self) -> None:
        """Free stack and pins from the table, after adoption has cleared what nobody holds."""
        free = np.flatnonzero(self.modes == LentMode.FREE)
        self.free_count = len(free)
        self._free[: self.free_count] = free[::-1]
        self.pins[:] = 0
        np.add.at(self.pins, self.rows[self.modes != LentMode.FREE], 1)
        for counts, mode in ((self.reads, LentMode.READ), (self.writes, LentMode.WRITE)):
            counts[:] = np.bincount(self.sessions[self.modes == mode], minlength=SESSION_NUMBERS)

    def pinned(self, row: int) -> bool:
        return self._pin[row] != 0

    def row_of(self, entry: int) -> int:
        return self._row[entry]

    def lend(self, lease: int, session: int, mode: LentMode, row: int, index: int) -> int:
        """Make an entry, and return it. The caller checked `free_count`."""
        self.free_count -= 1
        entry = self._free_stack[self.free_count]
        self._lease[entry] = lease
        self._row[entry] = row
        self._index[entry] = index
        self._session[entry] = session
        self._mode[entry] = mode
        self._pin[row] += 1
        self._count[mode, session] += 1
        return entry

    def lend_many(
        self, lease: int, session: int, mode: LentMode, rows: npt.NDArray[np.integer], indices: U32 | None = None
    ) -> U32:
        """Make entries for rows of these indices (none: 0..n-1), and return them. The caller checked `free_count`."""
        first = self.free_count - len(rows)
        entries = self._free[first : self.free_count].copy()
        self.free_count = first
        self.leases[entries] = lease
        self.rows[entries] = rows
        self.indices[entries] = np.arange(len(rows), dtype=np.uint32) if indices is None else indices
        self.sessions[entries] = session
        self.modes[entries] = mode
        np.add.at(self.pins, rows, 1)
        self.counts[mode, session] += len(rows)
        return entries

    def clear(self, entry: int) -> bool:
        """Clear an entry. Return whether it was the last entry of its row."""
        self._count[self._mode[entry], self._session[entry]] -= 1
        self._mode[entry] = LentMode.FREE
        row = self._row[entry]
        self._pin[row] -= 1
        self._free_stack[self.free_count] = entry
        self.free_count += 1
        return self._pin[row] == 0

    def clear_many(self, entries: U32) -> npt.NDArray[np.integer]:
        """Clear entries. Return the rows whose last entry went (each once)."""
        np.subtract.at(self.counts, (self.modes[entries], self.sessions[entries]), 1)
        self.modes[entries] = LentMode.FREE
        rows = self.rows[entries]
        np.subtract.at(self.pins, rows, 1)
        self._free[self.free_count : self.free_count + len(entries)] = entries
        self.free_count += len(entries)
        return np.unique(rows[self.pins[rows] == 0])
