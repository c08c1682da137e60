"""What lies over what: the disk tier after its journal, and with it the KILLs of older objects, was lost.

Whatever is on the medium, of two writes that overlap the later one wins, and the tier stays in use.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvdepot.server.io.context import Context
from kvdepot.server.io.jobs import Allocate, Answer, Append, WriteObject
from kvdepot.server.io.perform import perform
from kvdepot.server.offline.fsck import check_store
from kvdepot.server.storage.base import IoOutcome, Read
from kvdepot.server.tiers.disk.columns import PutColumns
from kvdepot.server.tiers.disk.held import HeldPlaces, settle
from kvdepot.server.tiers.disk.messages import Ended, Objects
from kvdepot.server.tiers.disk.records import JOURNAL_HEADER_BYTES, Mark, Put, RecordType, unpack_record
from kvdepot.server.tiers.health import State

from tests.rigs.disk_rig import PAGE, DiskRig, Loaned, Task, failing, object_name


@pytest.fixture
def rig(tmp_path: Path) -> DiskRig:
    return DiskRig(tmp_path / "tier")


def handle_of(rig: DiskRig, number: int) -> int:
    (handle,) = (handle for handle, name in rig.listener.held.items() if name.key == object_name(number).key)
    return handle


def journal_of(rig: DiskRig) -> Path:
    (journal,) = (rig.config.path / "journal").glob("*.log")
    return journal


def in_a_snapshot(rig: DiskRig, *numbers: int) -> None:
    """So that an index without its journal brings them back."""
    for number in numbers:
        rig.stored(number)
    rig.crash()


def dropped(rig: DiskRig, *numbers: int) -> None:
    for number in numbers:
        rig.drop(handle_of(rig, number))
    rig.settle()


def until(rig: DiskRig, reached: Callable[[], bool]) -> None:
    for _ in range(100):
        if reached():
            return
        rig.tick(1)
        rig.settle()
    raise AssertionError(rig.tier.status())


def until_opening(rig: DiskRig, reached: Callable[[], bool]) -> None:
    """Only the opening process goes on."""
    while rig.tier._openings.reopening is None:
        rig.tick(1)
        rig.data.step()
    while not reached():
        assert rig.opener.step()


def append_something(rig: DiskRig) -> None:
    """For a journal that is gone: it is noticed."""
    rig.tier._note_scrubbed(0)
    rig.settle()


def all_is_well(rig: DiskRig, *numbers: int) -> None:
    """Exactly these objects, whole, in a tier that goes on working and comes back alike."""
    expected = {object_name(number).key for number in numbers}
    for _ in range(2):
        assert rig.writable()
        rig.check()
        assert {name.key for name in rig.names()} == expected
        for handle in sorted(rig.listener.held):
            assert rig.read(handle)[0].outcome is IoOutcome.OK
        fresh = [rig.stored(1000 + number) for number in range(8)]
        rig.check()
        for handle in fresh:
            rig.drop(handle)
        rig.settle()
        assert check_store(rig.config.path).whole
        rig.crash()


@pytest.mark.requirement("T5")
@pytest.mark.parametrize(("raw_pages", "kept"), [(2, (2, 3)), (3, (3,))])
def test_a_put_that_failed_over_objects_whose_kill_is_lost(
    rig: DiskRig, caplog: pytest.LogCaptureFixture, raw_pages: int, kept: tuple[int, ...]
) -> None:
    """In exactly the place of an older object, or over two of them. Chaos, seed 4: a deleted journal."""
    in_a_snapshot(rig, 1, 2, 3)
    dropped(rig, 1, 2)
    failed = rig.submit_write(object_name(4, raw_pages * PAGE))
    assert rig.data.step()
    journal_of(rig).unlink()
    rig.settle()
    assert (failed[0].outcome, rig.tier.status().state) == (IoOutcome.GONE, State.OFFLINE)
    with caplog.at_level(logging.WARNING):
        until(rig, rig.writable)
    assert f"{3 - len(kept)} objects are damaged" in caplog.text
    all_is_well(rig, *kept)


@pytest.mark.requirement("T5", "I6")
def test_a_place_that_a_hanging_worker_may_write_to_stays_out_of_use(rig: DiskRig) -> None:
    in_a_snapshot(rig, 1, 2, 3)
    dropped(rig, 1, 2)
    rig.data.fault = failing(WriteObject, IoOutcome.TIMEOUT, 1)
    rig.submit_write(object_name(4, 3 * PAGE))
    journal_of(rig).unlink()
    append_something(rig)
    until(rig, rig.writable)
    assert rig.names() == {object_name(3)}
    rig.stored(5)
    rig.check()
    (late,) = rig.data.late
    context = Context(str(rig.config.path), rig.arena)
    perform(late.job, context)  # nobody else has bytes there
    context.close()
    rig.data.end_late()
    all_is_well(rig, 3, 5)


@pytest.mark.requirement("T5", "I6")
def test_a_segment_that_was_deleted_under_a_hanging_write_is_made_anew(rig: DiskRig) -> None:
    """Else its place would lie beyond all there is, and the tier could not be opened."""
    rig.stored(1)
    rig.data.fault = failing(WriteObject, IoOutcome.TIMEOUT, 1)
    rig.submit_write(object_name(2, 260 * PAGE))
    rig.settle()
    for segment in sorted((rig.config.path / "segments").iterdir())[1:]:
        segment.unlink()
    rig.journal.fault = failing(Append, IoOutcome.IO_ERROR, 1)
    append_something(rig)
    until(rig, rig.writable)
    rig.data.end_late()
    all_is_well(rig, 1)


@pytest.mark.requirement("T2")
@pytest.mark.parametrize("ends_meanwhile", [False, True])
def test_an_object_that_was_still_being_read_is_killed_again(rig: DiskRig, ends_meanwhile: bool) -> None:
    """Its KILL was in the journal that is lost, its place is the reader's."""
    in_a_snapshot(rig, 1, 2)
    handle, name, reads = handle_of(rig, 1), object_name(1), list[Read]()
    rig.tier.read(handle, name, rig.extents(name), Loaned(), reads.append)
    reading = rig.data.tasks.pop()  # a worker has it
    rig.drop(handle)
    while rig.journal.step():
        pass
    journal_of(rig).unlink()
    append_something(rig)
    until_opening(rig, lambda: any(isinstance(message, Objects) for message in rig.opener.messages))
    if not ends_meanwhile:
        until(rig, rig.writable)
        rig.check()
    rig.data.tasks.append(reading)
    rig.settle()
    until(rig, rig.writable)
    assert reads[0].outcome is IoOutcome.OK
    rig.check()
    rig.crash()
    all_is_well(rig, 2)


