"""The RAM tier: the objects of the arena, with their rows, loans and bytes.

`RamTier` owns the extent table, the lent table and the rooms. Bytes return to the allocator only when nobody can
touch them any more (I6): an object leaves the index at once, and its bytes when its last loan has ended.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
from kvdepot.core.allocator import Extent
from kvdepot.core.arena import NO_ROW, ArenaTables, LentMode
from kvdepot.core.eviction_policy import EvictionPolicy
from kvdepot.server.depot.counters import Counters
from kvdepot.server.depot.tree.detached import Detached
from kvdepot.server.depot.tree.evicting import Evictor, Shortage
from kvdepot.server.depot.tree.holding import Demotion
from kvdepot.server.depot.tree.index import NONE, Nodes
from kvdepot.server.depot.tree.lent import LentTable
from kvdepot.server.depot.tree.namespaces import Namespace
from kvdepot.server.depot.tree.pin_table import PinTable
from kvdepot.server.depot.tree.quotas import Account, Owner
from kvdepot.server.depot.tree.rooms import Room, Rooms
from kvdepot.server.depot.tree.rows import COMMITTED, DYING, RESERVED, Rows
from kvdepot.server.depot.tree.tree_tier import GiveWay, TierTree
from kvdepot.server.depot.types import Quota
from kvdepot.server.storage.base import ObjectName

_MASK64: Final = (1 << 64) - 1


class RamTier:
    """A `Holding` of the tree. All sizes are bytes."""

    drops_orphans = True

    def __init__(
        self,
        tree: TierTree,
        tables: ArenaTables,
        *,
        run: int,
        policy: EvictionPolicy,
        counters: Counters,
        give_way: GiveWay,
        quotas: Sequence[Quota],
        tenants: Sequence[str] = (),
    ) -> None:
        layout = tables.layout
        self.rows = Rows(tables, run)
        self.detached = Detached(self.rows)
        self.lent = LentTable(tables)
        self.rooms = Rooms(tables, self.rows, tenants)
        self.rounded = self.rooms.rounded
        self.pins = PinTable(layout.rows, counters, self.part_of, len(self.rooms))
        self._prefetch_pinned, self._user_pinned = self.pins.prefetch.pinned, self.pins.user.pinned
        self.evictor = Evictor(tree, self, policy)
        self.account = Account("ram", quotas, self.evictor)
        self._tree = tree
        self._index = tree.index
        self._namespaces = tree.namespaces
        self._counters = counters
        self._give_way = give_way
        self.data_bytes = self.rooms.size_bytes
        self.unverified = 0  # adopted objects not yet verified
        self.pending_checksums = 0  # committed objects without a sum
        self.objects = 0  # committed objects
        # By room and tenant; "": of no tenant.
        self._shortages: defaultdict[tuple[int, str], Shortage] = defaultdict(Shortage)
        self.unreusable: set[int] = set()  # dying rows whose bytes overlap others' (a torn table)

    @property
    def used_bytes(self) -> int:
        return self.rooms.used_bytes

    def part_of(self, row: int) -> int:
        """Return the number of the room that the extent of this row lies in."""
        return self.rooms.at(self.rows.offset[row]).number if len(self.rooms) > 1 else 0

    def visible(self, node: int, kind: int) -> bool:
        """Return whether RAM has the object and may serve it."""
        row = self._index.row(node, kind)
        return row != NO_ROW and self.rows.visible(row)

    def node_of(self, row: int) -> int:
        """Return the node that has this row, unlinked or not; NONE for a row that was unindexed."""
        if self.rows.state[row] not in (RESERVED, COMMITTED):
            return NONE
        node = self._index.named(self.rows.namespace[row], self.rows.key(row))
        return node if node != NONE and self._index.row(node, self.rows.kind[row]) == row else NONE

    def name(self, row: int) -> ObjectName:
        """Return the identity of the object, as tiers know it."""
        rows = self.rows
        namespace = self._namespaces.by_slot[rows.namespace[row]]
        return ObjectName(
            namespace.id, rows.key(row), rows.parent(row), rows.kind[row], rows.boundary[row], self.size_bytes(row)
        )

    def size_bytes(self, row: int) -> int:
        return self.rows.size_bytes(row)

    def rounded_bytes(self, row: int) -> int:
        """Return what the object takes of the arena."""
        if self.rows.next[row] == NO_ROW:
            return self.rounded(self.rows.length[row])
        return sum(self.rounded(length) for _, length in self.rows.extents(row))

    # Placing and publishing

    def place(
        self, namespace: Namespace, node: int, *, kind: int, key: bytes, parent: bytes, boundary: int, size_bytes: int
    ) -> int:
        """Return a row of the node in the making, evicting as needed; NO_ROW when nothing evictable is left.

        The caller lends it and calls `rows.publish_reserved`, or asks `account.over` why there is none.
        """
        tree, evictor = self._tree, self.evictor
        evictor.filling = node
        evictor.policy.on_not_candidate(node)
        room, rounded = self.rooms.of(namespace.slot), self.rounded(size_bytes)
        try:
            within = room is not None and tree.within_quota(self, namespace.slot, rounded)
            extents = self._allocate(room, size_bytes) if room is not None and within else []
        finally:
            evictor.filling = NONE
        if not extents:
            tree.refresh_node(node)
            return NO_ROW
        assert room is not None  # it has given the extents
        self._replace_detached(namespace.slot, key, kind)
        row = self.rows.reserve(extents, key=key, parent=parent, kind=kind, namespace=namespace.slot, boundary=boundary)
        self._index.set_row(node, kind, row)
        self.account.add(namespace.slot, 1, rounded)
        self._note_placed(room, namespace, rounded)
        evictor.no_orphan(node)  # nor is it a candidate, while an object of it is being written
        above = self._index.parent(node)
        if above != NONE:
            evictor.update_candidate(above)  # in RAM it has one more below it; for other tiers nothing has changed
        return row

    def _allocate(self, room: Room, size_bytes: int) -> list[Extent]:
        """Return extents, for each of which there is a row; empty when nothing evictable is left in the room."""
        rounded = self.rounded(size_bytes)
        if rounded > room.allocator.ready_bytes:
            return []  # evicting everything would not make room
        while room.allocator.free_bytes < rounded or not room.free_rows:
            if not self.evict_one("room", room):
                return []
        while (extents := room.allocate(size_bytes)) is None:
            if not self.evict_one("room", room):
                return []
        return extents

    def commit(self, row: int, node: int) -> None:
        """Publish a reserved object. The caller then ends the writer's loan and calls `refresh_node`."""
        self.rows.commit(row)
        self.pending_checksums += 1
        self._count_committed(row, 1)
        index = self._index
        self.evictor.policy.on_commit(node, self._tree.clock(), index.parent(node), index.mark(node))

    def commit_checksummed(self, row: int, node: int, raw_sum: int) -> None:
        """Publish an object whose bytes were just verified: `raw_sum` is their XXH3-128."""
        self.commit(row, node)
        self.set_sum(row, raw_sum)

    def set_sum(self, row: int, raw_sum: int) -> None:
        """Set the sum of an object of this run that has none yet."""
        self.rows.set_sum(row, raw_sum & _MASK64, raw_sum >> 64)
        self.pending_checksums -= 1

    def _count_committed(self, row: int, change: int) -> None:
        namespace = self._namespaces.by_slot[self.rows.namespace[row]]
        namespace.objects[self.rows.kind[row]] += change
        namespace.bytes += change * self.size_bytes(row)
        self.objects += change

    # Detached objects

    def attach(self, row: int, node: int) -> None:
        """Give a detached object its node. Like everything adopted, it is served once it is verified."""
        index, tree, policy = self._index, self._tree, self.evictor.policy
        self.detached.remove(row)
        index.set_row(node, self.rows.kind[row], row)
        self._count_committed(row, 1)
        self.unverified += 1
        above = index.parent(node)
        policy.on_commit(node, tree.clock(), above, index.mark(node))
        tree.refresh_node(node)
        if above == NONE:
            return
        tree.update_candidates(above)
        if tree.usable.usable(node) and not tree.usable.usable(above):
            policy.on_end(node)  # as at adoption: states do not lie at every chunk there

    def drop_detached(self, row: int) -> None:
        """Drop a detached object. Its bytes stay until its last loan ends."""
        self._mend(row)
        self.detached.remove(row)
        self._unindex(row)

    def _replace_detached(self, slot: int, key: bytes, kind: int) -> None:
        """Drop the detached object of a name that is about to be stored again."""
        row = self.detached.find(slot, key, kind)
        if row != NO_ROW:
            self.drop_detached(row)
            self._counters.add("adopted_objects.stored_again")

    def drop_detached_of(self, slot: int, limit: int) -> int:
        """Drop at most so many detached objects of a namespace. Return their number."""
        dropped = 0
        while dropped < limit and (row := next(self.detached.last([slot]), NO_ROW)) != NO_ROW:
            self.drop_detached(row)
            dropped += 1
        return dropped

    def evict_detached(self, reason: str, slots: Collection[int] | None) -> int:
        """Drop a detached object, of these namespaces or of any: the first to go. Return 0 when none may go."""
        for row in self.detached.last(slots) if len(self.detached) else ():
            if not self.lent.pinned(row):
                size_bytes = self.rounded_bytes(row)
                self.drop_detached(row)
                self.count_evicted(reason, 1, size_bytes)
                return 1
        return 0

    # Quotas

    def refused_by_quota(self, slot: int, size_bytes: int, objects: int = 1) -> tuple[Owner, bool] | None:
        """Return the owner whose quota refuses such objects, and whether RAM may take them later. Count the refusal."""
        owner = self.account.over(slot, size_bytes)
        if owner is None:
            return None
        self.account.refuse(owner, objects)
        if size_bytes > owner.capacity_bytes:
            return owner, False
        orphans = self.evictor.note_shortage(owner.shortage, size_bytes, owner.slots)
        return owner, orphans or self._comes_back(owner)

    def note_short(self, namespace: Namespace, size_bytes: int) -> bool:
        """Note that an object found no room. Return whether ticks may make room for it, although nothing is released.

        Else the next try has to wait until engines release something.
        """
        room = self.rooms.of(namespace.slot)
        if room is None:
            return False
        if size_bytes > room.allocator.ready_bytes:
            return room.growing
        tenant = namespace.tenant or ""
        shortage = self._shortages[room.number, tenant]
        orphans = self.evictor.note_shortage(shortage, size_bytes, self._orphan_slots(tenant))
        return orphans or room.growing

    def _orphan_slots(self, tenant: str) -> list[int]:
        """Return the namespaces whose orphans may go for a tenant: its own. What follows them is lost with them."""
        by_slot = self._namespaces.by_slot
        return [slot for slot in self.evictor.orphan_slots() if (by_slot[slot].tenant or "") == tenant]

    def _note_placed(self, room: Room, namespace: Namespace, size_bytes: int) -> None:
        if self._shortages and (shortage := self._shortages.get((room.number, namespace.tenant or ""))) is not None:
            shortage.placed(size_bytes)
        self.account.placed(namespace.slot, size_bytes)

    def _comes_back(self, owner: Owner) -> bool:
        """Return whether the owner has something in RAM that may go later: it is reserved, dying or lent."""
        by_slot = self._namespaces.by_slot
        return self.evictor.waits(owner.slots) or any(
            self.account.objects(slot) > sum(by_slot[slot].objects.values()) for slot in owner.slots
        )

    def enter(self, namespace: Namespace) -> None:
        self.account.enter(namespace)
        room = self.rooms.of_tenant(namespace.tenant or "")
        if room is not None:
            self.rooms.enter(namespace.slot, room)

    def left(self, slot: int) -> None:
        """Note that the slot has no namespace any more."""
        self.rooms.leave(slot)

    # Dropping

    def drop(self, node: int, kind: int) -> None:
        """Unindex the object. Its bytes stay until its last loan ends."""
        row = self._index.row(node, kind)
        self._mend(row)
        if self.rows.state[row] == COMMITTED:
            self._count_committed(row, -1)
            if self.rows.run_of[row] != self.rows.run:
                self.unverified -= 1
            elif not self.rows.summed(row):
                self.pending_checksums -= 1
        self._index.set_row(node, kind, NO_ROW)
        self.pins.dropped(row)
        self._unindex(row)

    def _unindex(self, row: int) -> None:
        self.rows.unindex(row)
        if not self.lent.pinned(row):
            self._free(row)

    def _mend(self, row: int) -> None:
        if self.rows.mend(row):
            self._counters.add("torn_objects")

    def _free(self, row: int) -> None:
        self._mend(row)  # damage since it was unindexed
        if len(self.rooms) > 1 and not self._lies_in_its_room(row):
            self._counters.add("leaked_objects")  # its bytes may be another tenant's
            return
        self.account.add(self.rows.namespace[row], -1, -self.rounded_bytes(row))
        self.rows.free(row, self.rooms)

    def _lies_in_its_room(self, row: int) -> bool:
        room = self.rooms.of(self.rows.namespace[row]) or self.rooms.at(self.rows.offset[row])
        rows = np.array(self.rows.chain(row))
        return bool(room.contains(self.rows.offsets[rows], self.rows.lengths[rows]).all())

    # Loans

    def end_loan(self, entry: int) -> None:
        """End one loan."""
        row = self.lent.row_of(entry)
        self.evictor.returned()
        if self.lent.clear(entry):
            self._loan_ended(row)

    def end_loans(self, entries: npt.NDArray[np.uint32]) -> None:
        """End these loans."""
        last = self.lent.clear_many(entries)
        self.evictor.returned()
        for row in last[self.rows.states[last] == DYING]:
            self._loan_ended(int(row))

    def _loan_ended(self, row: int) -> None:
        if self.rows.state[row] != DYING:
            return
        if row in self.unreusable:
            self._counters.add("leaked_objects")
            return
        self._free(row)

    def never_reuse(self, row: int) -> None:
        """Keep the row's bytes out of use until the next adoption: they overlap another lent object's."""
        self.unreusable.add(row)

    def lent_bytes(self, slots: Collection[int] | None = None, room: Room | None = None) -> int:
        """Return the bytes that somebody may be touching, of these namespaces, this room, or all. O(lent table).

        What was lent beyond the end of a room, before it became smaller, takes nothing of the room.
        """
        rows = np.unique(self.lent.rows[self.lent.modes != LentMode.FREE])
        if room is not None:
            offsets = self.rows.offsets[rows]
            rows = rows[(offsets >= np.uint64(room.start)) & (offsets < np.uint64(room.used_end))]
        if slots is not None:
            rows = rows[np.isin(self.rows.namespaces[rows], list(slots))]
        several = self.rows.nexts[rows] != NO_ROW
        return int(self.rows.lengths[rows[~several]].sum()) + sum(map(self.size_bytes, rows[several].tolist()))

    # Evicting

    def evict_one(self, reason: str, room: Room) -> bool:
        """Drop the least useful unit: first what is unlinked, last what prefetch pins; False when nothing may go."""
        slots = room.slots
        return self._tree.reclaim_for_room() or self.evictor.evict_one(reason, slots) > 0 or self.give_way(slots)

    def trim(self, high: float, low: float, limit: int, demotion: Demotion) -> bool:
        """Evict before room is needed, about `limit` objects. Return whether more is due. Watermarks are shares.

        Each room has its own. They take turns: the first that is due may use the whole limit.
        """
        self.account.relieve(self.lent_bytes, demotion)
        self._relieve(demotion)
        more = self.account.trim(high, low, limit, demotion)
        for room in self.rooms.in_turn():
            if not room.growing:  # else the ready part is nearly full of what was adopted, and room is on its way
                limit = self.evictor.trim(room, room.size_bytes, high, low, limit, demotion)
                more |= room.trimming
        return self.evictor.rest_orphans() or more

    def _relieve(self, demotion: Demotion) -> None:
        """Drop an orphan of a tenant whose object lacked room. Forget those that lack none any more."""
        for whose, shortage in list(self._shortages.items()):
            room = self.rooms[whose[0]]
            free_bytes = room.allocator.free_bytes if room.free_rows else 0
            if not self.evictor.lacks(shortage, free_bytes, room.slots):
                del self._shortages[whose]
                continue
            if room.allocator.ready_bytes - self.lent_bytes(room=room) < shortage.size_bytes:
                continue  # all orphans together would not make room
            if self.evictor.drop_orphan("room", self._orphan_slots(whose[1]), demotion):
                self._shortages[whose] = self._shortages.pop(whose)  # after the others

    def give_way(self, slots: Collection[int] | None) -> bool:
        return self._give_way(slots)

    def unpin(self, limit: int) -> int:
        """Offer objects to the evictor that no prefetch request pins any more. Return their number."""
        done = 0
        for row in self.pins.prefetch.unpin(limit):
            done += 1
            node = self.node_of(row)
            if node != NONE:
                self._tree.update_candidates(node)
        return done

    def count_evicted(self, reason: str, objects: int, size_bytes: int) -> None:
        self._counters.add(f"evicted_objects.{reason}", objects)
        self._counters.add("evicted_bytes", size_bytes)

    # What RAM holds, for its evictor

    def kinds(self, node: int) -> list[int]:
        return self._index.kinds_in_ram(node)

    def complete(self, node: int, kind: int) -> bool:
        row = self._index.row(node, kind)
        return row != NO_ROW and self.rows.state[row] == COMMITTED

    def busy(self, node: int) -> bool:
        return any(map(self.lent.pinned, self._index.rows_of(node)))

    def kept(self, node: int) -> bool:
        return any(map(self._prefetch_pinned.__getitem__, self._index.rows_of(node)))

    def pinned(self, node: int, kind: int) -> bool:
        row = self._index.row(node, kind)
        return row != NO_ROW and self._user_pinned[row] != 0

    def children(self, node: int) -> int:
        return self._index.children_in_ram(node)

    def among(self, nodes: Nodes) -> Nodes:
        return self._index.many_in_ram(nodes)

    def cost_bytes(self, node: int, kind: int) -> int:
        return self.rounded_bytes(self._index.row(node, kind))
