"""Peers of a source, and bumps of the epoch, while engines store, load, hang and die, and so does the daemon."""

from __future__ import annotations

from random import Random

import pytest
from kvdepot.core.calls import Kind
from kvdepot.server.depot.tree import namespaces
from kvdepot.server.depot.types import TierConfig, WritePolicy

from tests.rigs.seeds import drawn, steps_until
from tests.stateful.peer_world import PeerWorld, act_of_peers
from tests.stateful.tier_model import act

SLOTS = 7
"""Of the namespace table: bumps make more namespaces than these, so slots are used again."""


def _history(seed: int, policy: WritePolicy, steps: int) -> None:
    random = Random(seed)
    world = PeerWorld(tier=TierConfig(policy))
    for _ in steps_until(lambda: world.leased >= 5 and world.read and world.bumps >= 2, steps):
        if random.random() < 0.3:
            act_of_peers(world, random)
        else:
            act(world, random)
        world.check()
    world.finish()


@pytest.mark.requirement("I1", "I6", "P2", "T3")
@pytest.mark.parametrize("policy", [WritePolicy.COMMIT, WritePolicy.SECOND_USE])
@pytest.mark.parametrize("seed", drawn(range(2)))
def test_what_peers_are_lent_is_right_and_stays(seed: int, policy: WritePolicy) -> None:
    _history(seed, policy, 700)


@pytest.mark.requirement("I1", "I6", "P2", "T3")
@pytest.mark.parametrize("seed", drawn(range(2)))
def test_what_peers_are_lent_is_right_although_slots_of_namespaces_are_used_again(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(namespaces, "NAMESPACES_MAX", SLOTS)
    _history(seed, WritePolicy.COMMIT, 700)


def _leased() -> PeerWorld:
    """A peer has leased an object of an engine's."""
    world = PeerWorld()
    world.reserve("a", 0, 0, 1, (Kind.ATTENTION,))
    world.commit("a", next(iter(world.engines["a"].writes)), [0])
    world.sum(1)
    world.pull("a", 0, 0, 0)
    assert world.leased == 1
    return world


def test_the_model_notices_when_what_is_sent_is_reused() -> None:
    """The negative control: a lease that ends while the process still sends."""
    world = _leased()
    world.rig.depot.peer_leases.end_all()
    world.evict("a", 0, 1)
    world.reserve("c", 0, 0, 1, (Kind.ATTENTION,))
    with pytest.raises(AssertionError, match="what is being sent"):
        world.check()


def test_the_model_notices_when_an_invalid_object_is_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: every namespace is valid."""
    world = _leased()
    monkeypatch.setattr(world.rig.depot.peer_leases, "_valid", lambda _: True)
    with pytest.raises(AssertionError):
        world.bump("a")
