"""Summaries: Bloom filters of the chunks that a source can lend (ADR 85).

The process that sends makes them of the words that its daemon gathered. A reader believes nothing of them but "ask
there". So only sizes are checked, and how many bits are set.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Final

import xxhash
from kvdepot.server.io.peer_wire import SUMMARY_BYTES_MAX, Summary, SummaryWords
from rbloom import Bloom

_BITS_EACH: Final = 10
"""Of each chunk: 0.8 % of other names count as there. With more chunks than there is room for, it is more."""
_BITS_EACH_MIN: Final = 2
"""The size that the filter of too many chunks is made for. With fewer bits rbloom would use no hash at all."""
_CHUNKS_MIN: Final = 16
"""The filter of fewer has the size of so many."""
_BITS_MAX: Final = 8 * (SUMMARY_BYTES_MAX - 8)
"""rbloom may take a few more than it is told."""
_PIECE: Final = 1 << 14
"""Words that are added at once, in 4 ms. Other threads wait as long."""
_WORD_BYTES: Final = 8
_K_BYTES: Final = 8
"""`Bloom.save_bytes` begins with the number of hashes."""
FULL: Final = 0.75
"""A filter with more bits set says nothing: each name seems to be there. 11 million chunks set so many."""


def summary_of(words: Sequence[bytes], arena_id: int) -> Summary:
    """Return the summary of these words (u64). A chunk that comes several times counts as several."""
    chunks = sum(map(len, words)) // _WORD_BYTES
    bits = min(max(chunks, _CHUNKS_MIN) * _BITS_EACH, _BITS_MAX)
    size = min(max(chunks, _CHUNKS_MIN), bits // _BITS_EACH_MIN)
    bloom = Bloom(size, math.exp(-bits / size * math.log(2) ** 2), int)
    for piece in words:
        numbers = memoryview(piece).cast("Q")
        for start in range(0, len(numbers), _PIECE):
            bloom.update(numbers[start : start + _PIECE].tolist())
    saved = bloom.save_bytes()
    hashes = int.from_bytes(saved[:_K_BYTES], "little")
    return Summary(arena_id, xxhash.xxh3_64_intdigest(saved) or 1, chunks, hashes, saved[_K_BYTES:])


class Filter:
    """What a reader has of a summary."""

    def __init__(self, summary: Summary) -> None:
        """Take a summary, whose sizes were checked. Raise ValueError if too many bits are set."""
        set_bits = int.from_bytes(summary.bits, "little").bit_count()
        filled = set_bits / (8 * len(summary.bits))
        if filled > FULL:
            raise ValueError(f"{filled:.0%} of its bits are set, and a summary has at most {FULL:.0%}")
        self.version = summary.version
        self.by_chance = filled**summary.hashes
        """The part of names that only seem to be there."""
        self._bloom = Bloom.load_bytes(summary.hashes.to_bytes(_K_BYTES, "little") + summary.bits, int)

    def has(self, words: list[int]) -> list[bool]:
        """Return for each word whether it may be there."""
        bloom = self._bloom
        return [word in bloom for word in words]

    def leading(self, words: list[int]) -> int:
        """Return how many of the first words may be there."""
        bloom = self._bloom
        return next((count for count, word in enumerate(words) if word not in bloom), len(words))


class Summaries:
    """The latest summary of each tenant, in the process that sends. Made when it is asked for."""

    def __init__(self) -> None:
        self._making = threading.Lock()
        self._coming: dict[int, list[bytes]] = {}  # words, of which more will come
        self._come: dict[int, list[bytes]] = {}
        self._made: dict[int, Summary] = {}

    def take(self, words: SummaryWords) -> None:
        """Note what the daemon sends. All of it comes before the daemon says that it is there."""
        if words.first:
            self._coming[words.tenant] = []
        self._coming[words.tenant].append(words.words)
        if words.last:
            self._come[words.tenant] = self._coming.pop(words.tenant)

    def of(self, tenant: int, arena_id: int) -> Summary:
        """Return the latest summary. Takes 0.4 s for a million chunks, and the threads that want it wait."""
        with self._making:
            words = self._come.pop(tenant, None)
            if words is not None:
                self._made[tenant] = summary_of(words, arena_id)
            return self._made[tenant]
