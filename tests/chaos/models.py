"""What the engines of a chaos run serve: namespaces of several shapes, and the bytes of each rank's blocks."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
from kvdepot.core.calls import Kind
from kvdepot.core.groups import GroupSpec
from kvdepot.core.keys import NamespaceSpec
from kvdepot.core.planner import Planner

from tests.rigs.known_objects import Known, content

CHUNK_TOKENS = 64
BLOCK_TOKENS = 16
LAYERS = 2
BLOCKS = 128
"""Of each group, on each rank."""
FREED = 0xDB
"""What a block holds that nobody uses. Whoever still reads or writes one after its end is found out."""

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Model:
    """`prompts`: how many there are. `mask` is put over every byte: a small one makes payloads that codecs shrink."""

    spec: NamespaceSpec
    world_size: int
    prompts: int
    mask: int = 0xFF

    @property
    def label(self) -> str:
        return self.spec.label

    @cached_property
    def planner(self) -> Planner:
        return Planner(self.spec.groups, self.spec.chunk_tokens)

    def layer_block_bytes(self, group: int, rank: int) -> int:
        spec = self.spec.groups[group]
        return spec.rank_block_bytes[0 if spec.replicated else rank] // LAYERS

    def part(self, known: Known, group: int, rank: int) -> Bytes:
        """[layers, blocks, bytes] of the rank's part of an object."""
        start, end = self.planner.part_range(known.kind, group, rank)
        whole = content(known, self.planner.object_bytes(known.kind)) & np.uint8(self.mask)
        shape = (LAYERS, self.planner.blocks_in_object(group), self.layer_block_bytes(group, rank))
        return whole[start:end].reshape(shape)


def _model(label: str, groups: tuple[GroupSpec, ...], world_size: int, prompts: int, mask: int = 0xFF) -> Model:
    planner = Planner(groups, CHUNK_TOKENS)
    sizes = {kind: planner.object_bytes(kind) for kind in planner.kinds}
    spec = NamespaceSpec({"model": f'"{label}"'}, CHUNK_TOKENS, groups, sizes, label=label)
    return Model(spec, world_size, prompts, mask)


def _attention(*rank_block_bytes: int, replicated: bool = False) -> GroupSpec:
    return GroupSpec(Kind.ATTENTION, BLOCK_TOKENS, rank_block_bytes=rank_block_bytes, replicated=replicated)


SMALL = _model("small", (_attention(16_384),), 1, 120, mask=0x0F)
HYBRID = _model(
    "hybrid",
    (_attention(16_384, 16_384), GroupSpec(Kind.STATE, CHUNK_TOKENS, rank_block_bytes=(75_004, 75_004))),
    2,
    80,
)
LARGE = _model("large", (_attention(131_072, replicated=True),), 2, 40)
MODELS = {model.label: model for model in (SMALL, HYBRID, LARGE)}
FLEETS = {
    1: ({"engine-small": SMALL, "engine-hybrid": HYBRID, "engine-twin": HYBRID, "engine-large": LARGE},),
    2: (
        {"engine-small": SMALL, "engine-hybrid": HYBRID, "engine-large": LARGE},
        {"engine-other-small": SMALL, "engine-twin": HYBRID},
    ),
}
"""By nodes. Engines share namespaces. Together some 180 MiB: neither RAM nor the disk keeps all of it."""


def describe_difference(found: Bytes, expected: Bytes) -> str:
    """Where two runs of bytes differ first, and what stands there."""
    different = np.flatnonzero(found != expected)
    first = int(different[0])
    there, wanted = (one[first : first + 8].tobytes().hex() for one in (found, expected))
    return (
        f"{len(different)} of {len(found)} bytes differ, the first at {first}: {there} instead of {wanted}"
        f" (freed pattern: {int((found == FREED).sum())},"
        f" zeros: {int((found == 0).sum())}, crc {zlib.crc32(found.tobytes()):08x})"
    )
