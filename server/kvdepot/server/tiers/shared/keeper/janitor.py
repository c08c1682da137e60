"""The janitor of a shared directory: who it is, and what it does (DESIGN 6, ADR 0018).

The lease is a file. Whoever finds it old, by the server's clock, writes the next term over it, waits, and is janitor if
the file still says so. Of two at once the last one wins and the other sees it. A janitor looks again before each step
of its work, and that it renewed its lease lately by its own clock: one that was stopped for long does nothing on an old
term.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from kvdepot.core.objectfile import HEADER_BYTES, ObjectDamageError, ObjectHeader, ObjectName
from kvdepot.server.tiers.shared.keeper.deletion import delete_object
from kvdepot.server.tiers.shared.keeper.files import Found, ServerClock, read_small, replace_small
from kvdepot.server.tiers.shared.keeper.ledger import Ledger
from kvdepot.server.tiers.shared.keeper.nodes import Nodes
from kvdepot.server.tiers.shared.keeper.order import in_order
from kvdepot.server.tiers.shared.keeper.purge import purge_quarantine, purge_temporaries, remove
from kvdepot.server.tiers.shared.keeper.records import JANITOR_BYTES_MAX, JanitorRecord, Lease
from kvdepot.server.tiers.shared.keeper.scan import Columns, Quarantined, Scan
from kvdepot.server.tiers.shared.keeper.settings import KeeperSettings
from kvdepot.server.tiers.shared.layout import JANITOR, node_file, temporary_file

STEP_SECONDS: Final = 0.02
_STEP_UNITS_MAX: Final = 512
"""Of a step, whatever the clock says: entries, headers or deletions."""
_COUNT_SECONDS: Final = 600.0
"""Between two counts while nothing asks for one."""
_PAUSE_COUNTS: Final = 4
"""At least so many times what a count took lies between two; once, where nodes wait for room."""
_PURGE_SECONDS: Final = 60.0
_SETTLING_HEARTBEATS: Final = 1.5
"""Every node that lives has looked at the lease file in between."""
_RESERVE_SHARE: Final = 32
_RESERVE_BYTES_MAX: Final = 4 << 20
"""Of the capacity, for what is not asked for: files of nodes that come, and this one's."""
_OWN_FILE: Final = (1 << 62) + 1
"""Number of the temporary; no publish gets there."""


