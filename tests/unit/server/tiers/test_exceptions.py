"""An exception at any callback of a disk or shared tier: every caller is answered, and the next job works.

Each test runs a scenario once for each callback that it makes (`tests.fakes.raising`).
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
from kvdepot.core.objectfile import ObjectName
from kvdepot.server.io.framing import FrameError
from kvdepot.server.io.jobs import FILES_MAX, JOBS, Append, PublishFile, Remove, WriteObject
from kvdepot.server.platform.guard import tier_guard
from kvdepot.server.storage.base import DAMAGED, IoOutcome, Read, Tier, Written
from kvdepot.server.storage.found import FoundObjects
from kvdepot.server.tiers.conformance_harness import RecordingListener, extents_of, payload_of
from kvdepot.server.tiers.disk import journal as journaling
from kvdepot.server.tiers.disk import quarantine as quarantining
from kvdepot.server.tiers.disk.layout import QUARANTINE, quarantine_name
from kvdepot.server.tiers.disk.messages import Ended
from kvdepot.server.tiers.disk.records import Put, pack_put
from kvdepot.server.tiers.workers import Hold

from tests.fakes.raising import Faults, Injected, points
from tests.rigs.disk_rig import PAGE, DiskRig, Listener, failing, flip, object_name
from tests.rigs.shared_rig import SharedRig

LOG = logging.getLogger("tests.exceptions")


def has_effect(name: str) -> bool:
    """Whether a callback of this name may raise after its effect. A loan that raises has not begun (`Loan.begin`)."""
    return name in ("done", "loan end", "found", "count")


class Lent:
    """A loan that knows whether somebody has it."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self.held = 0

    def begin(self, worker: int) -> bool:
        return self._faults.through("loan begin", self._begin)

    def _begin(self) -> bool:
        self.held += 1
        return True

    def end(self) -> None:
        self._faults.through("loan end", self._end)

    def _end(self) -> None:
        self.held -= 1


class Owed:
    """What was asked for, and whether it was answered once."""

    def __init__(self) -> None:
        self.answers: list[list[Any]] = []
        self.loans: list[Lent] = []

    def ask(
        self, faults: Faults, call: Callable[[Lent, Callable[[Any], None]], None], told: Callable[[Any], None]
    ) -> None:
        """As the engine does: a tier that raises has not taken the job."""
        answers: list[Any] = []
        loan = Lent(faults)
        self.answers.append(answers)
        self.loans.append(loan)

        def effect(answer: Any) -> None:
            answers.append(answer)
            told(answer)

        try:
            call(loan, faults.of("done", effect))
        except Injected:
            answers.append(None)

    def check(self, faults: Faults) -> None:
        """A callback that raised before its effect has swallowed its own call, and no other."""
        assert sum(not answers for answers in self.answers) == faults.swallowed("done"), self.answers
        assert max(map(len, self.answers)) == 1, "answered twice"
        assert sum(loan.held for loan in self.loans) == faults.swallowed("loan end")


# --- disk ---


class RaisingListener(Listener):
    def __init__(self, faults: Faults) -> None:
        super().__init__()
        self._faults = faults

    def found(self, tier: Tier, objects: FoundObjects) -> None:
        self._faults.through("found", super().found, tier, objects)

    def lost(self, tier: Tier, handles: Sequence[int]) -> None:
        super().lost(tier, [handle for handle in handles if handle in self.held])
        self._faults.through("lost", lambda: None)  # what it knows of is the tier's affair, whatever it then raises


