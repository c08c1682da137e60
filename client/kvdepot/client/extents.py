"""Granted extents, as a rank needs them: per object, in object order (packed form: kvdepot.core.calls)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from kvdepot.core.calls import EXTENT_WORDS

Words = npt.NDArray[np.int64]


class ExtentError(ValueError):
    """The packed extents contradict themselves. The message says where."""


@dataclass(frozen=True, slots=True)
class ObjectExtents:
    """The fragments of one object. Arrays of equal length; offsets and lengths in bytes."""

    rows: Words
    offsets: Words  # from the start of the arena
    lengths: Words
    generations: Words
    starts: Words  # where each fragment begins within the object

    @property
    def size_bytes(self) -> int:
        return int(self.starts[-1] + self.lengths[-1])


def parse_extents(packed: bytes | memoryview, arena_bytes: int) -> dict[int, ObjectExtents]:
    """Object index (within the call) -> its extents. Raises ExtentError for anything outside the arena."""
    if len(packed) % (8 * EXTENT_WORDS):
        raise ExtentError(f"packed extents: {len(packed)} bytes are no multiple of {8 * EXTENT_WORDS}")
    table = np.frombuffer(packed, dtype="<i8").reshape(-1, EXTENT_WORDS)
    if not len(table):
        return {}
    if table.min() < 0 or (table[:, 2] + table[:, 3]).max() > arena_bytes or not table[:, 3].all():
        raise ExtentError(f"packed extents: a fragment is empty or outside the arena of {arena_bytes} bytes")
    cuts = np.flatnonzero(np.diff(table[:, 0])) + 1
    found: dict[int, ObjectExtents] = {}
    for part in np.split(table, cuts):
        index = int(part[0, 0])
        if index in found:
            raise ExtentError(f"packed extents: the fragments of object {index} are not together")
        starts = np.cumsum(part[:, 3]) - part[:, 3]
        found[index] = ObjectExtents(part[:, 1], part[:, 2], part[:, 3], part[:, 4], starts)
    return found
