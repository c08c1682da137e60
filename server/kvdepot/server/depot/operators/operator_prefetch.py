"""Operator prefetch reads a namespace, or a chunk's prefix, into RAM.

It uses the share of RAM and the reads of prefetch, and has the lowest priority: after loads, and after what requests
wait for. What was read is pinned until all is done, so that the end does not evict the beginning. Then it is content
like any other. Whoever needs the room before that gets it, and ends the operator prefetch.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection
from functools import partial
from typing import Final

from kvdepot.core.arena import NO_ROW
from kvdepot.core.calls import Kind
from kvdepot.core.control import PrefetchReply
from kvdepot.core.errors import LoadsOff
from kvdepot.core.misses import MissReason
from kvdepot.server.depot.tiering.prefetch import Prefetch
from kvdepot.server.depot.tiering.promotions import Promotions
from kvdepot.server.depot.tree import walks
from kvdepot.server.depot.tree.index import NONE
from kvdepot.server.depot.tree.lower_tier import LowerTier
from kvdepot.server.depot.tree.ram import RamTier
from kvdepot.server.depot.tree.switches import REFUSALS
from kvdepot.server.depot.tree.tree import Tree

SILENCE_SECONDS: Final = 60.0
"""After so long in which nothing was read it ends."""
_QUEUED_MAX: Final = 1024
"""Objects looked up before their reads."""


class OperatorPrefetch:
    """One operator prefetch. The daemon runs one at a time. `run_once` as with `Verification`.

    `refusal` says why nothing is loaded from a namespace (id). Raises NotFound where there is nothing of a name, or
    LoadsOff.
    """

    def __init__(
        self, tree: Tree, ram: RamTier, prefetch: Prefetch, promotions: Promotions,
        refusal: Callable[[bytes], MissReason | None], namespace_id: bytes, key: bytes,
    ) -> None:  # fmt: skip
        self._namespace = namespace = walks.named(tree.index, tree.namespaces, namespace_id, key)
        self._why_not = partial(refusal, namespace_id)
        why_not = self._why_not()
        if why_not:
            raise LoadsOff(REFUSALS[why_not], advice="`kvdepotctl loads on`, or `resume`, ends that")
        self._tree = tree
        self._index = tree.index
        self._namespaces = tree.namespaces
        self._tiers = tree.tiers
        self._clock = tree.clock
        self._ram = ram
        self._account = ram.account
        self._prefetch = prefetch
        self._promotions = promotions
        self._walk = (
            walks.path(tree.index, tree.namespaces, namespace, key)
            if key
            else walks.parents_first(tree.index, tree.namespaces, namespace)
        )
        self._walked = False
        self._queues: dict[int, deque[tuple[bytes, int]]] = {tier.number: deque() for tier in self._tiers}
        self._tokens: list[int] = []
        self._in_flight = 0
        self._moved_at = self._clock()
        self._chunks = 0 if key else namespace.nodes
        self._looked_at = 0
        self._there = 0
        self._read = 0
        self._read_bytes = 0
        self._refused: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()
        self._no_room = ""  # why nothing more is read
        self._reason = ""
        self.over = False
        prefetch.serve_last(self)

    @property
    def hurried(self) -> bool:
        return not self.over and not self._walked and self._queued < _QUEUED_MAX

    def reply(self) -> PrefetchReply:
        return PrefetchReply(
            self._chunks, self._looked_at, self._there, self._read, self._read_bytes, dict(self._refused),
            dict(self._failed), self.over, self._reason,
        )  # fmt: skip

    def run_once(self) -> bool:
        """Look at a slice, and start the reads that are due. Return False when it is over."""
        if self.over:
            return False
        why_not = self._why_not()
        if why_not:
            self._end(REFUSALS[why_not])
        elif self._namespaces.by_slot.get(self._namespace.slot) is not self._namespace:
            self._end("the namespace has left")
        elif self._clock() - self._moved_at > SILENCE_SECONDS:
            self._end(f"nothing was read for {SILENCE_SECONDS:.0f} s: a tier hangs, or what serves leaves no time")
        else:
            self._look_elsewhere()
            if not self._walked and self._queued < _QUEUED_MAX:
                self._look_on()
            self._prefetch.pump()
            if self._walked and not self._queued and not self._in_flight and not self.over:
                self._end("")
        return not self.over

    def cancel(self) -> None:
        if not self.over:
            self._end("cancelled")

    def _end(self, reason: str) -> None:
        """End. Reads under way are not counted any more, and reads that no worker has begun are cancelled."""
        self.over, self._reason = True, reason
        self._prefetch.serve_last(None)
        tokens, self._tokens = self._tokens, []
        self._prefetch.release(tokens, "operator")

    # What there is

    @property
    def _queued(self) -> int:
        return sum(map(len, self._queues.values()))

    def _look_on(self) -> None:
        nodes = next(self._walk, None)
        self._walked = nodes is None
        self._moved_at = self._clock()
        if nodes is not None:
            for node in nodes.tolist():
                self._looked_at += 1
                for kind in Kind:
                    self._look_at(node, kind)

    def _look_at(self, node: int, kind: int) -> None:
        if self._index.row(node, kind) != NO_ROW:
            self._there += 1
            return
        source = self._promotions.source(node, kind) if kind in self._namespace.object_bytes else None
        if source is None:
            if self._tree.elsewhere(node, kind):
                self._failed["out_of_use"] += 1
        elif self._no_room:
            self._refused[self._no_room] += 1
        else:
            self._queues[source.number].append((self._index.key(node), kind))

    def _look_elsewhere(self) -> None:
        """Find other tiers for what is queued for a tier that is disabled by now."""
        for tier in self._tiers:
            queue = self._queues[tier.number]
            if queue and not tier.tier.readable:
                again = list(queue)
                queue.clear()
                for key, kind in again:
                    node = self._index.find(self._namespace.slot, key)
                    if node != NONE:
                        self._look_at(node, kind)
                    else:
                        self._failed["left"] += 1

    # What prefetch asks

    def begin_next(self, tier: LowerTier) -> bool:
        """Read the next object of the tier. Return False when there is none."""
        queue, index = self._queues[tier.number], self._index
        while queue and not self.over and not self._why_not():
            key, kind = queue.popleft()
            node = index.find(self._namespace.slot, key)
            if node == NONE or not tier.has(node, kind):
                self._failed["left"] += 1
            elif index.row(node, kind) != NO_ROW:
                self._there += 1
            elif self._begin(node, kind, tier):
                return True
            else:
                self._refused[self._no_room] += 1
        return False

    def _begin(self, node: int, kind: int, tier: LowerTier) -> bool:
        """Begin one read. Return False when there is no room for it and for what follows."""
        namespace, raw_bytes = self._namespace, self._namespace.object_bytes[kind]
        size_bytes = self._ram.rounded(raw_bytes)
        if not self._no_room and size_bytes > self._prefetch.room_bytes(namespace):
            self._no_room = "share"
        if self._no_room:
            return False
        self._in_flight += 1
        token = self._prefetch.begin(namespace, node, kind, tier, partial(self._ended, raw_bytes))
        if token is None:
            self._in_flight -= 1
            self._no_room = "room" if self._account.over(namespace.slot, size_bytes) is None else "quota"
            return False
        self._tokens.append(token)
        return True

    def _ended(self, raw_bytes: int, whole: bool) -> None:
        if self.over:
            return
        self._in_flight -= 1
        self._moved_at = self._clock()
        if whole:
            self._read += 1
            self._read_bytes += raw_bytes
        else:
            self._failed["not_read"] += 1

    def give_way(self, slots: Collection[int] | None) -> bool:
        """Release all pins for somebody who needs room in these namespaces, or in any; False when there are none."""
        if not self._tokens or (slots is not None and self._namespace.slot not in slots):
            return False
        self._prefetch.let_go(self._tokens)
        self._end("requests needed the room")
        return True
