"""Which bytes of the segments are free, and which are not free yet although no object is served from them.

The rules (design.md#disk-tiers): a place is reused only when the KILL of its object is in the journal and
nobody reads it any more; a place that is being written only when its writer has answered or is dead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from kvdepot.core.allocator import Extent, ExtentAllocator
from kvdepot.server.tiers.disk.columns import Flags, Words
from kvdepot.server.tiers.disk.messages import Open, Place
from kvdepot.server.tiers.disk.records import FRAGMENTS_MAX

_SHUNNED_SHARE_MAX: Final = 1 / 64


@dataclass(slots=True)
class _Held:
    """A place without an object. `killed`: its KILL is in the journal, or it never had a PUT."""

    fragments: tuple[Extent, ...]
    dying: bool = False
    killed: bool = False
    shunned: bool = False  # it cannot be read
    streamed: bool = False  # in the index that is being read again


@dataclass(slots=True)
class _Reopening:
    """The next allocator. Until `finish`, nothing is allocated, and what is released waits."""

    allocator: ExtentAllocator
    held: set[int]
    released: dict[int, _Held] = field(default_factory=dict)


class Space:
    """The bytes of the segments. There is one owner. Places are named by the sequence of their write."""

    def __init__(self, data_bytes: int) -> None:
        self._data_bytes = data_bytes
        self._allocator = ExtentAllocator(0, data_bytes)
        self._held: dict[int, _Held] = {}
        self._readers: dict[int, int] = {}
        self._shunned: deque[int] = deque()
        self._shunned_bytes = 0
        self._reopening: _Reopening | None = None
        self.coming_bytes = 0
        """On their way to be free: dead objects whose KILL or readers are not done."""

    @property
    def free_bytes(self) -> int:
        return self._allocator.free_bytes

    @property
    def used_bytes(self) -> int:
        """Return the used bytes, without those that are about to be free. Never negative.

        What the engine drops while an opening streams is about to be free before its place is claimed.
        """
        return max(self._allocator.used_bytes - self.coming_bytes, 0)

    def grow(self, upto_bytes: int) -> None:
        self._allocator.grow(upto_bytes)

    # A write.

    def allocate(self, sequence: int, size_bytes: int) -> tuple[Extent, ...] | None:
        """Allocate a place for a write.

        Return None if so many bytes are not free, or only in more pieces than a record can have.
        """
        found = self._allocator.allocate(size_bytes)
        if found is None:
            return None
        if len(found) > FRAGMENTS_MAX:
            for fragment in found:
                self._allocator.free(*fragment)
            return None
        fragments = tuple((address, self._allocator.rounded(length)) for address, length in found)
        self._held[sequence] = _Held(fragments, killed=True)
        return fragments

    def trim(self, sequence: int, size_bytes: int) -> tuple[Extent, ...]:
        """Free what lies after the first `size_bytes` (whole pages) of a place that was just written."""
        assert self._reopening is None
        held = self._held[sequence]
        kept: list[Extent] = []
        for address, length in held.fragments:
            keep = min(length, size_bytes)
            size_bytes -= keep
            if keep:
                kept.append((address, keep))
            if keep < length:
                self._allocator.free(address + keep, length - keep)
        held.fragments = tuple(kept)
        return held.fragments

    def keep(self, sequence: int) -> None:
        """Take note that the place is now an object's."""
        del self._held[sequence]

    def unsure(self, sequence: int) -> None:
        """Take note that nobody knows whether the PUT is in the journal: an opening finds out."""
        held = self._held[sequence]
        held.killed = False
        held.dying = True
        self.coming_bytes += _bytes(held)

    def oldest_writing(self, otherwise: int) -> int:
        """Return the lowest sequence that is being written, or `otherwise` if there is none."""
        return min((sequence for sequence, held in self._held.items() if not held.dying), default=otherwise)

    def abandon(self, sequence: int, *, shunned: bool = False) -> None:
        """Give up a place. Nobody will ever read what was written there, and nobody writes it any more.

        `shunned`: the place could not be written. If it were free, the next write would get it, and fail as well.
        """
        if not shunned:
            self._release(sequence)
            return
        held = self._held[sequence]
        held.dying = True
        self.coming_bytes += _bytes(held)
        self.shun(sequence)

    # The end of an object.

    def retire(self, sequence: int, fragments: tuple[Extent, ...]) -> None:
        """Take note that the object is no longer served. `killed` is next."""
        held = _Held(fragments, dying=True)
        self._held[sequence] = held
        self.coming_bytes += _bytes(held)

    def killed(self, sequence: int) -> None:
        """Take note that the KILL is in the journal. No effect if an opening has found that out already."""
        held = self._held.get(sequence)
        if held is not None:
            held.killed = True
            self._settle(sequence)

    def shun(self, sequence: int) -> None:
        """Mark a place, `retire`d or abandoned, as bad.

        The place counts as used until the tier closes or too much is shunned.
        """
        self._set_shunned(self._held[sequence], shunned=True)
        self._shunned.append(sequence)
        while self._shunned_bytes > self._data_bytes * _SHUNNED_SHARE_MAX:
            oldest = self._shunned.popleft()
            if oldest in self._held:
                self._set_shunned(self._held[oldest], shunned=False)
                self._settle(oldest)

    def _set_shunned(self, held: _Held, *, shunned: bool) -> None:
        held.shunned = shunned
        size_bytes = _bytes(held) if shunned else -_bytes(held)
        self._shunned_bytes += size_bytes
        self.coming_bytes -= size_bytes

    def unkilled(self) -> list[int]:
        """Return dead objects whose KILL is not in the journal."""
        return [sequence for sequence, held in self._held.items() if held.dying and not held.killed]

    def read(self, sequence: int) -> None:
        self._readers[sequence] = self._readers.get(sequence, 0) + 1

    def read_done(self, sequence: int) -> None:
        self._readers[sequence] -= 1
        if not self._readers[sequence]:
            del self._readers[sequence]
            self._settle(sequence)

    def _settle(self, sequence: int) -> None:
        held = self._held.get(sequence)
        if held is not None and held.dying and held.killed and not held.shunned and sequence not in self._readers:
            self._release(sequence)

    def _release(self, sequence: int) -> None:
        held = self._held.pop(sequence)
        if held.dying:
            self.coming_bytes -= _bytes(held)
        if self._reopening is not None:
            self._reopening.released[sequence] = held
            return
        self._free_all(held)

    # Opening, and opening again while reads continue.

    def reopen(self) -> Open:
        """Prepare to read the index again. Return what must not be free, whatever the index says.

        No two of these overlap.
        """
        self.give_up()
        dead = self._dead_apart()
        for held in self._held.values():
            held.streamed = False
        self._reopening = _Reopening(ExtentAllocator(0, self._data_bytes), set(self._held))
        writing = (fragment for held in self._held.values() if not held.dying for fragment in held.fragments)
        return Open(dead, tuple(writing))

    def _dead_apart(self) -> tuple[Place, ...]:
        """Return the places of dead writes. If two dead writes overlap, the older one is forgotten.

        What an index brings back may lie below an object that it has lost. If that opening then fails, both are served
        until the next one, and either may be dropped.
        """
        dead = ((sequence, held) for sequence, held in self._held.items() if held.dying)
        places = sorted(((sequence, *fragment) for sequence, held in dead for fragment in held.fragments), key=_address)
        last = (0, 0, 0)
        for place in places:
            sequence, address, _ = place
            if sequence in self._held and last[0] in self._held and address < last[1] + last[2]:
                self._lose(min(sequence, last[0]))
            if sequence in self._held:
                last = place
        return tuple(place for place in places if place[0] in self._held)

    def resize(self, data_bytes: int, ready_bytes: int) -> None:
        """Set the size before the claims. `ready_bytes` are there already."""
        assert self._reopening is not None
        self._data_bytes = data_bytes
        self._reopening.allocator = ExtentAllocator(0, data_bytes)
        self._reopening.allocator.grow(ready_bytes)

    def overtake(self, sequences: Iterable[int]) -> None:
        """Forget dead writes if the index has later writes in their places."""
        assert self._reopening is not None
        for sequence in sequences:
            self._reopening.held.discard(sequence)
            if self._reopening.released.pop(sequence, None) is None:
                self._lose(sequence)

    def claim(self, fragments: Iterable[Extent]) -> None:
        """Claim fragments, in ascending order. Raise ExtentError if they overlap."""
        assert self._reopening is not None
        for address, length in fragments:
            self._reopening.allocator.claim(address, length)

    def stream(self, sequences: Words) -> Flags:
        """Take note that the index has these writes.

        Return which of them are no longer an object's. Their KILL is still to be appended.
        """
        assert self._reopening is not None
        released = self._reopening.released
        ended = np.fromiter((*self._held, *released), np.uint64, len(self._held) + len(released))
        found = np.isin(sequences, ended)
        for sequence in sequences[found].tolist():
            if sequence in released:
                self._held[sequence] = released.pop(sequence)
                self.unsure(sequence)
            held = self._held[sequence]
            held.streamed = True
            held.killed = False  # its KILL may have been in the journal: in one that is lost
        return found

    def give_up(self) -> None:
        """End an opening that failed. What was released meanwhile is free in the allocator that stays."""
        reopening, self._reopening = self._reopening, None
        if reopening is not None:
            for held in reopening.released.values():
                self._free_all(held)

    def finish(self, streamed: set[int]) -> list[int]:
        """Use the new allocator. Return what is yet to be killed. `streamed`: writes that died while it was filled."""
        reopening, self._reopening = self._reopening, None
        assert reopening is not None
        self._allocator = reopening.allocator
        there = reopening.held.union(streamed)
        for held in reopening.released.values():
            self._free_all(held)
        unkilled = []
        for sequence in self.unkilled():
            held = self._held[sequence]
            if held.streamed or sequence in streamed:
                unkilled.append(sequence)
            else:
                self._forget(sequence, claimed=sequence in there)
        return unkilled

    def _forget(self, sequence: int, *, claimed: bool) -> None:
        if not claimed:  # the index has lost it: its place is free or another's
            self._lose(sequence)
        else:
            self._held[sequence].killed = True
            self._settle(sequence)

    def _lose(self, sequence: int) -> None:
        """Forget a dead write that no longer has a place."""
        held = self._held[sequence]
        if held.shunned:
            self._set_shunned(held, shunned=False)
        del self._held[sequence]
        self.coming_bytes -= _bytes(held)

    def _free_all(self, held: _Held) -> None:
        for fragment in held.fragments:
            self._allocator.free(*fragment)


def _address(place: Place) -> int:
    return place[1]


def _bytes(held: _Held) -> int:
    return sum(length for _, length in held.fragments)
