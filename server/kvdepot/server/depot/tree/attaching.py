"""Give adopted objects their nodes once the disk tiers have said what lies above them.

Adoption rebuilds the tree from RAM alone, before any tier has opened. What has no path to the root there is
*detached*: RAM may have dropped its ancestors because a disk tier has them. When every disk tier has opened, each
detached object gets its node, or is dropped as `no_parent`. A disk that does not open is waited for no longer than
`WAIT_SECONDS`. A shared tier is not waited for: it knows nothing before it is asked.
"""

from __future__ import annotations

from typing import Final

from kvdepot.core.arena import NO_ROW
from kvdepot.core.calls import ROOT_KEY
from kvdepot.server.depot.tree.index import NONE
from kvdepot.server.depot.tree.tree import Tree
from kvdepot.server.platform.guard import engine_guard

WAIT_SECONDS: Final = 60.0
"""An opening has no time limit of its own: a mount may hang. This is as long as the longest pause between two of them.
"""
_AT_ONCE: Final = 128
"""Objects for each call: 3 to 5 ms."""


class Attaching:
    """What happens to detached objects. It begins with `begin`, and `run_once` continues it."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._ram = tree.ram
        self._index = tree.index
        self._rows = tree.ram.rows
        self._guard = engine_guard(tree.counters.add)
        self._opening = [tier.tier for tier in tree.disks]
        self._until = 0.0

    def begin(self) -> None:
        """Start the time limit. The tiers were told to open."""
        self._until = self._tree.clock() + WAIT_SECONDS

    def run_once(self) -> bool:
        """Attach or drop a slice of what is detached. Return whether there is more to do, soon."""
        detached = self._ram.detached
        if not len(detached):
            return False
        self._opening = [tier for tier in self._opening if not tier.readable]
        if self._opening and self._tree.clock() < self._until:
            return False
        for _ in range(_AT_ONCE):
            row = detached.first()
            if row == NO_ROW:
                return False
            outcome = self._guard.value("tick", "no_parent", self._attach, row)
            if detached.flags[row]:
                self._ram.drop_detached(row)
            self._tree.counters.add(f"adopted_objects.{outcome}")
        return True

    def _attach(self, row: int) -> str:
        """Give the object its node. Return "adopted", or why there is no place for it."""
        rows, index = self._rows, self._index
        namespace, kind = self._tree.namespaces.by_slot[rows.namespace[row]], rows.kind[row]
        parent, boundary = rows.parent(row), rows.boundary[row]
        above = NONE if parent == ROOT_KEY else index.find(namespace.slot, parent)
        path_kind = min(namespace.path_kind, kind)
        if parent != ROOT_KEY and (above == NONE or not self._tree.has(above, path_kind)):
            return "no_parent"
        node = index.find(namespace.slot, rows.key(row))
        if node == NONE:
            if self._tree.full:
                return "no_parent"
            if above != NONE and index.boundary(above) >= boundary:
                return "torn_fields"
            node = self._tree.add_node(namespace, rows.key(row), above, boundary)
        elif index.parent(node) != above or index.boundary(node) != boundary:
            return "torn_fields"
        assert index.row(node, kind) == NO_ROW, "what is stored again takes the place of what is detached"
        namespace.learn(kind, self._ram.size_bytes(row))
        self._ram.attach(row, node)
        return "adopted"
