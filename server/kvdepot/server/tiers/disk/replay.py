"""What a snapshot and its journals say is on the medium (docs/formats/disk.md, Replay). A pure function over bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from kvdepot.server.tiers.disk.records import (
    JOURNAL_HEADER_BYTES,
    SNAPSHOT_HEADER_BYTES,
    SYNCED,
    BadFile,
    BadRecord,
    Mark,
    Put,
    RecordType,
    SnapshotHeader,
    check_journal_header,
    unpack_record,
    unpack_snapshot_header,
)

_DAY_SECONDS: Final = 86_400


@dataclass(slots=True)
class Replayed:
    """`live` by sequence. `stopped` says where and why the replay ended early, empty when it did not."""

    live: dict[int, Put] = field(default_factory=dict)
    closed: bool = False  # the last journal ends with a synced CLOSE
    stopped: str = ""
    synced_sequence: int = 0
    highest_sequence: int = 0
    scrub_position: int = 0
    day: int = 0  # unix days, of the newest PUT
    day_bytes: int = 0
    overlapped: int = 0  # writes ended by a later PUT over their bytes, without a KILL


def replay(snapshot: bytes | None, journals: Sequence[tuple[int, bytes]], store_id: bytes, generation: int) -> Replayed:
    """Replay journals (generation, bytes), in order, over the snapshot of `generation`.

    Raises BadFile when the snapshot is not complete: the caller then has another one, or none.
    """
    found = _Replay(store_id)
    if snapshot is not None:
        found.take_snapshot(memoryview(snapshot), generation)
    for number, data in journals:
        if not found.take_journal(memoryview(data), number):
            break
    return found.finish()


class _Replay:
    def __init__(self, store_id: bytes) -> None:
        self._store_id = store_id
        self._puts: dict[int, Put] = {}  # every write seen, dead ones too: they overwrote what was there before
        self._dead: set[int] = set()
        self._result = Replayed()

    def take_snapshot(self, data: memoryview, generation: int) -> None:
        header = unpack_snapshot_header(data, self._store_id, generation)
        at, count = SNAPSHOT_HEADER_BYTES, 0
        while at < len(data):
            try:
                record, at = unpack_record(data, at)
            except BadRecord as error:
                raise BadFile(f"record {count}: {error}") from error
            if isinstance(record, Mark) or record.generation > generation or record.sequence in self._puts:
                raise BadFile(f"record {count} does not belong into a snapshot")
            self._puts[record.sequence] = record
            count += 1
        if count != header.records:
            raise BadFile(f"{count} records instead of {header.records}")
        self._start_with(header)

    def _start_with(self, header: SnapshotHeader) -> None:
        result = self._result
        result.synced_sequence = header.synced_sequence
        result.highest_sequence = max(header.highest_sequence, max(self._puts, default=0))
        result.scrub_position = header.scrub_position
        result.day, result.day_bytes = header.day, header.day_bytes

    def take_journal(self, data: memoryview, generation: int) -> bool:
        """Whether the next journal may follow."""
        self._result.closed = False
        at = JOURNAL_HEADER_BYTES
        try:
            check_journal_header(data, self._store_id, generation)
            while at < len(data):
                record, at = self._next(data, at, generation)
                if isinstance(record, Put):
                    self._put(record)
                elif record.type is RecordType.CLOSE:
                    return self._close(record, len(data) - at, generation)
                else:
                    self._mark(record)
        except (BadFile, BadRecord) as error:
            self._result.stopped = f"journal {generation} at byte {at}: {error}"
        return False

    def _next(self, data: memoryview, at: int, generation: int) -> tuple[Put | Mark, int]:
        record, end = unpack_record(data, at)
        if record.generation != generation:
            raise BadRecord(f"is of generation {record.generation}")
        if isinstance(record, Put) and record.sequence in self._puts:
            raise BadRecord(f"repeats sequence {record.sequence}")
        return record, end

    def _put(self, put: Put) -> None:
        result = self._result
        self._puts[put.sequence] = put
        result.highest_sequence = max(result.highest_sequence, put.sequence)
        day = put.created_at // _DAY_SECONDS
        if day > result.day:
            result.day, result.day_bytes = day, 0
        if day == result.day:
            result.day_bytes += put.medium_bytes

    def _mark(self, mark: Mark) -> None:
        if mark.type is RecordType.SCRUB:
            self._result.scrub_position = mark.sequence
        else:
            self._dead.add(mark.sequence)
            self._result.highest_sequence = max(self._result.highest_sequence, mark.sequence)

    def _close(self, mark: Mark, left_bytes: int, generation: int) -> bool:
        self._result.highest_sequence = max(self._result.highest_sequence, mark.sequence)
        if left_bytes:
            self._result.stopped = f"journal {generation}: {left_bytes} bytes behind its end"
            return False
        self._result.closed = bool(mark.flags & SYNCED)
        return True

    def finish(self) -> Replayed:
        result = self._result
        buried = self._overwritten()
        newest: dict[tuple[bytes, bytes, int], int] = {}
        for sequence in sorted(self._puts):
            if sequence in self._dead or sequence in buried:
                continue
            name = self._puts[sequence].name
            newest[name.namespace, name.key, name.kind] = sequence
        result.live = {sequence: self._puts[sequence] for sequence in sorted(newest.values())}
        result.overlapped = len(buried - self._dead)
        return result

    def _overwritten(self) -> set[int]:
        """Writes of which a later one has overwritten something. Paint in order of sequence, see who is still whole."""
        sequences = sorted(self._puts)
        flat = [
            (address, address + length, owner)
            for owner, sequence in enumerate(sequences)
            for address, length in self._puts[sequence].fragments
        ]
        starts, ends, owners = np.array(flat, np.int64).reshape(-1, 3).T
        edges = np.unique(np.concatenate((starts, ends)))
        first, last = np.searchsorted(edges, starts).tolist(), np.searchsorted(edges, ends).tolist()
        cells = np.full(len(edges), -1, np.int64)
        for low, high, owner in zip(first, last, owners.tolist(), strict=True):
            cells[low:high] = owner
        return {
            sequences[owner]
            for low, high, owner in zip(first, last, owners.tolist(), strict=True)
            if cells[low] != owner or (high - low > 1 and (cells[low:high] != owner).any())
        }
