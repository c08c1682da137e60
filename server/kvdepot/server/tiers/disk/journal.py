"""The daemon's end of the journal: what waits to be appended, one append under way, rotation.

After an append that did not end well nobody knows what the file holds at its end: the
journal is broken permanently, and what was not answered has failed. An opening makes the next one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from kvdepot.server.io.jobs import Answer, Append, Priority
from kvdepot.server.platform.guard import Guard
from kvdepot.server.storage.base import IoOutcome
from kvdepot.server.tiers.disk.layout import journal_name
from kvdepot.server.tiers.disk.records import (
    JOURNAL_HEADER_BYTES,
    MARK_BYTES,
    SYNCED,
    Mark,
    Put,
    RecordType,
    pack_journal_header,
    pack_mark,
    pack_put,
)
from kvdepot.server.tiers.workers import Hold, Workers

_BATCH_BYTES: Final = 1 << 20
Done = Callable[[IoOutcome], None]


@dataclass(slots=True)
class _Batch:
    data: bytes
    answers: list[Done]
    closes: bool = False  # ends the file
    refused: tuple[Done, ...] = ()  # their records cannot be packed


class Journal:
    """One file after the other. `closed(generation)`: this one is complete, the next one has begun; compact it.

    `broken(answer)`: called once, after everything that waited was answered.

    An answer that raises costs nobody else his, and a record that cannot be packed fails alone.
    """

    def __init__(
        self, workers: Workers, *, limit_bytes: int, sync: bool,
        closed: Callable[[int], None], broken: Callable[[Answer], None], guard: Guard,
    ) -> None:  # fmt: skip
        self._guard = guard
        self._workers = workers
        self._limit_bytes = limit_bytes
        self._sync = sync
        self._closed = guard.safe("telling that a journal is complete", closed)
        self._broken = guard.safe("telling that the journal is broken", broken)
        self._waiting: deque[tuple[Put | Mark, Done]] = deque()
        self._under_way: _Batch | None = None
        self._held = False  # a worker may still append
        self._store_id = b""
        self._length = 0
        self._highest_sequence = 0
        self._open = False
        self.generation = 0
        self.compacted = True
        """The journal before this one is gone: there is room for another rotation."""

    @property
    def stalled(self) -> bool:
        """Return whether nothing is appended: the journal is full, and the one before it is not compacted yet."""
        return not self.compacted and self._length > self._limit_bytes * 3 // 4

    @property
    def idle(self) -> bool:
        """Return whether no worker appends, and none can any more."""
        return self._under_way is None and not self._held

    def open(self, store_id: bytes, generation: int, limit_bytes: int) -> None:
        """Use a new journal, whose header an opening has written."""
        assert self.idle and not self._waiting
        self._limit_bytes = limit_bytes
        self._store_id = store_id
        self.generation = generation
        self._length = JOURNAL_HEADER_BYTES
        self._open = True
        self.compacted = True

    def append(self, record: Put | Mark, done: Done) -> None:
        """Append a record. If the journal has rotated since it was made, the record gets the next generation.

        `done` gets OK if the record is in the journal. After any other outcome, nobody knows.
        """
        if not self._open:
            done(IoOutcome.CANCELLED)
            return
        self._waiting.append((record, done))
        self._next()

    def close_synced(self, done: Done) -> None:
        """Say that everything is on the device. The last record; the caller has none waiting."""
        if not self._open or not self.idle or self._waiting:
            done(IoOutcome.CANCELLED)
            return
        self._open = False
        self._send(_Batch(self._mark(RecordType.CLOSE, SYNCED), [done]), sync=True)

    def resume(self) -> None:
        """Continue to append: the journal before this one was compacted."""
        self.compacted = True
        self._next()

    def abandon(self) -> None:
        """Append nothing more: an opening makes the next one. What waits has failed."""
        self._open = False
        self._fail(IoOutcome.CANCELLED)

    def _next(self) -> None:
        if not self.idle or not self._waiting or not self._open:
            return
        batch = self._batch()
        if batch.data:
            self._send(batch, sync=self._sync)
        elif self.compacted and self._waiting:
            self._send(_Batch(self._mark(RecordType.CLOSE, 0), [], closes=True), sync=True)
        self._tell(batch.refused, IoOutcome.CANCELLED)

    def _batch(self) -> _Batch:
        """Return the records that fit now. The CLOSE always fits."""
        pieces: list[bytes] = []
        answers: list[Done] = []
        refused: list[Done] = []
        left = min(self._limit_bytes - MARK_BYTES - self._length, _BATCH_BYTES)
        if not self._length:
            pieces.append(pack_journal_header(self._store_id, self.generation))
            left -= JOURNAL_HEADER_BYTES
        while self._waiting:
            record, done = self._waiting[0]
            packed = self._guard.value("packing a record", b"", self._pack, record)
            if len(packed) > left:
                break
            self._waiting.popleft()
            left -= len(packed)
            pieces.append(packed)
            (answers if packed else refused).append(done)
        return _Batch(b"".join(pieces) if answers else b"", answers, refused=tuple(refused))

    def _pack(self, record: Put | Mark) -> bytes:
        if record.generation != self.generation:
            record = replace(record, generation=self.generation)
        if isinstance(record, Mark):
            return pack_mark(record)
        self._highest_sequence = max(self._highest_sequence, record.sequence)
        return pack_put(record)

    def _mark(self, kind: RecordType, flags: int) -> bytes:
        return pack_mark(Mark(kind, self._highest_sequence, self.generation, flags))

    def _send(self, batch: _Batch, *, sync: bool) -> None:
        self._under_way = batch
        self._held = True
        job = Append(journal_name(self.generation), self._length, batch.data, sync)
        hold = Hold(None, self._free)
        if not self._guard.call(
            "submitting an append",
            lambda: self._workers.submit(job, priority=Priority.STORE, done=self._answered, loan=hold),
        ):
            self._answered(Answer(IoOutcome.CANCELLED))

    def _free(self) -> None:
        self._held = False

    def _answered(self, answer: Answer) -> None:
        batch = self._under_way
        assert batch is not None
        self._under_way = None
        if answer.outcome is not IoOutcome.TIMEOUT:
            self._held = False
        if answer.outcome is not IoOutcome.OK:
            self._break(batch, answer)
            return
        self._length += len(batch.data)
        self._tell(batch.answers, IoOutcome.OK)
        if batch.closes:
            closed, self.generation, self._length = self.generation, self.generation + 1, 0
            self.compacted = False
            self._closed(closed)
        self._next()

    def _break(self, batch: _Batch, answer: Answer) -> None:
        was_open, self._open = self._open, False
        waiting, self._waiting = self._waiting, deque()
        self._tell([*batch.answers, *(done for _, done in waiting)], answer.outcome)
        if was_open:
            self._broken(answer)

    def _fail(self, outcome: IoOutcome) -> None:
        waiting, self._waiting = self._waiting, deque()
        self._tell([done for _, done in waiting], outcome)

    def _tell(self, answers: Sequence[Done], outcome: IoOutcome) -> None:
        for done in answers:
            self._guard.call("the answer to a record", done, outcome)
