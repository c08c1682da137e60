"""`kvdepotd replay`: what a recorded trace would have hit with other tiers, by the daemon's own depot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import pairwise
from typing import Final

import numpy as np
from kvdepot.core.arena import PAGE_BYTES, ROWS_MAX
from kvdepot.core.calls import (
    KEY_BYTES,
    ROOT_KEY,
    AcquireCall,
    AcquireOutcome,
    AcquireReply,
    CommitCall,
    CommitItem,
    EndRequestCall,
    Kind,
    LocateCall,
    LocateReply,
    ReleaseCall,
    ReserveCall,
    ReserveOutcome,
)
from kvdepot.core.endurance import per_hit_byte
from kvdepot.core.keys import NamespaceSpec
from kvdepot.core.limits import RESERVED_PER_CALL_MAX
from kvdepot.core.planner import Planner
from kvdepot.core.trace_file import Request, Trace
from kvdepot.server.depot.types import TierConfig
from kvdepot.server.offline.virtual_disk import VirtualDisk
from kvdepot.server.offline.virtual_engine import VirtualEngine

_REQUEST: Final = "replayed"
_DISK: Final = "disk"
RAM_BYTES_MIN: Final = 1 << 20
_ROOM: Final = 2
"""Times what all objects take: RAM above a disk has watermarks."""
_FRACTIONS: Final = (0.05, 0.1, 0.25, 0.5, 1.0)


@dataclass(frozen=True, slots=True)
class Disk:
    """The disk below RAM of one replay."""

    capacity_bytes: int
    config: TierConfig = field(default_factory=TierConfig)


@dataclass(frozen=True, slots=True)
class Hits:
    """Tokens: of whole chunks that were asked for, and of these what requests could resume after.

    Of the disk, the bytes that were written to it, and the bytes that it supplied.
    """

    asked_tokens: int
    hit_tokens: int
    written_bytes: int = 0
    disk_hit_bytes: int = 0

    @property
    def rate(self) -> float:
        return self.hit_tokens / self.asked_tokens if self.asked_tokens else 0.0

    @property
    def written_per_hit_byte(self) -> float | None:
        return per_hit_byte(self.written_bytes, self.disk_hit_bytes)


class _Namespace:
    def __init__(self, virtual: VirtualEngine, spec: NamespaceSpec) -> None:
        self.id = virtual.register(spec)
        self.planner = Planner(spec.groups, spec.chunk_tokens)


class Replay:
    """One run over a trace. `checkpoints`: engines keep a state at every chunk of a prompt, not only at its last."""

    def __init__(
        self, trace: Trace, capacity_bytes: int, eviction: str, *, checkpoints: bool = False, disk: Disk | None = None
    ) -> None:  # fmt: skip
        """Create a replay. `capacity_bytes` is the room of RAM for objects, without the daemon's own memory."""
        self._checkpoints = checkpoints
        self._requests = trace.requests
        self._now = 0.0
        smallest = min((min(spec.object_bytes.values()) for spec in trace.namespaces.values()), default=1)
        # More than has room for everything changes nothing, and the tables of petabytes would have no room here.
        enough = _ROOM * (unique_bytes(trace, checkpoints=True) + PAGE_BYTES * _objects(trace))
        capacity_bytes = min(capacity_bytes, max(enough, RAM_BYTES_MIN))
        rows = min(capacity_bytes // smallest + 1, ROWS_MAX)
        self._disk: VirtualDisk | None = None
        disks = []
        if disk is not None:
            self._disk = VirtualDisk(_DISK, disk.capacity_bytes, min(disk.capacity_bytes, enough) // smallest + 1)
            disks.append((self._disk, disk.config))
        self._virtual = VirtualEngine(
            capacity_bytes, rows, clock=lambda: self._now, eviction=eviction, disks=disks
        )  # fmt: skip
        self._namespaces = {name: _Namespace(self._virtual, spec) for name, spec in trace.namespaces.items()}

    def run(self) -> Hits:
        asked = hit = 0
        for request in self._requests:
            self._now = max(self._now, request.at_seconds)
            namespace = self._namespaces[request.namespace]
            asked += len(request.chunks) * namespace.planner.chunk_tokens
            hit += self._request(namespace, _keys(request))
        disk = self._disk
        return Hits(asked, hit, disk.written_bytes if disk else 0, disk.read_bytes if disk else 0)

    def _request(self, namespace: _Namespace, keys: Sequence[bytes]) -> int:
        if not keys:
            return 0
        depot, session, chunk_tokens = self._virtual.depot, self._virtual.session, namespace.planner.chunk_tokens
        located: list[LocateReply] = []
        depot.locate(
            LocateCall(session, namespace.id, b"".join(keys), len(keys) * chunk_tokens, _REQUEST), located.append
        )
        boundary = located[0].boundary_tokens
        if boundary and not self._load(namespace, keys, boundary):
            boundary = 0
        self._store(namespace, keys, boundary // chunk_tokens)
        depot.end_request(EndRequestCall(session, _REQUEST))
        return boundary

    def _load(self, namespace: _Namespace, keys: Sequence[bytes], boundary: int) -> bool:
        """Load a prefix. Return False where RAM has no room for what the disk has of it."""
        depot, session = self._virtual.depot, self._virtual.session
        wanted = namespace.planner.objects(boundary)
        lease, replies = self._virtual.new_lease_id(), list[AcquireReply]()
        call = AcquireCall(
            session, lease, namespace.id, b"".join(keys[chunk] for chunk, _ in wanted),
            bytes(kind for _, kind in wanted), _REQUEST,
        )  # fmt: skip
        depot.acquire(call, replies.append)
        while not replies and depot.place_some():
            pass
        granted = [reply.outcome for reply in replies] == [AcquireOutcome.GRANTED]
        assert granted or self._disk is not None
        depot.release(ReleaseCall(session, (lease,)))
        self._trim()
        return granted

    def _trim(self) -> None:
        if self._disk is not None:
            self._virtual.trim()

    def _store(self, namespace: _Namespace, keys: Sequence[bytes], first: int) -> None:
        depot, session, chunk_tokens = self._virtual.depot, self._virtual.session, namespace.planner.chunk_tokens
        chunks = RESERVED_PER_CALL_MAX // len(namespace.planner.kinds)
        bounds = [*range(first, len(keys), chunks), len(keys)]
        for start, end in pairwise(bounds):
            objects = list(self._objects(namespace, start, end, len(keys)))
            lease = self._virtual.new_lease_id()
            call = ReserveCall(
                session, lease, namespace.id, b"".join(keys[chunk] for chunk, _ in objects),
                b"".join(keys[chunk - 1] if chunk else ROOT_KEY for chunk, _ in objects),
                bytes(kind for _, kind in objects),
                ((np.array([chunk for chunk, _ in objects]) + 1) * chunk_tokens).astype("<u4").tobytes(), _REQUEST,
            )  # fmt: skip
            outcomes = np.frombuffer(depot.reserve(call).outcomes, np.uint8)
            granted = np.flatnonzero(outcomes == ReserveOutcome.GRANTED).astype("<u4")
            depot.commit(CommitCall(session, (CommitItem(lease, granted.tobytes()),)))
            self._trim()

    def _objects(self, namespace: _Namespace, start: int, end: int, chunks: int) -> Iterator[tuple[int, Kind]]:
        """Return the objects that an engine stores of these chunks of a prompt, parents first."""
        kinds = namespace.planner.kinds
        for chunk in range(start, end):
            for kind in kinds:
                if kind is not Kind.STATE or self._checkpoints or chunk == chunks - 1:
                    yield chunk, kind


def unique_bytes(trace: Trace, *, checkpoints: bool = False) -> int:
    """Return the bytes of all different objects of the trace. RAM of that size evicts nothing."""
    chunks: dict[str, set[int]] = {}
    ends: dict[str, set[int]] = {}
    for request in trace.requests:
        chunks.setdefault(request.namespace, set()).update(request.chunks)
        ends.setdefault(request.namespace, set()).update(request.chunks if checkpoints else request.chunks[-1:])
    total = 0
    for name, spec in trace.namespaces.items():
        for kind, size in spec.object_bytes.items():
            total += size * len((ends if kind is Kind.STATE else chunks).get(name, ()))
    return total


def _objects(trace: Trace) -> int:
    """Return how many different objects the trace can have."""
    kinds = max((len(spec.object_bytes) for spec in trace.namespaces.values()), default=0)
    return kinds * sum(len(request.chunks) for request in trace.requests)


def capacities(trace: Trace, *, checkpoints: bool = False) -> list[int]:
    """Return useful sizes of RAM: shares of `unique_bytes`."""
    total = unique_bytes(trace, checkpoints=checkpoints)
    return sorted({max(int(total * share), RAM_BYTES_MIN) for share in _FRACTIONS})


def recorded(trace: Trace) -> Hits:
    """Return what the daemon offered from all its tiers when the trace was recorded."""
    asked = sum(len(one.chunks) * trace.namespaces[one.namespace].chunk_tokens for one in trace.requests)
    return Hits(asked, sum(one.boundary_tokens for one in trace.requests))


def _keys(request: Request) -> list[bytes]:
    return [
        blake2b(f"{request.namespace} {chunk}".encode(), digest_size=KEY_BYTES).digest() for chunk in request.chunks
    ]
