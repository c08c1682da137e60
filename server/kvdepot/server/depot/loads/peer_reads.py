"""Reads for peers of objects that only a disk of this node has (ADR 95).

Such an object is read into RAM, as for an engine here, and is leased from there. Reads for peers are few, and take a
small part of RAM. Those that wait are given up soon: an engine of the reader waits, and the reader must not take this
daemon for one that hangs.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from kvdepot.core.arena import NO_ROW
from kvdepot.server.depot.tiering.promotions import Promotion, Promotions
from kvdepot.server.depot.tree.index import NONE
from kvdepot.server.depot.tree.lower_tier import LowerTier
from kvdepot.server.depot.tree.namespaces import Namespace
from kvdepot.server.depot.tree.ram import RamTier
from kvdepot.server.depot.tree.tree import Tree
from kvdepot.server.io.jobs import ABSENT, UNKNOWN
from kvdepot.server.io.peer_wire import Refusal
from kvdepot.server.platform.guard import engine_guard

READS_MAX: Final = 8
WAITING_MAX: Final = 64
SECONDS: Final = 1.0
"""From the question on. Readers have deadlines of a few seconds, and would open a breaker after some of those."""

_DROPS_MAX: Final = 32
"""Objects that are looked at to make room for one."""

Done = Callable[[Refusal | None], None]
"""None: the object may be leased now. Called once, maybe before `read` returns."""


@dataclass(eq=False, slots=True)
class _Read:
    namespace: Namespace
    key: bytes
    kind: int
    until: float
    done: Done | None  # None: it was answered
    size_bytes: int
    source: LowerTier | None = None  # None: it is not read yet, or somebody else has it read


class PeerReads:
    """What peers wait for. Together it takes at most `bytes_max` of RAM, or one object, and as much after its leases.

    A read keeps its place until the disk answers, though nobody may wait any more: so a disk that hangs has a few jobs
    for peers, and no more. Counts `peer_disk_reads.read`, `.busy` and `.gone`.
    """

    def __init__(self, tree: Tree, ram: RamTier, promotions: Promotions, *, bytes_max: int, on: bool) -> None:
        """`on`: whether anything is read for peers at all."""
        self.on = on
        self.placing = False
        """Whether room is being made for a peer. Prefetch keeps what it has pinned for engines here."""
        self._tree = tree
        self._index = tree.index
        self._namespaces = tree.namespaces
        self._disks = tree.disks
        self._clock = tree.clock
        self._counters = tree.counters
        self._ram = ram
        self._rows = ram.rows
        self._promotions = promotions
        self._bytes_max = bytes_max
        self._guard = engine_guard(tree.counters.add)
        self._waiting: deque[_Read] = deque()
        self._reading: dict[_Read, None] = {}  # the oldest first
        self._beginning = False
        self._kept: OrderedDict[int, tuple[int, int]] = OrderedDict()  # (generation, bytes) of what was read, by row
        self._kept_bytes = 0

    def length(self, namespace: Namespace, node: int, kind: int) -> int:
        """Return the length in bytes of an object that RAM lacks, or is getting, and a disk has; else ABSENT.

        UNKNOWN: the disk is silent, or too many wait.
        """
        if not self.on or kind not in namespace.object_bytes:
            return ABSENT
        row = self._index.row(node, kind)
        disks = self._readable(node, kind) if row == NO_ROW or self._promotions.reading(row) else []
        if not disks:
            return ABSENT
        offered = not self._full and self._first_answering(disks) is not None
        return namespace.object_bytes[kind] if offered else UNKNOWN

    def read(self, namespace: Namespace, key: bytes, kind: int, done: Done) -> None:
        """Have an object in RAM that `length` does not call absent, and call `done`."""
        size_bytes = self._ram.rounded(namespace.object_bytes[kind])
        read = _Read(namespace, key, kind, self._clock() + SECONDS, done, size_bytes)
        if self._full:
            self._answer(read, Refusal.BUSY)
            return
        self._waiting.append(read)
        self._begin_waiting()

    def tick(self) -> None:
        """Answer what is late."""
        now = self._clock()
        while self._waiting and self._waiting[0].until <= now:
            self._answer(self._waiting.popleft(), Refusal.BUSY)
        for read in [one for one in self._reading if one.until <= now]:
            self._answer(read, Refusal.BUSY)

    @property
    def _full(self) -> bool:
        """Return whether another read is given up at once."""
        return len(self._waiting) >= WAITING_MAX

    @property
    def _bytes(self) -> int:
        return sum(read.size_bytes for read in self._reading)

    def _readable(self, node: int, kind: int) -> list[LowerTier]:
        return [disk for disk in self._disks if disk.has(node, kind) and disk.tier.readable]

    def _first_answering(self, disks: Sequence[LowerTier]) -> LowerTier | None:
        now = self._clock()
        return next((disk for disk in disks if disk.reads.answers(now)), None)

    def _on_disk(self, node: int, kind: int) -> bool:
        return any(disk.has(node, kind) for disk in self._disks)

    def _node(self, read: _Read) -> int:
        """Return the node of its object. NONE: it has left the index, or another namespace has its slot."""
        in_use = self._namespaces.by_slot.get(read.namespace.slot) is read.namespace
        return self._index.find(read.namespace.slot, read.key) if in_use else NONE

    def _failed(self, read: _Read, node: int) -> None:
        """Refuse an object that could not be read. It is not gone, as long as a disk has it."""
        has = node != NONE and self._on_disk(node, read.kind)
        self._answer(read, Refusal.BUSY if has else Refusal.GONE)

    def _begin_waiting(self) -> None:
        if self._beginning:  # a tier answers before its call returns
            return
        self._beginning = True
        try:
            while self._waiting and len(self._reading) < READS_MAX and self._has_room(self._waiting[0]):
                read = self._waiting.popleft()
                if not self._guard.call("peers", self._begin, read):
                    self._forget(read)
                    self._answer(read, Refusal.BUSY)
        finally:
            self._beginning = False

    def _has_room(self, read: _Read) -> bool:
        return not self._reading or self._bytes + read.size_bytes <= self._bytes_max

    def _begin(self, read: _Read) -> None:
        node = self._node(read)
        row = NO_ROW if node == NONE else self._index.row(node, read.kind)
        if row != NO_ROW and not self._promotions.reading(row):  # RAM has got it from somebody else
            self._answer(read, None)
            return
        if node != NONE and row == NO_ROW and self.on:
            read.source = self._first_answering(self._readable(node, read.kind))
            row = NO_ROW if read.source is None else self._place(read, node, read.source)
        if row == NO_ROW:
            self._failed(read, node)
            return
        self._reading[read] = None
        if read.source is not None:
            read.source.reads_for_peers += 1
        promotion = Promotion(partial(self._arrived, read, row))
        self._promotions.start(promotion, [row])

    def _place(self, read: _Read, node: int, source: LowerTier) -> int:
        """Return a row for the object, or NO_ROW. Peers take room from what was read for peers before."""
        self._drop_kept(self._bytes_max - self._bytes - read.size_bytes)
        self.placing = True
        try:
            return self._promotions.place(read.namespace, node, read.kind, source)
        finally:
            self.placing = False

    def _drop_kept(self, left_bytes: int) -> None:
        """Drop what was read for peers, the oldest first, until it takes no more than this.

        What is being sent stays, and so does what an engine here loads or waits for.
        """
        for _ in range(_DROPS_MAX):
            if self._kept_bytes <= left_bytes or not self._kept:
                break
            row, (generation, size_bytes) = next(iter(self._kept.items()))
            node = self._ram.node_of(row) if self._rows.generation[row] == generation else NONE
            if node != NONE and (self._ram.lent.pinned(row) or self._ram.kept(node)):
                self._kept.move_to_end(row)
                continue
            del self._kept[row]
            self._kept_bytes -= size_bytes
            kind = self._rows.kind[row]
            if node != NONE and self._on_disk(node, kind) and not self._ram.pinned(node, kind):
                self._tree.drop_row(node, kind)
                self._ram.count_evicted("room", 1, size_bytes)

    def _arrived(self, read: _Read, row: int, whole: bool) -> None:
        self._forget(read)
        if not whole:
            self._failed(read, self._node(read))
        else:
            if read.source is not None:
                self._keep(row, read.size_bytes)
                if read.done is not None:
                    self._counters.add("peer_disk_reads.read")
            self._answer(read, None)
        self._begin_waiting()

    def _keep(self, row: int, size_bytes: int) -> None:
        _, before_bytes = self._kept.pop(row, (0, 0))
        self._kept[row] = self._rows.generation[row], size_bytes
        self._kept_bytes += size_bytes - before_bytes

    def _forget(self, read: _Read) -> None:
        if read in self._reading:
            del self._reading[read]
            if read.source is not None:
                read.source.reads_for_peers -= 1

    def _answer(self, read: _Read, why: Refusal | None) -> None:
        done, read.done = read.done, None
        if done is not None:
            if why is not None:
                self._counters.add(f"peer_disk_reads.{why}")
            self._guard.call("peers", done, why)
