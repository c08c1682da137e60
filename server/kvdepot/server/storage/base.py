"""The one interface of every tier below RAM, as the engine sees it.

A tier lives on the loop's thread and never blocks: what touches a device is done by I/O
workers, and answered by a callback on the loop's thread. The engine owns the tree of
chunks, decides what is written, promoted and evicted, and asks; the tier owns its bytes,
their format, its journal and its capacity, and answers.

The RAM tier is not one of these: it is the arena itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final, Protocol

from kvdepot.core.allocator import Extent
from kvdepot.core.objectfile import Damage
from kvdepot.core.objectfile import ObjectName as ObjectName  # part of this interface

if TYPE_CHECKING:
    from kvdepot.core.report import TierStatus
    from kvdepot.server.storage.found import FoundObjects

NO_HANDLE: Final = 0xFFFF_FFFF
"""No object of this tier."""


class IoOutcome(StrEnum):
    """The outcome of one read or write. The values are labels of counters."""

    OK = "ok"
    # The device holds something else than it should: never served, and quarantined but for OTHER_KEYS.
    # `IoOutcome(damage)` converts.
    TOO_SHORT = Damage.TOO_SHORT.value
    MAGIC = Damage.MAGIC.value
    VERSION = Damage.VERSION.value
    HEADER = Damage.HEADER.value  # the header's own checksum
    IDENTITY = Damage.IDENTITY.value
    LENGTH = Damage.LENGTH.value
    CODEC = Damage.CODEC.value
    CORRUPT = Damage.CORRUPT.value  # the payload's checksum
    FORGED = Damage.FORGED.value  # the MAC
    UNKEYED = Damage.UNKEYED.value
    UNKNOWN_KEY = Damage.UNKNOWN_KEY.value
    BAD_PLACE = "bad_place"  # it failed again and again while others were read: given up, and its place is not reused
    TORN = "torn"  # damaged, but newer than the last synced snapshot: a power loss explains it
    # The device did not answer, or refused.
    GONE = "gone"  # no such file, stale handle
    FOREIGN = "foreign"  # a whole object of this name, of which asker and writer said different things: left alone
    UNREADABLE = "unreadable"  # permission
    IO_ERROR = "io_error"
    NO_SPACE = "no_space"  # ENOSPC, EDQUOT
    READ_ONLY = "read_only"  # EROFS
    TIMEOUT = "timeout"  # the deadline passed; a worker may still hold the extents
    # The loan was refused or could not begin, the job cannot be packed, the tier closed or its breaker open. Nobody
    # continues with it, and it says nothing about the device.
    CANCELLED = "cancelled"


DAMAGED: Final = frozenset({*map(IoOutcome, Damage), IoOutcome.TORN, IoOutcome.BAD_PLACE})
"""The object is proved bad, or no key of this tier says that it is good: its handle is dead."""
OTHER_KEYS: Final = frozenset({IoOutcome.UNKEYED, IoOutcome.UNKNOWN_KEY})
"""Of these. They prove nothing against the object: it stays where it is."""


class UnknownWorker(LookupError):  # noqa: N818 - says what it found
    """A worker process that the engine has not written down, so that nothing can be lent to it."""


class Loan(Protocol):
    """Extents, lent for the time a worker may touch them (I6). The engine writes the lent table.

    On an answer `end` comes first, then `done`; after a TIMEOUT `done` at once, and `end` at the worker's death.
    """

    def begin(self, worker: int) -> bool:
        """Lend them to this worker (a number from `WorkerRegistry.started`), before it is told of them.

        False: they are no longer there or the table is full; the job is answered CANCELLED. So it is where this
        raises: then nothing is lent. UnknownWorker: another worker gets the job, and takes the place of this one.
        """

    def end(self) -> None:
        """End the loan: the worker answered, or is proven dead. Called once for every `begin` that returned True."""


class WorkerRegistry(Protocol):
    """The list in which the engine notes which processes are workers, so that a later daemon run knows (I6)."""

    @property
    def earlier(self) -> int:
        """Return the number of workers of earlier daemon runs that are not proven dead."""

    def started(self, pid: int) -> int:
        """Return the number of a worker process that was just made. Raise NoRoom if the attachment table is full."""

    def dead(self, worker: int) -> None:
        """Take note that a worker's death is proven and that every loan to it has ended."""


@dataclass(frozen=True, slots=True)
class Read:
    """Answer to a read. `raw_sum`: XXH3-128 of the payload now in the extents, when OK."""

    outcome: IoOutcome
    raw_sum: int = 0


@dataclass(frozen=True, slots=True)
class Written:
    """Answer to a write. OK: `handle` is served by the tier from now on, and survives a crash of the daemon."""

    outcome: IoOutcome
    handle: int = NO_HANDLE
    raw_sum: int = 0
    stored_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Stored:
    """How an object lies on the device, for operators."""

    stored_bytes: int  # of the payload, after the codec
    sequence: int  # 0: the tier counts none
    stored_sum: int | None  # XXH3-128 of the stored bytes; None: only the object's header knows
    place: str = ""  # which of several peers have it


