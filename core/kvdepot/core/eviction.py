"""Which part of the chunk tree goes first when room is needed.

The engine owns the tree, knows which of its units may go (DESIGN 5, Eviction) and what
each is worth, and tells the policy in the calls of `EvictionPolicy` what happened. A
unit is named by one node: an integer, dense from 0 and reused after `on_removed`. A
policy keeps its knowledge in arrays indexed by it, never an object a node.

The candidates of every policy lie in a `CandidateHeap`, a binary heap with the position
of each (the indexed heap of Sedgewick and Wayne, Algorithms, 4th ed., 2.4), not in a
lazy heap of (score, node) pairs: see ADR 0006 for what those cost.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
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
        """An object of `node` was committed, or adopted.

        `mark`: 64 bits of the chunk's key, by which it is known again after it was evicted; 0: none.
        """

    def on_hit(self, node: int, now: float) -> None:
        """A request resumed at `node`: the end node of an acquire, not its ancestors."""

    def on_candidate(self, node: int, worth: float) -> None:
        """The node's unit may go. `worth`: seconds that it saves each time it is used, per byte that it takes."""

    def on_not_candidate(self, node: int) -> None:
        """It may not: descendants need it, or something of it is lent or reserved."""

    def on_evicted(self, node: int, heir: int) -> None:
        """Its unit goes, and requests that would have resumed there resume at `heir` (NO_NODE: nowhere)."""

    def on_removed(self, node: int) -> None:
        """`node` is gone, evicted or otherwise; its number may come back as another node."""

    def victim(self) -> int | None:
        """The node whose unit goes next, None if there is none. It stays until another call takes it away."""


class CandidateHeap:
    """Nodes by score, the least first. O(log n) a change; 12 bytes a node and 4 bytes a candidate."""

    def __init__(self) -> None:
        self._score = array("d")  # by node
        self._place = array("i")  # by node: its index in the heap
        self._heap = array("I")  # none has a lower score than the one at (index - 1) // 2

    def __len__(self) -> int:
        return len(self._heap)

    def __contains__(self, node: int) -> bool:
        return node < len(self._place) and self._place[node] != _NOT_A_CANDIDATE

    @property
    def size_bytes(self) -> int:
        return sum(column.itemsize * len(column) for column in (self._score, self._place, self._heap))

    def first(self) -> int | None:
        return self._heap[0] if self._heap else None

    def score(self, node: int) -> float:
        return self._score[node]

    def put(self, node: int, score: float) -> None:
        """Add it, or change its score. O(1) where the score belongs at the end."""
        self._know(node)
        place = self._place[node]
        if place == _NOT_A_CANDIDATE:
            self._score[node] = score
            self._heap.append(node)
            self._rise(len(self._heap) - 1, node)
        elif score != self._score[node]:
            lower = score < self._score[node]
            self._score[node] = score
            (self._rise if lower else self._sink)(place, node)

    def discard(self, node: int) -> None:
        if node not in self:
            return
        place = self._place[node]
        self._place[node] = _NOT_A_CANDIDATE
        last = self._heap.pop()
        if last != node:
            # The last one fills the gap, and may belong above or below it.
            self._rise(place, last)
            self._sink(self._place[last], last)

    def _know(self, node: int) -> None:
        """Make the arrays long enough for `node`."""
        missing = _missing(node, self._place)
        if missing:
            self._place.extend(array("i", (_NOT_A_CANDIDATE,)) * missing)
            self._score.extend(array("d", (0.0,)) * missing)

    def _rise(self, place: int, node: int) -> None:
        heap, places, scores = self._heap, self._place, self._score
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

    def _sink(self, place: int, node: int) -> None:
        heap, places, scores = self._heap, self._place, self._score
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
    """The candidate whose last commit or hit is the longest ago. 20 bytes a node."""

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
            self._candidates.put(node, self._used_at[node])

    def on_candidate(self, node: int, worth: float) -> None:
        used_at = self._used_at[node] if node < len(self._used_at) else _FIRST
        self._candidates.put(node, used_at if worth > USELESS else _FIRST)

    def on_not_candidate(self, node: int) -> None:
        self._candidates.discard(node)

    def on_evicted(self, node: int, heir: int) -> None:
        pass  # an ancestor that was used later than its last descendant has a later time of its own

    def on_removed(self, node: int) -> None:
        self._candidates.discard(node)
        if node < len(self._used_at):
            self._used_at[node] = _FIRST

    def victim(self) -> int | None:
        return self._candidates.first()


SHARED_CHILDREN: Final = 4
"""So many continuations make a node a shared prefix: how often it is used says nothing about the next one.

Fewer are one conversation, edited or regenerated. The trace's hit rate differs by 0.003 from 2 to 32.
"""
_USES_MAX: Final = 7
"""Further uses raise a score no more, so that what was hot becomes evictable again."""
_WEIGHT: Final = tuple(math.sqrt(uses + 1) for uses in range(_USES_MAX + 1))
GHOSTS_DEFAULT: Final = 1 << 16


