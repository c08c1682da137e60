"""Reading into RAM what an operator names: all of a namespace, or the path to a chunk.

Within the share of RAM that prefetch has, by the same reads, and last in line: behind loads, and behind what requests
wait for. What was read is held until all is done, so that its end does not evict its beginning, and is then content
as any other. Whoever needs the room before that gets it, and ends this.
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
from kvdepot.server.engine import walks
from kvdepot.server.engine.index import NONE
from kvdepot.server.engine.lower_tier import LowerTier
from kvdepot.server.engine.prefetch import Prefetch
from kvdepot.server.engine.promotions import Promotions
from kvdepot.server.engine.space import Space
from kvdepot.server.engine.switches import REFUSALS

SILENCE_SECONDS: Final = 60.0
"""After so long in which nothing was read it ends."""
_QUEUED_MAX: Final = 1024
"""Objects looked up ahead of their reads."""


class Warming:
    """One of them; the engine's one at a time. `run_once` as with `Verification`.

    `refusal` says why nothing is loaded from a namespace (id). Raises NotFound where there is nothing of a name, or
    LoadsOff.
    """

    def __init__(
        self, space: Space, prefetch: Prefetch, promotions: Promotions,
        refusal: Callable[[bytes], MissReason | None], namespace_id: bytes, key: bytes,
    ) -> None:  # fmt: skip
        self._namespace = namespace = walks.named(space, namespace_id, key)
        self._why_not = partial(refusal, namespace_id)
        why_not = self._why_not()
        if why_not:
            raise LoadsOff(REFUSALS[why_not], advice="`kvdepotctl loads on`, or `resume`, ends that")
        self._space = space
        self._prefetch = prefetch
        self._promotions = promotions
        self._walk = walks.path(space, namespace, key) if key else walks.parents_first(space, namespace)
        self._walked = False
        self._queues: dict[int, deque[tuple[bytes, int]]] = {tier.number: deque() for tier in space.tiers}
        self._tokens: list[int] = []
        self._in_flight = 0
        self._moved_at = space.clock()
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
        prefetch.last = self

    @property
    def hurried(self) -> bool:
        return not self.over and not self._walked and self._queued < _QUEUED_MAX

    def reply(self) -> PrefetchReply:
        return PrefetchReply(
            self._chunks, self._looked_at, self._there, self._read, self._read_bytes, dict(self._refused),
            dict(self._failed), self.over, self._reason,
        )  # fmt: skip

    def run_once(self) -> bool:
        """Look on, and start what is due; False when it is over."""
        if self.over:
            return False
        why_not = self._why_not()
        if why_not:
            self._end(REFUSALS[why_not])
        elif self._space.namespaces.by_slot.get(self._namespace.slot) is not self._namespace:
            self._end("the namespace has left")
        elif self._space.clock() - self._moved_at > SILENCE_SECONDS:
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
        """Of what is under way nothing is counted any more; what no worker has begun is not read."""
        self.over, self._reason = True, reason
        self._prefetch.last = None
        tokens, self._tokens = self._tokens, []
        self._prefetch.release(tokens, "operator")

    # What there is

    @property
    def _queued(self) -> int:
        return sum(map(len, self._queues.values()))

    def _look_on(self) -> None:
        nodes = next(self._walk, None)
        self._walked = nodes is None
        self._moved_at = self._space.clock()
        if nodes is not None:
            for node in nodes.tolist():
                self._looked_at += 1
                for kind in Kind:
                    self._look_at(node, kind)

    def _look_at(self, node: int, kind: int) -> None:
        if self._space.index.row(node, kind) != NO_ROW:
            self._there += 1
            return
        source = self._promotions.source(node, kind) if kind in self._namespace.object_bytes else None
        if source is None:
            if self._space.elsewhere(node, kind):
                self._failed["out_of_use"] += 1
        elif self._no_room:
            self._refused[self._no_room] += 1
        else:
            self._queues[source.number].append((self._space.index.key(node), kind))

    def _look_elsewhere(self) -> None:
        """For what is queued for a tier that is out of use by now."""
        for tier in self._space.tiers:
            queue = self._queues[tier.number]
            if queue and not tier.tier.readable:
                again = list(queue)
                queue.clear()
                for key, kind in again:
                    node = self._space.index.find(self._namespace.slot, key)
                    if node != NONE:
                        self._look_at(node, kind)
                    else:
                        self._failed["left"] += 1

    # What prefetch asks

    def begin_next(self, tier: LowerTier) -> bool:
        """Have the next object of the tier read; False: there is none."""
        queue, index = self._queues[tier.number], self._space.index
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
        """False: there is no room, nor will there be for what follows it."""
        space, namespace, raw_bytes = self._space, self._namespace, self._namespace.object_bytes[kind]
        size_bytes = space.allocator.rounded(raw_bytes)
        if not self._no_room and size_bytes > self._prefetch.room_bytes:
            self._no_room = "share"
        if self._no_room:
            return False
        self._in_flight += 1
        token = self._prefetch.begin(namespace, node, kind, tier, partial(self._ended, raw_bytes))
        if token is None:
            self._in_flight -= 1
            self._no_room = "room" if space.account.over(namespace.slot, size_bytes) is None else "quota"
            return False
        self._tokens.append(token)
        return True

    def _ended(self, raw_bytes: int, whole: bool) -> None:
        if self.over:
            return
        self._in_flight -= 1
        self._moved_at = self._space.clock()
        if whole:
            self._read += 1
            self._read_bytes += raw_bytes
        else:
            self._failed["not_read"] += 1

    def give_way(self, slots: Collection[int] | None) -> bool:
        """Somebody needs the room: of these namespaces, or any. False: there is nothing of them."""
        if not self._tokens or (slots is not None and self._namespace.slot not in slots):
            return False
        self._prefetch.let_go(self._tokens)
        self._end("requests needed the room")
        return True
