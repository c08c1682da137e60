"""Least recently used over the leaves of a chunk tree, against a model that searches them all."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from kvdepot.core.errors import InvalidArgument
from kvdepot.core.eviction import LeastRecentlyUsed, policy_by_name, policy_names
from kvdepot.core.eviction_policy import NO_NODE, USELESS, EvictionPolicy
from kvdepot.core.greedy_dual import SHARED_CHILDREN, GreedyDualSizeFrequency


def drain(policy: EvictionPolicy) -> list[int]:
    order = []
    while (node := policy.victim()) is not None:
        order.append(node)
        policy.on_removed(node)
    return order


def test_a_new_policy_has_no_victim() -> None:
    assert LeastRecentlyUsed().victim() is None


def test_victims_come_in_the_order_of_their_last_use() -> None:
    policy = LeastRecentlyUsed()
    for node in range(6):
        policy.on_commit(node, now=float(node))
        policy.on_candidate(node, 1.0)
    policy.on_hit(0, now=10.0)
    policy.on_hit(3, now=9.0)
    assert drain(policy) == [1, 2, 4, 5, 3, 0]


def test_victim_is_only_looked_at_until_it_is_removed() -> None:
    policy = LeastRecentlyUsed()
    policy.on_commit(4, now=1.0)
    policy.on_candidate(4, 1.0)
    assert [policy.victim(), policy.victim()] == [4, 4]
    policy.on_not_candidate(4)
    assert policy.victim() is None


def test_a_parent_that_becomes_a_leaf_is_ranked_by_its_own_last_use() -> None:
    policy = LeastRecentlyUsed()
    policy.on_commit(0, now=1.0)  # parent of 1
    policy.on_commit(1, now=2.0)
    policy.on_commit(2, now=3.0)
    policy.on_hit(0, now=4.0)
    policy.on_candidate(1, 1.0)
    policy.on_candidate(2, 1.0)
    assert policy.victim() == 1
    policy.on_removed(1)
    policy.on_candidate(0, 1.0)
    assert drain(policy) == [2, 0]


def test_a_chain_is_eaten_from_its_end() -> None:
    policy = LeastRecentlyUsed()
    for node in range(100):
        policy.on_commit(node, now=float(node))
        if node:
            policy.on_not_candidate(node - 1)
        policy.on_candidate(node, 1.0)
    eaten = []
    while (node_ := policy.victim()) is not None:
        eaten.append(node_)
        policy.on_removed(node_)
        if node_:
            policy.on_candidate(node_ - 1, 1.0)
    assert eaten == list(range(99, -1, -1))


def test_a_number_that_comes_back_is_a_new_node() -> None:
    policy = LeastRecentlyUsed()
    for node in (7, 8):
        policy.on_commit(node, now=1.0 + node)
        policy.on_candidate(node, 1.0)
    policy.on_removed(7)
    policy.on_commit(7, now=20.0)
    assert policy.victim() == 8
    policy.on_candidate(7, 1.0)
    assert drain(policy) == [8, 7]


@pytest.mark.requirement("I4")
def test_it_holds_a_few_bytes_a_node() -> None:
    policy = LeastRecentlyUsed()
    nodes = 50_000
    for node in range(nodes):
        policy.on_commit(node, now=float(node))
        policy.on_candidate(node, 1.0)
    for now in range(nodes, 3 * nodes):
        policy.on_hit(now % 1000, now=float(now))
        policy.on_not_candidate(now % 977)
        policy.on_candidate(now % 977, 1.0)
    held = policy._candidates.size_bytes + policy._used_at.itemsize * len(policy._used_at)
    assert held <= 28 * nodes  # an eighth is room to grow


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    assert isinstance(policy_by_name("lru"), LeastRecentlyUsed)
    with pytest.raises(InvalidArgument, match="fifo.*choose one of: " + ", ".join(policy_names())):
        policy_by_name("fifo")


class AgainstASearch(RuleBasedStateMachine):
    """A tree grows, is hit and shrinks; the victim is always the least recently used evictable leaf."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = policy_by_name("lru")
        self.now = 0.0
        self.used: dict[int, float] = {}
        self.parent: dict[int, int | None] = {}
        self.lent: set[int] = set()
        self.free_numbers: list[int] = []

    def evictable(self, node: int) -> bool:
        return node not in self.lent and node not in self.parent.values()

    def tell(self, node: int | None) -> None:
        if node is not None and self.evictable(node):
            self.policy.on_candidate(node, 1.0)
        elif node is not None:
            self.policy.on_not_candidate(node)

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.used)))

    @rule(data=st.data(), root=st.booleans(), passed=st.sampled_from([0.0, 1.0]))
    def commit(self, data: st.DataObject, root: bool, passed: float) -> None:
        node = self.free_numbers.pop() if self.free_numbers else len(self.used)
        parent = None if root or not self.used else self.pick(data)
        self.now += passed
        self.used[node] = self.now
        self.parent[node] = parent
        self.policy.on_commit(node, self.now)
        self.tell(parent)
        self.tell(node)

    @precondition(lambda self: self.used)
    @rule(data=st.data(), again=st.booleans())
    def hit(self, data: st.DataObject, again: bool) -> None:
        node = self.pick(data)
        self.now += 1
        self.used[node] = self.now
        (self.policy.on_commit if again else self.policy.on_hit)(node, self.now)

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def lend_or_take_back(self, data: st.DataObject) -> None:
        node = self.pick(data)
        self.lent ^= {node}
        self.tell(node)

    @precondition(lambda self: any(self.evictable(node) for node in self.used))
    @rule(data=st.data(), chosen=st.booleans())
    def remove(self, data: st.DataObject, chosen: bool) -> None:
        candidates = [node for node in self.used if self.evictable(node)]
        node = self.policy.victim() if chosen else data.draw(st.sampled_from(candidates))
        assert node in candidates
        del self.used[node]
        parent = self.parent.pop(node)
        self.free_numbers.append(node)
        self.policy.on_removed(node)
        self.tell(parent)

    @invariant()
    def victim_is_the_least_recently_used(self) -> None:
        victim = self.policy.victim()
        candidates = [node for node in self.used if self.evictable(node)]
        if victim is None:
            assert not candidates
        else:
            assert victim in candidates
            assert self.used[victim] == min(self.used[node] for node in candidates)


