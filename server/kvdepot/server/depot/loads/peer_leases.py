"""What other daemons may read of this one's RAM (ADR 78): a look at it, and leases that are few, small and short.

What only a disk has is read into RAM first (`peer_reads`).

A lease lends an object's extents to the process that sends them, as a write to a lower tier does. It ends when that
process says so, or is reaped. Only then can the extents be reused (I6).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
from kvdepot.core.allocator import Extent
from kvdepot.core.arena import NAMESPACES_MAX, NO_ROW, LentMode
from kvdepot.core.control import Switch
from kvdepot.core.kinds import Kind
from kvdepot.server.depot.loads.peer_reads import Done, PeerReads
from kvdepot.server.depot.sessions.workers import ObjectLoan, WorkerLoans, Workers
from kvdepot.server.depot.tiering.promotions import Promotions
from kvdepot.server.depot.tree.index import NONE, Index
from kvdepot.server.depot.tree.lower_tier import LowerTier
from kvdepot.server.depot.tree.namespaces import Namespace
from kvdepot.server.depot.tree.ram import RamTier
from kvdepot.server.depot.tree.rows import Rows
from kvdepot.server.depot.tree.switches import Switches
from kvdepot.server.depot.tree.tree import Tree
from kvdepot.server.io.chunk_words import Words, seeds_of, words_of
from kvdepot.server.io.jobs import ABSENT, UNKNOWN
from kvdepot.server.io.peer_wire import Refusal
from kvdepot.server.storage.base import ObjectName

LEASES_MAX: Final = 64
_RAM_SHARE: Final = 8
"""All leases together lend at most this part of RAM, or one object."""
_KINDS: Final = frozenset(map(int, Kind))
Wanted: TypeAlias = tuple[bytes, bytes, int]
"""(namespace, key, kind) of an object."""
_Found: TypeAlias = tuple[Namespace, int, int]


@dataclass(frozen=True, slots=True)
class PeerLease:
    """The right to read these extents. `raw_sum` is the XXH3-128 of their bytes."""

    number: int
    extents: tuple[Extent, ...]
    raw_sum: int
    generation: int


class PeerLeases:
    """The leases of one run. `worker` is a number from `started`. `tenant` None: there are no tenants here.

    `want(row)` asks for an adopted object to be verified soon. `valid` returns whether no bump has invalidated a
    namespace.
    """

    def __init__(
        self, tree: Tree, ram: RamTier, loans: WorkerLoans, workers: Workers, switches: Switches,
        want: Callable[[int], None], promotions: Promotions, *, valid: Callable[[Namespace], bool], from_disks: bool,
    ) -> None:  # fmt: skip
        self._tree = tree
        self._index = tree.index
        self._namespaces = tree.namespaces
        self._ram = ram
        self._rows = ram.rows
        self._loans = loans
        self._switches = switches
        self._want = want
        self._valid = valid
        self.workers = workers
        """Where the process that sends is written down, before it is lent anything."""
        self._leases: dict[int, tuple[ObjectLoan, int]] = {}
        self._numbers = 0
        self.lent_bytes = 0
        self.bytes_max = ram.data_bytes // _RAM_SHARE
        self.reads = PeerReads(tree, ram, promotions, bytes_max=self.bytes_max, on=from_disks)

    def __len__(self) -> int:
        return len(self._leases)

    def locate(self, tenant: str | None, wanted: Iterable[Wanted]) -> tuple[int, ...]:
        """Return the length of each object in bytes, ABSENT or UNKNOWN. Nothing is pinned, and nothing counts as used.

        UNKNOWN: it is being written, or has to be verified or to get its checksum first, or the disk that has it is
        silent, or too many wait. A reader that took it for absent would not ask again for a while.
        """
        return tuple(self._length(self._found(tenant, *one)) for one in wanted)

    def _length(self, found: _Found | None) -> int:
        if found is None:
            return ABSENT
        namespace, node, kind = found
        row = self._index.row(node, kind)
        if row != NO_ROW and self._lendable(row):
            return self._ram.size_bytes(row)
        length = self.reads.length(namespace, node, kind)
        if length != ABSENT or row == NO_ROW:
            return length
        if self._rows.unverified(row):
            self._want(row)
        return UNKNOWN

    def read(self, tenant: str | None, name: ObjectName, done: Done) -> bool:
        """Read an object that such a peer may have, if it has to be read before it can be leased, and call `done`.

        Return False if there is nothing to wait for.
        """
        found = self._found(tenant, name.namespace, name.key, name.kind)
        if found is None or self.reads.length(*found) == ABSENT:
            return False
        if self._full(name.raw_bytes):
            done(Refusal.BUSY)  # there would be no lease for it
        else:
            self.reads.read(found[0], name.key, name.kind, done)
        return True

    def lease(self, tenant: str | None, name: ObjectName, worker: int) -> PeerLease | Refusal:
        """Lend an object to the worker, or say why not. Raise UnknownWorker."""
        found = self._found(tenant, name.namespace, name.key, name.kind)
        row = NO_ROW if found is None else self._index.row(found[1], name.kind)
        if row == NO_ROW or not self._lendable(row):
            comes = found is not None and self.reads.length(*found) != ABSENT
            return Refusal.BUSY if comes else Refusal.GONE
        if self._ram.name(row) != name:
            return Refusal.FOREIGN
        loan = self._loans.loan(row, LentMode.READ)
        if self._full(name.raw_bytes) or not loan.begin(worker):
            return Refusal.BUSY
        self._numbers += 1
        self._leases[self._numbers] = loan, name.raw_bytes
        self.lent_bytes += name.raw_bytes
        raw_sum = self._rows.raw_sum(row)
        assert raw_sum is not None, "it is lendable"
        return PeerLease(self._numbers, self._rows.extents(row), raw_sum, self._rows.generation[row])

    def _full(self, raw_bytes: int) -> bool:
        """Return whether no further object of so many bytes is lent now."""
        over = bool(self._leases) and self.lent_bytes + raw_bytes > self.bytes_max
        return over or len(self._leases) >= LEASES_MAX

    def end(self, number: int) -> bool:
        """End a lease: the worker does not touch the extents any more. Return whether there was one."""
        loan, raw_bytes = self._leases.pop(number, (None, 0))
        self.lent_bytes -= raw_bytes
        if loan is not None:
            loan.end()
        return loan is not None

    def end_all(self) -> None:
        """End all leases: the worker is proven dead."""
        for number in tuple(self._leases):
            self.end(number)

    def chunks(self, tenant: str | None) -> PeerChunks:
        """Return what gathers the chunks that such a peer may have, in namespaces that are served now."""
        served = [one for one in self._namespaces.by_id.values() if self._serves(tenant, one)]
        disks = [disk for disk in self._tree.disks if self.reads.on and disk.tier.readable]
        return PeerChunks(self._rows, self._index, disks, served, self._namespaces.by_slot)

    def _found(self, tenant: str | None, namespace_id: bytes, key: bytes, kind: int) -> _Found | None:
        """Return namespace, node and kind of an object that such a peer may be served, now or later."""
        namespace = self._namespaces.by_id.get(namespace_id)
        if namespace is None or kind not in _KINDS or not self._serves(tenant, namespace):
            return None
        node = self._index.find(namespace.slot, key)
        return None if node == NONE else (namespace, node, kind)

    def _lendable(self, row: int) -> bool:
        """Return whether the object is committed, written or verified in this run, and has a checksum."""
        return self._rows.visible(row) and self._rows.summed(row)

    def _serves(self, tenant: str | None, namespace: Namespace) -> bool:
        """Return whether loads of the namespace are on, and it belongs to this tenant if there are tenants.

        Whose it is has to be known: no engine may have registered it in this run.
        """
        if not self._valid(namespace) or self._switches.refusal(Switch.LOADS, namespace.id) is not None:
            return False
        return tenant is None or (namespace.spec is not None and namespace.tenant == tenant)


class PeerChunks:
    """The chunks of some namespaces that can be had, in slices: of the extent table, and then of the index for disks.

    A chunk that is stored or evicted meanwhile may be in it or not. So may one that is being deleted, and a chunk with
    several objects is in it several times.
    """

    def __init__(
        self, rows: Rows, index: Index, disks: Sequence[LowerTier], namespaces: Sequence[Namespace],
        by_slot: Mapping[int, Namespace],
    ) -> None:  # fmt: skip
        """`by_slot`: who has each slot by now. Another tenant's namespace may get one between two slices."""
        self._rows = rows
        self._index = index
        self._disks = disks
        self._namespaces = namespaces
        self._by_slot = by_slot
        self._served = np.zeros(NAMESPACES_MAX, np.bool_)
        self._seeds = np.zeros(NAMESPACES_MAX, np.uint64)
        self._seeds[[one.slot for one in namespaces]] = seeds_of(b"".join(one.id for one in namespaces))
        self._keys: npt.NDArray[np.uint64] = rows.keys.view("<u8").reshape(-1, 2)

    @property
    def places(self) -> int:
        """Return how many places there are to look at."""
        return self._rows.count + (self._index.high if self._disks else 0)

    def words(self, start: int, stop: int) -> Words:
        """Return the words of chunks in places from `start` on, before `stop`."""
        self._served[:] = False
        self._served[[one.slot for one in self._namespaces if self._by_slot.get(one.slot) is one]] = True
        count = self._rows.count
        return np.concatenate(
            (self._in_ram(start, min(stop, count)), self._on_disks(max(start - count, 0), stop - count))
        )

    def _in_ram(self, start: int, stop: int) -> Words:
        rows, part = self._rows, slice(start, max(stop, start))
        heads = start + np.flatnonzero(rows.lendable(part))
        return self._words(rows.namespaces[heads], self._keys[heads])

    def _on_disks(self, start: int, stop: int) -> Words:
        """Return words of nodes. A number without a node has no object in any tier."""
        nodes = np.arange(start, max(stop, start))
        held = [self._index.many_in_tier(disk.number, nodes) for disk in self._disks]
        found = np.unique(np.concatenate(held)) if held else nodes[:0]
        return self._words(self._index.namespaces[found], self._index.keys[found])

    def _words(self, slots: npt.NDArray[np.uint16], keys: npt.NDArray[np.uint64]) -> Words:
        served = self._served[slots]
        return words_of(self._seeds[slots[served]], keys[served])
