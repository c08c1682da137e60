"""What a snapshot and its journals say is on the device (docs/formats/disk.md, Replay). A pure function over bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from kvdepot.server.tiers.disk.columns import (
    Flags,
    Numbers,
    PutColumns,
    Words,
    impossible,
    prefixes,
    refusal,
    split_records,
)
from kvdepot.server.tiers.disk.records import (
    JOURNAL_HEADER_BYTES,
    SNAPSHOT_HEADER_BYTES,
    SYNCED,
    BadFile,
    RecordType,
    SnapshotHeader,
    check_journal_header,
    unpack_snapshot_header,
)

_DAY_SECONDS: Final = 86_400
_CELLS_AT_ONCE: Final = 1 << 20


@dataclass(slots=True)
class Replayed:
    """The result of a replay. `live` is in order of sequence.

    `stopped` says where and why the replay ended early. Empty: it did not.
    """

    live: PutColumns = field(default_factory=PutColumns.none)
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

    Raise BadFile if the snapshot is not complete: the caller then has another one, or none.
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
        self._puts: list[PutColumns] = []  # every write seen, dead ones too: they overwrote what was there before
        self._dead: list[Words] = []
        self._result = Replayed()

    def take_snapshot(self, data: memoryview, generation: int) -> None:
        header = unpack_snapshot_header(data, self._store_id, generation)
        records, stopped = split_records(data, SNAPSHOT_HEADER_BYTES)
        puts = prefixes(records)["type"] == RecordType.PUT
        if puts.all():
            columns = PutColumns.unpacked(records)
            bad = np.flatnonzero(impossible(columns, records))
            if len(bad):
                raise BadFile(f"record {bad[0]}: {refusal(records[bad[0]])}")
            puts = (columns.fields["generation"] <= generation) & ~_repeated(columns.sequences)
        if not puts.all():
            raise BadFile(f"record {np.argmin(puts)} does not belong into a snapshot")
        if stopped:
            raise BadFile(f"record {len(records)}: {stopped}")
        if len(records) != header.records:
            raise BadFile(f"{len(records)} records instead of {header.records}")
        self._puts.append(columns)
        self._start_with(header)

    def _start_with(self, header: SnapshotHeader) -> None:
        result = self._result
        result.synced_sequence = header.synced_sequence
        result.highest_sequence = header.highest_sequence
        self._count_highest(self._puts[-1].sequences)
        result.scrub_position = header.scrub_position
        result.day, result.day_bytes = header.day, header.day_bytes

    def take_journal(self, data: memoryview, generation: int) -> bool:
        """Replay one journal. Return whether the next journal may follow."""
        self._result.closed = False
        at = 0
        try:
            check_journal_header(data, self._store_id, generation)
            at = JOURNAL_HEADER_BYTES
        except BadFile as error:
            self._stop(generation, JOURNAL_HEADER_BYTES, str(error))
            return False
        records, stopped = split_records(data, at)
        heads = prefixes(records)
        is_put = heads["type"] == RecordType.PUT
        sound = heads["generation"] == generation
        put_rows = np.flatnonzero(is_put)
        puts = PutColumns.unpacked([records[row] for row in put_rows.tolist()])
        sound[put_rows] &= ~impossible(puts, [records[row] for row in put_rows.tolist()])
        sound[put_rows] &= ~self._seen(puts.sequences)
        end = int(np.argmin(sound)) if not sound.all() else len(records)
        closes = np.flatnonzero(heads["type"][:end] == RecordType.CLOSE)
        if len(closes):
            end = int(closes[0])
        self._take(heads[:end], puts.select(np.arange(np.searchsorted(put_rows, end))))
        at += int(heads["length"][:end].sum(dtype=np.int64))
        if len(closes):
            return self._close(heads[end], len(data) - at - int(heads["length"][end]), generation)
        if end < len(records):
            stopped = self._why(records[end], heads[end], generation)
        if stopped:
            self._stop(generation, at, stopped)
        return False

    def _seen(self, sequences: Words) -> Flags:
        """Return which of these sequences an earlier PUT has."""
        known = np.concatenate([*(puts.sequences for puts in self._puts), np.empty(0, np.uint64)])
        return _repeated(sequences) | np.isin(sequences, known)

    def _why(self, record: bytes, head: npt.NDArray[Any], generation: int) -> str:
        if head["generation"] != generation:
            return f"is of generation {head['generation']}"
        return refusal(record) or f"repeats sequence {head['sequence']}"

    def _stop(self, generation: int, at: int, why: str) -> None:
        self._result.stopped = f"journal {generation} at byte {at}: {why}"

    def _take(self, heads: npt.NDArray[Any], puts: PutColumns) -> None:
        """Take over the sound part of a journal."""
        result = self._result
        self._puts.append(puts)
        self._count_highest(puts.sequences)
        self._count_day(puts)
        killed = heads["sequence"][heads["type"] == RecordType.KILL]
        self._dead.append(killed)
        self._count_highest(killed)
        scrubbed = heads["sequence"][heads["type"] == RecordType.SCRUB]
        if len(scrubbed):
            result.scrub_position = int(scrubbed[-1])

    def _count_highest(self, sequences: Words) -> None:
        self._result.highest_sequence = max(self._result.highest_sequence, int(sequences.max(initial=0)))

    def _count_day(self, puts: PutColumns) -> None:
        result = self._result
        days = puts.fields["created_at"] // _DAY_SECONDS
        day = int(days.max(initial=0))
        if day > result.day:
            result.day, result.day_bytes = day, 0
        result.day_bytes += int(puts.medium_bytes()[days == result.day].sum())

    def _close(self, head: npt.NDArray[Any], left_bytes: int, generation: int) -> bool:
        self._result.highest_sequence = max(self._result.highest_sequence, int(head["sequence"]))
        if left_bytes:
            self._result.stopped = f"journal {generation}: {left_bytes} bytes after its end"
            return False
        self._result.closed = bool(head["flags"] & SYNCED)
        return True

    def finish(self) -> Replayed:
        result = self._result
        puts = PutColumns.joined([*self._puts, PutColumns.none()])
        puts = puts.select(np.argsort(puts.sequences))
        dead = np.isin(puts.sequences, np.concatenate([*self._dead, np.empty(0, np.uint64)]))
        buried = _overwritten(puts)
        whole = puts.select(np.flatnonzero(~dead & ~buried))
        result.live = whole.select(_newest(whole))
        result.overlapped = int((buried & ~dead).sum())
        return result


def _repeated(sequences: Words) -> Flags:
    """Return which of these appear earlier in the same column."""
    repeated = np.ones(len(sequences), np.bool_)
    repeated[np.unique(sequences, return_index=True)[1]] = False
    return repeated


def _newest(puts: PutColumns) -> Numbers:
    """Return the rows that are the last write of their object, in order of sequence."""
    fields = puts.fields
    names = (fields["kind"], *fields["namespace"].T, *fields["key"].T)
    order = np.lexsort((np.arange(len(puts)), *names))
    last = np.ones(len(order), np.bool_)
    last[:-1] = np.any([name[order][1:] != name[order][:-1] for name in names], axis=0)
    newest: Numbers = np.sort(order[last])
    return newest


def _overwritten(puts: PutColumns) -> Flags:
    """Return which writes were overwritten, in whole or in part, by a later one.

    Paint them in order of sequence, and see which are still whole.
    """
    overwritten = np.zeros(len(puts), np.bool_)
    starts, ends, owners = puts.places()
    order = np.argsort(starts)
    if (ends[order][:-1] <= starts[order][1:]).all():
        return overwritten
    edges = np.unique(np.concatenate((starts, ends)))
    first, last = np.searchsorted(edges, starts), np.searchsorted(edges, ends)
    cells = np.full(len(edges), -1, np.int64)
    for part in _portions(last - first):
        covered, by = _covered(first[part], last[part], owners[part])
        np.maximum.at(cells, covered, by)
    for part in _portions(last - first):
        covered, by = _covered(first[part], last[part], owners[part])
        overwritten[by[cells[covered] != by]] = True
    return overwritten


def _covered(first: Numbers, last: Numbers, owners: Numbers) -> tuple[Numbers, Numbers]:
    """Return (cell, owner) for every cell of every fragment, as columns."""
    counts = last - first
    starts = np.cumsum(counts) - counts
    return np.arange(int(counts.sum())) + np.repeat(first - starts, counts), np.repeat(owners, counts)


def _portions(counts: Numbers) -> list[slice]:
    """Return parts with some _CELLS_AT_ONCE together each. So a few large writes over many small ones fit in memory."""
    portions = np.cumsum(counts) // _CELLS_AT_ONCE
    borders = [0, *(np.flatnonzero(np.diff(portions)) + 1).tolist(), len(counts)]
    return [slice(low, high) for low, high in pairwise(borders)]