@dataclass(frozen=True, slots=True)
class TierTraits:
    """What sets a kind of tier apart, for the engine and for the conformance suite."""

    shared: bool = False
    """Other daemons put objects on its device and take them away. What its index does not know may be there: `look_up`.

    It is a `SharedTier`. `drop` only forgets; the device's capacity is its janitor's care, and no quota counts there.
    """
    read_only: bool = False
    """Nothing is ever written there, so nothing is to wait for that."""


class TierListener(Protocol):
    """What a tier tells the engine without being asked, on the loop's thread."""

    def found(self, tier: Tier, objects: FoundObjects) -> None:
        """Take in a slice of what lies on the device, parents before children. The engine drops what it cannot use."""

    def lost(self, tier: Tier, handles: Sequence[int]) -> None:
        """Forget these handles: their objects are damaged, or gone with their directory. No `drop` follows."""


class Tier(Protocol):
    """Handles are small integers, below `handles_max`, reused after `drop` or `lost`."""

    name: str
    handles_max: int
    traits: TierTraits

    @property
    def readable(self) -> bool:
        """Return whether objects of the tier are offered. False while opening, or while the breaker is open."""

    @property
    def writable(self) -> bool:
        """Return whether writes are taken. False also when read-only or degraded."""

    @property
    def budget_spent(self) -> bool:
        """Return whether the daily write budget is used up. Meanwhile the engine drops and counts what is due."""

    @property
    def write_slots(self) -> int:
        """Return how many more writes the tier takes now without queueing them; 0 where it is not writable."""

    @property
    def used_bytes(self) -> int:
        """Return the bytes that objects use. They fall at `drop`, although the bytes may not be reusable yet."""

    @property
    def capacity_bytes(self) -> int:
        """Return what objects may use: the configured capacity less journal, snapshots, quarantine and temporaries."""

    def cost_bytes(self, raw_bytes: int) -> int:
        """Return the bytes that an object uses at most, header and rounding included."""

    def too_large(self, raw_bytes: int) -> bool:
        """Return whether there is never room for such an object, even if everything else is evicted."""

    def start(self, listener: TierListener) -> None:
        """Begin to open; `readable` says when it is done."""

    def tick(self) -> None:
        """Do what is due: deadlines, probes, recovery. Called about every 100 ms."""

    def write(
        self, name: ObjectName, extents: Sequence[Extent], loan: Loan, raw_sum: int | None,
        done: Callable[[Written], None],
    ) -> None:  # fmt: skip
        """Store a committed object; `done` may be called before this returns.

        NO_SPACE at once where `cost_bytes` are not free: the caller evicts first.

        `raw_sum` is compared with what is read from the extents, when known (CORRUPT: the RAM copy is bad).
        """

    def read(
        self, handle: int, name: ObjectName, extents: Sequence[Extent], loan: Loan, done: Callable[[Read], None]
    ) -> None:
        """Fill unpublished extents (of together `raw_bytes`) and verify everything. Before any write in the queue.

        `done` may be called before this returns. A handle that is dropped meanwhile does not change the answer.
        DAMAGED outcomes: the tier has quarantined it and the handle is dead without `lost`. So it is after GONE and
        FOREIGN of a shared tier.
        """

    def verify(self, handle: int, done: Callable[[IoOutcome], None]) -> None:
        """Read an object for its own sake, after everything that serves. One that is proved bad ends as with `read`.

        It is told as `lost` before `done` is called, which may be before this returns. So is one of a shared tier
        that is GONE or FOREIGN.
        """

    def drop(self, handle: int) -> None:
        """Forget an object. Its bytes are reused once readers in flight are done."""

    def stored(self, handle: int) -> Stored:
        """Return how an object of the tier lies on the device. Does not touch the device."""

    async def close(self) -> None:
        """Finish what is in flight within a bounded time, whatever the device does; persist; end the workers."""

    def status(self) -> TierStatus: ...


class SharedTier(Tier, Protocol):
    """A tier whose traits say `shared`."""

    def reads_from(self, source_id: int) -> bool:
        """Return whether this tier reads from the daemon whose arena has this id. It may not be known yet.

        A lookup that names this daemon follows. So the tier may begin to read from it for that.
        """

    def look_up(self, names: Sequence[ObjectName], done: Callable[[], None], *, again: bool = False) -> None:
        """Find out which of these names the tier has. They have no handles, and parents come first.

        `again`: also names that were absent a moment ago, but none whose object was damaged.

        Objects that are there are reported by `found`, as many as there are free handles. Then `done` is called: once,
        within the deadline of one operation, maybe before this returns. An object that is being written may be found
        meanwhile: both answers then name one handle.
        """

    def used(self, handles: Sequence[int]) -> None:
        """Note that a request used the path of these handles, parents first. This sets their recency on the device.

        Not called again for the same path within half an hour.
        """

    def quarantine(self, name: ObjectName, raw_sums: Sequence[int]) -> None:
        """Move the file of this name aside if the XXH3-128 of its payload is one of these.

        The bytes with these sums are in doubt, although they match the header. Another file of the name stays. The
        caller has dropped the handle. There may be none: a file is there before its write is answered.
        """
