"""Two sources, a reader and what asks it, each daemon in a network namespace of its own."""

from __future__ import annotations

import itertools
import os
import random
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import grpc
from kvdepot.core.calls import AcquireOutcome, LocateCall
from kvdepot.core.control import EvictCall
from kvdepot.proto.methods import decode_reply, encode
from kvdepot.proto.v1 import control_pb2_grpc
from xxhash import xxh3_64_intdigest

from tests.rigs.child_processes import children
from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.network import Network
from tests.rigs.patience import Deadline, patient, wait_until
from tests.rigs.peer_network import PeerNetwork
from tests.rigs.raw_client import CHUNK_TOKENS, RawEngine, keys_of, payload_of, status_of

SOURCES: Final = 2
READER: Final = SOURCES
CHUNKS: Final = 8
"""Objects of a prompt, 256 KiB each."""
DEADLINE_SECONDS: Final = 1.0
MORE_SECONDS: Final = 1.0
"""After the deadline: then a request has to be at its end."""
GIVE_UP_SECONDS: Final = 0.25
"""After the deadline an engine computes, even if the daemon says nothing."""
LOOKUP_SECONDS: Final = 0.25
"""What an engine waits for a lookup at most."""
PIECE_BYTES: Final = 64 << 10
_RAM: Final = "512MiB"
_DISK_RAM: Final = "640MiB"
_DISK: Final = '[[tier]]\nname = "disk"\nkind = "disk"\npath = "{path}"\ncapacity = "1GiB"\nwrite = "commit"\n'
_BREAKER: Final = 'failures = 20\nprobe_every = "200ms"\n'
_MORE: Final = """
[policy]
negative_ttl = "100ms"
[sessions]
grace = "1s"
"""
_STORED_AT_ONCE: Final = 12
"""Prompts."""
_SERVERS: Final = (b"kvdepot.server.io.peer_server", b"kvdepot.server.io.nixl_lender")
_WORKER: Final = b"kvdepot.server.io.worker"


class ViolationError(AssertionError):
    """Something that was promised does not hold."""


@dataclass(slots=True)
class Asked:
    """What came of a request: `hit`, `miss`, `absent` or `given up`, and the time it took."""

    outcome: str
    seconds: float
    over: bool


@dataclass(slots=True)
class Source:
    node: int
    daemon: DaemonProcess
    engine: RawEngine
    prompts: deque[list[bytes]] = field(default_factory=deque)

    @property
    def servers(self) -> list[int]:
        """Return the processes that send or lend."""
        return self._children(*_SERVERS)

    @property
    def disk_workers(self) -> list[int]:
        return self._children(_WORKER)

    def attach(self) -> None:
        """Be the engine of the daemon's next run."""
        self.engine.close()
        self.engine = RawEngine(self.daemon.socket)

    def _children(self, *modules: bytes) -> list[int]:
        return [pid for module in modules for pid in children(self.daemon.pid, module)] if self.daemon.process else []


