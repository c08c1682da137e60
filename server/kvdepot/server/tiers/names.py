"""Handles and the names of the objects that have them: a free list and columns, no Python object per entry.

Memory is touched as handles come into use, lowest first: some 60 bytes an object.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
from kvdepot.core.objectfile import ObjectName
from kvdepot.server.storage.base import NO_HANDLE

_BYTES: Final = 16


class NameTable:
    """Base of what a tier knows of its objects: handles 0..handles_max-1. A subclass knows which are in use."""

    def __init__(self, handles_max: int) -> None:
        self.handles_max = handles_max
        self.count = 0
        self.high = 0
        """Handles at and above were never used."""
        self._namespace = np.empty(_BYTES * handles_max, np.uint8).data
        self._key = np.empty(_BYTES * handles_max, np.uint8).data
        self._parent = np.empty(_BYTES * handles_max, np.uint8).data
        self._kind = np.empty(handles_max, np.uint8).data
        self._boundary = np.empty(handles_max, np.uint32).data
        self._raw = np.empty(handles_max, np.uint64).data
        self._next = np.empty(handles_max, np.uint32).data  # free handles
        self._free = NO_HANDLE

    @property
    def room(self) -> int:
        """Return how many more names there can be."""
        return self.handles_max - self.count

    def _add_name(self, name: ObjectName) -> int:
        handle = self._take()
        at = slice(_BYTES * handle, _BYTES * handle + _BYTES)
        self._namespace[at], self._key[at], self._parent[at] = name.namespace, name.key, name.parent
        self._kind[handle] = name.kind
        self._boundary[handle] = name.boundary_tokens
        self._raw[handle] = name.raw_bytes
        return handle

    def _add_names(self, fields: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Add a name for each row of a structured array. Return the handle of each row.

        The fields are called like those of a name.
        """
        handles = np.array([self._take() for _ in range(len(fields))], np.int64)
        for column, field in ((self._namespace, "namespace"), (self._key, "key"), (self._parent, "parent")):
            np.asarray(column).view(np.uint64).reshape(-1, 2)[handles] = fields[field]
        for numbers, field in ((self._kind, "kind"), (self._boundary, "boundary_tokens"), (self._raw, "raw_bytes")):
            np.asarray(numbers)[handles] = fields[field]
        return handles

    def _free_handle(self, handle: int) -> None:
        self.count -= 1
        self._next[handle] = self._free
        self._free = handle

    def name(self, handle: int) -> ObjectName:
        at = slice(_BYTES * handle, _BYTES * handle + _BYTES)
        return ObjectName(
            bytes(self._namespace[at]), bytes(self._key[at]), bytes(self._parent[at]),
            self._kind[handle], self._boundary[handle], self._raw[handle],
        )  # fmt: skip

    def ends_last(self, handles: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the handles in order of their boundaries. The object that makes the path is first of its chunk."""
        kinds, boundaries = np.asarray(self._kind)[handles], np.asarray(self._boundary)[handles]
        ordered: npt.NDArray[np.int64] = handles[np.lexsort((kinds, boundaries))]
        return ordered

    def _take(self) -> int:
        assert self.room, "more objects than handles"
        self.count += 1
        if self._free != NO_HANDLE:
            handle = self._free
            self._free = self._next[handle]
            return handle
        self.high += 1
        return self.high - 1
