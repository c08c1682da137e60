"""Which part of the chunk tree goes first when room is needed.

The engine owns the tree, knows which of its units may go (design.md#eviction) and what
each is worth, and tells the policy in the calls of `EvictionPolicy` what happened. A
unit is named by one node: an integer, dense from 0 and reused after `on_removed`. A
policy keeps its knowledge in arrays indexed by it, never an object a node.

The candidates of every policy lie in a `CandidateHeap`.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable
from typing import Final, Protocol

from kvdepot.core.candidate_heap import CandidateHeap, missing_entries
from kvdepot.core.errors import InvalidArgument
from kvdepot.core.return_rates import ReturnRates

NO_NODE: Final = 0xFFFF_FFFF
USELESS: Final = 0.0
"""Worth of a unit that no request can use: it goes before all others."""

USE_CLASSES: Final = 16

_FIRST: Final = float("-inf")


class EvictionPolicy(Protocol):
    """What the engine tells a policy, and the one question it asks. `now` is monotonic, in seconds.

    The calls are idempotent: to say what the policy knows already has no effect.
    """

    def on_commit(self, node: int, now: float, parent: int = NO_NODE, mark: int = 0) -> None:
        """Note that an object of `node` was committed or adopted.

        `mark` is 64 bits of the chunk's key. They identify the node after an eviction. 0: none.
        """

    def on_hit(self, node: int, now: float) -> None:
        """Note that a request resumed at `node`: the end node of an acquire, not its ancestors."""

    def on_end(self, node: int) -> None:
        """Note that a request ended at `node`. Its continuation will resume there."""

    def on_candidate(self, node: int, worth: float, group: int = 0) -> None:
        """Add the node's unit to the candidates. `worth`: seconds that each use saves, per byte of the unit.

        `group` is below 65,536, and stays the same until `on_removed`.
        """

    def on_not_candidate(self, node: int) -> None:
        """Remove the node's unit from the candidates: descendants need it, or a part is lent or reserved."""

    def on_evicted(self, node: int, heir: int) -> None:
        """Note that the unit was evicted. Requests that would have resumed there resume at `heir`, or NO_NODE."""

    def on_removed(self, node: int) -> None:
        """Forget `node`. Its number may be reused for another node."""

    def victim(self, groups: Iterable[int] | None = None) -> int | None:
        """Return the node whose unit goes next, of these groups or of all; None without a candidate.

        The node stays a candidate until another call removes it.
        """

    def use_class(self, node: int) -> int:
        """Return a number below `USE_CLASSES`, the same for nodes with the same past as far as the policy knows."""


class LeastRecentlyUsed:
    """The candidate whose last commit or hit is the longest ago. 22 bytes a node."""

    def __init__(self) -> None:
        self._candidates = CandidateHeap()
        self._used_at = array("d")  # by node: time of its last use

    def on_commit(self, node: int, now: float, parent: int = NO_NODE, mark: int = 0) -> None:  # noqa: ARG002
        self.on_hit(node, now)

    def on_hit(self, node: int, now: float) -> None:
        missing = missing_entries(node, self._used_at)
        if missing:
            self._used_at.extend(array("d", (_FIRST,)) * missing)
        # A time before the last one is no reason to evict a node earlier.
        self._used_at[node] = max(self._used_at[node], now)
        if node in self._candidates and self._candidates.score(node) != _FIRST:
            self._candidates.change(node, self._used_at[node])

    def on_end(self, node: int) -> None:
        pass

    def on_candidate(self, node: int, worth: float, group: int = 0) -> None:
        used_at = self._used_at[node] if node < len(self._used_at) else _FIRST
        self._candidates.put(node, used_at if worth > USELESS else _FIRST, group)

    def on_not_candidate(self, node: int) -> None:
        self._candidates.discard(node)

    def on_evicted(self, node: int, heir: int) -> None:
        pass  # an ancestor that was used later than its last descendant has a later time of its own

    def on_removed(self, node: int) -> None:
        self._candidates.discard(node)
        if node < len(self._used_at):
            self._used_at[node] = _FIRST

    def victim(self, groups: Iterable[int] | None = None) -> int | None:
        return self._candidates.first(groups)

    def use_class(self, node: int) -> int:  # noqa: ARG002
        """Return 0: times say nothing of the number of uses."""
        return 0


