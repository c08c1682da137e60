"""What operators have pinned: a namespace, or a path by its last chunk, is not evicted from RAM until a time.

A pin keeps what RAM has, now and later; it reads nothing. Within a share of RAM, in bytes and in rows of the extent
table: older pins first, of each the beginnings of paths first. What is above the share may be evicted as ever.
Corruption, an operator's `evict` and a new arena take pinned objects too.

Exact, because eviction of an inner node would leave what is below it without a path (design.md#eviction): an object is
pinned only where its chunk has the object that makes the path in RAM, and so has, pinned, the chunk before it. What
pins keep out of eviction is hence what they are charged for.

Which objects these are is found in slices, once when pins change and then every few seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from kvdepot.core.arena import NO_ROW
from kvdepot.core.calls import Kind
from kvdepot.core.errors import NotFound
from kvdepot.core.limits import check_limit
from kvdepot.core.report import PinStatus
from kvdepot.server.depot.tree.index import NONE, Nodes
from kvdepot.server.depot.tree.namespaces import Namespace
from kvdepot.server.depot.tree.ram import RamTier
from kvdepot.server.depot.tree.rooms import Room
from kvdepot.server.depot.tree.rows import COMMITTED
from kvdepot.server.depot.tree.tree import Tree
from kvdepot.server.depot.tree.walks import named, up

PINS_MAX: Final = 256
"""A quarter of the namespace table: who pins namespaces does not fill it."""
_SLICE_NODES: Final = 128
"""1 to 2 ms."""
_SWEEP_SECONDS: Final = 2.0
_KINDS: Final = tuple(map(int, Kind))


@dataclass(eq=False, slots=True)
class _Pin:
    namespace_id: bytes
    key: bytes  # of the chunk that ends the path; empty: all of the namespace
    until: float
    chunks: int = 0  # these three are those of the last sweep
    objects: int = 0
    bytes: int = 0


class Pins:
    """The pins of operators. They may use `share` of RAM."""

    def __init__(self, tree: Tree, ram: RamTier, share: float) -> None:
        self._tree = tree
        self._ram = ram
        self._index = tree.index
        self._namespaces = tree.namespaces
        self._clock = tree.clock
        self._rows = ram.rows
        self._taken = ram.pins.user
        self._share = share
        self._pins: dict[tuple[bytes, bytes], _Pin] = {}  # in the order in which they were made
        self._sweep: Iterator[None] | None = None
        self._sweep_at = 0.0

    def configure(self, share: float) -> None:
        """Set the share of RAM that pins may use. Objects above a smaller share are unpinned."""
        self._share = share
        self._begin()

    def statuses(self) -> tuple[PinStatus, ...]:
        """Return the status of all pins. Chunks, objects and bytes are as of some seconds ago."""
        now = self._clock()
        return tuple(
            PinStatus(one.namespace_id, one.key, max(one.until - now, 0.0), one.chunks, one.objects, one.bytes)
            for one in self._pins.values()
        )

    def pins(self, namespace: Namespace) -> bool:
        """Return whether the namespace, or a path of it, is pinned."""
        return any(namespace_id == namespace.id for namespace_id, _ in self._pins)

    # What operators do. `run_once` is to be called until it is False: then it is so

    def pin(self, namespace_id: bytes, key: bytes, seconds: float) -> None:
        """Pin for so many seconds from now on, also where it was pinned already. Raise NotFound or LimitExceeded."""
        named(self._index, self._namespaces, namespace_id, key)
        self.restore(namespace_id, key, seconds)

    def restore(self, namespace_id: bytes, key: bytes, seconds: float) -> None:
        """Pin as an earlier run did, also what may come back later. Raise LimitExceeded."""
        check_limit("pins", len({*self._pins, (namespace_id, key)}), PINS_MAX)
        pin = self._pins.setdefault((namespace_id, key), _Pin(namespace_id, key, 0.0))
        pin.until = self._clock() + seconds
        self._begin()

    def unpin(self, namespace_id: bytes, key: bytes) -> None:
        """Unpin a namespace or a path. Raise NotFound where it is not pinned."""
        if self._pins.pop((namespace_id, key), None) is None:
            what = f"chunk {key.hex()} of namespace {namespace_id.hex()}" if key else f"namespace {namespace_id.hex()}"
            raise NotFound(f"{what} is not pinned", advice="`kvdepotctl status` lists what is")
        self._begin()

    def status(self, namespace_id: bytes, key: bytes) -> PinStatus | None:
        return next((one for one in self.statuses() if (one.namespace_id, one.key) == (namespace_id, key)), None)

    # Sweeping

    def tick(self) -> None:
        now = self._clock()
        for name in [name for name, pin in self._pins.items() if pin.until <= now]:
            del self._pins[name]
            self._begin()
        if self._sweep is None and self._pins and now >= self._sweep_at:
            self._begin()
        self.run_once()

    def run_once(self) -> bool:
        """Run a slice of the sweep. Return False when there is nothing more to do for now."""
        if self._sweep is not None and next(self._sweep, self) is self:
            self._sweep = None
            self._sweep_at = self._clock() + _SWEEP_SECONDS
        return self._sweep is not None

    def _begin(self) -> None:
        self._sweep = self._sweeping()

    def _sweeping(self) -> Iterator[None]:
        """Unpin first what no pin covers, so that others get its room. Pin then what pins cover now."""
        found: list[tuple[_Pin, Namespace, Nodes]] = []  # no nodes: all of the namespace
        for pin in list(self._pins.values()):
            namespace = self._namespaces.by_id.get(pin.namespace_id)
            if namespace is not None:
                path: list[int] = []
                yield from up(self._index, namespace, pin.key, path)
                found.append((pin, namespace, np.array(path, np.int64)))
            else:
                pin.chunks, pin.objects, pin.bytes = 0, 0, 0
        yield from self._release(found)
        for pin, namespace, path_nodes in found:
            yield from self._take_path(namespace, path_nodes) if pin.key else self._take_all(namespace)
            self._count(pin, namespace, path_nodes)
            yield

    def _release(self, found: list[tuple[_Pin, Namespace, Nodes]]) -> Iterator[None]:
        """Unpin objects that no pin covers, or all objects where more is pinned than the share allows."""
        covered = np.zeros(len(self._taken.sizes), np.bool_)
        if not any(map(self._above_share, self._ram.rooms)):
            for pin, namespace, path in found:
                if not pin.key:
                    covered |= self._rows.namespaces == namespace.slot
                for rows in self._index.rows if pin.key else ():
                    at = rows[path]
                    covered[at[at != NO_ROW]] = True
        yield
        for number, row in enumerate(np.flatnonzero((self._taken.sizes > 0) & ~covered).tolist(), 1):
            if self._taken.sizes[row]:
                self._taken.unpin(row)
                node = self._ram.node_of(row)
                if node != NONE:
                    self._tree.update_candidates(node)
            if number % _SLICE_NODES == 0:
                yield

    def _take_path(self, namespace: Namespace, path: Nodes) -> Iterator[None]:
        for number, node in enumerate(path.tolist(), 1):
            if not self._take(namespace, node):
                return
            if number % _SLICE_NODES == 0:
                yield

    def _take_all(self, namespace: Namespace) -> Iterator[None]:
        """Pin what RAM has of the namespace and is not pinned yet. Each chunk comes after its ancestors."""
        rows, steps = self._rows, 0
        due = (rows.namespaces == namespace.slot) & (rows.states == COMMITTED) & (self._taken.sizes == 0)
        for row in np.flatnonzero(due).tolist():
            missing: list[int] = []
            node = self._ram.node_of(row)
            while node != NONE and (not missing or not self._pinned(namespace, node)):
                missing.append(node)
                node = self._index.parent(node)
            for at in reversed(missing):
                if not self._take(namespace, at):
                    return
            steps += 1 + len(missing)
            if steps >= _SLICE_NODES:
                steps = 0
                yield

    def _take(self, namespace: Namespace, node: int) -> bool:
        """Pin what RAM has of the node, where it continues something pinned; False: the share is used up."""
        index, path_kind = self._index, namespace.path_kind
        if index.namespace(node) != namespace.slot or not self._ram.complete(node, path_kind):
            return True
        above = index.parent(node)
        if above != NONE and not self._pinned(namespace, above):
            return True
        due = [
            index.row(node, kind)
            for kind in sorted(_KINDS, key=lambda one: one != path_kind)
            if self._ram.complete(node, kind) and not self._taken.sizes[index.row(node, kind)]
        ]
        taken = 0
        for row in due:
            size_bytes, rows = self._ram.rounded_bytes(row), len(self._rows.chain(row))
            if self._above_share(self._ram.rooms[self._ram.part_of(row)], size_bytes, rows):
                break
            self._taken.pin(row, size_bytes, rows)
            taken += 1
        if taken:
            self._tree.update_candidates(node)
        return taken == len(due)

    def _pinned(self, namespace: Namespace, node: int) -> bool:
        """Return whether the path object of the node is pinned."""
        row = self._index.row(node, namespace.path_kind)
        return row != NO_ROW and self._taken.sizes[row] > 0

    def _count(self, pin: _Pin, namespace: Namespace, path: Nodes) -> None:
        sizes = self._taken.sizes[self._rows.namespaces == namespace.slot]
        if pin.key:
            rows = np.concatenate([column[path] for column in self._index.rows])
            sizes = self._taken.sizes[rows[rows != NO_ROW]]
        pin.chunks = len(path) if pin.key else namespace.nodes
        pin.objects, pin.bytes = int(np.count_nonzero(sizes)), int(sizes.sum())

    def _above_share(self, room: Room, size_bytes: int = 0, rows: int = 0) -> bool:
        """Return whether so much more in a room would be more than pins may use there."""
        above = self._taken.bytes_in(room.number) + size_bytes > int(self._share * room.allocator.ready_bytes)
        return above or self._taken.rows_in(room.number) + rows > int(self._share * room.rows_max)
