"""What this node knows to be in the directory: handle to name, length, last touch. Columns, no object per entry."""

from __future__ import annotations

from typing import Final

import numpy as np
from kvdepot.core.objectfile import ObjectName
from kvdepot.server.tiers.names import NameTable

_NEVER: Final = -(1 << 40)


class Holdings:
    """Some 90 bytes a handle that was ever in use."""

    def __init__(self, handles_max: int) -> None:
        self._names = NameTable(handles_max)
        self._live = np.zeros(handles_max, np.uint8).data
        self._stored = np.empty(handles_max, np.uint64).data
        self._touched = np.empty(handles_max, np.int64).data  # seconds of the clock
        self._uses = np.zeros(handles_max, np.uint32).data  # of the handle, by one object after the other

    @property
    def handles_max(self) -> int:
        return self._names.handles_max

    @property
    def count(self) -> int:
        return self._names.count

    @property
    def room(self) -> int:
        return self._names.room

    def __contains__(self, handle: int) -> bool:
        return 0 <= handle < self.handles_max and bool(self._live[handle])

    def add(self, name: ObjectName, stored_bytes: int, touched_at: int = _NEVER) -> int:
        """The caller saw that there is `room`. `stored_bytes`: of the payload, or somewhat more."""
        handle = self._names.add(name)
        self._live[handle] = 1
        self._stored[handle] = stored_bytes
        self._touched[handle] = touched_at
        self._uses[handle] = (self._uses[handle] + 1) & 0xFFFF_FFFF
        return handle

    def remove(self, handle: int) -> None:
        self._live[handle] = 0
        self._names.remove(handle)

    def name(self, handle: int) -> ObjectName:
        return self._names.name(handle)

    def use(self, handle: int) -> int:
        """Tells one object of a handle from the next."""
        return int(self._uses[handle])

    def stored_bytes(self, handle: int) -> int:
        return int(self._stored[handle])

    def touched_at(self, handle: int) -> int:
        """Long before zero: not by this node."""
        return int(self._touched[handle])

    def touch(self, handle: int, at: int) -> None:
        self._touched[handle] = at

    def untouch(self, handle: int) -> None:
        self._touched[handle] = _NEVER
