"""Verification reads stored objects again when an operator asks: the scrubber's work, without waiting for it.

Each tier has its own pace, so that a tier that hangs holds up no other. A few objects are read at a time, within a
rate, after everything that serves requests. The checksum worker compares objects of RAM (`Checksums.again`). A lower
tier verifies its own objects (`Tier.verify`). Damaged objects are handled as wherever damage is found.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
from kvdepot.core.arena import NO_ROW
from kvdepot.core.control import VerifiedTier, VerifyCall, VerifyReply
from kvdepot.core.errors import NotFound
from kvdepot.server.depot.stores.checksums import Checksums, Compared
from kvdepot.server.depot.tree import walks
from kvdepot.server.depot.tree.index import Index, Nodes
from kvdepot.server.depot.tree.lower_tier import LowerTier
from kvdepot.server.depot.tree.namespaces import Namespace
from kvdepot.server.depot.tree.ram import RamTier
from kvdepot.server.depot.tree.rows import COMMITTED, RESERVED
from kvdepot.server.depot.tree.tree import Tree
from kvdepot.server.storage.base import DAMAGED, NO_HANDLE, OTHER_KEYS, IoOutcome

RAM: Final = "ram"
SILENCE_SECONDS: Final = 60.0
"""After so long without an answer a tier is given up: it hangs, or what serves leaves no time for this."""
_IN_FLIGHT_MAX: Final = 2
"""One is read while the other is compared. A load waits for no more than these."""
_CATCH_UP_SECONDS: Final = 1.0
"""Never more than that is made up for."""
_STEPS_MAX: Final = 512
"""Objects in one go that turn out not to be for reading: 1 ms."""

_Numbers = npt.NDArray[np.int64]


class _Verdict(Enum):
    VERIFIED = "verified"
    DAMAGED = "damaged"
    SKIPPED = "skipped"
    SILENT = "silent"  # and so is what comes next


_Done = Callable[[_Verdict, str], None]
"""Told of one object, with what was found, or why it was not read."""


class _Holder(Protocol):
    """A tier's objects: a place (row or handle), and a mark by which another object of that place is told from it."""

    name: str

    def trouble(self) -> str:
        """Return why nothing can be read, or an empty string."""

    def places(self, nodes: Nodes) -> tuple[_Numbers, _Numbers]:
        """Return places and marks of the tier's objects of these nodes."""

    def why_not(self, place: int, mark: int) -> str:
        """Return why the object is not to be read, or an empty string."""

    def size_bytes(self, place: int) -> int: ...

    def verify(self, place: int, done: _Done) -> None:
        """Verify an object. `done` may be called before this returns."""


class _InRam:
    name = RAM

    def __init__(self, index: Index, ram: RamTier, checksums: Checksums) -> None:
        self._ram = ram
        self._index = index
        self._rows = ram.rows
        self._checksums = checksums

    def trouble(self) -> str:
        return ""

    def places(self, nodes: Nodes) -> tuple[_Numbers, _Numbers]:
        rows = np.concatenate([column[nodes] for column in self._index.rows]).astype(np.int64)
        rows = rows[rows != NO_ROW]
        return rows, self._marks(self._rows.generations[rows])

    @staticmethod
    def _marks(generations: npt.NDArray[np.uint64]) -> _Numbers:
        """Return a mark for each generation. The mark stays the same when an object is committed."""
        return ((generations + np.uint64(1)) >> np.uint64(1)).astype(np.int64)

    def why_not(self, place: int, mark: int) -> str:
        rows = self._rows
        if rows.generation[place] + 1 >> 1 != mark or rows.state[place] not in (RESERVED, COMMITTED):
            return "left"
        if rows.state[place] == RESERVED:
            return "being_written"
        return "" if rows.summed(place) else "no_checksum"

    def size_bytes(self, place: int) -> int:
        return self._ram.size_bytes(place)

    def verify(self, place: int, done: _Done) -> None:
        self._checksums.again(place, lambda compared: done(*_COMPARED[compared]))


