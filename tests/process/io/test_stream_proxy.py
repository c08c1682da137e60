"""A proxy process against calls of every kind: what is not right is refused, and nothing is touched (I1, I4)."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
import torch
from kvdepot.client.copy.base import IndeterminateError, object_pieces
from kvdepot.client.copy.cpu import CpuCopier
from kvdepot.client.extents import parse_extents
from kvdepot.client.transports.stream import StreamArena
from kvdepot.core.calls import ROOT_KEY, AcquireReply, DataCall, Kind, ReserveCall, ReserveReply
from kvdepot.core.calls import AcquireCall as Acquire
from kvdepot.core.errors import KvDepotError
from kvdepot.core.limits import PIECE_BYTES_MAX, SESSION_TOKEN_BYTES
from kvdepot.proto import codec_data, status
from kvdepot.proto.status import RefusedByDaemon
from kvdepot.proto.v1 import data_pb2 as pb
from kvdepot.proto.v1 import data_pb2_grpc as pb_grpc

from tests.fakes.direct_session import DirectDepot, DirectSession
from tests.rigs.engine_client import BLOCK_BYTES, CHUNK_TOKENS, IN_OBJECT, LAYERS, OBJECT_BYTES, prompt_keys, spec
from tests.rigs.patience import patient, wait_until

CALL_SECONDS = 20.0
COUNT = 3
BYTES = COUNT * OBJECT_BYTES


class Rank:
    """A proxy and its session, with one lease of each kind. `written` and `read` are packed extents."""

    def __init__(self) -> None:
        self.depot = DirectDepot()
        self.session = DirectSession(self.depot, "e", 1)
        self.session.register(spec())
        self.namespace = spec().namespace_id()
        lease, self.read = self._reserve("read")
        self.session.commit(lease, range(COUNT))
        keys = b"".join(prompt_keys("read", COUNT))
        acquired = self._call(Acquire(b"", 99, self.namespace, keys, bytes([Kind.ATTENTION] * COUNT)))
        assert isinstance(acquired, AcquireReply)
        self.read = acquired.extents
        _, self.written = self._reserve("written")
        (attached,) = self.session.ranks
        self.token = attached.session
        self.proxy = self.depot.proxy(attached)
        self.channel = grpc.insecure_channel(f"unix:{self.proxy.path}")
        self.stub = pb_grpc.DataStub(self.channel)  # type: ignore[no-untyped-call]

    def _reserve(self, name: str) -> tuple[int, bytes]:
        keys = prompt_keys(name, COUNT)
        lease = self.session.new_lease_id()
        boundaries = struct.pack(f"<{COUNT}I", *(CHUNK_TOKENS * (i + 1) for i in range(COUNT)))
        parents = b"".join((ROOT_KEY, *keys[:-1]))
        kinds = bytes([Kind.ATTENTION] * COUNT)
        reply = self._call(ReserveCall(b"", lease, self.namespace, b"".join(keys), parents, kinds, boundaries))
        assert isinstance(reply, ReserveReply)
        return lease, reply.extents

    def _call(self, call: Any) -> Any:
        got: list[Any] = []
        self.session.submit(call, 1.0, got.append)
        self.session.poll()
        return got[0]

    def load(self, extents: bytes, **how: Any) -> bytes:
        """Raises the error that the refusal stands for."""
        message = codec_data.encode_load_call(DataCall(how.pop("token", self.token), extents))
        try:
            answers = list(self.stub.Load(message, **({"timeout": CALL_SECONDS} | how)))
        except grpc.RpcError as error:
            raise _refusal(error) from error
        assert codec_data.decode_load_piece(answers[-1]) is None
        return b"".join(codec_data.decode_load_piece(answer) or b"" for answer in answers[:-1])

    def store(self, *messages: pb.StoreRequest, **how: Any) -> None:
        try:
            self.stub.Store(iter(messages), **({"timeout": CALL_SECONDS} | how))
        except grpc.RpcError as error:
            raise _refusal(error) from error

    def begin(self, extents: bytes | None = None, token: bytes | None = None) -> pb.StoreRequest:
        return codec_data.encode_store_call(DataCall(token or self.token, extents or self.written))

    def close(self) -> None:
        self.channel.close()
        self.proxy.close()


def _refusal(error: Any) -> KvDepotError:
    return status.from_status(error.code(), error.details(), error.trailing_metadata())


def piece(data: bytes) -> pb.StoreRequest:
    return codec_data.encode_store_piece(data)


@pytest.fixture(scope="module")
def shared_rank() -> Iterator[Rank]:
    rank = Rank()
    yield rank
    rank.close()


@pytest.fixture
def rank(shared_rank: Rank) -> Iterator[Rank]:
    """Whatever a test has asked for, the proxy serves afterwards."""
    yield shared_rank
    data = bytes(range(256)) * (BYTES // 256)
    shared_rank.store(shared_rank.begin(), piece(data[:1000]), piece(data[1000:]))
    assert shared_rank.depot.buffer[_offset(shared_rank.written) :][:OBJECT_BYTES] == data[:OBJECT_BYTES]
    assert len(shared_rank.load(shared_rank.read)) == BYTES


def _offset(packed: bytes) -> int:
    return int(struct.unpack_from("<5Q", packed)[2])


def test_bytes_that_are_no_message_are_an_invalid_argument(rank: Rank) -> None:
    load = rank.channel.unary_stream("/kvdepot.v1.Data/Load", None, None)
    store = rank.channel.stream_unary("/kvdepot.v1.Data/Store", None, None)
    for call in (
        lambda: list(load(b"\xff" * 9, timeout=patient(CALL_SECONDS))),
        lambda: store(iter([b"\xff" * 9]), timeout=patient(CALL_SECONDS)),
        lambda: store(iter([rank.begin().SerializeToString(), b"\xff" * 9]), timeout=patient(CALL_SECONDS)),
    ):
        with pytest.raises(grpc.RpcError) as raised:
            call()
        refusal = _refusal(raised.value)
        assert refusal.code == "invalid_argument", refusal
        assert "its 9 bytes are no" in refusal.message


def calls(rank: Rank) -> dict[str, tuple[str, Any]]:
    """By name: the code of the refusal, the call."""
    stranger, all_of_it = bytes(SESSION_TOKEN_BYTES), piece(b"x" * BYTES)
    return {
        "a load for another session": ("unknown_session", lambda: rank.load(rank.read, token=stranger)),
        "a store for another session": ("unknown_session", lambda: rank.store(rank.begin(token=stranger), all_of_it)),
        "a load without a deadline": ("invalid_argument", lambda: rank.load(rank.read, timeout=None)),
        "a store without a deadline": ("invalid_argument", lambda: rank.store(rank.begin(), all_of_it, timeout=None)),
        "a load of nothing": ("invalid_argument", lambda: rank.load(b"")),
        "half an extent": ("invalid_argument", lambda: rank.load(rank.read[:-8])),
        "a token that is none": ("invalid_argument", lambda: rank.load(rank.read, token=b"short")),
        "loading what is being written": ("not_lent", lambda: rank.load(rank.written)),
        "storing over what is read": ("not_lent", lambda: rank.store(rank.begin(rank.read), all_of_it)),
        "a store without a message": ("invalid_argument", lambda: rank.store()),
        "a store that begins with data": ("invalid_argument", lambda: rank.store(all_of_it)),
        "extents and data at once": (
            "invalid_argument",
            lambda: rank.store(pb.StoreRequest(session=rank.token, extents=rank.written, data=b"x")),
        ),
        "extents twice": ("invalid_argument", lambda: rank.store(rank.begin(), rank.begin())),
        "an empty piece": ("invalid_argument", lambda: rank.store(rank.begin(), piece(b""))),
        "a piece too long": ("limit_exceeded", lambda: rank.store(rank.begin(), piece(bytes(PIECE_BYTES_MAX + 1)))),
        "nothing behind the extents": ("invalid_argument", lambda: rank.store(rank.begin())),
        "more than the extents": ("invalid_argument", lambda: rank.store(rank.begin(), piece(b"x" * (BYTES + 1)))),
    }


_NAMES = (
    "a load for another session", "a store for another session", "a load without a deadline",
    "a store without a deadline", "a load of nothing", "half an extent", "a token that is none",
    "loading what is being written", "storing over what is read", "a store without a message",
    "a store that begins with data", "extents and data at once", "extents twice", "an empty piece",
    "a piece too long", "nothing behind the extents", "more than the extents",
)  # fmt: skip


@pytest.mark.requirement("I1")
@pytest.mark.parametrize("name", _NAMES)
def test_a_wrong_call_is_refused_by_name_and_touches_nothing(rank: Rank, name: str) -> None:
    code, call = calls(rank)[name]
    before = bytes(rank.depot.buffer)
    with pytest.raises(KvDepotError) as refused:
        call()
    assert refused.value.code == code
    assert rank.depot.buffer == before


@pytest.mark.requirement("I1")
def test_bytes_short_of_the_extents_are_not_acknowledged(rank: Rank) -> None:
    with pytest.raises(KvDepotError, match=f"1 of {BYTES} bytes are missing"):
        rank.store(rank.begin(), piece(b"y" * (BYTES - 1)))


@pytest.mark.requirement("I4")
@pytest.mark.parametrize("method", ["Load", "Store", "Format"])
def test_garbage_gets_an_error(rank: Rank, method: str) -> None:
    call = rank.channel.stream_stream(f"/kvdepot.v1.Data/{method}", bytes, bytes)
    before = bytes(rank.depot.buffer)
    with pytest.raises(grpc.RpcError):
        list(call(iter([b"\xff" * 5000]), timeout=patient(CALL_SECONDS)))
    assert rank.depot.buffer == before


@pytest.mark.requirement("I4")
def test_calls_are_bounded_and_those_given_up_give_their_places_back(rank: Rank) -> None:
    over = threading.Event()

    def begin_and_wait() -> Iterator[pb.StoreRequest]:
        yield rank.begin()
        over.wait()

    def outcome() -> str:
        try:
            rank.load(rank.read)
        except RefusedByDaemon as refused:
            return refused.status.name
        return "OK"

    stalled: list[Any] = []

    def fifth_is_refused() -> bool:
        """One of the four may come while a load still has its place: it is refused, and another one takes its."""
        stalled[:] = [call for call in stalled if not call.done()]
        while len(stalled) < 4:
            stalled.append(rank.stub.Store.future(begin_and_wait(), timeout=10 * CALL_SECONDS))
        return outcome() == "RESOURCE_EXHAUSTED"

    try:
        wait_until(fifth_is_refused, "the fifth was served")
    finally:
        over.set()
        for call in stalled:
            call.cancel()
    wait_until(lambda: outcome() == "OK", "no place came back")


@pytest.mark.requirement("I6")
def test_whatever_interrupts_a_store_leaves_it_in_doubt_until_the_proxy_is_dead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank = Rank()
    arena = rank.proxy.arena
    begun = threading.Event()

    def first_message(*_: object) -> Iterator[pb.StoreRequest]:
        yield rank.begin()
        begun.set()
        while not arena.ended:
            time.sleep(0.01)

    def interrupt() -> None:
        if begun.is_set():
            raise RuntimeError("something else")

    monkeypatch.setattr(StreamArena, "_messages", first_message)
    layers = [torch.zeros(COUNT * IN_OBJECT, BLOCK_BYTES, dtype=torch.uint8) for _ in range(LAYERS)]
    extents = parse_extents(rank.written, arena.size_bytes)
    blocks = [[index * IN_OBJECT + block for block in range(IN_OBJECT)] for index in range(COUNT)]
    batch = object_pieces(extents, range(COUNT), 0, range(LAYERS), [BLOCK_BYTES] * LAYERS, IN_OBJECT, blocks)
    with pytest.raises(IndeterminateError) as doubt:
        arena.store(CpuCopier(layers), extents, batch, interrupt)
    assert arena.ended
    wait_until(lambda: doubt.value.over)
    assert not arena.store(CpuCopier(layers), extents, batch), "and nothing is sent any more"
    rank.close()


def test_the_proxy_ends_with_its_lifeline_and_leaves_no_word(capfd: pytest.CaptureFixture[str]) -> None:
    depot = DirectDepot()
    (attached,) = depot.attach("e", 1)
    proxy = depot.proxy(attached)
    proxy.arena.end()
    assert proxy.process.wait(patient(20)) == 0
    assert proxy.arena.proxy_dead
    proxy.close()
    assert capfd.readouterr().err == ""
