"""Copies between KV tensors and extents: the one interface for every device.

A copy is a list of pieces. A piece is a run of bytes of one block of one layer, and
where it lies in the arena. Pieces are columns of numbers, never Python objects: a
load of a long prompt has tens of thousands.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvdepot.client.arena_map import ArenaMap
    from kvdepot.client.extents import Extents

Column = npt.NDArray[np.int64]
BATCH_BYTES = 32 << 20
"""A batch moves about this much: 4 to 5 ms of one core, so deadlines are looked at that often."""


class Direction(Enum):
    STORE = "store"  # layers -> arena
    LOAD = "load"  # arena -> layers


@dataclass(frozen=True, slots=True)
class CopyBatch:
    """Pieces to copy, as columns of equal length. Offsets and lengths in bytes."""

    layers: Column  # index into the layers that the copier was made with
    blocks: Column  # block id: index into the layer's first dimension
    skips: Column  # offset within the block (not 0 only where a fragment splits a block)
    offsets: Column  # offset in the arena
    lengths: Column

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def size_bytes(self) -> int:
        return int(self.lengths.sum())

    def split(self, batch_bytes: int = BATCH_BYTES) -> Iterator[CopyBatch]:
        """The same pieces in order, in batches of about `batch_bytes` (at least one piece each)."""
        group = (np.cumsum(self.lengths) - 1) // batch_bytes
        cuts = [0, *(np.flatnonzero(np.diff(group)) + 1).tolist(), len(self)]
        for start, end in itertools.pairwise(cuts):
            if start < end:
                part = slice(start, end)
                yield CopyBatch(
                    self.layers[part], self.blocks[part], self.skips[part], self.offsets[part], self.lengths[part]
                )


class BlockCopier(Protocol):
    """Made with the layers of one rank; used by one copying thread at a time."""

    def copy(self, arena: ArenaMap, batch: CopyBatch, direction: Direction) -> None:
        """Start copying one batch. CPU: done on return.

        Raises CopyError before any byte moved if a piece is out of range.
        """

    def wait(self) -> None:
        """Return when everything started before has been copied."""


class CopyError(ValueError):
    """The pieces do not fit the layers or the arena: a broken plan, never copied in part."""


EMPTY = CopyBatch(*(np.empty(0, dtype=np.int64) for _ in range(5)))


def concatenate(batches: Sequence[CopyBatch]) -> CopyBatch:
    """All pieces of `batches`, in order."""
    if not batches:
        return EMPTY
    return CopyBatch(
        np.concatenate([batch.layers for batch in batches]),
        np.concatenate([batch.blocks for batch in batches]),
        np.concatenate([batch.skips for batch in batches]),
        np.concatenate([batch.offsets for batch in batches]),
        np.concatenate([batch.lengths for batch in batches]),
    )


def object_pieces(
    extents: Extents,
    objects: Sequence[int],
    part_offset: int,
    layers: Sequence[int],
    layer_block_bytes: Sequence[int],
    blocks_in_object: int,
    block_ids: Sequence[Sequence[int]] | npt.NDArray[np.int64],
    first_block: int = 0,
) -> CopyBatch:
    """The pieces of one group's part of some objects on one rank, object after object.

    `objects` are indices within the grant; `block_ids`, [objects, n], are the engine's blocks
    for the objects' blocks `first_block`, `first_block + 1`, ... The part begins `part_offset`
    bytes into an object and is layer-major: for each layer `blocks_in_object` blocks of
    `layer_block_bytes[i]` bytes. Raises CopyError if the part does not lie within the extents.
    """
    ids = np.asarray(block_ids, dtype=np.int64).reshape(len(objects), -1)
    count = ids.shape[1]
    if first_block < 0 or first_block + count > blocks_in_object:
        raise CopyError(f"blocks {first_block} to {first_block + count} of an object with {blocks_in_object} blocks")
    if not ids.size:
        return EMPTY
    part = _part(part_offset, tuple(layers), tuple(layer_block_bytes), blocks_in_object, first_block, count)
    smallest = min(map(extents.size_bytes, objects))
    if part_offset < 0 or part.end > smallest:
        raise CopyError(f"a part that ends at byte {part.end} of an object of {smallest} bytes")
    firsts = extents.firsts(objects)
    pieces = CopyBatch(
        np.tile(part.layers, len(ids)),
        np.repeat(ids[:, None, :], len(layers), axis=1).ravel(),
        np.zeros(len(ids) * len(part.layers), dtype=np.int64),
        (extents.starts[firsts][:, None] + part.offsets).ravel(),
        np.tile(part.lengths, len(ids)),
    )
    return _split_at_fragments(pieces, extents) if extents.fragmented else _moved(pieces, extents, firsts)


@dataclass(frozen=True, slots=True)
class _Part:
    """What all objects of a group have in common; offsets within the object."""

    layers: Column
    offsets: Column
    lengths: Column
    end: int  # of the last piece, bytes


@functools.lru_cache(maxsize=1024)
def _part(
    part_offset: int, layers: tuple[int, ...], sizes: tuple[int, ...], blocks_in_object: int, first: int, count: int
) -> _Part:
    """Made once a shape: every load asks for the same few."""
    column = np.array(sizes, dtype=np.int64)
    bases = part_offset + (np.cumsum(column) - column) * blocks_in_object
    numbers = np.arange(first, first + count, dtype=np.int64)
    offsets = (bases[:, None] + column[:, None] * numbers[None, :]).ravel()
    lengths = np.repeat(column, count)
    end = int(offsets[-1] + lengths[-1]) if len(offsets) else part_offset
    return _Part(np.repeat(np.array(layers, dtype=np.int64), count), offsets, lengths, end)


def _moved(pieces: CopyBatch, extents: Extents, firsts: Column) -> CopyBatch:
    """Turn places in the grant into offsets in the arena, where each object is one extent."""
    shifts = np.repeat(extents.offsets[firsts] - extents.starts[firsts], len(pieces) // len(firsts))
    return CopyBatch(pieces.layers, pieces.blocks, pieces.skips, pieces.offsets + shifts, pieces.lengths)


def _split_at_fragments(pieces: CopyBatch, extents: Extents) -> CopyBatch:
    """Likewise where fragments end within pieces."""
    starts, lengths = pieces.offsets, pieces.lengths
    first = np.searchsorted(extents.starts, starts, side="right") - 1
    last = np.searchsorted(extents.starts, starts + lengths - 1, side="right") - 1
    counts = last - first + 1
    piece = np.repeat(np.arange(len(starts)), counts)
    fragment = first[piece] + (np.arange(len(piece)) - np.repeat(np.cumsum(counts) - counts, counts))
    begin = np.maximum(starts[piece], extents.starts[fragment])
    end = np.minimum((starts + lengths)[piece], extents.starts[fragment] + extents.lengths[fragment])
    return CopyBatch(
        pieces.layers[piece],
        pieces.blocks[piece],
        begin - starts[piece],
        extents.offsets[fragment] + begin - extents.starts[fragment],
        end - begin,
    )
