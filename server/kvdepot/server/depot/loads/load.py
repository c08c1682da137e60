"""Acquire and release: how objects leave the arena."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from kvdepot.core import limits
from kvdepot.core.arena import NO_ROW, LentMode
from kvdepot.core.calls import (
    EXTENT_WORDS,
    KEY_BYTES,
    AcquireCall,
    AcquireOutcome,
    AcquireReply,
)
from kvdepot.core.errors import InvalidArgument
from kvdepot.core.lifecycle import LeaseEvent
from kvdepot.core.limits import check_limit
from kvdepot.server.depot.loads.acquires import Answer, Asked, PendingAcquires
from kvdepot.server.depot.sessions.budgets import OVER_BUDGET, Budgets
from kvdepot.server.depot.sessions.session import ReadLease, Session
from kvdepot.server.depot.tiering.tiering import Tiering
from kvdepot.server.depot.tree.index import NONE
from kvdepot.server.depot.tree.namespaces import Namespace
from kvdepot.server.depot.tree.ram import RamTier
from kvdepot.server.depot.tree.rows import TornLinksError
from kvdepot.server.depot.tree.switches import REFUSALS, Refusal
from kvdepot.server.depot.tree.tree import Tree
from kvdepot.server.depot.types import DepotConfig

_Rows = npt.NDArray[np.int64]


class Loads:
    """Read leases of all sessions."""

    def __init__(
        self,
        tree: Tree,
        ram: RamTier,
        config: DepotConfig,
        arena_id: int,
        tiering: Tiering,
        unused: Callable[[ReadLease], None],
        budgets: Budgets,
    ) -> None:
        """Make the part that grants loads. `unused` is called with each lease that was granted and ends unused."""
        self._tree = tree
        self._ram = ram
        self._index = tree.index
        self._counters = tree.counters
        self._clock = tree.clock
        self._rows = ram.rows
        self._lent = ram.lent
        self._unused = unused
        self._budgets = budgets
        self._tiering = tiering
        self._pending = PendingAcquires(tree, ram, tiering.promotions, self._grant_pending)
        self._config = config
        self._arena_id = arena_id

    def configure(self, config: DepotConfig) -> None:
        self._config = config

    # Acquire

    def acquire(self, session: Session, namespace: Namespace, call: AcquireCall, answer: Answer) -> None:
        """Acquire all objects or none. The facade has dealt with repeats, tombstones and missing ranks.

        Call `answer` before this returns, unless something has to be read from a lower tier first.
        """
        count = len(call.kinds)
        check_limit("objects of one acquire", count, limits.OBJECTS_PER_LEASE_MAX)
        if not count or len(call.keys) != count * KEY_BYTES:
            raise InvalidArgument(f"keys has {len(call.keys)} bytes for {count} objects")
        if (
            session.left_loads + session.loads >= self._config.loads_in_flight
            or len(session.leases) >= limits.LEASES_PER_SESSION_MAX
            or count > self._lent.free_count
        ):
            answer(AcquireReply(AcquireOutcome.LATER))
            return
        nodes, rows = self._resolve(namespace, call)
        visible = self._rows.visible_many(rows)
        asked = Asked(session, namespace, call, nodes, rows)
        parts = None if visible.all() else self._pending.parts(asked, visible)
        if parts is None and not visible.all():
            answer(AcquireReply(AcquireOutcome.MISSING))
        elif not self._budgets.may_lend(session, namespace, call.kinds, nodes, rows):
            self._budgets.refused(session, "loads")
            answer(AcquireReply(AcquireOutcome.LATER, reason=OVER_BUDGET))
        elif parts is None:
            answer(self._grant(session, namespace, call, nodes, rows))
        else:
            self._pending.begin(asked, parts, self._deadline(), answer)

    def place_some(self) -> bool:
        """Make room, in one slice, for what large acquires wait for. Return whether there is more to do."""
        return self._pending.place_some()

    def _grant(
        self, session: Session, namespace: Namespace, call: AcquireCall, nodes: _Rows, rows: _Rows
    ) -> AcquireReply:
        packed = self._pack(namespace, rows)
        if packed is None:
            return AcquireReply(AcquireOutcome.REFUSED)
        extents, granted_bytes = packed
        entries = self._lent.lend_many(call.lease_id, session.slot, LentMode.READ, rows)
        reply = self._granted(call, extents, rows)
        lease = ReadLease(session, call.lease_id, entries, hash(call), reply, self._deadline(), call.request_id)
        session.leases[call.lease_id] = lease
        session.loads += 1
        self._count(lease, Asked(session, namespace, call, nodes, rows), granted_bytes)
        return reply

    def _grant_pending(self, lease: ReadLease, asked: Asked) -> AcquireReply:
        """Grant a lease whose objects are all in RAM and pinned. From now on its time runs as for any other lease."""
        session = lease.session
        lease.enter(LeaseEvent.GRANT)
        packed = self._pack(asked.namespace, asked.rows)
        if packed is None:
            self.release(lease)
            return AcquireReply(AcquireOutcome.REFUSED)
        extents, granted_bytes = packed
        lease.reply = self._granted(asked.call, extents, asked.rows)
        lease.deadline = self._deadline()
        session.leases[lease.id] = session.leases.pop(lease.id)  # in order of deadline
        self._count(lease, asked, granted_bytes)
        return lease.reply

    def _granted(self, call: AcquireCall, extents: bytes, rows: _Rows) -> AcquireReply:
        checksums = self._rows.packed_sums(rows) if call.checksums else b""
        return AcquireReply(AcquireOutcome.GRANTED, extents, self._arena_id, checksums=checksums)

    def _resolve(self, namespace: Namespace, call: AcquireCall) -> tuple[npt.NDArray[np.int64], _Rows]:
        """Return node and head row per object, NONE and NO_ROW where there is none."""
        nodes = self._index.find_many(namespace.slot, call.keys)
        kinds = np.frombuffer(call.kinds, np.uint8)
        rows = np.full(len(nodes), NO_ROW, np.int64)
        for kind in namespace.object_bytes:
            chosen = (kinds == kind) & (nodes != NONE)
            rows[chosen] = self._index.rows[kind - 1][nodes[chosen]]
        return nodes, rows

    def _pack(self, namespace: Namespace, rows: _Rows) -> tuple[bytes, int] | None:
        """Return the fragments of these objects, and their bytes. None: more than a reply holds, or damage.

        Offsets count from the start of the part. An engine is told of no extent in another one.
        """
        room = self._ram.rooms.of(namespace.slot)
        if room is None:
            return None
        table, heads = self._rows, rows
        indices = np.arange(len(rows), dtype=np.int64)
        if (table.nexts[rows] != NO_ROW).any():
            try:
                chains = [table.chain(row) for row in rows.tolist()]
            except TornLinksError:
                return None
            indices = np.repeat(indices, [len(chain) for chain in chains])
            rows = np.array([row for chain in chains for row in chain], np.int64)
        packed = np.empty((len(rows), EXTENT_WORDS), "<u8")
        packed[:, 0] = indices
        packed[:, 1] = rows
        offsets, lengths = table.offsets[rows], table.lengths[rows]
        if len(self._ram.rooms) > 1 and not (inside := room.contains(offsets, lengths)).all():
            table.torn.update(heads[indices[~inside]].tolist())
            return None
        packed[:, 2] = offsets - np.uint64(room.start)
        packed[:, 3] = lengths
        packed[:, 4] = table.generations[rows]
        if len(packed) > limits.FRAGMENTS_PER_REPLY_MAX:
            return None
        return packed.tobytes(), int(lengths.sum())

    def _count(self, lease: ReadLease, asked: Asked, granted_bytes: int) -> None:
        """Count a grant, as a use of the end node only: the end node keeps its ancestors (design.md#eviction).

        A grant that is released unused counts too (docs/adr/0041), because what was asked for may be asked for again.
        A grant counts as a hit only when it is over.
        """
        namespace, call = asked.namespace, asked.call
        self._counters.add("acquired_objects", len(asked.rows))
        self._counters.add("granted_read_bytes", granted_bytes)
        if call.no_use:
            return
        end = int(asked.nodes[int(self._rows.boundaries[asked.rows].argmax())])
        self._tree.hit(end)
        namespace.used_at = self._clock()
        self._tiering.used_again(asked.nodes, call.kinds, end)
        if namespace.spec is not None:
            lease.hit_tokens = call.kinds.count(namespace.path_kind) * namespace.spec.chunk_tokens

    def adopt(self, session: Session, lease_id: int, entries: npt.NDArray[np.uint32]) -> ReadLease:
        """Adopt a pin of an earlier run as a read lease."""
        lease = ReadLease(session, lease_id, entries, 0, AcquireReply(AcquireOutcome.REFUSED), self._deadline())
        sizes = map(self._ram.rounded_bytes, self._lent.rows[entries].tolist())
        session.object_bytes_max = max(session.object_bytes_max, *sizes)  # of namespaces that nobody registers again
        session.leases[lease_id] = lease
        session.loads += 1
        return lease

    def _deadline(self) -> float:
        return self._clock() + self._config.lease_deadline_seconds

    # Release

    def release(self, lease: ReadLease, reason: str = "", *, used: bool = False) -> None:
        """Release a lease: every rank is done with it. `used`: every rank has got what the lease was for.

        `reason` is reported to callers that still wait for the grant.
        """
        session = lease.session
        if lease.reply is not None and lease.reply.outcome is AcquireOutcome.GRANTED:  # in this run
            self._counters.add("released_loads.used" if used else "released_loads.unused")
            if used:
                self._counters.add("hit_tokens", lease.hit_tokens)
            else:
                self._unused(lease)
        lease.enter(LeaseEvent.END)
        if lease.pending is not None:
            self._pending.cancel(lease, reason)
        del session.leases[lease.id]
        session.ended_leases.add(lease.id)
        session.loads -= 1
        self._ram.end_loans(lease.entries)

    def switched_off(self, session: Session, refusal: Refusal) -> None:
        """Refuse what still waits to be granted in namespaces (ids) for which there is a reason now."""
        for lease in list(session.leases.values()):
            if isinstance(lease, ReadLease) and lease.pending and (why := refusal(lease.pending.asked.namespace.id)):
                self._counters.add(f"refused_loads.{why}")
                self.release(lease, REFUSALS[why])

    def expire(self, lease: ReadLease) -> None:
        """End the service of a lease. Its pins stay (I5, I6), unless no rank can have seen them."""
        if lease.pending is not None:
            self.release(lease)
            return
        lease.enter(LeaseEvent.EXPIRE)
        self._counters.add("expired_leases.read")
