"""The pauses between starts of a process that fails."""

from __future__ import annotations

from kvdepot.server.platform.backoff import SECONDS_MAX, SECONDS_MIN, STABLE_SECONDS, Backoff


def test_pauses_double_up_to_a_bound_and_are_short_again_after_a_stable_run() -> None:
    backoff = Backoff()
    pauses = [backoff.next_seconds() for _ in range(12)]
    assert pauses[:3] == [SECONDS_MIN, 2 * SECONDS_MIN, 4 * SECONDS_MIN]
    assert pauses[-2:] == [SECONDS_MAX, SECONDS_MAX]
    backoff.ran(STABLE_SECONDS)
    assert backoff.next_seconds() == SECONDS_MAX, "it failed as soon as the one before"
    backoff.ran(STABLE_SECONDS + 1.0)
    assert backoff.next_seconds() == SECONDS_MIN
