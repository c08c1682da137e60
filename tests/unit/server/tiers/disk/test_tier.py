"""The disk tier over real files, with workers and opening process in this process."""

from __future__ import annotations

import logging
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from kvdepot.core.errors import ConfigError
from kvdepot.core.objectfile import Codec
from kvdepot.server.io.jobs import Allocate, Answer, Job, Probe, ReadObject, WriteObject
from kvdepot.server.storage.base import IoOutcome, Read
from kvdepot.server.tiers.disk.layout import DiskLayout
from kvdepot.server.tiers.disk.records import SNAPSHOT_HEADER_BYTES, record_bytes
from kvdepot.server.tiers.health import State

from tests.rigs.disk_rig import PAGE, DiskRig, Loaned, failing, flip, object_name

MIB = 1 << 20


@pytest.fixture
def rig(tmp_path: Path) -> DiskRig:
    return DiskRig(tmp_path / "tier")


# Objects in and out


def test_what_was_written_is_read_back_and_found_after_a_crash(rig: DiskRig) -> None:
    assert rig.tier.status().state == State.READY
    names = [object_name(number, raw_bytes=2 * PAGE + number, boundary=32 * (9 - number)) for number in range(8)]
    for name in names:
        assert rig.write(name).outcome is IoOutcome.OK
    for _ in range(2):
        for handle, name in list(rig.listener.held.items()):
            read, data = rig.read(handle)
            assert (read.outcome, data) == (IoOutcome.OK, rig.payload(name))
        rig.check()
        rig.crash()
        assert rig.listener.found_order == names[::-1]  # parents before children


def test_a_put_is_in_the_journal_before_the_write_is_answered(rig: DiskRig) -> None:
    answers = rig.submit_write(object_name(1))
    while rig.data.step():
        pass
    assert not answers
    rig.journal.step()
    assert answers[0].outcome is IoOutcome.OK


def test_bytes_are_reused_only_after_the_kill_and_the_readers(rig: DiskRig) -> None:
    handle = rig.stored(1)
    place = rig.tier._medium.catalog.fragments(handle)
    free_bytes, used_bytes = rig.tier._medium.space.free_bytes, rig.tier.used_bytes
    reads: list[Read] = []
    name = rig.listener.held[handle]
    rig.tier.read(handle, name, rig.extents(name), Loaned(), reads.append)
    rig.drop(handle)
    assert rig.tier.used_bytes == used_bytes - 3 * PAGE  # at once
    assert rig.tier._medium.space.free_bytes == free_bytes
    rig.journal.step()
    assert rig.tier._medium.space.free_bytes == free_bytes  # the KILL is there, but somebody reads
    rig.data.step()
    assert reads[0].outcome is IoOutcome.OK
    assert rig.tier._medium.space.free_bytes == free_bytes + 3 * PAGE
    assert rig.tier._medium.catalog.fragments(rig.stored(2)) == place
    rig.check()


@pytest.mark.requirement("I6")
def test_a_place_stays_while_a_worker_hangs_over_it(rig: DiskRig) -> None:
    rig.stored(0)
    free_bytes = rig.tier._medium.space.free_bytes
    rig.data.fault = failing(WriteObject, IoOutcome.TIMEOUT, 1)
    assert rig.write(object_name(1)).outcome is IoOutcome.TIMEOUT
    assert rig.tier._medium.space.free_bytes == free_bytes - 3 * PAGE
    rig.data.fault = failing(ReadObject, IoOutcome.TIMEOUT, 1)
    handle = rig.stored(2)
    assert rig.read(handle)[0].outcome is IoOutcome.TIMEOUT
    rig.drop(handle)
    rig.settle()
    assert rig.tier._medium.space.free_bytes == free_bytes - 6 * PAGE
    rig.data.end_late()
    assert rig.tier._medium.space.free_bytes == free_bytes
    rig.check()


def test_a_loan_that_is_refused_cancels_and_costs_nothing(rig: DiskRig) -> None:
    rig.stored(0)
    free_bytes = rig.tier._medium.space.free_bytes
    name = object_name(1)
    outcomes: list[IoOutcome] = []
    refusing = Loaned(refuses=True)
    rig.tier.write(name, rig.extents(name), refusing, None, lambda written: outcomes.append(written.outcome))
    rig.settle()
    assert outcomes == [IoOutcome.CANCELLED]
    assert refusing.ended == 0
    assert rig.tier._medium.space.free_bytes == free_bytes


