"""The default policy: GDSF that learns how much uses count, and how long to wait for the next one."""

from __future__ import annotations

import math
from typing import Final

from kvdepot.core.eviction_policy import GHOSTS_DEFAULT, NEVER_USED, NO_NODE
from kvdepot.core.greedy_dual import CONTINUED, USES_MAX, GreedyDualSizeFrequency
from kvdepot.core.return_rates import ReturnRates
from kvdepot.core.standing_limit import StandingLimit

_EXPONENT: Final = 0.5
"""Of the uses in a score, without evidence: the root of `GreedyDualSizeFrequency`."""
_EXPONENT_MAX: Final = 1.5
_SIGNIFICANT: Final = 1.0
"""Standard errors between the two rates of return before the exponent moves. At two more it has its limit."""
_BATCH: Final = 8
"""Evictions that count between two looks at the rates, which take 5 us."""
_OUTCOMES_MIN, _OUTCOMES_MAX = 100, 300
"""Evictions that the rates of return cover: with the next one, each counts less by a factor of 1 - 1 / that."""
_TURNS: Final = 4
"""So many times the candidates are covered, within these limits: a small cache forgets the last workload soon."""
_LIMIT_OUTCOMES_MIN, _LIMIT_OUTCOMES_MAX = 30, 100
"""Evictions that `StandingLimit` covers: as many as there are candidates, within these limits."""
_STEP: Final = 1 - (1 - 0.02) ** _BATCH
"""How much of its way the exponent goes at one look: 2 % an eviction."""
_VISIT: Final = 2
"""Evictions that count after a request was at a node. The last block of a prompt is often partial: it never returns."""


class AdaptiveGreedyDual(GreedyDualSizeFrequency):
    """`GreedyDualSizeFrequency` with (uses + 1) to a power that follows what comes back after its eviction.

    Whether uses say anything about further ones depends on the workload: for shared prompts and documents they do, and
    for conversations they do not (ADR 77). At the best exponent, nodes of many and of few uses come back equally often
    while their ghosts last (`ReturnRates`). If the used ones do more often, they went too early, and it rises. If they
    do less often, it falls to 0, where age alone decides. Without a significant difference it returns to the root.

    A standing has a limit, too, which falls where what was not used for long is not hit either (`StandingLimit`): the
    workload has changed. All candidates get a score of the present in turn. Otherwise what was hot would keep that of
    its last use for many turns of the cache. 1 byte more a node, and 1 a ghost.
    """

    def __init__(self, ghosts: int = GHOSTS_DEFAULT) -> None:
        super().__init__(ghosts)
        self.exponent = _EXPONENT
        self._pending = bytearray()  # by node: how many evictions from here upwards still count
        self._ghost_class = bytearray(ghosts)  # by slot: 1 + class of a counted eviction, or 0
        self._rates = ReturnRates()
        self._limit = StandingLimit()
        self._turn = 0  # of the candidate that is rescored next
        self._unseen = 0  # evictions that count, since `_adapt`

    def on_hit(self, node: int, now: float) -> None:
        self._know(node)
        if self._touched[node] != NEVER_USED:
            self._pending[node] = _VISIT
            own = node in self._candidates or not self._roles[node] & CONTINUED  # else those below it kept it
            if own and self._touched[node] < self._old_before:
                self._limit.hit_old()
        super().on_hit(node, now)

    def on_end(self, node: int) -> None:
        self._know(node)
        self._pending[node] = _VISIT
        super().on_end(node)

    def on_evicted(self, node: int, heir: int) -> None:
        super().on_evicted(node, heir)
        self._rescore_next()
        pending, self._pending[node] = self._pending[node], 0
        mark = self._marks[node]
        slot = mark % len(self._ghost_marks)
        remembered = mark != 0 and self._ghost_marks[slot] == mark
        if remembered:
            self._ghost_class[slot] = 0
        if not pending:
            return
        many = self._rates.evict(self._uses[node])
        if remembered:
            self._ghost_class[slot] = 1 + many
        self._unseen += 1
        if self._unseen == _BATCH:
            self._unseen = 0
            self._adapt()
        if heir != NO_NODE and self._touched[heir] != NEVER_USED and self._children[heir] < 2:
            self._pending[heir] = max(self._pending[heir], pending - 1)

    def on_removed(self, node: int) -> None:
        super().on_removed(node)
        if node < len(self._pending):
            self._pending[node] = 0

    def _enter(self, node: int, parent: int, mark: int) -> None:
        slot = mark % len(self._ghost_marks)
        if mark and self._ghost_marks[slot] == mark and self._ghost_class[slot]:
            self._rates.come_back(self._ghost_class[slot] - 1)
            self._limit.come_back()
        super()._enter(node, parent, mark)

    @property
    def _old_before(self) -> float:
        """Return the clock of uses before which the last use of an old unit was."""
        return self._now - self._limit.old_worths * self._mean_worth

    def _rescore_next(self) -> None:
        """Give the candidate whose turn it is a score of the present, and have it seen by `StandingLimit`."""
        node = self._candidates.at(self._turn)
        self._turn += 1
        if node is None:
            self._turn = 0
        elif self._touched[node] != NEVER_USED:
            self._limit.see(old=self._touched[node] < self._old_before)
            self._candidates.change(node, self._score(node))

    def _adapt(self) -> None:
        """Move the exponent and the limit of a standing towards what the outcomes of evictions ask for."""
        candidates = len(self._candidates)
        self._rates.forget(_kept(min(max(_TURNS * candidates, _OUTCOMES_MIN), _OUTCOMES_MAX)))
        self._limit.adapt(_kept(min(max(candidates, _LIMIT_OUTCOMES_MIN), _LIMIT_OUTCOMES_MAX)))
        self._standing_max = self._limit.worths * self._mean_worth
        errors = self._rates.errors()
        evidence = math.copysign(min(max(abs(errors) - _SIGNIFICANT, 0.0) / 2, 1.0), errors)
        self.exponent += _STEP * (_EXPONENT + evidence - self.exponent)
        self.exponent = min(max(self.exponent, 0.0), _EXPONENT_MAX)
        self._weight = [(uses + 1) ** self.exponent for uses in range(USES_MAX + 1)]

    def _extend(self, missing: int) -> None:
        super()._extend(missing)
        self._pending.extend(bytes(missing))


def _kept(evictions: int) -> float:
    """Return by what all that was counted is multiplied at a look, so that it covers so many evictions."""
    return (1 - 1 / evictions) ** _BATCH
