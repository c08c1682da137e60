"""How fast the daemon's RAM and tiers are, by the paths that engines use, compared with memory and devices."""

from __future__ import annotations

import json
import secrets
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
from kvdepot.client.ctl.doctor.programs import Program
from kvdepot.client.ctl.medium import Medium
from kvdepot.core.calls import ROOT_KEY, AcquireOutcome, CommitOutcome, Kind, ReserveOutcome
from kvdepot.core.control import VerifyCall
from kvdepot.core.errors import InvalidArgument, KvDepotError, NoRoom
from kvdepot.core.groups import DEFAULT_CHUNK_TOKENS_MIN, GroupSpec
from kvdepot.core.keys import NamespaceSpec, chunk_key
from kvdepot.core.objectfile import ObjectName
from kvdepot.core.units import parse_size_bytes

if TYPE_CHECKING:
    from kvdepot.client.bulk import BulkEngine
    from kvdepot.client.ctl.calls import Operator
    from kvdepot.core.report import TierStatus

BYTES_MAX: Final = 1 << 30
SHARE: Final = 4
"""At most a quarter of what RAM has, and of the smallest tier: what is there is evicted for no more than that."""
OBJECT_BYTES_MIN: Final = 4096
POOL_BYTES: Final = 128 << 20
"""Memory on this side: more than processors cache, as a KV cache is."""
ROUNDS: Final = 5
GROUP_OBJECTS: Final = 8
PATIENCE_SECONDS: Final = 60.0
"""For a tier that takes nothing, or for its device."""
_UNLIMITED: Final = 1 << 50
_POLL_SECONDS: Final = 0.01
_RAM: Final = "ram"
_OBJECT_BYTES: Final = 16 << 20
_NAMESPACES_MAX: Final = 100
_LABEL: Final = "kvdepotctl bench"
POSSIBLE_SHARE_MAX: Final = 1.2
"""Nothing is faster than what it is made of; a fifth is the error of a quiet machine."""
ROUNDS_AGREE: Final = 2.0
"""The largest share of a round is at most so many times the smallest."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Bytes a second. `limit_name` and `limit`: what it is compared with, 0 if not known. `note`: why not.

    `shares`: of the limit, round by round, where both were measured in turns.
    """

    tier: str
    way: str  # load or store
    rate: float
    limit_name: str = ""
    limit: float = 0.0
    note: str = ""
    shares: tuple[float, ...] = ()

    @property
    def share(self) -> float:
        return self.rate / self.limit if self.limit else 0.0

    @property
    def doubt(self) -> str:
        """Return why the machine is too noisy to tell the share; empty if it is not."""
        if self.share > POSSIBLE_SHARE_MAX:
            return f"a share of {self.share:.2f} is impossible"
        if self.shares and max(self.shares) > ROUNDS_AGREE * min(self.shares):
            return f"rounds found shares from {min(self.shares):.2f} to {max(self.shares):.2f}"
        return ""

    def times(self, bytes_per_token: float, prefill: float) -> float:
        """How many times as fast as tokens are computed it moves them."""
        return self.rate / bytes_per_token / prefill if bytes_per_token and prefill else 0.0


@dataclass(frozen=True, slots=True)
class Shape:
    """The chunk to measure with. `label` says whose it is."""

    object_bytes: int
    chunk_tokens: int
    label: str

    @property
    def token_bytes(self) -> float:
        return self.object_bytes / self.chunk_tokens


def bench_shape(operator: Operator, object_size: str | None, chunk_tokens: int | None) -> Shape:
    """Return what was given, or the chunk of an engine: of one that runs, or else that was used last."""
    if object_size is None and chunk_tokens is None:
        found = operator.namespaces("", _NAMESPACES_MAX).namespaces
        spaces = [one for one in found if one.chunk_tokens and one.label != _LABEL]
        for space in sorted(spaces, key=lambda one: (not one.sessions, one.idle_seconds)):
            spec = operator.describe_namespace(space.namespace_id).spec
            sizes = spec.object_bytes if spec is not None else {}
            if size := sizes.get(Kind.ATTENTION) or sizes.get(Kind.WINDOW):
                return Shape(size, space.chunk_tokens, space.label)
    size = parse_size_bytes(object_size) if object_size is not None else _OBJECT_BYTES
    label = "as given" if object_size is not None or chunk_tokens is not None else "no engine has registered yet"
    return Shape(size, chunk_tokens or DEFAULT_CHUNK_TOKENS_MIN, label)


