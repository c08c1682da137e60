"""The disk tier: an arena on disk (design.md#disk-tiers). One owner, the loop's thread; nothing here blocks.

Its parts: `medium` (catalog, space, journal, quarantine), `writing`, `reading`, `growth`, `scrub`,
`health`; `openings` (the process that holds the directory, and its index); two pools of I/O workers, one of
them for the journal alone, so that no append waits for payload.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Final

from kvdepot.core.allocator import Extent
from kvdepot.core.errors import ConfigError
from kvdepot.core.objectfile import ObjectName, object_bytes
from kvdepot.core.report import TierStatus
from kvdepot.core.units import size_text
from kvdepot.server.io.jobs import Answer, Priority, Probe
from kvdepot.server.platform.guard import Once, tier_guard
from kvdepot.server.storage.base import IoOutcome, Loan, Read, Stored, TierListener, TierTraits, Written
from kvdepot.server.storage.found import FoundObjects
from kvdepot.server.tiers.budget import DailyBudget
from kvdepot.server.tiers.disk.catalog import Catalog
from kvdepot.server.tiers.disk.config import DiskConfig
from kvdepot.server.tiers.disk.growth import Growth
from kvdepot.server.tiers.disk.journal import Journal
from kvdepot.server.tiers.disk.layout import PROBE, SEGMENTS, DiskLayout
from kvdepot.server.tiers.disk.links import OpenerLink
from kvdepot.server.tiers.disk.medium import Medium
from kvdepot.server.tiers.disk.messages import Compact, Compacted, Opened, Sync
from kvdepot.server.tiers.disk.openings import Openings
from kvdepot.server.tiers.disk.quarantine import QuarantineRoom
from kvdepot.server.tiers.disk.reading import Reading
from kvdepot.server.tiers.disk.records import Mark, RecordType
from kvdepot.server.tiers.disk.scrub import Scrubber
from kvdepot.server.tiers.disk.space import Space
from kvdepot.server.tiers.disk.writing import Writing
from kvdepot.server.tiers.health import Health, State, shown, why_failed
from kvdepot.server.tiers.workers import Workers

_VERDICT_SECONDS: Final = 5.0
"""How long `start` waits to hear whether another daemon has the directory. A hung one is not waited for."""
_CLOSE_SECONDS: Final = 3.0
_LAST_SECONDS: Final = 0.5
"""What the pools get after that: reads that nobody waits for any more."""
_STEP_SECONDS: Final = 0.02
_TEND_SECONDS: Final = 60.0


class DiskTier:
    """A `Tier`. What it refuses at once is answered before `read` or `write` return, everything else later."""

    def __init__(
        self, config: DiskConfig, *, data: Workers, journal: Workers, opener: OpenerLink, log: logging.Logger,
        clock: Callable[[], float] = time.monotonic, wall_clock: Callable[[], float] = time.time,
        count: Callable[[str, float], None] = lambda name, amount: None,  # noqa: ARG005
    ) -> None:  # fmt: skip
        """Build the tier. `data` and `journal` do nothing before they are renewed. `count` is as `IoPool`'s.

        Raise ConfigError for an impossible capacity.
        """
        self.name = config.name
        self.traits = TierTraits()
        self._config = config
        self._data = data
        self._journal_workers = journal
        self._log = log
        self._clock = clock
        self._guard = guard = tier_guard(f"tier {config.name}", count, log, clock)
        self._count = guard.safe("a count", count)
        layout = DiskLayout.plan(config.capacity_bytes, config.quarantine_bytes)
        self.handles_max = layout.handles
        self._health = Health(
            config.name, probe_seconds=config.probe_seconds, failures_max=config.failures, clock=clock, log=log
        )
        space = Space(layout.data_bytes)
        self._medium = medium = Medium(
            config, layout, Catalog(layout.handles), space,
            Journal(
                journal, limit_bytes=layout.journal_bytes, sync=config.fsync, closed=self._compact,
                broken=self._journal_broken, guard=guard,
            ),
            data,
            QuarantineRoom(
                data, capacity_bytes=layout.quarantine_bytes, keep_seconds=config.quarantine_keep_seconds,
                wall_clock=wall_clock,
            ),
            DailyBudget("write budget", config.write_budget_bytes, wall_clock), wall_clock,
            guard.safe("telling of free bytes", self._freed),
            guard.safe("telling what is served no more", self._unindexed), guard,
        )  # fmt: skip
        self._growth = Growth(data, space, layout, clock=clock, grown=self._grown)
        self._writing = Writing(medium, self._growth, clock=clock, refused=self._refused)
        self._reading = Reading(medium, refused=self._refused, damaged=self._damaged)
        self._scrubber = Scrubber(
            medium.catalog, bytes_per_second=config.scrub_bytes_per_second, clock=clock,
            verify=self._scrub, note=self._note_scrubbed, usable=lambda: self.writable,
        )  # fmt: skip
        self._openings = Openings(opener, medium, self, lambda: self._growth.making, guard)
        self._listener: TierListener | None = None
        self._serves = False  # opened once, and the directory has not gone since
        self._token = ""  # of workers that may have entered the directory
        self._tend_at = 0.0
        self._probing = False
        self._closing = False

    # What the engine asks

    @property
    def readable(self) -> bool:
        return self._serves and self._data.usable and self._health.state is not State.CLOSED

    @property
    def writable(self) -> bool:
        return not self._why_not_writable()

    @property
    def budget_spent(self) -> bool:
        return self._medium.budget.spent

    @property
    def write_slots(self) -> int:
        writing = self._writing
        return self._config.slots_left(writing.in_flight, writing.in_flight_bytes) if self.writable else 0

    @property
    def used_bytes(self) -> int:
        """Return the used bytes, with those promised to accepted writes that wait for bytes about to be free."""
        return self._medium.space.used_bytes + self._writing.waiting_bytes

    @property
    def capacity_bytes(self) -> int:
        return self._growth.ready_bytes + self._growth.left_bytes

    def cost_bytes(self, raw_bytes: int) -> int:
        return object_bytes(raw_bytes)

    def too_large(self, raw_bytes: int) -> bool:
        return object_bytes(raw_bytes) > self.capacity_bytes

    def start(self, listener: TierListener) -> None:
        """Start the first opening. Raise ConfigError if a living daemon has the directory."""
        self._listener = listener
        if (held := self._openings.start_and_wait(_VERDICT_SECONDS)) is not None:
            raise ConfigError(
                "", f"tier.{self.name}.path",
                f"{self._config.path} is held by the daemon with pid {held.pid}",
                advice="stop the other daemon, or configure another path",
            )  # fmt: skip

    def tick(self) -> None:
        if self._health.state is State.CLOSED or self._listener is None:
            return
        self._guard.each("a tick", self._writing.expire, self._openings.run_once, self._tend, self._retry)

    def _tend(self) -> None:
        if self._health.state is State.READY:
            self._growth.run_once()
            self._scrubber.run_once()
        if self._clock() >= self._tend_at:
            self._tend_at = self._clock() + _TEND_SECONDS
            if self._serves:
                self._medium.quarantine.tend()

    def write(
        self, name: ObjectName, extents: Sequence[Extent], loan: Loan, raw_sum: int | None,
        done: Callable[[Written], None],
    ) -> None:  # fmt: skip
        if not self.writable or self.budget_spent:
            done(Written(IoOutcome.CANCELLED))
            return

        def written(answer: Written) -> None:
            if answer.outcome is IoOutcome.OK:
                self._health.write_worked()
            done(answer)

        self._writing.write(name, extents, loan, raw_sum, written)

    def read(
        self, handle: int, name: ObjectName, extents: Sequence[Extent], loan: Loan, done: Callable[[Read], None]
    ) -> None:
        if handle not in self._medium.catalog or not self.readable:
            done(Read(IoOutcome.CANCELLED))
            return
        self._reading.read(handle, name, extents, loan, done)

    def verify(self, handle: int, done: Callable[[IoOutcome], None]) -> None:
        if handle not in self._medium.catalog or not self.readable:
            done(IoOutcome.CANCELLED)
            return
        self._verify(handle, done)

    def drop(self, handle: int) -> None:
        self._medium.kill(self._medium.unindex(handle, "evicted"))

    def stored(self, handle: int) -> Stored:
        catalog = self._medium.catalog
        return Stored(catalog.stored_bytes(handle), catalog.sequence(handle), catalog.stored_sum(handle))

    async def close(self) -> None:
        """Close within some seconds. What is on the medium is served by the next daemon, also after a crash in here."""
        if self._health.state is State.CLOSED:
            return
        self._closing = True
        self._writing.cancel_waiting()
        until = self._clock() + _CLOSE_SECONDS
        await self._until(lambda: self._medium.journal.idle and not self._writing.in_flight, until)
        await self._close_journal(until)
        self._health.close()
        self._writing.stop()
        await asyncio.gather(self._data.close(_LAST_SECONDS), self._journal_workers.close(_LAST_SECONDS))
        self._openings.link.end()

    def status(self) -> TierStatus:
        return TierStatus(
            self.name, "disk", self._config.capacity_bytes,
            ready_bytes=self._growth.ready_bytes,
            used_bytes=self.used_bytes,
            objects=self._medium.catalog.count,
            state=shown(self._health, self._data, self._journal_workers),
            reason=self._reason(),
            breaker=self._data.breaker.state,
            queued_objects=self._writing.in_flight,
            queued_bytes=self._writing.waiting_bytes,
            written_today_bytes=self._medium.budget.used,
            quarantined_bytes=self._medium.quarantine.used_bytes,
        )  # fmt: skip

    def _why_not_writable(self) -> str:
        if self._health.state is not State.READY or self._closing:
            return self._health.reason or str(self._health.state)
        if not self._data.usable:
            return self._data.why_unusable
        if not self._journal_workers.usable:
            return f"journal: {self._journal_workers.why_unusable}"
        if self._medium.journal.stalled:
            return "the journal is full and the one before it is not compacted yet"
        return ""

    def _reason(self) -> str:
        doubt = self._health.doubt or self._data.breaker.doubt
        reasons = (self._why_not_writable() or doubt, self._growth.refused, self._medium.budget.reason)
        return "; ".join(reason for reason in reasons if reason)

    # What goes wrong

    def _refused(self, outcome: IoOutcome, detail: str) -> None:
        """React to an outcome of one operation that concerns all others."""
        if outcome is IoOutcome.GONE:
            self._gone(detail or "a file of it is gone")
        elif outcome in (IoOutcome.NO_SPACE, IoOutcome.READ_ONLY):
            self._stop_writing(why_failed(outcome, detail))
        elif why := self._health.write_failed(outcome, detail, self._data.breaker):
            self._stop_writing(why)

    def _damaged(self, name: ObjectName, outcome: IoOutcome, detail: str) -> None:
        self._log.warning("tier %s: object %s is %s: %s", self.name, name.key.hex(), outcome, detail)

    def _journal_broken(self, answer: Answer) -> None:
        if answer.outcome is IoOutcome.GONE:
            self._gone(answer.detail)
        else:
            self._stop_writing(f"the journal cannot be appended: {why_failed(answer.outcome, answer.detail)}")

    def _gone(self, reason: str) -> None:
        """Serve nothing until the index was read again."""
        self._serves = False
        self._worsen(State.OFFLINE, reason)

    def _stop_writing(self, reason: str) -> None:
        self._worsen(State.READ_ONLY if self._serves else State.OFFLINE, reason)

    def _worsen(self, state: State, reason: str) -> None:
        if self._health.state is State.CLOSED:
            return
        self._health.worsen(state, reason)
        self._writing.stop()
        self._medium.journal.abandon()

    def _retry(self) -> None:
        """Get out of a bad state: by an opening, once a small write works."""
        if not self._health.retry_due:
            return
        self._health.retried()
        if not self._openings.link.running:
            self._openings.start()
        elif self._openings.idle and not self._probing:
            self._data.submit(Probe(PROBE, folder=SEGMENTS), priority=Priority.TEND, done=self._probed)
            self._probing = True

    def _probed(self, answer: Answer) -> None:
        self._probing = False
        if self._health.state not in (State.READ_ONLY, State.OFFLINE) or not self._openings.locked:
            return
        if answer.outcome is IoOutcome.CANCELLED:  # the path is disabled, and has a probe of its own
            return
        if answer.outcome is not IoOutcome.OK:
            self._health.note(why_failed(answer.outcome, answer.detail))
        elif self._medium.journal.idle and self._openings.idle:
            self._openings.open()

    # What the opening process says

    def opened(self, facts: Opened, token: str, unkilled: Sequence[int]) -> None:
        """Serve: the engine knows all of the index now.

        Workers are made, or replaced because they may have open files that are gone.
        """
        medium = self._medium
        self._serves = True
        self._scrubber.recover(facts.scrub_position)
        self._growth.start(medium.layout, facts.segments)
        self._health.short_of(self._growth.refused)
        for note in facts.notes:
            self._log.warning("tier %s: %s", self.name, note)
        self._token = token
        self._renew_workers()
        self._guard.call("quarantine", medium.quarantine.tend)
        if facts.refused:
            self._health.worsen(State.READ_ONLY, facts.refused)
            return
        medium.journal.open(bytes.fromhex(facts.store_id), facts.generation, medium.layout.journal_bytes)
        size = size_text(medium.layout.data_bytes)
        self._health.ready(f"{medium.catalog.count} objects, generation {facts.generation}, {size} for objects")
        self._writing.open = True
        medium.kill_all(unkilled)
        self._growth.run_once()

    def opening_lost(self, reason: str, *, gone: bool) -> None:
        self._serves = self._serves and not gone
        if gone and self._token:  # in its new place, a daemon that opens it waits until all workers have left it
            self._renew_workers()
            self._token = ""
        self._stop_writing(reason)

    def _renew_workers(self) -> None:
        self._data.renew(self._token)
        self._journal_workers.renew(self._token)

    def opening_waits(self, reason: str) -> None:
        self._health.note(reason)

    def compacted(self, message: Compacted) -> None:
        if message.failed:
            self._stop_writing(f"the journal cannot be compacted: {message.failed}")
        else:
            self._medium.journal.resume()

    def tell_found(self, objects: FoundObjects) -> None:
        assert self._listener is not None
        try:
            self._listener.found(self, objects)
        except Exception:  # the next opening finds them again
            handles = [handle for handle, _ in objects if handle in self._medium.catalog]
            self.tell_lost(handles)
            for handle in handles:
                self._medium.catalog.remove(handle)
            raise

    def tell_lost(self, handles: Sequence[int]) -> None:
        assert self._listener is not None
        self._guard.call("telling what is lost", self._listener.lost, self, handles)

    # Tending

    def _freed(self) -> None:
        self._writing.pump()

    def _grown(self) -> None:
        self._health.short_of(self._growth.refused)
        self._freed()

    def _unindexed(self, handle: int, sequence: int) -> None:
        self._openings.dropped(handle, sequence)

    def _compact(self, generation: int) -> None:
        """Ask for a compaction: the journal of that generation is complete."""
        request = Compact(generation, self._medium.space.oldest_writing(self._medium.sequence) - 1)
        if not self._openings.send("asking for a compaction", request):
            self._stop_writing("the journal cannot be compacted: the daemon failed at it")

    def _scrub(self, handle: int, done: Callable[[], None]) -> None:
        def scrubbed(outcome: IoOutcome) -> None:
            self._count(f"tier_scrubbed_objects.{outcome}", 1)
            done()

        once = Once(scrubbed)
        if not self._guard.call("the scrubber", self._verify, handle, once):
            once(IoOutcome.CANCELLED)

    def _verify(self, handle: int, done: Callable[[IoOutcome], None]) -> None:
        def verified(outcome: IoOutcome, lost: bool) -> None:
            if lost:
                self._count(f"tier_damaged_objects.{outcome}", 1)
                self.tell_lost([handle])
            done(outcome)

        self._reading.verify(handle, verified)

    def _note_scrubbed(self, sequence: int) -> None:
        journal = self._medium.journal
        journal.append(Mark(RecordType.SCRUB, sequence, journal.generation), lambda _: None)

    # The end

    async def _close_journal(self, until: float) -> None:
        """Say that everything is on the medium, if that can be had in time: damage then is no torn write."""
        if self._health.state is not State.READY or not self._medium.journal.idle or self._writing.in_flight:
            return
        self._note_scrubbed(self._scrubber.position)
        self._openings.send("asking for a sync", Sync())
        await self._until(lambda: self._openings.synced is not None and self._medium.journal.idle, until)
        if self._openings.synced:
            closed: list[IoOutcome] = []
            self._medium.journal.close_synced(closed.append)
            await self._until(lambda: bool(closed), until)

    async def _until(self, reached: Callable[[], bool], until: float) -> None:
        while not reached() and self._clock() < until:  # noqa: ASYNC110 - several things, and only at the end
            await asyncio.sleep(_STEP_SECONDS)
