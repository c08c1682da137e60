"""A memory of why the index does not know a key any more. Its size is fixed, and it may forget.

A key has one place, by its own bits, and later keys take the place over. There are 16 bits of
place and 48 bits of fingerprint, so another key is mistaken for it once in 2^48.
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
    """The reasons of lost keys. A key is that of a chunk of one namespace."""

    def __init__(self) -> None:
        self._prints = array("Q", bytes(8 * _PLACES))
        self._reasons = bytearray(_PLACES)

    def note(self, namespace_id: bytes, key: bytes, reason: MissReason) -> None:
        """Note why a key has just left the index, or did not come into it."""
        mark = _mark(namespace_id, key)
        self._prints[mark % _PLACES] = mark
        self._reasons[mark % _PLACES] = _NUMBERS[reason]

    def reason(self, namespace_id: bytes, key: bytes) -> MissReason | None:
        """Return why a key was lost, or None if the reason is not remembered."""
        mark = _mark(namespace_id, key)
        return _REASONS[self._reasons[mark % _PLACES]] if self._prints[mark % _PLACES] == mark else None


def _mark(namespace_id: bytes, key: bytes) -> int:
    """Return the 64-bit mark of a key. It is never 0, which an empty place has."""
    return (int.from_bytes(key[:8], "little") ^ int.from_bytes(namespace_id[:8], "little")) or 1
