"""The adoption of the tables that an earlier daemon run left, however that run ended.

Rows that contradict themselves are not believed: they are dropped and counted by reason.
Extents that a living process may still touch keep their bytes, whatever else is wrong with
them. The daemon may be killed in any step, and each step may run again. The steps:

1. sessions whose processes are all dead lose their lent entries, then their slots
2. each object (a head and its continuations) is judged alone, then for overlaps and repeats
3. the tree is built parents first; what has no path to the root is dropped, or detached if a disk tier may have it
4. objects that are dropped are freed, or stay DYING while lent; bytes that remain are claimed
5. leases are rebuilt from the lent entries
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from kvdepot.core.allocator import ExtentAllocator
from kvdepot.core.arena import NO_ROW, ArenaLayout, LentMode
from kvdepot.core.calls import Kind
from kvdepot.server.depot.loads.load import Loads
from kvdepot.server.depot.sessions.session import Session
from kvdepot.server.depot.sessions.sessions import Sessions
from kvdepot.server.depot.stores.store import Stores
from kvdepot.server.depot.tree.ram import RamTier
from kvdepot.server.depot.tree.rebuilding import offer_for_eviction, rebuild_index
from kvdepot.server.depot.tree.rows import COMMITTED, CONTINUATION, DYING, FREE, RESERVED, SUMMED
from kvdepot.server.depot.tree.tree import Tree
from kvdepot.server.depot.types import AdoptionReport, Liveness, ProcessIdentity

_Numbers = npt.NDArray[np.int64]
_Flags = npt.NDArray[np.bool_]

REASONS = (
    "",  # kept
    "dying",  # dropped by the earlier run, which did not come to free it
    "reservation_ended",
    "no_checksum",
    "no_parent",
    "unknown_namespace",
    "repeated",
    "torn_fields",
    "torn_generation",
    "beyond_capacity",  # in a part of the arena that is not used any more
    "overlap",  # this and what follows: its bytes may be another's
    "torn_extent",
    "torn_links",
)
_CODE = {name: code for code, name in enumerate(REASONS)}
_NAMESPACE_NUMBERS = 1 << 16
"""That a row can name: damaged ones are beyond the table."""


class Adoption:
    """One adoption, for one `run`.

    It works on arrays over heads, because a Python object per row would not fit the memory limit.
    """

    def __init__(
        self, tree: Tree, ram: RamTier, sessions: Sessions, stores: Stores, loads: Loads, layout: ArenaLayout
    ) -> None:
        self._tree = tree
        self._ram = ram
        self._namespaces = tree.namespaces
        self._clock = tree.clock
        self._rows = ram.rows
        self._lent = ram.lent
        self._rooms = ram.rooms
        self._account = ram.account
        self._sessions = sessions
        self._stores = stores
        self._loads = loads
        self._end = layout.data_bytes
        self._room_starts = np.array(layout.part_starts, np.uint64)
        self._part_ends = np.array([*layout.part_starts[1:], layout.data_bytes], np.int64)
        self._room_ends = np.array([room.used_end for room in ram.rooms], np.int64)
        states = self._rows.states
        self._heads: _Numbers = np.flatnonzero((states != FREE) & (states != CONTINUATION))
        self._reasons = np.zeros(len(self._heads), np.uint8)
        self._detached: _Flags = np.zeros(len(self._heads), np.bool_)
        self._chains: dict[int, list[int]] = {}  # of objects with several extents only
        self._sharing: list[tuple[int, int]] = []  # (object, one before it that has the row that it links)

    def run(self, alive: Callable[[ProcessIdentity], Liveness]) -> AdoptionReport:
        repeated = self._namespaces.load(self._clock())
        kept_slots = self._sessions.load(lambda process: alive(process) is Liveness.DEAD)
        self._clear_entries(kept_slots)
        self._sessions.clear_gone()
        self._judge_chains()
        self._judge_fields()
        self._judge_rooms()
        self._judge_overlaps()
        self._judge_repeats()
        self._rebuild_index()
        states = self._rows.states[self._heads[(self._reasons == 0) & ~self._detached]]
        lent = self._lent_heads()
        dropped = Counter({REASONS[c]: int(n) for c, n in enumerate(np.bincount(self._reasons)) if c and n})
        if repeated:
            dropped["namespace_repeated"] = repeated
        self._apply(lent)
        return AdoptionReport(
            kept=int((states == COMMITTED).sum()),
            detached=int(self._detached.sum()),
            reserved=int((states == RESERVED).sum()),
            pinned=int((lent & (self._reasons != 0)).sum()),
            lent_beyond=int((lent & (self._reasons >= _CODE["beyond_capacity"])).sum()),
            sessions=len(kept_slots),
            leases=self._rebuild_leases(),
            dropped=dict(dropped),
        )

    # Who may still touch what

    def _clear_entries(self, kept_slots: set[int]) -> None:
        """Empty the entries of dead sessions, of checksum workers of the earlier run, and senseless ones."""
        lent, rows = self._lent, self._rows
        used = np.flatnonzero(lent.modes != LentMode.FREE)
        held = np.isin(lent.modes[used], (LentMode.READ, LentMode.WRITE))
        held &= np.isin(lent.sessions[used], np.array(sorted(kept_slots), np.int64))
        held &= lent.rows[used] < rows.count
        senseless = used[~held]
        lent.modes[senseless] = LentMode.FREE
        # A FREE or continuation row is lent to nobody: the reply that would tell of it was never sent.
        used = used[held]
        states = rows.states[lent.rows[used]]
        lent.modes[used[(states == FREE) | (states == CONTINUATION)]] = LentMode.FREE
        lent.rebuild()

    # Judging

    def _blame(self, faulty: _Flags, reason: str) -> None:
        """Note the reason for these heads. The gravest reason of a head counts."""
        self._reasons[faulty] = np.maximum(self._reasons[faulty], _CODE[reason])

    def _judge_chains(self) -> None:
        rows = self._rows
        owners: dict[int, int] = {}
        for at in np.flatnonzero(rows.nexts[self._heads] != NO_ROW).tolist():
            head = int(self._heads[at])
            # No row is walked twice: many heads that link one long chain would take hours.
            chain, whole = rows.follow(head, owners)
            self._chains[head] = chain
            owners.update(dict.fromkeys(chain[1:], at))
            if whole:
                continue
            self._reasons[at] = _CODE["torn_links"]
            link = rows.next[chain[-1]]
            other = owners.get(link, at)
            if other != at and rows.continues(head, link):  # two heads of one name: which is right?
                self._reasons[other] = _CODE["torn_links"]
                self._sharing.append((at, other))

    def _lent_heads(self) -> _Flags:
        """Return which objects somebody may touch. One whose rows a lent one links as well counts as lent."""
        lent: _Flags = self._lent.pins[self._heads] > 0
        for at, other in reversed(self._sharing):
            lent[other] |= lent[at]
        return lent

    def _extents(self) -> tuple[_Numbers, _Numbers]:
        """Return all rows of all objects, and for each the index of its head in `_heads`."""
        owners = np.arange(len(self._heads))
        more = [(row, at) for at in np.flatnonzero(self._several()) for row in self._chains[int(self._heads[at])][1:]]
        further = np.array(more, np.int64).reshape(-1, 2)
        return np.concatenate((self._heads, further[:, 0])), np.concatenate((owners, further[:, 1]))

    def _several(self) -> _Flags:
        return np.isin(self._heads, np.fromiter(self._chains, np.int64, len(self._chains)))

    def _judge_fields(self) -> None:
        heads = self._heads
        rows = self._rows
        states, kinds = rows.states[heads], rows.kinds[heads]
        reserved, committed = states == RESERVED, states == COMMITTED
        known = np.isin(rows.namespaces[heads], np.fromiter(self._namespaces.by_slot, np.int64))
        self._blame(states == DYING, "dying")
        self._blame(reserved & ~self._has_writer()[heads], "reservation_ended")
        self._blame(committed & (rows.flags[heads] & SUMMED == 0), "no_checksum")
        self._blame((reserved | committed) & ~known, "unknown_namespace")
        sensible = (kinds >= min(Kind)) & (kinds <= max(Kind)) & (rows.boundaries[heads] > 0) & (states <= DYING)
        self._blame(~sensible, "torn_fields")
        all_rows, owners = self._extents()
        odd = rows.generations[all_rows] & 1 == 1
        self._blame_owners(owners, (reserved[owners] & ~odd) | (committed[owners] & odd), "torn_generation")
        self._blame_owners(owners, ~self._in_arena(all_rows), "beyond_capacity")
        self._blame_owners(owners, ~self._within(all_rows, self._part_ends), "torn_extent")

    def _has_writer(self) -> _Flags:
        """Return which rows an engine may still commit. Rows for I/O workers to fill are not committed any more."""
        lent = self._lent
        used = np.flatnonzero(lent.modes == LentMode.WRITE)
        workers = [slot for slot, session in self._sessions.by_slot.items() if session.worker]
        writing = np.zeros(self._rows.count, np.bool_)
        writing[lent.rows[used[~np.isin(lent.sessions[used], np.array(workers, np.int64))]]] = True
        return writing

    def _blame_owners(self, owners: _Numbers, faulty: _Flags, reason: str) -> None:
        blamed = np.zeros(len(self._heads), np.bool_)
        blamed[owners[faulty]] = True
        self._blame(blamed, reason)

    def _ends(self, all_rows: _Numbers) -> _Numbers:
        granule = self._rooms.granule_bytes
        lengths = self._rows.lengths[all_rows].astype(np.int64)
        ends: _Numbers = self._rows.offsets[all_rows].astype(np.int64) + -(-lengths // granule) * granule
        return ends

    def _in_arena(self, all_rows: _Numbers) -> _Flags:
        """Return which extents lie whole in one room."""
        return self._within(all_rows, self._room_ends)

    def _within(self, all_rows: _Numbers, part_ends: _Numbers) -> _Flags:
        """Return which extents lie whole in one part of the data, up to its end here."""
        rows, size = self._rows, np.uint64(self._end)
        offsets, lengths = rows.offsets[all_rows], rows.lengths[all_rows]
        sane = (offsets < size) & (lengths > 0) & (lengths <= size)
        inside: _Flags = sane & (offsets % self._rooms.granule_bytes == 0)
        inside[inside] = self._ends(all_rows[inside]) <= part_ends[self._room_numbers(all_rows[inside])]
        return inside

    def _room_numbers(self, rows: _Numbers) -> _Numbers:
        """Return the room that the offset of each row lies in."""
        numbers: _Numbers = np.searchsorted(self._room_starts, self._rows.offsets[rows], side="right") - 1
        return numbers

    def _judge_rooms(self) -> None:
        """Assign a room to each namespace: that of its objects. Blame those in other rooms than most of them.

        What is going already tells nothing. Where a namespace has nothing else, each keeps its own reason.
        """
        if len(self._rooms) == 1:
            return
        all_rows, owners = self._extents()
        sound = self._in_arena(all_rows)
        all_rows, owners = all_rows[sound], owners[sound]
        slots, numbers = self._rows.namespaces[self._heads[owners]], self._room_numbers(all_rows)
        counted = self._reasons[owners] == 0
        counts = np.zeros((_NAMESPACE_NUMBERS, len(self._rooms)), np.int64)
        np.add.at(counts, (slots[counted], numbers[counted]), 1)
        most, known = counts.argmax(1), counts.sum(1) > 0
        self._blame_owners(owners, known[slots] & (numbers != most[slots]), "torn_extent")
        for slot in np.flatnonzero(known).tolist():
            if slot in self._namespaces.by_slot:
                self._rooms.enter(slot, self._rooms[int(most[slot])])

    def _judge_overlaps(self) -> None:
        """Blame both of two objects that claim the same bytes: neither can be right."""
        all_rows, owners = self._extents()
        sound = self._within(all_rows, self._part_ends)
        all_rows, owners = all_rows[sound], owners[sound]
        order = np.argsort(self._rows.offsets[all_rows], kind="stable")
        all_rows, owners = all_rows[order], owners[order]
        if not len(all_rows):
            return
        ends = self._ends(all_rows)
        reach = np.maximum.accumulate(ends)
        furthest = np.maximum.accumulate(np.where(ends >= reach, np.arange(len(ends)), 0))
        starts = self._rows.offsets[all_rows].astype(np.int64)
        overlapping = np.flatnonzero(starts[1:] < reach[:-1]) + 1
        blamed = np.zeros(len(self._heads), np.bool_)
        blamed[owners[overlapping]] = True
        blamed[owners[furthest[overlapping - 1]]] = True
        self._blame(blamed, "overlap")

    def _judge_repeats(self) -> None:
        """Blame two objects of one name: at most one could be right, and nothing says which."""
        rows = self._rows
        at = np.flatnonzero(self._reasons == 0)
        heads = self._heads[at]
        keys = rows.keys.view("<u8").reshape(-1, 2)[heads]
        names = (rows.kinds[heads], keys[:, 0], keys[:, 1], rows.namespaces[heads])
        order = np.lexsort(names)
        same = np.ones(max(len(order) - 1, 0), np.bool_)
        for column in names:
            ordered = column[order]
            same &= ordered[1:] == ordered[:-1]
        blamed = np.zeros(len(self._heads), np.bool_)
        blamed[at[order[1:][same]]] = True
        blamed[at[order[:-1][same]]] = True
        self._blame(blamed, "repeated")

    # The tree

    def _rebuild_index(self) -> None:
        """Make nodes for what is kept."""
        at = np.flatnonzero(self._reasons == 0)
        if not len(at):
            return
        no_parent, torn = rebuild_index(self._tree, self._heads[at])
        self._reasons[at[no_parent]] = _CODE["no_parent"]
        self._reasons[at[torn]] = _CODE["torn_fields"]
        if self._tree.disks:
            self._detached = self._reasons == _CODE["no_parent"]
            self._detached &= self._rows.states[self._heads] == COMMITTED
            self._reasons[self._detached] = 0
            self._ram.detached.set(self._heads[self._detached])

    # Settling

    def _apply(self, lent: _Flags) -> None:
        """Carry out the judgement: in the tables, the allocator, the free rows and the policy."""
        for at in np.flatnonzero(self._reasons).tolist():
            self._unindex(int(self._heads[at]), REASONS[self._reasons[at]], lent=bool(lent[at]))
        all_rows, owners = self._extents()
        held = all_rows[(self._reasons[owners] == 0) | lent[owners]]
        # Of an extent across a room's end, somebody may still write to what lies within.
        within = self._within(held, self._part_ends)
        within[within] = self._rows.offsets[held[within]] < self._room_ends[self._room_numbers(held[within])]
        self._claim(held[within])
        self._hold(all_rows, owners, (self._reasons == 0) | lent)
        self._free_others(held)
        self._enter(all_rows, owners)
        offer_for_eviction(self._tree)

    def _unindex(self, head: int, reason: str, *, lent: bool) -> None:
        rows = self._rows
        chain = self._chains.get(head, [head])
        if lent and reason in ("torn_links", "torn_extent", "overlap"):
            # Lent all the same: what can be told of its bytes stays out of use in this run.
            self._ram.never_reuse(head)
        for row in chain:
            rows.generation[row] = (rows.generation[row] + 2) & ~1
        rows.next[chain[-1]] = NO_ROW
        rows.state[head] = DYING

    def _claim(self, held: _Numbers) -> None:
        """Claim the union of these extents in the allocator. They overlap only where a table was torn."""
        if not len(held):
            return
        numbers = self._room_numbers(held)
        for room in self._rooms:
            if len(mine := held[numbers == room.number]):
                room.rows_used = len(mine)
                self._claim_in(room.allocator, mine, room.used_end)

    def _claim_in(self, allocator: ExtentAllocator, held: _Numbers, room_end: int) -> None:
        starts, ends = self._rows.offsets[held].astype(np.int64), np.minimum(self._ends(held), room_end)
        allocator.grow(int(ends.max()))
        order = np.argsort(starts)
        starts, reach = starts[order], np.maximum.accumulate(ends[order])
        begins = np.ones(len(starts), np.bool_)
        begins[1:] = starts[1:] > reach[:-1]
        first = np.flatnonzero(begins)
        last = np.append(first[1:], len(starts)) - 1
        for start, end in zip(starts[first].tolist(), reach[last].tolist(), strict=True):
            allocator.claim(start, end - start)

    def _hold(self, all_rows: _Numbers, owners: _Numbers, kept: _Flags) -> None:
        """Charge the claimed bytes to namespaces. Where a table was torn, bytes never to be freed are not charged."""
        kept = kept & ~np.isin(self._heads, np.array(sorted(self._ram.unreusable), np.int64))
        sizes = np.zeros(len(self._heads), np.int64)
        mine = kept[owners]
        granule = self._rooms.granule_bytes
        lengths = self._rows.lengths[all_rows[mine]].astype(np.int64)
        np.add.at(sizes, owners[mine], -(-lengths // granule) * granule)
        slots, sizes = self._rows.namespaces[self._heads[kept]], sizes[kept]
        for slot in np.unique(slots).tolist():
            self._account.add(slot, int((slots == slot).sum()), int(sizes[slots == slot].sum()))

    def _free_others(self, held: _Numbers) -> None:
        """Free all other rows: heads first, then continuations that nothing links."""
        rows = self._rows
        keep = np.zeros(rows.count, np.bool_)
        keep[held] = True
        gone = np.flatnonzero(~keep & (rows.states != FREE))
        heads = rows.states[gone] != CONTINUATION
        rows.states[gone[heads]] = FREE
        rows.states[gone[~heads]] = FREE
        rows.reset_free(np.flatnonzero(~keep).astype(np.uint32))

    def _enter(self, all_rows: _Numbers, owners: _Numbers) -> None:
        """Count what is kept and committed; nothing of it is visible before it is verified."""
        rows = self._rows
        kept = (self._reasons == 0) & (rows.states[self._heads] == COMMITTED)
        counted = kept & ~self._detached
        sizes = np.zeros(len(self._heads), np.int64)
        mine = counted[owners]
        np.add.at(sizes, owners[mine], rows.lengths[all_rows[mine]].astype(np.int64))
        # Where the run was not advanced nothing is trusted either.
        trusted = self._heads[kept & (rows.runs[self._heads] == rows.run)]
        rows.runs[trusted] = ~rows.run & 0xFFFF_FFFF
        committed, sizes = self._heads[counted], sizes[counted]
        self._ram.unverified += len(committed)
        self._ram.objects += len(committed)
        slots, kinds = rows.namespaces[committed], rows.kinds[committed]
        for slot in np.unique(slots):
            namespace = self._namespaces.by_slot[int(slot)]
            namespace.bytes += int(sizes[slots == slot].sum())
            for kind, count in zip(*np.unique(kinds[slots == slot], return_counts=True), strict=True):
                namespace.objects[int(kind)] += int(count)

    # Leases

    def _rebuild_leases(self) -> int:
        lent = self._lent
        found: dict[tuple[int, int, int], dict[int, int]] = defaultdict(dict)
        for entry in np.flatnonzero(lent.modes != LentMode.FREE).tolist():
            found[(lent.sessions[entry], lent.leases[entry], lent.modes[entry])][int(lent.indices[entry])] = entry
        for (slot, lease_id, mode), entries in found.items():
            session: Session = self._sessions.by_slot[int(slot)]
            if mode == LentMode.WRITE and not session.worker:
                self._stores.adopt(session, int(lease_id), entries)
            else:
                self._loads.adopt(session, int(lease_id), np.array(list(entries.values()), np.uint32))
        return len(found)
