"""What this node knows to be in the directory: handle to name, length, last touch. Columns, no object per entry."""

from __future__ import annotations

from typing import Final

import numpy as np
from kvdepot.core.objectfile import ObjectName
from kvdepot.server.tiers.names import NameTable

_NEVER: Final = -(1 << 40)


class Holdings(NameTable):
    """The objects that this node knows of, in some 90 bytes for each handle that was ever in use."""

    def __init__(self, handles_max: int) -> None:
        super().__init__(handles_max)
        self._live = np.zeros(handles_max, np.uint8).data
        self._stored = np.empty(handles_max, np.uint64).data
        self._touched = np.empty(handles_max, np.int64).data  # seconds of the clock
        self._uses = np.zeros(handles_max, np.uint32).data  # of the handle, by one object after the other

    def __contains__(self, handle: int) -> bool:
        return 0 <= handle < self.handles_max and bool(self._live[handle])

    def add(self, name: ObjectName, stored_bytes: int, touched_at: int = _NEVER) -> int:
        """Add an object and return its handle. The caller has checked that there is `room`.

        `stored_bytes`: of the payload, or somewhat more.
        """
        handle = self._add_name(name)
        self._live[handle] = 1
        self._stored[handle] = stored_bytes
        self._touched[handle] = touched_at
        self._uses[handle] = (self._uses[handle] + 1) & 0xFFFF_FFFF
        return handle

    def remove(self, handle: int) -> None:
        self._live[handle] = 0
        self._free_handle(handle)

    def use(self, handle: int) -> int:
        """Return a number that tells one object of a handle from the next."""
        return int(self._uses[handle])

    def stored_bytes(self, handle: int) -> int:
        return int(self._stored[handle])

    def touched_at(self, handle: int) -> int:
        """Return when this node touched the object. Long before zero: it did not."""
        return int(self._touched[handle])

    def touch(self, handle: int, at: int) -> None:
        self._touched[handle] = at

    def untouch(self, handle: int) -> None:
        self._touched[handle] = _NEVER
