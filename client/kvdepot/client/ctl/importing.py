"""What an export has, into the depot's RAM."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from kvdepot.client.ctl.exporting import GROUP_BYTES, LATER_SECONDS, TOLD_SECONDS
from kvdepot.core.calls import CommitOutcome, ReserveOutcome
from kvdepot.core.errors import InvalidArgument, KvDepotError, StoresOff
from kvdepot.core.keys import check_sizes
from kvdepot.core.limits import RESERVED_PER_CALL_MAX
from kvdepot.proto import codec

if TYPE_CHECKING:
    from kvdepot.client.bulk import BulkEngine, Granted
    from kvdepot.core.export_file import ExportedObject, ExportReader
    from kvdepot.core.keys import NamespaceSpec

GROUP_SECONDS: Final = 10.0
_PAUSE_SECONDS: Final = 0.05


@dataclass(frozen=True, slots=True)
class ImportProgress:
    """Objects, and bytes of the payloads of what was imported.

    `present`: the daemon has them, or they were just being written. `refused` and `damaged`: by reason; `cut_short`:
    why the file has no end.
    """

    planned: int  # that the export began with
    imported: int = 0
    imported_bytes: int = 0
    present: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    damaged: dict[str, int] = field(default_factory=dict)
    cut_short: str = ""
    finished: bool = False
    reason: str = ""  # the daemon's, of the latest refusal

    @property
    def whole(self) -> bool:
        return self.finished and not (self.refused or self.damaged or self.cut_short)


def spec_of(reader: ExportReader) -> NamespaceSpec:
    """Return the file's namespace. Raise KvDepotError if the file contradicts itself."""
    try:
        spec = codec.decode_spec(reader.head.spec)
        check_sizes(spec)
    except KvDepotError as error:
        raise InvalidArgument(f"the file's head: {error}") from error
    if spec.namespace_id() != reader.head.namespace_id:
        raise InvalidArgument(
            f"the file's head: its fields are those of namespace {spec.namespace_id().hex()}, "
            f"not of {reader.head.namespace_id.hex()}"
        )
    return spec


def check(reader: ExportReader, spec: NamespaceSpec) -> Generator[ImportProgress, None, None]:
    """Read the file and compare its checksums, without a daemon. `present` counts whole objects."""
    progress = ImportProgress(reader.head.objects)
    told = time.monotonic()
    for _ in reader.objects(spec.object_bytes):
        progress = replace(progress, present=progress.present + 1)
        if time.monotonic() - told >= TOLD_SECONDS:
            told = time.monotonic()
            yield progress
    yield _ended(progress, reader)


class Importer:
    """One import. What it has brought is there when it ends early; run again, it passes over that."""

    def __init__(self, engine: BulkEngine, reader: ExportReader) -> None:
        self._engine = engine
        self._reader = reader
        self._progress = ImportProgress(reader.head.objects)

    def run(self) -> Generator[ImportProgress, None, None]:
        """Import the file. Raise OSError of the file, KvDepotError of the daemon."""
        told = time.monotonic()
        for group in _groups(self._reader.objects(self._engine.spec.object_bytes)):
            self._place(group)
            if time.monotonic() - told >= TOLD_SECONDS:
                told = time.monotonic()
                yield self._progress
        yield _ended(self._progress, self._reader)

    def _place(self, group: list[ExportedObject]) -> None:
        """Store a group. Ask again for objects beyond credit or room after the granted ones are committed."""
        until = time.monotonic() + LATER_SECONDS
        while group:
            outcomes, granted, reason = self._engine.reserve([one.name for one in group])
            if reason and set(outcomes) == {ReserveOutcome.REFUSED}:
                raise StoresOff(f"nothing is stored: {reason}", advice="`kvdepotctl status`")
            if granted is not None:
                self._store(group, granted)
                until = time.monotonic() + LATER_SECONDS
            self._note(outcomes, reason)
            late = [one for one, outcome in zip(group, outcomes, strict=True) if outcome is ReserveOutcome.LATER]
            if late and time.monotonic() >= until:
                self._refuse("later", len(late))
                return
            if late and granted is None:
                self._engine.pause(_PAUSE_SECONDS)
            group = late

    def _note(self, outcomes: list[ReserveOutcome], reason: str) -> None:
        there = outcomes.count(ReserveOutcome.PRESENT) + outcomes.count(ReserveOutcome.PENDING)
        progress = self._progress
        self._progress = replace(progress, present=progress.present + there, reason=reason or progress.reason)
        for outcome in outcomes:
            if outcome in (ReserveOutcome.NO_ROOM, ReserveOutcome.NO_PARENT, ReserveOutcome.REFUSED):
                self._refuse(outcome.name.lower())

    def _store(self, group: list[ExportedObject], granted: Granted) -> None:
        written = [index for index in granted.indices if self._engine.write(granted, index, group[index].payload)]
        outcomes = self._engine.commit(granted, written)
        if len(written) < len(granted.indices):
            self._refuse("not_written", len(granted.indices) - len(written))
        for index, outcome in zip(written, outcomes, strict=True):
            if outcome is not CommitOutcome.COMMITTED:
                self._refuse(outcome.name.lower())
                continue
            progress, size_bytes = self._progress, len(group[index].payload)
            self._progress = replace(
                progress, imported=progress.imported + 1, imported_bytes=progress.imported_bytes + size_bytes
            )

    def _refuse(self, reason: str, count: int = 1) -> None:
        refused = dict(self._progress.refused)
        refused[reason] = refused.get(reason, 0) + count
        self._progress = replace(self._progress, refused=refused)


def _ended(progress: ImportProgress, reader: ExportReader) -> ImportProgress:
    damaged = {damage.value: count for damage, count in reader.damaged.items()}
    cut_short = reader.cut_short or ("" if reader.end is not None else "it ends before its end")
    return replace(progress, damaged=damaged, cut_short=cut_short, finished=True)


def _groups(objects: Iterator[ExportedObject]) -> Iterator[list[ExportedObject]]:
    """None waits for long for the rest of it: a request that stores nothing for a minute is over for the daemon."""
    group: list[ExportedObject] = []
    size_bytes, began = 0, time.monotonic()
    for one in objects:
        old = time.monotonic() - began > GROUP_SECONDS
        if group and (old or size_bytes + len(one.payload) > GROUP_BYTES or len(group) >= RESERVED_PER_CALL_MAX):
            yield group
            group, size_bytes = [], 0
        if not group:
            began = time.monotonic()
        group.append(one)
        size_bytes += len(one.payload)
    if group:
        yield group