_COMPARED: Final = {
    Compared.SAME: (_Verdict.VERIFIED, ""),
    Compared.CORRUPT: (_Verdict.DAMAGED, "corrupt"),
    Compared.LEFT: (_Verdict.SKIPPED, "left"),
}


class _InTier:
    def __init__(self, index: Index, tier: LowerTier) -> None:
        self._index = index
        self._tier = tier
        self.name = tier.tier.name

    def trouble(self) -> str:
        if self._tier.tier.readable:
            return ""
        status = self._tier.tier.status()
        return f"{status.state}: {status.reason}" if status.reason else status.state

    def places(self, nodes: Nodes) -> tuple[_Numbers, _Numbers]:
        columns = self._index.handles[self._tier.number]
        handles = np.concatenate([column[nodes] for column in columns]).astype(np.int64)
        handles = handles[handles != NO_HANDLE]
        return handles, self._tier.epochs(handles)

    def why_not(self, place: int, mark: int) -> str:
        return "left" if self._tier.owner(place) is None or self._tier.epoch(place) != mark else ""

    def size_bytes(self, place: int) -> int:
        return self._tier.tier.stored(place).stored_bytes

    def verify(self, place: int, done: _Done) -> None:
        self._tier.tier.verify(place, lambda outcome: done(_verdict(outcome), outcome))


def _verdict(outcome: IoOutcome) -> _Verdict:
    if outcome is IoOutcome.OK:
        return _Verdict.VERIFIED
    if outcome in DAMAGED - OTHER_KEYS:
        return _Verdict.DAMAGED
    return _Verdict.SILENT if outcome is IoOutcome.TIMEOUT else _Verdict.SKIPPED


class _Lane:
    """The verification of one tier. `run_once` and every answer start what is due."""

    def __init__(
        self, holder: _Holder, walk: Iterator[Nodes], *, objects: int, bytes_per_second: int, clock: Callable[[], float]
    ) -> None:
        self.name = holder.name
        self._holder = holder
        self._walk = walk
        self._walked = False
        self._objects = objects
        self._bytes_per_second = bytes_per_second
        self._clock = clock
        self._next: Iterator[tuple[int, int]] = iter(())
        self._at: tuple[int, int] | None = None  # of what comes next
        self._due_at = clock()
        self._heard_at = clock()
        self._in_flight = 0
        self._running = False
        self._verified = 0
        self._verified_bytes = 0
        self._damaged: Counter[str] = Counter()
        self._skipped: Counter[str] = Counter()
        self._reason = ""
        self.over = False
        self.hurried = False  # it need not wait for anything but its turn

    def reply(self) -> VerifiedTier:
        return VerifiedTier(
            self.name, self._objects, self._verified, self._verified_bytes, dict(self._damaged), dict(self._skipped),
            self.over, self._reason,
        )  # fmt: skip

    def end(self, reason: str) -> None:
        """End the verification. Objects that are being read are not counted any more."""
        self.over, self.hurried, self._reason = True, False, reason

    def run_once(self) -> None:
        if self._running:
            return
        self._running = True
        self.hurried = False
        try:
            steps = 0
            while not self.over and self._step():
                steps += 1
                if steps == _STEPS_MAX:
                    self.hurried = True
                    break
        finally:
            self._running = False

    def _step(self) -> bool:
        """Begin the next object, or look for further ones. Return False when nothing more can be started now."""
        trouble = self._holder.trouble()
        if not trouble and self._in_flight and self._clock() - self._heard_at > SILENCE_SECONDS:
            trouble = f"no answer for {SILENCE_SECONDS:.0f} s: it hangs, or what serves leaves no time"
        if trouble:
            self.end(trouble)
            return False
        if self._in_flight >= _IN_FLIGHT_MAX or self._clock() < self._due_at:
            return False
        place = next(self._next, None)
        if place is not None:
            self._begin(*place)
            return True
        if self._walked:
            if not self._in_flight:
                self.end("")
            return False
        return self._look_on()

    def _look_on(self) -> bool:
        """Look at a further slice. Return False where it has nothing."""
        nodes = next(self._walk, None)
        self._walked = nodes is None
        if nodes is not None:
            places, marks = self._holder.places(nodes)
            self._next = zip(places.tolist(), marks.tolist(), strict=True)
            self.hurried = not len(places)
            return len(places) > 0
        return True

    def _begin(self, place: int, mark: int) -> None:
        why_not = self._holder.why_not(place, mark)
        if why_not:
            self._skipped[why_not] += 1
            return
        size_bytes, now = self._holder.size_bytes(place), self._clock()

        def done(verdict: _Verdict, found: str) -> None:
            if not self.over:
                self._in_flight -= 1
                self._heard_at = self._clock()
                self._count(verdict, found, size_bytes)
                self.run_once()

        self._in_flight += 1
        self._heard_at = now
        self._due_at = max(self._due_at, now - _CATCH_UP_SECONDS) + size_bytes / self._bytes_per_second
        self._holder.verify(place, done)

    def _count(self, verdict: _Verdict, found: str, size_bytes: int) -> None:
        if verdict is _Verdict.VERIFIED:
            self._verified += 1
            self._verified_bytes += size_bytes
        elif verdict is _Verdict.DAMAGED:
            self._damaged[found] += 1
        else:
            self._skipped[found] += 1
        if verdict is _Verdict.SILENT:
            self.end("an object could not be read in time")


