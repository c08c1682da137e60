"""Dropping what an operator names, in every tier: a chunk with all below it, or all of a namespace.

What is lent stays where it is until it is given back, unnamed; a write in progress finds no
place at its commit, and a load that waits for a tier misses: as wherever a subtree goes.
"""

from __future__ import annotations

from typing import Final

from kvdepot.core.control import EvictReply
from kvdepot.core.misses import MissReason
from kvdepot.server.engine.index import NONE
from kvdepot.server.engine.space import Space
from kvdepot.server.engine.walks import named

COUNTED_MAX: Final = 4096
"""Chunks below one that are counted: some 4 ms."""
_NUMBERS_MAX: Final = 262_144
"""Node numbers that a slice looks at: 0.2 ms."""
_NODES_MAX: Final = 128
"""Nodes after which a slice ends, the last subtree beyond: 1 to 2 ms, and as much again."""


class Removal:
    """One of them. Raises NotFound where there is nothing of that name.

    Who asks for the chunks in namespace `told_in` (an id; its own, where it is empty) is told the reason.
    """

    def __init__(
        self, space: Space, namespace_id: bytes, key: bytes, *,
        reason: MissReason = MissReason.REMOVED, told_in: bytes = b"",
    ) -> None:  # fmt: skip
        namespace = named(space, namespace_id, key)
        self._space = space
        self._namespace = namespace
        self._key = key
        self._reason = reason
        self._told_in = told_in or namespace_id
        self._from = 0  # node number
        self.chunks = 0 if key else namespace.nodes
        self.more = False

    def reply(self) -> EvictReply:
        tiers = self._space.tiers
        spared = tuple(tier.tier.name for tier in tiers if tier.shared is not None or not tier.tier.readable)
        return EvictReply(self.chunks, self.more, spared)

    def run_once(self) -> bool:
        """A slice; False when it was the last one."""
        space, namespace = self._space, self._namespace
        if space.namespaces.by_slot.get(namespace.slot) is not namespace:
            return False  # it left the table meanwhile, with all that it had
        if self._key:
            self._drop_chunk()
            return False
        index, start = space.index, self._from
        self._from = start + _NUMBERS_MAX
        candidates = index.candidates(namespace.slot, start, self._from)
        first = candidates[index.parents_of(candidates) == NONE]  # chunks, or nothing at all: looking up costs more
        dropped = 0
        for node in index.live(namespace.slot, first).tolist():
            self._note(node)
            dropped += space.drop_subtree(node)
            if dropped >= _NODES_MAX:
                self._from = node + 1
                break
        return self._from < index.high

    def _drop_chunk(self) -> None:
        index = self._space.index
        node = index.find(self._namespace.slot, self._key)
        if node == NONE:
            return
        counted = len(index.leaves_first(node, COUNTED_MAX))
        self.chunks, self.more = counted or COUNTED_MAX, not counted
        self._note(node)
        self._space.drop_subtree(node)

    def _note(self, node: int) -> None:
        self._space.lost_keys.note(self._told_in, self._space.index.key(node), self._reason)
