"""The extent table, and the order of stores that keeps it true at every instruction.

Only this module writes the table. A SIGKILL may come between any two stores, so each
change writes its fields first and one publishing store last:

* reserve: fields, generation odd, continuation rows; then (after the lent entry) state RESERVED of the head
* scratch: as reserve, but generation even, and then state DYING
* commit: flags and run, generation even, then state COMMITTED of the head
* unindex: generation to the next even number, then state DYING of the head
* free: state FREE of the head, then of the continuations; only then are the bytes reusable

Continuation rows mean something only through a head that links them.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
from kvdepot.core.arena import NO_ROW, ArenaTables, Column, RowFlag, RowState
from kvdepot.core.lifecycle import ObjectEvent, next_state

Extent = tuple[int, int]
U32 = npt.NDArray[np.uint32]

FREE: Final = int(RowState.FREE)
RESERVED: Final = int(RowState.RESERVED)
COMMITTED: Final = int(RowState.COMMITTED)
CONTINUATION: Final = int(RowState.CONTINUATION)
DYING: Final = int(RowState.DYING)
SUMMED: Final = int(RowFlag.SUMMED)
VERIFIED: Final = int(RowFlag.VERIFIED)


class Space(Protocol):
    """What the bytes of extents go back to."""

    def free(self, offset: int, length: int) -> None: ...


class TornLinksError(Exception):
    """The links between the rows of an object are damaged. It is dropped at the next tick."""


def _bytes_of(column: Column) -> memoryview:
    view: memoryview = column.view(np.uint8).data
    return view


class Rows:
    """Columns of the extent table, as arrays for many rows and as memoryviews for one.

    Construct, then either `reset_free` (adoption has decided which rows are free) or
    nothing: a zeroed table is all free.
    """

    def __init__(self, tables: ArenaTables, run: int) -> None:
        columns = tables.extents
        self.count = tables.layout.rows
        self.run = run
        self.generations = columns["generation"]
        self.offsets = columns["offset"]
        self.lengths = columns["length"]
        self.nexts = columns["next"]
        self.runs = columns["run"]
        self.states = columns["state"]
        self.flags = columns["flags"]
        self.kinds = columns["kind"]
        self.namespaces = columns["namespace"]
        self.boundaries = columns["boundary"]
        self.keys = columns["key"]
        self.parents = columns["parent"]
        self.generation = self.generations.data
        self.offset = self.offsets.data
        self.length = self.lengths.data
        self.next = self.nexts.data
        self.run_of = self.runs.data
        self.state = self.states.data
        self.flag = self.flags.data
        self.kind = self.kinds.data
        self.namespace = self.namespaces.data
        self.boundary = self.boundaries.data
        self.sums_lo, self.sums_hi = columns["sum_lo"], columns["sum_hi"]
        self.sum_lo, self.sum_hi = self.sums_lo.data, self.sums_hi.data
        self._key = _bytes_of(self.keys)
        self._parent = _bytes_of(self.parents)
        self._free: U32 = np.empty(0, np.uint32)
        self._free_stack = self._free.data
        self.free_count = 0
        self.torn: set[int] = set()  # heads whose links were found damaged, for `Tree.drop_torn`
        self.reset_free(np.arange(self.count, dtype=np.uint32))

    def reset_free(self, free_rows: U32) -> None:
        """Set the free rows, in ascending order: these and no others. The lowest are used first."""
        self._free = np.empty(self.count, np.uint32)
        self.free_count = len(free_rows)
        self._free[: self.free_count] = free_rows[::-1]
        self._free_stack = self._free.data

    # Reading

    def key(self, row: int) -> bytes:
        return bytes(self._key[16 * row : 16 * row + 16])

    def parent(self, row: int) -> bytes:
        return bytes(self._parent[16 * row : 16 * row + 16])

    def chain(self, head: int) -> list[int]:
        """Return the object's rows, head first. Raise TornLinksError, and note the head in `torn`."""
        if self.next[head] == NO_ROW:
            return [head]
        rows, whole = self.follow(head)
        if not whole:
            self.torn.add(head)
            raise TornLinksError(f"row {rows[-1]} links {self.next[rows[-1]]}")
        return rows

    def follow(self, head: int, others: Container[int] = ()) -> tuple[list[int], bool]:
        """Return the rows as far as the links can be followed, and whether that is to the end.

        A walk ends at a row outside the table, at one that it has seen, at one that does not continue this object, and
        at one of `others`. So it never takes more steps than there are rows.
        """
        rows, seen = [head], {head}
        while (row := self.next[rows[-1]]) != NO_ROW:
            if row >= self.count or row in seen or row in others or not self.continues(head, row):
                return rows, False
            rows.append(row)
            seen.add(row)
        return rows, True

    def continues(self, head: int, row: int) -> bool:
        """Return whether a row of the table is a further extent of this object, as `reserve` has written it."""
        same = self.kind[row] == self.kind[head] and self.namespace[row] == self.namespace[head]
        return same and self.state[row] == CONTINUATION and self.key(row) == self.key(head)

    def mend(self, head: int) -> bool:
        """Cut off a damaged link, so that the object can be dropped. Return whether there was one.

        Rows and bytes that no link leads to stay out of use until the next adoption.
        """
        if self.next[head] == NO_ROW:
            return False
        self.torn.discard(head)
        rows, whole = self.follow(head)
        if not whole:
            self.next[rows[-1]] = NO_ROW
        return not whole

    def size_bytes(self, head: int) -> int:
        if self.next[head] == NO_ROW:
            return self.length[head]
        return sum([self.length[row] for row in self.chain(head)])

    def extents(self, head: int) -> tuple[Extent, ...]:
        return tuple((self.offset[row], self.length[row]) for row in self.chain(head))

    def visible(self, head: int) -> bool:
        """Return whether the object may be served: committed, and written or verified in this run (row I1c)."""
        return self.state[head] == COMMITTED and self.run_of[head] == self.run

    def visible_many(self, heads: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return `visible` of each head. NO_ROW is not visible."""
        seen: npt.NDArray[np.bool_] = heads != NO_ROW
        held = heads[seen]
        seen[seen] = (self.states[held] == COMMITTED) & (self.runs[held] == self.run)
        return seen

    def lendable(self, part: slice) -> npt.NDArray[np.bool_]:
        """Return whether each row of this part is the head of an object that is visible and has a checksum."""
        committed = (self.states[part] == COMMITTED) & (self.runs[part] == self.run)
        lendable: npt.NDArray[np.bool_] = committed & (self.flags[part] & SUMMED != 0)
        return lendable

    def unverified(self, head: int) -> bool:
        """Return whether the object was adopted, and its bytes have not been looked at yet."""
        return self.state[head] == COMMITTED and self.run_of[head] != self.run

    def summed(self, head: int) -> bool:
        return bool(self.flag[head] & SUMMED)

    # Changes

    def reserve(
        self, extents: Sequence[Extent], *, key: bytes, parent: bytes, kind: int, namespace: int, boundary: int
    ) -> int:
        """Fill rows for an object; `publish_reserved` or `publish_scratch` makes the head count.

        The caller checked `free_count`.
        """
        rows = [self._free_stack[self.free_count - 1 - i] for i in range(len(extents))]
        self.free_count -= len(rows)
        head = rows[0]
        for row, link, (offset, length) in zip(rows, [*rows[1:], NO_ROW], extents, strict=True):
            self.offset[row] = offset
            self.length[row] = length
            self.next[row] = link
            self._key[16 * row : 16 * row + 16] = key
            self._parent[16 * row : 16 * row + 16] = parent
            self.boundary[row] = boundary
            self.namespace[row] = namespace
            self.kind[row] = kind
            self.flag[row] = 0
            self.run_of[row] = self.run
            self.generation[row] = (self.generation[row] + 1) | 1
            if row != head:
                self._enter(row, ObjectEvent.EXTEND)
        return head

    def publish_reserved(self, head: int) -> None:
        self._enter(head, ObjectEvent.RESERVE)

    def publish_scratch(self, head: int) -> None:
        """Publish a row as a scratch, instead of `publish_reserved`. It is never found, in this run or in the next."""
        for row in self.chain(head):
            self.generation[row] = (self.generation[row] + 1) & ~1
        self._enter(head, ObjectEvent.SCRATCH)

    def commit(self, head: int) -> None:
        self.flag[head] = 0
        self.run_of[head] = self.run
        for row in self.chain(head):
            # Even already where an earlier run was killed inside this method.
            self.generation[row] = (self.generation[row] + 1) & ~1
        self._enter(head, ObjectEvent.COMMIT)

    def unindex(self, head: int) -> None:
        """Unindex an object. A reader that checks its generation now reports failure."""
        for row in self.chain(head):
            self.generation[row] = (self.generation[row] + 2) & ~1
        self._enter(head, ObjectEvent.DROP)

    def free(self, head: int, space: Space) -> None:
        """Give rows and bytes back. The object is unindexed and nobody is lent it."""
        rows = self.chain(head)
        for row in rows:
            self._enter(row, ObjectEvent.RECLAIM)
        for row in rows:
            space.free(self.offset[row], self.length[row])
            self._free_stack[self.free_count] = row
            self.free_count += 1

    def _enter(self, row: int, event: ObjectEvent) -> None:
        self.state[row] = next_state(self.state[row], event)

    def set_sum(self, head: int, sum_lo: int, sum_hi: int) -> None:
        self.sum_lo[head] = sum_lo
        self.sum_hi[head] = sum_hi
        self.flag[head] = SUMMED | VERIFIED

    def packed_sums(self, heads: npt.NDArray[np.int64]) -> bytes:
        """Return the sums of objects as `AcquireReply.checksums` has them: zero where there is none yet."""
        packed = np.empty((len(heads), 2), "<u8")
        packed[:, 0], packed[:, 1] = self.sums_lo[heads], self.sums_hi[heads]
        packed[self.flags[heads] & SUMMED == 0] = 0
        return packed.tobytes()

    def raw_sum(self, head: int) -> int | None:
        """Return the XXH3-128 of the object's bytes, or None while it has none."""
        return self.sum_hi[head] << 64 | self.sum_lo[head] if self.summed(head) else None

    def set_verified(self, head: int) -> None:
        self.flag[head] = SUMMED | VERIFIED
        self.run_of[head] = self.run
