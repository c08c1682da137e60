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
    cuts = [0, *(np.flatnonzero(np.diff(table[:, 0])) + 1).tolist(), len(table)]
    _, rows, offsets, lengths, generations = np.ascontiguousarray(table.T)
    indices = table[cuts[:-1], 0].tolist()
    if len(set(indices)) != len(indices):
        raise ExtentError("packed extents: the fragments of an object are not together")
    before = np.cumsum(lengths) - lengths
    found: dict[int, ObjectExtents] = {}
    for index, first, end in zip(indices, cuts, cuts[1:], strict=False):
        part = slice(first, end)
        starts = before[part] - before[first]
        found[index] = ObjectExtents(rows[part], offsets[part], lengths[part], generations[part], starts)
    return found
