"""An engine's side of the protocol by hand: raw sockets, gRPC stubs and a mapped arena, no client library."""

from __future__ import annotations

import array
import mmap
import os
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import grpc
from kvdepot.core.arena import PAGE_BYTES, GenerationsHeader, generations
from kvdepot.core.calls import (
    ROOT_KEY,
    AbandonCall,
    AcquireCall,
    AcquireOutcome,
    AttachCall,
    AttachReply,
    CommitCall,
    CommitItem,
    CommitOutcome,
    EndRequestCall,
    Kind,
    LocateCall,
    LocateReply,
    ReleaseCall,
    RequestEnd,
    ReserveCall,
    ReserveOutcome,
)
from kvdepot.core.elements import Elements, KindElements
from kvdepot.core.keys import NamespaceSpec
from kvdepot.core.limits import RESERVED_PER_CALL_MAX
from kvdepot.core.misses import MissReason
from kvdepot.core.planner import GroupSpec
from kvdepot.core.registration import RegisterCall, RegisterReply
from kvdepot.core.report import DaemonStatus, GetStatusCall
from kvdepot.proto import codec
from kvdepot.proto.methods import decode_reply, encode
from kvdepot.proto.v1 import depot_pb2 as pb
from kvdepot.proto.v1 import depot_pb2_grpc as pb_grpc

from tests.rigs.patience import patient, wait_until

CHUNK_TOKENS = 256
OBJECT_BYTES = 256 << 10
CALL_SECONDS = 30.0
"""A load may wait for a worker that starts, 20 s at most, and for a read until its deadline, 10 s."""
EXTENT = struct.Struct("<5Q")


