"""The janitor of a shared directory: who it is, and what it does (design.md#shared-tiers, ADR 0018, ADR 0052).

The lease is a file. A node that finds it old, by the server's clock, writes the next term over it, waits, and is
janitor if the file still says so. Of two at once the last one wins and the other sees it. Before each step that deletes
or grants, a janitor reads the file again, and checks by its own clock that it renewed its lease lately. A janitor that
was late does neither before it has contended again. Its count continues meanwhile, because a count only reads. The
count is good if the file has named nobody else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from kvdepot.server.storage.shared_layout import JANITOR, node_file, temporary_file
from kvdepot.server.tiers.shared.coordinator.deletion import delete_object
from kvdepot.server.tiers.shared.coordinator.files import Found, ServerClock, read_name, read_small
from kvdepot.server.tiers.shared.coordinator.ledger import Ledger
from kvdepot.server.tiers.shared.coordinator.nodes import Nodes
from kvdepot.server.tiers.shared.coordinator.order import in_order
from kvdepot.server.tiers.shared.coordinator.pace import Pace
from kvdepot.server.tiers.shared.coordinator.purge import purge_quarantine, purge_temporaries, remove
from kvdepot.server.tiers.shared.coordinator.records import JANITOR_BYTES_MAX, JanitorRecord, Lease
from kvdepot.server.tiers.shared.coordinator.relief import Relief
from kvdepot.server.tiers.shared.coordinator.scan import Columns, Quarantined, Scan
from kvdepot.server.tiers.shared.coordinator.settings import CoordinatorSettings
from kvdepot.server.tiers.shared.coordinator.spare import SpareRoom

_STEP_UNITS_MAX: Final = 512
"""Of a step, whatever the clock says: entries, headers or deletions."""
_COUNT_SECONDS: Final = 600.0
"""Between two counts while nothing asks for one."""
_PAUSE_COUNTS: Final = 4
"""At least so many times what a count took lies between two; once, where nodes wait for room."""
_FAILURES_MAX: Final = 10
"""In a row, before a count is given up that a server's pause would else cost."""
_PURGE_SECONDS: Final = 60.0
_RESERVE_SHARE: Final = 32
_RESERVE_BYTES_MAX: Final = 4 << 20
"""Of the capacity, for what is not asked for: files of nodes that come, and this one's."""
_OWN_FILE: Final = (1 << 62) + 1
"""Number of the temporary; no publish gets there."""


