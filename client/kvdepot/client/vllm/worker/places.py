"""The places of an object's parts in the memory of one rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from kvdepot.client.copy.base import BATCH_BYTES, CopyBatch, CopyError, concatenate, object_pieces
from kvdepot.core.calls import Kind

if TYPE_CHECKING:
    from kvdepot.client.copy.base import Column
    from kvdepot.client.extents import Extents
    from kvdepot.client.vllm.base.operations import BlockMove, ObjectCopy
    from kvdepot.client.vllm.worker.layers import RankLayers
    from kvdepot.core.planner import Planner


class ObjectPlaces:
    """The planner's geometry and one rank's layers, combined: where the parts of an object lie."""

    def __init__(self, planner: Planner, layers: RankLayers, rank: int) -> None:
        self._planner = planner
        self._rank = rank
        self._layers = {group: layers.of_group(group) for group in range(len(planner.groups))}
        self._bytes = {
            group: [layers.facts[index].block_bytes for index in indices] for group, indices in self._layers.items()
        }

    def pieces(self, objects: Sequence[ObjectCopy], extents: Extents, *, writing: bool) -> CopyBatch:
        """Return the rank's share of objects. Rank 0 writes replicated parts, and all read them. Raise CopyError."""
        alike: dict[tuple[int, int, int, int], tuple[list[int], list[tuple[int, ...]]]] = {}
        for copied in objects:
            self._check(copied, extents)
            for span in copied.spans:
                if writing and self._rank and self._planner.groups[span.group].replicated:
                    continue
                shape = (copied.kind, span.group, span.object_block, len(span.block_ids))
                indices, block_ids = alike.setdefault(shape, ([], []))
                indices.append(copied.index)
                block_ids.append(span.block_ids)
        return concatenate(
            [
                object_pieces(
                    extents,
                    indices,
                    self._planner.part_range(Kind(kind), group, self._rank)[0],
                    self._layers[group],
                    self._bytes[group],
                    self._planner.blocks_in_object(group),
                    block_ids,
                    object_block,
                )
                for (kind, group, object_block, _), (indices, block_ids) in alike.items()
            ]
        )

    def size_bytes(self, objects: Sequence[ObjectCopy], *, writing: bool) -> int:
        """Return the size of the rank's share of these objects, as of `pieces`."""
        return sum(
            len(span.block_ids) * sum(self._bytes[span.group])
            for copied in objects
            for span in copied.spans
            if not (writing and self._rank and self._planner.groups[span.group].replicated)
        )

    def moves(self, moves: Sequence[BlockMove]) -> Iterator[tuple[Sequence[int], Column, Column]]:
        """Yield layers with source and target blocks to copy within them, in batches of about BATCH_BYTES."""
        for move in moves:
            layers = self._layers[move.group]
            most = max(1, BATCH_BYTES // max(1, sum(self._bytes[move.group])))
            for first in range(0, len(move.sources), most):
                part = slice(first, first + most)
                yield layers, np.array(move.sources[part], np.int64), np.array(move.targets[part], np.int64)

    def _check(self, copied: ObjectCopy, extents: Extents) -> None:
        if copied.index not in extents.fragments:
            raise CopyError(f"object {copied.index} of the operation has no extents")
        granted, needed = extents.size_bytes(copied.index), self._planner.object_bytes(Kind(copied.kind))
        if granted != needed:
            raise CopyError(f"{granted} granted bytes for an object of {needed}")
