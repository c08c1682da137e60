"""Which state a tier is in, what is said of it, and when it tries to get out of a bad one."""

from __future__ import annotations

import errno
import logging

import pytest
from kvdepot.server.io.breaker import DOUBT_SECONDS, Breaker, Done
from kvdepot.server.platform.file_room import NO_INODES
from kvdepot.server.platform.logs import REPEAT_SECONDS
from kvdepot.server.storage.base import IoOutcome
from kvdepot.server.tiers.health import RETRY_SECONDS_MAX, Health, State, why_failed

PROBE_SECONDS = 5.0
FAILURES = 3
DENIED = f"[Errno {errno.EACCES}] open: /kv/1.seg"


class Tier:
    """One tier's health, with a clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.health = Health(
            "d", probe_seconds=PROBE_SECONDS, failures_max=FAILURES, clock=lambda: self.now,
            log=logging.getLogger("health"),
        )  # fmt: skip
        self.breaker = Breaker(failures_max=FAILURES, probe_every_seconds=PROBE_SECONDS, clock=lambda: self.now)
        assert self.health.state is State.OPENING and not self.health.reason
        self.health.ready("with 0 objects")

    def doubt(self) -> str:
        return self.health.doubt

    def shown(self) -> State:
        return self.health.shown

    def retried_after(self) -> float:
        """Seconds until it tries again, as it then does."""
        began = self.now
        while not self.health.retry_due:
            self.now += 1.0
        self.health.retried()
        return self.now - began

    def stop(self, well_seconds: float = 0.0, why: str = "full") -> None:
        """It is ready for so long, and then writes no more."""
        self.health.ready("again")
        self.now += well_seconds
        self.health.worsen(State.READ_ONLY, why)


@pytest.fixture
def tier() -> Tier:
    return Tier()


@pytest.mark.requirement("T5")
def test_a_tier_that_stays_bad_is_tried_less_and_less_often(tier: Tier) -> None:
    assert not tier.health.retry_due, "nothing is wrong"
    tier.health.worsen(State.OFFLINE, "gone")
    assert [tier.retried_after() for _ in range(7)] == [5, 5, 10, 20, 40, RETRY_SECONDS_MAX, RETRY_SECONDS_MAX]


@pytest.mark.requirement("T5")
def test_a_tier_that_was_well_for_long_is_tried_as_soon_as_at_first(tier: Tier) -> None:
    tier.stop()
    for _ in range(3):
        tier.retried_after()
    tier.health.write_worked()
    tier.stop(REPEAT_SECONDS)
    assert tier.retried_after() == 40, "not for long"
    tier.health.write_worked()
    tier.stop(REPEAT_SECONDS + 1)
    assert tier.retried_after() == PROBE_SECONDS


@pytest.mark.requirement("T5")
def test_a_tier_that_no_write_has_shown_to_be_well_is_not_tried_more_often(tier: Tier) -> None:
    for _ in range(2):
        tier.stop()
        tier.retried_after()
    tier.stop(REPEAT_SECONDS + 1)
    assert tier.retried_after() == 4 * PROBE_SECONDS


@pytest.mark.requirement("T5")
def test_what_stops_again_without_a_write_that_worked_is_doubted_for_a_while(tier: Tier) -> None:
    tier.stop()
    assert not tier.doubt()
    tier.stop(why="no room")
    assert tier.doubt() == "no write has worked since: no room"
    tier.now += 2 * DOUBT_SECONDS
    assert tier.doubt(), "nothing has been tried since"
    tier.health.ready("again")
    assert tier.shown() is State.DEGRADED
    tier.now += DOUBT_SECONDS
    assert tier.doubt()
    tier.now += 1
    assert not tier.doubt() and tier.shown() is State.READY
    tier.stop()
    tier.health.write_worked()
    assert not tier.doubt()


def test_refused_reads_in_a_row_make_a_tier_doubted_for_a_while(tier: Tier) -> None:
    for _ in range(FAILURES - 1):
        tier.health.read_refused(IoOutcome.UNREADABLE, DENIED)
    assert not tier.doubt()
    tier.health.read_worked()
    for _ in range(FAILURES):
        assert not tier.doubt()
        tier.health.read_refused(IoOutcome.UNREADABLE, DENIED)
    assert tier.doubt() == f"reads fail: permission denied: {DENIED}"
    assert tier.shown() is State.DEGRADED
    tier.now += DOUBT_SECONDS
    assert tier.doubt()
    tier.now += 1
    assert not tier.doubt() and tier.shown() is State.READY


@pytest.mark.parametrize("outcome", [IoOutcome.UNREADABLE, IoOutcome.IO_ERROR])
def test_failed_writes_in_a_row_stop_the_writing(tier: Tier, outcome: IoOutcome) -> None:
    def failed(outcome: IoOutcome) -> str:
        return tier.health.write_failed(outcome, DENIED, tier.breaker)

    assert [bool(failed(outcome)) for _ in range(FAILURES)] == [False] * (FAILURES - 1) + [True]
    assert not failed(IoOutcome.TIMEOUT), "says nothing of the next one"
    tier.health.write_worked()
    assert not failed(outcome)
    tier.health.ready("again")
    assert [bool(failed(outcome)) for _ in range(FAILURES)] == [False] * (FAILURES - 1) + [True]


def test_errors_of_a_path_that_is_out_of_use_do_not_stop_its_writing(tier: Tier) -> None:
    """A probe brings it back, with all that it did. A permission that is missing is another matter."""
    for _ in range(FAILURES):
        tier.breaker.failed("bad", Done.WRITE)
    for _ in range(2 * FAILURES):
        assert not tier.health.write_failed(IoOutcome.IO_ERROR, "bad", tier.breaker)
    why = tier.health.write_failed(IoOutcome.UNREADABLE, DENIED, tier.breaker)
    assert why == f"writes fail: permission denied: {DENIED}"


@pytest.mark.parametrize(
    ("outcome", "detail", "why"),
    [
        (IoOutcome.READ_ONLY, DENIED, f"permission denied: {DENIED}"),
        (IoOutcome.READ_ONLY, "[Errno 30] open: /kv", "the file system is read-only: [Errno 30] open: /kv"),
        (IoOutcome.NO_SPACE, DENIED, f"the file system is full: {DENIED}"),
        (IoOutcome.NO_SPACE, NO_INODES, NO_INODES),
        (IoOutcome.IO_ERROR, NO_INODES, f"io_error: {NO_INODES}"),
        (IoOutcome.IO_ERROR, "bad", "io_error: bad"),
    ],
)
def test_people_are_told_why_a_write_failed(outcome: IoOutcome, detail: str, why: str) -> None:
    assert why_failed(outcome, detail) == why


def test_what_a_tier_lacks_is_said_once_and_that_it_has_it_again(tier: Tier, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "health"):
        for reason in ("", "12 GiB are missing", "11 GiB are missing", "no worker starts"):
            tier.health.short_of(reason)
            assert tier.shown() is (State.DEGRADED if reason else State.READY)
            tier.now += REPEAT_SECONDS
        for _ in range(2):
            tier.health.short_of("")
    assert [record.message for record in caplog.records] == [
        "tier d: degraded: 12 GiB are missing", "tier d: no longer degraded: no worker starts",
    ]  # fmt: skip


def test_a_reason_is_said_when_it_changes_and_not_for_each_file(tier: Tier, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "health"):
        tier.health.worsen(State.READ_ONLY, "open '/kv/1' failed")
        for reason in ("open '/kv/1' failed", "open '/kv/2' failed", "full", "full"):
            tier.health.note(reason)
            assert tier.health.reason == reason
    assert [record.message for record in caplog.records] == [
        "tier d: read-only: open '/kv/1' failed", "tier d: open '/kv/2' failed", "tier d: full",
    ]  # fmt: skip


def test_a_closed_tier_gets_no_worse(tier: Tier) -> None:
    tier.health.close()
    tier.health.worsen(State.OFFLINE, "gone")
    assert tier.health.state is State.CLOSED and tier.health.reason == "the daemon is stopping"
    tier.now += 2 * RETRY_SECONDS_MAX
    assert not tier.health.retry_due
