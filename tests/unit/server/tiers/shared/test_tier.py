"""The shared tier over real files, with workers and coordinator under a test's control (T3, T5, P6, I4)."""

from __future__ import annotations

import asyncio
import errno
import os
from contextlib import closing
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from kvdepot.core.objectfile import HEADER_BYTES, object_bytes
from kvdepot.server.io.context import Context
from kvdepot.server.io.jobs import Answer, Probe, PublishFile, ReadFile, StatFiles
from kvdepot.server.io.perform import perform
from kvdepot.server.storage import shared_layout as layout
from kvdepot.server.storage.base import IoOutcome, SharedTier, Stored, Written
from kvdepot.server.tiers.conformance_harness import RecordingLoan, name_of, path_of, payload_of
from kvdepot.server.tiers.health import State
from kvdepot.server.tiers.object.config import ObjectConfig
from kvdepot.server.tiers.peer.config import PeerConfig
from kvdepot.server.tiers.shared.config import SharedConfig
from kvdepot.server.tiers.shared.links import Ended, Failed
from kvdepot.server.tiers.shared.quota_grant import OBJECT_SHARE, file_cost_bytes
from kvdepot.server.tiers.shared.tier import NO_GRANT

from tests.rigs.shared_rig import SharedRig, fails

NAME = name_of(1)
COST = file_cost_bytes(NAME.raw_bytes)


@pytest.fixture
def rig(tmp_path: Path) -> SharedRig:
    return SharedRig(tmp_path / "shared")


def _is_a_tier(rig: SharedRig) -> SharedTier:
    return rig.tier


# Two nodes


@pytest.mark.requirement("T3")
def test_two_nodes_exchange_objects(rig: SharedRig) -> None:
    other = rig.another()
    assert rig.coordinator.node != other.coordinator.node
    names = path_of(20)
    for name in names:
        rig.stored(name)
    found = other.look_up(*names)
    assert list(found) == names
    for name, handle in found.items():
        assert other.read(handle, name) == (IoOutcome.OK, payload_of(name))
    back = name_of(7)
    other.stored(back)
    assert rig.look_up(back).keys() == {back}


@pytest.mark.requirement("T3")
def test_what_another_node_published_is_not_written_again(rig: SharedRig) -> None:
    other = rig.another()
    rig.stored(NAME)
    os.utime(rig.path_of(NAME), (1_000, 1_000))
    inode = rig.path_of(NAME).stat().st_ino
    written = other.write(NAME)
    assert (written.outcome, written.stored_bytes) == (IoOutcome.OK, 0)
    assert other.read(written.handle, NAME) == (IoOutcome.OK, payload_of(NAME))
    assert rig.path_of(NAME).stat().st_ino == inode
    assert rig.path_of(NAME).stat().st_mtime > 2_000
    assert other.counts["shared_publications.already_there"] == 1
    assert other.tier.status().written_today_bytes == 0


@pytest.mark.requirement("T3")
def test_what_is_large_beside_the_directory_is_not_written_and_keeps_nothing_from_being_written(
    rig: SharedRig,
) -> None:
    most = rig.config.capacity_bytes // OBJECT_SHARE - file_cost_bytes(0)
    assert [rig.tier.too_large(most), rig.tier.too_large(most + 1)] == [False, True]
    answers: list[Written] = []
    rig.tier.write(replace(NAME, raw_bytes=most + 1), (), RecordingLoan(), None, answers.append)
    assert answers[0].outcome is IoOutcome.CANCELLED
    assert rig.tier.writable and not rig.tier._directory.grant.wanted_bytes
    rig.stored(NAME)