class RaisingDisk(DiskRig):
    """Every callback of the tier goes through the faults."""

    def __init__(self, root: Path, faults: Faults) -> None:
        self.faults = faults
        self.guard = tier_guard("pool", lambda name, amount: self._count(name, amount), LOG, lambda: 0.0)
        self.owed = Owed()
        super().__init__(root, capacity_bytes=16 << 20, scrub_bytes_per_second=1 << 20)

    def start(self, *, settle: bool = True) -> None:
        armed, self.faults.armed = self.faults.armed, False  # what is made there is refused where it raises
        super().start(settle=False)
        self.listener = RaisingListener(self.faults)
        self.tier._listener = self.listener
        self.opener.send = self.faults.of("opener send", self.opener.send)  # type: ignore[method-assign]
        self.opener.start = self.faults.of("opener start", self.opener.start)  # type: ignore[method-assign]
        self.data.submit = self.faults.of("submit", self.data.submit)  # type: ignore[method-assign]
        self.journal.submit = self.faults.of("append", self.journal.submit)  # type: ignore[method-assign]
        self.faults.armed = armed
        if settle:
            self.settle()

    def clock(self) -> float:
        return self.faults.through("clock", super().clock)

    def wall_clock(self) -> float:
        return self.faults.through("wall clock", super().wall_clock)

    def _count(self, name: str, amount: float) -> None:
        self.faults.through("count", super()._count, name, amount)

    def put(self, number: int, slot: int = 0) -> None:
        name = object_name(number)
        self.arena_base = slot * (64 << 10)
        extents = self.fill(name, self.payload(name))

        def told(written: Written) -> None:
            if written.outcome is IoOutcome.OK:
                self.listener.held[written.handle] = name

        self.owed.ask(
            self.faults, lambda loan, done: self.tier.write(name, extents, loan, None, done), told
        )  # fmt: skip

    def get(self, handle: int, slot: int = 0) -> None:
        name = self.listener.held[handle]
        self.arena_base = slot * (64 << 10)
        extents = self.extents(name)

        def told(read: Read) -> None:
            if read.outcome in DAMAGED:
                self.listener.held.pop(handle, None)

        self.owed.ask(self.faults, lambda loan, done: self.tier.read(handle, name, extents, loan, done), told)

    def verify(self, handle: int) -> None:
        self.owed.ask(self.faults, lambda _, done: self.tier.verify(handle, done), lambda _: None)

    def recover(self) -> None:
        """Until all is well again, and nobody has anything to do."""
        self.data.fault = self.journal.fault = lambda _: None
        self.data.end_late()
        self.journal.end_late()
        for _ in range(200):
            self.settle()
            if self.tier.writable and not self.tier._writing.in_flight:
                return
            self.tick(1.0)
        raise AssertionError(self.tier.status())


def disk_scenario(root: Path, faults: Faults) -> RaisingDisk:
    rig = RaisingDisk(root, faults)
    faults.armed = True
    for number in range(3):
        rig.put(number, number)
    rig.settle()
    rig.tick()
    for handle in list(rig.listener.held):
        rig.get(handle)
        rig.verify(handle)
        rig.settle()
    if rig.listener.held:
        flip(rig, max(rig.listener.held), PAGE + 7)
        rig.get(max(rig.listener.held))
        rig.settle()
    if rig.listener.held:
        flip(rig, max(rig.listener.held), PAGE + 7)
        rig.verify(max(rig.listener.held))
        rig.settle()
    rig.start()
    rig.data.fault = failing(WriteObject, IoOutcome.TIMEOUT, 1)
    rig.put(3, 3)
    rig.settle()
    rig.tick(30.0)
    rig.data.end_late()
    rig.opener.send_message(Ended())
    rig.settle()
    rig.tick(70.0)
    rig.settle()
    rig.journal.fault = failing(Append, IoOutcome.IO_ERROR, 1)
    rig.put(4, 4)
    rig.settle()
    rig.tick(70.0)
    for _ in range(4):
        rig.settle()
        rig.tick(5.0)
    if rig.listener.held:
        rig.drop(min(rig.listener.held))
    rig.put(5, 5)
    rig.settle()
    return rig


