"""A disk tier and what must be true of it: random work, crashes, power losses, refusing media, lost journals.

What an object is called says nothing about which of its writes it is: each write of a name
has a payload of its own, so that a mixture, or the wrong one, is noticed.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from random import Random
from unittest import mock

from kvdepot.core.objectfile import ObjectName
from kvdepot.server.io.context import Context
from kvdepot.server.io.jobs import Answer, Append, Job, Part, WriteObject
from kvdepot.server.io.perform import perform
from kvdepot.server.offline.fsck import check_store
from kvdepot.server.storage.base import DAMAGED, IoOutcome, Read, Written
from kvdepot.server.tiers.disk import layout

from tests.rigs.disk_rig import PAGE, DiskRig, Loaned, failing, object_name

NAMES = 12
_SLOT_BYTES = 64 << 10
_SLOTS = 20


class DiskWorld:
    """`live` is what was answered OK and not dropped since: the tier may lose none of it but to a power loss."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        # Journals of a page, so that they rotate all the time.
        self._small = [mock.patch.object(layout, f"_JOURNAL_BYTES_{limit}", PAGE) for limit in ("MIN", "MAX")]
        for patch in self._small:
            patch.start()
        self.root = Path(self._folder.name) / "tier"
        self.variants = 0
        self.written: dict[ObjectName, set[bytes]] = {}  # every payload that was ever sent
        self.live: dict[ObjectName, bytes] = {}
        self.astray = False  # the journal is gone, and the tier has not opened since
        self.dropped: set[ObjectName] = set()  # since the last start: their KILL may be missing
        self.slots = list(range(_SLOTS))
        self.rig = DiskRig(self.root, capacity_bytes=16 << 20)
        self.settle()
        self.synced: dict[ObjectName, bytes] = {}
        self.unsynced: list[Part] = []
        self._opened()

    def close(self) -> None:
        self._folder.cleanup()
        for patch in self._small:
            patch.stop()

    # Work

    def work(self, random: Random, length: int) -> None:
        """Few sizes, so that places are reused; now and then the journal's worker lags behind."""
        for _ in range(length):
            match random.randrange(8):
                case 0 | 1 | 2:
                    self.write(random.randrange(NAMES), random.choice([1, 3, 3, 10]))
                case 3:
                    self.drop(random.randrange(1 << 16))
                case 4:
                    self.read(random.randrange(1 << 16))
                case 5 | 6:
                    self.step(random.randrange(1, 6))
                case 7:
                    self.payload_only(random.randrange(1, 4))
            if random.random() < 0.1:
                self.tick(0.5)
            if random.random() < 0.02:
                self.rig.wall_raises = True
            if random.random() < 0.02:
                self.rig.wall = random.choice([-1e9, 0.0, 1.8e9])  # a dead battery, and a clock that is set
            self.check()

    def write(self, number: int, pages: int) -> None:
        name = object_name(number, raw_bytes=pages * PAGE - number, boundary=32 + number % 3)
        there = {other.key for other in self.names() | self.flying}
        if name.key in there or not self.slots or not self.rig.writable():
            return
        self.variants += 1
        payload = self.rig.payload(name, self.variants % 256)
        self.written.setdefault(name, set()).add(payload)
        slot = self.slots.pop()
        self.rig.arena_base = slot * _SLOT_BYTES
        self.flying.add(name)

        def done(written: Written) -> None:
            self.flying.discard(name)
            if written.outcome is not IoOutcome.TIMEOUT:
                self.slots.append(slot)
            if written.outcome is IoOutcome.OK:
                self.rig.listener.held[written.handle] = name
                self.unsynced_names.add(name)
                if not self.astray:
                    self.live[name] = payload

        self.rig.tier.write(name, self.rig.fill(name, payload), Loaned(), None, done)

    def drop(self, pick: int) -> None:
        handles = sorted(self.rig.listener.held)
        if handles:
            handle = handles[pick % len(handles)]
            name = self.rig.listener.held[handle]
            self.rig.drop(handle)
            self.live.pop(name, None)
            self.dropped.add(name)

    def read(self, pick: int) -> None:
        """Asked for now, answered whenever."""
        handles = sorted(self.rig.listener.held)
        if not handles or not self.slots:
            return
        handle = handles[pick % len(handles)]
        name, slot = self.rig.listener.held[handle], self.slots.pop()
        self.rig.arena_base = slot * _SLOT_BYTES
        extents = self.rig.fill(name, bytes(name.raw_bytes))
        expected, rig, losses = self.live.get(name), self.rig, self.losses

        def done(read: Read) -> None:
            if read.outcome is not IoOutcome.TIMEOUT:
                self.slots.append(slot)
            data = b"".join(bytes(rig.arena[offset : offset + length]) for offset, length in extents)
            self._judge(name, read, data, expected if losses == self.losses else None)
            if read.outcome in DAMAGED and rig.listener.held.get(handle) == name:
                del rig.listener.held[handle]

        self.rig.tier.read(handle, name, extents, Loaned(), done)

    def _judge(self, name: ObjectName, read: Read, data: bytes, expected: bytes | None) -> None:
        if read.outcome is IoOutcome.OK:
            assert data in self.written[name], "bytes that nobody wrote"
            assert expected is None or data == expected, "another write of this object"
        else:
            unread = read.outcome is IoOutcome.BAD_PLACE  # the faults of this world may meet one object again and again
            whole = unread or read.outcome not in DAMAGED
            assert expected is None or whole, f"an object that must be whole is {read.outcome}"

    def step(self, count: int) -> None:
        for _ in range(count):
            self.rig.step()

    def payload_only(self, count: int) -> None:
        """The journal's worker lags."""
        for _ in range(count):
            self.rig.data.step()

    def tick(self, seconds: float) -> None:
        self.rig.tick(seconds)

    def settle(self) -> None:
        self.rig.settle()

    # What goes wrong

    def refuse(self, journal: bool, outcome: IoOutcome, times: int, lands: float = 0) -> None:
        """`lands`: the share of each append that is done although it is said to have failed."""
        workers = self.rig.journal if journal else self.rig.data
        kind: type[Job] = Append if journal else WriteObject
        refused = failing(kind, outcome, times)

        def fault(job: Job) -> Answer | None:
            answer = refused(job)
            if answer is not None and isinstance(job, Append) and lands:
                context = Context(str(self.root), self.rig.arena)
                perform(replace(job, data=job.data[: int(lands * len(job.data))]), context)
                context.close()
            return answer

        workers.fault = fault

    def hang_ends(self) -> None:
        self.rig.data.end_late()
        self.rig.journal.end_late()

    def recover(self) -> None:
        """The medium is well again: so is the tier, and nothing that it was trusted with is gone."""
        generation = self.rig.tier._medium.journal.generation
        self._until_writable()
        self._recheck()
        if self.rig.tier._medium.journal.generation != generation:  # an opening syncs
            self._synced_now()

    def _until_writable(self, openings: int = 0) -> None:
        """`openings`: how many there must have been by then."""
        self.rig.data.fault = self.rig.journal.fault = lambda _: None
        self.hang_ends()
        for _ in range(200):
            self.settle()
            if self.rig.writable() and self.rig.opener.openings >= openings:
                return
            if self.rig.writable():
                self.rig.tier._note_scrubbed(0)  # nothing else has needed the journal
            self.tick(1.0)
        raise AssertionError(self.rig.tier.status())

    def lose_journal(self, random: Random) -> None:
        """Somebody deletes it while the tier works: objects may be lost, dropped ones may come back, none is wrong."""
        openings = self.rig.opener.openings
        for journal in sorted((self.root / "journal").glob("*.log"))[-1:]:
            journal.unlink()
        self.losses += 1
        self.live, self.astray = {}, True
        self.work(random, 20)
        self._until_writable(openings + 1)
        self.astray = False
        self.check()
        self._read_all()
        self.check()

    def crash(self) -> None:
        """SIGKILL: what was sent to the medium is there, what was not is not."""
        answered = dict(self.live)
        assert not check_store(self.root).index.replayed.overlapped, "a place was used again before its KILL"
        self._restart()
        for name, payload in answered.items():
            assert name in self.names(), "a durable object is gone"
            self.live[name] = payload
        self._recheck()
        self._synced_now()

    def lose_power(self, random: Random) -> None:
        """What was not synced is anything: the journal's tail, and the pages that were written."""
        journals = sorted((self.root / "journal").glob("*.log"))
        if journals:
            self._spoil(journals[-1], random)
        for part in self.unsynced:
            if random.random() < 0.3:
                self._scribble(part, random)
        kept, self.live = dict(self.live), {}
        self.losses += 1
        self._restart()
        for name in self.names():
            assert name in self.written, "an object that nobody wrote"
        for name, payload in self.synced.items():
            if kept.get(name) == payload and name not in self.dropped:
                assert name in self.names(), "a synced object is gone"
        self._read_all()

    def _spoil(self, journal: Path, random: Random) -> None:
        data = bytearray(journal.read_bytes())
        at = random.randrange(len(data) + 1)
        if random.random() < 0.5:
            del data[at:]
        elif at < len(data):
            data[at:] = random.randbytes(len(data) - at) if random.random() < 0.5 else bytes(len(data) - at)
        journal.write_bytes(bytes(data))

    def _scribble(self, part: Part, random: Random) -> None:
        path = self.root / part.file
        with path.open("r+b") as file:
            file.seek(part.offset + random.randrange(part.length // PAGE) * PAGE)
            file.write(random.choice([bytes(PAGE), random.randbytes(PAGE)]))

    def _restart(self) -> None:
        self.slots = list(range(_SLOTS))
        self.rig.start(settle=False)
        self.settle()
        self._opened()

    def _opened(self) -> None:
        self.flying: set[ObjectName] = set()
        self.losses = getattr(self, "losses", 0)
        self.dropped = set()
        self._opening()
        self.rig.opener.opening = self._opening

    def _opening(self) -> None:
        """It syncs what is there. What is written later, even before anybody looks, a power loss may take."""
        self._note_writes()
        self.unsynced.clear()
        self.unsynced_names: set[ObjectName] = set()

    def _read_all(self) -> None:
        """Every object that is served is whole, or is found out."""
        for handle in sorted(self.rig.listener.held):
            self.rig.arena_base = 0
            name = self.rig.listener.held[handle]
            read, data = self.rig.read(handle)
            self._judge(name, read, data, None)
            if read.outcome is IoOutcome.OK:
                self.live[name] = data
        self._synced_now()

    def _recheck(self) -> None:
        for handle, name in sorted(self.rig.listener.held.items()):
            self.rig.arena_base = 0
            read, data = self.rig.read(handle)
            assert read.outcome is IoOutcome.OK, read
            self._judge(name, read, data, self.live.get(name))
            self.live[name] = data

    def _synced_now(self) -> None:
        """After an opening."""
        self.synced = {name: payload for name, payload in self.live.items() if name not in self.unsynced_names}

    # What is always true

    def names(self) -> set[ObjectName]:
        return self.rig.names()

    def check(self) -> None:
        self._note_writes()
        if not self.astray:
            self.rig.check()
        assert self.rig.disk_usage_bytes() <= self.rig.config.capacity_bytes
        for name in self.live:
            assert name in self.names() or not self.rig.tier.readable

    def _note_writes(self) -> None:
        for job, _ in self.rig.data.done:
            if isinstance(job, WriteObject):
                self.unsynced += job.parts
        self.rig.data.done.clear()