def test_a_bad_copy_in_ram_is_not_stored(rig: DiskRig) -> None:
    assert rig.write(object_name(1), raw_sum=12345).outcome is IoOutcome.CORRUPT
    assert rig.tier.status().objects == 0
    rig.check()


def test_what_a_codec_saves_is_free(tmp_path: Path) -> None:
    rig = DiskRig(tmp_path / "tier", codec=int(Codec.LZ4))
    name = object_name(1, raw_bytes=16 * PAGE)
    extents = rig.fill(name, bytes(16 * PAGE))
    handles: list[int] = []
    rig.tier.write(name, extents, Loaned(), None, lambda written: handles.append(written.handle))
    rig.settle()
    assert rig.tier.used_bytes == 2 * PAGE
    rig.listener.held[handles[0]] = name
    rig.crash()
    (handle,) = rig.listener.held
    read, data = rig.read(handle)
    assert (read.outcome, data) == (IoOutcome.OK, bytes(16 * PAGE))
    rig.check()


def test_objects_lie_across_segments_and_in_pieces(rig: DiskRig) -> None:
    name = object_name(1, raw_bytes=MIB + MIB // 2)
    for number in range(12):
        assert rig.write(object_name(number, raw_bytes=MIB + MIB // 2)).outcome is IoOutcome.OK
    rig.check()
    for handle in [handle for handle, held in rig.listener.held.items() if held != name][::2]:
        rig.drop(handle)
    rig.settle()
    large = rig.write(object_name(50, raw_bytes=3 * MIB))
    assert large.outcome is IoOutcome.OK
    rig.crash()
    for handle, held in list(rig.listener.held.items()):
        read, data = rig.read(handle)
        assert (read.outcome, data) == (IoOutcome.OK, rig.payload(held))
    rig.check()


# Room


def fill_up(rig: DiskRig, raw_bytes: int = 64 << 10) -> int:
    number = 0
    while rig.write(object_name(number, raw_bytes=raw_bytes)).outcome is IoOutcome.OK:
        number += 1
        rig.tier.tick()
        if number % 16 == 0:
            assert rig.disk_usage_bytes() <= rig.config.capacity_bytes
    return number


@pytest.mark.requirement("T2")
@pytest.mark.parametrize("capacity_mib", [16, 32, 64])
def test_never_above_its_capacity_and_uses_most_of_it(tmp_path: Path, capacity_mib: int) -> None:
    rig = DiskRig(tmp_path / "tier", capacity_bytes=capacity_mib * MIB, quarantine_bytes=2 * MIB)
    stored = fill_up(rig)
    assert stored * 17 * PAGE > 0.75 * rig.config.capacity_bytes
    assert rig.disk_usage_bytes() <= rig.config.capacity_bytes
    assert rig.tier.used_bytes <= rig.tier.capacity_bytes
    for handle in list(rig.listener.held)[: stored // 4]:  # quarantine fills too
        flip(rig, handle, PAGE)
        assert rig.read(handle)[0].outcome is IoOutcome.CORRUPT
        assert rig.disk_usage_bytes() <= rig.config.capacity_bytes
    assert rig.tier.status().quarantined_bytes > 0
    for round_number in range(3):  # journal and snapshots too
        for handle in list(rig.listener.held)[:64]:
            rig.drop(handle)
        for number in range(64):
            rig.write(object_name(10_000 + 100 * round_number + number, raw_bytes=64 << 10))
        rig.crash()
        assert rig.disk_usage_bytes() <= rig.config.capacity_bytes
    rig.check()


def test_a_full_tier_says_so_at_once_and_waits_for_what_is_on_its_way(rig: DiskRig) -> None:
    fill_up(rig)
    assert rig.submit_write(object_name(9999, raw_bytes=64 << 10))[0].outcome is IoOutcome.NO_SPACE
    rig.drop(next(iter(rig.listener.held)))
    used_bytes = rig.tier.used_bytes
    answers = rig.submit_write(object_name(9999, raw_bytes=64 << 10))
    assert not answers  # the KILL is not in the journal yet
    assert rig.tier.used_bytes == used_bytes + 17 * PAGE  # or the engine would promise these bytes to another
    assert rig.submit_write(object_name(9998, raw_bytes=64 << 10))[0].outcome is IoOutcome.NO_SPACE, "they are taken"
    rig.settle()
    assert answers[0].outcome is IoOutcome.OK


@pytest.mark.requirement("I4")
def test_no_more_objects_than_a_snapshot_has_room_for(rig: DiskRig) -> None:
    """Those that are being written count, too."""
    medium = rig.tier._medium
    medium.layout = replace(medium.layout, snapshot_bytes=SNAPSHOT_HEADER_BYTES + 3 * record_bytes(4))
    answers = [rig.submit_write(object_name(number, raw_bytes=100)) for number in range(4)]
    assert [[written.outcome for written in one] for one in answers] == [[], [], [], [IoOutcome.NO_SPACE]]
    rig.settle()
    assert [one[0].outcome for one in answers[:3]] == [IoOutcome.OK] * 3


@pytest.mark.requirement("I4")
def test_no_more_objects_than_handles(tmp_path: Path) -> None:
    rig = DiskRig(tmp_path / "tier", capacity_bytes=64 * MIB)
    for number in range(rig.tier.handles_max):
        assert rig.write(object_name(number, raw_bytes=100)).outcome is IoOutcome.OK
    assert rig.write(object_name(9999, raw_bytes=100)).outcome is IoOutcome.NO_SPACE
    rig.crash()
    assert len(rig.listener.held) == rig.tier.handles_max


def test_a_lowered_capacity_drops_what_lies_beyond_it(tmp_path: Path) -> None:
    rig = DiskRig(tmp_path / "tier", capacity_bytes=64 * MIB)
    fill_up(rig, 256 << 10)
    rig = DiskRig(tmp_path / "tier", capacity_bytes=32 * MIB)
    assert 0 < len(rig.listener.held) <= rig.tier.capacity_bytes // (260 << 10)
    assert rig.disk_usage_bytes() <= 32 * MIB
    for handle in list(rig.listener.held):
        assert rig.read(handle)[0].outcome is IoOutcome.OK
    rig.check()


def test_impossible_capacities_are_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match="16777216"):
        DiskLayout.plan(1 * MIB, MIB)


@pytest.mark.requirement("T2")
@pytest.mark.parametrize("capacity_bytes", [16 * MIB, 64 * MIB, 1 << 30, 10 << 30, 2 << 40, 40 << 40])
def test_all_parts_together_are_within_the_capacity(capacity_bytes: int) -> None:
    layout = DiskLayout.plan(capacity_bytes, 10 << 30)
    parts = (
        layout.data_bytes + 3 * layout.journal_bytes + 2 * layout.snapshot_bytes + layout.quarantine_bytes
    )  # fmt: skip
    assert 0.8 * capacity_bytes < layout.data_bytes < parts < capacity_bytes
    assert layout.segments <= 8_192
    assert sum(layout.length_of(number) for number in range(layout.segments)) == layout.data_bytes


@pytest.mark.requirement("T5")
def test_a_file_system_smaller_than_the_capacity_is_used_as_far_as_it_goes(
    rig: DiskRig, caplog: pytest.LogCaptureFixture
) -> None:
    allowed = 4

    def fault(job: Job) -> Answer | None:
        full = isinstance(job, Allocate) and int(Path(job.file).stem) >= allowed
        return Answer(IoOutcome.NO_SPACE, "disk full") if full else None

    rig.data.fault = fault
    stored = fill_up(rig)
    assert stored == allowed * rig.tier._medium.layout.segment_bytes // (17 * PAGE)
    assert rig.tier.capacity_bytes == allowed * rig.tier._medium.layout.segment_bytes
    status = rig.tier.status()
    assert (status.state, "cannot be made: disk full" in status.reason) == (State.DEGRADED, True)
    assert rig.tier.writable
    (said,) = [one for one in caplog.messages if "cannot be made" in one]
    assert "degraded: segment" in said
    allowed = 6
    rig.tick(61)
    rig.settle()
    assert fill_up(rig) > 0 or rig.tier.status().objects > stored
    assert rig.tier._growth.segments == 6


@pytest.mark.requirement("T5")
def test_room_that_comes_back_is_told_and_taken_though_the_tier_needs_none(
    rig: DiskRig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    full = True

    def fault(job: Job) -> Answer | None:
        return Answer(IoOutcome.NO_SPACE, "disk full") if full and isinstance(job, Allocate) else None

    handles = [rig.write(object_name(number, raw_bytes=64 << 10)).handle for number in range(16)]
    rig.data.fault = fault
    fill_up(rig)
    for handle in handles:
        rig.drop(handle)
    rig.settle()
    assert "cannot be made: disk full" in rig.tier.status().reason
    assert rig.tier._medium.space.free_bytes >= rig.tier._medium.layout.segment_bytes, "it needs no other one"
    full = False
    rig.tick(16)
    rig.settle()
    assert (rig.tier.status().state, rig.tier.status().reason) == (State.READY, "")
    assert "no longer degraded" in caplog.messages[-1]


@pytest.mark.requirement("T5")
@pytest.mark.parametrize("outcome", [IoOutcome.IO_ERROR, IoOutcome.TIMEOUT])
def test_a_worker_that_dies_over_a_segment_does_not_shrink_the_tier(rig: DiskRig, outcome: IoOutcome) -> None:
    failures = 2

    def fault(job: Job) -> Answer | None:
        nonlocal failures
        failures -= isinstance(job, Allocate)
        return Answer(outcome, "a worker ended") if isinstance(job, Allocate) and failures >= 0 else None

    rig.data.fault = fault
    capacity_bytes = rig.tier.capacity_bytes
    answers = rig.submit_write(object_name(1, raw_bytes=2 * rig.tier._medium.layout.segment_bytes))
    for _ in range(4):
        rig.settle()
        assert (rig.tier.capacity_bytes, rig.tier.status().reason) == (capacity_bytes, "")
        rig.data.end_late()
        rig.tick(1)
    rig.settle()
    assert failures < 0
    assert [written.outcome for written in answers] == [IoOutcome.OK]


@pytest.mark.requirement("I6")
def test_no_second_segment_is_made_beside_a_worker_that_hangs_over_one(rig: DiskRig) -> None:
    """The first worker died over it, the second one hangs."""
    name = object_name(1, raw_bytes=2 * rig.tier._medium.layout.segment_bytes)
    rig.data.fault = failing(Allocate, IoOutcome.TIMEOUT)
    rig.data.deaths = 1
    rig.submit_write(name)
    for _ in range(10):
        rig.settle()
        rig.tick(1)
    assert len(rig.data.late) == 1
    rig.data.fault = lambda _: None
    rig.data.end_late()
    assert rig.write(name).outcome is IoOutcome.OK


def test_an_opening_removes_the_probes_of_processes_that_are_gone(rig: DiskRig) -> None:
    """A killed worker leaves its file; one of a living process may be under way."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    alive = [Probe(".probe").made_by(os.getpid(), 12), ".probe.1.1.tmp"]
    others = [".probe-doctor-77-abcd", ".probe.x.1"]
    left = [
        Probe(".probe").made_by(ended.pid, 12),
        f".probe.{ended.pid}.12.tmp",
        ".probe.9999999999.3",
        ".probe",
    ]
    for name in (*alive, *others, *left):
        (rig.config.path / name).write_bytes(b"x")
    rig.crash()
    found = {path.name for path in rig.config.path.iterdir() if path.name.startswith(".probe")}
    assert found == {*alive, *others}
    assert rig.tier.writable


def test_the_write_budget_of_a_day_survives_a_restart(tmp_path: Path) -> None:
    rig = DiskRig(tmp_path / "tier", write_budget_bytes=9 * PAGE)
    for number in range(3):
        assert not rig.budget_spent()
        rig.stored(number)
    assert rig.budget_spent()
    assert rig.write(object_name(9)).outcome is IoOutcome.CANCELLED
    assert rig.tier.status().written_today_bytes == 9 * PAGE
    for _ in range(2):  # from the journal, then from the snapshot
        rig.crash()
        assert rig.budget_spent()
    assert "write budget" in rig.tier.status().reason
    rig.wall += 86_400
    assert not rig.budget_spent()
    rig.stored(9)
