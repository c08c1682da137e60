"""What a rank is asked to copy, and where its layers lie. Known without vLLM, so copies can be tried without it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SpanCopy:
    """Blocks of one group: the object's blocks from `object_block` on are the engine's `block_ids`."""

    group: int  # index into the planner's groups
    object_block: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ObjectCopy:
    """One object of a copy. `index` is its place in the lease, and in the packed extents."""

    index: int
    kind: int
    key: bytes
    boundary_tokens: int
    spans: tuple[SpanCopy, ...]


@dataclass(frozen=True, slots=True)
class BlockMove:
    """Copy whole blocks of one group within the engine's own tensors."""

    group: int  # index into the planner's groups
    sources: tuple[int, ...]
    targets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoadOp:
    """Copy all objects, and what the engine has itself, into the engine's blocks, or report the request failed."""

    op_id: int
    request_id: str
    deadline: float  # CLOCK_MONOTONIC, seconds; nothing is written after it
    arena_id: int
    extents: bytes
    objects: tuple[ObjectCopy, ...]
    moves: tuple[BlockMove, ...] = ()
    checksums: bytes = b""  # of the grant, as `AcquireReply` has them


@dataclass(frozen=True, slots=True)
class StoreOp:
    """Copy the engine's blocks into the objects' extents; each object succeeds or fails alone."""

    op_id: int
    arena_id: int
    extents: bytes
    objects: tuple[ObjectCopy, ...]


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """How one layer's blocks lie in memory on one rank. All of it is part of the namespace."""

    name: str
    group: int
    dtype: str
    block_shape: tuple[int, ...]  # of one engine block
    block_order: tuple[int, ...]  # its dimensions, the one of the largest stride first: as its bytes are stored
    block_bytes: int  # without padding
    spec: str  # the engine's description of the layer's cache
