"""`kvdepotd fsck`: verifies every object that a disk tier would serve after its next start.

It takes the directory's locks, replays the journal with the tier's own code, and verifies objects as an I/O worker
does. It changes nothing: the daemon quarantines damaged objects when it reads them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from kvdepot.server.io.context import Context
from kvdepot.server.io.jobs import Answer, ReadObject
from kvdepot.server.io.perform import perform
from kvdepot.server.offline.store_files import (
    OfflineRefusalError,
    Quarantined,
    layout_as_found,
    locked,
    quarantine_of,
    store_of,
)
from kvdepot.server.storage.base import DAMAGED, IoOutcome
from kvdepot.server.tiers.disk.layout import DiskLayout, Store
from kvdepot.server.tiers.disk.records import BadFile, Put
from kvdepot.server.tiers.disk.recovery import Index, read_index

FINDINGS_MAX: Final = 1_000
"""Listed one by one; all are counted."""

Progress = Callable[[int, int], None]
"""(objects verified, objects there are), before each."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One object that cannot be served."""

    outcome: IoOutcome
    detail: str
    put: Put
    file: str
    offset: int  # of its header


@dataclass(slots=True)
class Verdict:
    """What fsck found; `findings` holds at most FINDINGS_MAX of what `outcomes` counts."""

    root: Path
    store: Store
    index: Index
    outcomes: Counter[IoOutcome] = field(default_factory=Counter)
    bytes_by_outcome: Counter[IoOutcome] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)
    quarantine: list[Quarantined] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        """Return whether every object is whole, and the index lost only what a crash of the daemon explains."""
        explained = 1 if self.index.replayed.stopped else 0
        return set(self.outcomes) <= {IoOutcome.OK} and len(self.index.notes) <= explained


def check_store(root: Path, progress: Progress | None = None) -> Verdict:
    """Return the verdict on a store. Raise OfflineRefusalError if nothing can be told, and OSError."""
    store = store_of(root)
    layout = layout_as_found(store)
    with locked(root):
        try:
            index = read_index(root, store, layout)
        except BadFile as error:
            raise OfflineRefusalError(f"{root}: {error}") from error
        verdict = Verdict(root, store, index, quarantine=quarantine_of(root))
        _verify(verdict, layout, progress)
    return verdict


def _verify(verdict: Verdict, layout: DiskLayout, progress: Progress | None) -> None:
    """Verify objects in the order of addresses, so that a rotating disk reads sequentially."""
    context = Context(str(verdict.root))
    puts = sorted(verdict.index.puts, key=lambda put: put.fragments)
    try:
        for done, put in enumerate(puts):
            if progress is not None:
                progress(done, len(puts))
            parts = layout.parts(put.fragments, put.medium_bytes)
            answer = _judged(perform(ReadObject(parts, put.name, put.sequence, None), context), put)
            outcome = answer.outcome
            verdict.outcomes[outcome] += 1
            verdict.bytes_by_outcome[outcome] += put.medium_bytes
            if outcome is not IoOutcome.OK and len(verdict.findings) < FINDINGS_MAX:
                verdict.findings.append(Finding(outcome, answer.detail, put, parts[0].file, parts[0].offset))
    finally:
        context.close()


def _judged(answer: Answer, put: Put) -> Answer:
    """Return the outcome of one object, as the tier would judge it."""
    if answer.outcome is IoOutcome.OK and answer.stored_sum != put.stored_sum:
        answer = replace(answer, outcome=IoOutcome.CORRUPT, detail="a whole object, but not the one of the index")
    if put.unproven and answer.outcome in DAMAGED:
        answer = replace(answer, outcome=IoOutcome.TORN)
    return answer