def bench_spec(shape: Shape, bumps: int) -> NamespaceSpec:
    """Return a namespace that nobody else has. `bumps`: the daemon's counter of all. Raise InvalidArgument."""
    object_bytes, chunk_tokens = shape.object_bytes, shape.chunk_tokens
    if object_bytes < OBJECT_BYTES_MIN:
        raise InvalidArgument(f"an object of {object_bytes} bytes is less than {OBJECT_BYTES_MIN}")
    if object_bytes % chunk_tokens:
        raise InvalidArgument(f"an object of {object_bytes} bytes is no multiple of {chunk_tokens} tokens")
    group = GroupSpec(Kind.ATTENTION, chunk_tokens, rank_block_bytes=(object_bytes,))
    return NamespaceSpec(
        {"bench": json.dumps(secrets.token_hex(8))}, chunk_tokens, (group,), {Kind.ATTENTION: object_bytes},
        label=_LABEL, bumps=bumps,
    )  # fmt: skip


def size_bytes(tiers: Sequence[TierStatus], wanted: int, object_bytes: int) -> int:
    """How much is moved: whole objects. Raises InvalidArgument where that is none."""
    rooms = [tier.ready_bytes if tier.name == _RAM else tier.capacity_bytes for tier in tiers]
    found = min([wanted or BYTES_MAX, *(room // SHARE for room in rooms if room)])
    if found < object_bytes:
        raise InvalidArgument(f"an object of {object_bytes} bytes does not fit {found}", advice="a smaller one")
    return found // object_bytes * object_bytes


class Bench:
    """One bench, of one namespace. What it stored stays: the caller evicts it."""

    def __init__(self, engine: BulkEngine, operator: Operator, settings: Mapping[str, str], total_bytes: int) -> None:
        """Prepare a bench. `settings`: the daemon's configuration, as `config show` has it."""
        self._engine = engine
        self._operator = operator
        self._settings = settings
        self._object_bytes = engine.spec.object_bytes[Kind.ATTENTION]
        self._count = total_bytes // self._object_bytes
        self._prompts = 0
        self._names = self._new_prompt()
        count = max(min(len(self._names), POOL_BYTES // self._object_bytes), 1)
        self._sources = [memoryview(secrets.token_bytes(self._object_bytes)) for _ in range(count)]
        self._targets = [bytearray(self._object_bytes) for _ in range(count)]

    def run(self, tiers: Sequence[TierStatus]) -> Iterator[Measured]:
        """Measure. Raise KvDepotError if nothing can be stored or loaded."""
        self._store()
        self._evict()
        stored = self._bytes / self._store()  # into pages that this process has touched before
        self._wait_idle()
        loads, copies = [], []
        for _ in range(ROUNDS):  # in turns: the machine does other things too
            copies.append(self._bytes / self._copy())
            loads.append(self._bytes / self._load(counted=False))
        memcpy = statistics.median(copies)
        yield Measured(_RAM, "store", stored, "memcpy", memcpy)
        shares = tuple(load / copy for load, copy in zip(loads, copies, strict=True))
        yield Measured(_RAM, "load", statistics.median(loads), "memcpy", memcpy, shares=shares)
        for tier in tiers:
            if tier.name != _RAM:
                yield from self._tier(tier.name)

    def _new_prompt(self) -> list[ObjectName]:
        """Other objects than before: a shared tier keeps those, and would not write them again."""
        self._prompts += 1
        return _names(self._engine.spec, self._count, self._prompts)

    @property
    def _bytes(self) -> int:
        return len(self._names) * self._object_bytes

    def _copy(self) -> float:
        """Seconds from this process's memory to this process's memory."""
        started = time.monotonic()
        for number in range(len(self._names)):
            at = number % len(self._sources)
            np.frombuffer(self._targets[at], np.uint8)[:] = np.frombuffer(self._sources[at], np.uint8)
        return time.monotonic() - started

    def _store(self) -> float:
        """Seconds, calls included."""
        started = time.monotonic()
        for first, group in _groups(self._names):
            outcomes, granted, reason = self._engine.reserve(group)
            if granted is None or set(outcomes) != {ReserveOutcome.GRANTED}:
                said = ", ".join(sorted({outcome.name.lower() for outcome in outcomes}))
                raise NoRoom(f"nothing is stored: {reason or said}", advice="fewer --bytes; `kvdepotctl status`")
            for index in range(len(group)):
                if not self._engine.write(granted, index, self._sources[(first + index) % len(self._sources)]):
                    raise KvDepotError("what was granted was taken back while it was written")
            if set(self._engine.commit(granted, range(len(group)))) != {CommitOutcome.COMMITTED}:
                raise KvDepotError("the daemon did not take what was stored")
        return time.monotonic() - started

    def _load(self, *, counted: bool) -> float:
        """Likewise."""
        started = time.monotonic()
        for first, group in _groups(self._names):
            granted = self._engine.acquire(group, no_use=not counted)
            if granted is None or isinstance(granted, AcquireOutcome):
                raise NoRoom("it was evicted while it was measured", advice="fewer --bytes")
            for index in range(len(group)):
                if self._engine.read(granted, index, self._targets[(first + index) % len(self._targets)]) is None:
                    raise KvDepotError("what was lent was taken back while it was read")
            self._engine.release(granted)
        return time.monotonic() - started

    def _evict(self) -> None:
        self._operator.evict(self._engine.namespace, b"")

    def _tier(self, tier: str) -> Iterator[Measured]:
        write = self._settings.get(f"tier.{tier}.write", "")
        if write in ("evict", "auto"):
            yield Measured(tier, "store", 0.0, note=f"write = {write}: only what RAM evicts gets there")
            return
        medium = self._medium(tier)
        self._wait_idle()
        self._evict()
        self._names = self._new_prompt()
        before = self._there(tier)
        started = time.monotonic()
        self._store()
        if write == "second_use":
            started = time.monotonic()
            self._load(counted=True)
        there = self._wait_written(tier, before)
        stored = there * self._object_bytes / (time.monotonic() - started)
        if there < len(self._names):
            yield Measured(tier, "store", stored, note=f"only {there} of {len(self._names)} objects got there")
            return
        note = medium.why_not or ("" if medium.direct else "no direct I/O: the page cache is in the medium's rates")
        yield Measured(tier, "store", stored, "medium", medium.write, note)
        yield Measured(tier, "load", self._verified(tier), "medium", medium.read)

    def _wait_idle(self) -> None:
        """Until tiers have written what they want to."""
        until = time.monotonic() + PATIENCE_SECONDS
        while any(tier.queued_objects for tier in self._operator.status().tiers) and time.monotonic() < until:
            self._engine.pause(_POLL_SECONDS)

    def _there(self, tier: str) -> int:
        """Objects of the namespace."""
        found = self._operator.namespaces(self._engine.namespace.hex(), 1).namespaces
        return sum(sum(one.objects.values()) for space in found for one in space.tiers if one.tier == tier)

    def _wait_written(self, tier: str, before: int) -> int:
        """How many objects are there that were not `before`, once it is all, or none comes any more."""
        there, heard_at = 0, time.monotonic()
        while there < len(self._names) and time.monotonic() - heard_at < PATIENCE_SECONDS:
            found = self._there(tier) - before
            if found != there:
                there, heard_at = found, time.monotonic()
            self._engine.pause(_POLL_SECONDS)
        return there

    def _verified(self, tier: str) -> float:
        """As the daemon's workers read, check and decode it, two objects at a time."""
        found, started = 0, time.monotonic()
        while (seconds := time.monotonic() - started) < 1.0 or not found:
            call = VerifyCall(_UNLIMITED, self._engine.namespace, b"", tier)
            last = [one for reply in self._operator.verify(call) for one in reply.tiers][-1:]
            if not last or last[0].verified < len(self._names):
                why = (last[0].reason or dict(last[0].damaged)) if last else "no answer"
                raise KvDepotError(f"tier {tier} could not read all: {why}")
            found += last[0].verified_bytes
            seconds = time.monotonic() - started
        return found / seconds

    def _medium(self, tier: str) -> Medium:
        """Measure in a process of its own. It writes next to the tier's files, as the daemon's user or root."""
        path = self._settings.get(f"tier.{tier}.path", "")
        if not path:
            return Medium(why_not="the daemon does not say its path")
        command = [sys.executable, "-I", "-S", str(Path(__file__).with_name("medium.py")), path, str(self._bytes)]
        ended = Program(command).wait(time.monotonic() + PATIENCE_SECONDS)
        if ended is None:
            return Medium(why_not=f"no answer within {PATIENCE_SECONDS:.0f} s")
        return Medium(**json.loads(ended.output)) if not ended.code else Medium(why_not=ended.errors.strip()[-200:])


def _names(spec: NamespaceSpec, count: int, prompt: int) -> list[ObjectName]:
    """One prompt's objects."""
    keys = [ROOT_KEY, *(chunk_key(b"%08d%024d" % (prompt, number)) for number in range(count))]
    return [
        ObjectName(
            spec.namespace_id(), keys[at + 1], keys[at], Kind.ATTENTION, (at + 1) * spec.chunk_tokens,
            spec.object_bytes[Kind.ATTENTION],
        )
        for at in range(count)
    ]  # fmt: skip


def _groups(names: Sequence[ObjectName]) -> Iterator[tuple[int, Sequence[ObjectName]]]:
    """With the number of its first object."""
    for at in range(0, len(names), GROUP_OBJECTS):
        yield at, names[at : at + GROUP_OBJECTS]
