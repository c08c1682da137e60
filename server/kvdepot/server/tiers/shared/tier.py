"""The shared tier: one file per object in a directory of several daemons (design.md#shared-tiers).

One owner, the loop's thread; nothing here blocks. Its parts: `holdings` (what this node knows to be there),
`look_ups`, `reading`, `writing`, `recency`; one pool of I/O workers; the coordinator, a process that checks the
directory, counts what lies there, and grants room to write.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Final

from kvdepot.core.allocator import Extent
from kvdepot.core.object_keys import KeyRing
from kvdepot.core.objectfile import ObjectName
from kvdepot.core.report import TierStatus
from kvdepot.server.io.jobs import Answer, Priority, Probe
from kvdepot.server.platform.boot_clock import boot_seconds
from kvdepot.server.platform.guard import tier_guard
from kvdepot.server.platform.logs import LogThrottle
from kvdepot.server.storage.base import OTHER_KEYS, IoOutcome, Loan, Read, Stored, TierListener, TierTraits, Written
from kvdepot.server.storage.found import FoundObjects
from kvdepot.server.storage.shared_layout import PROBE
from kvdepot.server.tiers.budget import DailyBudget
from kvdepot.server.tiers.health import STOPS_WRITING, Health, State, shown, why_failed
from kvdepot.server.tiers.shared.absent import AbsentNames
from kvdepot.server.tiers.shared.config import SharedConfig
from kvdepot.server.tiers.shared.directory import Directory
from kvdepot.server.tiers.shared.holdings import Holdings
from kvdepot.server.tiers.shared.links import REFUSED_SECONDS, CoordinatorLink, Ended, Failed, Limits, Message, Report
from kvdepot.server.tiers.shared.look_ups import LookUps
from kvdepot.server.tiers.shared.quota_grant import OBJECT_SHARE, QuotaGrant, file_cost_bytes
from kvdepot.server.tiers.shared.reading import Reading
from kvdepot.server.tiers.shared.recency import Recency
from kvdepot.server.tiers.shared.writing import Writing
from kvdepot.server.tiers.workers import Workers

_CLOSE_SECONDS: Final = 3.0
_PUBLISH_SECONDS: Final = 1.0
"""So often the coordinator gets what was written."""
NO_GRANT: Final = "the janitor has granted this node no more room yet"
COUNTING: Final = "no room granted yet: counting"
"""Instead of it, where the janitor has to count the directory's files first."""


