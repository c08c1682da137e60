"""What a tier says of itself while single operations fail that a probe does not meet."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kvdepot.core.objectfile import PAGE_BYTES
from kvdepot.server.io.context import Context
from kvdepot.server.io.direct_io import DirectFiles
from kvdepot.server.io.jobs import Answer, Job, Probe, PublishFile, ReadFile, WriteObject
from kvdepot.server.io.perform import perform
from kvdepot.server.observe.health import readiness
from kvdepot.server.storage.base import IoOutcome
from kvdepot.server.tiers.conformance_harness import name_of, payload_of
from kvdepot.server.tiers.disk.layout import JOURNALS, PROBE, SEGMENTS
from kvdepot.server.tiers.health import State, why_failed

from tests.rigs.disk_rig import DiskRig, object_name
from tests.rigs.io_rig import MIB, IoRig
from tests.rigs.shared_rig import SharedRig

DENIED = Answer(IoOutcome.UNREADABLE, "[Errno 1] open: Operation not permitted: '/tier/segments/00000.seg'")


@pytest.fixture
def disk(tmp_path: Path) -> DiskRig:
    return DiskRig(tmp_path / "tier", probe_seconds=5.0)


@pytest.fixture
def shared(tmp_path: Path) -> SharedRig:
    return SharedRig(tmp_path / "shared", probe_seconds=5.0)


def only(kind: type[Job], answer: Answer) -> Callable[[Job], Answer | None]:
    """A fault of these jobs alone: probes do not meet it."""
    return lambda job: answer if isinstance(job, kind) else None


def wait(rig: DiskRig | SharedRig, seconds: int) -> None:
    for _ in range(seconds):
        rig.tick(1.0)
        rig.settle()


# Writes that fail while everything else works


@pytest.mark.parametrize("outcome", [IoOutcome.UNREADABLE, IoOutcome.IO_ERROR])
def test_a_disk_tier_whose_writes_fail_in_a_row_is_read_only_and_read(disk: DiskRig, outcome: IoOutcome) -> None:
    kept = disk.stored(1)
    disk.data.fault = only(WriteObject, Answer(outcome, DENIED.detail))
    for number in range(disk.config.failures):
        assert disk.writable()
        assert disk.write(object_name(10 + number)).outcome is outcome
        assert disk.read(kept)[0].outcome is IoOutcome.OK
    status = disk.tier.status()
    assert status.state == State.READ_ONLY
    assert "writes fail: " in status.reason and "open: " in status.reason and "00000.seg" in status.reason
    assert disk.read(kept)[0].outcome is IoOutcome.OK
    disk.check()


def test_a_write_that_works_in_between_is_proof(disk: DiskRig) -> None:
    for number in range(3 * disk.config.failures):
        disk.data.fault = only(WriteObject, DENIED) if number % disk.config.failures else lambda _: None
        disk.write(object_name(number))
    assert disk.tier.status().state == State.READY


def test_a_tier_whose_probe_works_and_whose_writes_do_not_is_not_ready(disk: DiskRig) -> None:
    """From the second time on; until a write works, and not only a probe."""
    disk.data.fault = only(WriteObject, DENIED)
    numbers = iter(range(10, 1000))
    ready, seen = 0, set()
    for _ in range(200):
        if disk.writable():
            disk.write(object_name(next(numbers)))
        status = disk.tier.status()
        seen.add(status.state)
        ready += status.state == State.READY and not status.reason and next(numbers) > 20
        wait(disk, 1)
    assert State.READ_ONLY in seen
    assert ready <= disk.config.failures, "at the first return alone"
    disk.data.fault = lambda _: None
    while not disk.writable():
        wait(disk, 1)
    status = disk.tier.status()
    assert status.state == State.DEGRADED and "no write has worked since: writes fail" in status.reason
    disk.stored(5)
    assert (disk.tier.status().state, disk.tier.status().reason) == (State.READY, "")
    disk.check()


def test_a_place_that_cannot_be_written_is_not_where_the_next_write_goes(disk: DiskRig) -> None:
    """A bad sector of a segment, which the probe's file does not share."""
    bad: set[tuple[str, int]] = set()

    def sector(job: Job) -> Answer | None:
        if not isinstance(job, WriteObject):
            return None
        place = job.parts[0].file, job.parts[0].offset
        bad.add(next(iter(bad), place))
        return Answer(IoOutcome.IO_ERROR, "bad sector") if place in bad else None

    disk.stored(1)
    disk.data.fault = sector
    assert disk.write(object_name(2)).outcome is IoOutcome.IO_ERROR
    for number in range(3, 10):
        disk.stored(number)
    assert disk.tier.status().state == State.READY
    disk.check()
    used = disk.tier.used_bytes
    for number in range(1, 10):
        for handle, name in list(disk.listener.held.items()):
            if name == object_name(number):
                disk.drop(handle)
    disk.settle()
    assert disk.tier.used_bytes == used // 9, "the bad place counts as used"
    disk.crash()
    assert disk.tier.used_bytes == 0, "a new run tries it again"
    disk.check()


