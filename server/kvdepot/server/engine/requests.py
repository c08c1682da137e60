"""Requests in progress: how far each has stored, so that its end can prune what cannot be used.

A node is usable if a request could resume there: all kinds of its namespace are
present. What a request leaves behind its last usable node serves nobody (DESIGN 5,
Eviction) and is dropped when it ends, unless another request in progress stands on it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Final

from kvdepot.core import limits
from kvdepot.core.calls import Kind
from kvdepot.core.misses import MissReason
from kvdepot.server.engine.index import NONE
from kvdepot.server.engine.namespaces import Namespace
from kvdepot.server.engine.rows import COMMITTED
from kvdepot.server.engine.space import Space

TAILS_MAX: Final = 8
"""Deepest chunks remembered per request. A request is one path; two arise when its chunks are reserved out of order."""


class _Request:
    __slots__ = ("namespace", "renewed_at", "tails")

    def __init__(self, namespace: Namespace) -> None:
        self.namespace = namespace
        self.tails: OrderedDict[bytes, None] = OrderedDict()
        self.renewed_at = 0.0


class Requests:
    """Of all sessions, the one longest without renewal first. Bounded per session count and by expiry."""

    def __init__(self, space: Space, seconds: float) -> None:
        self._space = space
        self._seconds = seconds
        self._requests: OrderedDict[tuple[int, str], _Request] = OrderedDict()
        self._standing: Counter[tuple[int, bytes]] = Counter()  # (namespace, key): requests that end there
        space.stands = self.stands

    def __len__(self) -> int:
        return len(self._requests)

    def note(self, session: int, request_id: str, namespace: Namespace, key: bytes, parent: bytes) -> None:
        """The request reserved this chunk, or was told that it is there."""
        request = self._requests.get((session, request_id))
        if request is None or request.namespace is not namespace:
            self.end(session, request_id)
            request = self._requests[(session, request_id)] = _Request(namespace)
        request.renewed_at = self._space.clock()
        self._requests.move_to_end((session, request_id))
        self._lift(request, parent)
        if key not in request.tails:
            request.tails[key] = None
            self._standing[(namespace.slot, key)] += 1
            self._settle(namespace.slot, key)
        if len(request.tails) > TAILS_MAX:
            self._lift(request, next(iter(request.tails)))

    def end(self, session: int, request_id: str) -> None:
        request = self._requests.pop((session, request_id), None)
        if request is None:
            return
        tails = list(request.tails)
        for key in tails:
            self._lift(request, key)
        for key in tails:
            self._mark_end(request.namespace, key)
            self._prune(request.namespace, key)

    def stands(self, node: int) -> bool:
        """Whether a request in progress ends at the node."""
        index = self._space.index
        return (index.namespace(node), index.key(node)) in self._standing

    def end_session(self, session: int) -> None:
        for owner, request_id in [key for key in self._requests if key[0] == session]:
            self.end(owner, request_id)

    def expire(self) -> None:
        """End what was not renewed for long, and what is over the limit."""
        oldest = self._space.clock() - self._seconds
        while self._requests:
            (session, request_id), request = next(iter(self._requests.items()))
            if request.renewed_at > oldest and len(self._requests) <= limits.REQUESTS_PER_SESSION_MAX:
                return
            self.end(session, request_id)

    def _lift(self, request: _Request, key: bytes) -> None:
        if key not in request.tails:
            return
        del request.tails[key]
        at = (request.namespace.slot, key)
        self._standing[at] -= 1
        if not self._standing[at]:
            del self._standing[at]
            self._settle(*at)

    def _settle(self, slot: int, key: bytes) -> None:
        """A leaf that nobody could resume at may go when no request stands on it, and not before."""
        node = self._space.index.named(slot, key)
        if node != NONE and not self._space.usable.serves(node):
            self._space.settle_evictors(node)

    def _prune(self, namespace: Namespace, key: bytes) -> None:
        """From the end upwards, what nobody could resume at; dropped at once, however much it is."""
        space, top, objects = self._space, NONE, 0
        node = space.index.find(namespace.slot, key)
        while node != NONE and self._prunable(node, top):
            objects += len(space.index.rows_of(node))
            space.note_lost(node, MissReason.PRUNED)
            top, node = node, space.index.parent(node)
        if top != NONE:
            space.counters.add("pruned_objects", objects)
            space.drop_subtree(top)

    def _mark_end(self, namespace: Namespace, key: bytes) -> None:
        """Where the next request that continues this one will resume."""
        space = self._space
        node = space.index.find(namespace.slot, key)
        if node != NONE and not space.usable.usable(node):
            node = space.usable.resume(node)
        if node != NONE:
            space.ended(node)

    def _prunable(self, node: int, below: int) -> bool:
        """`below`: the one child that goes with it; NONE for an end."""
        space = self._space
        ends = space.index.is_leaf(node) if below == NONE else not space.index.branches(node)
        if not ends or self.stands(node) or space.usable.usable(node):
            return False
        if any(space.elsewhere(node, kind) for kind in Kind):
            return False
        return not space.busy(node) and all(space.rows.state[row] == COMMITTED for row in space.index.rows_of(node))