class SharedTier:
    """A `SharedTier` of the interface. What it refuses at once is answered before a call returns, all else later."""

    def __init__(
        self, config: SharedConfig, *, data: Workers, coordinator: CoordinatorLink, log: logging.Logger,
        count: Callable[[str, float], None] = lambda name, amount: None,  # noqa: ARG005
        clock: Callable[[], float] = time.monotonic, wall_clock: Callable[[], float] = time.time,
        handles_max: int | None = None, limits: Limits | None = None, boot_clock: Callable[[], float] = boot_seconds,
    ) -> None:  # fmt: skip
        """Build the tier. `data` does nothing before it is renewed. `handles_max`: other than the configuration's.

        `limits`: further ones, of what its jobs cost. `boot_clock`: that of the coordinator.
        """
        self.name = config.name
        self.traits = TierTraits(shared=True)
        self.handles_max = handles_max or config.handles_max
        self._config = config
        self._data = data
        self._coordinator = coordinator
        self._limits = limits
        self._log = log
        self._clock = clock
        self._health = Health(
            config.name, probe_seconds=config.probe_seconds, failures_max=config.failures, clock=clock, log=log
        )
        self._throttle = LogThrottle(clock)
        self._guard = guard = tier_guard(f"tier {config.name}", count, log, clock)
        count = guard.safe("a count", count)
        self._directory = directory = Directory(
            config, data, Holdings(self.handles_max), AbsentNames(config.negative_ttl_seconds, clock),
            QuotaGrant(boot_clock),
            DailyBudget("write budget", config.write_budget_bytes, wall_clock),
            clock, wall_clock, count, guard, keys=config.keys,
        )  # fmt: skip
        self._writing = Writing(directory, refused=self._refused, kept=self._kept, damaged=self._damaged)
        self._reading = Reading(
            directory, answered=self._read, damaged=self._damaged, lost=self._lose, met_doubtful=self.quarantine
        )  # fmt: skip
        self._recency = Recency(directory, lost=self._lose)
        self._look_ups = LookUps(
            data, directory.absent, deadline_seconds=config.deadline_seconds, clock=clock,
            tell=self._found, writing=self._writing.writes, count=count, guard=guard,
        )  # fmt: skip
        self._listener: TierListener | None = None
        self._report: Report | None = None
        self._counting_since = 0.0  # by the wall clock, as the report said
        self._trouble = ""  # of the coordinator
        self._serves = False
        self._working = False  # the workers were made
        self._probing = False
        self._closing = False
        self._published = 0, 0, "", False
        self._refused_until = clock()  # by the file system, which had no room
        self._publish_at = 0.0

    # What the engine asks

    @property
    def readable(self) -> bool:
        limited = self._limits is not None and self._limits.stops_reading
        return self._serves and self._data.usable and not self._closing and not limited

    @property
    def writable(self) -> bool:
        return not self._why_not_writable()

    @property
    def budget_spent(self) -> bool:
        return self._directory.budget.spent or (self._limits is not None and self._limits.stops_writing)

    @property
    def write_slots(self) -> int:
        return max(self._config.write_slots - self._writing.in_flight, 0) if self.writable else 0

    @property
    def used_bytes(self) -> int:
        """Return the number of handles in use, unfinished writes included. Bytes are the whole directory's.

        Its janitor counts them.
        """
        return self._directory.holdings.count + self._writing.in_flight

    @property
    def capacity_bytes(self) -> int:
        return self.handles_max

    def cost_bytes(self, raw_bytes: int) -> int:  # noqa: ARG002
        return 1

    def too_large(self, raw_bytes: int) -> bool:
        """Return whether an object is too large: to make room for it would leave the directory all but empty."""
        return file_cost_bytes(raw_bytes) > self._config.capacity_bytes // OBJECT_SHARE

    def start(self, listener: TierListener) -> None:
        """Start the coordinator without waiting: a directory that hangs leaves the tier opening."""
        self._listener = listener
        self._coordinator.start(self._on_message)

    def tick(self) -> None:
        if self._health.state is State.CLOSED:
            return
        self._guard.each("a tick", self._look_ups.expire, self._recency.pump, self._publish, self._retry)

    def _publish(self) -> None:
        """Tell the coordinator what was written."""
        grant = self._directory.grant
        refused = self._clock() < self._refused_until
        published = grant.over_bytes, grant.wanted_bytes, self._writing.settled, refused
        if published != self._published and self._clock() >= self._publish_at:
            self._coordinator.publish(*published[:3], refused=refused)
            self._published, self._publish_at = published, self._clock() + _PUBLISH_SECONDS

    def write(
        self, name: ObjectName, extents: Sequence[Extent], loan: Loan, raw_sum: int | None,
        done: Callable[[Written], None],
    ) -> None:  # fmt: skip
        """Store an object. NO_SPACE: handles are missing, which `drop` frees, or the quota grant is used up.

        Waiting changes the grant; until then `writable` is False. CANCELLED: nothing can be written now, or the object
        is too large.
        """
        if not self.writable or self.budget_spent or self.too_large(name.raw_bytes):
            done(Written(IoOutcome.CANCELLED))
            return
        self._writing.write(name, extents, loan, raw_sum, done)

    def read(
        self, handle: int, name: ObjectName, extents: Sequence[Extent], loan: Loan, done: Callable[[Read], None]
    ) -> None:
        if handle not in self._directory.holdings or not self.readable:
            done(Read(IoOutcome.CANCELLED))
            return
        self._reading.read(handle, name, extents, loan, done)

    def verify(self, handle: int, done: Callable[[IoOutcome], None]) -> None:
        if handle not in self._directory.holdings or not self.readable:
            done(IoOutcome.CANCELLED)
            return
        self._reading.verify(handle, done)

    def drop(self, handle: int) -> None:
        """Forget that it is there."""
        self._directory.holdings.remove(handle)

    def quarantine(self, name: ObjectName, raw_sums: Sequence[int]) -> None:
        """Move a file aside in the background. Until it is, its bytes are refused here."""
        self._reading.quarantine(name, raw_sums, failed=self._not_quarantined)

    def stored(self, handle: int) -> Stored:
        """Return how an object is stored. If it was only looked up, the length is that of its pages."""
        return Stored(self._directory.holdings.stored_bytes(handle), 0, None)

    def use_keys(self, keys: KeyRing) -> None:
        """Use these keys from now on. Jobs in progress continue with the keys that they began with."""
        if keys != self._directory.keys:
            self._directory.keys = keys
            self._directory.absent.clear()

    def reads_from(self, source_id: int) -> bool:  # noqa: ARG002
        return False

    def look_up(self, names: Sequence[ObjectName], done: Callable[[], None], *, again: bool = False) -> None:
        if not self.readable:
            done()
            return
        self._look_ups.look_up(names, done, again=again)

    def used(self, handles: Sequence[int]) -> None:
        self._recency.used(handles)

    async def close(self) -> None:
        """Close within some seconds."""
        if self._health.state is State.CLOSED:
            return
        self._closing = True
        self._look_ups.cancel()
        await self._data.close(_CLOSE_SECONDS)
        self._health.close()
        self._coordinator.publish(self._directory.grant.over_bytes)
        self._coordinator.end()

    def status(self) -> TierStatus:
        """Return the status. Bytes are the directory's, as its janitor counted them, with what was published since."""
        report = self._report
        return TierStatus(
            self.name, self._config.kind, self._config.capacity_bytes,
            ready_bytes=self._config.capacity_bytes,
            used_bytes=report.used_bytes if report else 0,
            state=shown(self._health, self._data),
            reason="; ".join(dict.fromkeys(reason for reason in self._reasons() if reason)),
            breaker=self._data.breaker.state,
            queued_objects=self._writing.in_flight,
            written_today_bytes=self._directory.budget.used,
            quarantined_bytes=report.quarantined_bytes if report else 0,
            # Without a directory, as in front of a bucket or a peer, no node is registered, and none is the janitor.
            node=report.node if report and report.directory_id else "",
            janitor=report.janitor if report else "",
        )  # fmt: skip

    def _why_not_writable(self) -> str:
        if self._health.state is not State.READY or self._closing:
            return self._health.reason or str(self._health.state)
        if not self._data.usable:
            return self._data.why_unusable
        return "" if self._directory.grant.suffices else self._why_no_room()

    def _why_no_room(self) -> str:
        report = self._report
        if report is None or report.counting_seconds is None:
            return NO_GRANT
        since = datetime.fromtimestamp(int(self._counting_since), UTC).isoformat().removesuffix("+00:00")
        return f"{COUNTING} {report.counted_files} files since {since}Z"

    def _reasons(self) -> tuple[str, ...]:
        """Return why not all is well, as far as it is not: an empty text says nothing."""
        noted = self._report.reason if self._report else ""
        doubt = self._health.doubt or self._data.breaker.doubt
        limited = self._limits.reason if self._limits else ""
        return (self._why_not_writable() or doubt, self._directory.budget.reason, limited, self._trouble, noted)

    # Messages of the coordinator

    def _on_message(self, message: Message) -> None:
        self._guard.call(f"the coordinator's {type(message).__name__}", self._take, message)

    def _take(self, message: Message) -> None:
        if self._closing:
            return
        match message:
            case Report():
                self._reported(message)
            case Failed(reason):
                self._troubled(reason)
            case Ended():
                self._troubled("the coordinator's process ended")

    def _reported(self, report: Report) -> None:
        self._report = report
        self._counting_since = self._directory.wall_clock() - (report.counting_seconds or 0.0)
        self._trouble = ""
        self._directory.node = report.node
        grant = self._directory.grant
        grant.limit_bytes, grant.until = report.limit_bytes, report.until
        if not report.marker_ok:
            self._serves = False
            self._health.worsen(State.OFFLINE, report.reason or "the directory is not what it was")
            return
        self._directory.device = report.device
        if self._serves:
            return
        self._serves = True
        if not self._working:
            self._working = True
            self._data.renew("")
        self._health.ready(f"as node {report.node}")

    def _troubled(self, reason: str) -> None:
        """Log a trouble of the coordinator. What was granted can still be written, and everything can be read.

        Only the first report is waited for.
        """
        if reason != self._trouble:
            self._log.warning("tier %s: %s", self.name, reason)
        self._trouble = reason
        if not self._serves:
            self._health.worsen(State.OFFLINE, reason)

    # What goes wrong

    def _refused(self, outcome: IoOutcome, detail: str) -> None:
        """React to a failed write if the next one would fail in the same way."""
        self._note_room(outcome)
        if self._health.state not in (State.READY, State.READ_ONLY):
            return
        if outcome is IoOutcome.GONE:
            self._health.worsen(State.READ_ONLY, f"the folder of temporaries is gone: {detail}")
        elif outcome in STOPS_WRITING:
            self._health.worsen(State.READ_ONLY, why_failed(outcome, detail))
        elif why := self._health.write_failed(outcome, detail, self._data.breaker):
            self._health.worsen(State.READ_ONLY, why)

    def _read(self, answer: Answer) -> None:
        if answer.outcome is IoOutcome.OK:
            self._health.read_worked()
        elif answer.outcome is IoOutcome.UNREADABLE:
            self._health.read_refused(answer.outcome, answer.detail)

    def _damaged(self, name: ObjectName, outcome: IoOutcome, detail: str) -> None:
        if outcome in OTHER_KEYS and not self._throttle.due(outcome):
            return
        self._log.warning("tier %s: object %s is %s: %s", self.name, name.key.hex(), outcome, detail)

    def _not_quarantined(self, name: ObjectName, answer: Answer) -> None:
        self._log.error(
            "tier %s: object %s may have doubtful bytes and is not quarantined: %s %s; delete its file",
            self.name, name.key.hex(), answer.outcome, answer.detail,
        )  # fmt: skip

    def _retry(self) -> None:
        """Get out of READ_ONLY by a small write; out of OFFLINE a report leads."""
        if not self._health.retry_due:
            return
        self._health.retried()
        if self._health.state is State.READ_ONLY and not self._probing:
            self._data.submit(Probe(PROBE), priority=Priority.TEND, done=self._probed)
            self._probing = True

    def _probed(self, answer: Answer) -> None:
        self._probing = False
        if self._health.state is not State.READ_ONLY or answer.outcome is IoOutcome.CANCELLED:
            return
        if answer.outcome is IoOutcome.OK:
            self._health.ready("writing works again")
        else:
            self._health.note(why_failed(answer.outcome, answer.detail))
            self._note_room(answer.outcome)

    def _note_room(self, outcome: IoOutcome) -> None:
        if outcome is IoOutcome.NO_SPACE:
            self._refused_until = self._clock() + REFUSED_SECONDS

    # What the engine is told

    def _found(self, objects: list[tuple[ObjectName, int]]) -> None:
        """Report objects that were found: as many as there are handles for, less those that writes will need."""
        assert self._listener is not None
        room = max(self._directory.holdings.room - self._writing.in_flight, 0)
        rows = [(self._directory.holdings.add(name, size), name) for name, size in objects[:room]]
        if rows and not self._guard.call("found", self._listener.found, self, FoundObjects.of(rows)):
            self._lose([handle for handle, _ in rows if handle in self._directory.holdings])

    def _kept(self, name: ObjectName) -> None:
        self._health.write_worked()
        self._refused_until = self._clock()
        self._directory.absent.discard(name)
        self._look_ups.settle(name)

    def _lose(self, handles: Sequence[int]) -> None:
        assert self._listener is not None
        for handle in handles:
            self._directory.holdings.remove(handle)
        self._guard.call("telling what is lost", self._listener.lost, self, handles)
