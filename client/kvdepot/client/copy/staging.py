"""Copies by way of memory of this process: for a batch whose bytes travel, instead of being copied where they lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from kvdepot.client.copy.base import CopyError, heads
from kvdepot.core.calls import EXTENT_WORDS
from kvdepot.core.limits import FRAGMENTS_PER_REPLY_MAX

if TYPE_CHECKING:
    from kvdepot.client.copy.base import Column, CopyBatch
    from kvdepot.client.extents import Extents


class Staging:
    """Memory that takes one batch; grows to the largest one, which `CopyBatch.split` bounds."""

    def __init__(self) -> None:
        self.buffer = memoryview(bytearray())

    def reserve(self, size_bytes: int) -> memoryview:
        """Return the first `size_bytes` of the memory. Former memory stays valid for those who have it."""
        if len(self.buffer) < size_bytes:
            self.buffer = np.empty(size_bytes, dtype=np.uint8).data
        return self.buffer[:size_bytes]


@dataclass(frozen=True, slots=True)
class StagedBatch:
    """`batch` with its pieces end to end, and `extents`, packed: where these bytes lie in the arena, in this order."""

    batch: CopyBatch
    extents: bytes


def staged(batch: CopyBatch, extents: Extents) -> StagedBatch:
    """Stage a batch: its pieces end to end. Raise CopyError for pieces outside the extents, or too many parts."""
    by_offset = np.argsort(extents.offsets)
    found = by_offset[np.searchsorted(extents.offsets[by_offset], batch.offsets, side="right") - 1]
    ends = batch.offsets + batch.lengths
    if (batch.offsets < extents.offsets[found]).any() or (ends > (extents.offsets + extents.lengths)[found]).any():
        raise CopyError("a piece lies outside the granted extents")
    first = _firsts(batch, found)
    count = len(first)
    if count > FRAGMENTS_PER_REPLY_MAX:
        raise CopyError(f"a batch in {count} parts, {FRAGMENTS_PER_REPLY_MAX} can be asked for at once")
    row = found[first]
    table = np.empty((count, EXTENT_WORDS), dtype="<i8")
    table[:, 0] = 0
    table[:, 1] = extents.rows[row]
    table[:, 2] = batch.offsets[first]
    table[:, 3] = np.add.reduceat(batch.lengths, first)
    table[:, 4] = extents.generations[row]
    return StagedBatch(batch.end_to_end(), table.tobytes())


def _firsts(batch: CopyBatch, found: Column) -> Column:
    """Return the pieces that begin a run of bytes which lies together in one extent."""
    together = (batch.offsets[1:] == batch.offsets[:-1] + batch.lengths[:-1]) & (found[1:] == found[:-1])
    return heads(together)
