"""Candidates for eviction by score, the least first.

Binary heaps with the position of each entry (the indexed heap of Sedgewick and Wayne, Algorithms, 4th ed., 2.4), not
a lazy heap of (score, node) pairs: see ADR 0006 for what those cost. Each group of nodes has a heap of its own, so that
the least useful of some groups is found without a search: see ADR 0016.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Final

_NOT_A_CANDIDATE: Final = -1


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

    def at(self, turn: int) -> int | None:
        """Return one of all entries, each of which has a turn below `len(self)`; None from there on. O(groups)."""
        for heap in self._heaps.values():
            if turn < len(heap):
                return heap[turn]
            turn -= len(heap)
        return None

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
        places = self._place
        if node >= len(places) or (place := places[node]) == _NOT_A_CANDIDATE:
            return
        group = self._group[node]
        places[node] = _NOT_A_CANDIDATE
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
        missing = missing_entries(node, self._place)
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


def missing_entries(node: int, column: array[float] | array[int]) -> int:
    """Return by how much to lengthen a column so that it has `node`, in steps that make the cost per node small."""
    missing = node + 1 - len(column)
    return max(missing, len(column) // 8, 1024) if missing > 0 else 0
