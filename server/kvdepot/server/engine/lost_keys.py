"""Why the index does not know a key any more: a memory of fixed size, which may forget.

One place a key, by its own bits; what comes later takes it over. 16 bits of place and 48 of
fingerprint: another key is taken for it once in 2^48.
"""

from __future__ import annotations

from array import array
from typing import Final

from kvdepot.core.misses import MissReason

_PLACES: Final = 1 << 16
"""576 KiB."""
_REASONS: Final = tuple(MissReason)
_NUMBERS: Final = {reason: number for number, reason in enumerate(_REASONS)}


class LostKeys:
    """Keys are those of chunks, of a namespace each."""

    def __init__(self) -> None:
        self._prints = array("Q", bytes(8 * _PLACES))
        self._reasons = bytearray(_PLACES)

    def note(self, namespace_id: bytes, key: bytes, reason: MissReason) -> None:
        """It has just left the index, or did not come into it."""
        mark = _mark(namespace_id, key)
        self._prints[mark % _PLACES] = mark
        self._reasons[mark % _PLACES] = _NUMBERS[reason]

    def reason(self, namespace_id: bytes, key: bytes) -> MissReason | None:
        """None: not remembered."""
        mark = _mark(namespace_id, key)
        return _REASONS[self._reasons[mark % _PLACES]] if self._prints[mark % _PLACES] == mark else None


def _mark(namespace_id: bytes, key: bytes) -> int:
    """Never 0, which an empty place has."""
    return (int.from_bytes(key[:8], "little") ^ int.from_bytes(namespace_id[:8], "little")) or 1
