"""Acquires that are answered later, because a lower tier has some of their objects.

Such a lease exists from the call on: it pins all its objects, a repeat of the call waits
for the same answer, and whatever ends a lease ends it too. No rank has seen it yet, so its
end gives everything back at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
from kvdepot.core.arena import NO_ROW, LentMode
from kvdepot.core.calls import AcquireCall, AcquireOutcome, AcquireReply
from kvdepot.core.lifecycle import LeaseEvent, LeaseState
from kvdepot.server.engine.index import NONE
from kvdepot.server.engine.leases import ReadLease
from kvdepot.server.engine.lower_tier import LowerTier
from kvdepot.server.engine.namespaces import Namespace
from kvdepot.server.engine.promotions import Promotion, Promotions
from kvdepot.server.engine.rows import COMMITTED
from kvdepot.server.engine.sessions import Session
from kvdepot.server.engine.space import Space
from kvdepot.server.guard import Guard, engine_guard

Answer = Callable[[AcquireReply], None]
Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Asked:
    """A call, and what the index says of its objects: node and head row each. Rows are filled in as they are made."""

    session: Session
    namespace: Namespace
    call: AcquireCall
    nodes: Numbers
    rows: Numbers


class PendingAcquire:
    """One of them; `answers` are owed."""

    def __init__(self, asked: Asked, answer: Answer, guard: Guard) -> None:
        self.asked = asked
        self._guard = guard
        self.answers = [answer]
        self.promotion: Promotion | None = None

    def answer(self, reply: AcquireReply) -> None:
        answers, self.answers = self.answers, []
        for answer in answers:
            self._guard.call("answer", answer, reply)


class PendingAcquires:
    """`grant` makes a lease of which everything is there into a granted one, and says the answer."""

    def __init__(self, space: Space, promotions: Promotions, grant: Callable[[ReadLease, Asked], AcquireReply]) -> None:
        self._space = space
        self._guard = engine_guard(space.counters.add)
        self._promotions = promotions
        self._grant = grant

    def begin(self, asked: Asked, visible: npt.NDArray[np.bool_], deadline: float, answer: Answer) -> None:
        """`visible`: which of its objects are in RAM. The caller has checked that the lent table has room."""
        missing = np.flatnonzero(~visible)
        sources = self._sources(asked, missing.tolist())
        if sources is None:
            answer(AcquireReply(AcquireOutcome.MISSING))
            return
        entries = np.empty(len(visible), np.uint32)
        entries[visible] = self._pin(asked, np.flatnonzero(visible))
        placed = False
        try:
            placed = self._place(asked, sources)
        finally:
            if not placed:
                self._space.give_back_many(entries[visible])
        if not placed:
            answer(self._no_room(asked, sources))
            return
        entries[missing] = self._pin(asked, missing)
        call = asked.call
        lease = ReadLease(asked.session, call.lease_id, entries, hash(call), None, deadline, call.request_id)
        lease.state = LeaseState.PENDING
        lease.pending = PendingAcquire(asked, answer, self._guard)
        asked.session.leases[lease.id] = lease
        asked.session.loads += 1
        promotion = lease.pending.promotion = Promotion(partial(self._ended, lease))
        self._promotions.start(promotion, list(dict.fromkeys(asked.rows[missing].tolist())))

    def cancel(self, lease: ReadLease, reason: str = "") -> None:
        """Its end has come first: nobody needs it any more, and no rank has seen it."""
        pending, lease.pending = lease.pending, None
        assert pending is not None and pending.promotion is not None
        self._promotions.cancel(pending.promotion)
        pending.answer(AcquireReply(AcquireOutcome.REFUSED, reason=reason))

    def _sources(self, asked: Asked, missing: list[int]) -> dict[int, LowerTier | None] | None:
        """Where to read each missing object from; None for what is being read already. None: one is nowhere."""
        sources: dict[int, LowerTier | None] = {}
        for at in missing:
            node, kind, row = int(asked.nodes[at]), asked.call.kinds[at], int(asked.rows[at])
            if node == NONE or kind not in asked.namespace.object_bytes:
                return None
            if row != NO_ROW and self._promotions.reading(row):
                sources[at] = None
                continue
            if row != NO_ROW and not self._space.rows.unverified(row):
                return None  # being stored
            source = self._promotions.source(node, kind)
            if source is None:
                return None
            sources[at] = source
        return sources

    def _place(self, asked: Asked, sources: dict[int, LowerTier | None]) -> bool:
        """Rows for everything that is to be read, or for nothing."""
        placed: list[int] = []
        try:
            whole = self._place_all(asked, sources, placed)
        except Exception:
            self._promotions.abandon(placed)
            raise
        if not whole:
            self._promotions.abandon(placed)
        return whole

    def _place_all(self, asked: Asked, sources: dict[int, LowerTier | None], placed: list[int]) -> bool:
        for at, source in sources.items():
            node, kind = int(asked.nodes[at]), asked.call.kinds[at]
            row = self._space.index.row(node, kind)  # made a moment ago if the call names the object twice
            if row != NO_ROW and self._space.rows.unverified(row):
                self._space.drop_row(node, kind)  # a tier's copy is verified as it is read
                row = NO_ROW
            if row == NO_ROW:
                assert source is not None
                row = self._promotions.place(asked.namespace, node, kind, source)
                if row == NO_ROW:
                    return False
                placed.append(row)
            asked.rows[at] = row
        return True

    def _no_room(self, asked: Asked, sources: dict[int, LowerTier | None]) -> AcquireReply:
        space, sizes = self._space, asked.namespace.object_bytes
        missing = {(int(asked.nodes[at]), asked.call.kinds[at]) for at, source in sources.items() if source is not None}
        size_bytes = sum(space.allocator.rounded(sizes[kind]) for _, kind in missing)
        refused = space.refused_by_quota(asked.namespace.slot, size_bytes, len(missing))
        if refused is None:
            return AcquireReply(AcquireOutcome.LATER)
        owner, later = refused
        return AcquireReply(AcquireOutcome.LATER if later else AcquireOutcome.REFUSED, reason=f"quota: of {owner}")

    def _pin(self, asked: Asked, at: npt.NDArray[np.intp]) -> npt.NDArray[np.uint32]:
        lent, call = self._space.lent, asked.call
        return lent.lend_many(call.lease_id, asked.session.slot, LentMode.READ, asked.rows[at], at.astype(np.uint32))

    def _ended(self, lease: ReadLease, whole: bool) -> None:
        pending, lease.pending = lease.pending, None
        assert pending is not None, "a cancelled acquire ends once"
        # What was dropped while it waited, as corrupt perhaps, has its bytes yet, and a new generation.
        if whole and (self._space.rows.states[pending.asked.rows] == COMMITTED).all():
            reply = self._guard.value("promotion", None, self._grant, lease, pending.asked)
            if reply is not None:
                pending.answer(reply)
                return
        if lease.state is not LeaseState.ENDED:
            lease.enter(LeaseEvent.END)
            lease.session.leases.pop(lease.id)  # not remembered: there is nothing that a repeat could not ask anew
            lease.session.loads -= 1
            self._space.give_back_many(lease.entries)
        pending.answer(AcquireReply(AcquireOutcome.MISSING))
