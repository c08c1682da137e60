"""Deletions for a file system that has less room than the capacity says (ADR 0097). Pure.

Nodes say that it refused their writes. What the directory uses then is all that it can have: a share of it is deleted,
as above a watermark. A file system that keeps what is deleted, in a snapshot, gets no more than a few of these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kvdepot.server.tiers.shared.links import REFUSED_SECONDS

_PAUSE_SECONDS: Final = REFUSED_SECONDS + 30.0
"""After a relief: a node that still says that it has no room was refused again by then."""
_IN_VAIN_MAX: Final = 3


class Relief:
    """What is still to be deleted because the file system refuses writes."""

    def __init__(self, low_watermark: float, clock: Callable[[], float]) -> None:
        self._low_watermark = low_watermark
        self._clock = clock
        self._left_bytes = 0
        self._paused_until = clock()
        self._refused_at_bytes = 0
        self._in_vain = 0

    @property
    def wanted(self) -> bool:
        return self._left_bytes > 0

    @property
    def reason(self) -> str:
        """Return why nothing more is deleted, although writes are refused; empty if this is not so."""
        if self._in_vain < _IN_VAIN_MAX:
            return ""
        return "the file system is full, and deletions make no room: a snapshot keeps it, or others take it"

    def look(self, used_bytes: int, *, refused: bool) -> None:
        """Begin to want room if a node was refused. `used_bytes`: of the directory, estimated."""
        if not refused:
            self._in_vain = 0
        elif not self.wanted and self._clock() >= self._paused_until and not self.reason:
            used_again = used_bytes >= self._refused_at_bytes * (1 + self._low_watermark) / 2
            self._in_vain = 0 if used_again else self._in_vain + 1
            if not self.reason:
                self._refused_at_bytes = used_bytes
                self._left_bytes = int((1 - self._low_watermark) * used_bytes)

    def deleted(self, freed_bytes: int) -> None:
        if 0 < self._left_bytes <= freed_bytes:
            self._paused_until = self._clock() + _PAUSE_SECONDS
        self._left_bytes = max(self._left_bytes - freed_bytes, 0)
