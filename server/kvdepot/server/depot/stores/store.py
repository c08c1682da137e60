"""Reserve, commit, abandon: how objects come into the arena."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final

import numpy as np
from kvdepot.core import limits
from kvdepot.core.arena import NO_ROW, LentMode
from kvdepot.core.calls import (
    EXTENT_WORDS,
    KEY_BYTES,
    ROOT_KEY,
    CommitItem,
    CommitOutcome,
    ReserveCall,
    ReserveOutcome,
    ReserveReply,
)
from kvdepot.core.control import Switch
from kvdepot.core.errors import InvalidArgument
from kvdepot.core.lifecycle import LeaseEvent
from kvdepot.core.limits import check_limit
from kvdepot.core.misses import MissReason
from kvdepot.server.depot.sessions.budgets import Budgets
from kvdepot.server.depot.sessions.requests import Requests
from kvdepot.server.depot.sessions.session import NO_ENTRY, OPEN, Session, WriteLease
from kvdepot.server.depot.stores.audits import Audits
from kvdepot.server.depot.stores.credit import Credit
from kvdepot.server.depot.tiering.tiering import Tiering
from kvdepot.server.depot.tree.index import NONE
from kvdepot.server.depot.tree.namespaces import Namespace
from kvdepot.server.depot.tree.ram import RamTier
from kvdepot.server.depot.tree.rows import RESERVED
from kvdepot.server.depot.tree.switches import Switches
from kvdepot.server.depot.tree.tree import Tree
from kvdepot.server.depot.types import DepotConfig

_HERE_WHEN_GRANTED: Final = (ReserveOutcome.GRANTED, ReserveOutcome.PRESENT, ReserveOutcome.PENDING)

_FRAGMENT_WORDS_MAX: Final = limits.FRAGMENTS_PER_REPLY_MAX // 2 * EXTENT_WORDS
"""Once a reply has so many words nothing more is granted in it: what the last object adds still fits."""
_LENGTH: Final = 3
"""The place of the length among the words of an extent."""


@dataclass(slots=True)
class _Asked:
    """One object of a reservation."""

    index: int
    key: bytes
    parent: bytes
    kind: int
    boundary: int


def parsed(call: ReserveCall, namespace: Namespace) -> list[_Asked]:
    """Return the first objects of a call, RESERVED_PER_CALL_MAX at most.

    Raise InvalidArgument or LimitExceeded when the whole call cannot be right in any state.
    """
    count = len(call.kinds)
    check_limit("objects of one reservation", count, limits.OBJECTS_PER_LEASE_MAX)
    for name, packed, width in (
        ("keys", call.keys, KEY_BYTES), ("parents", call.parents, KEY_BYTES), ("boundaries", call.boundaries, 4),
    ):  # fmt: skip
        if len(packed) != count * width:
            raise InvalidArgument(f"{name} has {len(packed)} bytes, {count} objects need {count * width}")
    foreign = set(call.kinds) - namespace.object_bytes.keys()
    if foreign:
        raise InvalidArgument(f"the namespace has no objects of kind {min(foreign)}")
    chunk = namespace.spec.chunk_tokens if namespace.spec else 1
    boundaries = np.frombuffer(call.boundaries, "<u4")
    bad = boundaries[(boundaries == 0) | (boundaries % chunk != 0)]
    if len(bad):
        raise InvalidArgument(f"{bad[0]} is no boundary: chunks have {chunk} tokens")
    keys, parents = call.keys, call.parents
    return [
        _Asked(i, keys[16 * i : 16 * i + 16], parents[16 * i : 16 * i + 16], call.kinds[i], int(boundaries[i]))
        for i in range(min(count, limits.RESERVED_PER_CALL_MAX))
    ]


class Stores:
    """Write leases of all sessions."""

    def __init__(
        self,
        tree: Tree,
        ram: RamTier,
        requests: Requests,
        config: DepotConfig,
        arena_id: int,
        tiering: Tiering,
        switches: Switches,
        audits: Audits,
        budgets: Budgets,
    ) -> None:
        self._tree = tree
        self._ram = ram
        self._index = tree.index
        self._namespaces = tree.namespaces
        self._lost_keys = tree.lost_keys
        self._counters = tree.counters
        self._clock = tree.clock
        self._rows = ram.rows
        self._lent = ram.lent
        self._audits = audits
        self._switches = switches
        self._tiering = tiering
        self._requests = requests
        self._config = config
        self._arena_id = arena_id
        self._credit = Credit(ram, budgets, config)
        self._reason = ""  # of the last refusal in the call at hand

    def configure(self, config: DepotConfig) -> None:
        self._config = config
        self._credit.configure(config)

    # Reserve

    def reserve(self, session: Session, namespace: Namespace, call: ReserveCall) -> ReserveReply:
        """Reserve in a new lease. The facade has dealt with repeats, tombstones and missing ranks."""
        asked = parsed(call, namespace)
        lease = WriteLease(session, call.lease_id, len(asked), hash(call), self._deadline())
        try:
            return self._reserve_all(namespace, lease, call, asked)
        except Exception:
            self.drop(lease)  # no call names it: what it has would be lent, and reserved, until the session ends
            session.leases.pop(lease.id, None)
            raise

    def _reserve_all(
        self, namespace: Namespace, lease: WriteLease, call: ReserveCall, asked: list[_Asked]
    ) -> ReserveReply:
        session, count = lease.session, len(call.kinds)
        outcomes = bytearray([ReserveOutcome.LATER]) * count
        refused: dict[bytes, int] = {}  # keys of this call that got no node: what descends from them shares the answer
        fragments: list[int] = []
        self._reason = ""
        self._credit.begin_call(session, len(asked))
        deepest: _Asked | None = None  # of what is there
        for one in asked:
            outcome = self._reserve_one(namespace, lease, one, refused, fragments)
            outcomes[one.index] = outcome
            if self._here(lease, one, outcome) and (deepest is None or one.boundary > deepest.boundary):
                deepest = one
            if outcome in _HERE_WHEN_GRANTED:
                if call.request_id:
                    self._requests.note(session.slot, call.request_id, namespace, one.key, one.parent)
            else:
                refused.setdefault(one.key, outcome)
                self._lost_keys.note(namespace.id, one.key, MissReason.NO_GRANT)
        for outcome, objects in Counter(outcomes).items():
            self._counters.add(f"reserved_objects.{ReserveOutcome(outcome).name.lower()}", objects)
        self._counters.add("granted_write_bytes", sum(fragments[_LENGTH::EXTENT_WORDS]))
        if deepest is not None:
            self._count_use(namespace, deepest)
        reply = ReserveReply(bytes(outcomes), np.array(fragments, "<u8").tobytes(), self._arena_id, self._reason)
        if lease.open:
            lease.reply = reply
            session.leases[lease.id] = lease
        return reply

    def refuse(self, namespace: Namespace, call: ReserveCall, reason: MissReason) -> None:
        """Refuse a call because of an operator. Note the reason for the first chunks of the call, for later lookups."""
        for one in parsed(call, namespace):
            self._lost_keys.note(namespace.id, one.key, MissReason.STORES_OFF)
        self._counters.add(f"reserved_objects.{ReserveOutcome.REFUSED.name.lower()}", len(call.kinds))
        self._counters.add(f"refused_stores.{reason}", len(call.kinds))

    def _count_use(self, namespace: Namespace, one: _Asked) -> None:
        """Count a path that is offered again as used where it ends (design.md#eviction).

        The chunks before its end were only passed.
        """
        node = self._index.find(namespace.slot, one.key)
        if node != NONE:
            self._tree.hit(node)

    def _reserve_one(
        self, namespace: Namespace, lease: WriteLease, one: _Asked, refused: dict[bytes, int], fragments: list[int]
    ) -> int:
        node = self._index.find(namespace.slot, one.key)
        row = self._index.row(node, one.kind) if node != NONE else NO_ROW
        if row != NO_ROW:
            if not self._rows.visible(row):
                return ReserveOutcome.PENDING  # being written, or adopted and being verified
            self._tiering.used_again(np.array([node]), bytes([one.kind]), node)
            return self._audited(namespace, lease, one, row, fragments)
        if node != NONE and self._tiering.promotions.source(node, one.kind) is not None:
            return ReserveOutcome.PRESENT
        above = NONE
        if one.parent != ROOT_KEY:
            above = self._index.find(namespace.slot, one.parent)
            if above == NONE:
                return refused.get(one.parent, ReserveOutcome.NO_PARENT)
        if not self._fits_tree(namespace, node, above, one):
            self._reason = f"boundary {one.boundary} or the parent contradicts what is known of the chunk"
            return ReserveOutcome.REFUSED
        if len(fragments) >= _FRAGMENT_WORDS_MAX:
            return ReserveOutcome.LATER
        refusal = self._credit.refusal(lease.session, namespace, one.kind)
        if refusal is not None:
            self._reason = refusal.reason or self._reason
            return refusal.outcome
        return self._grant(namespace, lease, one, node, above, fragments)

    def _audited(self, namespace: Namespace, lease: WriteLease, one: _Asked, row: int, fragments: list[int]) -> int:
        """Handle an object that RAM has. For a sample, ask the engine nevertheless to write what it has."""
        full = len(fragments) >= _FRAGMENT_WORDS_MAX or len(lease.session.leases) >= limits.LEASES_PER_SESSION_MAX
        scratch = NO_ROW if full else self._audits.scratch(namespace, row)
        if scratch == NO_ROW:
            return ReserveOutcome.PRESENT
        self._lend(lease, one.index, scratch)
        self._rows.publish_scratch(scratch)
        lease.open += 1  # without credit: the audit has bounds of its own
        self._name(one.index, scratch, fragments)
        return ReserveOutcome.GRANTED

    def _here(self, lease: WriteLease, one: _Asked, outcome: int) -> bool:
        """Return whether the object was there before, audited or not."""
        if outcome != ReserveOutcome.GRANTED:
            return outcome == ReserveOutcome.PRESENT
        return self._audits.writing(self._lent.row_of(lease.entries[one.index]))

    def _fits_tree(self, namespace: Namespace, node: int, above: int, one: _Asked) -> bool:
        """Return whether the object fits: a chunk has one parent, and lies one chunk after it."""
        if node != NONE and self._index.parent(node) != above:
            return False
        chunk = namespace.spec.chunk_tokens if namespace.spec else 0
        before = self._index.boundary(above) if above != NONE else 0
        return one.boundary == before + chunk and one.key != ROOT_KEY

    def _grant(
        self, namespace: Namespace, lease: WriteLease, one: _Asked, node: int, above: int, fragments: list[int]
    ) -> int:
        held, size_bytes = node != NONE, namespace.object_bytes[one.kind]
        if not held:
            room = self._ram.rooms.of(namespace.slot)
            if room is None or (not room.free_rows and not self._ram.evict_one("room", room)):
                return self._no_room(namespace, self._ram.rounded(size_bytes))
            if self._tree.full:
                self._tree.make_room_for_nodes(1)
                if self._tree.full:
                    return ReserveOutcome.NO_ROOM
            # Eviction may have taken the parent, had it no other child: look again.
            if one.parent != ROOT_KEY and self._index.find(namespace.slot, one.parent) != above:
                return ReserveOutcome.NO_PARENT
            node = self._tree.add_node(namespace, one.key, above, one.boundary)
        row = self._ram.place(
            namespace, node, kind=one.kind, key=one.key, parent=one.parent, boundary=one.boundary,
            size_bytes=size_bytes,
        )  # fmt: skip
        if row == NO_ROW:
            if held:
                self._tree.refresh_node(node)
            else:
                self._tree.drop_subtree(node)
            return self._no_room(namespace, self._ram.rounded(size_bytes))
        self._lend(lease, one.index, row)
        self._rows.publish_reserved(row)
        self._credit.charge(lease, one.index, one.kind, row)
        self._name(one.index, row, fragments)
        return ReserveOutcome.GRANTED

    def _lend(self, lease: WriteLease, index: int, row: int) -> None:
        lent = self._lent
        lease.entries[index] = lent.lend(lease.id, lease.session.slot, LentMode.WRITE, row, index)

    def _name(self, index: int, row: int, fragments: list[int]) -> None:
        """Add the extents of an object to the fragments of the reply. Their offsets count from the part's start."""
        rows, start = self._rows, self._ram.rooms.at(self._rows.offset[row]).start
        for at in rows.chain(row):
            fragments += (index, at, rows.offset[at] - start, rows.length[at], rows.generation[at])

    def _no_room(self, namespace: Namespace, size_bytes: int) -> ReserveOutcome:
        refused = self._ram.refused_by_quota(namespace.slot, size_bytes)
        if refused is None:
            return ReserveOutcome.LATER if self._ram.note_short(namespace, size_bytes) else ReserveOutcome.NO_ROOM
        owner, later = refused
        self._reason = f"quota: {owner} has {owner.used_bytes} of {owner.capacity_bytes} bytes in RAM"
        return ReserveOutcome.LATER if later else ReserveOutcome.NO_ROOM

    def adopt(self, session: Session, lease_id: int, entries: dict[int, int]) -> WriteLease:
        """Adopt a lease of an earlier run, from its lent entries by object index.

        Only a stray write leaves an index that no call has. Its entry gets another index that no call has, because
        what the entry lends may yet be written to.
        """
        most = limits.OBJECTS_PER_LEASE_MAX
        strays = [entry for index, entry in entries.items() if index >= most]
        entries = {index: entry for index, entry in entries.items() if index < most} | dict(enumerate(strays, most))
        lease = WriteLease(session, lease_id, max(entries) + 1, 0, self._deadline())
        for index, entry in entries.items():
            row = self._lent.row_of(entry)
            lease.entries[index] = entry
            self._credit.charge(lease, index, self._rows.kind[row], row)
        session.leases[lease_id] = lease
        return lease

    def _deadline(self) -> float:
        return self._clock() + self._config.lease_deadline_seconds

    # Commit

    def commit(self, session: Session, item: CommitItem) -> bytes:
        indices = np.frombuffer(item.indices, "<u4").tolist()
        lease = session.leases.get(item.lease_id)
        if not isinstance(lease, WriteLease):
            outcomes = bytes(session.ended_leases.outcome(item.lease_id, index) for index in indices)
        else:
            outcomes = bytes(lease.outcome(index) or self._commit_one(lease, index) for index in indices)
            self._end_if_done(lease)
        for outcome, objects in Counter(outcomes).items():
            self._counters.add(f"committed_objects.{CommitOutcome(outcome).name.lower()}", objects)
        return outcomes

    def _commit_one(self, lease: WriteLease, index: int) -> int:
        row = self._lent.row_of(lease.entries[index])
        if not lease.held:
            return self._end_loan(lease, index, CommitOutcome.EXPIRED)
        namespace_id = self._namespaces.by_slot[self._rows.namespace[row]].id
        if self._switches.off(Switch.STORES, namespace_id):
            key = self._rows.key(row)
            outcome = self._end_loan(lease, index, CommitOutcome.EXPIRED)  # of all that clients know, what it is like
            self._lost_keys.note(namespace_id, key, MissReason.STORES_OFF)
            self._counters.add("refused_stores.stores_off")
            return outcome
        if self._audits.writing(row):
            return self._end_loan(lease, index, self._audits.written(row))
        if self._rows.state[row] != RESERVED:
            # Only the loss of its parent unindexes a live reservation.
            return self._end_loan(lease, index, CommitOutcome.NO_PARENT)
        node = self._ram.node_of(row)
        if self._index.unlinked(node) or not self._parent_holds(node):
            return self._end_loan(lease, index, CommitOutcome.NO_PARENT)
        self._ram.commit(row, node)
        self._end_loan(lease, index, CommitOutcome.COMMITTED)
        self._tree.refresh_node(node)
        self._tiering.committed(node, self._rows.kind[row])
        return CommitOutcome.COMMITTED

    def _parent_holds(self, node: int) -> bool:
        """Return whether the chunk before has, or is being given, the path object."""
        above = self._index.parent(node)
        return above == NONE or self._tree.has(above, self._tree.path_kind(node))

    def _end_loan(self, lease: WriteLease, index: int, outcome: CommitOutcome) -> CommitOutcome:
        """End the writer's entry, and return the outcome. An object that is not committed leaves the index first."""
        entry = lease.entries[index]
        row = self._lent.row_of(entry)
        self._audits.ended(row)
        if self._rows.state[row] == RESERVED:
            self._tree.drop_row(self._ram.node_of(row), self._rows.kind[row], MissReason.ABANDONED)
        self._credit.refund(lease, index)
        self._ram.end_loan(entry)
        lease.finish(index, outcome)
        return outcome

    def _end_if_done(self, lease: WriteLease) -> None:
        if not lease.open and lease.session.leases.pop(lease.id, None) is not None:
            lease.enter(LeaseEvent.END)
            lease.session.ended_leases.add(lease.id, bytes(lease.outcomes))

    # Giving up

    def abandon(self, session: Session, item: CommitItem) -> None:
        lease = session.leases.get(item.lease_id)
        if not isinstance(lease, WriteLease):
            if not item.indices and item.lease_id not in session.ended_leases and lease is None:
                session.ended_leases.add(item.lease_id)
            return
        if item.indices:
            indices = sorted(set(np.frombuffer(item.indices, "<u4").tolist()), reverse=True)
        else:
            indices = list(range(len(lease.entries) - 1, -1, -1))
        self._abandon(lease, indices)

    def drop(self, lease: WriteLease) -> None:
        """Drop a lease whose extents no process touches any more."""
        self._abandon(lease, list(range(len(lease.entries) - 1, -1, -1)))

    def _abandon(self, lease: WriteLease, indices: list[int]) -> None:
        """Abandon objects, children before parents, so that each is a leaf when it goes."""
        for index in indices:
            if lease.outcome(index) == OPEN:
                self._end_loan(lease, index, CommitOutcome.LOST)
                self._counters.add("abandoned_objects")
        self._end_if_done(lease)

    def expire(self, lease: WriteLease) -> None:
        """End the service: others may store these objects. The extents stay lent until acknowledged (I5, I6)."""
        lease.enter(LeaseEvent.EXPIRE)
        for entry in reversed(lease.entries):
            if entry == NO_ENTRY:
                continue
            row = self._lent.row_of(entry)
            if self._rows.state[row] == RESERVED:
                self._tree.drop_row(self._ram.node_of(row), self._rows.kind[row], MissReason.ABANDONED)
        self._counters.add("expired_leases.write")
