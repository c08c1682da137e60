"""Prefetch reads what queued requests will need from lower tiers into RAM (design.md#prefetch).

A *prefetch request* is what the last Locate of a queued request (its *owner*) found worth having. Each owner has at
most one. They are served in the order of their arrival over all sessions, one queue a tier, and only while no load
reads from the tier. Rooms share the number of requests equally, and nobody waits because another room is full. What
was read is pinned in RAM until the owner acquires, begins to store, ends, or its time is over. Room for it is made as
for any other object, within a share of RAM. A store or load that finds no room takes what the last request has pinned.

The reader of the lowest priority (`LowestPriority`) follows the same rules after all requests, and gives way to them.
Rejected loads come last (`RejectedLoads`).

A prefetch request is a hint: an acquire reads whatever is missing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from itertools import count
from math import inf
from typing import Final, Protocol

import numpy as np
from kvdepot.core.arena import NO_ROW
from kvdepot.core.calls import KEY_BYTES
from kvdepot.server.depot.tiering.prefetch_queue import PrefetchQueue
from kvdepot.server.depot.tiering.prefetch_requests import Owner, PrefetchRequest, needed
from kvdepot.server.depot.tiering.promotions import Promotion, Promotions
from kvdepot.server.depot.tiering.rejected_loads import RejectedLoads
from kvdepot.server.depot.tree.index import NONE, Nodes
from kvdepot.server.depot.tree.lower_tier import LowerTier
from kvdepot.server.depot.tree.namespaces import Namespace
from kvdepot.server.depot.tree.pin_table import PrefetchPins, RowNumbers, Tokens
from kvdepot.server.depot.tree.ram import RamTier
from kvdepot.server.depot.tree.switches import Refusal
from kvdepot.server.depot.tree.tree import Tree
from kvdepot.server.platform.guard import engine_guard

REQUESTS_MAX: Final = 4096
"""Of all rooms."""
KEYS_MAX: Final = 1 << 20
"""Chunk keys of the requests of all rooms: 16 MiB."""
ENDED_MAX: Final = 4096
"""Requests remembered because a Locate of theirs may still be under way."""
_READS_MAX: Final = 4
"""Prefetch reads begun in one tier: its workers are busy with them. A new load waits for no more than these."""
_BYTES_MAX: Final = 64 << 20
"""Bytes of prefetch reads begun in one tier, once there is one."""
_LET_GO_MAX: Final = 256
"""Objects a tick, and for somebody who finds no room: some 3 ms."""


class LowestPriority(Protocol):
    """A reader of the lowest priority: it reads when no request has anything left to read from a tier."""

    def begin_next(self, tier: LowerTier) -> bool:
        """Begin the next read by `Prefetch.begin`. Return False when there is nothing of this tier."""

    def give_way(self, slots: Collection[int] | None) -> bool:
        """Release pins of these namespaces, or of any. Return False when there are none."""


class Prefetch:
    """Prefetch for requests.

    It may pin `share` of RAM, for `seconds` from a request's first object or its last Locate on.
    """

    def __init__(self, tree: Tree, ram: RamTier, promotions: Promotions, *, share: float, seconds: float) -> None:
        self._ram = ram
        self._index = tree.index
        self._namespaces = tree.namespaces
        self._tiers = tree.tiers
        self._counters = tree.counters
        self._clock = tree.clock
        self._account = ram.account
        self._guard = engine_guard(self._counters.add)
        self._promotions = promotions
        self._share = share
        self.seconds = seconds
        self._pins = ram.pins.prefetch
        self._requests: OrderedDict[Owner, PrefetchRequest] = OrderedDict()
        self._ended: OrderedDict[Owner, None] = OrderedDict()
        self._queues = {tier.number: PrefetchQueue(len(ram.rooms)) for tier in self._tiers}
        self._reading: dict[int, tuple[Promotion, int]] = {}  # by row: what was begun in advance, and its tier
        self._begun = dict.fromkeys(self._queues, 0)  # of them, by tier
        self._numbers = count()
        self._requests_in = [0] * len(ram.rooms)
        self._keys_in = [0] * len(ram.rooms)  # of their requests
        self._pumping = False
        self._lowest: LowestPriority | None = None
        self.rejected = RejectedLoads(self, tree.index, tree.namespaces, ram.rounded, tree.clock)

    def configure(self, *, share: float, seconds: float) -> None:
        """Change share and time. Pins beyond a smaller share stay, and nothing further is begun.

        A shorter time is given to the requests that are there as well.
        """
        self._share = share
        self.seconds = seconds
        latest = self._clock() + seconds
        for request in self._requests.values():
            if request.tokens:  # else its time has not begun
                request.deadline = min(request.deadline, latest)

    def __len__(self) -> int:
        """Return the number of requests, served or not."""
        return len(self._requests) + len(self.rejected)

    @property
    def on(self) -> bool:
        return self._share > 0

    @property
    def pinned_objects(self) -> int:
        return self._pins.objects

    @property
    def pinned_bytes(self) -> int:
        """Return the bytes in RAM, or on the way there, for requests that have not acquired yet."""
        return self._pins.bytes

    # What requests say

    def located(self, owner: Owner, namespace: Namespace, keys: bytes, nodes: Nodes, tiers: Collection[int]) -> None:
        """Note that the request wants these chunks, of which these tiers have some.

        `keys` end with the boundary's chunk; `nodes` are theirs.
        """
        request = self._requests.get(owner)
        if request is not None and not len(nodes):
            self.over(owner, "renewed")
            return
        if not len(nodes) or not self.on or not owner[1] or owner in self._ended:
            return
        if request is None and not tiers and not self._pins.objects:
            return
        if request is not None and (request.namespace is not namespace or not self._has_place(request, keys)):
            self._end(request, "renewed")
            request = None
        tokens = self._pins.join(self._in_ram(namespace, nodes)).tolist()
        if request is None and (tiers or tokens):
            request = self._new(owner, namespace, keys)
        if request is None:
            self.release(tokens, "refused")
            return
        self._renew(request, keys, tokens)
        for number in tiers:
            if number not in request.queues:
                request.queues.add(number)
                self._queues[number].push(request)
        if not tokens and not request.queues:
            self._end(request, "renewed")
        self.pump()

    def acquired(self, owner: Owner, rows: RowNumbers) -> None:
        """Note that the request has acquired these objects; none where it was refused."""
        if self._pins.objects and len(rows):
            self._pins.use(rows)
        self.over(owner, "acquired")

    def over(self, owner: Owner, reason: str) -> None:
        """End the prefetch of a request."""
        request = self._requests.get(owner)
        if request is not None:
            self._end(request, reason)
            self.pump()

    def ended(self, owner: Owner) -> None:
        """End the prefetch of a request for ever: a Locate that is still under way begins none.

        Also while prefetch is off: it may have been on when the request came, and may be on when the Locate ends.
        """
        self._ended[owner] = None
        if len(self._ended) > ENDED_MAX:
            self._ended.popitem(last=False)
        self.over(owner, "ended")

    def end_session(self, session: int) -> None:
        for owner in [owner for owner in self._ended if owner[0] == session]:
            del self._ended[owner]
        for owner in [owner for owner in self._requests if owner[0] == session]:
            self._end(self._requests[owner], "session")
        self.rejected.end_session(session)
        self.pump()

    def end_namespaces(self, refusal: Refusal) -> None:
        """End prefetch in namespaces (ids) for which there is a refusal."""
        for request in list(self._requests.values()):
            if reason := refusal(request.namespace.id):
                self._end(request, reason)
        self.rejected.end_namespaces(refusal)
        self.pump()

    def tick(self) -> None:
        now = self._clock()
        for request in [request for request in self._requests.values() if request.deadline <= now]:
            self._end(request, "expired")
        self.rejected.tick()
        self._ram.unpin(_LET_GO_MAX)
        self.pump()

    # Requests

    def _has_place(self, request: PrefetchRequest, keys: bytes) -> bool:
        """Return whether a request may have these keys in place of those it has."""
        others = self._keys_in[request.room] - request.chunks
        return others + len(keys) // KEY_BYTES <= KEYS_MAX // len(self._keys_in)

    def _new(self, owner: Owner, namespace: Namespace, keys: bytes) -> PrefetchRequest | None:
        room = self._ram.rooms.of(namespace.slot)
        if room is None:
            return None  # there is nothing that it could hold
        request = PrefetchRequest(next(self._numbers), owner, namespace, room.number)
        most = REQUESTS_MAX // len(self._requests_in)
        if self._requests_in[room.number] >= most or not self._has_place(request, keys):
            self._counters.add("prefetch_refused_requests")
            return None
        self._requests[owner] = request
        self._requests_in[room.number] += 1
        return request

    def _renew(self, request: PrefetchRequest, keys: bytes, tokens: list[int]) -> None:
        """Renew a request with new keys. It keeps its place, and its pins as far as they are still needed."""
        self._keys_in[request.room] += len(keys) // KEY_BYTES - request.chunks
        request.keys = keys
        request.todo = {}
        former, request.tokens, request.deadline = request.tokens, [], inf
        self._pin(request, tokens)
        self.release(former, "renewed")

    def _end(self, request: PrefetchRequest, reason: str) -> None:
        self._forget(request)
        self.release(request.tokens, reason)

    def _forget(self, request: PrefetchRequest) -> None:
        """Mark a request as over and forget it. It leaves its queues when its turn comes."""
        request.over = True
        request.todo = {}
        del self._requests[request.owner]
        self._requests_in[request.room] -= 1
        self._keys_in[request.room] -= request.chunks
        request.keys = b""

    def release(self, tokens: list[int], reason: str) -> None:
        """End these pins. Cancel reads that no worker has begun, unless an acquire waits for them."""
        for row in self._pins.release(_packed(tokens), reason).tolist():
            promotion, tier = self._reading.pop(row, (None, 0))
            if promotion is not None:
                self._begun[tier] -= 1
                self._promotions.cancel(promotion)

    def reading(self, token: int) -> bool:
        """Return whether a read of `begin` is still under way."""
        return PrefetchPins.row_of(token) in self._reading

    def let_go(self, tokens: list[int]) -> None:
        """End these pins because room is needed. Reads continue: an acquire may be about to wait for them."""
        self._pins.release(_packed(tokens), "preempted")

    def give_way(self, slots: Collection[int] | None) -> bool:
        """Unpin something of these namespaces, or of any. Return False when there is nothing."""
        if self._ram.unpin(_LET_GO_MAX):
            return True
        if self._pumping or not self._pins.objects:
            return False
        if self._lowest is not None and self._lowest.give_way(slots) and self._ram.unpin(_LET_GO_MAX):
            return True
        for request in list(reversed(self._requests.values())):
            if request.tokens and (slots is None or request.namespace.slot in slots):
                self._forget(request)
                self.let_go(request.tokens)
                if self._ram.unpin(_LET_GO_MAX):  # else others hold all of it too
                    return True
        return False

    # Reading

    def serve_last(self, lowest: LowestPriority | None) -> None:
        """Serve a reader after all requests, in place of an earlier one. None: it has ended."""
        self._lowest = lowest

    def pump(self) -> None:
        """Begin the reads that are due."""
        if self._pumping:
            return
        self._pumping = True
        try:
            for tier in self._tiers:
                queue = self._queues[tier.number]
                queue.tidy(len(self._requests))
                self._begin_queued(queue, tier)
                while not queue and self._may_begin(tier) and self._guard.value(
                    "prefetch", False, self._begin_last, tier
                ):  # fmt: skip
                    pass
        finally:
            self._pumping = False

    def _begin_queued(self, queue: PrefetchQueue, tier: LowerTier) -> None:
        """Begin reads for requests. Where one has to wait, later ones wait too, if they need the same room."""
        full: set[int] = set()
        while (request := queue.first(full)) is not None and self._may_begin(tier):
            if not self._step_or_end(queue, request, tier):
                full.add(request.room)

    def _begin_last(self, tier: LowerTier) -> bool:
        if self._lowest is not None and self._lowest.begin_next(tier):
            return True
        return self.on and self.rejected.begin_next(tier)

    def _may_begin(self, tier: LowerTier) -> bool:
        """Return whether a prefetch read may begin. Loads go first: not while a load of an engine here reads."""
        reads, begun = tier.reads, self._begun[tier.number]
        if reads.reads - tier.reads_for_peers > begun or begun >= _READS_MAX or (begun and reads.bytes >= _BYTES_MAX):
            return False
        return tier.tier.readable and reads.answers(self._clock())

    def _step_or_end(self, queue: PrefetchQueue, request: PrefetchRequest, tier: LowerTier) -> bool:
        """Begin the next object. A request for which something raises is over: it must not block all others."""
        stepped = self._guard.value("prefetch", None, self._step, queue, request, tier)
        if stepped is None:
            queue.leave(request)
            request.queues.discard(tier.number)
            if not request.over:
                self._end(request, "failed")
        return stepped is None or stepped

    def _step(self, queue: PrefetchQueue, request: PrefetchRequest, tier: LowerTier) -> bool:
        """Begin the next object of the first request of a room. Return False when it has to wait."""
        todo = request.todo.get(tier.number)
        if todo is None and not request.over:
            todo = request.todo[tier.number] = self.missing(request.namespace, request.keys, tier)
        if not todo:
            queue.leave(request)
            request.queues.discard(tier.number)
            if not (request.over or request.queues or request.tokens):  # there was nothing that it could hold
                self._end(request, "renewed")
            return True
        if not self._read(request, tier, *todo[-1]):
            return False
        todo.pop()
        return True

    def _read(self, request: PrefetchRequest, tier: LowerTier, chunk: int, kind: int) -> bool:
        """Read or pin one object. Return False when there is no room at the moment."""
        namespace = request.namespace
        node = self._index.find(namespace.slot, request.keys[chunk * KEY_BYTES : (chunk + 1) * KEY_BYTES])
        if node == NONE or not tier.has(node, kind):
            return True
        row = self._index.row(node, kind)
        if row != NO_ROW:
            self._pin(request, self._pins.join(np.array([row])).tolist())
            return True
        size_bytes = self._ram.rounded(namespace.object_bytes[kind])
        if size_bytes > self.limit_bytes(namespace):
            return True
        if size_bytes > self.room_bytes(namespace) and not (
            self._last_gives_way(namespace) and size_bytes <= self.room_bytes(namespace)
        ):
            return False
        token = self.begin(namespace, node, kind, tier)
        if token is None and self._last_gives_way(namespace):
            token = self.begin(namespace, node, kind, tier)
        if token is None:
            return self._account.over(namespace.slot, size_bytes) is not None  # the next one may be another tenant's
        self._pin(request, [token])
        return True

    def begin(
        self, namespace: Namespace, node: int, kind: int, tier: LowerTier,
        ended: Callable[[bool], None] = lambda _: None,
    ) -> int | None:  # fmt: skip
        """Read an object that RAM does not have, and pin it. Return the token; None when no room could be made.

        `ended(whole)` is called when it was read, or could not be; not where the last hold is released before.
        """
        row = self._promotions.place(namespace, node, kind, tier)
        if row == NO_ROW:
            return None
        token = self._pins.begin(row, self._ram.rounded_bytes(row))

        def arrived(whole: bool) -> None:
            self._arrived(row, tier.number, promotion)
            ended(whole)

        promotion = Promotion(arrived)
        self._reading[row] = promotion, tier.number
        self._begun[tier.number] += 1
        self._promotions.start(promotion, [row])
        return token

    def _last_gives_way(self, namespace: Namespace) -> bool:
        """Make the reader of the lowest priority release its pins for a request, if they are in the same room."""
        room = self._ram.rooms.of(namespace.slot)
        slots = None if room is None else room.slots
        return self._lowest is not None and self._lowest.give_way(slots) and self._ram.unpin(_LET_GO_MAX) > 0

    def room_bytes(self, namespace: Namespace) -> int:
        """Return what is left of the share in the namespace's room."""
        room = self._ram.rooms.of(namespace.slot)
        return 0 if room is None else self.limit_bytes(namespace) - self._pins.bytes_in(room.number)

    def limit_bytes(self, namespace: Namespace) -> int:
        """Return what prefetch may pin in the namespace's room."""
        room = self._ram.rooms.of(namespace.slot)
        return 0 if room is None else int(self._share * room.allocator.ready_bytes)

    def _pin(self, request: PrefetchRequest, tokens: list[int]) -> None:
        if tokens and not request.tokens:
            request.deadline = self._clock() + self.seconds
        request.tokens += tokens

    def _arrived(self, row: int, tier: int, promotion: Promotion) -> None:
        """Note the end of a read: the object is in RAM, or has left the index."""
        self._begun[tier] -= 1
        if self._reading.get(row, (None, 0))[0] is promotion:  # else it was dropped, and the row is another object's
            del self._reading[row]

    # What a request is about

    def missing(self, namespace: Namespace, keys: bytes, tier: LowerTier) -> list[tuple[int, int]]:
        """Return (chunk, kind) of what RAM lacks and this tier is to give. Parents last."""
        if not self._namespaces.defined(namespace):
            return []  # another one has its slot, and may have the same keys; or nobody says what it needs any more
        nodes = self._index.find_many(namespace.slot, keys)
        missing: list[tuple[int, int]] = []
        for kind, first in needed(namespace, len(nodes)):
            chunks = np.flatnonzero(nodes[first:] != NONE) + first
            chunks = chunks[self._index.rows[kind - 1][nodes[chunks]] == NO_ROW]
            for source, given in self._promotions.shares(nodes[chunks], kind):
                if source is tier:
                    missing += [(chunk, kind) for chunk in chunks[given].tolist()]
        return missing[::-1]

    def _in_ram(self, namespace: Namespace, nodes: Nodes) -> RowNumbers:
        """Return the rows of what the boundary needs, as far as RAM has it."""
        rows = [self._index.rows[kind - 1][nodes[first:]] for kind, first in needed(namespace, len(nodes))]
        found = np.concatenate(rows).astype(np.int64)
        in_ram: RowNumbers = found[found != NO_ROW]
        return in_ram


def _packed(tokens: list[int]) -> Tokens:
    packed: Tokens = np.array(tokens, np.uint64)
    return packed
