"""What reading, writing and opening a disk tier share: its parts, and how an object ends."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvdepot.core.calls import Kind
from kvdepot.core.objectfile import ObjectName, object_bytes
from kvdepot.server.io.jobs import Part
from kvdepot.server.platform.guard import Guard
from kvdepot.server.platform.logs import EVENTS
from kvdepot.server.storage.base import IoOutcome
from kvdepot.server.tiers.budget import DailyBudget
from kvdepot.server.tiers.disk.catalog import Catalog
from kvdepot.server.tiers.disk.config import DiskConfig
from kvdepot.server.tiers.disk.journal import Journal
from kvdepot.server.tiers.disk.layout import DiskLayout
from kvdepot.server.tiers.disk.quarantine import QuarantineRoom
from kvdepot.server.tiers.disk.records import Mark, RecordType
from kvdepot.server.tiers.disk.space import Space
from kvdepot.server.tiers.workers import Workers


@dataclass(slots=True)
class Medium:
    """The parts of one disk tier, which reading, writing and opening share."""

    config: DiskConfig
    layout: DiskLayout
    catalog: Catalog
    space: Space
    journal: Journal
    data: Workers
    quarantine: QuarantineRoom
    budget: DailyBudget
    wall_clock: Callable[[], float]
    freed: Callable[[], None]  # there may be room for a write that waits
    unindexed: Callable[[int, int], None]  # told (handle, sequence) of what is served no more
    guard: Guard
    events: logging.Logger = field(default_factory=lambda: logging.getLogger(EVENTS))
    sequence: int = 0  # of the next write

    def take_sequence(self) -> int:
        self.sequence += 1
        return self.sequence - 1

    def parts(self, handle: int) -> tuple[Part, ...]:
        return self.layout.parts(self.catalog.fragments(handle), object_bytes(self.catalog.stored_bytes(handle)))

    def unindex(self, handle: int, event: str, reason: str = "") -> int:
        """Serve an object no more. Return its sequence. `kill` is due.

        The event comes before the KILL. So a reader of the events never misses an object of which no event told.
        """
        sequence = self.catalog.sequence(handle)
        if self.telling:
            self.tell(event, sequence, self.catalog.name(handle), reason)
        self.space.retire(sequence, self.catalog.fragments(handle))
        self.catalog.remove(handle)
        self.unindexed(handle, sequence)
        return sequence

    def kill(self, sequence: int) -> None:
        """Append the KILL. The bytes are free when that is done and nobody reads them.

        If the append fails, the next opening does it.
        """

        def appended(outcome: IoOutcome) -> None:
            if outcome is IoOutcome.OK:
                self.space.killed(sequence)
                self.freed()

        self.journal.append(Mark(RecordType.KILL, sequence, self.journal.generation), appended)

    def kill_all(self, sequences: Sequence[int]) -> None:
        for sequence in sequences:
            self.kill(sequence)

    @property
    def telling(self) -> bool:
        """Whether anybody reads the events: without a reader, not even the name is made."""
        return self.events.isEnabledFor(logging.DEBUG)

    def tell(self, event: str, sequence: int, name: ObjectName, reason: str = "") -> None:
        if self.telling:
            self.guard.call("telling an event", self._tell, event, sequence, name, reason)

    def _tell(self, event: str, sequence: int, name: ObjectName, reason: str) -> None:
        self.events.debug(
            "%s tier=%s sequence=%d key=%s kind=%s%s",
            event, self.config.name, sequence, name.key.hex(), Kind(name.kind).name.lower(),
            f" reason={reason}" if reason else "",
        )  # fmt: skip