AgainstASearch.TestCase.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
TestLruAgainstASearch = AgainstASearch.TestCase


def gdsf(*worths: float) -> GreedyDualSizeFrequency:
    """Nodes 0.. committed at once, each a unit of this worth."""
    policy = GreedyDualSizeFrequency(ghosts=64)
    for node, worth in enumerate(worths):
        policy.on_commit(node, 0.0, mark=1000 + node)
        policy.on_candidate(node, worth)
    return policy


def evicted(policy: GreedyDualSizeFrequency, heir: int = NO_NODE) -> int:
    node = policy.victim()
    assert node is not None
    policy.on_evicted(node, heir)
    policy.on_removed(node)
    return node


def test_gdsf_takes_what_saves_the_least_for_its_bytes() -> None:
    policy = gdsf(3.0, 1.0, 2.0)
    assert [evicted(policy) for _ in range(3)] == [1, 2, 0]


@pytest.mark.parametrize("name", policy_names())
def test_of_equal_units_the_one_that_was_used_last_goes_last(name: str) -> None:
    """Also while the clock of scores stands still, as it does until all units of one score have gone."""
    policy = policy_by_name(name, 300)
    for node in range(300):
        policy.on_commit(node, float(node), mark=node + 1)
        policy.on_candidate(node, 1.0)
    order = []
    for newcomer in range(300, 900):
        victim = policy.victim()
        assert victim is not None
        order.append(victim)
        policy.on_evicted(victim, NO_NODE)
        policy.on_removed(victim)
        policy.on_commit(newcomer, float(newcomer), mark=newcomer + 1)
        policy.on_candidate(newcomer, 1.0)
    assert order == list(range(600))


def test_gdsf_keeps_what_was_used() -> None:
    policy = gdsf(1.0, 1.0, 1.0)
    policy.on_hit(0, 1.0)
    policy.on_hit(2, 1.0)
    policy.on_hit(2, 2.0)
    assert [evicted(policy) for _ in range(3)] == [1, 0, 2]


def test_gdsf_s_clock_overtakes_what_is_used_no_more() -> None:
    """However often it was used: each newcomer starts at the score of what went before it."""
    policy = gdsf(1.0)
    for hit in range(1000):
        policy.on_hit(0, float(hit))
    for newcomer in range(1, 100):
        policy.on_commit(newcomer, 1000.0)
        policy.on_candidate(newcomer, 1.0)
        if evicted(policy) == 0:
            break
    assert 1 < newcomer < 20


def test_gdsf_what_continues_a_used_path_inherits_its_uses_and_a_shared_prefix_passes_none_on() -> None:
    policy = gdsf(1.0, 1.0)
    for _ in range(3):
        policy.on_hit(0, 1.0)
    policy.on_commit(2, 2.0, parent=0)
    policy.on_candidate(2, 1.0)
    assert evicted(policy) == 1
    for child in range(3, 3 + SHARED_CHILDREN):
        policy.on_commit(child, 3.0, parent=0)
    for other in (0, 2):
        policy.on_hit(other, 3.0)
    policy.on_candidate(child, 1.0)
    assert evicted(policy) == child


def test_gdsf_an_heir_inherits_the_standing_of_what_went() -> None:
    policy = gdsf(1.0, 1.0, 1.0)
    policy.on_hit(1, 1.0)
    policy.on_evicted(1, 0)
    policy.on_removed(1)
    policy.on_candidate(0, 1.0)
    assert [evicted(policy) for _ in range(2)] == [2, 0]


def test_gdsf_what_comes_back_after_its_eviction_is_known_again() -> None:
    policy = gdsf(1.0)
    assert evicted(policy) == 0
    for node, mark in ((1, 1000), (2, 7777)):
        policy.on_commit(node, 1.0, mark=mark)
        policy.on_candidate(node, 1.0)
    assert [evicted(policy) for _ in range(2)] == [2, 1]


