"""What the tier serves: handle to place, sequence, name. Columns only, no object per entry.

Memory is touched as handles come into use, lowest first: some 100 bytes an object.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt
from kvdepot.core.allocator import Extent
from kvdepot.server.tiers.disk.columns import Numbers, PutColumns
from kvdepot.server.tiers.disk.records import UNPROVEN, Put, record_bytes
from kvdepot.server.tiers.names import NameTable

_NONE: Final = 0
"""Sequence of a handle that is not in use."""


class Catalog(NameTable):
    """The objects of a disk tier, by handle: 0..handles_max-1. A handle in use has a sequence above 0."""

    def __init__(self, handles_max: int) -> None:
        super().__init__(handles_max)
        self.record_bytes = 0
        """What the PUT records of all objects take: a snapshot has room for so many bytes."""
        self.sequences: npt.NDArray[np.uint64] = np.zeros(handles_max, np.uint64)
        self._sequence = self.sequences.data
        self._address = np.empty(handles_max, np.uint64).data
        self._length = np.empty(handles_max, np.uint64).data  # of the first fragment; the others in `_more`
        self._stored = np.empty(handles_max, np.uint64).data
        self._sum = np.empty(2 * handles_max, np.uint64).data
        self._unproven = np.empty(handles_max, np.uint8).data
        self._more: dict[int, tuple[Extent, ...]] = {}

    def add_many(self, puts: PutColumns) -> Numbers:
        """Add all of these and return the handle of each. The caller has checked that there is `room`."""
        fields = puts.fields
        handles = self._add_names(fields)
        self.sequences[handles] = fields["sequence"]
        for column, name in (
            (self._address, "address"), (self._length, "length_bytes"), (self._stored, "stored_bytes"),
        ):  # fmt: skip
            np.asarray(column)[handles] = fields[name]
        np.asarray(self._unproven)[handles] = fields["flags"] & UNPROVEN
        np.asarray(self._sum).reshape(-1, 2)[handles] = fields["stored_sum"]
        for row, fragments in puts.further():
            self._more[int(handles[row])] = tuple(map(tuple, fragments.tolist()))
        self.record_bytes += int(fields["length"].sum(dtype=np.int64))
        return handles

    def add(self, put: Put) -> int:
        """Add an object and return its handle. The caller has checked that there is `room`."""
        handle = self._add_name(put.name)
        self._sequence[handle] = put.sequence
        self._address[handle], self._length[handle] = put.fragments[0]
        if len(put.fragments) > 1:
            self._more[handle] = put.fragments[1:]
        self._stored[handle] = put.stored_bytes
        self._sum[2 * handle] = put.stored_sum & (1 << 64) - 1
        self._sum[2 * handle + 1] = put.stored_sum >> 64
        self._unproven[handle] = put.unproven
        self.record_bytes += record_bytes(len(put.fragments))
        return handle

    def remove(self, handle: int) -> None:
        self.record_bytes -= record_bytes(1 + len(self._more.pop(handle, ())))
        self._sequence[handle] = _NONE
        self._free_handle(handle)

    def __contains__(self, handle: int) -> bool:
        return 0 <= handle < self.high and self._sequence[handle] != _NONE

    def sequence(self, handle: int) -> int:
        return int(self._sequence[handle])

    def fragments(self, handle: int) -> tuple[Extent, ...]:
        first = (int(self._address[handle]), int(self._length[handle]))
        return (first, *self._more.get(handle, ()))

    def stored_bytes(self, handle: int) -> int:
        return int(self._stored[handle])

    def stored_sum(self, handle: int) -> int:
        return int(self._sum[2 * handle]) | int(self._sum[2 * handle + 1]) << 64

    def unproven(self, handle: int) -> bool:
        return bool(self._unproven[handle])

    def prove(self, handle: int) -> None:
        """Take note that the object was verified on the device."""
        self._unproven[handle] = 0

    def handles(self) -> Iterator[int]:
        return iter(np.flatnonzero(self.sequences[: self.high]).tolist())

    def after(self, sequence: int, count: int) -> list[int]:
        """Return the handles of the lowest sequences above this one, in order; at most `count`."""
        sequences = self.sequences[: self.high]
        found = np.flatnonzero(sequences > sequence)
        if len(found) > count:
            found = found[np.argpartition(sequences[found], count)[:count]]
        ordered: list[int] = found[np.argsort(sequences[found])].tolist()
        return ordered