class World:
    """`close` ends all of it."""

    def __init__(
        self, folder: Path, seed: int, *, nixl: bool = False, listed: bool = False, disk: bool = False
    ) -> None:  # fmt: skip
        """`listed`: both sources are peers of one tier, and have the same prompts. `disk`: on their disks alone."""
        self._nixl = nixl
        self._listed = listed
        self._disk = disk
        self.disk_reads = 0.0
        """Objects that sources have read for the reader, as far as they were counted before a restart."""
        if nixl:
            os.environ["UCX_TLS"] = "tcp"  # UCX would find out that all nodes are on one host
        self.network = Network(SOURCES + 1, seed=seed)
        self.fleet = PeerNetwork(folder, self.network)
        self._numbers = itertools.count()
        self.own: deque[list[bytes]] = deque(maxlen=8)
        self._leases: list[int] = []
        try:
            own, other = _processors()
            self.sources = [self._source(node, other) for node in range(SOURCES)]
            self.reader = self.fleet.reader_at(
                READER,
                *range(SOURCES),
                deadline=f"{DEADLINE_SECONDS}s",
                ram=_RAM,
                cpus=own,
                breaker=_BREAKER,
                more=_MORE,
                borrows=nixl,
                listed=listed,
            )
            self.engine = RawEngine(self.reader.socket)
        except BaseException:
            self.close()
            raise

    def _source(self, node: int, cpus: list[int]) -> Source:
        path = self.fleet.folder / f"disk{node}"
        more = _DISK.format(path=path) if self._disk else ""
        daemon = self.fleet.source_at(
            node, ram=_DISK_RAM if self._disk else _RAM, cpus=cpus, lends=self._nixl, more=more
        )
        return Source(node, daemon, RawEngine(daemon.socket))

    def close(self) -> None:
        self.fleet.close()
        self.network.close()

    # What is where

    def prompt(self, source: Source) -> list[bytes]:
        """Return the keys of a prompt that this source has, and nobody has asked for."""
        if not source.prompts:
            owners = self.sources if self._listed else [source]
            for _ in range(_STORED_AT_ONCE):
                source.prompts.append(keys_of(f"{source.node}of{next(self._numbers)}", CHUNKS))
                for owner in owners:
                    owner.engine.store(source.prompts[-1])
            sockets = [owner.daemon.socket for owner in owners]
            wait_until(
                lambda: not any(status_of(one).tiers[0].pending_checksums for one in sockets), "all have checksums"
            )
            if self._disk:
                for owner in owners:
                    self._forget_ram(owner)
        return source.prompts.popleft()

    def _forget_ram(self, source: Source) -> None:
        """Begin anew with what lies on the disk of a source."""
        daemon = source.daemon
        wait_until(lambda: not status_of(daemon.socket).tiers[1].queued_objects, "the disk has all")
        self.disk_reads += status_of(daemon.socket).counters.get("peer_disk_reads.read", 0.0)
        daemon.stop()
        daemon.arena.unlink()
        daemon.start()
        wait_until(lambda: status_of(daemon.socket).tiers[1].state == "ready", "the disk has opened")
        source.attach()

    def store_own(self) -> None:
        """Store a prompt at the reader. It takes what was given back last, or evicts."""
        keys = keys_of(f"own{next(self._numbers)}", CHUNKS)
        self.engine.store(keys)
        self.own.append(keys)

    def check_own(self) -> int:
        """Compare the bytes of prompts that were stored at the reader. Return how many objects RAM still had."""
        checked = 0
        for keys in list(self.own):
            loaded = self.engine.load(keys)
            if loaded is None:
                self.own.remove(keys)
                continue
            _compare(keys, loaded)
            checked += len(keys)
        return checked

    def pieces(self) -> list[int]:
        """Return a digest of each piece of the reader's arena, used or not."""
        view = memoryview(self.engine.arena)
        return [xxh3_64_intdigest(view[at : at + PIECE_BYTES]) for at in range(0, len(view), PIECE_BYTES)]

    # Processes

    @property
    def workers(self) -> list[int]:
        """Workers of all tiers of the reader."""
        return children(self.reader.pid, _WORKER) if self.reader.process else []

    def release(self) -> None:
        """Release the leases of all requests, no part of which this is: the reader may have stopped."""
        for lease_id in self._leases:
            self.engine.release(lease_id)

    def forget(self) -> None:
        """None of them is granted any more."""
        self._leases.clear()

    def attach(self) -> None:
        """Be the same engine of the reader's next run."""
        self.engine.close()
        self.engine = RawEngine(self.reader.socket)

    @staticmethod
    def attach_source(source: Source) -> None:
        source.attach()
        source.prompts.clear()

    def lent_bytes(self) -> int:
        return status_of(self.reader.socket).tiers[0].lent_bytes

    def wait_recovered(self) -> None:
        tiers = 1 if self._listed else SOURCES
        wait_until(
            lambda: self.fleet.ready(self.reader, tiers),
            lambda: f"all peers are back: {status_of(self.reader.socket).tiers[1:]}",
        )

    # A request

    def locate(self, keys: list[bytes], seconds: float) -> int:
        """Return how many objects the reader offers."""
        call = self.engine.locate_call(keys, wait_seconds=seconds)
        reply = decode_reply(LocateCall, self.engine.stub.Locate(call, timeout=patient(2 * seconds)))
        return int(reply.boundary_tokens) // CHUNK_TOKENS

    def ask(self, keys: list[bytes]) -> Asked:
        """Look up and load as an engine does, and compare every byte. Raise ViolationError for a wrong one."""
        limit, began = Deadline(DEADLINE_SECONDS + MORE_SECONDS), time.monotonic()
        outcome = "absent"
        try:
            if found := self.locate(keys, LOOKUP_SECONDS):
                outcome = "hit" if self._load(keys[:found], DEADLINE_SECONDS + GIVE_UP_SECONDS) else "miss"
        except grpc.RpcError:
            outcome = "given up"
        return Asked(outcome, time.monotonic() - began, limit.is_over())

    def _load(self, keys: list[bytes], seconds: float) -> bool:
        engine = self.engine
        self._leases.append(engine.new_lease_id())  # it may be granted after the engine has given up
        _, outcome, extents = engine.acquire(keys, lease_id=self._leases[-1], seconds=seconds)
        if outcome is not AcquireOutcome.GRANTED:
            return False
        _compare(keys, engine.read(extents, len(keys)))
        return True


def _compare(keys: list[bytes], loaded: list[bytes]) -> None:
    for key, data in zip(keys, loaded, strict=True):
        if data != payload_of(key):
            wrong = sum(one != other for one, other in zip(data, payload_of(key), strict=False))
            raise ViolationError(f"N2: {wrong} wrong bytes in {key!r}")


def _processors() -> tuple[list[int], list[int]]:
    """Return processors of the reader, and of the sources, which would be other machines."""
    own, *others = sorted(os.sched_getaffinity(0))
    return [own], others or [own]


def evict(source: Source, keys: list[bytes], rng: random.Random) -> None:
    """Have a source evict some of these."""
    control = control_pb2_grpc.ControlStub(source.engine.admin_channel)  # type: ignore[no-untyped-call]
    for key in rng.sample(keys, rng.randint(1, len(keys))):
        with suppress(grpc.RpcError):
            control.Evict(encode(EvictCall(source.engine.namespace, key)), timeout=patient(1.0))