def check_disk(rig: RaisingDisk) -> None:
    rig.faults.armed = False
    rig.recover()
    rig.owed.check(rig.faults)
    # What an answer that was lost before its effect has written is durable, and nobody knows of it.
    unknown = set(rig.tier._medium.catalog.handles()) - set(rig.listener.held)
    assert len(unknown) <= rig.faults.swallowed("done")
    for handle in unknown:
        rig.listener.held[handle] = rig.tier._medium.catalog.name(handle)
    rig.check()
    assert not rig.data.tasks and not rig.journal.tasks
    assert not rig.tier._medium.space._readers and not rig.tier._reading.in_flight
    written = rig.write(object_name(9))
    assert written.outcome is IoOutcome.OK, "the next object does not become durable"
    assert rig.read(written.handle)[0].outcome is IoOutcome.OK
    names = rig.names()
    rig.start()
    assert rig.names() == names


RigT = TypeVar("RigT")


def raise_at_each_point(
    tmp_path: Path, plain: Faults, scenario: Callable[[Path, Faults], RigT], check: Callable[[RigT], None]
) -> None:
    """Play the scenario again for each callback of the plain one, which raises then."""
    for number, point in enumerate(points(plain.calls, after=has_effect)):
        faults = Faults(point)
        rig = scenario(tmp_path / str(number), faults)
        assert faults.raised == 1, point
        try:
            check(rig)
        except BaseException as error:
            error.add_note(f"raising at {point}")
            raise


def test_an_exception_at_any_callback_of_a_disk_tier_jams_nothing(tmp_path: Path) -> None:
    """Also in the tick, while it opens, and after a journal that failed."""
    plain = Faults()
    rig = disk_scenario(tmp_path / "plain", plain)
    check_disk(rig)
    assert rig.counts["io_failed_callbacks"] == 0, "raises by itself"
    names = {"clock", "wall clock", "count", "done", "loan begin", "loan end", "found", "lost"}
    assert set(plain.calls) == names | {"opener send", "opener start", "submit", "append"}
    raise_at_each_point(tmp_path, plain, disk_scenario, check_disk)


# --- shared ---


class RaisingShared(SharedRig):
    """Likewise."""

    def __init__(self, root: Path, faults: Faults) -> None:
        self.faults = faults
        self.guard = tier_guard("pool", lambda name, amount: self._count(name, amount), LOG, lambda: 0.0)
        self.owed = Owed()
        self.counts: Counter[str] = Counter()
        super().__init__(root)
        listener = self.listener
        self.tier._listener = RecordingListener(listener.found_objects, listener.lost_handles)
        self.tier._listener.found = faults.of("found", listener.found)  # type: ignore[method-assign]
        self.tier._listener.lost = faults.of("lost", listener.lost)  # type: ignore[method-assign]
        self.coordinator.publish = faults.of("publish", self.coordinator.publish)  # type: ignore[method-assign]
        self.workers.submit = faults.of("submit", self.workers.submit)  # type: ignore[method-assign]

    def clock(self) -> float:
        return self.faults.through("clock", super().clock)

    def wall_clock(self) -> float:
        return self.faults.through("wall clock", super().wall_clock)

    def _count(self, name: str, amount: float) -> None:
        self.faults.through("count", super()._count, name, amount)

    def put(self, name: ObjectName) -> list[Written]:
        self.arena[: name.raw_bytes] = payload_of(name)
        written: list[Written] = []
        self.owed.ask(
            self.faults, lambda loan, done: self.tier.write(name, extents_of(name), loan, None, done), written.append
        )  # fmt: skip
        self.settle()
        return written

    def get(self, handle: int) -> None:
        name = self.tier._directory.holdings.name(handle)
        self.owed.ask(
            self.faults, lambda loan, done: self.tier.read(handle, name, extents_of(name), loan, done), lambda _: None
        )  # fmt: skip
        self.settle()

    def verify(self, handle: int) -> None:
        self.owed.ask(self.faults, lambda _, done: self.tier.verify(handle, done), lambda _: None)
        self.settle()

    def find(self, *names: ObjectName) -> None:
        self.owed.ask(
            self.faults, lambda _, done: self.tier.look_up(names, lambda: done(None)), lambda _: None
        )  # fmt: skip
        self.settle()

    @property
    def held(self) -> list[int]:
        return [handle for handle in range(64) if handle in self.tier._directory.holdings]