SHARED_CHILDREN: Final = 4
"""So many continuations make a node a shared prefix: how often it is used says nothing about the next one.

Fewer are one conversation, edited or regenerated. The trace's hit rate differs by 0.003 from 2 to 32.
"""
_USES_MAX: Final = 7
"""Further uses raise a score no more, so that what was hot becomes evictable again."""
_WEIGHT: Final = [math.sqrt(uses + 1) for uses in range(_USES_MAX + 1)]
GHOSTS_DEFAULT: Final = 1 << 16
_TURN: Final = 0.5
"""Mean worths by which the clock of uses rises in as many uses as there are ghosts. 0.3 to 1 are as good."""
_MEAN_OF: Final = 100
"""Candidates that the mean worth covers."""
_CONTINUED: Final = 1  # something was committed below the node
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
        self._touched = array("d")  # by node: the clock of uses at its last one; _FIRST: not committed
        self._worth = array("f")
        self._uses = bytearray()
        self._children = bytearray()  # that were ever committed, up to SHARED_CHILDREN
        self._marks = array("Q")
        self._roles = bytearray()  # _CONTINUED, _STOP, _RESUMED
        self._inside = _Rate(32)  # nodes inside a path, by whether they became stops
        self._stops = _Rate(2)  # stops, by whether a request resumed there
        self._ghost_marks = array("Q", (0,)) * ghosts  # by mark, modulo the length
        self._ghost_uses = bytearray(ghosts)

    def on_commit(self, node: int, now: float, parent: int = NO_NODE, mark: int = 0) -> None:  # noqa: ARG002
        self._know(node)
        if self._touched[node] == _FIRST:
            self._enter(node, parent, mark)
        self._touch(node)

    def on_hit(self, node: int, now: float) -> None:  # noqa: ARG002
        self._know(node)
        if self._touched[node] != _FIRST:  # else another tier's
            self._uses[node] = min(self._uses[node] + 1, _USES_MAX)
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
        if mark and self._roles[node] != _CONTINUED:
            slot = mark % len(self._ghost_marks)
            self._ghost_marks[slot] = mark
            self._ghost_uses[slot] = self._uses[node]
        if heir != NO_NODE:
            self._know(heir)
            self._inherit(heir, node)

    def on_removed(self, node: int) -> None:
        self._candidates.discard(node)
        if node < len(self._touched):
            self._touched[node] = _FIRST
            self._roles[node] = 0

    def victim(self, groups: Iterable[int] | None = None) -> int | None:
        return self._candidates.first(groups)

    def use_class(self, node: int) -> int:
        """Return the node's uses, apart for nodes inside a path and for stops."""
        self._know(node)
        return 2 * self._uses[node] + (self._roles[node] != _CONTINUED)

    def _enter(self, node: int, parent: int, mark: int) -> None:
        """Add a node, with its remembered uses or those of its parent."""
        self._marks[node] = mark
        self._children[node] = 0
        self._uses[node] = 0
        slot = mark % len(self._ghost_marks)
        returned = mark != 0 and self._ghost_marks[slot] == mark
        if returned:
            self._uses[node] = min(self._ghost_uses[slot] + 1, _USES_MAX)
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
        self._roles[node] |= _CONTINUED
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
        if roles & _CONTINUED:
            self._inside.used()
        self._rescore(node)

    def _inherit(self, heir: int, node: int) -> None:
        if self._touched[heir] == _FIRST:
            return  # another tier's
        if self._children[heir] < SHARED_CHILDREN:
            self._uses[heir] = max(self._uses[heir], self._uses[node])
        self._touched[heir] = max(self._touched[heir], self._touched[node])
        if self._roles[node] != _CONTINUED:
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
            return _FIRST
        if self._roles[node] == _CONTINUED:
            worth *= min(self._inside.value / self._stops.value, 1.0)
        return self._touched[node] + self._weight[self._uses[node]] * worth

    def _know(self, node: int) -> None:
        missing = missing_entries(node, self._touched)
        if not missing:
            return
        self._touched.extend(array("d", (_FIRST,)) * missing)
        self._worth.extend(array("f", (USELESS,)) * missing)
        self._marks.extend(array("Q", (0,)) * missing)
        self._uses.extend(bytes(missing))
        self._children.extend(bytes(missing))
        self._roles.extend(bytes(missing))


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
_RESCORED: Final = 2
"""Nodes that get the score of the present exponent at each eviction."""
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
    All candidates get the score of the present exponent in turn. Otherwise what was hot under a high one would stay
    for many turns of the cache. 1 byte more a node, and 1 a ghost.
    """

    def __init__(self, ghosts: int = GHOSTS_DEFAULT) -> None:
        super().__init__(ghosts)
        self.exponent = _EXPONENT
        self._pending = bytearray()  # by node: how many evictions from here upwards still count
        self._ghost_class = bytearray(ghosts)  # by slot: 1 + class of a counted eviction, or 0
        self._rates = ReturnRates()
        self._rescored = 0  # the node that got its score last
        self._unseen = 0  # evictions that count, since `_adapt`

    def on_hit(self, node: int, now: float) -> None:
        self._know(node)
        if self._touched[node] != _FIRST:
            self._pending[node] = _VISIT
        super().on_hit(node, now)

    def on_end(self, node: int) -> None:
        self._know(node)
        self._pending[node] = _VISIT
        super().on_end(node)

    def on_evicted(self, node: int, heir: int) -> None:
        super().on_evicted(node, heir)
        for _ in range(_RESCORED):
            self._rescored = (self._rescored + 1) % len(self._touched)
            self._rescore(self._rescored)
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
        if heir != NO_NODE and self._touched[heir] != _FIRST and self._children[heir] < 2:
            self._pending[heir] = max(self._pending[heir], pending - 1)

    def on_removed(self, node: int) -> None:
        super().on_removed(node)
        if node < len(self._pending):
            self._pending[node] = 0

    def _enter(self, node: int, parent: int, mark: int) -> None:
        slot = mark % len(self._ghost_marks)
        if mark and self._ghost_marks[slot] == mark and self._ghost_class[slot]:
            self._rates.come_back(self._ghost_class[slot] - 1)
        super()._enter(node, parent, mark)

    def _adapt(self) -> None:
        """Move the exponent towards what the rates of return ask for."""
        outcomes = min(max(_TURNS * len(self._candidates), _OUTCOMES_MIN), _OUTCOMES_MAX)
        self._rates.forget((1 - 1 / outcomes) ** _BATCH)
        errors = self._rates.errors()
        evidence = math.copysign(min(max(abs(errors) - _SIGNIFICANT, 0.0) / 2, 1.0), errors)
        self.exponent += _STEP * (_EXPONENT + evidence - self.exponent)
        self.exponent = min(max(self.exponent, 0.0), _EXPONENT_MAX)
        self._weight = [(uses + 1) ** self.exponent for uses in range(_USES_MAX + 1)]

    def _know(self, node: int) -> None:
        super()._know(node)
        if missing := len(self._touched) - len(self._pending):
            self._pending.extend(bytes(missing))


_POLICIES: Final[dict[str, Callable[[int], EvictionPolicy]]] = {
    "adaptive": AdaptiveGreedyDual,
    "gdsf": GreedyDualSizeFrequency,
    "lru": lambda _: LeastRecentlyUsed(),
}
DEFAULT_POLICY: Final = "adaptive"


def policy_names() -> tuple[str, ...]:
    """Return the names that `policy_by_name` knows (`[policy].eviction`)."""
    return tuple(sorted(_POLICIES))


def policy_by_name(name: str, ghosts: int = GHOSTS_DEFAULT) -> EvictionPolicy:
    """Return a new policy that remembers at most so many evicted nodes. Raise InvalidArgument for an unknown name."""
    if name not in _POLICIES:
        raise InvalidArgument(
            f"there is no eviction policy {name!r}", advice=f"choose one of: {', '.join(policy_names())}"
        )
    return _POLICIES[name](ghosts)
