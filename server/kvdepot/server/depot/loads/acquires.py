"""Acquires that are answered later, because a lower tier has some of their objects.

Such a lease exists from the call on. A repeat of the call waits for the same answer, and
whatever ends a lease ends it too. It pins at once the objects that RAM has, or that are
being written to RAM. Room for the rest is made in slices, between which others are answered.
Each slice is read as soon as it has room. No rank has seen the lease yet, so its end
releases everything.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt
from kvdepot.core.arena import NO_ROW, LentMode
from kvdepot.core.calls import KEY_BYTES, AcquireCall, AcquireOutcome, AcquireReply
from kvdepot.core.lifecycle import LeaseEvent, LeaseState
from kvdepot.server.depot.sessions.session import ReadLease, Session, Wanted
from kvdepot.server.depot.tiering.promotions import Promotion, Promotions
from kvdepot.server.depot.tree.index import NONE, Index
from kvdepot.server.depot.tree.namespaces import Namespace
from kvdepot.server.depot.tree.ram import RamTier
from kvdepot.server.depot.tree.rows import COMMITTED
from kvdepot.server.depot.tree.tree import Tree
from kvdepot.server.platform.guard import Guard, engine_guard

Answer = Callable[[AcquireReply], None]
Numbers = npt.NDArray[np.int64]
PLACED_AT_ONCE: Final = 40
"""Objects for which room is made before others are answered. Each may evict others: 5 to 17 ms."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A call, and what the index says of its objects: node and head row each. Rows are filled in as they are made."""

    session: Session
    namespace: Namespace
    call: AcquireCall
    nodes: Numbers
    rows: Numbers


@dataclass(frozen=True, slots=True)
class Parts:
    """Which objects of an acquire RAM has or is about to have, and which a lower tier has. By index in the call."""

    there: npt.NDArray[np.intp]
    coming: list[int]  # rows of those of them that are being read already
    wanted: npt.NDArray[np.intp]


class PendingAcquire:
    """One acquire that is answered later. `answers` are the callers that wait for its answer."""

    def __init__(
        self, asked: Asked, answer: Answer, wanted: Numbers, sizes: Numbers, promotion: Promotion, index: Index,
        guard: Guard,
    ) -> None:  # fmt: skip
        """Make a pending acquire. `wanted`: which of its objects have no room in RAM yet; `sizes`: what each takes."""
        self.asked = asked
        self._sizes = sizes
        self._guard = guard
        self.answers = [answer]
        self.wanted = wanted.tolist()
        self._nodes, self._kinds = asked.nodes[wanted], np.frombuffer(asked.call.kinds, np.uint8)[wanted]
        self._index = index
        self.placed = 0  # of these
        self.promotion = promotion
        self.made: list[int] = []  # rows of the slice at hand that are not being read yet
        self.lent: list[int] = []  # its lent entries
        asked.session.awaited_bytes += int(sizes.sum())
        asked.session.awaited_objects += len(sizes)

    def place(self, count: int) -> None:
        """Note that so many more of the objects wanted are lent now, or will not be."""
        session, placed = self.asked.session, self.placed + count
        session.awaited_bytes -= int(self._sizes[self.placed : placed].sum())
        session.awaited_objects -= count
        self.placed = placed

    @property
    def awaited(self) -> Wanted:
        """Return the objects that it has no loan of yet. Another load may have made room for some of them."""
        nodes, kinds = self._nodes[self.placed :], self._kinds[self.placed :]
        rows = np.full(len(nodes), NO_ROW, np.int64)
        for kind in set(kinds.tolist()):
            rows[kinds == kind] = self._index.rows[kind - 1][nodes[kinds == kind]]
        return Wanted(nodes, kinds, rows, self._sizes[self.placed :])

    def end(self) -> None:
        """Note that the acquire waits no more."""
        self.place(len(self.wanted) - self.placed)

    def answer(self, reply: AcquireReply) -> None:
        answers, self.answers = self.answers, []
        for answer in answers:
            self._guard.call("answer", answer, reply)