def test_an_idle_tier_is_not_doubted_for_ever_and_doubted_again_at_once(disk: DiskRig) -> None:
    numbers = iter(range(10, 1000))
    disk.data.fault = only(WriteObject, DENIED)
    for stop in range(4):
        while disk.writable():
            disk.write(object_name(next(numbers)))
        while not disk.writable():
            wait(disk, 1)
        assert disk.tier.status().state == (State.DEGRADED if stop else State.READY)
        wait(disk, 31)
        assert (disk.tier.status().state, disk.tier.status().reason) == (State.READY, "")


def test_a_shared_tier_whose_publications_fail_between_look_ups_is_read_only(shared: SharedRig) -> None:
    shared.workers.fault = only(PublishFile, Answer(IoOutcome.IO_ERROR, "[Errno 22] rename: Invalid argument: '/x'"))
    for number in range(shared.config.failures):
        assert shared.tier.status().state == State.READY
        assert shared.write(name_of(number)).outcome is IoOutcome.IO_ERROR
    status = shared.tier.status()
    assert status.state == State.READ_ONLY and "rename: Invalid argument" in status.reason
    shared.workers.fault = lambda _: None
    wait(shared, 20)
    assert shared.write(name_of(100)).outcome is IoOutcome.OK
    assert shared.tier.status().state == State.READY


def test_a_shared_tier_that_may_read_no_file_says_so_until_it_reads_one(shared: SharedRig) -> None:
    names = [name_of(number) for number in range(shared.config.failures + 1)]
    handles = [shared.stored(name) for name in names]
    shared.workers.fault = only(ReadFile, DENIED)
    for handle, name in zip(handles[:-1], names, strict=False):
        assert shared.tier.status().state == State.READY
        assert shared.read(handle, name)[0] is IoOutcome.UNREADABLE
    status = shared.tier.status()
    assert status.state == State.DEGRADED and "reads fail: permission denied" in status.reason
    shared.workers.fault = lambda _: None
    assert shared.read(handles[-1], names[-1]) == (IoOutcome.OK, payload_of(names[-1]))
    assert (shared.tier.status().state, shared.tier.status().reason) == (State.READY, "")


def test_the_same_trouble_of_other_files_is_said_once(shared: SharedRig, caplog: pytest.LogCaptureFixture) -> None:
    def full(job: Job) -> Answer | None:
        detail = f"[Errno 28] open: no inodes left: '/tier/.tmp/node-{len(shared.workers.done)}'"
        return Answer(IoOutcome.NO_SPACE, detail) if isinstance(job, PublishFile) else None

    shared.workers.fault = full
    with caplog.at_level(logging.WARNING):
        for number in range(55):
            if shared.tier.writable:
                shared.write(name_of(number))
            wait(shared, 1)
    said = [record.getMessage() for record in caplog.records]
    assert len([line for line in said if "no inodes left" in line]) == 1, said
    assert not any("full" in line for line in said)
    assert "no inodes left" in shared.tier.status().reason


