"""Objects for the tests of I/O jobs: an arena in memory, a directory, patterns to put in both."""

from __future__ import annotations

import itertools
import mmap
import os
import random
from dataclasses import replace
from functools import cache
from pathlib import Path

from kvdepot.core.allocator import Extent
from kvdepot.core.objectfile import Codec, ObjectName, object_bytes, payload_sum
from kvdepot.server.io.jobs import Part, ReadObject, WriteObject

MIB = 1 << 20
PAGE = 4096
ARENA_BYTES = 32 * MIB
PATTERN = 0xA5
SEGMENT = "segments/00000.seg"


@cache
def pattern(length: int, seed: int) -> bytes:
    """Looks like bf16: incompressible low bytes, few different high ones."""
    draw = random.Random(seed)
    low, high = draw.randbytes(length // 2 + 1), bytes(draw.choices(b"\x3e\x3f\xbf\xbe", k=1024))
    both = bytearray(length + length % 2)
    both[0::2] = low[: len(both) // 2]
    both[1::2] = (high * (length // 2048 + 1))[: len(both) // 2]
    return bytes(both[:length])


def object_name(seed: int, raw_bytes: int) -> ObjectName:
    draw = random.Random(seed)
    return ObjectName(draw.randbytes(16), draw.randbytes(16), draw.randbytes(16), 1, 256 * (seed + 1), raw_bytes)


class IoRig:
    """A shared mapping as an arena, and one segment file in `directory`."""

    def __init__(self, directory: Path, *, segment_bytes: int = 16 * MIB) -> None:
        self.directory = directory
        self.arena_fd = os.memfd_create("arena")
        os.ftruncate(self.arena_fd, ARENA_BYTES)
        self.arena = memoryview(mmap.mmap(self.arena_fd, ARENA_BYTES))
        self.segment = directory / SEGMENT
        self.segment.parent.mkdir(exist_ok=True)
        if segment_bytes:
            with self.segment.open("wb") as segment:
                os.posix_fallocate(segment.fileno(), 0, segment_bytes)
        self._places = itertools.count(0, 4 * MIB)

    def close(self) -> None:
        os.close(self.arena_fd)

    def fill(self, extents: tuple[Extent, ...], data: bytes) -> None:
        at = 0
        for offset, length in extents:
            self.arena[offset : offset + length] = data[at : at + length]
            at += length

    def taken(self, extents: tuple[Extent, ...]) -> bytes:
        return b"".join(self.arena[offset : offset + length] for offset, length in extents)

    def spread(self, raw_bytes: int, fragments: int = 1, start: int = 0) -> tuple[Extent, ...]:
        """Extents of together `raw_bytes`, apart from each other, all but the last of whole pages."""
        share = raw_bytes // fragments // PAGE * PAGE
        lengths = [share] * (fragments - 1) + [raw_bytes - share * (fragments - 1)]
        extents = []
        at = start
        for length in lengths:
            extents.append((at, length))
            at += (length // PAGE + 2) * PAGE
        return tuple(extents)

    def write(
        self, seed: int, raw_bytes: int, codec: Codec = Codec.NONE, *, fragments: int = 1, offset: int = 0
    ) -> WriteObject:
        """A job for a pattern that this puts into the arena."""
        extents = self.spread(raw_bytes, fragments)
        data = pattern(raw_bytes, seed)
        self.fill(extents, data)
        parts = (Part(SEGMENT, offset, object_bytes(raw_bytes)),)
        return WriteObject(
            parts,
            object_name(seed, raw_bytes),
            seed + 7,
            codec,
            1_700_000_000,
            extents,
            payload_sum([data]),
            sync=False,
        )

    def read_of(self, write: WriteObject, *, start: int = 16 * MIB, fragments: int = 1) -> ReadObject:
        """A job that reads it back to elsewhere, where a pattern lies."""
        extents = self.spread(write.name.raw_bytes, fragments, start)
        for offset, length in extents:
            padded = -(-length // PAGE) * PAGE
            self.arena[offset : offset + padded + PAGE] = bytes([PATTERN]) * (padded + PAGE)
        return ReadObject(write.parts, write.name, write.sequence, extents)


def verify_only(read: ReadObject) -> ReadObject:
    return replace(read, extents=None)
