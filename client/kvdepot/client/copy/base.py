"""Copies between KV tensors and extents: the one interface for every device.

A copy is a list of pieces. A piece is a run of bytes of one block of one layer, and
where it lies in the arena. Pieces are columns of numbers, never Python objects: a
load of a long prompt has tens of thousands.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvdepot.client.extents import Extents

Column = npt.NDArray[np.int64]
BATCH_BYTES = 32 << 20
"""A batch moves about this much: 4 to 5 ms of one core, so deadlines are looked at that often."""


class Direction(Enum):
    """Of a copy."""

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

    def end_to_end(self) -> CopyBatch:
        """Return the same pieces in order, packed in memory of `size_bytes`."""
        return replace(self, offsets=np.cumsum(self.lengths) - self.lengths)

    def split(self, batch_bytes: int = BATCH_BYTES) -> Iterator[CopyBatch]:
        """Yield the same pieces in order, in batches of about `batch_bytes` (at least one piece each)."""
        group = (np.cumsum(self.lengths) - 1) // batch_bytes
        cuts = [0, *(np.flatnonzero(np.diff(group)) + 1).tolist(), len(self)]
        for start, end in itertools.pairwise(cuts):
            if start < end:
                part = slice(start, end)
                yield CopyBatch(
                    self.layers[part], self.blocks[part], self.skips[part], self.offsets[part], self.lengths[part]
                )


class CopyMemory(Protocol):
    """Where the offsets of a batch point to: the arena, or memory that stands for it."""

    @property
    def buffer(self) -> memoryview: ...


class BlockCopier(Protocol):
    """Made with the layers of one rank; used by one copying thread, except `mark`."""

    def enter(self) -> None:
        """Make the calling thread that thread. Called before anything but `mark`."""

    def prove(self, mark: object) -> None:
        """Copy a test pattern through layers that hold nothing yet. Raise CopyError if a byte is wrong."""

    def verify(self, arena: CopyMemory, batch: CopyBatch) -> bool:
        """Return whether the layers hold what the arena holds, after a load of this batch and a wait."""

    def leave(self) -> None:
        """End the copying of this thread. To take back what was prepared for it may take minutes."""

    def mark(self) -> object:
        """Return a mark of the work that the engine has given its device until now. Called on the engine's thread."""

    def after(self, mark: object) -> None:
        """Let copies that start from now on wait for marked work."""

    def copy(self, arena: CopyMemory, batch: CopyBatch, direction: Direction) -> None:
        """Start copying one batch. CPU: done on return.

        Raises CopyError before any byte moved if a piece is out of range.
        """

    def move(self, layers: Sequence[int], sources: Column, targets: Column) -> None:
        """Start copying block `sources[i]` to block `targets[i]` within each of these layers.

        No block is among both. Raises CopyError before any byte moved if one is out of range.
        """

    def wait(self, direction: Direction | None = None) -> None:
        """Wait until all that was started in this direction, or in both, has been copied. Moves count as loads.

        Raise if the device can no longer tell.
        """

    def prepare(self, arena: Arena | None, *, at_once: bool = False) -> float | None:
        """Make copies to this arena fast, a step at a time. Seconds until there is more to do; None: never.

        `at_once`: without pauses, because the engine does not serve yet. None: no more of that.
        """


class Arena(Protocol):
    """How a rank reaches granted extents: by a mapping (`ArenaMap`), or by streams (`StreamArena`)."""

    @property
    def arena_id(self) -> int:
        """Extents of one arena mean nothing in another."""

    @property
    def size_bytes(self) -> int: ...

    @property
    def pinnable(self) -> memoryview:
        """What is mapped here and has its pages: from the arena's first byte on."""

    def check(self, rows: Sequence[int], granted: Sequence[int]) -> bool:
        """Whether, as far as is known here, every row has the generation it was granted with."""

    def intact(self, extents: Extents, checksums: bytes) -> bool | None:
        """Return whether all objects of a grant have the bytes of their checksums. None: that cannot be said here.

        `checksums` are those of the grant (`AcquireReply`).
        """

    def load(self, copier: BlockCopier, extents: Extents, batch: CopyBatch, timeout_seconds: float = ...) -> bool:
        """Copy a batch of pieces within `extents` into the layers. False: it did not get there in time."""

    def verify(self, copier: BlockCopier, batch: CopyBatch) -> bool:
        """Return whether the layers hold what the last `load`, of this batch, brought here. It has been waited for."""

    def store(
        self, copier: BlockCopier, extents: Extents, batch: CopyBatch, meanwhile: Callable[[], None] = ...
    ) -> bool:
        """Copy a batch out of the layers. False: not all of it is in the arena, and none will come late.

        `meanwhile` is called now and then where this takes long. Raises IndeterminateError.
        """