def test_gdsf_a_hit_of_what_only_another_tier_has_says_nothing_of_a_later_node() -> None:
    policy = gdsf(1.0)
    policy.on_hit(9, 1.0)
    policy.on_evicted(0, 8)
    policy.on_removed(0)
    for node in (8, 9):
        policy.on_commit(node, 2.0, mark=node)
        assert (policy._uses[node], policy._marks[node]) == (0, node)


def chain(policy: GreedyDualSizeFrequency, nodes: range) -> None:
    """One request's path: each continues the one before, and each may go alone."""
    for node in nodes:
        policy.on_commit(node, 0.0, parent=node - 1 if node > nodes.start else NO_NODE)
        policy.on_candidate(node, 1.0)
    policy.on_end(nodes[-1])


def standing(policy: GreedyDualSizeFrequency, node: int) -> float:
    """Return the node's score without its time of last use."""
    return policy._score(node) - policy._touched[node]


def test_gdsf_what_lies_inside_a_path_goes_before_where_requests_end() -> None:
    policy = GreedyDualSizeFrequency(ghosts=64)
    for first in (0, 10, 20):
        chain(policy, range(first, first + 10))
    assert {evicted(policy) for _ in range(27)} == {node for node in range(30) if node % 10 != 9}


def test_gdsf_where_requests_resumed_and_where_paths_part_is_kept_as_long_as_where_they_end() -> None:
    policy = GreedyDualSizeFrequency(ghosts=64)
    chain(policy, range(10))
    chain(policy, range(10, 20))
    policy.on_candidate(13, 0.5)
    policy.on_commit(20, 0.0, parent=13)  # another path from 13 on
    policy.on_end(20)
    policy.on_candidate(20, 1.0)
    policy.on_hit(6, 0.0)
    assert not {evicted(policy) for _ in range(16)} & {6, 9, 13, 19, 20}


def test_gdsf_nodes_inside_paths_count_as_much_as_others_where_they_turn_out_to_be_used_as_often() -> None:
    policy = GreedyDualSizeFrequency(ghosts=64)
    for path in range(100):
        chain(policy, range(10 * path, 10 * path + 10))
        if path < 99:
            for node in range(10 * path, 10 * path + 9):
                policy.on_hit(node, 0.0)
    assert standing(policy, 995) == pytest.approx(standing(policy, 999), rel=0.1)
    unused = GreedyDualSizeFrequency(ghosts=64)
    chain(unused, range(1000))
    assert standing(unused, 995) < 0.01 * standing(unused, 999)


def test_gdsf_the_heir_of_an_end_is_one() -> None:
    """Else the attention before an evicted chunk would count as inside of a path that ends there now."""
    policy = GreedyDualSizeFrequency(ghosts=64)
    chain(policy, range(50))
    policy.on_evicted(49, 48)
    policy.on_removed(49)
    assert standing(policy, 48) > 10 * standing(policy, 47)


def test_useless_units_go_before_all_others() -> None:
    for name in policy_names():
        policy = policy_by_name(name)
        for node in range(3):
            policy.on_commit(node, float(node))
            policy.on_candidate(node, 1.0)
        policy.on_candidate(2, USELESS)
        policy.on_hit(2, 9.0)
        assert policy.victim() == 2
        policy.on_candidate(2, 1.0)
        assert policy.victim() in (0, 1)


@pytest.mark.requirement("I4")
def test_gdsf_holds_a_few_bytes_a_node_and_no_more_ghosts_than_it_may() -> None:
    policy = GreedyDualSizeFrequency(ghosts=100)
    for node in range(50_000):
        policy.on_commit(node, 0.0, mark=node + 1)
        policy.on_candidate(node, 1.0)
    for _ in range(40_000):
        evicted(policy)
    columns = (policy._touched, policy._worth, policy._marks)
    held = policy._candidates.size_bytes + sum(column.itemsize * len(column) for column in columns)
    held += len(policy._uses) + len(policy._children) + len(policy._roles)
    assert held <= 46 * 50_000
    assert (len(policy._ghost_marks), len(policy._ghost_uses)) == (100, 100)


@pytest.mark.requirement("T8")
@pytest.mark.parametrize("name", policy_names())
def test_a_victim_of_some_groups_is_the_next_of_them_and_leaves_the_order_of_others(name: str) -> None:
    policy = policy_by_name(name)
    for node in range(9):
        policy.on_commit(node, float(node))
        policy.on_candidate(node, 1.0 + node, group=node % 3)
    assert policy.victim() == policy.victim((0,)) == 0
    assert [policy.victim((1,)), policy.victim((2, 1)), policy.victim((7,)), policy.victim(())] == [1, 1, None, None]
    policy.on_evicted(1, NO_NODE)
    policy.on_removed(1)
    assert [policy.victim((1,)), policy.victim((2, 1))] == [4, 2]
    assert drain(policy) == [0, 2, 3, 4, 5, 6, 7, 8]
