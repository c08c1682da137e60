"""Eviction by what a use saves, and by how often a unit was used: GDSF, with what prompts need."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable
from typing import Final

from kvdepot.core.candidate_heap import CandidateHeap, missing_entries
from kvdepot.core.eviction_policy import GHOSTS_DEFAULT, NEVER_USED, NO_NODE, USELESS

SHARED_CHILDREN: Final = 4
"""So many continuations make a node a shared prefix: how often it is used says nothing about the next one.

Fewer are one conversation, edited or regenerated. The trace's hit rate differs by 0.003 from 2 to 32.
"""
USES_MAX: Final = 7
"""Further uses raise a score no more, so that what was hot becomes evictable again."""
_WEIGHT: Final = [math.sqrt(uses + 1) for uses in range(USES_MAX + 1)]
_TURN: Final = 0.5
"""Mean worths by which the clock of uses rises in as many uses as there are ghosts. 0.3 to 1 are as good."""
_MEAN_OF: Final = 100
"""Candidates that the mean worth covers."""
CONTINUED: Final = 1  # something was committed below the node
_STOP: Final = 2  # a request ended or resumed there, or paths part there
_RESUMED: Final = 4  # a request resumed there
_COUNTS_MAX: Final = 1 << 16
"""Outcomes counted before all counts are halved, so that the rates follow a changing workload."""


class _Rate:
    """How many of those seen were used, between 0 and 1, as if one of `seen` had been at the start."""

    def __init__(self, seen: float) -> None:
        self._seen = seen
        self._used = 1.0

    @property
    def value(self) -> float:
        return self._used / self._seen

    def saw(self) -> None:
        if self._seen >= _COUNTS_MAX:
            self._seen /= 2
            self._used /= 2
        self._seen += 1

    def used(self) -> None:
        self._used = min(self._used + 1, self._seen)


class GreedyDualSizeFrequency:
    """The least of clock + sqrt(uses + 1) x worth (GDSF: Cherkasova, HPL-98-69R1; worth is seconds saved per byte).

    The clock is the score of what was evicted last, so that what is not used loses against
    what comes in. Six things are this policy's own (measured in ADRs 0014 and 0089):

    * The root of the uses: where they say nothing about further ones, a straight line costs
      up to a tenth of LRU's hits, the root half of that, and gains as much where they do.
    * A node inherits the uses of what it continues, unless that is a shared prefix: a
      conversation that continued before is likelier to continue again than a new one.
    * The node that inherits an evicted node's requests (`heir`) inherits its standing: a hit
      touches the end node only, and is a use of the whole path.
    * Uses are remembered beyond eviction, for `ghosts` nodes: what comes back was evicted too early.
    * A node inside a path, where no request ended or resumed and no paths part (a stop), counts less, by the ratio
      of two rates learned from outcomes: how many such nodes became stops, and how many stops were resumed at.
      An engine that offers a state at every chunk fills memory with such nodes (Marconi, arXiv 2411.19379).
    * The clock of a use also rises a little with each use. Otherwise it stands still while nodes of one score go,
      and all that comes in meanwhile has one score, too: what went first of it would be chance.

    41 bytes a node and 9 bytes a ghost.
    """

    def __init__(self, ghosts: int = GHOSTS_DEFAULT) -> None:
        self._candidates = CandidateHeap()
        self._weight = _WEIGHT
        self._clock = 0.0  # the highest score of what was evicted
        self._now = 0.0  # the clock of uses
        self._mean_worth = 0.0  # of the latest candidates
        self._standing_max = math.inf
        self._touched = array("d")  # by node: the clock of uses at its last one; NEVER_USED: not committed
        self._worth = array("f")
        self._uses = bytearray()
        self._children = bytearray()  # that were ever committed, up to SHARED_CHILDREN
        self._marks = array("Q")
        self._roles = bytearray()  # CONTINUED, _STOP, _RESUMED
        self._inside = _Rate(32)  # nodes inside a path, by whether they became stops
        self._stops = _Rate(2)  # stops, by whether a request resumed there
        self._ghost_marks = array("Q", (0,)) * ghosts  # by mark, modulo the length
        self._ghost_uses = bytearray(ghosts)

    def on_commit(self, node: int, now: float, parent: int = NO_NODE, mark: int = 0) -> None:  # noqa: ARG002
        self._know(node)
        if self._touched[node] == NEVER_USED:
            self._enter(node, parent, mark)
        self._touch(node)

    def on_hit(self, node: int, now: float) -> None:  # noqa: ARG002
        self._know(node)
        if self._touched[node] != NEVER_USED:  # else another tier's
            self._uses[node] = min(self._uses[node] + 1, USES_MAX)
            self._stop(node)
            if not self._roles[node] & _RESUMED:
                self._roles[node] |= _RESUMED
                self._stops.used()
            self._touch(node)

    def on_end(self, node: int) -> None:
        self._know(node)
        self._stop(node)

    def on_candidate(self, node: int, worth: float, group: int = 0) -> None:
        self._know(node)
        self._worth[node] = worth
        if worth > USELESS:
            self._mean_worth += (worth - self._mean_worth) / (_MEAN_OF if self._mean_worth else 1)
        self._candidates.put(node, self._score(node), group)

    def on_not_candidate(self, node: int) -> None:
        self._candidates.discard(node)

    def on_evicted(self, node: int, heir: int) -> None:
        self._know(node)
        if node in self._candidates:
            self._clock = max(self._clock, self._candidates.score(node))
        mark = self._marks[node]
        if mark and self._roles[node] != CONTINUED:
            slot = mark % len(self._ghost_marks)
            self._ghost_marks[slot] = mark
            self._ghost_uses[slot] = self._uses[node]
        if heir != NO_NODE:
            self._know(heir)
            self._inherit(heir, node)

    def on_removed(self, node: int) -> None:
        self._candidates.discard(node)
        if node < len(self._touched):
            self._touched[node] = NEVER_USED
            self._roles[node] = 0

    def victim(self, groups: Iterable[int] | None = None) -> int | None:
        return self._candidates.first(groups)

    def use_class(self, node: int) -> int:
        """Return the node's uses, apart for nodes inside a path and for stops."""
        self._know(node)
        return 2 * self._uses[node] + (self._roles[node] != CONTINUED)

    def _enter(self, node: int, parent: int, mark: int) -> None:
        """Add a node, with its remembered uses or those of its parent."""
        self._marks[node] = mark
        self._children[node] = 0
        self._uses[node] = 0
        slot = mark % len(self._ghost_marks)
        returned = mark != 0 and self._ghost_marks[slot] == mark
        if returned:
            self._uses[node] = min(self._ghost_uses[slot] + 1, USES_MAX)
            self._ghost_marks[slot] = 0
        if parent == NO_NODE:
            return
        self._know(parent)
        if self._children[parent] < SHARED_CHILDREN:
            self._uses[node] = max(self._uses[node], self._uses[parent])
        self._continue(parent, returned)

    def _continue(self, node: int, returned: bool) -> None:
        """Note a new node below this one: the node is inside a path now, or paths branch there."""
        if not self._roles[node]:
            self._inside.saw()
        self._roles[node] |= CONTINUED
        self._children[node] = min(self._children[node] + (not returned), SHARED_CHILDREN)
        if self._children[node] > 1:
            self._stop(node)
        self._rescore(node)

    def _stop(self, node: int) -> None:
        roles = self._roles[node]
        if roles & _STOP:
            return
        self._roles[node] |= _STOP
        self._stops.saw()
        if roles & CONTINUED:
            self._inside.used()
        self._rescore(node)

    def _inherit(self, heir: int, node: int) -> None:
        if self._touched[heir] == NEVER_USED:
            return  # another tier's
        if self._children[heir] < SHARED_CHILDREN:
            self._uses[heir] = max(self._uses[heir], self._uses[node])
        self._touched[heir] = max(self._touched[heir], self._touched[node])
        if self._roles[node] != CONTINUED:
            self._roles[heir] |= _STOP

    def _touch(self, node: int) -> None:
        self._now = max(self._now, self._clock) + _TURN * self._mean_worth / len(self._ghost_marks)
        self._touched[node] = max(self._touched[node], self._now)
        self._rescore(node)

    def _rescore(self, node: int) -> None:
        if node in self._candidates:
            self._candidates.change(node, self._score(node))

    def _score(self, node: int) -> float:
        worth = self._worth[node]
        if worth <= USELESS:
            return NEVER_USED
        if self._roles[node] == CONTINUED:
            worth *= min(self._inside.value / self._stops.value, 1.0)
        standing = self._weight[self._uses[node]] * worth
        return self._touched[node] + (standing if standing < self._standing_max else self._standing_max)

    def _know(self, node: int) -> None:
        """Make the columns long enough for `node`."""
        if node >= len(self._touched):
            self._extend(missing_entries(node, self._touched))

    def _extend(self, missing: int) -> None:
        self._touched.extend(array("d", (NEVER_USED,)) * missing)
        self._worth.extend(array("f", (USELESS,)) * missing)
        self._marks.extend(array("Q", (0,)) * missing)
        self._uses.extend(bytes(missing))
        self._children.extend(bytes(missing))
        self._roles.extend(bytes(missing))