@pytest.mark.requirement("T2")
def test_a_later_object_of_the_index_takes_the_place_of_what_was_dropped(
    rig: DiskRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal was away, so that an older object came back, and was dropped. Now it is there again."""
    in_a_snapshot(rig, 1, 2)
    dropped(rig, 1)
    rig.stored(3)
    journal, away = journal_of(rig), rig.config.path / "away"
    journal.rename(away)
    append_something(rig)

    def refuse(*_: object) -> int:
        raise OSError(28, "No space left on device", "snapshot")

    monkeypatch.setattr("kvdepot.server.tiers.disk.opening.write_generation", refuse)
    until(rig, lambda: rig.tier.readable)
    assert rig.names() == {object_name(1), object_name(2)} and not rig.writable()
    dropped(rig, 1)
    away.rename(journal)
    monkeypatch.undo()
    until(rig, rig.writable)
    all_is_well(rig, 2, 3)


@pytest.mark.requirement("T2")
def test_two_objects_in_one_place_are_dropped_after_an_opening_that_failed(rig: DiskRig) -> None:
    """It had told of the older one, and not yet that the later one is lost."""
    in_a_snapshot(rig, 1, 2)
    dropped(rig, 1)
    rig.stored(3)
    journal_of(rig).unlink()
    append_something(rig)
    until_opening(rig, lambda: object_name(1) in rig.names())
    rig.opener.end()
    rig.tier._openings.on_message(Ended())
    dropped(rig, 1, 3)
    until(rig, rig.writable)
    all_is_well(rig, 2)


@pytest.mark.requirement("T2", "P6")
def test_fsck_and_the_tier_drop_an_object_that_was_written_over_without_a_kill(
    rig: DiskRig, caplog: pytest.LogCaptureFixture
) -> None:
    in_a_snapshot(rig, 1, 2)
    dropped(rig, 1)
    rig.stored(3)
    without_kills(journal_of(rig))
    verdict = check_store(rig.config.path)
    said = "1 objects are damaged: later ones were written over them"
    assert (verdict.whole, verdict.index.notes) == (False, (said,))
    assert {put.name for put in verdict.index.puts} == {object_name(2), object_name(3)}
    with caplog.at_level(logging.WARNING):
        rig.crash()
    assert said in caplog.text
    all_is_well(rig, 2, 3)


def without_kills(journal: Path) -> None:
    data = memoryview(journal.read_bytes())
    kept, at = bytes(data[:JOURNAL_HEADER_BYTES]), JOURNAL_HEADER_BYTES
    while at < len(data):
        record, end = unpack_record(data, at)
        if not isinstance(record, Mark) or record.type is not RecordType.KILL:
            kept += data[at:end]
        at = end
    journal.write_bytes(kept)


@pytest.mark.requirement("P6")
def test_what_was_written_over_is_found_out_by_the_first_read(rig: DiskRig) -> None:
    """Its KILL and the PUT of what lies there now are lost together: only the header says whose bytes these are."""
    in_a_snapshot(rig, 1, 2)
    dropped(rig, 1)
    rig.stored(1)  # the same object again, the same bytes but for its sequence
    journal_of(rig).unlink()
    assert dict(check_store(rig.config.path).outcomes) == {IoOutcome.OK: 1, IoOutcome.TORN: 1}
    append_something(rig)
    until(rig, rig.writable)
    assert rig.read(handle_of(rig, 1))[0].outcome is IoOutcome.TORN
    rig.settle()
    all_is_well(rig, 2)


@pytest.mark.requirement("T5")
@pytest.mark.parametrize("lands", [0.5, 1.0])
def test_an_append_that_failed_and_landed_all_the_same(rig: DiskRig, lands: float) -> None:
    in_a_snapshot(rig, 1, 2)
    rig.journal.fault = failing(Append, IoOutcome.IO_ERROR, 1)
    rig.drop(handle_of(rig, 1))
    job = rig.journal.tasks[0].job
    assert isinstance(job, Append)
    with journal_of(rig).open("ab") as file:
        file.write(job.data[: int(lands * len(job.data))])
    rig.settle()
    until(rig, rig.writable)
    all_is_well(rig, 2)


def segment_to_make(rig: DiskRig) -> Task:
    """What a worker has taken to make the next segment."""
    number = 0
    while not any(isinstance(task.job, Allocate) for task in rig.data.tasks):
        rig.submit_write(object_name(number, 60 * PAGE))
        number += 1
        if not any(isinstance(task.job, Allocate) for task in rig.data.tasks):
            rig.settle()
    (making,) = [task for task in rig.data.tasks if isinstance(task.job, Allocate)]
    rig.data.tasks.remove(making)
    assert making.loan is not None and making.loan.begin(7)
    return making


@pytest.mark.requirement("I4")
def test_a_segment_that_was_made_while_an_opening_counted_is_counted_once(rig: DiskRig) -> None:
    making = segment_to_make(rig)
    context = Context(str(rig.config.path), rig.arena)
    made = perform(making.job, context)
    context.close()
    rig.journal.fault = failing(Append, IoOutcome.IO_ERROR, 1)
    append_something(rig)
    rig.journal.fault = lambda _: None
    until(rig, rig.writable)
    assert making.loan is not None
    making.loan.end()
    making.done(made)
    rig.settle()
    assert rig.tier._growth.segments == len(list((rig.config.path / "segments").iterdir()))


@pytest.mark.parametrize("answer", ["before", "during", "after"])
def test_a_segment_that_a_worker_still_makes_is_no_room_for_an_opening(rig: DiskRig, answer: str) -> None:
    """The worker has half of it, finds no room, and removes the file: before the opening ends, or after."""
    making = segment_to_make(rig)
    assert isinstance(making.job, Allocate) and making.loan is not None
    path = rig.config.path / making.job.file
    count, half = rig.tier._growth.segments, making.job.length // 2
    path.write_bytes(bytes(half))
    if answer == "before":  # overdue, and not dead yet
        making.done(Answer(IoOutcome.TIMEOUT))
    rig.tier._stop_writing("a test")
    rig.tier._openings.open()
    while rig.opener.messages or rig.opener.requests:
        assert not path.exists() or path.stat().st_size == half, "the worker's alone"
        rig.opener.step()
        if answer == "during" and path.exists():
            path.unlink()  # as `perform` does where the file system has no room
            making.loan.end()
            making.done(Answer(IoOutcome.NO_SPACE, "disk full"))
    assert rig.tier.writable
    assert rig.tier._growth.segments == count
    assert rig.tier._medium.space._allocator.ready_bytes == count * rig.tier._medium.layout.segment_bytes
    if answer != "during":
        path.unlink()
        making.loan.end()
    if answer == "after":
        making.done(Answer(IoOutcome.NO_SPACE, "disk full"))
    rig.tick(16)
    rig.settle()
    stored = [rig.write(object_name(1000 + number, 60 * PAGE)).outcome for number in range(40)]
    assert set(stored) == {IoOutcome.OK} and rig.tier.writable
    rig.check()


PAGES = 24
Row = tuple[int, int]  # first page, pages
rows = st.lists(st.tuples(st.integers(0, PAGES - 1), st.integers(2, 6)), max_size=8)


def apart(some: list[Row]) -> list[Row]:
    """Those that overlap no earlier one."""
    found: list[Row] = []
    for start, pages in some:
        if all(start + pages <= other or other + length <= start for other, length in found):
            found.append((start, pages))
    return found


@pytest.mark.requirement("I6")
@given(rows, rows, st.randoms(use_true_random=False))
def test_the_later_write_wins_whatever_lies_over_what(indexed: list[Row], kept: list[Row], random: object) -> None:
    """And a write under way always does."""
    draw = random.sample  # type: ignore[attr-defined]
    sequences = iter(draw(range(1, 100), 16))
    puts = [
        Put(object_name(start, (pages - 1) * PAGE), next(sequences), 0, 0, (pages - 1) * PAGE, 0, 0, 0,
            ((start * PAGE, pages * PAGE),))
        for start, pages in apart(indexed)
    ]  # fmt: skip
    places = [(next(sequences), start * PAGE, pages * PAGE) for start, pages in apart(kept)]
    dead, writing = places[::2], [(start, length) for _, start, length in places[1::2]]
    held = HeldPlaces.of(dead, writing)
    overwritten, overtaken = settle(PutColumns.of(puts), held)
    left = held.without(overtaken)
    ours = [put.fragments[0] for put, gone in zip(puts, overwritten, strict=True) if not gone]
    theirs = list(zip(left.starts.tolist(), (left.ends - left.starts).tolist(), strict=True))
    assert len(apart([*ours, *theirs])) == len(ours) + len(theirs)
    assert set(writing) <= set(theirs)
    for put, gone in zip(puts, overwritten, strict=True):
        over = [place for place in held_over(put.fragments[0], dead) if place[0] > put.sequence]
        assert gone == bool(over or held_over(put.fragments[0], [(0, *place) for place in writing]))
    assert set(overtaken.tolist()) <= {sequence for sequence, _, _ in dead}


def held_over(fragment: Row, places: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    return [place for place in places if place[1] < sum(fragment) and fragment[0] < place[1] + place[2]]
