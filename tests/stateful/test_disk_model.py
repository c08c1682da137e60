"""Catalog, journal and recovery of the disk tier against a dict, with crashes and power losses anywhere."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from kvdepot.server.tiers.base import IoOutcome

from tests.stateful.disk_world import NAMES, DiskWorld

picks = st.integers(0, 1 << 16)


class DiskModel(RuleBasedStateMachine):
    """Rows T2, P6, I4, I6 over random histories."""

    def __init__(self) -> None:
        super().__init__()
        self.world = DiskWorld()

    def teardown(self) -> None:
        self.world.close()

    @rule(number=st.integers(0, NAMES - 1), pages=st.sampled_from([1, 3, 3, 10]))  # few sizes: places are reused
    def write(self, number: int, pages: int) -> None:
        self.world.write(number, pages)

    @rule(pick=picks)
    def drop(self, pick: int) -> None:
        self.world.drop(pick)

    @rule(pick=picks)
    def read(self, pick: int) -> None:
        self.world.read(pick)

    @rule(count=st.integers(1, 8))
    def step(self, count: int) -> None:
        self.world.step(count)

    @rule(count=st.integers(1, 4))
    def payload_only(self, count: int) -> None:
        self.world.payload_only(count)

    @rule()
    def settle(self) -> None:
        self.world.settle()

    @rule(seconds=st.floats(0.1, 10))
    def tick(self, seconds: float) -> None:
        self.world.tick(seconds)

    @rule(
        journal=st.booleans(),
        outcome=st.sampled_from(
            [IoOutcome.IO_ERROR, IoOutcome.NO_SPACE, IoOutcome.READ_ONLY, IoOutcome.TIMEOUT, IoOutcome.UNREADABLE]
        ),
        times=st.integers(1, 3),
    )
    def refuse(self, journal: bool, outcome: IoOutcome, times: int) -> None:
        self.world.refuse(journal, outcome, times)

    @rule()
    def recover(self) -> None:
        self.world.recover()

    @rule()
    def crash(self) -> None:
        self.world.crash()

    @rule(seed=picks)
    def lose_power(self, seed: int) -> None:
        self.world.lose_power(Random(seed))

    @invariant()
    def consistent(self) -> None:
        self.world.check()


TestDiskModel = DiskModel.TestCase
TestDiskModel.settings = settings(
    max_examples=25, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.long
class TestDiskModelLong(DiskModel.TestCase):  # type: ignore[misc,valid-type]
    settings = settings(
        max_examples=400, stateful_step_count=80, deadline=None, suppress_health_check=list(HealthCheck)
    )