def test_a_reason_names_what_is_missing() -> None:
    assert why_failed(IoOutcome.NO_SPACE, "open: no inodes left: '/x'") == "open: no inodes left: '/x'"
    assert why_failed(IoOutcome.NO_SPACE, "d") == "the file system is full: d"
    assert why_failed(IoOutcome.READ_ONLY, "[Errno 30] d") == "the file system is read-only: [Errno 30] d"
    assert why_failed(IoOutcome.READ_ONLY, DENIED.detail).startswith("permission denied: [Errno 1] open: ")


def test_tiers_in_trouble_are_named_by_healthz() -> None:
    facts: dict[str, Any] = {"serving": True, "stopping": False, "ready_bytes": 1, "draining": False}
    assert readiness(growth_reason="", **facts).reason == ""
    found = readiness(growth_reason="no room", tiers_reason="tier d: read-only: full", **facts)
    assert (found.ready, found.reason) == (True, "no room; tier d: read-only: full")


# The probe does what jobs do


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[IoRig]:
    rig = IoRig(tmp_path)
    yield rig
    rig.close()


def probed(rig: IoRig, folder: str = SEGMENTS) -> Answer:
    context = Context(os.fspath(rig.directory), rig.arena)
    try:
        return perform(Probe(PROBE, folder=folder), context)
    finally:
        context.close()


def refusing(monkeypatch: pytest.MonkeyPatch, call: str, number: int, when: Callable[..., bool]) -> None:
    real = getattr(os, call)

    def refuse(*arguments: Any, **named: Any) -> Any:
        if when(*arguments):
            raise OSError(number, os.strerror(number), arguments[0] if isinstance(arguments[0], str) else None)
        return real(*arguments, **named)

    monkeypatch.setattr(os, call, refuse)


def test_a_probe_of_a_folder_leaves_it_as_it_is(rig: IoRig) -> None:
    before = [(path, path.stat().st_mtime_ns) for path in sorted(rig.directory.rglob("*"))]
    assert probed(rig).outcome is IoOutcome.OK
    after = [(path, path.stat().st_mtime_ns) for path in sorted(rig.directory.rglob("*"))]
    assert after == before
    assert rig.segment.stat().st_size == 16 * MIB


