"""The index: chunk key to node, and the tree of chunks. Columns only, no object per entry.

The hash table is open addressing with linear probing over node numbers (Knuth, TAOCP 3,
6.4, algorithms L and R). It is never more than half full, so that thousands of keys are
looked up in a few numpy operations. A dict from bytes to int would cost 138 bytes an entry,
and pauses of tens of milliseconds when it grows. This table costs 8 to 16 bytes and never
grows. The multipliers are random, so that no client can choose keys that collide.

A node is one chunk of one namespace. It has at most one row a kind, at most one handle a
kind and lower tier, a parent (NONE: the root) and its children in a doubly linked list. It
exists while any tier has an object of it. Nothing here survives a restart: adoption
rebuilds it from the extent table, and each lower tier says what it found.

`unlink` takes a subtree from the tree in one step, however large it is. From then on `find` and
`find_many` do not know its nodes. They stay until they are removed one by one.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Final

import numpy as np
import numpy.typing as npt
from kvdepot.core.arena import NO_ROW
from kvdepot.core.calls import KEY_BYTES, Kind
from kvdepot.server.storage.base import NO_HANDLE

NONE: Final = 0xFFFF_FFFF
"""No node."""
_MASK64: Final = (1 << 64) - 1
_UNLINKED: Final = 0xFFFF_FFFF
_U64 = np.uint64
_KEY: Final = struct.Struct("<QQ")
_ONE_KEY: Final = struct.Struct(f"{KEY_BYTES}s")
_FEW: Final = 32
"""So many keys are found sooner one by one: 16 in 14 us, and in 36 us all at once."""

U32 = npt.NDArray[np.uint32]
Nodes = npt.NDArray[np.int64]


class Index:
    """Nodes 0..capacity-1, over RAM and `tiers` lower tiers. `find` and `find_many` answer NONE for an unknown key."""

    def __init__(self, capacity: int, random_bytes: Callable[[int], bytes], tiers: int = 0) -> None:
        self.capacity = capacity
        self.count = 0
        self._high = 0  # nodes at and above were never used
        self._free = NONE  # freed nodes, linked by `_parent`
        self.keys: npt.NDArray[np.uint64] = np.empty((capacity, 2), np.uint64)
        self._key = self.keys.reshape(-1).data
        self.namespaces: npt.NDArray[np.uint16] = np.empty(capacity, np.uint16)
        self._namespace = self.namespaces.data
        self.rows: tuple[U32, ...] = tuple(np.empty(capacity, np.uint32) for _ in Kind)
        self._rows = tuple(rows.data for rows in self.rows)
        self.handles: tuple[tuple[U32, ...], ...] = tuple(
            tuple(np.empty(capacity, np.uint32) for _ in Kind) for _ in range(tiers)
        )
        self._handles = tuple(tuple(column.data for column in columns) for columns in self.handles)
        # How many children of a node have objects in RAM (first) and in each lower tier.
        self._children_in = tuple(np.empty(capacity, np.uint32).data for _ in range(1 + tiers))
        self._boundary = np.empty(capacity, np.uint32).data
        self._parent = np.empty(capacity, np.uint32).data
        self._first_child = np.empty(capacity, np.uint32).data
        self._following = np.empty(capacity, np.uint32).data
        self._preceding = np.empty(capacity, np.uint32).data
        self._unlinked: dict[int, None] = {}  # roots of what was unlinked
        self._cuts = 1
        # For how many cuts a node is known to hang on the tree, or _UNLINKED: it does not.
        self._seen = np.zeros(capacity, np.uint32).data
        self._random_bytes = random_bytes
        bits = max(4, (2 * capacity - 1).bit_length())
        self._shift = 64 - bits
        self._slot_mask = (1 << bits) - 1
        self._slots: U32 = np.zeros(1 << bits, np.uint32)  # node + 1, 0 is empty
        self._slot = self._slots.data
        self._multipliers = tuple(int.from_bytes(random_bytes(8), "little") | 1 for _ in range(3))

    # Looking up

    def find(self, namespace: int, key: bytes) -> int:
        node = self.named(namespace, key)
        return NONE if self._unlinked and node != NONE and self.unlinked(node) else node

    def named(self, namespace: int, key: bytes) -> int:
        """Return the node as `find` does, unlinked nodes included."""
        low, high = _KEY.unpack(key)
        at = self._home(namespace, low, high)
        while node := self._slot[at]:
            node -= 1
            if self._key[2 * node] == low and self._key[2 * node + 1] == high and self._namespace[node] == namespace:
                return node
            at = (at + 1) & self._slot_mask
        return NONE

    def find_many(self, namespace: int, keys: bytes) -> Nodes:
        """Return one node or NONE per 16-byte key."""
        if len(keys) <= _FEW * KEY_BYTES:
            return np.array([self.find(namespace, key) for (key,) in _ONE_KEY.iter_unpack(keys)], np.int64)
        pairs = np.frombuffer(keys, np.uint64).reshape(-1, 2)
        at = self._homes(np.full(1, namespace, np.uint64), pairs)
        found: Nodes = np.full(len(pairs), NONE, np.int64)
        todo = np.arange(len(pairs))
        while todo.size:
            candidates = self._slots[at[todo]].astype(np.int64) - 1
            occupied = candidates >= 0
            todo, candidates = todo[occupied], candidates[occupied]
            same = (self.keys[candidates] == pairs[todo]).all(axis=1) & (self.namespaces[candidates] == namespace)
            found[todo[same]] = candidates[same]
            todo = todo[~same]
            at[todo] = (at[todo] + 1) & self._slot_mask
        if self._unlinked:
            for at_key in np.flatnonzero(found != NONE).tolist():
                if self.unlinked(int(found[at_key])):
                    found[at_key] = NONE
        return found

    def unlinked(self, node: int) -> bool:
        """Return whether the node or one above it was unlinked. Walks up to what is known since the last unlink."""
        if not self._unlinked:
            return False
        seen, cuts = self._seen, self._cuts
        walked = []
        while node != NONE and seen[node] not in (cuts, _UNLINKED):
            walked.append(node)
            node = self._parent[node]
        known = cuts if node == NONE else seen[node]
        for node in walked:
            seen[node] = known
        return bool(known == _UNLINKED)

    def row(self, node: int, kind: int) -> int:
        """Return the head row of the node's object, or NO_ROW."""
        return self._rows[kind - 1][node]

    def rows_of(self, node: int) -> list[int]:
        return [rows[node] for rows in self._rows if rows[node] != NO_ROW]

    def handle(self, tier: int, node: int, kind: int) -> int:
        """Return the object's handle in a lower tier, or NO_HANDLE."""
        return self._handles[tier][kind - 1][node]

    def kinds_in_tier(self, tier: int, node: int) -> list[int]:
        """Return the kinds of the node's objects in a lower tier."""
        return [kind for kind, column in enumerate(self._handles[tier], 1) if column[node] != NO_HANDLE]

    def kinds_in_ram(self, node: int) -> list[int]:
        return [kind for kind, rows in enumerate(self._rows, 1) if rows[node] != NO_ROW]

    def many_in_tier(self, tier: int, nodes: Nodes) -> Nodes:
        """Return those of the nodes that a lower tier has any object of."""
        return nodes[np.any([column[nodes] != NO_HANDLE for column in self.handles[tier]], axis=0)]

    def many_in_ram(self, nodes: Nodes) -> Nodes:
        return nodes[np.any([rows[nodes] != NO_ROW for rows in self.rows], axis=0)]

    def children_in_ram(self, node: int) -> int:
        """Return how many children have a row."""
        return self._children_in[0][node]

    def children_in_tier(self, tier: int, node: int) -> int:
        """Return how many children have an object in a lower tier."""
        return self._children_in[1 + tier][node]

    def has_objects(self, node: int) -> bool:
        """Return whether RAM or any lower tier has an object of the node."""
        return bool(self.rows_of(node)) or any(self.kinds_in_tier(tier, node) for tier in range(len(self._handles)))

    def boundary(self, node: int) -> int:
        """Return the boundary that ends the chunk, in tokens."""
        return self._boundary[node]

    def key(self, node: int) -> bytes:
        low_high: bytes = self.keys[node].tobytes()
        return low_high

    def mark(self, node: int) -> int:
        """Return 64 bits of the node's key."""
        return self._key[2 * node]

    def namespace(self, node: int) -> int:
        return self._namespace[node]

    def parent(self, node: int) -> int:
        return self._parent[node]

    def parents_of(self, nodes: Nodes) -> U32:
        parents: U32 = np.asarray(self._parent)[nodes]
        return parents

    def boundaries_of(self, nodes: Nodes) -> U32:
        """Return the boundaries of these nodes, in tokens."""
        boundaries: U32 = np.asarray(self._boundary)[nodes]
        return boundaries

    def is_leaf(self, node: int) -> bool:
        return self._first_child[node] == NONE

    def children(self, node: int) -> Iterator[int]:
        child = self._first_child[node]
        while child != NONE:
            following = self._following[child]
            yield child
            child = following

    def branches(self, node: int) -> bool:
        """Return whether the node has several children."""
        first = self._first_child[node]
        return first != NONE and self._following[first] != NONE

    def leaves_first(self, node: int, limit: int) -> list[int]:
        """Return the subtree, every child before its parent. Return an empty list for more than `limit` nodes."""
        order = [node]
        for at in order:
            order.extend(islice(self.children(at), limit))
            if len(order) > limit:
                return []
        return order[::-1]

    # Changing

    def add(self, namespace: int, key: bytes, parent: int, boundary: int) -> int:
        """Add a node without objects, and return its number.

        The caller knows that the key is not there and that `count` is below capacity.
        """
        if self._free != NONE:
            node = self._free
            self._free = self._parent[node]
        else:
            node = self._high
            self._high += 1
        assert node < self.capacity, "more nodes than there is room for"
        self._key[2 * node], self._key[2 * node + 1] = _KEY.unpack(key)
        self._namespace[node] = namespace
        self._boundary[node] = boundary
        for rows in self._rows:
            rows[node] = NO_ROW
        for columns in self._handles:
            for column in columns:
                column[node] = NO_HANDLE
        for counts in self._children_in:
            counts[node] = 0
        self._first_child[node] = NONE
        self._seen[node] = 0
        self._link(node, parent)
        self._hash(node)
        self.count += 1
        return node

    def add_many(self, namespaces: npt.NDArray[np.uint16], keys: npt.NDArray[np.uint64], boundaries: U32) -> Nodes:
        """Add nodes of distinct names, numbered one after the other, and return them.

        `link_many` gives them their places. They have no objects yet. Only for an index that nothing was removed from.
        """
        count = len(keys)
        nodes: Nodes = np.arange(self._high, self._high + count)
        assert self._free == NONE and self._high + count <= self.capacity, "more nodes than there is room for"
        self._high += count
        self.count += count
        part = slice(self._high - count, self._high)
        self.keys[part] = keys
        self.namespaces[part] = namespaces
        np.asarray(self._boundary)[part] = boundaries
        for rows in self.rows:
            rows[part] = NO_ROW
        for columns in self.handles:
            for column in columns:
                column[part] = NO_HANDLE
        for counts in self._children_in:
            np.asarray(counts)[part] = 0
        for links in (self._parent, self._first_child, self._following, self._preceding):
            np.asarray(links)[part] = NONE
        at = self._homes(namespaces.astype(np.uint64), keys)
        todo = np.arange(count)
        while todo.size:
            empty = todo[self._slots[at[todo]] == 0]
            self._slots[at[empty]] = nodes[empty] + 1  # of several for one slot, one gets it
            todo = todo[self._slots[at[todo]] != nodes[todo] + 1]
            at[todo] = (at[todo] + 1) & self._slot_mask
        return nodes

    def link_many(self, nodes: Nodes, parents: Nodes) -> None:
        """Give nodes of `add_many` their parents (NONE: the root)."""
        np.asarray(self._parent)[nodes] = parents
        order = np.argsort(parents, kind="stable")
        order = order[parents[order] != NONE]
        nodes, parents = nodes[order], parents[order]
        siblings = parents[1:] == parents[:-1]
        np.asarray(self._following)[nodes[:-1][siblings]] = nodes[1:][siblings]
        np.asarray(self._preceding)[nodes[1:][siblings]] = nodes[:-1][siblings]
        first = np.append(True, ~siblings)[: len(nodes)]
        np.asarray(self._first_child)[parents[first]] = nodes[first]

    def set_rows(self, kind: int, nodes: Nodes, rows: Nodes) -> None:
        """Set the first rows of this kind for linked nodes. Call `count_children_in_ram` once, after all kinds."""
        self.rows[kind - 1][nodes] = rows

    def count_children_in_ram(self) -> None:
        nodes = self.nodes()
        held = np.zeros(len(nodes), np.bool_)
        for rows in self.rows:
            held |= rows[nodes] != NO_ROW
        parents = np.asarray(self._parent)[nodes[held]]
        np.add.at(np.asarray(self._children_in[0]), parents[parents != NONE], 1)

    def set_row(self, node: int, kind: int, row: int) -> None:
        before, self._rows[kind - 1][node] = self._rows[kind - 1][node], row
        if (before == NO_ROW) != (row == NO_ROW):
            self._count_child(0, node, len(self.kinds_in_ram(node)), 1 if before == NO_ROW else -1)

    def set_handle(self, tier: int, node: int, kind: int, handle: int) -> None:
        before, self._handles[tier][kind - 1][node] = self.handle(tier, node, kind), handle
        if (before == NO_HANDLE) != (handle == NO_HANDLE):
            self._count_child(1 + tier, node, len(self.kinds_in_tier(tier, node)), 1 if before == NO_HANDLE else -1)

    def _count_child(self, place: int, node: int, kinds: int, change: int) -> None:
        """Count the node for its parent where its first object came, or its last one went. `kinds`: it has now."""
        parent = self._parent[node]
        if kinds == (1 if change > 0 else 0) and parent != NONE:
            self._children_in[place][parent] += change

    def unlink(self, node: int) -> None:
        """Unlink the node, which has no objects, with everything below it."""
        if not self.unlinked(node):
            self._cuts += 1
        self._seen[node] = _UNLINKED
        self._unlinked[node] = None
        self._unlink_sibling(node)
        self._parent[node] = NONE

    def last_unlinked(self) -> int:
        """Return the root of what was unlinked last, or NONE."""
        return next(reversed(self._unlinked), NONE)

    def first_child(self, node: int) -> int:
        return self._first_child[node]

    def rename(self, node: int) -> None:
        """Give the node a random key, so that its own can be reused."""
        self._unhash(node)
        for word in (2 * node, 2 * node + 1):
            self._key[word] = int.from_bytes(self._random_bytes(8), "little")
        self._hash(node)

    def remove(self, node: int) -> None:
        """Forget a leaf without objects."""
        assert self._first_child[node] == NONE, "only leaves are removed"
        self._unlinked.pop(node, None)
        self._unhash(node)
        self._unlink_sibling(node)
        self._parent[node] = self._free
        self._free = node
        self.count -= 1

    def nodes(self) -> Nodes:
        """Return all nodes, in no order. O(capacity)."""
        nodes: Nodes = self._slots[self._slots != 0].astype(np.int64) - 1
        return nodes

    @property
    def high(self) -> int:
        """The first of the node numbers that were never used."""
        return self._high

    def candidates(self, namespace: int, start: int, stop: int) -> Nodes:
        """Return numbers in [`start`, `stop`) whose last node was in this namespace. It may be gone (`live`)."""
        candidates: Nodes = start + np.flatnonzero(self.namespaces[start : min(stop, self._high)] == namespace)
        return candidates

    def live(self, namespace: int, candidates: Nodes) -> Nodes:
        """Return those of the candidates that are nodes now."""
        live: Nodes = candidates[self.find_many(namespace, self.keys[candidates].tobytes()) == candidates]
        return live

    def leaves(self, nodes: Nodes) -> Nodes:
        """Return those of these nodes that have no children."""
        leaves: Nodes = nodes[np.asarray(self._first_child)[nodes] == NONE]
        return leaves

    def leaves_of(self, namespace: int) -> Nodes:
        """Return all leaves of a namespace, in no order. O(capacity): for dropping a namespace."""
        nodes = self.nodes()
        return self.leaves(nodes[self.namespaces[nodes] == namespace])

    # Within

    def _home(self, namespace: int, low: int, high: int) -> int:
        by_low, by_high, by_namespace = self._multipliers
        return ((low * by_low + high * by_high + namespace * by_namespace) & _MASK64) >> self._shift

    def _homes(self, namespaces: npt.NDArray[np.uint64], keys: npt.NDArray[np.uint64]) -> Nodes:
        by_low, by_high, by_namespace = map(_U64, self._multipliers)
        mixed = keys[:, 0] * by_low + keys[:, 1] * by_high + namespaces * by_namespace
        homes: Nodes = (mixed >> _U64(self._shift)).astype(np.int64)
        return homes

    def _link(self, node: int, parent: int) -> None:
        self._parent[node] = parent
        self._preceding[node] = NONE
        self._following[node] = NONE
        if parent == NONE:
            return
        first = self._first_child[parent]
        self._following[node] = first
        if first != NONE:
            self._preceding[first] = node
        self._first_child[parent] = node

    def _unlink_sibling(self, node: int) -> None:
        parent, before, after = self._parent[node], self._preceding[node], self._following[node]
        if parent == NONE:
            return
        if before == NONE:
            self._first_child[parent] = after
        else:
            self._following[before] = after
        if after != NONE:
            self._preceding[after] = before

    def _hash(self, node: int) -> None:
        at = self._home(self._namespace[node], self._key[2 * node], self._key[2 * node + 1])
        while self._slot[at]:
            at = (at + 1) & self._slot_mask
        self._slot[at] = node + 1

    def _unhash(self, node: int) -> None:
        """Remove from the hash table, moving back what probed past it."""
        mask = self._slot_mask
        hole = self._home(self._namespace[node], self._key[2 * node], self._key[2 * node + 1])
        while self._slot[hole] != node + 1:
            hole = (hole + 1) & mask
        at = hole
        while True:
            self._slot[hole] = 0
            while True:
                at = (at + 1) & mask
                other = self._slot[at]
                if not other:
                    return
                other -= 1
                home = self._home(self._namespace[other], self._key[2 * other], self._key[2 * other + 1])
                if (at - home) & mask >= (at - hole) & mask:
                    break
            self._slot[hole] = other + 1
            hole = at
