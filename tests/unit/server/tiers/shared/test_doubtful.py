"""Bytes in doubt whose file is still in its place: the job that moves it aside waits, or fails."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from kvdepot.server.io.jobs import ReadFile
from kvdepot.server.storage.base import IoOutcome
from kvdepot.server.tiers.conformance_harness import name_of

from tests.rigs.shared_rig import SharedRig, fails

NAME = name_of(1)
TTL_SECONDS = 2.1
"""A name counts as absent no longer."""


@pytest.fixture
def rig(tmp_path: Path) -> SharedRig:
    return SharedRig(tmp_path / "shared")


def doubt(rig: SharedRig) -> int:
    """Say of an object that was written that its bytes are in doubt. Return their checksum. No job has run yet."""
    written = rig.write(NAME)
    rig.tier.drop(written.handle)
    rig.tier.quarantine(NAME, (1, written.raw_sum))
    return written.raw_sum


def load(rig: SharedRig) -> IoOutcome:
    """Look the object up once its name counts as absent no more, and read it."""
    rig.tick(TTL_SECONDS)
    ((name, handle),) = rig.look_up(NAME).items()
    return rig.read(handle, name)[0]


def spoil_quarantine(rig: SharedRig) -> Path:
    """Let nothing be moved aside."""
    folder = rig.root / ".quarantine"
    shutil.rmtree(folder)
    folder.write_bytes(b"")
    return folder


@pytest.mark.requirement("I1")
@pytest.mark.parametrize("ttl_seconds", [2.0, 0.0])
def test_doubtful_bytes_are_refused_while_they_wait_to_be_moved_aside(tmp_path: Path, ttl_seconds: float) -> None:
    rig = SharedRig(tmp_path / "shared", negative_ttl_seconds=ttl_seconds)
    doubt(rig)
    waiting = list(rig.workers.tasks)
    rig.workers.tasks.clear()
    assert load(rig) is IoOutcome.CORRUPT
    rig.workers.tasks.extend(waiting)
    rig.settle()
    assert not rig.path_of(NAME).exists()


@pytest.mark.requirement("I1")
@pytest.mark.parametrize("outcome", [IoOutcome.TIMEOUT, IoOutcome.CANCELLED, IoOutcome.IO_ERROR])
def test_doubtful_bytes_that_could_not_be_moved_aside_are_moved_by_the_load_that_meets_them(
    rig: SharedRig, outcome: IoOutcome
) -> None:
    doubt(rig)
    rig.workers.fault = fails(ReadFile, outcome)
    rig.settle()
    rig.workers.fault = lambda _: None
    assert load(rig) is IoOutcome.CORRUPT
    assert not rig.path_of(NAME).exists()
    rig.tick(TTL_SECONDS)
    assert rig.read(rig.stored(NAME), NAME)[0] is IoOutcome.OK, "the same bytes, of which nobody has a doubt"


@pytest.mark.requirement("I1", "I4")
def test_doubtful_bytes_that_nothing_can_move_are_refused_again_and_again_and_named(
    rig: SharedRig, caplog: pytest.LogCaptureFixture
) -> None:
    doubt(rig)
    folder = spoil_quarantine(rig)
    rig.settle()
    for _ in range(3):
        assert load(rig) is IoOutcome.CORRUPT
    assert rig.path_of(NAME).exists()
    assert f"object {NAME.key.hex()} may have doubtful bytes and is not quarantined" in caplog.text
    assert not rig.counts["tier_damaged_objects.corrupt"]
    folder.unlink()
    folder.mkdir()
    assert load(rig) is IoOutcome.CORRUPT
    assert not rig.path_of(NAME).exists()


@pytest.mark.requirement("I1")
def test_a_second_doubt_about_a_name_does_not_end_with_the_first_one(rig: SharedRig) -> None:
    raw_sum = doubt(rig)
    rig.tier.quarantine(NAME, (7,))
    last = rig.workers.tasks[-1].job
    assert isinstance(last, ReadFile) and raw_sum in last.doubtful


@pytest.mark.requirement("I1", "T3")
def test_what_another_node_puts_in_the_place_of_doubtful_bytes_is_served(rig: SharedRig) -> None:
    doubt(rig)
    rig.settle()
    rig.another().stored(NAME)
    assert load(rig) is IoOutcome.OK