def shared_scenario(root: Path, faults: Faults) -> RaisingShared:
    rig = RaisingShared(root, faults)
    faults.armed = True
    for number in range(3):
        rig.put(object_name(number))
    rig.tick(2.0)
    for handle in rig.held:
        rig.get(handle)
        rig.verify(handle)
    rig.now += 4000.0
    rig.tier.used(rig.held)
    rig.settle()
    for act in (rig.get, rig.verify):
        if rig.held:
            path = rig.path(rig.held[0])
            data = bytearray(path.read_bytes())
            data[PAGE + 7] ^= 1
            path.write_bytes(bytes(data))
            act(rig.held[0])
    for handle in rig.held:
        name = rig.tier._directory.holdings.name(handle)
        rig.tier.drop(handle)
        rig.find(name, object_name(40))
    rig.workers.fault = failing(PublishFile, IoOutcome.TIMEOUT, 1)
    rig.put(object_name(4))
    rig.tick(2.0)
    rig.workers.end_late()
    rig.workers.fault = failing(PublishFile, IoOutcome.NO_SPACE, 1)
    rig.put(object_name(5))
    rig.coordinator.send_message(rig.coordinator.report)
    rig.tick(2.0)
    return rig


def check_shared(rig: RaisingShared) -> None:
    rig.faults.armed = False
    rig.workers.fault = lambda _: None
    rig.workers.end_late()
    for _ in range(60):
        rig.settle()
        rig.tick(2.0)
    rig.owed.check(rig.faults)
    assert rig.tier.writable, rig.tier.status()
    assert not rig.workers.tasks and not rig.tier._writing.in_flight
    assert not rig.tier._writing._begun and not rig.tier._directory.grant._begun_bytes
    assert not rig.tier._look_ups._asked and not rig.tier._look_ups._look_ups
    assert rig.coordinator.published[-1] == rig.tier._directory.grant.over_bytes
    name = object_name(9)
    written = rig.put(name)
    assert [one.outcome for one in written] == [IoOutcome.OK], "the next object does not become durable"
    assert rig.read(written[0].handle, name) == (IoOutcome.OK, payload_of(name))


def test_an_exception_at_any_callback_of_a_shared_tier_jams_nothing(tmp_path: Path) -> None:
    plain = Faults()
    rig = shared_scenario(tmp_path / "plain", plain)
    check_shared(rig)
    assert rig.counts["io_failed_callbacks"] == 0, "raises by itself"
    names = {"clock", "wall clock", "count", "done", "loan begin", "loan end", "found", "lost", "publish", "submit"}
    assert set(plain.calls) == names
    raise_at_each_point(tmp_path, plain, shared_scenario, check_shared)


# --- what a clock and a directory may hold ---


@pytest.mark.requirement("I4")
@pytest.mark.parametrize("wall", [-1.0, -21_000 * 86_400.0, 0.0])
def test_a_disk_tier_writes_while_the_clock_stands_before_1970_and_after(tmp_path: Path, wall: float) -> None:
    rig = DiskRig(tmp_path / "tier", capacity_bytes=16 << 20)
    for number, rig.wall in enumerate((wall, 1.0, 1_800_000_000.0)):
        handle = rig.stored(number)
        assert rig.read(handle)[0].outcome is IoOutcome.OK
    names = rig.names()
    rig.crash()
    assert rig.names() == names and len(names) == 3
    rig.check()


@pytest.mark.requirement("I4")
@pytest.mark.parametrize("wall", [-1.0, -21_000 * 86_400.0, 0.0])
def test_a_shared_tier_writes_while_the_clock_stands_before_1970_and_after(tmp_path: Path, wall: float) -> None:
    rig = SharedRig(tmp_path / "tier")
    for number, rig.wall in enumerate((wall, 1.0, 1_800_000_000.0)):
        name = object_name(number)
        assert rig.read(rig.stored(name), name) == (IoOutcome.OK, payload_of(name))


