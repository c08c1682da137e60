"""Requests in progress: how far each has stored, so that its end can prune what is unreachable.

A node is usable if a request could resume there: all kinds of its namespace are
present. What a request leaves after its last usable node serves nobody
(design.md#eviction) and is dropped when it ends, unless another request in progress ends there.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from kvdepot.core import limits
from kvdepot.core.calls import Kind
from kvdepot.core.misses import MissReason
from kvdepot.server.depot.tree.index import NONE
from kvdepot.server.depot.tree.namespaces import Namespace
from kvdepot.server.depot.tree.ram import RamTier
from kvdepot.server.depot.tree.rows import COMMITTED
from kvdepot.server.depot.tree.tree import Tree

TAILS_MAX: Final = 8
"""Deepest chunks remembered per request. A request is one path; two arise when its chunks are reserved out of order."""


class _Request:
    __slots__ = ("namespace", "renewed_at", "tails")

    def __init__(self, namespace: Namespace) -> None:
        self.namespace = namespace
        self.tails: OrderedDict[bytes, None] = OrderedDict()
        self.renewed_at = 0.0


class Requests:
    """The requests of all sessions, the one longest without renewal first. Bounded per session count and by expiry."""

    def __init__(self, tree: Tree, ram: RamTier, seconds: float) -> None:
        self._tree = tree
        self._ram = ram
        self._index = tree.index
        self._usable = tree.usable
        self._counters = tree.counters
        self._clock = tree.clock
        self._rows = ram.rows
        self._in_use = tree.in_use
        self._seconds = seconds
        self._requests: OrderedDict[tuple[int, str], _Request] = OrderedDict()

    def __len__(self) -> int:
        return len(self._requests)

    def note(self, session: int, request_id: str, namespace: Namespace, key: bytes, parent: bytes) -> None:
        """Note that the request reserved this chunk, or was told that it is there."""
        request = self._requests.get((session, request_id))
        if request is None or request.namespace is not namespace:
            self.end(session, request_id)
            request = self._requests[(session, request_id)] = _Request(namespace)
        request.renewed_at = self._clock()
        self._requests.move_to_end((session, request_id))
        self._lift(request, parent)
        if key not in request.tails:
            request.tails[key] = None
            self._in_use.enter(namespace.slot, key)
            self._update_candidates(namespace.slot, key)
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

    def end_session(self, session: int) -> None:
        for owner, request_id in [key for key in self._requests if key[0] == session]:
            self.end(owner, request_id)

    def expire(self) -> None:
        """End requests that were not renewed for long, and those above the limit."""
        oldest = self._clock() - self._seconds
        while self._requests:
            (session, request_id), request = next(iter(self._requests.items()))
            if request.renewed_at > oldest and len(self._requests) <= limits.REQUESTS_PER_SESSION_MAX:
                return
            self.end(session, request_id)

    def _lift(self, request: _Request, key: bytes) -> None:
        if key not in request.tails:
            return
        del request.tails[key]
        if self._in_use.leave(request.namespace.slot, key):
            self._update_candidates(request.namespace.slot, key)

    def _update_candidates(self, slot: int, key: bytes) -> None:
        """Offer a leaf at which nobody could resume, once no request ends there."""
        node = self._index.named(slot, key)
        if node != NONE and not self._usable.serves(node):
            self._tree.update_candidates(node)

    def _prune(self, namespace: Namespace, key: bytes) -> None:
        """Drop what nobody could use, from the end of the path upwards, at once."""
        top, objects = NONE, 0
        node = self._index.find(namespace.slot, key)
        while node != NONE and self._prunable(node, top):
            objects += len(self._index.rows_of(node))
            self._tree.note_lost(node, MissReason.PRUNED)
            top, node = node, self._index.parent(node)
        if top != NONE:
            self._counters.add("pruned_objects", objects)
            self._tree.drop_subtree(top)

    def _mark_end(self, namespace: Namespace, key: bytes) -> None:
        """Tell the policies where a request that continues this one will resume."""
        node = self._index.find(namespace.slot, key)
        if node != NONE and not self._usable.usable(node):
            node = self._usable.resume(node)
        if node != NONE:
            self._tree.ended(node)

    def _prunable(self, node: int, below: int) -> bool:
        """Return whether the node can go. `below`: the one child that goes with it; NONE for a leaf."""
        ends = self._index.is_leaf(node) if below == NONE else not self._index.branches(node)
        if not ends or node in self._in_use or self._usable.usable(node):
            return False
        if any(self._tree.elsewhere(node, kind) for kind in Kind):
            return False
        return not self._ram.busy(node) and all(self._rows.state[row] == COMMITTED for row in self._index.rows_of(node))