class Janitor:
    """One node's part as janitor. Its states: idle, contending, `holding` and not `_vouched`, and both: then it acts.

    `_kept`: its work, `_steps`, belongs to `_lease`, the last one that this node wrote. It also belongs to this node's
    leases that followed one another, with no other node's in between.
    """

    def __init__(
        self, settings: CoordinatorSettings, clock: Callable[[], float], server: ServerClock, pace: Pace,
        spare: SpareRoom,
    ) -> None:  # fmt: skip
        self._settings = settings
        self._spare = spare
        self._root: Path = settings.root
        self._clock = clock
        self._server = server
        self._pace = pace
        self._nodes = Nodes(self._root, clock, server, settings.silent_seconds)
        self._lease = Lease()
        self._directory_id = ""
        self._same_since = 0, clock()  # mtime_ns of the lease file, and when it was first met so
        self._lasts_seconds = settings.lease_seconds  # as it was written
        self._contended_at: float | None = None
        self._renewed_at = 0.0
        capacity = settings.capacity_bytes
        self._capacity_bytes = capacity - min(capacity // _RESERVE_SHARE, _RESERVE_BYTES_MAX)
        self._ledger = Ledger(self._capacity_bytes)
        self._relief = Relief(settings.low_watermark, clock)
        self._told = JanitorRecord(Lease(), None, 0, 0, 0, {})  # what others know of the ledger
        self._objects = self._quarantined_bytes = 0
        self._look: Iterator[None] | None = None  # at the nodes' files, to hand out what is free
        self._look_due = False
        self._looked_at = self._look_took = 0.0
        self._steps: Iterator[bool] = iter(())
        self._order: Iterator[int | None] = iter(())
        self._columns = Columns()
        self._quarantined: list[Quarantined] = []
        self._enough = True
        self._scan: Scan | None = None  # while it counts
        self._count_began = 0.0
        self._counted_at: float | None = None
        self._count_took = self._purged_at = 0.0
        self.holding = False
        self._vouched = False  # it has looked at the nodes since it holds: every limit is known, and nobody is later
        self._kept = False
        self._checked = False  # the lease, in this step
        self._gave_up = self._uncounted = self._unlooked = ""

    @property
    def reason(self) -> str:
        """Return why the work does not continue, and what is strange, for people."""
        if not self.holding:
            return ""
        strange, left_out = self._nodes.strange, self._columns.left_out
        full = self._counted_at is not None and not len(self._columns) and self._room_wanted()
        reasons = (
            self._gave_up,
            self._unlooked,
            self._uncounted,
            f"{strange} files of nodes are not understood, or too many" if strange else "",
            f"{left_out} objects are counted, and not deleted: too many, or of impossible times" if left_out else "",
            self._relief.reason,
            "full, and there is no object left to delete" if full else "",
        )
        return "; ".join(filter(None, reasons))

    @property
    def lease(self) -> Lease:
        return self._lease

    @property
    def counting(self) -> tuple[float, int] | None:
        """Return for how long a count has run, and how many files it has met. None: none runs."""
        return (self._clock() - self._count_began, self._scan.files) if self._scan is not None else None

    def heartbeat(self, directory_id: str, node: str, found: Found | None, record: JanitorRecord | None) -> None:
        """Contend for the lease, or renew it. Raise OSError.

        Called once a heartbeat, with the lease file as just read.
        """
        self._directory_id = directory_id
        if self._kept and self._is_anothers(record):
            self.resign()
        if self._lease.holder != node or (self.holding and self._late()):  # it registered again; it was stopped
            self._suspend()
        if self.holding:
            self._renew()
            self._look_due = True
        elif self._contended_at is not None:
            self._settle(record)
        elif self._is_free(node, found, record):
            self._contend(node, found, record)

    def work(self) -> bool:
        """Do a step. Return False if there is nothing to do now, or nothing for this node.

        Never raises for what the device answers.
        """
        if self.holding and self._late():
            self._suspend()
        self._checked = False
        looks = self.holding and self._look_on()
        return (self._kept and self._work_on()) or looks

    # Who is janitor.

    def _is_anothers(self, record: JanitorRecord | None) -> bool:
        """Return whether the lease is now another one's. A record with an older term came late, and is overwritten."""
        return record is not None and record.lease != self._lease and record.lease.term >= self._lease.term

    def lease_age_seconds(self, found: Found) -> float:
        """Return the age of the lease file. Called with each one that a heartbeat has read."""
        if self._same_since[0] != found.mtime_ns:
            self._same_since = found.mtime_ns, self._clock()
        return self._server.age_seconds(*self._same_since)

    def _is_free(self, node: str, found: Found | None, record: JanitorRecord | None) -> bool:
        if found is None or (record is not None and (record.lease.holder == node or record.lease == self._lease)):
            return True
        lasts = self._pace.honoured_seconds(record.lasts_seconds if record else 0)
        return self.lease_age_seconds(found) > lasts

    def _contend(self, node: str, found: Found | None, record: JanitorRecord | None) -> None:
        for _ in self._nodes.look(record.shares if record else ()):
            pass
        if self._kept and (record is None or record.lease != self._lease or self._nodes.know_later(self._lease)):
            self.resign()
        lease = Lease(node, max(record.lease.term if record else 0, self._nodes.term_max) + 1)
        told = JanitorRecord(lease, None, 0, 0, 0, {})
        if record is not None and not self._nodes.know_later(record.lease):
            told = record
        if not self._kept:
            self._ledger = told.ledger(self._capacity_bytes)
            self._objects, self._quarantined_bytes = told.objects, told.quarantined_bytes
        if read_small(self._root, JANITOR, JANITOR_BYTES_MAX) == found:  # nobody was faster
            self._lease, self._told = lease, told
            self._renew()
            self._contended_at = self._clock()

    def _settle(self, record: JanitorRecord | None) -> None:
        assert self._contended_at is not None
        waited = self._clock() - self._contended_at
        if waited < self._pace.settling_seconds:
            return
        self._contended_at = None
        if record is None or record.lease != self._lease or waited > self._lasts_seconds:
            return  # contended for again in the next heartbeat
        self.holding = True
        if not self._kept:
            self._kept = True
            self._counted_at, self._count_took, self._purged_at = None, 0.0, self._clock()
            self._steps = self._run()
        self._renew()
        self._look_due, self._look_took = True, 0.0

    def _renew(self) -> None:
        """Renew the lease. A renewal that arrived when the lease before it was old does not count.

        Another node may be janitor since.
        """
        started, until = self._clock(), self._renewed_at + self._lasts_seconds
        self._write()
        self._renewed_at = started
        if self.holding and self._clock() > until:
            self._suspend()

    def _still(self) -> bool:
        """Return whether this node is still janitor, by its own clock and by the file."""
        if self._late():
            self._suspend()
            return False
        found = read_small(self._root, JANITOR, JANITOR_BYTES_MAX)
        record = JanitorRecord.unpack(found.data) if found else None
        if record is not None and not record.is_of(self._directory_id):
            self._suspend()  # another directory is in the place of this one
        elif self._is_anothers(record):
            self.resign()
        return self.holding

    def _late(self) -> bool:
        """Return whether half of the lease's time has passed since it was renewed.

        This node was stopped then, or the device was. Another node may be janitor before this one has asked.
        """
        return self._clock() - self._renewed_at > self._lasts_seconds / 2

    def _acts(self) -> bool:
        """Return whether this node may delete. Called before each deletion; the file is read once a step."""
        if self.holding and self._vouched and not self._checked:
            self._checked = True
            self._still()
        return self._in_time()

    def _in_time(self) -> bool:
        if self.holding and self._late():
            self._suspend()
        return self.holding and self._vouched

    def _suspend(self) -> None:
        """Do nothing that needs the lease before this node has contended again.

        Nothing says yet that another node has it.
        """
        self.holding = self._vouched = False
        self._contended_at = self._look = None

    def resign(self) -> None:
        """Drop everything: another node is or was janitor, or the directory is not as this node has left it."""
        self._suspend()
        self._kept = False
        self._steps, self._order = iter(()), iter(())
        self._columns, self._quarantined, self._scan = Columns(), [], None
        self._relief = Relief(self._settings.low_watermark, self._clock)
        self._gave_up = self._uncounted = self._unlooked = ""

    def _write(self) -> None:
        """Write the lease file. Until this node has looked at all nodes, it repeats what was told before.

        So no node gets a limit by it.
        """
        if self._vouched:
            shares = {node: replace(share) for node, share in self._ledger.shares.items()}
            self._told = JanitorRecord(
                self._lease, self._ledger.used_bytes, self._ledger.estimate(self._nodes.published), self._objects,
                self._quarantined_bytes, shares,
            )  # fmt: skip
        seconds, files = self.counting or (None, 0)
        lasts_seconds = math.ceil(self._pace.lease_seconds)
        record = replace(
            self._told, lease=self._lease, lasts_seconds=lasts_seconds,
            counting_seconds=None if seconds is None else int(seconds), counted_files=files,
            directory_id=self._directory_id,
        )  # fmt: skip
        temporary = Path(temporary_file(self._lease.holder, _OWN_FILE)).name
        self._lasts_seconds = min(self._lasts_seconds, lasts_seconds)  # it may fail, and have done it or not
        self._spare.replace(JANITOR, record.pack(), temporary)
        self._lasts_seconds = lasts_seconds

    # What it does.

    def _look_on(self) -> bool:
        """Look at the nodes' files, once a heartbeat at most; at the end hand out what is free. False: it is not due.

        Before the first count has ended nothing is free: the count has that time.
        """
        if self._look is None:
            waits = self._vouched and self._ledger.used_bytes is None
            if waits or not self._look_due or self._clock() < self._looked_at + self._look_took:
                return False
            self._look, self._looked_at = self._nodes.look(self._ledger.shares), self._clock()
        until = self._clock() + self._pace.step_seconds
        try:
            for _ in self._look:
                if self._clock() > until:
                    return True
            self._unlooked = ""
            self._hand_out()
        except OSError as error:
            self._unlooked = f"nothing can be granted: {error}"
        self._look, self._look_due = None, False
        self._look_took, self._looked_at = self._clock() - self._looked_at, self._clock()
        return False

    def _hand_out(self) -> None:
        if self._nodes.know_later(self._lease):
            self.resign()  # contended for again in the next heartbeat, by a later term and without the ledger
        if not self.holding or not self._still():
            return
        for node, record in self._nodes.records.items():
            self._ledger.meet(node, record.limit_bytes)
        living = self._nodes.published
        for node in self._nodes.gone():
            living.pop(node, None)
        self._enough = self._ledger.hand_out(living, self._nodes.wanted)
        self._relief.look(self._ledger.estimate(living), refused=self._nodes.refused)
        news = not self._vouched or self._ledger.shares != self._told.shares
        self._vouched = True
        if news:
            self._renew()

    def _work_on(self) -> bool:
        """Begin nothing that needs the lease without it; a count that has begun continues."""
        until = self._clock() + self._pace.step_seconds
        try:
            for _ in range(_STEP_UNITS_MAX):
                if not next(self._steps, False):
                    return False
                if self._clock() > until:
                    break
        except OSError as error:
            self._gave_up = f"the janitor's work was given up: {error}"
            self._scan = None
            self._steps = self._run()
            return False
        return True

    def _run(self) -> Iterator[bool]:
        while True:
            if not self._in_time():
                yield False
                continue
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
        return committed > mark * capacity or self._relief.wanted

    def _count_due(self) -> bool:
        if self._counted_at is None:  # in this term
            return True
        since = self._clock() - self._counted_at
        pauses = _PAUSE_COUNTS if self._enough else 1
        if since < max(pauses * self._count_took, self._settings.heartbeat_seconds):
            return False
        return since > _COUNT_SECONDS or (self._room_wanted() and (self._ledger.leaving or not len(self._columns)))

    def _count(self) -> Iterator[bool]:
        self._columns, self._order = Columns(), iter(())
        count = self._ledger.begin_count(self._nodes.published)
        self._count_began, self._scan = self._clock(), Scan(self._root)
        scan, failures = self._scan, 0
        for error in scan.steps():
            failures = failures + 1 if error else 0
            if error and failures > _FAILURES_MAX:
                raise error
            yield not error  # after an error it waits for the next heartbeat
        self._scan = None
        self._ledger.end_count(count, scan.used_bytes)
        self._columns, self._quarantined = scan.columns, scan.quarantined
        self._objects, self._quarantined_bytes = len(scan.columns) + scan.columns.left_out, scan.quarantined_bytes
        self._order = in_order(scan.columns, partial(read_name, self._root))
        self._counted_at = self._clock()
        self._count_took = self._counted_at - self._count_began
        self._uncounted = "; ".join(
            text
            for count, text in (
                (scan.skipped, f"{scan.skipped} folders could not be counted"),
                (scan.oversized, f"{scan.oversized} files are longer than any object, and are ignored: remove them"),
            )
            if count
        )

    def _evict(self) -> Iterator[bool]:
        goal = self._settings.low_watermark * self._ledger.capacity_bytes
        rows = self._columns.rows
        while self._ledger.committed_bytes > goal or self._relief.wanted:
            if not self._acts():
                return
            try:
                row = next(self._order)
            except StopIteration:
                self._columns = Columns()
                return
            if row is not None:
                file, mtime_ns = self._columns.file(row), int(rows["mtime_ns"][row])
                freed = delete_object(self._root, file, mtime_ns, self._in_time)
                self._ledger.deleted(freed)
                self._relief.deleted(freed)
                self._objects -= freed > 0
            yield True

    def _purge(self) -> Iterator[bool]:
        self._purged_at = self._clock()
        gone = self._nodes.gone()
        for freed in purge_temporaries(self._root, self._nodes.records, self._server.age_seconds, gone, self._acts):
            self._ledger.deleted(freed)
            yield True
        for node in gone:
            if not self._acts():
                return
            self._ledger.deleted(remove(self._root, node_file(node)))
            self._nodes.forget(node)
            self._ledger.leave(node)
        for taken in self._spare.fill():
            self._ledger.taken(taken)
            yield True
        files, self._quarantined = self._quarantined, []
        settings = self._settings
        for freed in purge_quarantine(
            self._root, files, self._server.age_seconds, settings.quarantine_keep_seconds, settings.quarantine_bytes,
            self._acts,
        ):  # fmt: skip
            self._ledger.deleted(freed)
            self._quarantined_bytes -= freed
            yield True
