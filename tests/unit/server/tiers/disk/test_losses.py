"""The disk tier where single objects are lost, where many are lost at once, and where its caller fails."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from kvdepot.server.io.jobs import Answer, Append, Job, Quarantine, ReadObject
from kvdepot.server.storage.base import IoOutcome, ObjectName, Tier
from kvdepot.server.tiers.disk import reopening as reopening_module
from kvdepot.server.tiers.disk.records import Mark, RecordType
from kvdepot.server.tiers.health import State

from tests.fakes.raising import Faults, Point
from tests.rigs.disk_rig import PAGE, DiskRig, Loaned, failing, flip, object_name


@pytest.fixture
def rig(tmp_path: Path) -> DiskRig:
    return DiskRig(tmp_path / "tier")


def reads_badly(rig: DiskRig, handle: int) -> None:
    """From now on the medium has an error wherever the object lies."""
    bad = set(rig.tier._medium.parts(handle))

    def fault(job: Job) -> Answer | None:
        return Answer(IoOutcome.IO_ERROR) if isinstance(job, ReadObject) and bad & set(job.parts) else None

    rig.data.fault = fault


@pytest.mark.requirement("T5")
def test_an_object_that_alone_cannot_be_read_is_given_up_and_its_place_is_not_used_again(rig: DiskRig) -> None:
    hot, other = rig.stored(1), rig.stored(2)
    reads_badly(rig, hot)
    free_bytes, used_bytes = rig.tier._medium.space.free_bytes, rig.tier.used_bytes
    outcomes = []
    for _ in range(3):
        outcomes.append(rig.read(hot)[0].outcome)
        assert rig.read(other)[0].outcome is IoOutcome.OK
    assert outcomes == [IoOutcome.IO_ERROR, IoOutcome.IO_ERROR, IoOutcome.BAD_PLACE]
    assert rig.names() == {object_name(2)}
    assert (rig.tier._medium.space.free_bytes, rig.tier.used_bytes) == (free_bytes, used_bytes)
    assert not list((rig.config.path / "quarantine").iterdir()), "what cannot be read cannot be copied"
    assert rig.read(rig.stored(1))[0].outcome is IoOutcome.OK
    rig.check()
    rig.data.fault = lambda _: None
    (rig.config.path / "segments" / "00000.seg").unlink()
    assert rig.read(other)[0].outcome is IoOutcome.GONE  # an opening in between does not forget the place
    rig.tick(6)
    rig.settle()
    rig.check()
    assert rig.tier.used_bytes == 3 * PAGE
    rig.crash()
    assert (rig.names(), rig.tier.used_bytes) == (set(), 0)


@pytest.mark.requirement("T5")
@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO])
@pytest.mark.parametrize("folder", ["segments", "quarantine"])
def test_a_folder_that_cannot_be_listed_is_not_taken_for_empty(
    rig: DiskRig, monkeypatch: pytest.MonkeyPatch, folder: str, code: int
) -> None:
    """The next index would be written without all that lies there."""
    rig.stored(1)
    refused = os.fspath(rig.config.path / folder)
    with monkeypatch.context() as patch:
        for call in ("listdir", "scandir"):
            real = getattr(os, call)

            def listing(path: Any = ".", real: Callable[..., Any] = real) -> Any:
                if not isinstance(path, int) and os.fspath(path) == refused:
                    raise OSError(code, os.strerror(code), refused)
                return real(path)

            patch.setattr(os, call, listing)
        rig.crash()
        assert (rig.tier.readable, rig.tier.writable) == (folder == "quarantine", False)
        assert os.strerror(code) in rig.tier.status().reason
    rig.tick(60)
    rig.settle()
    assert rig.names() == {object_name(1)}


@pytest.mark.requirement("T5")
def test_a_quarantined_file_that_is_removed_meanwhile_ends_no_opening(
    rig: DiskRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.stored(1)
    going = rig.config.path / "quarantine" / "going.kvd"
    going.touch()
    real = os.listdir

    def listing(path: Any = ".") -> list[str]:
        names: list[str] = real(path)
        if going.name in names:
            going.unlink()
        return names

    monkeypatch.setattr(os, "listdir", listing)
    rig.crash()
    assert (rig.names(), going.exists()) == ({object_name(1)}, False)


@pytest.mark.requirement("T5")
def test_errors_while_nothing_works_are_not_held_against_an_object(rig: DiskRig) -> None:
    handle = rig.stored(1)
    rig.data.fault = failing(ReadObject, IoOutcome.IO_ERROR)
    assert {rig.read(handle)[0].outcome for _ in range(20)} == {IoOutcome.IO_ERROR}
    rig.data.fault = lambda _: None
    assert rig.read(handle)[0].outcome is IoOutcome.OK


@pytest.mark.requirement("T5")
def test_errors_while_no_object_can_be_read_are_not_held_against_one_though_writes_work(rig: DiskRig) -> None:
    handle = rig.stored(1)
    rig.data.fault = failing(ReadObject, IoOutcome.IO_ERROR)
    for number in range(2, 12):
        rig.stored(number)
        assert rig.read(handle)[0].outcome is IoOutcome.IO_ERROR
    rig.data.fault = lambda _: None
    assert rig.read(handle)[0].outcome is IoOutcome.OK


@pytest.mark.requirement("I4")
def test_bad_places_are_bounded(tmp_path: Path) -> None:
    rig = DiskRig(tmp_path / "tier")
    total = rig.tier._medium.layout.data_bytes
    other = rig.stored(0)
    for number in range(1, total // 64 // (64 * PAGE) + 4):
        handle = rig.stored(number, raw_bytes=63 * PAGE)
        reads_badly(rig, handle)
        for _ in range(3):
            rig.read(handle)
            rig.read(other)
        rig.data.fault = lambda _: None
        assert rig.names() == {object_name(0)}
        assert rig.tier.used_bytes <= 3 * PAGE + total / 64
        rig.check()


@pytest.mark.requirement("I4")
def test_what_an_opening_has_lost_is_told_in_slices_ends_of_paths_first(
    rig: DiskRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reopening_module, "LOST_AT_ONCE", 4)
    handles = [rig.stored(number, boundary=32 * (1 + number % 5)) for number in range(10)]
    slices: list[list[ObjectName]] = []
    told = rig.listener.lost

    def lose(tier: Tier, handles: Sequence[int]) -> None:
        slices.append([rig.listener.held[handle] for handle in handles])
        told(tier, handles)

    monkeypatch.setattr(rig.listener, "lost", lose)
    (rig.config.path / "segments" / "00000.seg").unlink()
    assert rig.read(handles[0])[0].outcome is IoOutcome.GONE
    rig.tick(6)
    rig.settle()
    assert [len(one) for one in slices] == [4] and not rig.writable()
    rig.drop(next(iter(rig.listener.held)))  # the engine may drop what it was not told of yet
    for _ in range(3):
        rig.tick()
    rig.settle()
    assert [len(one) for one in slices] == [4, 4, 1] and rig.writable()
    order = [name.boundary_tokens for one in slices for name in one]
    assert order == sorted(order, reverse=True)
    rig.check()
    rig.stored(20)
    rig.crash()
    assert rig.names() == {object_name(20)}


@pytest.mark.requirement("I4")
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("lost_at_once", [4, 1000])
def test_an_opening_that_fails_at_its_end_is_repeated(
    rig: DiskRig, monkeypatch: pytest.MonkeyPatch, lost_at_once: int, after: bool
) -> None:
    """In the callback of the last message, or at the tick that tells the last slice."""
    monkeypatch.setattr(reopening_module, "LOST_AT_ONCE", lost_at_once)
    handles = [rig.stored(number) for number in range(10)]
    faults = Faults(Point("finish", 1, after))
    faults.armed = True
    monkeypatch.setattr(rig.tier._medium.space, "finish", faults.of("finish", rig.tier._medium.space.finish))
    (rig.config.path / "segments" / "00000.seg").unlink()
    rig.read(handles[0])
    for _ in range(100):
        rig.tick(1.0)
        rig.settle()
    assert faults.calls["finish"] > 1
    assert rig.tier.readable
    assert rig.writable()
    rig.check()
    rig.stored(20)
    rig.crash()
    assert rig.names() == {object_name(20)}


def test_a_callback_that_raises_costs_the_journal_that_answer_only(rig: DiskRig) -> None:
    """In a batch that ends well, in one that does not, and of what waited behind it."""
    journal = rig.tier._medium.journal
    told: list[tuple[int, IoOutcome]] = []

    def append(number: int) -> None:
        def done(outcome: IoOutcome) -> None:
            told.append((number, outcome))
            if number % 2 == 0:
                raise RuntimeError(number)

        journal.append(Mark(RecordType.SCRUB, number, 0), done)

    def step() -> None:
        with contextlib.suppress(RuntimeError):
            rig.journal.step()

    for number in range(5):
        append(number)  # the first one by itself, the others together
    step()
    step()
    assert told == [(number, IoOutcome.OK) for number in range(5)]
    assert journal.idle and rig.writable()
    told.clear()
    rig.journal.fault = failing(Append, IoOutcome.IO_ERROR)
    for number in range(5):
        append(number)
    step()
    assert told == [(number, IoOutcome.IO_ERROR) for number in range(5)]
    assert rig.tier.status().state == State.READ_ONLY


@pytest.mark.requirement("T2")
def test_a_copy_taken_while_an_opening_looks_is_counted(rig: DiskRig) -> None:
    damaged, removed = rig.stored(1), rig.stored(2)
    flip(rig, removed, PAGE)
    rig.read(removed)
    before = rig.tier.status().quarantined_bytes
    rig.journal.fault = failing(Append, IoOutcome.IO_ERROR, 1)
    rig.tier._note_scrubbed(0)
    rig.settle()
    rig.tick(6)
    while rig.tier._openings.reopening is None or rig.tier._openings.reopening.facts is None:
        assert rig.data.step() or rig.opener.step()
    flip(rig, damaged, PAGE)
    rig.read(damaged)
    assert rig.writable()
    assert rig.tier.status().quarantined_bytes == 2 * before > 0
    rig.crash()
    assert rig.tier.status().quarantined_bytes == 2 * before


@pytest.mark.requirement("T2")
def test_a_copy_on_its_way_when_an_opening_looks_is_counted_and_nothing_is_remembered_for_ever(rig: DiskRig) -> None:
    """The opening does not see the file: it comes after it, and before the next one."""
    damaged = rig.stored(1)
    flip(rig, damaged, PAGE)
    rig.journal.fault = failing(Append, IoOutcome.IO_ERROR, 1)
    rig.tier._note_scrubbed(0)
    rig.journal.step()
    rig.tier.read(damaged, rig.listener.held.pop(damaged), ((0, 2 * PAGE),), Loaned(), lambda _: None)
    while not any(isinstance(task.job, Quarantine) for task in rig.data.tasks):
        assert rig.data.step()
    copying = rig.data.tasks.popleft()  # a worker has it, and takes its time
    rig.tick(6)
    rig.settle()
    assert rig.writable()
    rig.data.tasks.append(copying)
    rig.settle()
    counted = rig.tier.status().quarantined_bytes
    room = rig.tier._medium.quarantine
    rig.crash()
    assert counted == rig.tier.status().quarantined_bytes > 0
    assert not (room._taken | room._removed | room._copying | room._removing)
