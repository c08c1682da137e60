"""A shared directory with several nodes' coordinators in one process, and objects put into it as a tier would."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Final

from kvdepot.core.calls import ROOT_KEY, Kind
from kvdepot.core.objectfile import Codec, ObjectHeader, ObjectName, payload_sum
from kvdepot.server.storage.shared_layout import JANITOR, NODES, node_file, object_file
from kvdepot.server.tiers.shared.coordinator.coordinator import Coordinator
from kvdepot.server.tiers.shared.coordinator.records import JanitorRecord, Lease
from kvdepot.server.tiers.shared.coordinator.settings import Before, CoordinatorSettings
from kvdepot.server.tiers.shared.links import Report

from tests.rigs.raw_client import CHUNK_TOKENS, payload_of

MIB: Final = 1 << 20
NAMESPACE: Final = bytes(range(16))
_NANOSECONDS: Final = 1_000_000_000


class Clock:
    def __init__(self) -> None:
        self.seconds = 1_000.0

    def __call__(self) -> float:
        return self.seconds


class Nodes:
    """Coordinators with heartbeats in turn. Real files have real times, so the test's clock may only be ahead."""

    def __init__(self, root: Path, nodes: int, capacity_bytes: int = 64 * MIB, offsets: tuple[float, ...] = ()) -> None:
        self.root = root
        self.clock = Clock()
        self.offsets = list(offsets or (0.0,) * nodes)
        self.stopped: set[int] = set()
        settings = CoordinatorSettings(root, capacity_bytes, on_root_filesystem=True)
        root.mkdir(exist_ok=True)
        self.coordinators = [Coordinator(settings, Before(), self._clock(at)) for at in range(nodes)]
        self.messages: list[object] = [None] * nodes
        self._to_come_ns = 0  # of a lease from before the server's clock was set back

    def _clock(self, at: int):  # type: ignore[no-untyped-def]
        return lambda: self.clock.seconds + self.offsets[at]

    @property
    def reports(self) -> list[Report]:
        assert all(isinstance(message, Report) for message in self.messages), self.messages
        return [message for message in self.messages if isinstance(message, Report)]

    @property
    def janitor(self) -> int:
        return next(at for at, coordinator in enumerate(self.coordinators) if coordinator.janitor.holding)

    def go_on(self, heartbeats: int, each: float = 2.0) -> None:
        """Each living one heartbeats, and works until it has nothing to do. The lease grows older likewise."""
        for _ in range(heartbeats):
            self.clock.seconds += each
            self._grow_older(each)
            for at, coordinator in enumerate(self.coordinators):
                if at not in self.stopped:
                    self.messages[at] = coordinator.heartbeat()
                    while coordinator.work():
                        pass

    def listed(self, folder: str = ".") -> list[str]:
        return sorted(path.name for path in (self.root / folder).iterdir())

    def age(self, node: str, seconds: float) -> None:
        path = self.root / node_file(node)
        if path.exists():
            _older(path, seconds)

    def set_server_back(self, seconds: float) -> None:
        """Set the server's clock back: what it has stamped so far is of a time to come."""
        for path in (self.root / JANITOR, *(self.root / NODES).iterdir()):
            _older(path, -seconds)
        self._to_come_ns = (self.root / JANITOR).stat().st_mtime_ns

    def _grow_older(self, seconds: float) -> None:
        lease = self.root / JANITOR
        if lease.exists() and lease.stat().st_mtime_ns != self._to_come_ns:  # else it keeps its time for as long
            _older(lease, seconds)


def _older(path: Path, seconds: float) -> None:
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns - int(seconds * _NANOSECONDS)))


def lease_of(root: Path) -> Lease:
    record = JanitorRecord.unpack((root / JANITOR).read_bytes())
    assert record is not None
    return record.lease


def key_of(number: int, path: str = "") -> bytes:
    return blake2b(f"{path}{number}".encode(), digest_size=16).digest()


def name_of(number: int, path: str = "", kind: Kind = Kind.ATTENTION, payload_bytes: int = 100) -> ObjectName:
    parent = key_of(number - 1, path) if number else bytes(16)
    return ObjectName(NAMESPACE, key_of(number, path), parent, kind, 256 * (number + 1), payload_bytes)


def put(
    root: Path,
    number: int,
    *,
    path: str = "",
    kind: Kind = Kind.ATTENTION,
    payload_bytes: int = 100,
    age_hours: float = 0,
) -> str:
    """The chunk of this number on a path; its file."""
    name = name_of(number, path, kind, payload_bytes)
    payload = bytes(payload_bytes)
    total = payload_sum([payload])
    header = ObjectHeader(name, Codec.NONE, payload_bytes, total, total, 0, 0)
    file = object_file(name)
    (root / file).parent.mkdir(parents=True, exist_ok=True)
    (root / file).write_bytes(header.pack() + payload)
    when = time.time_ns() - int(age_hours * 3_600 * _NANOSECONDS)
    os.utime(root / file, ns=(when, when))
    return file


def publish(root: Path, namespace: bytes, keys: Sequence[bytes], object_bytes: int) -> None:
    """A prompt's attention, with the bytes that `RawEngine` would store."""
    for at, key in enumerate(keys):
        parent, boundary = keys[at - 1] if at else ROOT_KEY, (at + 1) * CHUNK_TOKENS
        name = ObjectName(namespace, key, parent, Kind.ATTENTION, boundary, object_bytes)
        payload = payload_of(key, object_bytes)
        total = payload_sum([payload])
        file = root / object_file(name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(ObjectHeader(name, Codec.NONE, object_bytes, total, total, 0, 0).pack() + payload)
