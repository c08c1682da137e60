"""Objects whose bytes follow from their keys, and an engine that writes and reads them and compares every byte.

Prompts come in families that share their first chunks, so that the tree of chunks branches.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash
from kvdepot.core.calls import (
    ROOT_KEY,
    AcquireCall,
    AcquireOutcome,
    CommitCall,
    CommitItem,
    CommitOutcome,
    DeclareCall,
    Kind,
    ReserveCall,
    ReserveOutcome,
)
from kvdepot.core.groups import GroupSpec
from kvdepot.core.keys import NamespaceSpec
from kvdepot.proto.methods import decode_reply, encode

from tests.rigs.patience import patient, wait_until
from tests.rigs.raw_client import CALL_SECONDS, CHUNK_TOKENS, RawEngine

CHUNKS = 6
SHARED_CHUNKS = 2
FAMILY = 3
_LOAD_SECONDS = 50.0
"""A load waits for workers that a test keeps from starting, 20 s and more: an engine gives up sooner (T1)."""
_EXTENT = struct.Struct("<5Q")
_STEP = np.uint64(0x9E37_79B9_7F4A_7C15)


@dataclass(frozen=True, slots=True)
class Known:
    """One object, as a call names it."""

    key: bytes
    parent: bytes
    kind: Kind
    boundary: int  # tokens


class WrongBytesError(AssertionError):
    """The daemon served something else than was stored under this name (I1)."""


def content(known: Known, length: int) -> npt.NDArray[np.uint8]:
    """Each 8 bytes of it occur nowhere else: neither a shift nor another object's piece goes unseen."""
    words = np.arange(-(-length // 8), dtype=np.uint64)
    words *= _STEP
    words += np.uint64(xxhash.xxh3_64_intdigest(known.key + bytes([known.kind])))
    words ^= words >> np.uint64(29)
    return words.view(np.uint8)[:length]


def prompt(spec: NamespaceSpec, seed: int, number: int, chunks: int = CHUNKS) -> list[Known]:
    """All its objects, parents first; states, if there are any, at the last chunk and where its family parts."""
    found: list[Known] = []
    parent = ROOT_KEY
    for index in range(chunks):
        owner = number // FAMILY if index < SHARED_CHUNKS else number
        key = blake2b(repr((seed, spec.label, index, owner)).encode(), digest_size=16).digest()
        boundary = (index + 1) * spec.chunk_tokens
        found.append(Known(key, parent, Kind.ATTENTION, boundary))
        if Kind.STATE in spec.object_bytes and index in (SHARED_CHUNKS - 1, chunks - 1):
            found.append(Known(key, parent, Kind.STATE, boundary))
        parent = key
    return found


def dense(object_bytes: int, label: str = "dense") -> NamespaceSpec:
    return _spec(label, (_group(Kind.ATTENTION, object_bytes),))


def hybrid(attention_bytes: int, state_bytes: int, label: str = "hybrid") -> NamespaceSpec:
    return _spec(label, (_group(Kind.ATTENTION, attention_bytes), _group(Kind.STATE, state_bytes)))


def _group(kind: Kind, object_bytes: int) -> GroupSpec:
    return GroupSpec(kind=kind, block_tokens=CHUNK_TOKENS, rank_block_bytes=(object_bytes,))


def _spec(label: str, groups: tuple[GroupSpec, ...]) -> NamespaceSpec:
    sizes = {group.kind: sum(group.rank_block_bytes) for group in groups}
    return NamespaceSpec({"model": f'"{label}"'}, CHUNK_TOKENS, groups, sizes, label=label)


class KnownEngine(RawEngine):
    """A one-process engine of one namespace."""

    def __init__(self, grpc_socket: Path, spec: NamespaceSpec, seed: int = 0) -> None:
        super().__init__(grpc_socket, spec.label, spec=spec)
        self._seed = seed
        declare = encode(DeclareCall(self.session, ()))  # what a former connection held is over
        self.stub.Declare(declare, timeout=patient(CALL_SECONDS))

    def prompt(self, number: int, chunks: int = CHUNKS) -> list[Known]:
        return prompt(self.spec, self._seed, number, chunks)

    def put(self, objects: Sequence[Known]) -> int:
        """Store what the daemon takes of them; how many it took."""
        call = ReserveCall(
            self.session,
            self.new_lease_id(),
            self.namespace,
            keys=b"".join(known.key for known in objects),
            parents=b"".join(known.parent for known in objects),
            kinds=bytes(known.kind for known in objects),
            boundaries=b"".join(struct.pack("<I", known.boundary) for known in objects),
        )
        reply = decode_reply(ReserveCall, self.stub.Reserve(encode(call), timeout=patient(CALL_SECONDS)))
        granted = [at for at, outcome in enumerate(reply.outcomes) if outcome == ReserveOutcome.GRANTED]
        if not granted:
            return 0
        for index, piece, view, _ in self._pieces(reply.extents):
            known = objects[index]
            view[:] = content(known, self._length(known))[piece : piece + len(view)]
        item = CommitItem(call.lease_id, b"".join(struct.pack("<I", at) for at in granted))
        commit = encode(CommitCall(self.session, (item,)))
        outcomes = decode_reply(CommitCall, self.stub.Commit(commit, timeout=patient(CALL_SECONDS))).outcomes[0]
        return sum(outcome == CommitOutcome.COMMITTED for outcome in outcomes)

    def put_until(self, objects: Sequence[Known], there: Callable[[], bool], seconds: float) -> None:
        """Offers again what is refused while RAM is busy, until they are where they should be."""

        def put() -> bool:
            self.put(objects)
            return there()

        wait_until(put, "they are there", seconds)

    def get(self, objects: Sequence[Known]) -> AcquireOutcome:
        """Load and compare them. Raises WrongBytesError."""
        lease_id = self.new_lease_id()
        call = AcquireCall(
            self.session, lease_id, self.namespace,
            b"".join(known.key for known in objects), bytes(known.kind for known in objects),
        )  # fmt: skip
        reply = decode_reply(AcquireCall, self.stub.Acquire(encode(call), timeout=patient(_LOAD_SECONDS)))
        if reply.outcome is AcquireOutcome.GRANTED:
            self._compare(objects, reply.extents)
            self.release(lease_id)
        return AcquireOutcome(reply.outcome)

    def get_prompt(self, number: int) -> int:
        """Load what there is of a prompt, as an engine would; the tokens that were served."""
        objects = self.prompt(number)
        keys = [known.key for known in objects if known.kind is Kind.ATTENTION]
        boundary = self.locate(keys)
        wanted = [k for k in objects if k.boundary <= boundary and (k.kind is Kind.ATTENTION or k.boundary == boundary)]
        return boundary if wanted and self.get(wanted) is AcquireOutcome.GRANTED else 0

    def _compare(self, objects: Sequence[Known], extents: bytes) -> None:
        seen = dict.fromkeys(range(len(objects)), 0)
        for index, piece, view, granted in self._pieces(extents):
            known = objects[index]
            same = np.array_equal(view, content(known, self._length(known))[piece : piece + len(view)])
            row, generation = granted
            if not same and self.generations[row] == generation:
                raise WrongBytesError(f"{known} at byte {piece} of {self._length(known)}")
            seen[index] += len(view)
        short = {objects[index] for index, length in seen.items() if length != self._length(objects[index])}
        if short:
            raise WrongBytesError(f"not all of {short}")

    def _pieces(self, extents: bytes) -> list[tuple[int, int, npt.NDArray[np.uint8], tuple[int, int]]]:
        """(object, offset in it, its bytes in the arena, (row, generation))"""
        found = []
        at: dict[int, int] = {}
        for index, row, offset, length, generation in _EXTENT.iter_unpack(extents):
            view = np.frombuffer(self.arena, np.uint8, length, offset)
            found.append((index, at.get(index, 0), view, (row, generation)))
            at[index] = at.get(index, 0) + length
        return found

    def _length(self, known: Known) -> int:
        return self.spec.object_bytes[known.kind]