def dense_spec(label: str = "dense", object_bytes: int = OBJECT_BYTES) -> NamespaceSpec:
    """One attention group; an object is `object_bytes`."""
    group = GroupSpec(kind=Kind.ATTENTION, block_tokens=16, rank_block_bytes=(object_bytes * 16 // CHUNK_TOKENS,))
    return NamespaceSpec(
        identity={"model": '"toy"'},
        chunk_tokens=CHUNK_TOKENS,
        groups=(group,),
        object_bytes={Kind.ATTENTION: object_bytes},
        label=label,
    )


def spec_of(tenant: str, label: str = "dense") -> NamespaceSpec:
    """`dense_spec` of a tenant."""
    return replace(dense_spec(label), tenant=tenant)


def keys_of(prompt: str, chunks: int) -> list[bytes]:
    return [f"{prompt:>12.12}{index:04}".encode() for index in range(chunks)]


def payload_of(key: bytes, length: int = OBJECT_BYTES) -> bytes:
    return (key * (length // len(key) + 1))[:length]


def attach_socket(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(patient(CALL_SECONDS))
    connection.connect(os.fspath(path))
    return connection


def exchange(connection: socket.socket, datagram: bytes) -> tuple[AttachReply, list[int]]:
    """Send one datagram, return the answer and the descriptors that came with it."""
    connection.send(datagram)
    answer, ancillary, _, _ = connection.recvmsg(8192, socket.CMSG_SPACE(12))
    if not answer:
        raise ConnectionResetError("the daemon has closed the connection")
    descriptors = array.array("i")
    for _, kind, data in ancillary:
        if kind == socket.SCM_RIGHTS:
            descriptors.frombytes(data)
    return codec.decode_attach_reply(answer), list(descriptors)


class RawEngine:
    """A one-process engine: scheduler and rank 0."""

    def __init__(
        self, grpc_socket: Path, engine_id: str = "engine", *, label: str = "dense", spec: NamespaceSpec | None = None,
        elements: Elements = MappingProxyType({}), world_size: int = 1,
    ) -> None:  # fmt: skip
        """`world_size`: with more than 1, processes of its other ranks attach elsewhere."""
        self.connection = attach_socket(grpc_socket.with_name(f"{grpc_socket.name}.attach"))
        call = AttachCall(1, 1, engine_id, scheduler=True, rank=0, world_size=world_size, parts=True)
        self.reply, descriptors = exchange(self.connection, codec.encode_attach_call(call))
        assert self.reply.protocol == 1, self.reply.error
        data, column = descriptors
        self.arena = mmap.mmap(data, self.reply.arena_bytes)
        header = GenerationsHeader.unpack(os.pread(column, PAGE_BYTES, 0))
        mapped = mmap.mmap(column, header.file_bytes, prot=mmap.PROT_READ)
        self.generations = generations(memoryview(mapped), header.rows)
        os.close(data)
        os.close(column)
        self.session = self.reply.session
        self.channel = grpc.insecure_channel(f"unix:{grpc_socket}")
        self.stub = pb_grpc.DepotStub(self.channel)  # type: ignore[no-untyped-call]
        self.admin_channel = grpc.insecure_channel(f"unix:{grpc_socket}.admin")
        self.operator = pb_grpc.OperatorStub(self.admin_channel)  # type: ignore[no-untyped-call]
        self.spec = spec or dense_spec(label)
        registered = self.register(self.spec, elements)
        self.namespace, self.ranks_attached = registered.namespace_id, registered.ranks_attached
        self._lease_id = int.from_bytes(os.urandom(4), "little") << 16

    def register(
        self, spec: NamespaceSpec, elements: Elements = MappingProxyType({}), *, follows_bumps: bool = False
    ) -> RegisterReply:
        by_kind = tuple(KindElements(kind, runs) for kind, runs in elements.items())
        call = RegisterCall(self.session, spec, by_kind, follows_bumps)
        reply: RegisterReply = decode_reply(
            RegisterCall, self.stub.RegisterNamespace(encode(call), timeout=patient(CALL_SECONDS))
        )
        return reply

    def new_lease_id(self) -> int:
        self._lease_id += 1
        return self._lease_id

    def reserve(
        self, keys: Sequence[bytes], lease_id: int | None = None, request: str = "", *, first: int = 0
    ) -> tuple[int, list[ReserveOutcome], bytes]:
        """(lease id, outcome per chunk, packed extents) for the attention of a prompt's chunks from `first` on."""
        lease_id = lease_id or self.new_lease_id()
        parents, keys = [ROOT_KEY, *keys[:-1]][first:], keys[first:]
        call = ReserveCall(
            session=self.session,
            lease_id=lease_id,
            namespace_id=self.namespace,
            keys=b"".join(keys),
            parents=b"".join(parents),
            kinds=bytes([Kind.ATTENTION]) * len(keys),
            boundaries=b"".join(struct.pack("<I", (first + index + 1) * CHUNK_TOKENS) for index in range(len(keys))),
            request_id=request,
        )
        reply = decode_reply(ReserveCall, self.stub.Reserve(encode(call), timeout=patient(CALL_SECONDS)))
        return lease_id, [ReserveOutcome(outcome) for outcome in reply.outcomes], reply.extents

    def commit(self, lease_id: int, count: int) -> list[CommitOutcome]:
        indices = b"".join(struct.pack("<I", index) for index in range(count))
        call = CommitCall(self.session, (CommitItem(lease_id, indices),))
        reply = decode_reply(CommitCall, self.stub.Commit(encode(call), timeout=patient(CALL_SECONDS)))
        return [CommitOutcome(outcome) for outcome in reply.outcomes[0]]

    def abandon(self, lease_id: int) -> None:
        """All of it."""
        call = AbandonCall(self.session, (CommitItem(lease_id, b""),))
        self.stub.Abandon(encode(call), timeout=patient(CALL_SECONDS))

    def store(self, keys: Sequence[bytes], request: str = "") -> None:
        """Reserve, write and commit; everything must be granted."""
        for first in range(0, len(keys), RESERVED_PER_CALL_MAX):
            part = keys[: first + RESERVED_PER_CALL_MAX]
            lease_id, outcomes, extents = self.reserve(part, request=request, first=first)
            assert set(outcomes) == {ReserveOutcome.GRANTED}, outcomes
            self.write(part[first:], extents)
            committed = self.commit(lease_id, len(part) - first)
            assert set(committed) == {CommitOutcome.COMMITTED}, committed

    def write(self, keys: Sequence[bytes], extents: bytes, payload: Callable[[bytes], bytes] = payload_of) -> None:
        at = dict.fromkeys(range(len(keys)), 0)
        for index, _, offset, length, _ in EXTENT.iter_unpack(extents):
            self.arena[offset : offset + length] = payload(keys[index])[at[index] : at[index] + length]
            at[index] += length

    def locate(self, keys: Sequence[bytes], request: str = "") -> int:
        """The boundary in tokens."""
        return self._locate(keys, request).boundary_tokens

    def tier_of(self, keys: Sequence[bytes]) -> str:
        """The slowest that the boundary needs."""
        return self._locate(keys, "").tier

    def _locate(self, keys: Sequence[bytes], request: str) -> LocateReply:
        reply: LocateReply = decode_reply(LocateCall, self.stub.Locate(self.locate_call(keys, request)))
        return reply

    def locate_at(self, keys: Sequence[bytes], source_id: int, request: str = "") -> LocateReply:
        """Ask as for a request whose params name a daemon. The daemon may take its 5 s."""
        call = self.locate_call(keys, request, wait_seconds=60.0, source_id=source_id)
        reply: LocateReply = decode_reply(LocateCall, self.stub.Locate(call, timeout=patient(CALL_SECONDS)))
        return reply

    def located_at(self, keys: Sequence[bytes], source_id: int = 0) -> LocateReply:
        """Ask so again until the answer is not that tiers are late: on a busy machine they may be."""
        replies: list[LocateReply] = []

        def in_time() -> bool:
            replies.append(self.locate_at(keys, source_id))
            return replies[-1].miss != MissReason.PROBE_LATE

        wait_until(in_time, "an answer in time")
        return replies[-1]

    def locate_call(
        self,
        keys: Sequence[bytes],
        request: str = "",
        *,
        budget_seconds: float = 0.0,
        wait_seconds: float = 0.0,
        token_seconds: float = 0.0,
        source_id: int = 0,
    ) -> pb.LocateRequest:
        call = LocateCall(
            self.session, self.namespace, b"".join(keys), 1 << 30, request, budget_seconds, wait_seconds,
            token_seconds=token_seconds, source_id=source_id,
        )  # fmt: skip
        message: pb.LocateRequest = encode(call)
        return message

    def end_request(self, request: str, end: RequestEnd | None = None) -> None:
        call = encode(EndRequestCall(self.session, request, end or RequestEnd()))
        self.stub.EndRequest(call, timeout=patient(CALL_SECONDS))

    def acquire(
        self, keys: Sequence[bytes], request: str = "", *, lease_id: int = 0, seconds: float = CALL_SECONDS
    ) -> tuple[int, AcquireOutcome, bytes]:
        """`seconds`: after them it raises `grpc.RpcError`. The daemon may grant it all the same."""
        lease_id = lease_id or self.new_lease_id()
        kinds = bytes([Kind.ATTENTION]) * len(keys)
        call = AcquireCall(self.session, lease_id, self.namespace, b"".join(keys), kinds, request)
        reply = decode_reply(AcquireCall, self.stub.Acquire(encode(call), timeout=patient(seconds)))
        return lease_id, reply.outcome, reply.extents

    def release(self, lease_id: int) -> None:
        self.stub.Release(encode(ReleaseCall(self.session, (lease_id,))), timeout=patient(CALL_SECONDS))

    def load(self, keys: Sequence[bytes], request: str = "") -> list[bytes] | None:
        """The objects' bytes; None when they are not served."""
        lease_id, outcome, extents = self.acquire(keys, request)
        if outcome is not AcquireOutcome.GRANTED:
            return None
        parts = self.read(extents, len(keys))
        self.release(lease_id)
        return parts

    def read(self, extents: bytes, count: int) -> list[bytes]:
        """Return what lies in packed extents of so many objects."""
        parts = [b""] * count
        for index, _, offset, length, _ in EXTENT.iter_unpack(extents):
            parts[index] += self.arena[offset : offset + length]
        return parts

    def status(self) -> DaemonStatus:
        return _status(self.operator)

    def counter(self, name: str) -> float:
        return self.status().counters.get(name, 0.0)

    def close(self) -> None:
        self.connection.close()
        self.channel.close()
        self.admin_channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _status(operator: Any) -> DaemonStatus:
    status: DaemonStatus = decode_reply(
        GetStatusCall, operator.GetStatus(pb.GetStatusRequest(), timeout=patient(CALL_SECONDS))
    )
    return status


def status_of(grpc_socket: Path) -> DaemonStatus:
    with grpc.insecure_channel(f"unix:{grpc_socket}.admin") as channel:
        stub = pb_grpc.OperatorStub(channel)  # type: ignore[no-untyped-call]
        return _status(stub)