class PendingAcquires:
    """`grant` makes a lease of which everything is there into a granted one, and says the answer."""

    def __init__(
        self, tree: Tree, ram: RamTier, promotions: Promotions, grant: Callable[[ReadLease, Asked], AcquireReply]
    ) -> None:
        self._tree = tree
        self._ram = ram
        self._index = tree.index
        self._namespaces = tree.namespaces
        self._rows = ram.rows
        self._lent = ram.lent
        self._guard = engine_guard(tree.counters.add)
        self._promotions = promotions
        self._grant = grant
        self._placing: deque[tuple[ReadLease, PendingAcquire]] = deque()

    def parts(self, asked: Asked, visible: npt.NDArray[np.bool_]) -> Parts | None:
        """Return what has to be done for an acquire, or None if an object is missing. `visible`: which are in RAM."""
        rows, table = asked.rows, self._rows
        coming = [at for at in np.flatnonzero(~visible & (rows != NO_ROW)).tolist() if not table.unverified(rows[at])]
        if not all(self._promotions.reading(int(rows[at])) for at in coming):
            return None  # being stored
        there = visible.copy()
        there[coming] = True
        wanted = np.flatnonzero(~there)
        return Parts(np.flatnonzero(there), rows[coming].tolist(), wanted) if self._have(asked, wanted) else None

    def begin(self, asked: Asked, parts: Parts, deadline: float, answer: Answer) -> None:
        """Begin a pending acquire. The caller has checked that the lent table has room."""
        call, session = asked.call, asked.session
        entries = self._pin(asked, parts.there)
        lease = ReadLease(session, call.lease_id, entries, hash(call), None, deadline, call.request_id)
        lease.state = LeaseState.PENDING
        promotion = Promotion(partial(self._ended, lease), open=True)
        each = [self._ram.rounded(asked.namespace.object_bytes[call.kinds[at]]) for at in parts.wanted.tolist()]
        sizes = np.array(each, np.int64)
        pending = lease.pending = PendingAcquire(
            asked, answer, parts.wanted, sizes, promotion, self._index, self._guard
        )
        session.leases[lease.id] = lease
        session.loads += 1
        self._promotions.start(promotion, parts.coming)
        self._go_on(lease, pending)

    def place_some(self) -> bool:
        """Make room for a slice of what one of them wants. Return whether any wants more. Never raise."""
        if self._placing:
            self._guard.call("promotion", self._go_on, *self._placing.popleft())
        return bool(self._placing)

    def _go_on(self, lease: ReadLease, pending: PendingAcquire) -> None:
        more = self._guard.value("promotion", None, self._place, lease, pending)
        if more:
            self._placing.append((lease, pending))
        elif more is None and lease.pending is pending:
            self._give_up(lease, AcquireOutcome.MISSING)

    def cancel(self, lease: ReadLease, reason: str = "") -> None:
        """Cancel a pending acquire whose lease ends first. No caller needs it any more, and no rank has seen it."""
        pending = _take_pending(lease)
        self._promotions.cancel(pending.promotion)
        pending.answer(AcquireReply(AcquireOutcome.REFUSED, reason=reason))

    def _have(self, asked: Asked, wanted: npt.NDArray[np.intp]) -> bool:
        """Return whether some tier can be read for each of these."""
        nodes, kinds = asked.nodes[wanted], np.frombuffer(asked.call.kinds, np.uint8)[wanted]
        if (nodes == NONE).any() or not set(kinds.tolist()) <= asked.namespace.object_bytes.keys():
            return False
        for kind in set(kinds.tolist()):
            having = np.zeros(int((kinds == kind).sum()), np.bool_)
            for _, given in self._promotions.shares(nodes[kinds == kind], kind):
                having |= given
            if not having.all():
                return False
        return True

    def _place(self, lease: ReadLease, pending: PendingAcquire) -> bool:
        """Place a slice of the objects that the lease wants. Return whether it wants more."""
        if lease.pending is not pending:
            return False  # it has ended between two slices, or what it waits for failed
        asked, part = pending.asked, pending.wanted[pending.placed : pending.placed + PLACED_AT_ONCE]
        if len(part) > self._lent.free_count:
            self._give_up(lease, AcquireOutcome.LATER)
            return False
        for at in part:
            row, refusal = self._row(asked, at, pending.made)
            if refusal is not None:
                self._give_up(lease, refusal)
                return False
            asked.rows[at] = row
            # At once: room for the next one is made of what is not pinned.
            pending.lent.append(self._lent.lend(lease.id, lease.session.slot, LentMode.READ, row, at))
        pending.place(len(part))
        _take_over(lease, pending)
        pending.made.clear()
        rows = asked.rows[part].tolist()
        self._promotions.start(pending.promotion, [row for row in rows if self._promotions.reading(row)])
        if lease.pending is not pending:
            return False  # a tier has answered at once
        if pending.placed < len(pending.wanted):
            return True
        pending.promotion.close()
        return False

    def _row(self, asked: Asked, at: int, made: list[int]) -> tuple[int, AcquireOutcome | None]:
        """Return the object's row, or a row made for the object (which is added to `made`), or why there is none.

        The object is looked up again. Since the call, the number of its node may have become another node's.
        Others may have stored the object or asked for it.
        """
        namespace, kind = asked.namespace, asked.call.kinds[at]
        node = self._index.find(namespace.slot, asked.call.keys[KEY_BYTES * at : KEY_BYTES * (at + 1)])
        if node != asked.nodes[at] or self._namespaces.by_slot.get(namespace.slot) is not namespace:
            return NO_ROW, AcquireOutcome.MISSING
        row = self._index.row(node, kind)
        if row != NO_ROW and self._rows.unverified(row):
            self._tree.drop_row(node, kind)  # a tier's copy is verified as it is read
        elif row != NO_ROW:
            there = self._rows.visible(row) or self._promotions.reading(row)
            return row, None if there else AcquireOutcome.MISSING  # it is being stored
        source = self._promotions.source(node, kind)
        if source is None:
            return NO_ROW, AcquireOutcome.MISSING
        row = self._promotions.place(namespace, node, kind, source)
        if row == NO_ROW:
            return NO_ROW, AcquireOutcome.LATER
        made.append(row)
        return row, None

    def _give_up(self, lease: ReadLease, outcome: AcquireOutcome) -> None:
        """End an acquire whose remaining objects find no room, or are in no tier any more. Answer with the outcome."""
        pending = _take_pending(lease)
        self._guard.each(
            "promotion", partial(self._promotions.abandon, pending.made),
            partial(self._promotions.cancel, pending.promotion), partial(_take_over, lease, pending),
            partial(self._forget, lease),
        )  # fmt: skip
        reply = AcquireReply(outcome)
        if outcome is AcquireOutcome.LATER:
            reply = self._guard.value("promotion", reply, self._no_room, pending)
        pending.answer(reply)

    def _forget(self, lease: ReadLease) -> None:
        """End the lease without remembering it. A repeat of the call may ask for the same again."""
        lease.enter(LeaseEvent.END)
        del lease.session.leases[lease.id]
        lease.session.loads -= 1
        self._ram.end_loans(lease.entries)

    def _no_room(self, pending: PendingAcquire) -> AcquireReply:
        asked = pending.asked
        sizes = asked.namespace.object_bytes
        wanted = {(int(asked.nodes[at]), asked.call.kinds[at]) for at in pending.wanted}
        missing = [(node, kind) for node, kind in wanted if self._index.row(node, kind) == NO_ROW]
        size_bytes = sum(self._ram.rounded(sizes[kind]) for _, kind in missing)
        refused = self._ram.refused_by_quota(asked.namespace.slot, size_bytes, len(missing))
        if refused is None:
            self._ram.note_short(asked.namespace, size_bytes)
            return AcquireReply(AcquireOutcome.LATER)
        owner, later = refused
        return AcquireReply(AcquireOutcome.LATER if later else AcquireOutcome.REFUSED, reason=f"quota: of {owner}")

    def _pin(self, asked: Asked, at: npt.NDArray[np.intp]) -> npt.NDArray[np.uint32]:
        lent, call = self._lent, asked.call
        return lent.lend_many(call.lease_id, asked.session.slot, LentMode.READ, asked.rows[at], at.astype(np.uint32))

    def _ended(self, lease: ReadLease, whole: bool) -> None:
        pending = _take_pending(lease)
        # What was dropped while it waited, as corrupt perhaps, has its bytes yet, and a new generation.
        if whole and (self._rows.states[pending.asked.rows] == COMMITTED).all():
            reply = self._guard.value("promotion", None, self._grant, lease, pending.asked)
            if reply is not None:
                pending.answer(reply)
                return
        if lease.state is not LeaseState.ENDED:
            self._forget(lease)
        pending.answer(AcquireReply(AcquireOutcome.MISSING))


def _take_pending(lease: ReadLease) -> PendingAcquire:
    """Take the pending acquire from its lease: it ends now, and ends once."""
    pending, lease.pending = lease.pending, None
    assert isinstance(pending, PendingAcquire)
    pending.end()
    return pending


def _take_over(lease: ReadLease, pending: PendingAcquire) -> None:
    """Move the loans of the current slice to the lease."""
    lease.entries = np.concatenate([lease.entries, np.array(pending.lent, np.uint32)])
    pending.lent.clear()
