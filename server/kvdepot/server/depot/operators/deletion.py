"""Delete what an operator names, in every tier: a chunk with everything after it, or a namespace.

What is lent stays in place without a name until its loan ends. A write in progress finds no node at its
commit, and a load that waits for a tier misses: as wherever a subtree is dropped.
"""

from __future__ import annotations

from typing import Final

from kvdepot.core.control import EvictReply
from kvdepot.core.misses import MissReason
from kvdepot.server.depot.tree.index import NONE
from kvdepot.server.depot.tree.tree import Tree
from kvdepot.server.depot.tree.walks import named

COUNTED_MAX: Final = 4096
"""Chunks below one that are counted: some 4 ms."""
_NUMBERS_MAX: Final = 262_144
"""Node numbers that a slice looks at: 0.2 ms."""
_NODES_MAX: Final = 128
"""Nodes after which a slice ends, the last subtree beyond: 1 to 2 ms, and as much again."""


class Deletion:
    """One deletion. It raises NotFound where there is nothing of that name.

    Lookups of the chunks in namespace `told_in` (an id; its own namespace if empty) report the reason.
    """

    def __init__(
        self, tree: Tree, namespace_id: bytes, key: bytes, *,
        reason: MissReason = MissReason.DELETED, told_in: bytes = b"",
    ) -> None:  # fmt: skip
        namespace = named(tree.index, tree.namespaces, namespace_id, key)
        self._tree = tree
        self._index = tree.index
        self._namespaces = tree.namespaces
        self._lost_keys = tree.lost_keys
        self._tiers = tree.tiers
        self._namespace = namespace
        self._key = key
        self._reason = reason
        self._told_in = told_in or namespace_id
        self._from = 0  # node number
        self.chunks = 0 if key else namespace.nodes
        self.more = False

    def reply(self) -> EvictReply:
        """Return the reply. A disk that cannot be written forgets objects, and has them again in the next run."""
        tiers = self._tiers
        unchanged = tuple(tier.tier.name for tier in tiers if tier.shared is not None or not tier.tier.writable)
        return EvictReply(self.chunks, self.more, unchanged)

    def run_once(self) -> bool:
        """Delete a slice. Return False when it was the last one."""
        namespace = self._namespace
        if self._namespaces.by_slot.get(namespace.slot) is not namespace:
            return False  # it left the table meanwhile, with everything it had
        if self._key:
            self._drop_chunk()
            return False
        if self._tree.ram.drop_detached_of(namespace.slot, _NODES_MAX):
            return True
        index, start = self._index, self._from
        self._from = start + _NUMBERS_MAX
        candidates = index.candidates(namespace.slot, start, self._from)
        first = candidates[index.parents_of(candidates) == NONE]  # chunks, or nothing at all: looking up costs more
        dropped = 0
        for node in index.live(namespace.slot, first).tolist():
            self._note(node)
            dropped += self._tree.drop_subtree(node)
            if dropped >= _NODES_MAX:
                self._from = node + 1
                break
        return self._from < index.high

    def _drop_chunk(self) -> None:
        index = self._index
        node = index.find(self._namespace.slot, self._key)
        if node == NONE:
            return
        counted = len(index.leaves_first(node, COUNTED_MAX))
        self.chunks, self.more = counted or COUNTED_MAX, not counted
        self._note(node)
        self._tree.drop_subtree(node)

    def _note(self, node: int) -> None:
        self._lost_keys.note(self._told_in, self._index.key(node), self._reason)
