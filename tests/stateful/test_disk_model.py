"""Catalog, journal and recovery of the disk tier against a dict: crashes, power losses, lost journals anywhere."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from kvdepot.server.storage.base import IoOutcome

from tests.stateful.disk_world import DiskWorld

picks = st.integers(0, 1 << 16)


class DiskModel(RuleBasedStateMachine):
    """Rows T2, P6, I4, I6 over random histories."""

    def __init__(self) -> None:
        super().__init__()
        self.world = DiskWorld()

    def teardown(self) -> None:
        self.world.close()

    @rule(seed=picks, length=st.integers(5, 40))
    def work(self, seed: int, length: int) -> None:
        self.world.work(Random(seed), length)

    @rule(seed=picks, length=st.integers(5, 40))
    def work_more(self, seed: int, length: int) -> None:
        """Twice, because rules are drawn alike, and there is more work than accidents."""
        self.world.work(Random(seed), length)

    @rule(
        journal=st.booleans(),
        outcome=st.sampled_from(
            [IoOutcome.IO_ERROR, IoOutcome.NO_SPACE, IoOutcome.READ_ONLY, IoOutcome.TIMEOUT, IoOutcome.UNREADABLE]
        ),
        times=st.integers(1, 3),
        seed=picks,
        ends=st.booleans(),
        lands=st.sampled_from([0, 0.5, 1]),
    )
    def trouble(self, journal: bool, outcome: IoOutcome, times: int, seed: int, ends: bool, lands: float) -> None:
        self.world.refuse(journal, outcome, times, lands)
        self.world.work(Random(seed), 20)
        if ends:
            self.world.recover()

    @rule()
    def crash(self) -> None:
        self.world.crash()

    @rule(seed=picks)
    def lose_power(self, seed: int) -> None:
        self.world.lose_power(Random(seed))

    @rule(seed=picks)
    def lose_journal(self, seed: int) -> None:
        self.world.lose_journal(Random(seed))

    @invariant()
    def consistent(self) -> None:
        self.world.check()


TestDiskModel = DiskModel.TestCase
TestDiskModel.settings = settings(
    max_examples=15, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.long(seconds=140)
@pytest.mark.timeout(900)
class TestDiskModelLong(DiskModel.TestCase):  # type: ignore[misc,valid-type]
    settings = settings(
        max_examples=200, stateful_step_count=80, deadline=None, suppress_health_check=list(HealthCheck)
    )
