"""What an opening tells, taken in slice by slice, while what is served already stays served.

Objects are matched by sequence: those that are known keep their handles, new ones get some,
and what the index does not know any more is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt
from kvdepot.server.storage.found import FoundObjects
from kvdepot.server.tiers.disk.columns import Numbers, PutColumns, Words
from kvdepot.server.tiers.disk.layout import DiskLayout
from kvdepot.server.tiers.disk.medium import Medium
from kvdepot.server.tiers.disk.messages import Open, Opened
from kvdepot.server.tiers.disk.records import SEQUENCE_BITS

LOST_AT_ONCE: Final = 512
"""Objects that the engine is told are lost in one callback: some 5 ms."""


class Reopening:
    """One opening, from the request to its end. `found` and `lost` go to the engine."""

    def __init__(
        self, medium: Medium, found: Callable[[FoundObjects], None], lost: Callable[[Sequence[int]], None]
    ) -> None:
        self._medium = medium
        self._found = found
        self._lost = lost
        self._streamed: npt.NDArray[np.bool_] = np.zeros(medium.catalog.handles_max, np.bool_)
        self._handles: Numbers = np.flatnonzero(medium.catalog.sequences)
        order = np.argsort(medium.catalog.sequences[self._handles])
        self._handles = self._handles[order]
        self._sequences: Words = medium.catalog.sequences[self._handles]
        self._died: set[int] = set()
        self._gone: list[tuple[int, int]] | None = None  # (handle, sequence) of what is yet to be told, the next last
        self.facts: Opened | None = None

    def begin(self, making: int) -> Open:
        """Return the request: what is held whatever the index says, and the segment that a worker may be making."""
        self._medium.quarantine.look()
        return replace(self._medium.space.reopen(), making=making)

    def opened(self, facts: Opened) -> None:
        medium = self._medium
        self.facts = facts
        medium.layout = DiskLayout.plan(
            medium.config.capacity_bytes, medium.config.quarantine_bytes, facts.segment_bytes
        )
        medium.space.resize(
            medium.layout.data_bytes, min(facts.segments * facts.segment_bytes, medium.layout.data_bytes)
        )
        medium.space.overtake(facts.overtaken)

    def objects(self, puts: PutColumns) -> None:
        medium = self._medium
        dying = medium.space.stream(puts.sequences)  # dropped while its KILL could not be appended
        known = self._known(puts.sequences)
        self._streamed[known[~dying & (known >= 0)]] = True
        new = np.flatnonzero(~dying & (known < 0))
        self._without_place(puts.select(new[medium.catalog.room :]))
        placed = puts.select(new[: medium.catalog.room])
        if not len(placed):
            return
        handles = medium.catalog.add_many(placed)
        self._streamed[handles] = True
        fields = placed.fields
        self._found(
            FoundObjects(
                handles, fields["namespace"], fields["key"], fields["parent"], fields["kind"],
                fields["boundary_tokens"], fields["raw_bytes"],
            )
        )  # fmt: skip

    def _without_place(self, puts: PutColumns) -> None:
        for put in puts:
            self._medium.space.retire(put.sequence, put.fragments)
            self._died.add(put.sequence)

    def dropped(self, handle: int, sequence: int) -> None:
        """Take note that an object was dropped meanwhile, by the engine or because of damage."""
        if self._streamed[handle]:
            self._streamed[handle] = False
            self._died.add(sequence)

    @property
    def complete(self) -> bool:
        """Return whether all has been streamed, and some of what is lost is yet to be reported."""
        return self._gone is not None

    def lose(self) -> bool:
        """Report a slice of what the index has lost, once all has been streamed. Return whether it was the last slice.

        The ends of paths come first. So an object that the engine drops because another one is lost is not reported
        later.
        """
        catalog = self._medium.catalog
        if self._gone is None:
            known = self._handles[~self._streamed[self._handles]]
            gone = catalog.ends_last(known[catalog.sequences[known] != 0])
            self._gone = list(zip(gone.tolist(), catalog.sequences[gone].tolist(), strict=True))
        told: list[int] = []
        while self._gone and len(told) < LOST_AT_ONCE:
            handle, sequence = self._gone.pop()
            if catalog.sequence(handle) == sequence:  # else the engine has dropped it in between
                self._medium.unindex(handle, "lost", "index")
                told.append(handle)
        if told:
            self._lost(told)
        return not self._gone

    def finish(self) -> list[int]:
        """Switch to the new allocator. Return the sequences whose KILL is to be appended."""
        medium = self._medium
        assert self.facts is not None
        medium.sequence = max(medium.sequence, self.facts.generation << SEQUENCE_BITS)
        medium.guard.call("the write budget", medium.budget.recover, self.facts.day, self.facts.day_bytes)
        medium.quarantine.recover(self.facts.quarantined)
        return medium.space.finish(self._died)

    def _known(self, wanted: Words) -> Numbers:
        """Return the handle of each write that was served before and still is; -1 for others."""
        if not len(self._sequences):
            return np.full(len(wanted), -1, np.int64)
        at = np.minimum(np.searchsorted(self._sequences, wanted), len(self._sequences) - 1)
        handles = self._handles[at]
        same = (self._sequences[at] == wanted) & (self._medium.catalog.sequences[handles] == wanted)
        return np.where(same, handles, -1)
