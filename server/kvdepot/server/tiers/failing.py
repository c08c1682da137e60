"""Objects that cannot be read while others can: an error of theirs, not of the path."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Final, Generic, TypeVar

from kvdepot.server.io.breaker import Breaker

_FAILURES_MAX: Final = 3
_FAILING_MAX: Final = 1024
"""Objects that failed and whose failures are counted."""

_Key = TypeVar("_Key", bound=Hashable)


class FailingObjects(Generic[_Key]):
    """Counts the I/O errors of single objects. What fails while nothing can be read says nothing about the object."""

    def __init__(self, breaker: Breaker) -> None:
        self._breaker = breaker
        self._read = 0
        # its I/O errors, and what could be read by the last one
        self._failing: OrderedDict[_Key, tuple[int, int]] = OrderedDict()

    def read(self) -> None:
        """Count a read of any object that worked."""
        self._read += 1

    def failed(self, key: _Key) -> bool:
        """Count a failure. Return whether the object has failed often enough to be given up."""
        read = self._read + self._breaker.probed  # a probe reads, too
        failures, read_before = self._failing.pop(key, (0, -1))
        self._failing[key] = (failures + (read > read_before), read)
        if len(self._failing) > _FAILING_MAX:
            self._failing.popitem(last=False)
        return self._failing[key][0] >= _FAILURES_MAX

    def forget(self, key: _Key) -> None:
        """Forget the failures of an object that was read, or that is no longer served."""
        self._failing.pop(key, None)
