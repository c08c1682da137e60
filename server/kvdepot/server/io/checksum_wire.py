"""Messages between the daemon and its checksum worker, over a socketpair of streams.

A job: total length (u32), row (u32), generation (u64), then offset and length (u64 each)
of every extent in object order. An answer: row, generation, and the two halves of the XXH3-128.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

JOB_HEADER = struct.Struct("<IIQ")
EXTENT = struct.Struct("<QQ")
ANSWER = struct.Struct("<I4xQQQ")
JOB_BYTES_MAX = JOB_HEADER.size + EXTENT.size * (1 << 20)


def pack_job(row: int, generation: int, extents: Sequence[tuple[int, int]]) -> bytes:
    body = b"".join(EXTENT.pack(offset, length) for offset, length in extents)
    return JOB_HEADER.pack(JOB_HEADER.size + len(body), row, generation) + body
