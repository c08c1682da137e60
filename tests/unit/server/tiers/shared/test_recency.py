"""What a shared tier tells its directory of use, over real files (T3)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from kvdepot.core.objectfile import ObjectName
from kvdepot.server.io.jobs import TouchFiles
from kvdepot.server.storage import shared_layout as layout
from kvdepot.server.storage.base import IoOutcome
from kvdepot.server.tiers.conformance_harness import name_of, path_of
from kvdepot.server.tiers.shared.recency import TOUCH_SECONDS

from tests.rigs.shared_rig import SharedRig, fails

NAME = name_of(1)


@pytest.fixture
def rig(tmp_path: Path) -> SharedRig:
    return SharedRig(tmp_path / "shared")


@pytest.mark.requirement("T3")
def test_what_is_used_is_touched_hourly_parents_first(rig: SharedRig) -> None:
    other = SharedRig(rig.root)
    names = path_of(5)
    for name in names:
        rig.stored(name)
    for name in names:
        os.utime(rig.path_of(name), (1_000, 1_000))
    handles = list(other.look_up(*names).values())
    for seconds in (0, 1, TOUCH_SECONDS - 10, 20):
        other.tick(seconds)
        other.tier.used(handles)
        other.settle()
    touches = other.jobs(TouchFiles)
    assert [list(job.files) for job in touches] == [[layout.object_file(name) for name in names]] * 2
    assert all(rig.path_of(name).stat().st_mtime > 2_000 for name in names)


def test_what_this_node_has_published_needs_no_touch_for_an_hour(rig: SharedRig) -> None:
    rig.tier.used([rig.stored(NAME)])
    rig.settle()
    assert not rig.jobs(TouchFiles)


def test_where_nothing_has_a_time_no_job_is_made_for_it(tmp_path: Path) -> None:
    rig = SharedRig(tmp_path / "shared", touches=False)
    handle = rig.stored(NAME)
    rig.tick(TOUCH_SECONDS + 1)
    rig.tier.used([handle])
    rig.settle()
    assert not rig.jobs(TouchFiles), "its answer would say that requests work"


@pytest.mark.requirement("P6")
def test_a_touch_finds_out_what_is_gone(rig: SharedRig) -> None:
    handles = [rig.stored(name_of(1)), rig.stored(name_of(2))]
    rig.path(handles[0]).unlink()
    rig.tick(TOUCH_SECONDS + 1)
    rig.tier.used(handles)
    rig.settle()
    assert rig.listener.lost_handles == handles[:1]
    assert rig.tier.used_bytes == 1


@pytest.mark.requirement("I4")
def test_a_long_path_is_touched_in_jobs_one_after_the_other(rig: SharedRig) -> None:
    other = SharedRig(rig.root)
    names: list[ObjectName] = path_of(600)
    for name in names:
        rig.tier.drop(rig.stored(name))
    handles = list(other.look_up(*names).values())
    other.tier.used(handles)
    assert len(other.workers.tasks) == 1
    other.settle()
    assert [len(job.files) for job in other.jobs(TouchFiles)] == [256, 256, 88]


@pytest.mark.requirement("T3")
def test_files_that_went_stale_in_the_queue_do_not_hold_up_those_behind_them(rig: SharedRig) -> None:
    other, names = SharedRig(rig.root), path_of(600)
    for name in names:
        rig.tier.drop(rig.stored(name))
    handles = list(other.look_up(*names).values())
    other.tier.used(handles)  # the first job is on its way, the others wait
    for handle in handles[256:512]:
        other.tier.drop(handle)
    other.settle()
    assert [len(job.files) for job in other.jobs(TouchFiles)] == [256, 88]


@pytest.mark.requirement("T3")
def test_what_is_used_while_the_mount_is_out_of_use_is_touched_once_it_is_back(rig: SharedRig) -> None:
    handle = rig.stored(NAME)
    rig.tick(TOUCH_SECONDS + 1)
    rig.workers.why_unusable = "its breaker is open"
    rig.tier.used([handle])
    rig.tick()
    rig.settle()
    assert not rig.jobs(TouchFiles)
    rig.workers.renew("")
    rig.tick()
    rig.settle()
    assert len(rig.jobs(TouchFiles)) == 1


@pytest.mark.requirement("T3")
@pytest.mark.parametrize("outcome", [IoOutcome.IO_ERROR, IoOutcome.READ_ONLY, IoOutcome.TIMEOUT])
def test_a_touch_that_failed_is_due_at_the_next_use(rig: SharedRig, outcome: IoOutcome) -> None:
    handle = rig.stored(NAME)
    os.utime(rig.path(handle), (1_000, 1_000))
    rig.tick(TOUCH_SECONDS + 1)
    rig.workers.fault = fails(TouchFiles, outcome)
    rig.tier.used([handle])
    rig.settle()
    assert rig.path(handle).stat().st_mtime == 1_000
    rig.workers.fault = lambda _: None
    for _ in range(2):
        rig.tier.used([handle])
        rig.settle()
    assert rig.path(handle).stat().st_mtime > 2_000
    assert len(rig.jobs(TouchFiles)) == 2, "hourly again"
    assert (rig.counts["shared_touches.failed"], rig.counts["shared_touches.ok"]) == (1, 1)
