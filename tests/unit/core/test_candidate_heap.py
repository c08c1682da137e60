"""Heaps of candidates for eviction, by group."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from kvdepot.core.candidate_heap import CandidateHeap

GROUPS = 4


class GroupModel(RuleBasedStateMachine):
    """Heaps of groups against a dict that is searched."""

    def __init__(self) -> None:
        super().__init__()
        self.heap = CandidateHeap()
        self.held: dict[int, tuple[float, int]] = {}

    @rule(node=st.integers(0, 40), score=st.integers(0, 9), group=st.integers(0, GROUPS - 1))
    def put(self, node: int, score: int, group: int) -> None:
        _, group = self.held.get(node, (0, group))
        self.heap.put(node, score, group)
        self.held[node] = (score, group)

    @rule(node=st.integers(0, 40))
    def discard(self, node: int) -> None:
        self.heap.discard(node)
        self.held.pop(node, None)

    @rule(groups=st.sets(st.integers(0, GROUPS)))
    def evict(self, groups: set[int]) -> None:
        node = self.heap.first(groups)
        if node is not None:
            self.discard(node)

    @rule(groups=st.sets(st.integers(0, GROUPS)))
    def first_is_the_least_of_its_groups(self, groups: set[int]) -> None:
        self.check(groups, self.heap.first(groups))

    @invariant()
    def first_is_the_least_of_all(self) -> None:
        self.check(set(range(GROUPS)), self.heap.first())
        assert len(self.heap) == len(self.held)
        assert all((node in self.heap) == (node in self.held) for node in range(50))
        assert {self.heap.at(turn) for turn in range(len(self.held))} == set(self.held)
        assert self.heap.at(len(self.held)) is None

    def check(self, groups: set[int], first: int | None) -> None:
        scores = {node: score for node, (score, group) in self.held.items() if group in groups}
        if first is None:
            assert not scores
        else:
            assert scores[first] == min(scores.values()) == self.heap.score(first)


GroupModel.TestCase.settings = settings(max_examples=200, stateful_step_count=60, deadline=None)
TestGroupModel = GroupModel.TestCase
