"""A cache of a sample of points, which decides as a tier does: the eviction policy is the tier's own class.

A *point* is a place of a prompt's path that is in the sample: a chunk of a namespace of attention alone, or the end of
a prompt where requests resume at states or windows only. Points make a tree: the parent of a point is the point before
it in the path. The cache has no object, only sizes. It never asks for the time, and one call has a bounded length.
"""

from __future__ import annotations

from array import array
from collections.abc import Generator
from dataclasses import dataclass
from typing import Final

from kvdepot.core.eviction_policy import NO_NODE, USELESS, EvictionPolicy

_NONE: Final = -1
_POINTS_AT_ONCE: Final = 8
"""Added or evicted between two yields: about 0.5 ms."""
_TOKENS_PER_SECOND: Final = 10_000.0
"""The unit of worth. Only the ratio of two worths matters."""


@dataclass(frozen=True, slots=True)
class Path:
    """The sampled points of one prompt, from its beginning on, in lists of equal length.

    `sizes`: bytes of attention up to each point from the one before. `ends_bytes`: bytes that a request needs at the
    point where it resumes, in addition. 0: none, and requests resume at each point. `branches`: the places of points
    at which prompts part and none has ended, so that nobody resumes there. `at_each`: whether an engine that computes
    a part of the path stores what requests resume with at each of its points, and not at the last one only.
    """

    marks: list[int]
    sizes: list[int]
    depths: list[int]  # tokens from the beginning of the prompt to each point
    ends_bytes: int = 0
    branches: frozenset[int] = frozenset()
    at_each: bool = False

    def __len__(self) -> int:
        return len(self.marks)


