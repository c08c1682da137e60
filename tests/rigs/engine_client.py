"""An engine without a model: the real client, a few KV tensors, and the steps of a store and a load."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Self

import torch
from kvdepot.client.attachment import Attachment, EngineProcess, Transport
from kvdepot.client.calls import Call
from kvdepot.client.copy.base import Direction, object_pieces
from kvdepot.client.copy.cpu import CpuCopier
from kvdepot.client.ctl.calls import connect
from kvdepot.client.endpoint import Endpoint
from kvdepot.client.extents import parse_extents
from kvdepot.client.failures import CallFailure
from kvdepot.client.session import DepotSession, Reply
from kvdepot.core.calls import (
    ROOT_KEY,
    AcquireCall,
    AcquireReply,
    Kind,
    LocateCall,
    ReserveCall,
    ReserveReply,
)
from kvdepot.core.keys import NamespaceSpec, chunk_key
from kvdepot.core.planner import GroupSpec
from kvdepot.core.report import DaemonStatus

from tests.rigs.patience import patient, wait_until

CHUNK_TOKENS, BLOCK_TOKENS, BLOCK_BYTES, LAYERS, BLOCKS = 64, 16, 4096, 2, 64
IN_OBJECT = CHUNK_TOKENS // BLOCK_TOKENS
OBJECT_BYTES = IN_OBJECT * BLOCK_BYTES * LAYERS
PATIENCE_SECONDS = 20.0
GRANT_SECONDS = 6.0
"""For a reservation or a load; a lost answer is asked for again after half of it."""


def spec(label: str = "test") -> NamespaceSpec:
    group = GroupSpec(Kind.ATTENTION, BLOCK_TOKENS, rank_block_bytes=(LAYERS * BLOCK_BYTES,), layers=("a", "b"))
    return NamespaceSpec({"model": label}, CHUNK_TOKENS, (group,), {Kind.ATTENTION: OBJECT_BYTES}, label=label)


def prompt_keys(name: str, chunks: int) -> list[bytes]:
    return [chunk_key(f"{name}/{i}".encode().ljust(32, b".")) for i in range(chunks)]


class EngineClient:
    """Scheduler and worker in one process."""

    def __init__(
        self, endpoint: str, engine_id: str = "engine", name: str = "test", transport: Transport = Transport.SHM
    ) -> None:
        self.endpoint = Endpoint.parse(endpoint)
        self.choose(spec(name))
        self.session = DepotSession(self.endpoint, engine_id, confirm_timeout_seconds=0.5)
        process = EngineProcess(engine_id, scheduler=False, rank=0)
        self.worker = Attachment(self.endpoint, process, transport=transport)
        self.layers = [torch.zeros(BLOCKS, BLOCK_BYTES, dtype=torch.uint8) for _ in range(LAYERS)]
        self.copier = CpuCopier(self.layers)

    def choose(self, chosen: NamespaceSpec) -> None:
        """Use another namespace from now on."""
        self.spec, self.namespace = chosen, chosen.namespace_id()

    def start(self, *, attached: bool = True) -> Self:
        self.session.start()
        self.worker.start()
        self.session.register(self.spec)
        if attached:
            self.wait_attached()
        return self

    def wait_attached(self) -> None:
        """Also where the daemon still counts, or counts already, an attachment that this side has not got."""

        def ready() -> bool:
            self.session.poll()
            session, arena = self.session, self.worker.arena
            return (
                session.attached
                and session.registered(self.namespace)
                and session.ranks_attached == 1
                and self.worker.session is not None
                and arena is not None
                and arena.check([], [])
            )

        wait_until(ready, "not attached")

    def close(self) -> None:
        self.session.close()
        self.worker.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(self, call: Call, timeout_seconds: float = 5.0) -> Reply | CallFailure:
        """Submit and wait."""
        got: list[Reply | CallFailure] = []
        self.session.submit(call, patient(timeout_seconds), got.append)
        wait_until(lambda: (self.session.wait(0.05) > 0 and bool(got)) or bool(got), "no answer")
        return got[0]

    def reserve(self, keys: Sequence[bytes], timeout_seconds: float = GRANT_SECONDS) -> tuple[int, Reply | CallFailure]:
        count = len(keys)
        lease = self.session.new_lease_id()
        boundaries = struct.pack(f"<{count}I", *(CHUNK_TOKENS * (i + 1) for i in range(count)))
        parents = b"".join((ROOT_KEY, *keys[:-1]))
        call = ReserveCall(
            b"", lease, self.namespace, b"".join(keys), parents, bytes([Kind.ATTENTION] * count), boundaries, "r"
        )
        return lease, self.call(call, timeout_seconds)

    def acquire(self, keys: Sequence[bytes], timeout_seconds: float = GRANT_SECONDS) -> tuple[int, Reply | CallFailure]:
        lease = self.session.new_lease_id()
        call = AcquireCall(b"", lease, self.namespace, b"".join(keys), bytes([Kind.ATTENTION] * len(keys)), "r")
        return lease, self.call(call, timeout_seconds)

    def locate(self, keys: Sequence[bytes], timeout_seconds: float = 5.0) -> Reply | CallFailure:
        return self.call(LocateCall(b"", self.namespace, b"".join(keys), 1 << 20, "r"), timeout_seconds)

    def commit(self, lease: int, count: int) -> bytes:
        got: list[bytes] = []
        self.session.commit(lease, range(count), got.append)
        wait_until(lambda: (bool(self.session.wait(0.05)) and bool(got)) or bool(got), "no outcome")
        return got[0]

    def fill(self, first_block: int, count: int, seed: int) -> None:
        """Random bytes into `count` objects' worth of blocks."""
        generator = torch.Generator().manual_seed(seed)
        for layer in self.layers:
            blocks = layer[first_block : first_block + count * IN_OBJECT]
            blocks.copy_(torch.randint(0, 256, blocks.shape, dtype=torch.uint8, generator=generator))

    def copy(self, reply: Reply | CallFailure, first_block: int, direction: Direction) -> bool:
        """Copy every object of a grant; whether all generations held."""
        assert isinstance(reply, AcquireReply | ReserveReply), reply
        arena = self.worker.arena
        assert arena is not None
        assert arena.arena_id == reply.arena_id
        extents = parse_extents(reply.extents, arena.size_bytes)
        objects = list(extents.fragments)
        blocks = [range(first_block + index * IN_OBJECT, first_block + (index + 1) * IN_OBJECT) for index in objects]
        pieces = object_pieces(extents, objects, 0, range(LAYERS), [BLOCK_BYTES] * LAYERS, IN_OBJECT, blocks)
        rows, granted = extents.granted(objects)
        before = arena.check(rows, granted)
        copy = arena.store if direction is Direction.STORE else arena.load
        return before and copy(self.copier, extents, pieces) and arena.check(rows, granted)

    def equal_blocks(self, first: int, second: int, count: int) -> bool:
        """Whether two runs of `count` objects' blocks hold the same bytes."""
        span = count * IN_OBJECT
        return all(torch.equal(layer[first : first + span], layer[second : second + span]) for layer in self.layers)

    def status(self) -> DaemonStatus:
        with connect(self.endpoint, patient(PATIENCE_SECONDS)) as operator:
            return operator.status()

    def wait_nothing_owed(self, besides: str = "") -> None:
        """No lease open on either side, no extent lent (to the checksum worker neither), credit back to full.

        `besides`: of the counts below, the one that may stay.
        """

        def owed() -> dict[str, int]:
            self.session.poll()
            status = self.status()
            counts = {
                "open leases": self.session.open_leases,
                "unconfirmed ends": self.session.unconfirmed,
                "leases": sum(session.leases for session in status.sessions),
                "lent objects": sum(session.lent_objects for session in status.sessions),
                "bytes of credit": sum(session.credit_used_bytes for session in status.sessions),
                "lent bytes": status.tiers[0].lent_bytes,
            }
            return {what: count for what, count in counts.items() if count and what != besides}

        wait_until(lambda: not owed(), lambda: f"still owed: {owed()}, {self.session.counters()}")
