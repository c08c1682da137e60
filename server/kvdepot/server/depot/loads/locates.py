"""Locate: how much of a prompt all tiers together have. It pins nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import Final

import numpy as np
from kvdepot.core import limits
from kvdepot.core.arena import NO_ROW
from kvdepot.core.calls import KEY_BYTES, Kind, LocateCall, LocateReply, Nearest
from kvdepot.core.control import Switch
from kvdepot.core.errors import InvalidArgument
from kvdepot.core.limits import check_limit
from kvdepot.core.misses import MissReason
from kvdepot.core.planner import Planner
from kvdepot.server.depot.loads.lookups import LookedUp, LookUps, wait_seconds
from kvdepot.server.depot.loads.misses import Miss, Misses, Seen
from kvdepot.server.depot.loads.offers import Costs, Offer, Offers
from kvdepot.server.depot.loads.presence import Flags, Presence, Tiers
from kvdepot.server.depot.loads.records import Records
from kvdepot.server.depot.sessions.session import Session
from kvdepot.server.depot.tiering.prefetch import Prefetch
from kvdepot.server.depot.tiering.prefetch_requests import Owner
from kvdepot.server.depot.tiering.tiering import Tiering
from kvdepot.server.depot.tree.index import Nodes
from kvdepot.server.depot.tree.lower_tier import LowerTier
from kvdepot.server.depot.tree.namespaces import Namespace
from kvdepot.server.depot.tree.ram import RamTier
from kvdepot.server.depot.tree.rows import COMMITTED
from kvdepot.server.depot.tree.switches import Switches
from kvdepot.server.depot.tree.tree import Tree
from kvdepot.server.platform.guard import Once, engine_guard

Answer = Callable[[LocateReply], None]
_WANTED_PER_LOCATE_MAX: Final = 256


class Locates:
    """The Locates of all sessions. `want(row)` asks for an adopted object to be verified soon."""

    def __init__(
        self,
        tree: Tree,
        ram: RamTier,
        tiering: Tiering,
        prefetch: Prefetch,
        records: Records,
        switches: Switches,
        want: Callable[[int], None],
    ) -> None:
        self._ram = ram
        self._index = tree.index
        self._lost_keys = tree.lost_keys
        self._namespaces = tree.namespaces
        self._tiers = tree.tiers
        self._counters = tree.counters
        self._rows = ram.rows
        self._account = ram.account
        self._guard = engine_guard(self._counters.add)
        self._switches = switches
        self._prefetch = prefetch
        self._offers = Offers(tree.index, ram, tree.clock, tiering.promotions)
        self._tiering = tiering
        self._presence = Presence(tree.index, ram.rows, tiering)
        self._look_ups = LookUps(tree, ram.rows, self._presence)
        self._misses = Misses(tree, ram.rows, self._presence, tiering)
        self._records = records
        self._want = want

    def tick(self) -> None:
        self._look_ups.tick()

    def close(self) -> None:
        """Answer those who wait; from now on nothing is looked up."""
        self._look_ups.close()

    def locate(self, session: Session, namespace: Namespace, call: LocateCall, answer: Answer) -> float:
        """Answer the deepest boundary of which every object may be served, or can be within the call's budget.

        Where shared tiers may have more than the index knows, they are asked first. Else the answer is given at once.
        Return after how many seconds the next tick answers at the latest. 0 means that the call was answered.
        """
        self._counters.add("locates")
        if len(call.keys) % KEY_BYTES:
            raise InvalidArgument(f"keys has {len(call.keys)} bytes, no multiple of {KEY_BYTES}")
        check_limit("keys of one call", len(call.keys) // KEY_BYTES, limits.KEYS_PER_CALL_MAX)
        if self._switched_off(session, namespace, call, answer):
            return 0.0
        source = self._source(namespace, call)
        if source is not None:
            answer = partial(_with_source, answer, source.tier.name)
        seen = self._see(namespace, call)
        chunk_tokens = _planner(namespace).chunk_tokens
        begin, end = seen.boundary_tokens // chunk_tokens, min(seen.high_tokens // chunk_tokens, len(seen.nodes))
        if begin >= end or not self._look_ups.possible:
            self._answer(session, namespace, call, seen, answer)
            return 0.0

        once = Once(answer)

        def ended(looked_up: LookedUp) -> None:
            if not self._guard.call("lookup", answer_now, looked_up):
                once(LocateReply(0))

        def answer_now(looked_up: LookedUp) -> None:
            if namespace.invalid or not self._namespaces.defined(namespace):
                once(LocateReply(0))  # nobody uses it any more
            elif not self._switched_off(session, namespace, call, once):
                self._answer(session, namespace, call, self._see(namespace, call), once, looked_up)

        wait = wait_seconds(call.wait_seconds, something=begin > 0)
        return self._look_ups.begin(namespace, call.keys, begin, end, ended, wait, source)

    def nearest(self, namespace: Namespace, keys: bytes) -> Tiers:
        """Return the `Nearest` of each chunk's attention."""
        nodes = self._index.find_many(namespace.slot, keys)
        nearest = self._presence.nearest(nodes, self._tiers)
        opening, detached = self._misses.some_disk_is("opening"), self._ram.detached
        if opening or len(detached):
            for at in np.flatnonzero(nearest == Nearest.ABSENT).tolist():
                key = keys[at * KEY_BYTES : (at + 1) * KEY_BYTES]
                lost = self._lost_keys.reason(namespace.id, key) is not None
                if (opening and not lost) or detached.find(namespace.slot, key, Kind.ATTENTION) != NO_ROW:
                    nearest[at] = Nearest.UNKNOWN
        return nearest

    def _source(self, namespace: Namespace, call: LocateCall) -> LowerTier | None:
        """Return the peer tier that the call names, by the id of the peer's arena. Count `named_sources`."""
        if not call.source_id:
            return None
        source = self._look_ups.source(namespace, call.source_id)
        self._counters.add("named_sources.peer" if source is not None else "named_sources.unknown")
        return source

    def _switched_off(self, session: Session, namespace: Namespace, call: LocateCall, answer: Answer) -> bool:
        """Answer a Locate whose loads an operator has switched off. Return whether this is so."""
        refusal = self._switches.refusal(Switch.LOADS, namespace.id)
        if refusal is None:
            return False
        miss = Miss(refusal, 0)
        self._counters.add(f"misses.{refusal}")
        self._record(session, namespace, call, self._see(namespace, call), Offer(0), miss)
        answer(LocateReply(0, miss=self._misses.told(miss)))
        return True

    def _see(self, namespace: Namespace, call: LocateCall) -> Seen:
        planner = _planner(namespace)
        nodes = self._index.find_many(namespace.slot, call.keys)
        flags = self._presence.in_ram(namespace, nodes)
        ram = presence = {kind: seen.tobytes() for kind, seen in flags.items()}
        high_tokens = call.high_tokens
        if self._tiers:
            high_tokens = min(high_tokens, self._reach_tokens(namespace))
            presence = {kind: (seen | self._presence.promotable(nodes, kind)).tobytes() for kind, seen in flags.items()}
        return Seen(nodes, ram, presence, high_tokens, planner.longest_boundary(presence, 0, high_tokens))

    def _answer(
        self,
        session: Session,
        namespace: Namespace,
        call: LocateCall,
        seen: Seen,
        answer: Answer,
        looked_up: LookedUp | None = None,
    ) -> None:
        planner, counters, longest = _planner(namespace), self._counters, seen.boundary_tokens
        offer, costs = self._offer(namespace, call, seen)
        attention = seen.presence.get(Kind.ATTENTION, b"")
        reach = attention.find(0)
        reach = len(attention) if reach < 0 else reach
        miss = self._misses.of(namespace, call, seen, looked_up)
        if offer.boundary_tokens < longest:
            miss = replace(miss, reason=offer.miss, chunk=offer.boundary_tokens // planner.chunk_tokens)
        if offer.boundary_tokens:
            counters.add("located_tokens", offer.boundary_tokens)
            counters.add("locate_hits")
        else:
            counters.add(f"misses.{miss.reason or MissReason.UNKNOWN}")
        if offer.boundary_tokens < longest:
            counters.add("shortened_offers")
        if self._ram.unverified:
            self._want_unverified(namespace, seen.nodes)
        self._record(session, namespace, call, seen, offer, miss)
        answer(
            LocateReply(
                offer.boundary_tokens, offer.tier, reach * planner.chunk_tokens, offer.seconds, self._misses.told(miss)
            )
        )
        # After the answer: workers that are woken to read run before this process does again where cores are few.
        if self._tiers and not session.ended:
            request = session.slot, call.request_id
            self._guard.call("prefetch", self._read_ahead, request, namespace, call, seen, offer, costs)

    def _read_ahead(
        self, request: Owner, namespace: Namespace, call: LocateCall, seen: Seen, offer: Offer, costs: Costs | None
    ) -> None:
        """Prefetch the longest boundary that there is.

        Objects that are not worth the request's time are read later, for other requests. They are read at once where
        that measures a tier that is not measured yet.
        """
        prefetch, chunk_tokens = self._prefetch, _planner(namespace).chunk_tokens
        chunks = seen.boundary_tokens // chunk_tokens
        source_tiers = _source_tiers(costs, chunks)
        if offer.miss is MissReason.NOT_WORTH_IT and prefetch.on and request[1] and self._measured(source_tiers):
            computed_seconds = (seen.boundary_tokens - call.local_tokens) * call.token_seconds
            prefetch.rejected.add(
                request[0], namespace, call.keys[: chunks * KEY_BYTES], source_tiers, computed_seconds
            )
            chunks = offer.boundary_tokens // chunk_tokens
            source_tiers = _source_tiers(costs, chunks)
        prefetch.located(request, namespace, call.keys[: chunks * KEY_BYTES], seen.nodes[:chunks], source_tiers)

    def _measured(self, tiers: Collection[int]) -> bool:
        return all(tier.reads.measured for tier in self._tiers if tier.number in tiers)

    def _record(
        self, session: Session, namespace: Namespace, call: LocateCall, seen: Seen, offer: Offer, miss: Miss
    ) -> None:
        if call.request_id:
            lookup = self._misses.lookup(namespace, call, seen, offer, miss)
            if call.source_id:
                source = self._look_ups.source(namespace, call.source_id)
                tier = source.tier.name if source is not None else ""
                lookup = replace(lookup, source_id=call.source_id, source_tier=tier)
            self._records.looked_up(session.engine_id, call.request_id, namespace, call.keys, lookup)

    def _offer(self, namespace: Namespace, call: LocateCall, seen: Seen) -> tuple[Offer, Costs | None]:
        """Return what of the longest boundary is worth waiting for and in time, and the costs of the boundaries.

        The costs are None where RAM alone gives the longest boundary.
        """
        planner, longest = _planner(namespace), seen.boundary_tokens
        if not self._tiers or longest == planner.longest_boundary(seen.ram, 0, seen.high_tokens):
            return Offer(longest, "ram" if longest else ""), None
        chunks = longest // planner.chunk_tokens
        absent = {kind: _flags(seen.presence[kind], chunks) & ~_flags(seen.ram[kind], chunks) for kind in seen.ram}
        for kind in absent.keys() - {Kind.STATE}:
            absent[kind][: call.local_tokens // planner.chunk_tokens] = False
        explored = self._prefetch.on and bool(call.request_id)
        costs = self._offers.costs(namespace, seen.nodes[:chunks], absent, explored=explored)
        return self._offers.choose(planner, seen.presence, longest, costs, call), costs

    def _reach_tokens(self, namespace: Namespace) -> int:
        """Return the last boundary, in tokens, that quotas can let into RAM. They never let in what ends after it."""
        chunk_tokens = _planner(namespace).chunk_tokens
        capacity_bytes = self._account.capacity_bytes(namespace.slot)
        if capacity_bytes is None:
            return limits.KEYS_PER_CALL_MAX * chunk_tokens
        rounded, sizes = self._ram.rounded, namespace.object_bytes
        for kind, size_bytes in sizes.items():
            if kind != namespace.path_kind:
                capacity_bytes -= rounded(size_bytes) * (namespace.window_chunks if kind == Kind.WINDOW else 1)
        return max(capacity_bytes, 0) // rounded(sizes[namespace.path_kind]) * chunk_tokens

    def _want_unverified(self, namespace: Namespace, nodes: Nodes) -> None:
        """Ask for checksums of unverified objects at these nodes first, because a request asked for them."""
        table = self._rows
        for kind in namespace.object_bytes:
            rows = self._presence.rows_at(nodes, kind)
            rows = rows[rows != NO_ROW]
            rows = rows[(table.states[rows] == COMMITTED) & (table.runs[rows] != table.run)]
            for row in rows[:_WANTED_PER_LOCATE_MAX].tolist():
                self._want(row)


def _with_source(answer: Answer, tier: str, reply: LocateReply) -> None:
    answer(replace(reply, source_tier=tier))


def _planner(namespace: Namespace) -> Planner:
    assert namespace.planner is not None, "only registered namespaces are located in"
    return namespace.planner


def _source_tiers(costs: Costs | None, chunks: int) -> Collection[int]:
    """Return the numbers of the tiers that have to give something for the first so many chunks."""
    return costs.source_tiers(chunks - 1) if costs is not None and chunks else ()


def _flags(packed: bytes, chunks: int) -> Flags:
    flags: Flags = np.frombuffer(packed, np.bool_)[:chunks]
    return flags
