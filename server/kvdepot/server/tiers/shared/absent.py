"""Names that were not there a moment ago: no job is spent on them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from kvdepot.core.objectfile import ObjectName

NAMES_MAX: Final = 65_536


def name_key(name: ObjectName) -> bytes:
    """Return the bytes that identify an object: the parts of a name that make a file's name."""
    return name.namespace + name.key + bytes([name.kind])


class AbsentNames:
    """Names of objects that are not there, for `ttl_seconds` each. Of more than NAMES_MAX, the oldest are forgotten.

    A name may be kept longer. Those that were added after it are then only forgotten with it: they no longer count.
    What was damaged is never asked for again within its time: it is there, and a read of it would only fail again.
    """

    def __init__(self, ttl_seconds: float, clock: Callable[[], float]) -> None:
        self._ttl_seconds = ttl_seconds
        self._clock = clock
        self._until: OrderedDict[bytes, float] = OrderedDict()  # the next to end first
        self._damaged: set[bytes] = set()  # of these

    def __contains__(self, name: ObjectName) -> bool:
        return self._until.get(name_key(name), 0.0) > self._clock()

    def damaged(self, name: ObjectName) -> bool:
        """Return whether it counts as absent because it was damaged."""
        return name_key(name) in self._damaged and name in self

    def add(self, name: ObjectName, seconds: float = 0.0, *, damaged: bool = False) -> None:
        """Take note that an object is not there, or that it is `damaged`. `seconds`: for at least so long."""
        now = self._clock()
        while self._until and (len(self._until) >= NAMES_MAX or next(iter(self._until.values())) <= now):
            self._damaged.discard(self._until.popitem(last=False)[0])
        if seconds := max(seconds, self._ttl_seconds):
            key = name_key(name)
            self._until[key] = now + seconds
            self._until.move_to_end(key)
            (self._damaged.add if damaged else self._damaged.discard)(key)

    def discard(self, name: ObjectName) -> None:
        """Forget a name whose object is there now."""
        self._until.pop(name_key(name), None)
        self._damaged.discard(name_key(name))

    def forget_absent(self) -> None:
        """Ask again for what was not there. What was damaged is still not asked for."""
        self._until = OrderedDict((key, until) for key, until in self._until.items() if key in self._damaged)

    def clear(self) -> None:
        self._until.clear()
        self._damaged.clear()
