"""Messages between the daemon and its checksum worker, over a socketpair of streams.

A job: total length (u32), row (u32), generation (u64), extents of the stored object (u32; 0: no comparison, all are of
the object to sum), runs of elements (u32); then offset and length (u64 each) of every extent in object order, those of
the stored object first; then the runs: bytes of a part (u64), parts (u32), number of the type (u32).

An answer: row, tag (u32), generation, and 16 bytes. SUM: the two halves of the XXH3-128. SAME, DRIFTED: how many slices
were measured and how many of them were over tolerance (u32 each), the distance of the furthest (f64).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

from kvdepot.core.elements import ELEMENT_BYTES, OPAQUE, ElementRun

Extents = Sequence[tuple[int, int]]

JOB_HEADER = struct.Struct("<IIQII")
EXTENT = struct.Struct("<QQ")
RUN = struct.Struct("<QII")
ANSWER = struct.Struct("<IIQ16s")
HALVES = struct.Struct("<QQ")
MEASURED = struct.Struct("<IId")
SUM, SAME, DRIFTED = range(3)
JOB_BYTES_MAX = JOB_HEADER.size + EXTENT.size * (1 << 20)
_TYPES: Final = (OPAQUE, *ELEMENT_BYTES)
"""By number: both ends are of one version."""


def pack_job(row: int, generation: int, extents: Extents) -> bytes:
    return _packed(row, generation, extents, 0, ())


def pack_comparison(
    row: int, generation: int, stored: Extents, recomputed: Extents, runs: Sequence[ElementRun]
) -> bytes:
    return _packed(row, generation, (*stored, *recomputed), len(stored), runs)


def _packed(row: int, generation: int, extents: Extents, stored: int, runs: Sequence[ElementRun]) -> bytes:
    numbers = ((run.part_bytes, run.parts, _TYPES.index(run.dtype) if run.dtype in _TYPES else 0) for run in runs)
    body = b"".join((*(EXTENT.pack(*extent) for extent in extents), *(RUN.pack(*run) for run in numbers)))
    return JOB_HEADER.pack(JOB_HEADER.size + len(body), row, generation, stored, len(runs)) + body


def unpack_comparison(body: bytes, stored: int, runs: int) -> tuple[Extents, Extents, list[ElementRun]]:
    """(extents of the stored object, of the other one, runs)."""
    cut = len(body) - runs * RUN.size
    extents = list(EXTENT.iter_unpack(body[:cut]))
    found = [ElementRun(_TYPES[number], size, parts) for size, parts, number in RUN.iter_unpack(body[cut:])]
    return extents[:stored], extents[stored:], found
