"""Which nodes a request could resume at, over the union of tiers (design.md#eviction).

A node is usable if its path object and everything else that its boundary needs is
complete in some tier: its state, and the windows that end there. In a namespace of
attention alone every complete node is usable. A node serves if it or a descendant is
usable. No request can use a node that does not serve.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from kvdepot.core.calls import Kind
from kvdepot.server.depot.tree.index import NONE, U32, Index, Nodes
from kvdepot.server.depot.tree.namespaces import Namespace, Namespaces


class Usable:
    """One flag and one count a node, kept true by `refresh`. `complete(node, kind)` asks all tiers.

    O(1) a change where a usable ancestor is near, else linear in the distance to it.
    """

    def __init__(self, index: Index, namespaces: Namespaces, complete: Callable[[int, int], bool]) -> None:
        self._index = index
        self._namespaces = namespaces
        self._complete = complete
        self._usable = np.zeros(index.capacity, np.uint8).data
        self._serving = np.zeros(index.capacity, np.uint32).data  # children that serve

    def usable(self, node: int) -> bool:
        return bool(self._usable[node])

    def serves(self, node: int) -> bool:
        """Return whether a request could resume at the node or below it."""
        return bool(self._usable[node] or self._serving[node])

    def serves_below(self, node: int) -> bool:
        return bool(self._serving[node])

    def resume(self, node: int) -> int:
        """Return the nearest usable ancestor or NONE: where a request would resume without the node."""
        node = self._index.parent(node)
        while node != NONE and not self._usable[node]:
            node = self._index.parent(node)
        return node

    def needed(self, node: int, depth: int) -> bool:
        """Return whether a usable node lies at most `depth` chunks below: its window may reach into this one."""
        if depth <= 0:
            return False
        return any(self._usable[child] or self.needed(child, depth - 1) for child in self._index.children(node))

    # Changes

    def refresh(self, node: int) -> list[int]:
        """Recompute the node after objects of it came, went or were completed.

        Return whose outlook changed: an ancestor, those whose windows are needed now, or not any more, and nodes below
        whose windows reach up to this one. NONE among them.
        """
        namespace = self._namespaces.by_slot[self._index.namespace(node)]
        changed = self._set(namespace, node, self._judge(namespace, node))
        reach = namespace.window_chunks - 1
        if reach > 0:
            self._refresh_below(namespace, node, reach, changed)
        return changed

    def removed(self, node: int) -> list[int]:
        """Note that the node is about to leave the tree, with what is below it. Return whose outlook changed.

        What is below may keep flags that are no longer true, where windows reached up to the node: nobody finds it.
        """
        namespace = self._namespaces.by_slot[self._index.namespace(node)]
        before = self.serves(node)
        changed = self._reached(namespace, node) if self._usable[node] else []
        self._usable[node] = False
        return [*changed, self._pass_on(node, before, False)]

    def rebuild(self, nodes: Nodes, parents: U32, boundaries: U32) -> None:
        """Compute all nodes of an adopted index: their flags, then the counts from the deepest level up."""
        usable, serving = np.asarray(self._usable), np.asarray(self._serving)
        for node in nodes.tolist():
            usable[node] = self._judge(self._namespaces.by_slot[self._index.namespace(node)], node)
        order = np.argsort(-boundaries.astype(np.int64), kind="stable")
        nodes, parents, boundaries = nodes[order], parents[order], boundaries[order]
        for level in np.split(np.arange(len(nodes)), np.flatnonzero(np.diff(boundaries)) + 1):
            serves = (usable[nodes[level]] > 0) | (serving[nodes[level]] > 0)
            above = parents[level][serves]
            np.add.at(serving, above[above != NONE], 1)

    def _judge(self, namespace: Namespace, node: int) -> bool:
        for kind in namespace.kinds:
            if not self._complete(node, kind):
                return False
        for _ in range(namespace.window_chunks - 1):
            node = self._index.parent(node)
            if node == NONE:
                return True
            if not self._complete(node, Kind.WINDOW):
                return False
        return True

    def _refresh_below(self, namespace: Namespace, node: int, reach: int, changed: list[int]) -> None:
        """Recompute the nodes close below, whose windows reach into this one."""
        for child in self._index.children(node):
            if self._usable[child] != self._judge(namespace, child):
                changed += (child, *self._set(namespace, child, not self._usable[child]))
            if reach > 1:
                self._refresh_below(namespace, child, reach - 1, changed)

    def _set(self, namespace: Namespace, node: int, usable: bool) -> list[int]:
        before = self.serves(node)
        changed = self._reached(namespace, node) if usable != self._usable[node] else []
        self._usable[node] = usable
        return [*changed, self._pass_on(node, before, self.serves(node))]

    def _reached(self, namespace: Namespace, node: int) -> list[int]:
        """Return the ancestors whose windows are needed while the node is usable."""
        reached = []
        for _ in range(namespace.window_chunks - 1):
            node = self._index.parent(node)
            if node == NONE:
                break
            reached.append(node)
        return reached

    def _pass_on(self, node: int, before: bool, after: bool) -> int:
        """Pass on to the ancestors whether the node serves. Return the last one whose outlook changed."""
        while before != after:
            node = self._index.parent(node)
            if node == NONE:
                return NONE
            before = self.serves(node)
            self._serving[node] += 1 if after else -1
            after = self.serves(node)
        return node