def test_files_that_can_be_read_and_not_written_are_found(rig: IoRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `chattr +i` makes them: the probe's own file can be made all the while."""
    refusing(monkeypatch, "open", errno.EPERM, lambda path, flags, *_: path.endswith(".seg") and flags & os.O_RDWR)
    answer = probed(rig)
    assert answer.outcome is IoOutcome.READ_ONLY, "what is there can be served"
    assert "open: " in answer.detail and os.fspath(rig.segment) in answer.detail


@pytest.mark.parametrize(
    ("call", "number", "outcome"),
    [("open", errno.EACCES, IoOutcome.UNREADABLE), ("preadv", errno.EIO, IoOutcome.IO_ERROR)],
)
def test_files_that_cannot_be_read_are_found(
    rig: IoRig, monkeypatch: pytest.MonkeyPatch, call: str, number: int, outcome: IoOutcome
) -> None:
    refusing(monkeypatch, call, number, lambda where, *_: call == "preadv" or str(where).endswith(".seg"))
    answer = probed(rig)
    assert answer.outcome is outcome
    assert os.fspath(rig.segment) in answer.detail


def test_a_file_that_cannot_be_read_keeps_no_path_out_of_use_where_others_can(
    rig: IoRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its objects are never given up, which takes reads that fail between those of others that work."""
    for number in range(1, 3):
        (rig.directory / f"segments/{number:05d}.seg").write_bytes(bytes(PAGE_BYTES))
    refusing(monkeypatch, "preadv", errno.EIO, lambda fd, *_: Path(f"/proc/self/fd/{fd}").readlink() == rig.segment)
    assert probed(rig).outcome is IoOutcome.OK


def test_one_file_that_may_not_be_read_is_found_among_others(rig: IoRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its medium is sound, and only somebody who gives permission again can help."""
    (rig.directory / "segments/00001.seg").write_bytes(bytes(PAGE_BYTES))
    refusing(monkeypatch, "open", errno.EACCES, lambda path, *_: path == os.fspath(rig.segment))
    answer = probed(rig)
    assert answer.outcome is IoOutcome.UNREADABLE
    assert os.fspath(rig.segment) in answer.detail


def test_the_page_that_a_probe_reads_of_a_file_is_another_each_time(
    rig: IoRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def first_page(fd: int, _: object, offset: int) -> bool:
        if Path(f"/proc/self/fd/{fd}").readlink() != rig.segment:
            return False
        asked.append(offset)
        return offset == 0

    refusing(monkeypatch, "preadv", errno.EIO, first_page)
    outcomes = [probed(rig).outcome for _ in range(8)]
    assert IoOutcome.OK in outcomes, "one place is bad, and all others of the only file can be read"
    assert len(set(asked)) > 1
    assert all(offset % PAGE_BYTES == 0 and offset < 16 * MIB for offset in asked)


def test_a_directory_where_no_file_can_be_made_can_be_read(rig: IoRig, monkeypatch: pytest.MonkeyPatch) -> None:
    refusing(monkeypatch, "open", errno.EACCES, lambda path, flags, *_: flags & os.O_CREAT)
    assert probed(rig).outcome is IoOutcome.READ_ONLY
    assert probed(rig, folder="").outcome is IoOutcome.UNREADABLE


def test_a_file_system_that_renames_nothing_is_found(rig: IoRig, monkeypatch: pytest.MonkeyPatch) -> None:
    before = sorted(rig.directory.rglob("*"))
    refusing(monkeypatch, "rename", errno.EINVAL, lambda *_: True)
    answer = probed(rig, folder="")
    assert answer.outcome is IoOutcome.IO_ERROR and "rename: " in answer.detail
    assert sorted(rig.directory.rglob("*")) == before


@pytest.mark.parametrize("call", ["rename", "open", "pread", "pwritev", "fdatasync"])
def test_a_probe_that_fails_leaves_nothing_either(rig: IoRig, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    before = sorted(rig.directory.rglob("*"))
    refusing(monkeypatch, call, errno.EIO, lambda *given: call != "open" or not given[1] & os.O_CREAT)
    assert probed(rig, folder="").outcome is IoOutcome.IO_ERROR
    assert sorted(rig.directory.rglob("*")) == before


def test_what_a_probe_could_not_remove_is_not_in_the_way_of_the_next(
    rig: IoRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sorted(rig.directory.rglob("*"))
    with monkeypatch.context() as patch:
        refusing(patch, "unlink", errno.EPERM, os.path.exists)
        refusing(patch, "rename", errno.EPERM, lambda *_: True)
        assert "rename: " in probed(rig, folder="").detail
    assert sorted(rig.directory.rglob("*")) != before
    assert probed(rig, folder="").outcome is IoOutcome.OK
    assert sorted(rig.directory.rglob("*")) == before


def test_of_very_many_files_others_are_looked_at_each_time(rig: IoRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a probe of a large tier is over in time, and a bad one is found in the end."""
    for number in range(1, 300):
        (rig.directory / f"segments/{number:05d}.seg").write_bytes(bytes(PAGE_BYTES))
    written: set[str] = set()
    real = DirectFiles.check_writable

    def note(files: DirectFiles, file: str) -> None:
        written.add(file)
        real(files, file)

    monkeypatch.setattr(DirectFiles, "check_writable", note)
    assert probed(rig).outcome is IoOutcome.OK
    assert len(written) == 256
    for _ in range(20):
        probed(rig)
    assert len(written) == 300


def test_a_folder_without_files_is_no_trouble(rig: IoRig) -> None:
    (rig.directory / JOURNALS).mkdir()
    assert probed(rig, folder=JOURNALS).outcome is IoOutcome.OK
    assert probed(rig, folder="none").outcome is IoOutcome.GONE
