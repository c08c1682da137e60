"""What a shared tier asks its directory for: once, in order, bounded, and again after a failure ."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from kvdepot.server.io.jobs import Answer, ReadFile, StatFiles
from kvdepot.server.storage import shared_layout as layout
from kvdepot.server.storage.base import IoOutcome
from kvdepot.server.tiers.conformance_harness import name_of, path_of
from kvdepot.server.tiers.shared import absent, look_ups
from kvdepot.server.tiers.shared.absent import AbsentNames
from kvdepot.server.tiers.shared.quota_grant import file_cost_bytes

from tests.rigs.shared_rig import SharedRig, fails

NAME = name_of(1)
COST = file_cost_bytes(NAME.raw_bytes)


@pytest.fixture
def rig(tmp_path: Path) -> SharedRig:
    return SharedRig(tmp_path / "shared")


def test_a_look_up_asks_once_for_a_name_that_several_wait_for(rig: SharedRig) -> None:
    other = rig.another()
    names = path_of(10)
    for name in names:
        rig.stored(name)
    answers: list[int] = []
    for number in range(5):
        other.tier.look_up(names[: 6 + number], lambda number=number: answers.append(number))  # type: ignore[misc]
    other.settle()
    assert sorted(answers) == [0, 1, 2, 3, 4]
    assert sum(len(job.files) for job in other.jobs(StatFiles)) == 10
    assert [name for _, name in other.listener.found_objects] == names


def test_what_is_found_is_told_parents_first_whatever_is_answered_first(rig: SharedRig) -> None:
    other = rig.another()
    names = path_of(600)
    for name in names:
        rig.tier.drop(rig.stored(name))
    answers: list[int] = []
    other.tier.look_up(names, lambda: answers.append(len(other.listener.found_objects)))
    other.workers.tasks.reverse()
    other.settle()
    assert [len(job.files) for job in other.jobs(StatFiles)] == [88, 256, 256]
    assert answers == [600]
    assert [name for _, name in other.listener.found_objects] == names


def test_absent_names_cost_no_job_until_their_time_is_up_or_they_are_published(rig: SharedRig) -> None:
    for _ in range(3):
        assert rig.look_up(NAME) == {}
    assert len(rig.jobs(StatFiles)) == 1
    rig.tick(2.1)
    assert rig.look_up(NAME) == {}
    assert len(rig.jobs(StatFiles)) == 2
    rig.tier.drop(rig.stored(NAME))
    assert rig.look_up(NAME).keys() == {NAME}
    assert rig.counts["shared_probes.remembered"] == 2


@pytest.mark.requirement("I1", "B3")
def test_a_look_up_that_asks_again_asks_for_what_was_absent_and_not_for_what_was_damaged(rig: SharedRig) -> None:
    absent_name, damaged = path_of(2)
    (handle,) = [rig.stored(damaged)]
    rig.workers.fault = fails(ReadFile, IoOutcome.CORRUPT)  # of a peer, the object stays where it is
    assert rig.read(handle, damaged)[0] is IoOutcome.CORRUPT
    rig.workers.fault = lambda _: None
    assert rig.look_up(absent_name, damaged) == {}
    asked = len(rig.jobs(StatFiles))
    for _ in range(2):
        rig.tier.look_up([absent_name, damaged], lambda: None, again=True)
        rig.settle()
    assert [len(job.files) for job in rig.jobs(StatFiles)[asked:]] == [1, 1] and not rig.listener.found_objects
    rig.tick(2.1)
    rig.tier.look_up([damaged], lambda: None, again=True)
    rig.settle()
    assert [name for _, name in rig.listener.found_objects] == [damaged], "its time is up, as for every lookup"


@pytest.mark.requirement("I1")
def test_an_answer_that_was_on_its_way_does_not_forget_that_an_object_was_damaged(rig: SharedRig) -> None:
    other = rig.another()
    rig.stored(NAME)
    assert other.look_up(NAME)
    other.tier.look_up([NAME], lambda: None, again=True)
    other.tier.quarantine(NAME, (1, 2))
    names = other.tier._directory.absent
    assert names.damaged(NAME)
    other.tier._look_ups._answered(list(other.tier._look_ups._asked.values()), Answer(IoOutcome.OK, lengths=(5,)))
    assert names.damaged(NAME)


@pytest.mark.requirement("I4")
def test_the_memory_for_absent_names_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(absent, "NAMES_MAX", 10)
    names = AbsentNames(2.0, lambda: 5.0)
    for number in range(100):
        names.add(name_of(number), damaged=number % 2 == 0)
    assert sum(name_of(number) in names for number in range(100)) == 10
    assert name_of(99) in names and [names.damaged(name_of(number)) for number in (98, 99)] == [True, False]
    assert len(names._damaged) == 5
    names.add(name_of(98))
    assert not names.damaged(name_of(98)) and names._damaged < set(names._until)


def test_what_was_absent_can_be_asked_for_again_and_what_was_damaged_cannot() -> None:
    names = AbsentNames(3600.0, lambda: 5.0)
    names.add(name_of(1))
    names.add(name_of(2), damaged=True)
    names.forget_absent()
    assert name_of(1) not in names
    assert name_of(2) in names and names.damaged(name_of(2))


@pytest.mark.requirement("I4")
def test_what_is_asked_beyond_the_limit_is_answered_and_not_remembered(
    rig: SharedRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(look_ups, "ASKED_MAX", 4)
    names = path_of(6)
    answers: list[bool] = []
    rig.tier.look_up(names, lambda: answers.append(True))
    rig.settle()
    assert answers == [True]
    assert [len(job.files) for job in rig.jobs(StatFiles)] == [4]
    rig.look_up(*names)
    assert [len(job.files) for job in rig.jobs(StatFiles)] == [4, 2]


@pytest.mark.requirement("T4")
def test_a_look_up_without_an_answer_ends_by_the_deadline(rig: SharedRig) -> None:
    rig.another().stored(NAME)
    answers: list[bool] = []
    rig.tier.look_up([NAME], lambda: answers.append(True))
    rig.tick(rig.config.deadline_seconds + 0.1)
    assert answers == [True] and not rig.listener.found_objects
    rig.settle()  # the answer comes after all, and nobody waits for it
    assert answers == [True] and not rig.listener.found_objects
    assert rig.look_up(NAME).keys() == {NAME}


def test_a_look_up_that_fails_is_not_remembered_as_absent(rig: SharedRig) -> None:
    rig.another().stored(NAME)
    rig.workers.fault = fails(StatFiles, IoOutcome.IO_ERROR)
    assert rig.look_up(NAME) == {}
    rig.workers.fault = lambda _: None
    assert rig.look_up(NAME).keys() == {NAME}


@pytest.mark.requirement("T5")
def test_a_name_that_cannot_be_asked_for_leaves_the_others_found_and_is_asked_again(
    rig: SharedRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, (bad, good, gone) = rig.another(), path_of(3)
    for name in (bad, good):
        rig.stored(name)
    real = os.stat

    def fail(path: str, **more: Any) -> os.stat_result:
        if str(path) == Path(layout.object_file(bad)).name:
            raise PermissionError(errno.EACCES, "injected", path)
        return real(path, **more)

    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", fail)
        assert other.look_up(bad, good, gone).keys() == {good}
    assert {what: other.counts[f"shared_probes.{what}"] for what in ("found", "absent", "failed")} == {
        "found": 1, "absent": 1, "failed": 1,
    }  # fmt: skip
    assert other.look_up(bad, gone).keys() == {bad}
    assert other.counts["shared_probes.remembered"] == 1


def test_an_object_that_is_written_while_it_is_looked_up_has_one_handle(rig: SharedRig) -> None:
    rig.another().stored(NAME)
    for look_up_first in (True, False):
        answers: list[bool] = []
        written = rig.submit_write(NAME)
        rig.tier.look_up([NAME], lambda: answers.append(True))  # noqa: B023
        if not look_up_first:
            rig.workers.tasks.reverse()
            rig.workers.tasks[0] = replace_priority(rig.workers.tasks[0])
        rig.settle()
        assert answers == [True] and not rig.listener.found_objects
        assert rig.tier.used_bytes == 1
        rig.tier.drop(written[0].handle)


def replace_priority(task: Any) -> Any:
    task.priority = 0
    return task


@pytest.mark.requirement("I4")
def test_more_is_found_than_there_are_handles(rig: SharedRig) -> None:
    names = path_of(8)
    for name in names:
        rig.stored(name)
    small = rig.another(handles_max=5)
    assert list(small.look_up(*names)) == names[:5]
    assert small.tier.used_bytes == small.tier.capacity_bytes == 5
    assert small.write(name_of(77)).outcome is IoOutcome.NO_SPACE
    small.tier.drop(4)
    assert small.write(name_of(77)).outcome is IoOutcome.OK
