"""What goes to a proxy and what it is believed, with a proxy that a test scripts."""

from __future__ import annotations

import logging
import socket
import struct
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from kvdepot.client.copy.base import CopyBatch
from kvdepot.client.copy.cpu import CpuCopier
from kvdepot.client.extents import parse_extents
from kvdepot.client.transports import stream
from kvdepot.client.transports.stream import StreamArena
from kvdepot.proto import codec_data
from kvdepot.proto.v1 import data_pb2_grpc

TOKEN = b"t" * 16
BYTES = 2500
EXTENTS = parse_extents(struct.pack("<5Q", 0, 7, 4096, BYTES, 3), 1 << 20)


class Proxy:
    """Takes what is stored, and gives it back in pieces of 1000 bytes."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.Store = SimpleNamespace(future=self._store)
        self.lifeline, self.end = socket.socketpair()

    def _store(self, messages: Iterator[Any], timeout: float) -> Any:
        first, *rest = messages
        call = codec_data.decode_store_call(first)
        assert call.session == TOKEN and struct.unpack("<5Q", call.extents)[1:] == (7, 4096, BYTES, 3)
        self.pieces = [codec_data.decode_store_piece(one) for one in rest]
        assert timeout == stream.STORE_SECONDS_MAX
        return SimpleNamespace(code=lambda: grpc.StatusCode.OK, add_done_callback=lambda done: done(None))

    def Load(self, _: Any, timeout: float) -> Any:  # noqa: N802 - gRPC's name
        assert timeout > 0
        messages = [codec_data.encode_load_piece(piece) for piece in self.pieces]
        return Messages([*messages, codec_data.encode_load_end()])


class Messages(list[Any]):
    def cancel(self) -> None: ...


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    proxy = Proxy()
    monkeypatch.setattr(stream, "PIECE_BYTES_MAX", 1000)
    monkeypatch.setattr(data_pb2_grpc, "DataStub", lambda _: proxy)
    yield proxy
    proxy.end.close()


@pytest.fixture
def arena(proxy: Proxy) -> Iterator[StreamArena]:
    arena = StreamArena(
        arena_id=1, size_bytes=1 << 20, target="unix:/nowhere", session=TOKEN, lifeline=proxy.lifeline,
        on_end=lambda: None, log=logging.getLogger("stream"),
    )  # fmt: skip
    yield arena
    arena.end()
    proxy.lifeline.close()


def batch(blocks: list[int]) -> CopyBatch:
    zeros = np.zeros(len(blocks), np.int64)
    return CopyBatch(zeros, np.array(blocks, np.int64), zeros, zeros + 4096, zeros + BYTES)


def filled() -> torch.Tensor:
    return torch.arange(2 * BYTES, dtype=torch.int64).to(torch.uint8).reshape(2, BYTES)


def test_bytes_are_sent_in_pieces_and_come_back_as_they_were(arena: StreamArena, proxy: Proxy) -> None:
    layer = filled()
    copier = CpuCopier([layer])
    assert arena.store(copier, EXTENTS, batch([0]))
    assert list(map(len, proxy.pieces)) == [1000, 1000, 500]
    assert b"".join(proxy.pieces) == layer[0].numpy().tobytes()
    assert arena.load(copier, EXTENTS, batch([1]))
    assert torch.equal(layer[1], layer[0])


@pytest.mark.requirement("I1")
def test_a_load_that_ends_early_or_is_too_long_copies_nothing(arena: StreamArena, proxy: Proxy) -> None:
    layer = filled()
    before = layer.clone()
    for pieces in ([], [bytes(BYTES - 1)], [bytes(BYTES), b"x"]):
        proxy.pieces = pieces
        assert not arena.load(CpuCopier([layer]), EXTENTS, batch([1]))
    assert torch.equal(layer, before)


def test_a_batch_of_nothing_is_done_at_once(arena: StreamArena, proxy: Proxy) -> None:
    proxy.pieces = [b"of another"]
    copier = CpuCopier([filled()])
    assert arena.store(copier, EXTENTS, batch([])) and arena.load(copier, EXTENTS, batch([]))
    assert proxy.pieces == [b"of another"], "nobody was asked"


def test_a_proxy_is_dead_when_its_end_of_the_lifeline_is_closed(arena: StreamArena, proxy: Proxy) -> None:
    assert not arena.proxy_dead and arena.check([7], [3])
    arena.end()
    assert proxy.end.recv(1) == b"" and not arena.check([7], [3]), "it hears that it is to end"
    assert not arena.proxy_dead
    proxy.end.close()
    assert arena.proxy_dead
