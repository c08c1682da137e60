"""What the conformance suite of tiers works with: a device to test, objects to store, and calls that wait.

A test module gives the suite a `TierHarness` over an empty device. Its `peek` and `poke` are the back door: they show
what lies on the device, not what the tier says lies there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Final, Protocol, cast

from kvdepot.core.allocator import Extent
from kvdepot.core.objectfile import HEADER_BYTES, ObjectHeader
from kvdepot.server.storage.base import IoOutcome, ObjectName, Read, SharedTier, Tier, Written
from kvdepot.server.storage.found import FoundObjects

PAGE_BYTES: Final = 4096
ARENA_BYTES_MIN: Final = 64 * PAGE_BYTES
NAMESPACE: Final = b"conformance-name"


@dataclass
class RecordingLoan:
    """A loan that counts its calls. `refuses`: no worker may begin."""

    refuses: bool = False
    begun: int = 0
    ended: int = 0

    def begin(self, worker: int) -> bool:  # noqa: ARG002
        self.begun += not self.refuses
        return not self.refuses

    def end(self) -> None:
        self.ended += 1
        assert self.ended <= self.begun, "a loan ended that had not begun"

    @property
    def held(self) -> bool:
        return self.ended < self.begun


class RecordingRegistry:
    """A registry that numbers workers."""

    earlier = 0

    def __init__(self) -> None:
        self.alive: set[int] = set()
        self._count = 0

    def started(self, pid: int) -> int:  # noqa: ARG002
        self._count += 1
        self.alive.add(self._count)
        return self._count

    def dead(self, worker: int) -> None:
        self.alive.remove(worker)


@dataclass
class RecordingListener:
    """A listener that records what the engine would be told."""

    found_objects: list[tuple[int, ObjectName]] = field(default_factory=list)
    lost_handles: list[int] = field(default_factory=list)

    def found(self, tier: Tier, objects: FoundObjects) -> None:  # noqa: ARG002
        self.found_objects.extend(objects)

    def lost(self, tier: Tier, handles: Sequence[int]) -> None:  # noqa: ARG002
        self.lost_handles.extend(handles)


class TierHarness(Protocol):
    """One device and the tier over it. `arena` has at least ARENA_BYTES_MIN bytes, which extents point into."""

    tier: Tier
    listener: RecordingListener
    arena: memoryview

    def settle(self) -> None:
        """Let it work until nothing is left to do."""

    def peek(self, handle: int) -> bytes:
        """Return header and stored payload as they lie on the device."""

    def poke(self, handle: int, data: bytes) -> None:
        """Replace them, from the header's first byte on."""

    def take_away(self, handle: int) -> None:
        """Delete the object as another daemon would. Only called if the tier's traits say `shared`."""

    def reopen(self, *, crash: bool) -> None:
        """Make a new tier and listener over the same device, then `settle`.

        The old tier is closed first. With `crash`, it is gone without a close.
        """


def name_of(number: int, pages: int = 2, parent: bytes = bytes(16), boundary: int = 32) -> ObjectName:
    key = blake2b(b"%d" % number, digest_size=16).digest()
    return ObjectName(NAMESPACE, key, parent, 1, boundary, pages * PAGE_BYTES)


def payload_of(name: ObjectName) -> bytes:
    return (name.key * (name.raw_bytes // len(name.key) + 1))[: name.raw_bytes]


# What the suite does to a device

Damage = Callable[[bytes, bytes], bytes]


def _flip(at: int) -> Damage:
    return lambda data, _: data[:at] + bytes([data[at] ^ 0x40]) + data[at + 1 :]


def _reheaded(change: Callable[[ObjectHeader], ObjectHeader]) -> Damage:
    """Replace the header by one that is valid in itself and says something else."""
    return lambda data, _: change(ObjectHeader.unpack(data[:HEADER_BYTES])).pack() + data[HEADER_BYTES:]


def _longer(header: ObjectHeader) -> ObjectHeader:
    raw_bytes = header.name.raw_bytes + PAGE_BYTES
    return replace(header, name=replace(header.name, raw_bytes=raw_bytes), stored_bytes=raw_bytes)


def _foreign(header: ObjectHeader) -> ObjectHeader:
    return replace(header, name=replace(header.name, namespace=b"another-namespac"))


_PAYLOAD: Final = frozenset({IoOutcome.CORRUPT, IoOutcome.TORN})
DAMAGES: Final[dict[frozenset[IoOutcome], Damage]] = {
    frozenset({IoOutcome.MAGIC}): _flip(0),
    frozenset({IoOutcome.VERSION}): lambda data, _: data[:12] + (1 << 30).to_bytes(4, "little") + data[16:],
    frozenset({IoOutcome.HEADER}): _flip(100),
    frozenset({IoOutcome.IDENTITY}): lambda _, other: other,
    frozenset({IoOutcome.IDENTITY, IoOutcome.TORN}): _reheaded(_foreign),
    frozenset({IoOutcome.LENGTH}): _reheaded(_longer),
    _PAYLOAD: _flip(HEADER_BYTES + 5000),
    _PAYLOAD | {IoOutcome.MAGIC}: lambda data, _: bytes(len(data)),
}
"""What is done to an object (and another one), and what a read may then say."""


def path_of(chunks: int, start: int = 0) -> list[ObjectName]:
    """Return the names of a path, each the parent of the next one."""
    names: list[ObjectName] = []
    for number in range(chunks):
        parent = names[-1].key if names else bytes(16)
        names.append(name_of(1000 + start + number, parent=parent, boundary=32 * (number + 1)))
    return names


def extents_of(name: ObjectName) -> list[Extent]:
    return [(0, name.raw_bytes)]


def fill(harness: TierHarness, name: ObjectName, extents: Sequence[Extent] | None = None) -> None:
    payload, at = payload_of(name), 0
    for offset, length in extents or extents_of(name):
        harness.arena[offset : offset + length] = payload[at : at + length]
        at += length


def written(
    harness: TierHarness,
    name: ObjectName,
    extents: Sequence[Extent] | None = None,
    *,
    raw_sum: int | None = None,
    loan: RecordingLoan | None = None,
) -> Written:
    """Write it from the arena and wait for the answer."""
    answers: list[Written] = []
    fill(harness, name, extents)
    harness.tier.write(name, extents or extents_of(name), loan or RecordingLoan(), raw_sum, answers.append)
    harness.settle()
    (answer,) = answers
    return answer


def looked_up(harness: TierHarness, names: Sequence[ObjectName]) -> None:
    """Have a shared tier look them up, and wait for the answer."""
    answers: list[bool] = []
    cast("SharedTier", harness.tier).look_up(names, lambda: answers.append(True))
    harness.settle()
    assert answers == [True]


def verified(harness: TierHarness, handle: int) -> IoOutcome:
    """Return the outcome of a verification of the object."""
    answers: list[IoOutcome] = []
    harness.tier.verify(handle, answers.append)
    harness.settle()
    (answer,) = answers
    return answer


def read(
    harness: TierHarness,
    handle: int,
    name: ObjectName,
    extents: Sequence[Extent] | None = None,
    *,
    loan: RecordingLoan | None = None,
) -> tuple[IoOutcome, bytes]:
    """Read it into zeroed extents, wait, and say what is in them."""
    extents = extents or extents_of(name)
    for offset, length in extents:
        harness.arena[offset : offset + length] = bytes(length)
    answers: list[Read] = []
    harness.tier.read(handle, name, extents, loan or RecordingLoan(), answers.append)
    harness.settle()
    (answer,) = answers
    return answer.outcome, b"".join(bytes(harness.arena[offset : offset + length]) for offset, length in extents)
