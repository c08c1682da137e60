"""Verbs that take long say how fast they are and how long they will take."""

from __future__ import annotations

import io
from collections.abc import Generator

import pytest
from kvdepot.client.ctl.following import Bar, follow
from kvdepot.core.control import VerifiedTier, VerifyReply
from rich.console import Console


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def replies(clock: Clock) -> Generator[VerifyReply, None, None]:
    """100 of 10,000 objects in each second."""
    for second in range(20):
        clock.now = float(second)
        yield VerifyReply((VerifiedTier("nvme", objects=10_000, verified=100 * second),))


def bars(reply: VerifyReply) -> list[Bar]:
    return [Bar(one.tier, one.verified, one.objects, "0 damaged") for one in reply.tiers]


@pytest.mark.requirement("P10")
def test_a_bar_has_a_rate_and_the_time_that_is_left() -> None:
    clock, file = Clock(), io.StringIO()
    console = Console(file=file, force_terminal=True, width=120, get_time=clock, color_system=None)
    followed = follow(replies(clock), console, bars, as_json=False)
    assert followed.reply is not None and not followed.stopped
    frames = [line for line in file.getvalue().replace("\r", "\n").splitlines() if "1900/10000" in line]
    assert frames, file.getvalue()[-500:]
    assert "100/s" in frames[-1] and "0:01:21" in frames[-1]