@pytest.mark.requirement("I4")
@pytest.mark.parametrize("usable", [True, False], ids=["tried-again", "out-of-use"])
def test_what_a_worker_wrote_before_it_died_counts_whatever_is_answered(rig: SharedRig, usable: bool) -> None:
    left_bytes = rig.tier._directory.grant.left_bytes
    answers = rig.submit_write(NAME)
    (task,) = rig.workers.tasks
    assert task.loan is not None and task.loan.begin(3)
    with closing(Context(str(rig.root), rig.arena)) as context:
        assert perform(task.job, context).outcome is IoOutcome.OK
    task.loan.end()  # it died with its answer
    rig.workers.why_unusable = "" if usable else "out of use"
    rig.settle()
    (answer,) = answers
    assert answer.outcome is (IoOutcome.OK if usable else IoOutcome.CANCELLED)
    spent_bytes = left_bytes - rig.tier._directory.grant.left_bytes
    assert COST >= spent_bytes >= rig.path_of(NAME).stat().st_size


@pytest.mark.requirement("T3")
def test_a_drop_takes_nothing_away_from_others(rig: SharedRig) -> None:
    other = rig.another()
    rig.tier.drop(rig.stored(NAME))
    ((name, handle),) = other.look_up(NAME).items()
    assert other.read(handle, name)[0] is IoOutcome.OK


@pytest.mark.requirement("I1")
def test_a_flipped_bit_is_never_served_wherever_it_is(rig: SharedRig) -> None:
    other = rig.another(negative_ttl_seconds=0.0)
    rig.stored(NAME)
    whole = rig.path_of(NAME).read_bytes()
    for at in [*range(0, 176, 3), *range(HEADER_BYTES, len(whole), 777)]:
        rig.path_of(NAME).parent.mkdir(exist_ok=True)
        rig.path_of(NAME).write_bytes(whole[:at] + bytes([whole[at] ^ 8]) + whole[at + 1 :])
        (handle,) = other.look_up(NAME).values()
        outcome, _ = other.read(handle, NAME)
        assert outcome is not IoOutcome.OK, at
        assert not rig.path_of(NAME).exists(), at


@pytest.mark.requirement("I1", "T3")
def test_doubtful_bytes_are_moved_aside_for_all_nodes_although_their_header_is_right(rig: SharedRig) -> None:
    other = rig.another()
    written = rig.write(NAME)
    (theirs,) = other.look_up(NAME).values()
    rig.tier.drop(written.handle)
    rig.tier.quarantine(NAME, (1, written.raw_sum))
    assert not rig.look_up(NAME), "not found again while its file is there"
    assert not rig.path_of(NAME).exists()
    assert [file.name.split(".")[-2] for file in (rig.root / ".quarantine").iterdir()] == ["corrupt"]
    assert rig.counts["tier_damaged_objects.corrupt"] == 1
    assert other.read(theirs, NAME)[0] is IoOutcome.GONE
    assert rig.read(rig.stored(NAME), NAME)[0] is IoOutcome.OK


@pytest.mark.requirement("I1", "T3")
def test_the_file_of_another_node_with_other_bytes_is_not_moved_aside(rig: SharedRig) -> None:
    rig.tier.drop(rig.stored(NAME))
    rig.tier.quarantine(NAME, (1, 2))
    rig.settle()
    assert rig.path_of(NAME).exists()
    assert not rig.counts["tier_damaged_objects.corrupt"]
    assert rig.look_up(NAME), "it is good to be found again"


@pytest.mark.requirement("I1", "I4")
def test_a_file_that_could_not_be_moved_aside_is_named_in_the_log(
    rig: SharedRig, caplog: pytest.LogCaptureFixture
) -> None:  # fmt: skip
    written = rig.write(NAME)
    rig.workers.fault = fails(ReadFile, IoOutcome.TIMEOUT)
    rig.tier.quarantine(NAME, (written.raw_sum,))
    rig.settle()
    assert f"object {NAME.key.hex()} may have doubtful bytes and is not quarantined: timeout" in caplog.text


# Vanished, stale, unreadable (P6)


@pytest.mark.requirement("P6")
def test_a_vanished_file_is_a_miss_of_this_object_alone(rig: SharedRig) -> None:
    first, second = path_of(2)
    handles = [rig.stored(name) for name in (first, second)]
    rig.path(handles[1]).unlink()
    assert rig.read(handles[1], second)[0] is IoOutcome.GONE
    assert rig.tier.readable and rig.tier.writable
    assert rig.read(handles[1], second)[0] is IoOutcome.CANCELLED, "the handle is dead"
    assert rig.look_up(second) == {}
    assert not rig.jobs(StatFiles), "and remembered as absent"


