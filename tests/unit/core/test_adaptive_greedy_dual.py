"""The default policy: what it learns, and that its candidates are right whatever it is told."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from kvdepot.core.adaptive_greedy_dual import AdaptiveGreedyDual
from kvdepot.core.eviction import policy_by_name
from kvdepot.core.eviction_policy import NO_NODE, USELESS, EvictionPolicy
from kvdepot.core.standing_limit import StandingLimit


class FlatCache:
    """A cache of items that stand alone, each of one unit, under a policy."""

    def __init__(self, policy: EvictionPolicy, items: int) -> None:
        self.policy = policy
        self.free = list(range(items))
        self.nodes: dict[int, int] = {}
        self.items: dict[int, int] = {}
        self.now = 0.0

    def use(self, item: int, worth: float = 1.0) -> bool:
        """Return whether it was there. `worth`: of the item, the same at each use."""
        self.now += 1
        node = self.nodes.get(item)
        if node is not None:
            self.policy.on_hit(node, self.now)
            return True
        if not self.free:
            victim = self.policy.victim()
            assert victim is not None
            self.policy.on_evicted(victim, NO_NODE)
            self.policy.on_removed(victim)
            del self.nodes[self.items.pop(victim)]
            self.free.append(victim)
        node = self.free.pop()
        self.nodes[item], self.items[node] = node, item
        self.policy.on_commit(node, self.now, mark=item + 1)
        self.policy.on_end(node)
        self.policy.on_candidate(node, worth)
        return False


def popular(random: Random, uses: int) -> list[int]:
    """Zipf over 400 items, amid as many that come once."""
    ranks = random.choices(range(400), [1 / (rank + 1) for rank in range(400)], k=uses)
    return [rank if random.random() < 0.5 else random.getrandbits(60) for rank in ranks]


def sessions(random: Random, uses: int) -> list[int]:
    """Each item is used again with probability 0.7, after some others: uses say nothing about further ones."""
    waiting: list[int] = []
    made = []
    for _ in range(uses):
        item = (
            waiting.pop(random.randrange(60)) if len(waiting) > 60 and random.random() < 0.7 else random.getrandbits(60)
        )
        made.append(item)
        if random.random() < 0.7:
            waiting.append(item)
    return made


def hits(name: str, items: list[int]) -> tuple[int, EvictionPolicy]:
    policy = policy_by_name(name, 200)
    cache = FlatCache(policy, 100)
    return sum(map(cache.use, items)), policy


@pytest.mark.parametrize("seed", range(4))
def test_adaptive_weighs_uses_more_where_they_foretell_others_and_then_gains_hits(seed: int) -> None:
    items = popular(Random(seed), 12_000)
    adaptive, policy = hits("adaptive", items)
    assert isinstance(policy, AdaptiveGreedyDual)
    assert policy.exponent > 1.0
    assert adaptive > 1.08 * max(hits("gdsf", items)[0], hits("lru", items)[0])


@pytest.mark.parametrize("seed", range(4))
def test_adaptive_loses_little_where_uses_foretell_nothing_and_gains_when_the_workload_changes(seed: int) -> None:
    random = Random(seed)
    items = sessions(random, 8000)
    assert hits("adaptive", items)[0] >= 0.98 * max(hits("gdsf", items)[0], hits("lru", items)[0])
    changed = items + popular(random, 12_000) + sessions(random, 8000)
    adaptive, policy = hits("adaptive", changed)
    assert isinstance(policy, AdaptiveGreedyDual)
    assert policy.exponent < 0.75  # it came back from above 1
    assert adaptive > 1.03 * max(hits("gdsf", changed)[0], hits("lru", changed)[0])


def hits_after_a_change(seed: int) -> int:
    """Return the hits of conversations in a cache full of what was worth 30 times as much, and is used no more."""
    random = Random(seed)
    cache = FlatCache(AdaptiveGreedyDual(ghosts=200), 100)
    for number in range(3000):
        cache.use(random.randrange(80), worth=30.0)
        cache.use(10_000 + number)
    return sum(map(cache.use, sessions(random, 1000)))


@pytest.mark.parametrize("seed", range(4))
def test_adaptive_gives_up_what_is_used_no_more_although_it_was_worth_much(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = hits_after_a_change(seed)
    monkeypatch.setattr(StandingLimit, "adapt", lambda *_: None)
    assert found > 1.2 * hits_after_a_change(seed)


def test_adaptive_gives_all_candidates_a_score_of_the_present_in_turn() -> None:
    """Nodes that are no candidates take none of the turns: there may be a thousand times as many."""
    policy = AdaptiveGreedyDual(ghosts=64)
    for node in range(2000):
        policy.on_commit(node, 0.0, mark=node + 1)
    policy._standing_max = 0.5
    candidates = range(1900, 2000)
    for node in candidates:
        policy.on_candidate(node, 1.0 + node)
    before = {node: policy._candidates.score(node) for node in candidates}
    policy._standing_max = 100.0
    for _ in range(60):
        victim = policy.victim()
        assert victim is not None
        policy.on_evicted(victim, NO_NODE)
        policy.on_removed(victim)
    left = [node for node in candidates if node in policy._candidates]
    assert len(left) == 40
    assert sum(policy._candidates.score(node) > before[node] for node in left) > 25


class AdaptiveModel(RuleBasedStateMachine):
    """Whatever the policy is told: its victim is a candidate, and it has no more and no fewer."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = AdaptiveGreedyDual(ghosts=8)
        self.known: set[int] = set()
        self.candidates: set[int] = set()

    @rule(node=st.integers(0, 12), parent=st.integers(0, 12), mark=st.integers(0, 40))
    def commit(self, node: int, parent: int, mark: int) -> None:
        above = parent if parent in self.known and parent != node else NO_NODE
        self.policy.on_commit(node, 0.0, above, mark)
        self.known.add(node)

    @rule(node=st.integers(0, 12), ends=st.booleans())
    def use(self, node: int, ends: bool) -> None:
        if ends:
            self.policy.on_end(node)
        else:
            self.policy.on_hit(node, 0.0)

    @rule(node=st.integers(0, 12), worth=st.sampled_from([USELESS, 0.5, 3.0]), may_go=st.booleans())
    def offer(self, node: int, worth: float, may_go: bool) -> None:
        if may_go and node in self.known:
            self.policy.on_candidate(node, worth)
            self.candidates.add(node)
        else:
            self.policy.on_not_candidate(node)
            self.candidates.discard(node)

    @precondition(lambda self: self.candidates)
    @rule(heir=st.integers(0, 12), state_only=st.booleans())
    def evict(self, heir: int, state_only: bool) -> None:
        node = self.policy.victim()
        assert node in self.candidates
        self.policy.on_evicted(node, heir if heir in self.known and heir != node else NO_NODE)
        if state_only:
            self.policy.on_not_candidate(node)
        else:
            self.policy.on_removed(node)
            self.known.discard(node)
        self.candidates.discard(node)

    @invariant()
    def the_candidates_are_those_that_may_go(self) -> None:
        assert (self.policy.victim() is None) == (not self.candidates)
        assert {node for node in range(13) if node in self.policy._candidates} == self.candidates
        assert 0 <= self.policy.exponent <= 1.5


AdaptiveModel.TestCase.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)
TestAdaptiveModel = AdaptiveModel.TestCase


@pytest.mark.requirement("I4")
def test_adaptive_holds_one_byte_more_a_node_and_one_more_a_ghost() -> None:
    policy = AdaptiveGreedyDual(ghosts=100)
    for node in range(50_000):
        policy.on_commit(node, 0.0, mark=node + 1)
        policy.on_end(node)
        policy.on_candidate(node, 1.0)
    assert len(policy._pending) <= len(policy._touched) <= 1.15 * 50_000
    assert len(policy._ghost_class) == 100
