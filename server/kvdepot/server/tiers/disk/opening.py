"""What the opening process does with each request; free of processes, so that tests and offline verbs call it too.

Blocking. Answers are yielded, in the order in which the daemon needs them.
"""

from __future__ import annotations

import errno
import secrets
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from kvdepot.core.errors import ConfigError
from kvdepot.server.platform.durable_files import naming
from kvdepot.server.platform.file_room import explained
from kvdepot.server.storage.base import IoOutcome
from kvdepot.server.tiers.disk import layout as names
from kvdepot.server.tiers.disk.columns import Flags, PutColumns, Words
from kvdepot.server.tiers.disk.held import HeldPlaces, settle
from kvdepot.server.tiers.disk.layout import DiskLayout, Store
from kvdepot.server.tiers.disk.messages import (
    Compact,
    Compacted,
    Done,
    Failed,
    Message,
    Opened,
    Sync,
    Synced,
    claims_of,
    objects_of,
)
from kvdepot.server.tiers.disk.messages import Open as OpenRequest
from kvdepot.server.tiers.disk.records import BadFile
from kvdepot.server.tiers.disk.recovery import (
    Index,
    SnapshotFacts,
    compact,
    complete_segments,
    make_store,
    read_index,
    read_store,
    remove_temporaries,
    sizes_of,
    sync_segments,
    write_generation,
)

_OUTCOMES = {
    errno.ENOENT: IoOutcome.GONE,
    errno.ENOTDIR: IoOutcome.GONE,
    errno.ESTALE: IoOutcome.GONE,
    errno.EACCES: IoOutcome.UNREADABLE,
    errno.EPERM: IoOutcome.UNREADABLE,
    errno.ENOSPC: IoOutcome.NO_SPACE,
    errno.EDQUOT: IoOutcome.NO_SPACE,
    errno.EROFS: IoOutcome.READ_ONLY,
}


class Opener:
    """One directory, whose locks the caller holds."""

    def __init__(
        self,
        root: Path,
        capacity_bytes: int,
        quarantine_bytes: int,
        random_bytes: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        self._root = root
        self._capacity_bytes = capacity_bytes
        self._quarantine_bytes = quarantine_bytes
        self._random_bytes = random_bytes
        self._store: Store | None = None

    def answer(self, request: OpenRequest | Compact | Sync) -> Iterator[Message]:
        match request:
            case OpenRequest():
                yield from self._open(request)
            case Compact():
                yield self._compact(request)
            case Sync():
                yield self._sync()

    def _open(self, request: OpenRequest) -> Iterator[Message]:
        held = HeldPlaces.of(request.dead, request.writing)
        try:
            before = read_store(self._root)
            if before is not None and request.store_id not in ("", before.store_id.hex()):
                yield Failed(f"{self._root} holds another store than before", IoOutcome.GONE)
                return
            store, layout = self._open_store(before)
            index = read_index(self._root, store, layout)
        except (BadFile, ConfigError) as error:
            yield Failed(f"{self._root}: {error}", IoOutcome.IO_ERROR)
            return
        except OSError as error:
            yield failed(error, self._root)
            return
        overwritten, overtaken = settle(index.puts, held)
        index, held = _without(index, overwritten), held.without(overtaken)
        opened = self._write(store, layout, index, held.end_bytes, request.making)
        yield replace(opened, overtaken=tuple(overtaken.tolist()))
        yield from claims_of(_used_runs(index.puts, held))
        yield from objects_of(index.puts)
        yield Done()

    def _open_store(self, store: Store | None) -> tuple[Store, DiskLayout]:
        layout = self._layout(store)
        if store is None:
            store = make_store(self._root, layout, self._random_bytes)
        for folder in names.FOLDERS:
            with naming("mkdir", self._root / folder):
                (self._root / folder).mkdir(mode=0o700, exist_ok=True)
        self._store = store
        return store, layout

    def _layout(self, store: Store | None) -> DiskLayout:
        segment_bytes = store.segment_bytes if store else None
        return DiskLayout.plan(self._capacity_bytes, self._quarantine_bytes, segment_bytes)

    def _write(self, store: Store, layout: DiskLayout, index: Index, held_end: int, making: int) -> Opened:
        """Make the next generation. Where that fails, what was found is served, and nothing is taken."""
        found = index.replayed
        size_bytes, refused, outcome = 0, "", ""
        segments = layout.segments
        quarantined: tuple[tuple[str, int], ...] = ()
        try:
            quarantined = self._quarantined()
            used_end = max(int(index.puts.places()[1].max(initial=0)), held_end)
            segments = complete_segments(self._root, layout, used_end, making)
            sync_segments(self._root)
            facts = SnapshotFacts(
                found.highest_sequence, found.highest_sequence, found.scrub_position, found.day, found.day_bytes
            )
            size_bytes = write_generation(self._root, store, index.generation, index.puts.packed(), facts)
            remove_temporaries(self._root)
        except OSError as error:
            why = failed(error, self._root)
            refused, outcome = why.reason, why.outcome
        return Opened(
            store.store_id.hex(), store.segment_bytes, segments, index.generation, len(index.puts),
            found.highest_sequence, found.scrub_position, found.day, found.day_bytes, size_bytes,
            quarantined, index.notes, refused, outcome,
        )  # fmt: skip

    def _quarantined(self) -> tuple[tuple[str, int], ...]:
        sizes = sizes_of(self._root / names.QUARANTINE, ".kvd")
        return tuple((f"{names.QUARANTINE}/{path.name}", size_bytes) for path, size_bytes in sizes.items())

    def _compact(self, request: Compact) -> Compacted:
        assert self._store is not None, "compaction before opening"
        try:
            size_bytes = compact(self._root, self._store, request.generation, request.synced_sequence)
        except (OSError, BadFile) as error:
            return Compacted(request.generation, request.synced_sequence, 0, str(error))
        return Compacted(request.generation + 1, request.synced_sequence, size_bytes)

    def _sync(self) -> Synced:
        try:
            sync_segments(self._root)
        except OSError as error:
            return Synced(str(error))
        return Synced()


def _without(index: Index, overwritten: Flags) -> Index:
    count = np.count_nonzero(overwritten)
    if not count:
        return index
    note = f"{count} objects are damaged: the daemon has written in their places, and the journal of that is lost"
    return replace(index, puts=index.puts.select(np.flatnonzero(~overwritten)), notes=(*index.notes, note))


def _used_runs(puts: PutColumns, held: HeldPlaces) -> Words:
    """Return (first byte, bytes) of what is not free, in ascending order. Fragments that touch are one run."""
    starts, ends, _ = puts.places()
    places = np.stack((starts, ends), axis=1)
    others = np.stack((held.starts, held.ends), axis=1)
    places = np.unique(np.concatenate((places, others)), axis=0)
    apart = places[1:, 0] != places[:-1, 1]
    starts = places[np.concatenate(([True], apart))[: len(places)], 0]
    ends = places[np.concatenate((apart, [True]))[-len(places) :] if len(places) else [], 1]
    return np.stack((starts, ends - starts), axis=1).astype(np.uint64)


def failed(error: OSError, root: Path) -> Failed:
    outcome = _OUTCOMES.get(error.errno or 0, IoOutcome.IO_ERROR)
    explained(error)
    return Failed(f"{error.filename or root}: {error.strerror or error}", outcome)