class Janitor:
    """One node's part in it; whether it is the janitor, `holding` says."""

    def __init__(self, settings: KeeperSettings, clock: Callable[[], float], server: ServerClock) -> None:
        self._settings = settings
        self._root: Path = settings.root
        self._clock = clock
        self._server = server
        self._nodes = Nodes(self._root, clock, server, settings.silent_seconds)
        self._lease = Lease()  # the one that this node wrote last
        self._contended_at: float | None = None
        self._renewed_at = 0.0
        capacity = settings.capacity_bytes
        self._capacity_bytes = capacity - min(capacity // _RESERVE_SHARE, _RESERVE_BYTES_MAX)
        self._ledger = Ledger(self._capacity_bytes)
        self._objects = self._quarantined_bytes = 0
        self._steps: Iterator[bool] = iter(())
        self._order: Iterator[int | None] = iter(())
        self._columns = Columns()
        self._quarantined: list[Quarantined] = []
        self._enough = True
        self._counted_at: float | None = None
        self._count_took = self._purged_at = 0.0
        self.holding = False
        self._gave_up = self._uncounted = ""

    @property
    def reason(self) -> str:
        """Why its work does not go on, and what is strange; for people."""
        if not self.holding:
            return ""
        strange, left_out = self._nodes.strange, self._columns.left_out
        full = self._counted_at is not None and not len(self._columns) and self._room_wanted()
        reasons = (
            self._gave_up,
            self._uncounted,
            f"{strange} files of nodes are not understood, or too many" if strange else "",
            f"{left_out} objects are counted, but too many to be deleted in their turn" if left_out else "",
            "full, and there is no object left to delete" if full else "",
        )
        return "; ".join(filter(None, reasons))

    @property
    def lease(self) -> Lease:
        return self._lease

    def beat(self, node: str, found: Found | None, record: JanitorRecord | None) -> None:
        """Once a heartbeat, with the lease file as just read. Raises OSError."""
        if self._lease.holder != node:  # it registered anew
            self._resign()
        if self.holding:
            self._renew()
        elif self._contended_at is not None:
            self._settle(record)
        elif self._is_free(node, found, record):
            self._contend(node, found, record)

    def work(self) -> bool:
        """A step. False: there is nothing to do now, or for this node. Never raises for what the medium answers."""
        try:
            if not self.holding or not self._still():
                return False
            until = self._clock() + STEP_SECONDS
            for _ in range(_STEP_UNITS_MAX):
                if not next(self._steps, False):
                    return False
                if self._clock() > until:
                    break
        except OSError as error:
            self._gave_up = f"the janitor's work was given up: {error}"
            self._steps = self._run()
            return False
        return True

    # Who is janitor.

    def _is_free(self, node: str, found: Found | None, record: JanitorRecord | None) -> bool:
        if found is None or (record is not None and record.lease.holder == node):
            return True
        return self._server.age_seconds(found.mtime_ns) > self._settings.lease_seconds

    def _contend(self, node: str, found: Found | None, record: JanitorRecord | None) -> None:
        self._nodes.look(record.shares if record else ())
        lease = Lease(node, max(record.lease.term if record else 0, self._nodes.term_max) + 1)
        if record is not None and not self._nodes.know_later(record.lease):
            self._ledger = record.ledger(self._capacity_bytes)
            self._objects, self._quarantined_bytes = record.objects, record.quarantined_bytes
        else:
            self._ledger = Ledger(self._capacity_bytes)
        if read_small(self._root / JANITOR, JANITOR_BYTES_MAX) == found:  # nobody was faster
            self._lease = lease
            self._write()
            self._contended_at = self._clock()

    def _settle(self, record: JanitorRecord | None) -> None:
        assert self._contended_at is not None
        if self._clock() - self._contended_at < _SETTLING_HEARTBEATS * self._settings.heartbeat_seconds:
            return
        self._contended_at = None
        if record is None or record.lease != self._lease:
            return
        self._nodes.look(self._ledger.shares)
        if self._nodes.know_later(self._lease):
            return  # contended for again in the next beat, by a later term and without the ledger
        self.holding = True
        self._renewed_at = self._clock()
        self._counted_at, self._count_took, self._purged_at = None, 0.0, self._clock()
        self._steps = self._run()
        self._renew()

    def _renew(self) -> None:
        """Hand out what is free, and write it down with the lease."""
        if not self._still():
            return
        self._nodes.look(self._ledger.shares)
        for node, record in self._nodes.records.items():
            self._ledger.meet(node, record.limit_bytes)
        living = self._nodes.published
        for node in self._nodes.gone():
            living.pop(node, None)
        self._enough = self._ledger.hand_out(living, self._nodes.wanted)
        started = self._clock()
        if self._still():
            self._write()
            self._renewed_at = started

    def _still(self) -> bool:
        """It is janitor, by its own clock and by the file. An older term in the file came late: it is written over."""
        if not self._late():
            found = read_small(self._root / JANITOR, JANITOR_BYTES_MAX)
            record = JanitorRecord.unpack(found.data) if found else None
            if record is None or record.lease.term < self._lease.term or record.lease == self._lease:
                return True
        self._resign()
        return False

    def _late(self) -> bool:
        """It was stopped, or the medium was: somebody else may be janitor before this one has asked."""
        return self._clock() - self._renewed_at > self._settings.lease_seconds / 2

    def _resign(self) -> None:
        self.holding = False
        self._contended_at = None
        self._steps, self._order = iter(()), iter(())
        self._columns, self._quarantined = Columns(), []
        self._gave_up = self._uncounted = ""

    def _write(self) -> None:
        record = JanitorRecord(
            self._lease, self._ledger.used_bytes, self._ledger.estimate(self._nodes.published), self._objects,
            self._quarantined_bytes, self._ledger.shares,
        )  # fmt: skip
        temporary = Path(temporary_file(self._lease.holder, _OWN_FILE)).name
        replace_small(self._root, JANITOR, record.pack(), temporary)

    # What it does.

    def _run(self) -> Iterator[bool]:
        while True:
            if self._nodes.left:
                yield from self._purge()
            elif self._count_due():
                yield from self._count()
            elif self._room_wanted() and len(self._columns):
                yield from self._evict()
            elif self._clock() - self._purged_at > _PURGE_SECONDS or self._quarantined:
                yield from self._purge()
            else:
                yield False
                continue
            self._gave_up = ""  # whatever was due got to an end

    def _room_wanted(self) -> bool:
        committed, capacity = self._ledger.committed_bytes, self._ledger.capacity_bytes
        mark = self._settings.high_watermark if self._enough else self._settings.low_watermark
        return committed > mark * capacity

    def _count_due(self) -> bool:
        if self._counted_at is None:  # in this term
            return True
        since = self._clock() - self._counted_at
        pauses = _PAUSE_COUNTS if self._enough else 1
        if since < max(pauses * self._count_took, self._settings.heartbeat_seconds):
            return False
        return since > _COUNT_SECONDS or (self._room_wanted() and (self._ledger.leaving or not len(self._columns)))

    def _count(self) -> Iterator[bool]:
        started = self._clock()
        self._columns, self._order = Columns(), iter(())
        count = self._ledger.begin_count(self._nodes.published)
        scan = Scan(self._root)
        for _ in scan.steps():
            yield True
        self._ledger.end_count(count, scan.used_bytes)
        self._columns, self._quarantined = scan.columns, scan.quarantined
        self._objects, self._quarantined_bytes = len(scan.columns) + scan.columns.left_out, scan.quarantined_bytes
        self._order = in_order(scan.columns, self._read_name)
        self._counted_at = self._clock()
        self._count_took = self._counted_at - started
        self._uncounted = f"{scan.skipped} folders could not be counted" if scan.skipped else ""

    def _evict(self) -> Iterator[bool]:
        goal = self._settings.low_watermark * self._ledger.capacity_bytes
        rows = self._columns.rows
        while self._ledger.committed_bytes > goal:
            try:
                row = next(self._order)
            except StopIteration:
                self._columns = Columns()
                return
            if row is not None and not self._late():
                freed = delete_object(self._root, self._columns.file(row), int(rows["mtime_ns"][row]))
                self._ledger.deleted(freed)
                self._objects -= freed > 0
            yield True

    def _read_name(self, file: str) -> ObjectName | None:
        with suppress(OSError, ObjectDamageError):
            fd = os.open(self._root / file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                return ObjectHeader.unpack(os.pread(fd, HEADER_BYTES, 0)).name
            finally:
                os.close(fd)
        return None

    def _purge(self) -> Iterator[bool]:
        self._purged_at = self._clock()
        gone = self._nodes.gone()
        for freed in purge_temporaries(self._root, self._nodes.records, self._server.age_seconds, gone):
            self._ledger.deleted(freed)
            yield True
        for node in gone:
            self._ledger.deleted(remove(self._root / node_file(node)))
            self._nodes.forget(node)
            self._ledger.leave(node)
        files, self._quarantined = self._quarantined, []
        settings = self._settings
        for freed in purge_quarantine(
            self._root, files, self._server.age_seconds, settings.quarantine_keep_seconds, settings.quarantine_bytes
        ):
            self._ledger.deleted(freed)
            self._quarantined_bytes -= freed
            yield True