@pytest.mark.requirement("P6")
def test_a_stale_handle_is_a_miss(rig: SharedRig, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = rig.stored(NAME)

    def stale(*_: Any) -> int:
        raise OSError(errno.ESTALE, "injected")

    monkeypatch.setattr(os, "preadv", stale)
    assert rig.read(handle, NAME)[0] is IoOutcome.GONE
    assert rig.tier.readable


@pytest.mark.requirement("P6")
def test_an_unreadable_file_is_lost_and_the_tier_is_not(rig: SharedRig) -> None:
    handle = rig.stored(NAME)
    rig.workers.fault = fails(ReadFile, IoOutcome.UNREADABLE)
    assert rig.read(handle, NAME)[0] is IoOutcome.UNREADABLE
    assert rig.listener.lost_handles == [handle]
    assert rig.tier.readable


@pytest.mark.requirement("P6")
def test_an_object_that_fails_while_others_can_be_read_is_given_up(rig: SharedRig) -> None:
    bad, good = rig.stored(NAME), rig.stored(name_of(2))
    file = layout.object_file(NAME)
    rig.workers.fault = lambda job: (
        Answer(IoOutcome.IO_ERROR) if isinstance(job, ReadFile) and job.file == file else None
    )
    outcomes = []
    for _ in range(3):
        outcomes.append(rig.read(bad, NAME)[0])
        assert rig.read(good, name_of(2))[0] is IoOutcome.OK
    assert outcomes == [IoOutcome.IO_ERROR, IoOutcome.IO_ERROR, IoOutcome.BAD_PLACE]


@pytest.mark.requirement("P6")
@pytest.mark.parametrize("kind", [PeerConfig, ObjectConfig])
def test_an_object_that_a_network_does_not_deliver_is_not_damaged(rig: SharedRig, kind: type[SharedConfig]) -> None:
    """A throttled key or a connection that is reset says nothing of the bytes."""
    (gives_up,) = [one.default for one in fields(kind) if one.name == "gives_up"]
    rig.stored(name_of(2))
    rig.stored(NAME)
    reader = rig.another(gives_up=gives_up)
    (good,), (bad,) = reader.look_up(name_of(2)).values(), reader.look_up(NAME).values()
    file = layout.object_file(NAME)
    reader.workers.fault = lambda job: (
        Answer(IoOutcome.IO_ERROR) if isinstance(job, ReadFile) and job.file == file else None
    )
    for _ in range(6):
        assert reader.read(bad, NAME)[0] is IoOutcome.IO_ERROR
        assert reader.read(good, name_of(2))[0] is IoOutcome.OK
    reader.workers.fault = lambda _: None
    assert reader.read(bad, NAME)[0] is IoOutcome.OK, "its handle is still good"


def test_a_handle_that_is_another_object_s_by_the_time_of_an_answer_is_left_alone(rig: SharedRig) -> None:
    handle = rig.stored(NAME)
    rig.path(handle).unlink()
    answers = rig.submit_read(handle, NAME)
    rig.tier.drop(handle)
    again = rig.submit_write(name_of(2))
    rig.workers.tasks.rotate(1)
    rig.settle()
    assert [one.outcome for one in answers] == [IoOutcome.GONE]
    assert again[0].handle == handle
    assert rig.read(handle, name_of(2))[0] is IoOutcome.OK


@pytest.mark.requirement("P6")
def test_what_a_load_and_a_verification_find_damaged_at_once_is_counted_once(rig: SharedRig) -> None:
    handle = rig.stored(NAME)
    rig.workers.fault = fails(ReadFile, IoOutcome.CORRUPT)
    found: list[IoOutcome] = []
    answers = rig.submit_read(handle, NAME)
    rig.tier.verify(handle, found.append)
    rig.settle()
    assert [one.outcome for one in answers] == found == [IoOutcome.CORRUPT]
    assert rig.counts["tier_damaged_objects.corrupt"] == 0, "whoever reads counts its own"
    assert not rig.listener.lost_handles

    handle = rig.stored(name_of(2))
    rig.tier.verify(handle, found.append)
    rig.settle()
    assert rig.counts["tier_damaged_objects.corrupt"] == 1
    assert rig.listener.lost_handles == [handle]


@pytest.mark.requirement("P6")
def test_a_client_that_says_another_parent_misses_and_nobody_else_does(rig: SharedRig) -> None:
    """The file stays, its node's handle is good, and the next who asks as its writer did finds it at once."""
    other, names = rig.another(), path_of(2)
    for name in names:
        rig.stored(name)
    wrong = replace(names[1], parent=name_of(9).key)
    (handle,) = other.look_up(wrong).values()
    assert other.read(handle, wrong)[0] is IoOutcome.FOREIGN
    assert other.read(handle, wrong)[0] is IoOutcome.CANCELLED, "the handle is dead"
    assert not other.listener.lost_handles, "the answer has said it"
    left = other.tier._directory.grant.left_bytes
    assert other.write(wrong).outcome is IoOutcome.FOREIGN
    assert other.tier._directory.grant.left_bytes == left and other.tier.writable
    ((name, handle),) = other.look_up(names[1]).items()
    assert other.read(handle, name) == (IoOutcome.OK, payload_of(name))
    assert not list((rig.root / layout.QUARANTINE).iterdir())


# QuotaGrant


@pytest.mark.requirement("I4")
def test_nothing_is_written_beyond_what_the_coordinator_allows(rig: SharedRig) -> None:
    coordinator = rig.coordinator
    coordinator.send_message(replace(coordinator.report, limit_bytes=2 * COST + COST // 2))
    assert rig.write(name_of(1)).outcome is IoOutcome.OK
    both = [rig.submit_write(name_of(2)), rig.submit_write(name_of(3))]
    assert [len(answers) for answers in both] == [0, 1], "what is under way counts"
    assert both[1][0].outcome is IoOutcome.NO_SPACE
    assert not rig.writable() and rig.tier.write_slots == 0
    assert "no more room" in rig.tier.status().reason
    rig.settle()
    assert rig.write(name_of(4)).outcome is IoOutcome.CANCELLED
    rig.tick(1.1)
    assert coordinator.published == [2 * COST]
    coordinator.send_message(replace(coordinator.report, limit_bytes=3 * COST))
    assert rig.writable()
    assert rig.write(name_of(4)).outcome is IoOutcome.OK


@pytest.mark.requirement("I4")
def test_nothing_begins_after_the_machine_slept_before_the_coordinator_has_said_something_new(rig: SharedRig) -> None:
    """Other nodes may have what was granted: for them, this one was gone."""
    rig.coordinator.send_message(replace(rig.coordinator.report, until=rig.now + 150))
    rig.stored(name_of(1))
    rig.slept_seconds = 149.0
    rig.stored(name_of(2))
    rig.slept_seconds = 151.0
    assert not rig.writable() and NO_GRANT in rig.tier.status().reason
    assert rig.write(name_of(3)).outcome is not IoOutcome.OK and not rig.path_of(name_of(3)).exists()
    rig.coordinator.send_message(replace(rig.coordinator.report, until=rig.now + 151 + 150))
    assert rig.writable()
    rig.stored(name_of(3))


@pytest.mark.requirement("I4")
def test_what_was_there_already_and_what_a_codec_saved_is_given_back(rig: SharedRig) -> None:
    rig.another().stored(NAME)
    rig.write(NAME)
    rig.tick(1.1)
    assert rig.coordinator.published == []
    coded = rig.another(codec=1)
    coded.stored(replace(name_of(9), raw_bytes=64 * 4096))
    coded.tick(1.1)
    assert 0 < coded.coordinator.published[0] < file_cost_bytes(64 * 4096) // 2


@pytest.mark.requirement("I4")
def test_a_write_that_hangs_is_over_when_its_worker_is_dead(rig: SharedRig) -> None:
    rig.workers.fault = fails(PublishFile, IoOutcome.TIMEOUT)
    left = rig.tier._directory.grant.left_bytes
    assert rig.write(NAME).outcome is IoOutcome.TIMEOUT
    rig.tick(1.1)
    assert rig.coordinator.published == [] and rig.tier._directory.grant.left_bytes == left - COST
    _registered_anew(rig, "another")
    assert rig.coordinator.settled == ""
    rig.workers.end_late()
    rig.tick(1.1)
    assert rig.coordinator.published == [COST], "it may have come true"
    assert rig.coordinator.settled == "another"


def _registered_anew(rig: SharedRig, node: str) -> None:
    rig.coordinator.send_message(replace(rig.coordinator.report, node=node))
    rig.tick(1.1)


@pytest.mark.requirement("I4")
def test_earlier_nodes_are_settled_when_what_was_begun_under_them_is_over(rig: SharedRig) -> None:
    rig.tick(1.1)
    assert rig.coordinator.settled == rig.coordinator.node
    answers = rig.submit_write(NAME)
    rig.tick(1.1)
    assert rig.coordinator.settled == rig.coordinator.node, "what this one has begun is no earlier one's"
    _registered_anew(rig, "second")
    assert rig.coordinator.settled == ""
    _registered_anew(rig, "third")
    later = rig.submit_write(name_of(5))
    assert rig.coordinator.settled == ""
    assert rig.workers.step()
    assert (len(answers), len(later)) == (1, 0)
    rig.tick(1.1)
    assert rig.coordinator.settled == "third"
    rig.settle()
    rig.tick(1.1)
    assert rig.coordinator.settled == "third"


@pytest.mark.requirement("I4")
@pytest.mark.parametrize("outcome", [IoOutcome.IO_ERROR, IoOutcome.NO_SPACE])
def test_a_write_that_failed_is_counted_as_if_it_lay_there(rig: SharedRig, outcome: IoOutcome) -> None:
    rig.workers.fault = fails(PublishFile, outcome)
    assert rig.write(NAME).outcome is outcome
    rig.tick(1.1)
    assert rig.coordinator.published == [COST]


@pytest.mark.requirement("T5")
@pytest.mark.parametrize("refuses", [PublishFile, Probe])
def test_the_coordinator_is_told_of_a_full_file_system_until_a_write_works(
    rig: SharedRig, refuses: type[PublishFile | Probe]
) -> None:
    def told_after(seconds: float) -> bool:
        rig.tick(seconds)
        rig.settle()
        rig.tick(1.1)
        return rig.coordinator.refused

    assert not told_after(0)
    rig.workers.fault = fails(PublishFile, IoOutcome.NO_SPACE)
    rig.write(NAME)
    assert told_after(0)
    rig.workers.fault = fails(refuses, IoOutcome.NO_SPACE)
    for _ in range(12):
        told = told_after(9.0)
    assert told == (refuses is Probe), "what is refused now counts, and what was refused a minute ago does not"
    rig.workers.fault = lambda job: None
    _recover(rig)
    rig.stored(NAME)
    assert not told_after(0)


def test_the_coordinator_is_told_once_a_second_at_most(rig: SharedRig) -> None:
    for number in range(30):
        rig.stored(name_of(number))
        rig.tick(0.1)
    assert 2 <= len(rig.coordinator.published) <= 4
    assert rig.coordinator.published == sorted(rig.coordinator.published)


def test_the_write_budget_is_counted_by_what_was_written(tmp_path: Path) -> None:
    rig = SharedRig(tmp_path / "shared", write_budget_bytes=1)
    rig.stored(NAME)
    assert rig.tier.budget_spent
    assert rig.tier.status().written_today_bytes == object_bytes(NAME.raw_bytes)
    assert rig.write(name_of(2)).outcome is IoOutcome.CANCELLED


# What goes wrong (T5)


def test_a_tier_is_opening_until_its_coordinator_reports(tmp_path: Path) -> None:
    rig = SharedRig(tmp_path / "shared", opens=False)
    assert (rig.tier.readable, rig.tier.writable, rig.tier.status().state) == (False, False, "opening")
    assert rig.look_up(NAME) == {} and rig.write(NAME).outcome is IoOutcome.CANCELLED
    assert not (tmp_path / "shared").exists()
    rig.coordinator.open()
    assert (rig.tier.readable, rig.tier.writable, rig.tier.status().state) == (True, True, "ready")


@pytest.mark.requirement("T5")
def test_a_directory_that_is_refused_is_offline_with_the_reason_and_comes_when_it_can(tmp_path: Path) -> None:
    rig = SharedRig(tmp_path / "shared", opens=False)
    rig.coordinator.send_message(Failed("it is not empty"))
    assert (rig.tier.status().state, rig.tier.status().reason) == ("offline", "it is not empty")
    rig.coordinator.open()
    assert rig.tier.status().state == "ready" and not rig.tier.status().reason


def test_a_node_that_waits_for_the_janitors_count_says_since_when_it_runs_and_how_far_it_is(rig: SharedRig) -> None:
    none = replace(rig.coordinator.report, limit_bytes=0)
    rig.coordinator.send_message(replace(none, counting_seconds=75.5, counted_files=1_234))
    assert rig.tier.status().reason == "no room granted yet: counting 1234 files since 2027-01-15T07:58:44Z"
    rig.coordinator.send_message(none)
    assert rig.tier.status().reason == NO_GRANT
    rig.coordinator.send_message(replace(rig.coordinator.report, counting_seconds=75.5, counted_files=1_234))
    assert not rig.tier.status().reason, "it waits for nothing"


@pytest.mark.requirement("T5")
def test_a_coordinator_in_trouble_leaves_what_was_granted_and_all_reads(
    rig: SharedRig, caplog: pytest.LogCaptureFixture
) -> None:
    handle = rig.stored(NAME)
    for message in (Failed("no message from the coordinator"), Ended(), Failed("no message from the coordinator")):
        rig.coordinator.send_message(message)
        assert rig.tier.readable and rig.tier.writable and rig.tier.status().reason
    assert rig.read(handle, NAME)[0] is IoOutcome.OK
    assert len([one for one in caplog.records if "no message" in one.message]) == 2
    rig.coordinator.send_message(rig.coordinator.report)
    assert not rig.tier.status().reason


@pytest.mark.requirement("T5")
def test_a_vanished_directory_is_offline_and_comes_back_with_its_handles(rig: SharedRig) -> None:
    handle = rig.stored(NAME)
    rig.coordinator.send_message(replace(rig.coordinator.report, marker_ok=False, reason="the marker is gone"))
    assert (rig.tier.status().state, rig.tier.status().reason) == ("offline", "the marker is gone")
    assert not rig.tier.readable and not rig.tier.writable
    assert rig.read(handle, NAME)[0] is IoOutcome.CANCELLED
    rig.coordinator.send_message(rig.coordinator.report)
    assert rig.read(handle, NAME) == (IoOutcome.OK, payload_of(NAME))


@pytest.mark.requirement("T5")
def test_a_directory_that_comes_back_on_another_device_is_written_to(rig: SharedRig) -> None:
    coordinator, device = rig.coordinator, rig.coordinator.report.device
    coordinator.send_message(replace(coordinator.report, device=device + 1))
    assert rig.write(name_of(1)).outcome is IoOutcome.GONE, "it is not what the coordinator has seen"
    coordinator.send_message(replace(coordinator.report, device=device))
    _recover(rig)
    assert rig.write(name_of(1)).outcome is IoOutcome.OK


@pytest.mark.requirement("T5")
def test_a_read_while_the_directory_is_away_costs_no_handle(rig: SharedRig, tmp_path: Path) -> None:
    """Before the coordinator has noticed."""
    handle = rig.stored(NAME)
    rig.root.rename(tmp_path / "away")
    rig.root.mkdir()
    assert rig.read(handle, NAME)[0] is IoOutcome.IO_ERROR
    assert rig.write(name_of(2)).outcome is IoOutcome.GONE
    assert not list(rig.root.iterdir()), "nothing is written below a mount point"
    assert rig.tier.status().state == State.READ_ONLY
    rig.root.rmdir()
    (tmp_path / "away").rename(rig.root)
    assert rig.read(handle, NAME) == (IoOutcome.OK, payload_of(NAME))
    _recover(rig)
    assert rig.tier.writable


@pytest.mark.requirement("T5")
@pytest.mark.parametrize("outcome", [IoOutcome.NO_SPACE, IoOutcome.READ_ONLY, IoOutcome.UNREADABLE])
def test_what_refuses_writes_is_read_only_says_so_once_and_recovers(
    rig: SharedRig, outcome: IoOutcome, caplog: pytest.LogCaptureFixture
) -> None:
    handle = rig.stored(NAME)
    rig.workers.fault = lambda job: Answer(outcome, "injected") if isinstance(job, PublishFile | Probe) else None
    assert rig.write(name_of(2)).outcome is outcome
    assert rig.tier.status().state == "read-only" and "injected" in rig.tier.status().reason
    assert rig.tier.readable and not rig.tier.writable
    assert rig.read(handle, NAME)[0] is IoOutcome.OK
    for _ in range(100):
        rig.tick(1.0)
        rig.settle()
    assert rig.tier.status().state == "read-only"
    assert len([one for one in caplog.records if "read-only" in one.message]) == 1
    rig.workers.fault = lambda _: None
    _recover(rig)
    assert rig.write(name_of(2)).outcome is IoOutcome.OK


def _recover(rig: SharedRig) -> None:
    for _ in range(70):
        rig.tick(1.0)
        rig.settle()


def test_close_answers_what_waits_and_ends_the_coordinator(rig: SharedRig) -> None:
    answers: list[bool] = []
    rig.stored(NAME)
    rig.tier.look_up([name_of(2)], lambda: answers.append(True))
    asyncio.run(rig.tier.close())
    assert answers == [True]
    assert rig.workers.closed and not rig.coordinator.running
    assert rig.coordinator.published == [COST]
    assert rig.tier.status().state == "closed" and not rig.tier.readable


def test_a_tier_that_is_closing_neither_reads_nor_writes(rig: SharedRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its workers end what they have in hand meanwhile, which takes seconds where a mount hangs."""
    seen: list[tuple[bool, bool]] = []
    close = rig.workers.close

    async def slow(seconds: float = 3.0) -> int:
        rig.coordinator.open()
        rig.settle()
        seen.append((rig.tier.readable, rig.tier.writable))
        return await close(seconds)

    assert rig.tier.readable and rig.tier.writable
    monkeypatch.setattr(rig.workers, "close", slow)
    asyncio.run(rig.tier.close())
    assert seen == [(False, False)]


# The rest


def test_operators_are_told_how_long_an_object_is_and_that_its_header_knows_the_rest(rig: SharedRig) -> None:
    handle = rig.stored(NAME)
    assert rig.tier.stored(handle) == Stored(NAME.raw_bytes, sequence=0, stored_sum=None)


def test_handles_follow_the_capacity_within_bounds() -> None:
    for capacity_bytes, handles in ((16 << 20, 4_096), (2 << 30, 8_192), (1 << 50, 1 << 20)):
        assert SharedConfig("s", Path("/x"), capacity_bytes).handles_max == handles


def test_a_refused_loan_ends_the_write_and_gives_its_quota_grant_back(rig: SharedRig) -> None:
    left = rig.tier._directory.grant.left_bytes
    answers = rig.submit_write(NAME, RecordingLoan(refuses=True))
    rig.settle()
    assert answers[0].outcome is IoOutcome.CANCELLED
    assert rig.tier._directory.grant.left_bytes == left
    assert _is_a_tier(rig).used_bytes == 0
