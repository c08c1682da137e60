"""The shadow audit: of what engines compute although it is here, a sample is compared with it (design.md#audit).

An engine that offers to store an object which RAM has is granted a scratch. Its row is DYING from
its first moment, so that no lookup finds it and no daemon adopts it. It goes like any other row
once its writer and the comparison are done. An audit must cost nothing: it takes room that
is free below the watermarks, and no credit. Few audits are under way at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvdepot.core.arena import NO_ROW, LentMode
from kvdepot.core.calls import CommitOutcome
from kvdepot.core.elements import comparable
from kvdepot.core.misses import MissReason
from kvdepot.server.depot.tree.index import NONE
from kvdepot.server.depot.tree.lent import NO_SESSION
from kvdepot.server.depot.tree.namespaces import Namespace
from kvdepot.server.depot.tree.ram import RamTier
from kvdepot.server.depot.tree.rooms import Room
from kvdepot.server.depot.tree.rows import COMMITTED
from kvdepot.server.depot.tree.tree import Tree
from kvdepot.server.depot.types import DepotConfig, Drift, ToCompare

AUDITS_MAX: Final = 16
"""Under way at once, from the grant to the answer. Parts of the data share them equally, each has one at least."""
RAM_SHARE_MAX: Final = 1 / 32
"""What their scratches may take of the arena."""
OUTCOMES: Final = ("same", "drifted", "gone", "unwritten", "unknown_type", "no_room", "unanswered")
"""Labels of `audits`: what came of each object that was drawn."""


@dataclass(frozen=True, slots=True)
class _Pair:
    """A scratch that is written, and the object it is compared with, both lent to the worker."""

    scratch_entry: int
    stored_entry: int
    stored: int


class Audits:
    """The audits of a depot. `random_bytes` draws the sample."""

    def __init__(
        self, tree: Tree, ram: RamTier, config: DepotConfig, random_bytes: Callable[[int], bytes]
    ) -> None:  # fmt: skip
        self._tree = tree
        self._ram = ram
        self._index = tree.index
        self._namespaces = tree.namespaces
        self._tiers = tree.tiers
        self._counters = tree.counters
        self._rows = ram.rows
        self._lent = ram.lent
        self._account = ram.account
        self._config = config
        self._random_bytes = random_bytes
        self.ram_share_max = RAM_SHARE_MAX
        self._writing: set[int] = set()  # scratches of writers
        self._pairs: dict[int, _Pair] = {}  # by scratch
        self._waiting: deque[int] = deque()  # scratches of pairs that the worker has not been told of

    def configure(self, config: DepotConfig) -> None:
        self._config = config

    # The scratch

    def scratch(self, namespace: Namespace, stored: int) -> int:
        """Return a row for what a writer has of this visible object, if the object is drawn; else NO_ROW.

        The caller lends it, calls `rows.publish_scratch`, and `ended` when the writer is done.
        """
        if not self._drawn():
            return NO_ROW
        kind = self._rows.kind[stored]
        if not any(map(comparable, namespace.elements.get(kind, ()))):
            return self._counted("unknown_type")
        size_bytes = self._ram.rounded(namespace.object_bytes[kind])
        part = self._ram.part_of(stored)
        room = self._ram.rooms[part]
        beside = [row for row in (*self._writing, *self._pairs) if self._ram.part_of(row) == part]
        taken_bytes = sum(map(self._ram.rounded_bytes, beside)) + size_bytes
        most = max(AUDITS_MAX // len(self._ram.rooms), 1)
        if len(beside) >= most or taken_bytes > self.ram_share_max * room.allocator.ready_bytes:
            return self._counted("no_room")
        row = self._place(namespace, stored, room)
        if row == NO_ROW:
            return self._counted("no_room")
        self._writing.add(row)
        return row

    def _place(self, namespace: Namespace, stored: int, room: Room) -> int:
        """Reserve a row that is not in the index, and return it.

        Return NO_ROW where the room, loans, rows or quotas would be above what eviction leaves full.
        """
        rows = self._rows
        share, size_bytes = self._config.high_watermark, self._ram.size_bytes(stored)
        rounded = self._ram.rounded(size_bytes)
        if room.used_bytes + rounded > share * room.allocator.ready_bytes:
            return NO_ROW
        if self._lent.free_count <= (1 - share) * self._lent.count:
            return NO_ROW
        if self._account.over(namespace.slot, rounded, share) is not None:
            return NO_ROW
        extents = room.allocate(size_bytes) or []
        if not extents or room.rows_used > share * room.rows_max:
            for offset, length in extents:
                self._ram.rooms.free(offset, length)
            return NO_ROW
        self._account.add(namespace.slot, 1, rounded)
        return rows.reserve(
            extents, key=rows.key(stored), parent=rows.parent(stored), kind=rows.kind[stored],
            namespace=namespace.slot, boundary=rows.boundary[stored],
        )  # fmt: skip

    def _drawn(self) -> bool:
        sample = self._config.audit_sample
        return sample > 0 and int.from_bytes(self._random_bytes(4), "little") < sample * (1 << 32)

    def _counted(self, outcome: str) -> int:
        self._counters.add(f"audits.{outcome}")
        return NO_ROW

    def written(self, scratch: int) -> CommitOutcome:
        """Note that the writer of a scratch is done. Return the outcome to report for the object.

        The caller ends the writer's loan next.
        """
        self._writing.remove(scratch)
        rows = self._rows
        node = self._index.find(rows.namespace[scratch], rows.key(scratch))
        kind = rows.kind[scratch]
        stored = self._index.row(node, kind) if node != NONE else NO_ROW
        if stored != NO_ROW and rows.visible(stored) and self._lent.free_count >= 2:
            ours, theirs = (self._lent.lend(0, NO_SESSION, LentMode.CHECKSUM, row, 0) for row in (scratch, stored))
            self._pairs[scratch] = _Pair(ours, theirs, stored)
            self._waiting.append(scratch)
            return CommitOutcome.COMMITTED
        self._counted("gone")
        here = stored != NO_ROW or (node != NONE and self._tree.elsewhere(node, kind))
        # Of all that clients know, EXPIRED is what it is like: nobody has it, and it was not stored.
        return CommitOutcome.COMMITTED if here else CommitOutcome.EXPIRED

    def writing(self, row: int) -> bool:
        """Return whether the row is a scratch whose writer is not done."""
        return row in self._writing

    def ended(self, row: int) -> None:
        """Note that a writer's loan of the row, a scratch or not, is about to end."""
        if row in self._writing:
            self._writing.remove(row)
            self._counted("unwritten")

    # The comparison

    def next(self) -> ToCompare | None:
        """Return the next pair for the worker, or None. `compared` takes the answer."""
        if not self._waiting:
            return None
        rows, scratch = self._rows, self._waiting.popleft()
        namespace = self._namespaces.by_slot[rows.namespace[scratch]]
        runs = namespace.elements.get(rows.kind[scratch], ())
        stored = self._pairs[scratch].stored
        return ToCompare(scratch, rows.generation[scratch], rows.extents(stored), rows.extents(scratch), runs)

    def compared(self, scratch: int, *, drifted: bool) -> Drift | None:
        """Apply the worker's answer, and return what was dropped.

        An object that has drifted goes from every tier, with all that was computed from it.
        """
        pair = self._pairs.pop(scratch, None)
        if pair is None:
            return None
        stored = pair.stored
        here = self._rows.state[stored] == COMMITTED  # lent as it is, its row can be no other object's
        self._counted("gone" if not here else "drifted" if drifted else "same")
        try:
            return self._drop(stored) if here and drifted else None
        finally:  # the worker is done with them
            self._end_loan(pair)

    def _drop(self, stored: int) -> Drift:
        rows = self._rows
        node = self._ram.node_of(stored)
        namespace = self._namespaces.by_slot[rows.namespace[stored]]
        shared = [
            tier.tier.name for tier in self._tiers if tier.shared is not None and tier.has(node, rows.kind[stored])
        ]
        key, kind = rows.key(stored), rows.kind[stored]
        self._tree.note_lost(node, MissReason.DRIFT)
        chunks = self._tree.drop_subtree(node)
        self._counters.add("dropped_objects.below_drifted", chunks - 1)
        return Drift(namespace.id, key, kind, chunks, tuple(shared))

    def worker_died(self) -> None:
        """Drop the comparisons of a worker that died. None is tried again: it may be what the worker died of."""
        pairs = list(self._pairs.values())
        self._pairs.clear()
        self._waiting.clear()
        for pair in pairs:
            self._counted("unanswered")
            self._end_loan(pair)

    def _end_loan(self, pair: _Pair) -> None:
        self._ram.end_loan(pair.scratch_entry)
        self._ram.end_loan(pair.stored_entry)
