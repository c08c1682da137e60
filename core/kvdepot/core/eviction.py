"""Which part of the chunk tree goes first when room is needed.

The engine owns the tree, knows which of its units may go (design.md#eviction) and what
each is worth, and tells the policy in the calls of `EvictionPolicy` what happened. A
unit is named by one node: an integer, dense from 0 and reused after `on_removed`. A
policy keeps its knowledge in arrays indexed by it, never an object a node.

The candidates of every policy lie in a `CandidateHeap`, binary heaps with the position
of each (the indexed heap of Sedgewick and Wayne, Algorithms, 4th ed., 2.4), not in a
lazy heap of (score, node) pairs: see ADR 0006 for what those cost. Each group of nodes has
a heap of its own, so that the least useful of some groups is found without a search: see
ADR 0016.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable
from typing import Final, Protocol

from kvdepot.core.errors import InvalidArgument

NO_NODE: Final = 0xFFFF_FFFF
USELESS: Final = 0.0
"""Worth of a unit that no request can use: it goes before all others."""

_NOT_A_CANDIDATE: Final = -1
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


class CandidateHeap:
    """Nodes by score, the least first. O(log n) a change; 14 bytes a node and 4 bytes a candidate."""

    def __init__(self) -> None:
        self._score = array("d")  # by node
        self._place = array("i")  # by node: its index in its group's heap
        self._group = array("H")  # by node
        # By group, none of them empty: no node has a lower score than the one at (index - 1) // 2.
        self._heaps: dict[int, array[int]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._heaps.values()))

    def __contains__(self, node: int) -> bool:
        return node < len(self._place) and self._place[node] != _NOT_A_CANDIDATE

    @property
    def size_bytes(self) -> int:
        columns = (self._score, self._place, self._group)
        return sum(column.itemsize * len(column) for column in columns) + 4 * len(self)

    def first(self, groups: Iterable[int] | None = None) -> int | None:
        """Return the least entry of these groups, or of all. O(groups)."""
        heaps = self._heaps
        held = heaps.values() if groups is None else [heaps[group] for group in groups if group in heaps]
        return min((heap[0] for heap in held), key=self._score.__getitem__, default=None)

    def score(self, node: int) -> float:
        return self._score[node]

    def put(self, node: int, score: float, group: int = 0) -> None:
        """Add it to the group, or change its score there. O(1) where the score belongs at the end."""
        self._know(node)
        if self._place[node] != _NOT_A_CANDIDATE:
            self.change(node, score)
            return
        self._score[node] = score
        self._group[node] = group
        heap = self._heaps.get(group)
        if heap is None:
            heap = self._heaps[group] = array("I")
        heap.append(node)
        self._rise(heap, len(heap) - 1, node)

    def change(self, node: int, score: float) -> None:
        """Change a candidate's score."""
        before = self._score[node]
        if score != before:
            self._score[node] = score
            (self._rise if score < before else self._sink)(self._heaps[self._group[node]], self._place[node], node)

    def discard(self, node: int) -> None:
        if node not in self:
            return
        place, group = self._place[node], self._group[node]
        self._place[node] = _NOT_A_CANDIDATE
        heap = self._heaps[group]
        last = heap.pop()
        if last != node:
            # The last one fills the gap, and may belong above or below it.
            self._rise(heap, place, last)
            self._sink(heap, self._place[last], last)
        elif not heap:
            del self._heaps[group]

    def _know(self, node: int) -> None:
        """Make the arrays long enough for `node`."""
        missing = _missing(node, self._place)
        if missing:
            self._place.extend(array("i", (_NOT_A_CANDIDATE,)) * missing)
            self._score.extend(array("d", (0.0,)) * missing)
            self._group.extend(array("H", (0,)) * missing)

    def _rise(self, heap: array[int], place: int, node: int) -> None:
        places, scores = self._place, self._score
        score = scores[node]
        while place:
            above = (place - 1) >> 1
            other = heap[above]
            if scores[other] <= score:
                break
            heap[place] = other
            places[other] = place
            place = above
        heap[place] = node
        places[node] = place

    def _sink(self, heap: array[int], place: int, node: int) -> None:
        places, scores = self._place, self._score
        score = scores[node]
        end = len(heap)
        while (below := 2 * place + 1) < end:
            other = heap[below]
            if below + 1 < end and scores[heap[below + 1]] < scores[other]:
                below += 1
                other = heap[below]
            if scores[other] >= score:
                break
            heap[place] = other
            places[other] = place
            place = below
        heap[place] = node
        places[node] = place


class LeastRecentlyUsed:
    """The candidate whose last commit or hit is the longest ago. 22 bytes a node."""

    def __init__(self) -> None:
        self._candidates = CandidateHeap()
        self._used_at = array("d")  # by node: time of its last use

    def on_commit(self, node: int, now: float, parent: int = NO_NODE, mark: int = 0) -> None:  # noqa: ARG002
        self.on_hit(node, now)

    def on_hit(self, node: int, now: float) -> None:
        missing = _missing(node, self._used_at)
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


SHARED_CHILDREN: Final = 4
"""So many continuations make a node a shared prefix: how often it is used says nothing about the next one.

Fewer are one conversation, edited or regenerated. The trace's hit rate differs by 0.003 from 2 to 32.
"""
_USES_MAX: Final = 7
"""Further uses raise a score no more, so that what was hot becomes evictable again."""
_WEIGHT: Final = tuple(math.sqrt(uses + 1) for uses in range(_USES_MAX + 1))
GHOSTS_DEFAULT: Final = 1 << 16
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
    what comes in. Five things are this policy's own (measured in ADR 0014):

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

    41 bytes a node and 9 bytes a ghost.
    """

    def __init__(self, ghosts: int = GHOSTS_DEFAULT) -> None:
        self._candidates = CandidateHeap()
        self._clock = 0.0
        self._touched = array("d")  # by node: the clock at its last use; _FIRST: not committed
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
        self._touched[node] = max(self._touched[node], self._clock)
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
        return self._touched[node] + _WEIGHT[self._uses[node]] * worth

    def _know(self, node: int) -> None:
        missing = _missing(node, self._touched)
        if not missing:
            return
        self._touched.extend(array("d", (_FIRST,)) * missing)
        self._worth.extend(array("f", (USELESS,)) * missing)
        self._marks.extend(array("Q", (0,)) * missing)
        self._uses.extend(bytes(missing))
        self._children.extend(bytes(missing))
        self._roles.extend(bytes(missing))


def _missing(node: int, column: array[float] | array[int]) -> int:
    """Return by how much to lengthen a column so that it has `node`, in steps that make the cost per node small."""
    missing = node + 1 - len(column)
    return max(missing, len(column) // 8, 1024) if missing > 0 else 0


_POLICIES: Final[dict[str, Callable[[int], EvictionPolicy]]] = {
    "gdsf": GreedyDualSizeFrequency,
    "lru": lambda _: LeastRecentlyUsed(),
}


DEFAULT_POLICY: Final = "gdsf"


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
