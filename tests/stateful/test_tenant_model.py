"""Engines of three tenants with parts of their own: bytes are right, and nobody hinders another (I1, I6, S2, S4)."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule
from kvdepot.server.depot.tree.rooms import Rooms
from kvdepot.server.depot.types import TierConfig, WritePolicy

from tests.rigs.seeds import drawn, steps_until
from tests.stateful.engine_model import EngineModel
from tests.stateful.engine_world import World
from tests.stateful.tenant_world import SPECS, TENANTS, TenantWorld, act_of_tenants
from tests.stateful.tier_model import ACTIONS, TierModel, act

who = st.sampled_from(sorted(SPECS))
tenants = st.sampled_from(TENANTS)


class TenantModel(EngineModel):
    """The model of engines over RAM, with what only tenants do."""

    world: TenantWorld

    def new_world(self) -> World:
        return TenantWorld(tier=self.tier)

    @rule(who=who, other=who)
    def trespass(self, who: str, other: str) -> None:
        self.world.trespass(who, other)

    @rule(who=who, tenant=tenants)
    def move(self, who: str, tenant: str) -> None:
        self.world.move(who, tenant)

    @rule(steps=st.integers(1, 3))
    def grow(self, steps: int) -> None:
        self.world.grow(steps=steps)

    @rule(who=who)
    def hog(self, who: str) -> None:
        self.world.hog(who)

    @rule(tenant=tenants)
    def quiet(self, tenant: str) -> None:
        self.world.quiet(tenant)

    @rule(who=who)
    def unhindered(self, who: str) -> None:
        self.world.check_unhindered(who)


class TenantTierModel(TenantModel, TierModel):
    """The same over a lower tier."""


for model, examples in ((TenantModel, 25), (TenantTierModel, 25)):
    model.TestCase.settings = settings(
        max_examples=examples, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
    )
TestTenantModel = TenantModel.TestCase
TestTenantTierModel = TenantTierModel.TestCase


def _history(seed: int, policy: WritePolicy, steps: int) -> None:
    random = Random(seed)
    world = TenantWorld(tier=TierConfig(policy))
    for _ in steps_until(lambda: world.beside_full >= 2, steps):
        if random.random() < 0.15:
            act_of_tenants(world, random, random.choice(sorted(SPECS)))
        else:
            act(world, random, ACTIONS)
        world.check()
    world.finish()


@pytest.mark.requirement("I1", "I6", "S2", "S4")
@pytest.mark.parametrize("policy", list(WritePolicy))
@pytest.mark.parametrize("seed", drawn(range(1)))
def test_histories_of_tenants_over_a_lower_tier(seed: int, policy: WritePolicy) -> None:
    _history(seed, policy, 200)


@pytest.mark.long
@pytest.mark.requirement("I1", "I6", "S2", "S4")
@pytest.mark.parametrize("policy", list(WritePolicy))
@pytest.mark.parametrize("seed", drawn(range(4)))
def test_long_histories_of_tenants_over_a_lower_tier(seed: int, policy: WritePolicy) -> None:
    _history(seed, policy, 2000)


def test_the_model_notices_when_a_tenant_is_refused_because_another_one_is_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The negative control: all namespaces lie in the first part."""
    world = TenantWorld()
    world.hog("a")
    world.check_unhindered("b")
    assert (world.unhindered, world.beside_full) == (1, 1)
    monkeypatch.setattr(Rooms, "of", lambda rooms, _: rooms[0])
    with pytest.raises(AssertionError, match="b: "):
        world.check_unhindered("b")