class GreedyDualSizeFrequency:
    """The least of clock + sqrt(uses + 1) x worth (GDSF: Cherkasova, HPL-98-69R1; worth is seconds saved per byte).

    The clock is the score of what was evicted last, so that what is not used loses against
    what comes in. Four things are this policy's own (measured in ADR 0014):

    * The root of the uses: where they say nothing about further ones, a straight line costs
      up to a tenth of LRU's hits, the root half of that, and gains as much where they do.
    * A node inherits the uses of what it continues, unless that is a shared prefix: a
      conversation that went on before is likelier to go on again than a new one.
    * Whoever inherits an evicted node's requests (`heir`) inherits its standing: a hit
      touches the end node only, and is a use of the whole path.
    * Uses are remembered beyond eviction, for `ghosts` nodes: what comes back was evicted too early.

    38 bytes a node and 9 bytes a ghost.
    """

    def __init__(self, ghosts: int = GHOSTS_DEFAULT) -> None:
        self._candidates = CandidateHeap()
        self._clock = 0.0
        self._touched = array("d")  # by node: the clock at its last use; _FIRST: not committed
        self._worth = array("f")
        self._uses = bytearray()
        self._children = bytearray()  # that were ever committed, up to SHARED_CHILDREN
        self._marks = array("Q")
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
            self._touch(node)

    def on_candidate(self, node: int, worth: float) -> None:
        self._know(node)
        self._worth[node] = worth
        self._candidates.put(node, self._score(node))

    def on_not_candidate(self, node: int) -> None:
        self._candidates.discard(node)

    def on_evicted(self, node: int, heir: int) -> None:
        self._know(node)
        if node in self._candidates:
            self._clock = max(self._clock, self._candidates.score(node))
        mark = self._marks[node]
        if mark:
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

    def victim(self) -> int | None:
        return self._candidates.first()

    def _enter(self, node: int, parent: int, mark: int) -> None:
        """A new node: what it is known to have been used, or its parent's uses."""
        self._marks[node] = mark
        self._children[node] = 0
        self._uses[node] = 0
        slot = mark % len(self._ghost_marks)
        returned = mark and self._ghost_marks[slot] == mark
        if returned:
            self._uses[node] = min(self._ghost_uses[slot] + 1, _USES_MAX)
            self._ghost_marks[slot] = 0
        if parent == NO_NODE:
            return
        self._know(parent)
        if self._children[parent] < SHARED_CHILDREN:
            self._children[parent] += not returned
            self._uses[node] = max(self._uses[node], self._uses[parent])

    def _inherit(self, heir: int, node: int) -> None:
        if self._touched[heir] == _FIRST:
            return  # another tier's
        if self._children[heir] < SHARED_CHILDREN:
            self._uses[heir] = max(self._uses[heir], self._uses[node])
        self._touched[heir] = max(self._touched[heir], self._touched[node])

    def _touch(self, node: int) -> None:
        self._touched[node] = max(self._touched[node], self._clock)
        if node in self._candidates:
            self._candidates.put(node, self._score(node))

    def _score(self, node: int) -> float:
        worth = self._worth[node]
        return self._touched[node] + _WEIGHT[self._uses[node]] * worth if worth > USELESS else _FIRST

    def _know(self, node: int) -> None:
        missing = _missing(node, self._touched)
        if not missing:
            return
        self._touched.extend(array("d", (_FIRST,)) * missing)
        self._worth.extend(array("f", (USELESS,)) * missing)
        self._marks.extend(array("Q", (0,)) * missing)
        self._uses.extend(bytes(missing))
        self._children.extend(bytes(missing))


def _missing(node: int, column: array[float] | array[int]) -> int:
    """By how much to lengthen a column so that it has `node`; in steps, so that it costs little a node."""
    missing = node + 1 - len(column)
    return max(missing, len(column) // 8, 1024) if missing > 0 else 0


_POLICIES: Final[dict[str, Callable[[int], EvictionPolicy]]] = {
    "gdsf": GreedyDualSizeFrequency,
    "lru": lambda _: LeastRecentlyUsed(),
}


def policy_names() -> tuple[str, ...]:
    """Names that `policy_by_name` knows (`[policy].eviction`)."""
    return tuple(sorted(_POLICIES))


def policy_by_name(name: str, ghosts: int = GHOSTS_DEFAULT) -> EvictionPolicy:
    """A new policy, which may remember so many evicted nodes. InvalidArgument for an unknown name."""
    if name not in _POLICIES:
        raise InvalidArgument(
            f"there is no eviction policy {name!r}", advice=f"choose one of: {', '.join(policy_names())}"
        )
    return _POLICIES[name](ghosts)