class MiniatureCache:
    """Points within `capacity_bytes`. About 100 bytes a point, without those of its policy."""

    def __init__(self, policy: EvictionPolicy, capacity_bytes: float) -> None:
        self._policy = policy
        self._capacity_bytes = capacity_bytes
        self._used_bytes = 0
        self._nodes: dict[int, int] = {}  # by mark
        self._marks = array("Q")
        self._parents = array("i")
        self._children = array("i")
        self._sizes = array("q")
        self._ends = array("q")  # bytes that are there to resume with
        self._depths = array("q")
        self._resumable = bytearray()
        self._ended = bytearray()  # whether ends have bytes of their own, so that an inner end can go alone
        self._free: list[int] = []
        self._kept = _NONE  # the node below which the next point goes
        self.evicted = False
        """Whether something was ever evicted. Until then the cache is not full."""

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    def serve(self, path: Path, now: float, *, hit: bool = True) -> Generator[None, None, int]:
        """Resume at the last point of the path that can be, and store what comes after it.

        Return how many of the points are before the request's own work. Yield about every 0.5 ms. Nothing else may
        change the cache until the end. Without `hit` nobody resumes: an engine only stores what it has computed.
        """
        found = [self._nodes.get(mark, _NONE) for mark in path.marks]
        served = self._served(path, found)
        parent = found[served - 1] if served else _NONE
        if hit:
            self._use(found, served, now)
        skipped_bytes = 0
        for at in range(served, len(path)):
            if at % _POINTS_AT_ONCE == _POINTS_AT_ONCE - 1:
                yield
            node = self._nodes.get(path.marks[at], _NONE)
            stored_end = path.at_each or at == len(path) - 1
            if node == _NONE and path.ends_bytes and not stored_end and at not in path.branches:
                skipped_bytes += path.sizes[at]  # an earlier end that has gone: its attention is computed again
                continue
            needed_bytes = path.sizes[at] + skipped_bytes + (0 if at in path.branches else path.ends_bytes)
            stored = node != _NONE or (yield from self._room(needed_bytes, parent))
            if not stored:
                break
            if node == _NONE:
                node = self._add(path, at, parent, skipped_bytes, now)
                skipped_bytes = 0
            elif stored_end and not self._resumable[node]:
                yield from self._complete(node, path.ends_bytes, now)
            parent = node
        if parent != _NONE:
            self._policy.on_end(parent)
        return served

    def _use(self, found: list[int], served: int, now: float) -> None:
        """Count a use of the point where the request resumes, and of the last one that it offers again."""
        if served:
            self._policy.on_hit(found[served - 1], now)
        offered = next((node for node in reversed(found[served:]) if node != _NONE), _NONE)
        if offered != _NONE:
            self._policy.on_hit(offered, now)

    def _served(self, path: Path, found: list[int]) -> int:
        if not path.ends_bytes:
            return found.index(_NONE) if _NONE in found else len(found)
        resumable = (at for at in range(len(found), 0, -1) if found[at - 1] != _NONE and self._resumable[found[at - 1]])
        return next(resumable, 0)

    # Storing

    def _add(self, path: Path, at: int, parent: int, skipped_bytes: int, now: float) -> int:
        node = self._free.pop() if self._free else self._grow()
        self._marks[node] = mark = path.marks[at]
        self._parents[node] = parent
        self._children[node] = 0
        self._sizes[node] = path.sizes[at] + skipped_bytes
        self._ends[node] = ends_bytes = 0 if at in path.branches else path.ends_bytes
        self._depths[node] = path.depths[at]
        self._resumable[node] = at not in path.branches
        self._ended[node] = path.ends_bytes > 0
        self._nodes[mark] = node
        self._used_bytes += self._sizes[node] + ends_bytes
        self._policy.on_commit(node, now, NO_NODE if parent == _NONE else parent, mark)
        if parent != _NONE:
            self._children[parent] += 1
            self._offer(parent)
        self._offer(node)
        return node

    def _grow(self) -> int:
        for column in (self._marks, self._parents, self._children, self._sizes, self._ends, self._depths):
            column.append(0)
        self._resumable.append(0)
        self._ended.append(0)
        return len(self._marks) - 1

    def _complete(self, node: int, ends_bytes: int, now: float) -> Generator[None, None, None]:
        """Store again what requests resume with, at a node that has lost it."""
        if not (yield from self._room(ends_bytes, node)):
            return
        self._ends[node] = ends_bytes
        self._resumable[node] = True
        self._used_bytes += ends_bytes
        parent = self._parents[node]
        self._policy.on_commit(node, now, NO_NODE if parent == _NONE else parent, self._marks[node])
        self._offer(node)

    # Eviction

    def _room(self, size_bytes: int, kept: int) -> Generator[None, None, bool]:
        """Evict until there is room. `kept` and what it continues stay. Return whether there is room.

        One point may take the room of all others, so this yields, too.
        """
        if size_bytes > self._capacity_bytes:
            return False
        if self._used_bytes + size_bytes <= self._capacity_bytes:
            return True
        self._kept = kept
        if kept != _NONE:
            self._policy.on_not_candidate(kept)
        evicted = 0
        while self._used_bytes + size_bytes > self._capacity_bytes and (node := self._policy.victim()) is not None:
            self._evict(node)
            evicted += 1
            if evicted % _POINTS_AT_ONCE == 0:
                yield
        self._kept = _NONE
        if kept != _NONE:
            self._offer(kept)
        return self._used_bytes + size_bytes <= self._capacity_bytes

    def _offer(self, node: int) -> None:
        """Tell the policy whether something of the node may go, and what it is worth."""
        inner = self._children[node] > 0
        if node == self._kept or (inner and not (self._ended[node] and self._resumable[node])):
            self._policy.on_not_candidate(node)
            return
        above = self._resume(node)
        tokens = self._depths[node] - (self._depths[above] if above != _NONE else 0)
        size_bytes = self._ends[node] if inner else self._unit_bytes(node)
        worth = tokens / _TOKENS_PER_SECOND / max(size_bytes, 1) if self._resumable[node] else USELESS
        self._policy.on_candidate(node, worth)

    def _resume(self, node: int) -> int:
        """Return the nearest ancestor that requests can resume at."""
        node = self._parents[node]
        while node != _NONE and not self._resumable[node]:
            node = self._parents[node]
        return node

    def _unit_bytes(self, node: int) -> int:
        """Return the bytes that go with a leaf: also those above it that serve nobody without it."""
        size_bytes = self._sizes[node] + self._ends[node]
        above = self._parents[node]
        while above != _NONE and not self._resumable[above] and self._children[above] == 1:
            size_bytes += self._sizes[above]
            above = self._parents[above]
        return size_bytes

    def _evict(self, node: int) -> None:
        self.evicted = True
        above = self._resume(node)
        self._policy.on_evicted(node, NO_NODE if above == _NONE else above)
        if self._children[node]:
            self._used_bytes -= self._ends[node]
            self._ends[node] = 0
            self._resumable[node] = False
            self._policy.on_not_candidate(node)
            return
        above = self._remove(node)
        while above != _NONE and not self._children[above] and not self._resumable[above] and above != self._kept:
            above = self._remove(above)
        if above != _NONE:
            self._offer(above)

    def _remove(self, node: int) -> int:
        """Remove a leaf. Return its parent."""
        self._used_bytes -= self._sizes[node] + self._ends[node]
        del self._nodes[self._marks[node]]
        self._policy.on_removed(node)
        self._free.append(node)
        parent = self._parents[node]
        if parent != _NONE:
            self._children[parent] -= 1
        return parent
