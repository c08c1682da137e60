"""Runs of bytes by address, from sources to targets: what a device copies in one call or one launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvdepot.client.copy.base import Column


WORDS_BYTES: Final = (8, 4, 2, 1)
"""The sizes of what a kernel moves at once."""


@dataclass(frozen=True, slots=True)
class Runs:
    """Columns of equal length: source addresses, target addresses, bytes. No target is another one's source."""

    sources: Column
    targets: Column
    lengths: Column

    def __len__(self) -> int:
        return len(self.lengths)

    def split(self, count: int) -> Iterator[Runs]:
        """Yield the same runs in order, at most `count` at a time."""
        for begin in range(0, len(self), count):
            part = slice(begin, begin + count)
            yield Runs(self.sources[part], self.targets[part], self.lengths[part])

    @property
    def word_bytes(self) -> int:
        """Return the largest of `WORDS_BYTES` that divides every address and every length."""
        columns = (self.sources, self.targets, self.lengths)
        bits = int(np.bitwise_or.reduce([np.bitwise_or.reduce(column) for column in columns]))
        return min(WORDS_BYTES[0], bits & -bits) if bits else WORDS_BYTES[0]


def address_of(memory: memoryview) -> int:
    """Return the address of the first byte."""
    address: int = np.frombuffer(memory, dtype=np.uint8).ctypes.data
    return address
