"""What an opening tells, taken in slice by slice, while what is served already stays served.

Objects are matched by sequence: those that are known keep their handles, new ones get some,
and what the index does not know any more is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from kvdepot.core.allocator import Extent
from kvdepot.server.tiers.base import Found
from kvdepot.server.tiers.disk.layout import DiskLayout
from kvdepot.server.tiers.disk.medium import Medium
from kvdepot.server.tiers.disk.messages import Opened
from kvdepot.server.tiers.disk.records import SEQUENCE_BITS, Put

_U64 = npt.NDArray[np.uint64]


class Reopening:
    """One opening, from the request to its end. `found` and `lost` go to the engine."""

    def __init__(
        self, medium: Medium, found: Callable[[Sequence[Found]], None], lost: Callable[[Sequence[int]], None]
    ) -> None:
        self._medium = medium
        self._found = found
        self._lost = lost
        self._streamed: npt.NDArray[np.bool_] = np.zeros(medium.catalog.handles_max, np.bool_)
        self._handles: npt.NDArray[np.int64] = np.flatnonzero(medium.catalog.sequences)
        order = np.argsort(medium.catalog.sequences[self._handles])
        self._handles = self._handles[order]
        self._sequences: _U64 = medium.catalog.sequences[self._handles]
        self._died: list[int] = []
        self._unplaced = 0
        self.facts: Opened | None = None

    def begin(self) -> tuple[Extent, ...]:
        """What is to be claimed whatever the index says."""
        return tuple(self._medium.space.reopen())

    def opened(self, facts: Opened) -> None:
        medium = self._medium
        self.facts = facts
        medium.layout = DiskLayout.plan(
            medium.config.capacity_bytes, medium.config.quarantine_bytes, facts.segment_bytes
        )
        medium.space.resize(
            medium.layout.data_bytes, min(facts.segments * facts.segment_bytes, medium.layout.data_bytes)
        )

    def objects(self, puts: Sequence[Put]) -> None:
        slice_found = []
        for put, known in zip(puts, self._known(puts), strict=True):
            if self._medium.space.stream(put.sequence):
                continue  # dropped while its KILL could not be appended
            if known >= 0:
                self._streamed[known] = True
            elif self._medium.catalog.full:
                self._unplaced += 1
                self._medium.space.retire(put.sequence, put.fragments)
                self._died.append(put.sequence)
            else:
                handle = self._medium.catalog.add(put)
                self._streamed[handle] = True
                slice_found.append(Found(handle, put.name))
        if slice_found:
            self._found(slice_found)

    def dropped(self, handle: int, sequence: int) -> None:
        """An object left meanwhile: the engine dropped it, or it is damaged."""
        if self._streamed[handle]:
            self._streamed[handle] = False
            self._died.append(sequence)

    def finish(self) -> list[int]:
        """The new allocator counts. Answers the sequences whose KILL is to be appended."""
        medium = self._medium
        gone = [handle for handle in self._handles.tolist() if handle in medium.catalog and not self._streamed[handle]]
        for handle in gone:
            medium.unindex(handle, "lost", "index")
        if gone:
            self._lost(gone)
        assert self.facts is not None
        medium.sequence = max(medium.sequence, self.facts.generation << SEQUENCE_BITS)
        medium.budget.recover(self.facts.day, self.facts.day_bytes)
        medium.quarantine.recover(self.facts.quarantined)
        return medium.space.finish(self._died)

    def _known(self, puts: Sequence[Put]) -> list[int]:
        """The handle of each that was served before and still is; else -1."""
        if not len(self._sequences):
            return [-1] * len(puts)
        wanted = np.array([put.sequence for put in puts], np.uint64)
        at = np.minimum(np.searchsorted(self._sequences, wanted), len(self._sequences) - 1)
        handles = self._handles[at]
        same = (self._sequences[at] == wanted) & (self._medium.catalog.sequences[handles] == wanted)
        known: list[int] = np.where(same, handles, -1).tolist()
        return known
