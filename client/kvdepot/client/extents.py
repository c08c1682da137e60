"""Granted extents, as a rank needs them (packed form: kvdepot.core.calls): columns, because a grant names thousands."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from kvdepot.core.calls import EXTENT_WORDS

Words = npt.NDArray[np.int64]


class ExtentError(ValueError):
    """The packed extents contradict themselves. The message says where."""


@dataclass(frozen=True, slots=True)
class Extents:
    """What one grant names. The columns have one entry a fragment, an object's one after the other.

    Offsets and lengths in bytes. `starts` is where a fragment would begin were all objects of
    the grant laid end to end, so that a place within any of them is one number.
    """

    rows: Words
    offsets: Words  # from the start of the arena
    lengths: Words
    generations: Words
    starts: Words
    fragments: dict[int, tuple[int, int]]  # object index within the call -> its fragments, first to end

    @property
    def fragmented(self) -> bool:
        """Whether an object has more than one fragment."""
        return len(self.fragments) != len(self.rows)

    def size_bytes(self, index: int) -> int:
        """Return the size of one object. Raise KeyError for an object that the grant does not name."""
        first, end = self.fragments[index]
        return int(self.starts[end - 1] + self.lengths[end - 1] - self.starts[first])

    def firsts(self, indices: Iterable[int]) -> Words:
        """Return the first fragment of each of these objects."""
        return np.array([self.fragments[index][0] for index in indices], dtype=np.int64)

    def granted(self, indices: Iterable[int]) -> tuple[list[int], list[int]]:
        """Return the rows and generations of these objects, for `ArenaMap.check`."""
        rows: list[int] = []
        generations: list[int] = []
        for index in indices:
            part = slice(*self.fragments[index])
            rows += self.rows[part].tolist()
            generations += self.generations[part].tolist()
        return rows, generations


def parse_extents(packed: bytes | memoryview, arena_bytes: int) -> Extents:
    """Unpack extents. Raise ExtentError for anything outside the arena."""
    if len(packed) % (8 * EXTENT_WORDS):
        raise ExtentError(f"packed extents: {len(packed)} bytes are no multiple of {8 * EXTENT_WORDS}")
    table = np.frombuffer(packed, dtype="<i8").reshape(-1, EXTENT_WORDS)
    if len(table) and (table.min() < 0 or (table[:, 2] + table[:, 3]).max() > arena_bytes or not table[:, 3].all()):
        raise ExtentError(f"packed extents: a fragment is empty or outside the arena of {arena_bytes} bytes")
    objects, rows, offsets, lengths, generations = np.ascontiguousarray(table.T)
    cuts = [0, *(np.flatnonzero(np.diff(objects)) + 1).tolist(), len(table)] if len(table) else [0]
    indices = objects[cuts[:-1]].tolist()
    fragments = dict(zip(indices, itertools.pairwise(cuts), strict=True))
    if len(fragments) != len(indices):
        raise ExtentError("packed extents: the fragments of an object are not together")
    return Extents(rows, offsets, lengths, generations, np.cumsum(lengths) - lengths, fragments)