class PossibleWriter(Protocol):
    """A proxy or device that may still write."""

    @property
    def proxy_dead(self) -> bool: ...


class IndeterminateError(Exception):
    """Somebody may still write into the extents of a store that failed: it is not acknowledged before `over`."""

    def __init__(self, writer: PossibleWriter) -> None:
        super().__init__("a store broke off; its extents stay lent until the proxy is proven dead")
        self._writer = writer

    @property
    def over(self) -> bool:
        return self._writer.proxy_dead


class CopyError(ValueError):
    """The pieces do not fit the layers or the arena: a broken plan, never copied in part."""


class WrongBytesError(CopyError):
    """A copy was made, and its bytes are wrong: this machine cannot be trusted with more of them."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What pieces may name: for each layer its number of blocks and the bytes of one."""

    blocks: Column
    block_bytes: Column

    def check(self, batch: CopyBatch, arena_bytes: int) -> None:
        """Raise CopyError for a piece out of bounds."""
        # Seen as unsigned, a negative number is a large one: one comparison for both bounds.
        layers = batch.layers.view(np.uint64)
        if (layers >= len(self.blocks)).any():
            raise CopyError(self.what_is_wrong(batch, arena_bytes))
        block_bytes = self.block_bytes[batch.layers]
        wrong = batch.blocks.view(np.uint64) >= self.blocks[batch.layers].view(np.uint64)
        wrong |= batch.skips.view(np.uint64) >= block_bytes.view(np.uint64)
        wrong |= (batch.lengths - 1).view(np.uint64) >= (block_bytes - batch.skips).view(np.uint64)
        wrong |= batch.offsets < 0
        wrong |= batch.offsets + batch.lengths > arena_bytes
        if wrong.any():
            raise CopyError(self.what_is_wrong(batch, arena_bytes))

    def check_move(self, layers: Sequence[int], sources: Column, targets: Column) -> None:
        """Raise CopyError for a block out of bounds."""
        if len(sources) != len(targets):
            raise CopyError(f"{len(sources)} blocks to {len(targets)} others")
        blocks = np.concatenate([sources, targets])
        for layer in layers:
            if len(blocks) and not 0 <= blocks.min() <= blocks.max() < self.blocks[layer]:
                raise CopyError(f"blocks {blocks.min()} to {blocks.max()} of a layer of {self.blocks[layer]}")

    def what_is_wrong(self, batch: CopyBatch, arena_bytes: int) -> str:
        """Of a batch in which something is."""
        if batch.layers.min() < 0 or batch.layers.max() >= len(self.blocks):
            return f"a piece names layer {batch.layers.max()} of {len(self.blocks)}"
        if batch.blocks.min() < 0 or (batch.blocks >= self.blocks[batch.layers]).any():
            return f"a piece names block {batch.blocks.max()}, beyond its layer"
        if batch.skips.min() < 0 or batch.lengths.min() <= 0:
            return "a piece is empty or begins before its block"
        if (batch.skips + batch.lengths > self.block_bytes[batch.layers]).any():
            return "a piece ends after its block"
        return f"a piece lies outside the arena's data, bytes 0 to {arena_bytes}"

    def runs(self, batch: CopyBatch) -> Iterator[tuple[int, int, bool]]:
        """Pieces (start, end, whole) that are one layer's whole blocks, end to end in the arena; or a part of one."""
        whole = (batch.skips == 0) & (batch.lengths == self.block_bytes[batch.layers])
        together = (
            whole[1:]
            & whole[:-1]
            & (batch.layers[1:] == batch.layers[:-1])
            & (batch.offsets[1:] == batch.offsets[:-1] + batch.lengths[:-1])
        )
        cuts = [0, *(np.flatnonzero(~together) + 1).tolist(), len(batch)]
        for start, end in itertools.pairwise(cuts):
            yield start, end, bool(whole[start])


def heads(together: npt.NDArray[np.bool_]) -> Column:
    """Return where runs begin; `together[i]` says that item i + 1 belongs to the run of item i. There is an item."""
    return np.flatnonzero(np.concatenate([[True], ~together]))


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
    """Return the pieces of one group's part of some objects on one rank, object after object.

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
    """Split pieces where fragments end within them, and turn places in the grant into offsets in the arena."""
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
