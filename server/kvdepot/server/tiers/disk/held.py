"""What the daemon holds although no object has it, and what an index says: of two that overlap the later write wins.

An index that has lost records (its journal was deleted, or damaged) brings objects back
whose KILL it has lost as well. The daemon may have written in their places since.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
from kvdepot.core.allocator import Extent
from kvdepot.server.tiers.disk.columns import Flags, Numbers, PutColumns, Words, ranges
from kvdepot.server.tiers.disk.messages import Place

_UNDER_WAY: Final = (1 << 64) - 1
"""For the sequence of a write under way: a worker may still write there, whatever the index says (I6)."""


@dataclass(frozen=True, slots=True)
class HeldPlaces:
    """Places that are not free although no object has them: fragment by fragment, by address. No two overlap."""

    sequences: Words
    starts: Numbers
    ends: Numbers

    @classmethod
    def of(cls, dead: Sequence[Place], writing: Sequence[Extent]) -> Self:
        places = sorted([*dead, *((_UNDER_WAY, *fragment) for fragment in writing)], key=lambda place: place[1])
        starts = np.array([address for _, address, _ in places], np.int64)
        lengths = np.array([length for _, _, length in places], np.int64)
        return cls(np.array([sequence for sequence, _, _ in places], np.uint64), starts, starts + lengths)

    @property
    def end_bytes(self) -> int:
        """Return the byte after the last of them."""
        return int(self.ends.max(initial=0))

    def without(self, sequences: Words) -> HeldPlaces:
        kept = ~np.isin(self.sequences, sequences)
        return HeldPlaces(self.sequences[kept], self.starts[kept], self.ends[kept])


def settle(puts: PutColumns, held: HeldPlaces) -> tuple[Flags, Words]:
    """Compare an index with the held places.

    Return which objects were overwritten by a held place, and the sequences of held places that others have now.
    """
    starts, ends, owners = puts.places()
    first = np.searchsorted(held.ends, starts, side="right")
    counts = np.searchsorted(held.starts, ends, side="left") - first
    theirs, mine = ranges(first, counts), np.repeat(np.arange(len(starts)), counts)
    held_sequences, sequences = held.sequences[theirs], puts.sequences[owners[mine]]
    same = (held_sequences == sequences) & (held.starts[theirs] == starts[mine]) & (held.ends[theirs] == ends[mine])
    overwritten = np.zeros(len(puts), np.bool_)
    overwritten[owners[mine[~same & (held_sequences >= sequences)]]] = True
    later = (held_sequences < sequences) & ~overwritten[owners[mine]]
    return overwritten, np.unique(held_sequences[later])
