"""Prefetch: what requests that wait in engines' queues need from lower tiers is read into RAM ahead (DESIGN 4, Load).

A *wish* is what the last Locate of one request found worth having. Wishes are served in
the order of their arrival over all sessions, each tier at its own pace, and only while
nobody's load is being read there. What was read is held in RAM until the request acquires,
begins to store, ends, or its time is over. Room for it is made as for any other object,
within a share of RAM; who finds no room elsewhere is given what the last wish has.

Who comes after all wishes (`LastInLine`) reads by the same rules, and gives way to them. After that comes what
requests have declined (`Declined`).

A wish is a hint: whatever becomes of it, an acquire reads what it lacks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf
from typing import Final, Protocol

import numpy as np
from kvdepot.core.arena import NO_ROW
from kvdepot.core.calls import KEY_BYTES, Kind
from kvdepot.server.engine.declined import Declined
from kvdepot.server.engine.holds import Holds, Rows, Tokens
from kvdepot.server.engine.index import NONE, Nodes
from kvdepot.server.engine.lower_tier import LowerTier
from kvdepot.server.engine.namespaces import Namespace
from kvdepot.server.engine.promotions import Promotion, Promotions
from kvdepot.server.engine.space import Space
from kvdepot.server.engine.switches import Refusal
from kvdepot.server.guard import engine_guard

WISHES_MAX: Final = 4096
KEYS_MAX: Final = 1 << 20
"""Chunk keys of all wishes: 16 MiB."""
ENDED_MAX: Final = 4096
"""Requests remembered because a Locate of theirs may still be under way."""
_READS_MAX: Final = 4
"""Begun ahead in one tier: what its workers have in hand. A load that comes waits behind no more than these."""
_BYTES_MAX: Final = 64 << 20
"""Likewise, once there is one."""
_OVER_MAX: Final = 64
"""Wishes that are over and still in a lane, beside as many again as there are of others."""
_LET_GO_MAX: Final = 256
"""Objects a tick, and for somebody who finds no room: some 3 ms."""

Request = tuple[int, str]
"""(session slot, request id)."""


class LastInLine(Protocol):
    """Who has something read when no wish has anything left to read from a tier."""

    def begin_next(self, tier: LowerTier) -> bool:
        """By `Prefetch.begin`. False: there is nothing of this tier."""

    def give_way(self, slots: Collection[int] | None) -> bool:
        """Release what is held of these namespaces, or of any; False: nothing is."""


@dataclass(eq=False, slots=True)
class _Wish:
    """`todo`: by tier number, (chunk, kind) of what to read from it, the first one last; not there: not looked at."""

    number: int  # of arrival
    request: Request
    namespace: Namespace
    keys: bytes  # of the chunks up to the boundary
    over: bool = False
    todo: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    lanes: set[int] = field(default_factory=set)  # tiers in whose queue it is
    tokens: list[int] = field(default_factory=list)  # of what is held for it
    deadline: float = inf

    @property
    def chunks(self) -> int:
        return len(self.keys) // KEY_BYTES


class Prefetch:
    """`share` of RAM may be held; `seconds`: how long, from a request's first object or its last Locate on."""

    def __init__(self, space: Space, promotions: Promotions, *, share: float, seconds: float) -> None:
        self._space = space
        self._guard = engine_guard(space.counters.add)
        self._promotions = promotions
        self._share = share
        self.seconds = seconds
        self._holds = Holds(space)
        self._wishes: OrderedDict[Request, _Wish] = OrderedDict()
        self._ended: OrderedDict[Request, None] = OrderedDict()
        self._lanes: dict[int, list[tuple[int, _Wish]]] = {tier.number: [] for tier in space.tiers}
        self._reading: dict[int, tuple[Promotion, int]] = {}  # by row: what was begun ahead, and its tier
        self._begun = dict.fromkeys(self._lanes, 0)  # of them, by tier
        self._numbers = count()
        self._keys = 0  # of all wishes
        self._pumping = False
        self.last: LastInLine | None = None
        self.declined = Declined(self, space)
        promotions.read_ended = self.pump
        space.give_way = self._give_way

    def configure(self, *, share: float, seconds: float) -> None:
        """What is held beyond a smaller share is held on; nothing further is begun."""
        self._share = share
        self.seconds = seconds

    def __len__(self) -> int:
        """Requests that it is for, served or not."""
        return len(self._wishes) + len(self.declined)

    @property
    def on(self) -> bool:
        return self._share > 0

    @property
    def held_objects(self) -> int:
        return self._holds.objects

    @property
    def held_bytes(self) -> int:
        """In RAM or on the way there, for requests that have not acquired yet."""
        return self._holds.bytes

    # What requests say

    def located(
        self, request: Request, namespace: Namespace, keys: bytes, nodes: Nodes, tiers: Collection[int]
    ) -> None:
        """The request would have these chunks, of which these tiers have to give something.

        `keys` end with the boundary's chunk; `nodes` are theirs.
        """
        wish = self._wishes.get(request)
        if wish is not None and not len(nodes):
            self.over(request, "renewed")
            return
        if not len(nodes) or not self.on or not request[1] or request in self._ended:
            return
        if wish is None and not tiers and not self._holds.objects:
            return
        if wish is not None and (wish.namespace is not namespace or not self._has_room(wish, keys)):
            self._end(wish, "renewed")
            wish = None
        tokens = self._holds.join(self._rows(namespace, nodes)).tolist()
        if wish is None and (tiers or tokens):
            wish = self._new(request, namespace, keys)
        if wish is None:
            self.release(tokens, "refused")
            return
        self._renew(wish, keys, tokens)
        for number in tiers:
            if number not in wish.lanes:
                wish.lanes.add(number)
                heappush(self._lanes[number], (wish.number, wish))
        if not tokens and not wish.lanes:
            self._end(wish, "renewed")
        self.pump()

    def acquired(self, request: Request, rows: Rows) -> None:
        """It has asked for its load, and has these objects; none where it was refused."""
        if self._holds.objects and len(rows):
            self._holds.used(rows)
        self.over(request, "acquired")

    def over(self, request: Request, reason: str) -> None:
        """It needs nothing ahead any more."""
        wish = self._wishes.get(request)
        if wish is not None:
            self._end(wish, reason)
            self.pump()

    def ended(self, request: Request) -> None:
        """Likewise, and it never will."""
        if not self.on:
            return
        self._ended[request] = None
        if len(self._ended) > ENDED_MAX:
            self._ended.popitem(last=False)
        self.over(request, "ended")

    def end_session(self, session: int) -> None:
        for request in [request for request in self._ended if request[0] == session]:
            del self._ended[request]
        for request in [request for request in self._wishes if request[0] == session]:
            self._end(self._wishes[request], "session")
        self.declined.end_session(session)
        self.pump()

    def end_namespaces(self, refusal: Refusal) -> None:
        """Nothing is to be read ahead in namespaces (ids) for which there is a reason against it."""
        for wish in list(self._wishes.values()):
            if reason := refusal(wish.namespace.id):
                self._end(wish, reason)
        self.declined.end_namespaces(refusal)
        self.pump()

    def tick(self) -> None:
        now = self._space.clock()
        for wish in [wish for wish in self._wishes.values() if wish.deadline <= now]:
            self._end(wish, "expired")
        self.declined.tick()
        self._holds.let_go(_LET_GO_MAX)
        self.pump()

    # Wishes

    def _has_room(self, wish: _Wish | None, keys: bytes) -> bool:
        return self._keys - (wish.chunks if wish else 0) + len(keys) // KEY_BYTES <= KEYS_MAX

    def _new(self, request: Request, namespace: Namespace, keys: bytes) -> _Wish | None:
        if len(self._wishes) >= WISHES_MAX or not self._has_room(None, keys):
            self._space.counters.add("prefetch_refused_requests")
            return None
        wish = self._wishes[request] = _Wish(next(self._numbers), request, namespace, b"")
        return wish

    def _renew(self, wish: _Wish, keys: bytes, tokens: list[int]) -> None:
        """It keeps its place, and what it holds as far as that is of use yet."""
        self._keys += len(keys) // KEY_BYTES - wish.chunks
        wish.keys = keys
        wish.todo = {}
        former, wish.tokens, wish.deadline = wish.tokens, [], inf
        self._hold(wish, tokens)
        self.release(former, "renewed")

    def _end(self, wish: _Wish, reason: str) -> None:
        self._forget(wish)
        self.release(wish.tokens, reason)

    def _forget(self, wish: _Wish) -> None:
        """It leaves its lanes when its turn comes."""
        wish.over = True
        wish.todo = {}
        del self._wishes[wish.request]
        self._keys -= wish.chunks
        wish.keys = b""

    def release(self, tokens: list[int], reason: str) -> None:
        """End these holds. What was not begun to be read is not read, unless an acquire waits for it."""
        for row in self._holds.release(_packed(tokens), reason).tolist():
            promotion, tier = self._reading.pop(row, (None, 0))
            if promotion is not None:
                self._begun[tier] -= 1
                self._promotions.cancel(promotion)

    def reading(self, token: int) -> bool:
        """Whether what `begin` has begun is under way yet."""
        return Holds.row_of(token) in self._reading

    def let_go(self, tokens: list[int]) -> None:
        """Likewise, as somebody finds no room. What is being read goes on: an acquire may be about to wait for it."""
        self._holds.release(_packed(tokens), "gave_way")

    def _give_way(self, slots: Collection[int] | None) -> bool:
        """Somebody finds no room."""
        if self._holds.let_go(_LET_GO_MAX):
            return True
        if self._pumping or not self._holds.objects:
            return False
        if self.last is not None and self.last.give_way(slots) and self._holds.let_go(_LET_GO_MAX):
            return True
        for wish in list(reversed(self._wishes.values())):
            if wish.tokens and (slots is None or wish.namespace.slot in slots):
                self._forget(wish)
                self.let_go(wish.tokens)
                if self._holds.let_go(_LET_GO_MAX):  # else others hold all of it too
                    return True
        return False

    # Reading

    def pump(self) -> None:
        """Have read what is due."""
        if self._pumping:
            return
        self._pumping = True
        try:
            for tier in self._space.tiers:
                lane = self._lanes[tier.number]
                self._tidy(lane)
                while lane and self._may_begin(tier) and self._step_or_end(lane, tier):
                    pass
                while not lane and self._may_begin(tier) and self._guard.value(
                    "prefetch", False, self._begin_last, tier
                ):  # fmt: skip
                    pass
        finally:
            self._pumping = False

    def _begin_last(self, tier: LowerTier) -> bool:
        if self.last is not None and self.last.begin_next(tier):
            return True
        return self.on and self.declined.begin_next(tier)

    def _tidy(self, lane: list[tuple[int, _Wish]]) -> None:
        """What is over leaves although its turn does not come: a tier may be busy with loads for long."""
        if len(lane) > 2 * len(self._wishes) + _OVER_MAX:
            lane[:] = [entry for entry in lane if not entry[1].over]
            heapify(lane)

    def _may_begin(self, tier: LowerTier) -> bool:
        """Loads go first: while anything is read that was not begun ahead, nothing is."""
        reads, begun = tier.reads, self._begun[tier.number]
        if reads.reads > begun or begun >= _READS_MAX or (begun and reads.bytes >= _BYTES_MAX):
            return False
        return tier.tier.readable and reads.answers(self._space.clock())

    def _step_or_end(self, lane: list[tuple[int, _Wish]], tier: LowerTier) -> bool:
        """Likewise. A wish for which something raises is over: it must not stand before all others."""
        stepped = self._guard.value("prefetch", None, self._step, lane, tier)
        if stepped is None:
            _, wish = heappop(lane)
            wish.lanes.discard(tier.number)
            if not wish.over:
                self._end(wish, "failed")
        return stepped is None or stepped

    def _step(self, lane: list[tuple[int, _Wish]], tier: LowerTier) -> bool:
        """The next object of the first wish; False: it has to wait."""
        wish = lane[0][1]
        todo = wish.todo.get(tier.number)
        if todo is None and not wish.over:
            todo = wish.todo[tier.number] = self.missing(wish.namespace, wish.keys, tier)
        if not todo:
            heappop(lane)
            wish.lanes.discard(tier.number)
            if not (wish.over or wish.lanes or wish.tokens):  # there was nothing that it could hold
                self._end(wish, "renewed")
            return True
        if not self._read(wish, tier, *todo[-1]):
            return False
        todo.pop()
        return True

    def _read(self, wish: _Wish, tier: LowerTier, chunk: int, kind: int) -> bool:
        """False: there is no room at the moment."""
        space, namespace = self._space, wish.namespace
        node = space.index.find(namespace.slot, wish.keys[chunk * KEY_BYTES : (chunk + 1) * KEY_BYTES])
        if node == NONE or not tier.has(node, kind):
            return True
        row = space.index.row(node, kind)
        if row != NO_ROW:
            self._hold(wish, self._holds.join(np.array([row])).tolist())
            return True
        size_bytes = space.allocator.rounded(namespace.object_bytes[kind])
        if size_bytes > self.limit_bytes:
            return True
        if size_bytes > self.room_bytes and not (self._last_gives_way() and size_bytes <= self.room_bytes):
            return False
        token = self.begin(namespace, node, kind, tier)
        if token is None and self._last_gives_way():
            token = self.begin(namespace, node, kind, tier)
        if token is None:
            return space.account.over(namespace.slot, size_bytes) is not None  # the next one may be another tenant's
        self._hold(wish, [token])
        return True

    def begin(
        self, namespace: Namespace, node: int, kind: int, tier: LowerTier,
        ended: Callable[[bool], None] = lambda _: None,
    ) -> int | None:  # fmt: skip
        """Have an object read that RAM does not have, and hold it; the token. None: no room could be made for it.

        `ended(whole)` is called when it was read, or could not be; not where the last hold is released before.
        """
        row = self._promotions.place(namespace, node, kind, tier)
        if row == NO_ROW:
            return None
        token = self._holds.begin(row)

        def arrived(whole: bool) -> None:
            self._arrived(row, tier.number, promotion)
            ended(whole)

        promotion = Promotion(arrived)
        self._reading[row] = promotion, tier.number
        self._begun[tier.number] += 1
        self._promotions.start(promotion, [row])
        return token

    def _last_gives_way(self) -> bool:
        """To a wish."""
        return self.last is not None and self.last.give_way(None) and self._holds.let_go(_LET_GO_MAX) > 0

    @property
    def room_bytes(self) -> int:
        """Of the share."""
        return self.limit_bytes - self._holds.bytes

    @property
    def limit_bytes(self) -> int:
        return int(self._share * self._space.allocator.ready_bytes)

    def _hold(self, wish: _Wish, tokens: list[int]) -> None:
        if tokens and not wish.tokens:
            wish.deadline = self._space.clock() + self.seconds
        wish.tokens += tokens

    def _arrived(self, row: int, tier: int, promotion: Promotion) -> None:
        """Or failed, and has left the index."""
        self._begun[tier] -= 1
        if self._reading.get(row, (None, 0))[0] is promotion:  # else it was dropped, and the row is another object's
            del self._reading[row]

    # What a wish is about

    def missing(self, namespace: Namespace, keys: bytes, tier: LowerTier) -> list[tuple[int, int]]:
        """(chunk, kind) of what RAM has nothing of and this tier is to give. Parents last."""
        space = self._space
        if not space.namespaces.defined(namespace):
            return []  # another one has its slot, and may have the same keys; or nobody says what it needs any more
        nodes = space.index.find_many(namespace.slot, keys)
        missing: list[tuple[int, int]] = []
        for kind, first in needed(namespace, len(nodes)):
            chunks = np.flatnonzero(nodes[first:] != NONE) + first
            chunks = chunks[space.index.rows[kind - 1][nodes[chunks]] == NO_ROW]
            for source, given in self._promotions.shares(nodes[chunks], kind):
                if source is tier:
                    missing += [(chunk, kind) for chunk in chunks[given].tolist()]
        return missing[::-1]

    def _rows(self, namespace: Namespace, nodes: Nodes) -> Rows:
        """Of what the boundary needs, as far as RAM has it."""
        rows = [self._space.index.rows[kind - 1][nodes[first:]] for kind, first in needed(namespace, len(nodes))]
        found = np.concatenate(rows).astype(np.int64)
        in_ram: Rows = found[found != NO_ROW]
        return in_ram


def needed(namespace: Namespace, chunks: int) -> list[tuple[int, int]]:
    """What the boundary behind so many chunks needs: kinds, and the chunk from which on each."""
    planner = namespace.planner
    assert planner is not None, "only registered namespaces are located in"
    first = {Kind.ATTENTION: 0, Kind.WINDOW: max(chunks - planner.window_chunks, 0), Kind.STATE: chunks - 1}
    return [(int(kind), first[kind]) for kind in planner.kinds]


def _packed(tokens: list[int]) -> Tokens:
    packed: Tokens = np.array(tokens, np.uint64)
    return packed
