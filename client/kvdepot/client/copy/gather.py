"""Runs within a device's memory, moved by one launch of a Triton kernel. Triton is there wherever vLLM runs on GPUs."""

from __future__ import annotations

from typing import Any, Final

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

PROGRAMS_MAX: Final = 132
"""As many as the largest GPUs of today have processors; a fraction of them saturates a link to the host."""
_CHUNK_WORDS: Final = 1024


# Not compiled again for another count or alignment: that would fall on a request.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["count"], do_not_specialize_on_alignment=["sources", "targets", "lengths"]
)
def _move(sources, targets, lengths, count, WORD_BYTES: tl.constexpr, CHUNK_WORDS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    places = tl.arange(0, CHUNK_WORDS)
    for run in range(tl.program_id(0), count, tl.num_programs(0)):
        if WORD_BYTES == 8:
            source = tl.load(sources + run).to(tl.pointer_type(tl.int64))
            target = tl.load(targets + run).to(tl.pointer_type(tl.int64))
        elif WORD_BYTES == 4:
            source = tl.load(sources + run).to(tl.pointer_type(tl.int32))
            target = tl.load(targets + run).to(tl.pointer_type(tl.int32))
        elif WORD_BYTES == 2:
            source = tl.load(sources + run).to(tl.pointer_type(tl.int16))
            target = tl.load(targets + run).to(tl.pointer_type(tl.int16))
        else:
            source = tl.load(sources + run).to(tl.pointer_type(tl.int8))
            target = tl.load(targets + run).to(tl.pointer_type(tl.int8))
        words = tl.load(lengths + run) // WORD_BYTES
        for begin in range(0, words, CHUNK_WORDS):
            within = begin + places < words
            tl.store(target + begin + places, tl.load(source + begin + places, mask=within), mask=within)


def move(table: Any, count: int, word_bytes: int) -> None:
    """Queue the runs of `table`, int64 [3, count] on the device: source addresses, target addresses, bytes.

    On the calling thread's current stream. `word_bytes` divides all of them: 8, 4, 2 or 1.
    """
    _move[(min(PROGRAMS_MAX, count),)](
        table[0], table[1], table[2], count, WORD_BYTES=word_bytes, CHUNK_WORDS=_CHUNK_WORDS
    )