@pytest.mark.parametrize("wall", [-1.0, 1.0])
def test_damage_is_kept_while_the_clock_stands_before_1970(tmp_path: Path, wall: float) -> None:
    rig = DiskRig(tmp_path / "tier", capacity_bytes=32 << 20)
    rig.wall = wall
    handle = rig.stored(1)
    flip(rig, handle, PAGE + 7)
    assert rig.read(handle)[0].outcome is IoOutcome.CORRUPT
    rig.settle()
    (kept,) = (rig.config.path / QUARANTINE).glob("*.kvd")
    assert kept.name.startswith("0000000000-" if wall < 0 else "0000000001-")
    assert not rig.tier._medium.space._readers
    rig.check()


@pytest.mark.requirement("I4")
@pytest.mark.parametrize("kind", [WriteObject, Append])
def test_a_job_that_cannot_be_packed_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Any]
) -> None:
    """Over any limit of the wire: parts, extents, files, frame."""
    rig = DiskRig(tmp_path / "tier", capacity_bytes=16 << 20)
    rig.stored(1)
    refused = Counter[type]()

    pack = JOBS.pack

    def over_a_limit(job: Any, number: int) -> bytes:
        if isinstance(job, kind) and not refused[kind]:
            refused[kind] += 1
            raise FrameError("over a limit")
        return pack(job, number)

    monkeypatch.setattr(JOBS, "pack", over_a_limit)
    assert rig.write(object_name(2)).outcome is IoOutcome.CANCELLED
    assert refused[kind] == 1
    for _ in range(20):
        rig.settle()
        rig.tick(5.0)
    assert rig.write(object_name(3)).outcome is IoOutcome.OK
    rig.check()


@pytest.mark.requirement("I4")
def test_a_record_that_cannot_be_packed_fails_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = DiskRig(tmp_path / "tier", capacity_bytes=16 << 20)
    rig.stored(1)
    refused = Counter[str]()

    def no_record(put: Put) -> bytes:
        if not refused["put"]:
            refused["put"] += 1
            raise ValueError("a field is out of range")
        return pack_put(put)

    monkeypatch.setattr(journaling, "pack_put", no_record)
    answers = []
    for number in (2, 3, 4):
        rig.arena_base = number * (64 << 10)
        answers.append(rig.submit_write(object_name(number)))
    rig.settle()
    assert sorted(answer.outcome for (answer,) in answers) == [IoOutcome.CANCELLED, IoOutcome.OK, IoOutcome.OK]
    assert rig.tier.writable
    rig.check()
    assert rig.counts["io_failed_callbacks"] == 1


@pytest.mark.requirement("T2")
def test_any_number_of_quarantined_files_with_any_names_is_tended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody may have put them there: more than a job can name, names that are no text or as long as they can be."""
    assert vars(quarantining)["FILES_PER_JOB_MAX"] == FILES_MAX
    monkeypatch.setattr(quarantining, "FILES_PER_JOB_MAX", 64)
    rig = DiskRig(tmp_path / "tier", capacity_bytes=16 << 20)
    folder = rig.config.path / QUARANTINE
    for number in range(130):
        (rig.config.path / quarantine_name(number, number, "corrupt")).touch()
    long = "0" * 251 + ".kvd"
    for name in (b"0\xff\xfe.kvd", long.encode()):
        (folder / os.fsdecode(name)).write_bytes(b"x")
    rig.crash()
    rig.tick(100.0)
    rig.settle()
    assert rig.tier.writable
    assert not list(folder.iterdir())
    assert rig.counts["io_failed_callbacks"] == 0
    removed = [job for job, _ in rig.data.done if isinstance(job, Remove)]
    assert [len(job.files) for job in removed] == [64, 64, 4]
    assert rig.write(object_name(1)).outcome is IoOutcome.OK


def test_a_loan_whose_end_raises_gives_back_the_place_that_it_held() -> None:
    class Raising:
        def begin(self, worker: int) -> bool:
            return True

        def end(self) -> None:
            raise Injected

    ended: list[int] = []
    hold = Hold(Raising(), lambda: ended.append(hold.workers))
    assert hold.begin(1)
    with pytest.raises(Injected):
        hold.end()
    assert ended == [0]