class Verification:
    """One verification. A depot runs one at a time. It raises NotFound where there is nothing of a name.

    The owner calls `run_once` every 0.1 s, or at once while `hurried`, until it returns False.
    """

    def __init__(self, tree: Tree, ram: RamTier, checksums: Checksums, call: VerifyCall) -> None:
        self._index = tree.index
        self._namespaces = tree.namespaces
        self._clock = tree.clock
        self._checksums = checksums
        self._call = call
        namespace = walks.named(tree.index, tree.namespaces, call.namespace_id, call.key) if call.namespace_id else None
        tiers = [tier for tier in tree.tiers if call.tier in ("", tier.tier.name)]
        self._lanes = [
            self._lane(_InTier(tree.index, tier), namespace, self._objects_below(tier, namespace)) for tier in tiers
        ]
        if call.tier in ("", RAM):
            in_ram = sum(namespace.objects.values()) if namespace else ram.objects
            self._lanes.insert(0, self._lane(_InRam(tree.index, ram, checksums), namespace, in_ram))
        if not self._lanes:
            names = ", ".join([RAM, *(tier.tier.name for tier in tree.tiers)])
            raise NotFound(f"there is no tier {call.tier!r}", advice=f"there are {names}")

    @property
    def hurried(self) -> bool:
        return any(lane.hurried for lane in self._lanes)

    def run_once(self) -> bool:
        """Start what is due; False when it is over."""
        for lane in self._lanes:
            lane.run_once()
        return not all(lane.over for lane in self._lanes)

    def reply(self) -> VerifyReply:
        return VerifyReply(tuple(lane.reply() for lane in self._lanes))

    def cancel(self) -> None:
        """Start nothing more. What a tier reads at the moment it reads to its end."""
        for lane in self._lanes:
            if not lane.over:
                lane.end("cancelled")
        self._checksums.forget_again()

    def _lane(self, holder: _Holder, namespace: Namespace | None, objects: int) -> _Lane:
        call = self._call
        if namespace is None:
            walk = walks.everything(self._index)
        elif call.key:
            walk = walks.below(self._index, self._namespaces, namespace, deque([call.key]))
        else:
            walk = walks.namespace_nodes(self._index, self._namespaces, namespace)
        return _Lane(
            holder, walk, objects=0 if call.key else objects, bytes_per_second=call.bytes_per_second, clock=self._clock
        )  # fmt: skip

    @staticmethod
    def _objects_below(tier: LowerTier, namespace: Namespace | None) -> int:
        return sum(tier.contents(namespace.slot).values()) if namespace else tier.objects
