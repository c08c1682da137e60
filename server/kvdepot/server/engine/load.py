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
from kvdepot.server.engine.acquires import Answer, Asked, PendingAcquires
from kvdepot.server.engine.index import NONE
from kvdepot.server.engine.leases import ReadLease
from kvdepot.server.engine.namespaces import Namespace
from kvdepot.server.engine.sessions import Session
from kvdepot.server.engine.space import Space
from kvdepot.server.engine.switches import REFUSALS, Refusal
from kvdepot.server.engine.tiering import Tiering
from kvdepot.server.engine.types import EngineConfig

_Rows = npt.NDArray[np.int64]


class Loads:
    """Read leases of all sessions."""

    def __init__(
        self, space: Space, config: EngineConfig, arena_id: int, tiering: Tiering, unused: Callable[[ReadLease], None]
    ) -> None:
        """`unused` is told of what was granted and has ended without having been of use."""
        self._space = space
        self._unused = unused
        self._tiering = tiering
        self._pending = PendingAcquires(space, tiering.promotions, self._grant_pending)
        self._config = config
        self._arena_id = arena_id

    def configure(self, config: EngineConfig) -> None:
        self._config = config

    # Acquire

    def acquire(self, session: Session, namespace: Namespace, call: AcquireCall, answer: Answer) -> None:
        """All or nothing; the facade has dealt with repeats, tombstones and missing ranks.

        Answered before it returns, unless something has to be read from a lower tier first.
        """
        count = len(call.kinds)
        check_limit("objects of one acquire", count, limits.OBJECTS_PER_LEASE_MAX)
        if not count or len(call.keys) != count * KEY_BYTES:
            raise InvalidArgument(f"keys has {len(call.keys)} bytes for {count} objects")
        if (
            session.left_loads + session.loads >= self._config.loads_in_flight
            or len(session.leases) >= limits.LEASES_PER_SESSION_MAX
            or count > self._space.lent.free_count
        ):
            answer(AcquireReply(AcquireOutcome.LATER))
            return
        nodes, rows = self._resolve(namespace, call)
        visible = self._space.rows.visible_many(rows)
        if visible.all():
            answer(self._grant(session, namespace, call, nodes, rows))
        else:
            self._pending.begin(Asked(session, namespace, call, nodes, rows), visible, self._deadline(), answer)

    def place_some(self) -> bool:
        """Go on with making room for what large acquires wait for; whether there is more to do."""
        return self._pending.place_some()

    def _grant(
        self, session: Session, namespace: Namespace, call: AcquireCall, nodes: _Rows, rows: _Rows
    ) -> AcquireReply:
        extents, granted_bytes = self._pack(rows)
        if len(extents) > limits.FRAGMENTS_PER_REPLY_MAX * EXTENT_WORDS * 8:
            return AcquireReply(AcquireOutcome.REFUSED)  # in more pieces than a reply holds
        entries = self._space.lent.lend_many(call.lease_id, session.slot, LentMode.READ, rows)
        reply = AcquireReply(AcquireOutcome.GRANTED, extents, self._arena_id)
        lease = ReadLease(session, call.lease_id, entries, hash(call), reply, self._deadline(), call.request_id)
        session.leases[call.lease_id] = lease
        session.loads += 1
        self._count(lease, Asked(session, namespace, call, nodes, rows), granted_bytes)
        return reply

    def _grant_pending(self, lease: ReadLease, asked: Asked) -> AcquireReply:
        """Everything of it is in RAM and pinned: from now on its time runs as any other lease's."""
        session = lease.session
        lease.enter(LeaseEvent.GRANT)
        extents, granted_bytes = self._pack(asked.rows)
        if len(extents) > limits.FRAGMENTS_PER_REPLY_MAX * EXTENT_WORDS * 8:
            self.release(lease)
            return AcquireReply(AcquireOutcome.REFUSED)
        lease.reply = AcquireReply(AcquireOutcome.GRANTED, extents, self._arena_id)
        lease.deadline = self._deadline()
        session.leases[lease.id] = session.leases.pop(lease.id)  # in order of deadline
        self._count(lease, asked, granted_bytes)
        return lease.reply

    def _resolve(self, namespace: Namespace, call: AcquireCall) -> tuple[npt.NDArray[np.int64], _Rows]:
        """Node and head row per object, NONE and NO_ROW where there is none."""
        nodes = self._space.index.find_many(namespace.slot, call.keys)
        kinds = np.frombuffer(call.kinds, np.uint8)
        rows = np.full(len(nodes), NO_ROW, np.int64)
        for kind in namespace.object_bytes:
            chosen = (kinds == kind) & (nodes != NONE)
            rows[chosen] = self._space.index.rows[kind - 1][nodes[chosen]]
        return nodes, rows

    def _pack(self, rows: _Rows) -> tuple[bytes, int]:
        """Fragments of these objects, and their bytes."""
        table = self._space.rows
        indices = np.arange(len(rows), dtype=np.int64)
        if (table.nexts[rows] != NO_ROW).any():
            chains = [table.chain(row) for row in rows.tolist()]
            indices = np.repeat(indices, [len(chain) for chain in chains])
            rows = np.array([row for chain in chains for row in chain], np.int64)
        packed = np.empty((len(rows), EXTENT_WORDS), "<u8")
        packed[:, 0] = indices
        packed[:, 1] = rows
        packed[:, 2] = table.offsets[rows]
        lengths = table.lengths[rows]
        packed[:, 3] = lengths
        packed[:, 4] = table.generations[rows]
        return packed.tobytes(), int(lengths.sum())

    def _count(self, lease: ReadLease, asked: Asked, granted_bytes: int) -> None:
        """A grant counts as a use of the end node only: its ancestors are kept by it (DESIGN 5).

        Also where it is given back unused (docs/adr/0041): what was asked for may be asked for again. A hit it is only
        when it is over.
        """
        space, namespace, call = self._space, asked.namespace, asked.call
        space.counters.add("acquired_objects", len(asked.rows))
        space.counters.add("granted_read_bytes", granted_bytes)
        if call.no_use:
            return
        end = int(asked.nodes[int(space.rows.boundaries[asked.rows].argmax())])
        space.hit(end)
        namespace.used_at = space.clock()
        self._tiering.used_again(asked.nodes, call.kinds)
        if namespace.spec is not None:
            lease.hit_tokens = call.kinds.count(namespace.path_kind) * namespace.spec.chunk_tokens

    def adopt(self, session: Session, lease_id: int, entries: npt.NDArray[np.uint32]) -> ReadLease:
        """A pin of an earlier run."""
        lease = ReadLease(session, lease_id, entries, 0, AcquireReply(AcquireOutcome.REFUSED), self._deadline())
        session.leases[lease_id] = lease
        session.loads += 1
        return lease

    def _deadline(self) -> float:
        return self._space.clock() + self._config.lease_deadline_seconds

    # Release

    def release(self, lease: ReadLease, reason: str = "", *, used: bool = False) -> None:
        """Every rank is done with it; `used`: and has got what it was for.

        `reason` is told to who still waits for it to be granted.
        """
        session = lease.session
        if lease.reply is not None and lease.reply.outcome is AcquireOutcome.GRANTED:  # in this run
            self._space.counters.add("released_loads.used" if used else "released_loads.unused")
            if used:
                self._space.counters.add("hit_tokens", lease.hit_tokens)
            else:
                self._unused(lease)
        lease.enter(LeaseEvent.END)
        if lease.pending is not None:
            self._pending.cancel(lease, reason)
        del session.leases[lease.id]
        session.ended_leases.add(lease.id)
        session.loads -= 1
        self._space.give_back_many(lease.entries)

    def switched_off(self, session: Session, refusal: Refusal) -> None:
        """Refuse what still waits to be granted in namespaces (ids) for which there is a reason now."""
        for lease in list(session.leases.values()):
            if isinstance(lease, ReadLease) and lease.pending and (why := refusal(lease.pending.asked.namespace.id)):
                self._space.counters.add(f"refused_loads.{why}")
                self.release(lease, REFUSALS[why])

    def expire(self, lease: ReadLease) -> None:
        """Service ends; the pins stay (I5, I6), unless no rank can have seen them."""
        if lease.pending is not None:
            self.release(lease)
            return
        lease.enter(LeaseEvent.EXPIRE)
        self._space.counters.add("expired_leases.read")
