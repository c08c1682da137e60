"""What the tier serves: handle to place, sequence, name. Columns only, no object per entry.

Memory is touched as handles come into use, lowest first: some 100 bytes an object.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt
from kvdepot.core.allocator import Extent
from kvdepot.core.objectfile import ObjectName
from kvdepot.server.tiers.base import NO_HANDLE
from kvdepot.server.tiers.disk.records import Put, record_bytes

_NONE: Final = 0
"""Sequence of a handle that is not in use."""


class Catalog:
    """Handles 0..handles_max-1. A handle in use has a sequence above 0."""

    def __init__(self, handles_max: int) -> None:
        self.handles_max = handles_max
        self.count = 0
        self.record_bytes = 0
        """What the PUT records of all objects take: a snapshot has room for so many bytes."""
        self._high = 0  # handles at and above were never used
        self.sequences: npt.NDArray[np.uint64] = np.zeros(handles_max, np.uint64)
        self._sequence = self.sequences.data
        self._address = np.empty(handles_max, np.uint64).data
        self._length = np.empty(handles_max, np.uint64).data  # of the first fragment; the others in `_more`
        self._stored = np.empty(handles_max, np.uint64).data
        self._raw = np.empty(handles_max, np.uint64).data
        self._sum = np.empty(2 * handles_max, np.uint64).data
        self._namespace = np.empty(16 * handles_max, np.uint8).data
        self._key = np.empty(16 * handles_max, np.uint8).data
        self._parent = np.empty(16 * handles_max, np.uint8).data
        self._boundary = np.empty(handles_max, np.uint32).data
        self._kind = np.empty(handles_max, np.uint8).data
        self._unproven = np.empty(handles_max, np.uint8).data
        self._next = np.empty(handles_max, np.uint32).data  # free handles
        self._free = NO_HANDLE
        self._more: dict[int, tuple[Extent, ...]] = {}

    @property
    def full(self) -> bool:
        return self._free == NO_HANDLE and self._high == self.handles_max

    def add(self, put: Put) -> int:
        """The caller saw that it is not `full`."""
        handle = self._take()
        name = put.name
        self._sequence[handle] = put.sequence
        self._address[handle], self._length[handle] = put.fragments[0]
        if len(put.fragments) > 1:
            self._more[handle] = put.fragments[1:]
        self._stored[handle] = put.stored_bytes
        self._raw[handle] = name.raw_bytes
        self._sum[2 * handle] = put.stored_sum & (1 << 64) - 1
        self._sum[2 * handle + 1] = put.stored_sum >> 64
        self._namespace[16 * handle : 16 * handle + 16] = name.namespace
        self._key[16 * handle : 16 * handle + 16] = name.key
        self._parent[16 * handle : 16 * handle + 16] = name.parent
        self._boundary[handle] = name.boundary_tokens
        self._kind[handle] = name.kind
        self._unproven[handle] = put.unproven
        self.count += 1
        self.record_bytes += record_bytes(len(put.fragments))
        return handle

    def remove(self, handle: int) -> None:
        self.record_bytes -= record_bytes(1 + len(self._more.pop(handle, ())))
        self.count -= 1
        self._sequence[handle] = _NONE
        self._next[handle] = self._free
        self._free = handle

    def __contains__(self, handle: int) -> bool:
        return 0 <= handle < self._high and self._sequence[handle] != _NONE

    def sequence(self, handle: int) -> int:
        return int(self._sequence[handle])

    def fragments(self, handle: int) -> tuple[Extent, ...]:
        first = (int(self._address[handle]), int(self._length[handle]))
        return (first, *self._more.get(handle, ()))

    def stored_bytes(self, handle: int) -> int:
        return int(self._stored[handle])

    def stored_sum(self, handle: int) -> int:
        return int(self._sum[2 * handle]) | int(self._sum[2 * handle + 1]) << 64

    def name(self, handle: int) -> ObjectName:
        at = slice(16 * handle, 16 * handle + 16)
        return ObjectName(
            bytes(self._namespace[at]), bytes(self._key[at]), bytes(self._parent[at]),
            self._kind[handle], self._boundary[handle], self._raw[handle],
        )  # fmt: skip

    def unproven(self, handle: int) -> bool:
        return bool(self._unproven[handle])

    def prove(self, handle: int) -> None:
        """It was verified on the medium."""
        self._unproven[handle] = 0

    def handles(self) -> Iterator[int]:
        return iter(np.flatnonzero(self.sequences[: self._high]).tolist())

    def after(self, sequence: int, count: int) -> list[int]:
        """The handles of the lowest sequences above this one, in order."""
        sequences = self.sequences[: self._high]
        found = np.flatnonzero(sequences > sequence)
        if len(found) > count:
            found = found[np.argpartition(sequences[found], count)[:count]]
        ordered: list[int] = found[np.argsort(sequences[found])].tolist()
        return ordered

    def _take(self) -> int:
        if self._free != NO_HANDLE:
            handle = self._free
            self._free = self._next[handle]
            return handle
        self._high += 1
        assert self._high <= self.handles_max, "more objects than handles"
        return self._high - 1
