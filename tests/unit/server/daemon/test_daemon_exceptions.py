"""An exception in the daemon's own callbacks: its loop's, its checksum worker's, its sockets'."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kvdepot.core.calls import AttachCall, Confirmed, GetCapabilitiesCall
from kvdepot.proto import codec
from kvdepot.proto.methods import DEPOT, encode
from kvdepot.server.attach.attach import ArenaOffer, AttachListener
from kvdepot.server.daemon.node import Node
from kvdepot.server.depot.counters import Counters
from kvdepot.server.io.checksum_wire import JOBS
from kvdepot.server.io.framing import HEAD
from kvdepot.server.platform import processes
from kvdepot.server.platform.guard import engine_guard
from kvdepot.server.platform.processes import read_boot_id
from kvdepot.server.rpc import call_socket as server_end
from kvdepot.server.rpc.depot_calls import DepotCalls

from tests.fakes.call_daemon import Daemon
from tests.fakes.checksum_worker import Checksums
from tests.rigs.engine_rig import Rig, audit, path
from tests.rigs.tier_rig import store

LOG = logging.getLogger("exceptions")
FAILED = "the daemon failed on this call"


def raising(*_: Any, **__: Any) -> Any:
    raise KeyError("of somebody's")


def errors(rig: Rig, place: str) -> float:
    return rig.counter(f"internal_errors.{place}")


# --- checksums ---


def test_a_checksum_whose_answer_raises_is_not_taken_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    store(rig.attach(), path("a", 3))
    service = Checksums(rig, monkeypatch)
    first, *others = service.handed_out
    with monkeypatch.context() as patch:
        patch.setattr(rig.depot._ram, "set_sum", raising)
        service.answer(first)
    assert errors(rig, "checksums") == 1
    service.answer(*others)
    assert rig.depot.unsummed == 1
    assert service.handed_out == [first], "its loan has ended, and it is handed out again"
    service.answer(first)
    assert not rig.depot.unsummed
    lent = rig.depot._ram.lent
    assert lent.free_count == lent.count
    audit(rig.depot)
    assert errors(rig, "checksums") == 1


def test_an_object_that_cannot_be_packed_keeps_no_other_from_its_checksum(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    service = Checksums(rig, monkeypatch)
    store(rig.attach(), path("a", 3))
    with monkeypatch.context() as patch:
        patch.setattr(JOBS, "pack", raising)
        service.service.wake()
    service.service.wake()
    assert len(service.handed_out) == 2
    service.answer(*service.handed_out)
    assert rig.depot.unsummed == 1
    service.die()
    service.start_again()
    assert len(service.handed_out) == 1, "another worker starts, and gets it"


@pytest.mark.requirement("I4")
@pytest.mark.parametrize("frame", [HEAD.pack(1 << 31, 0, 1), HEAD.pack(0, 0, 1), HEAD.pack(0, 9, 1)])
def test_a_checksum_worker_that_sends_no_answer_is_killed(frame: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    store(rig.attach(), path("a", 2))
    service = Checksums(rig, monkeypatch)
    handed_out = service.handed_out
    service.say(frame)
    assert service.process.done == ["kill"]
    assert service.handed_out == handed_out, "its death gives back what it was lent"
    service.die()
    assert rig.depot.next_to_sum() is not None
    assert not errors(rig, "checksums")


def test_a_checksum_worker_is_replaced_although_its_death_cannot_be_dealt_with(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    service = Checksums(rig, monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(rig.depot, "sum_worker_died", raising)
        service.die()
    assert len(service.loop.due(service.service.start)) == 1
    assert errors(rig, "checksums") == 1


# --- the tick ---


def test_each_part_of_a_tick_runs_whatever_another_raises() -> None:
    done: list[str] = []
    counters = Counters()
    node: Any = object.__new__(Node)
    node._tick_handle = node._trim_handle = None
    node._counters, node._guard = counters, engine_guard(counters.add)
    node._loop = SimpleNamespace(call_later=lambda *_: done.append("again"))
    node._depot = SimpleNamespace(tick=raising)
    node._checksums = SimpleNamespace(wake=raising)
    node._log = SimpleNamespace(handlers=[])
    node._spare = SimpleNamespace(refill=raising)
    node._verdicts = node._live = SimpleNamespace(note=raising)
    node.readiness = raising
    node._notify = SimpleNamespace(alive=lambda: done.append("alive"))
    node._tick()
    assert done == ["again", "alive"]
    assert counters.get("internal_errors.tick") == 6


# --- sockets ---


def test_who_attaches_is_answered_although_the_engine_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    monkeypatch.setattr(rig.depot, "attach", raising)
    opened: list[int] = []

    def peer_pidfd(*_: object) -> int:
        opened.append(os.pidfd_open(os.getpid()))
        return opened[-1]

    monkeypatch.setattr(processes, "peer_pidfd", peer_pidfd)
    folder = Path(tempfile.mkdtemp(prefix="kvd", dir="/tmp"), "a")
    streams: Any = SimpleNamespace(tidy=lambda _: None, close=lambda: None)
    calls: Any = None

    async def run() -> bytes:
        loop = asyncio.get_running_loop()
        listener = AttachListener(
            depot=rig.depot, calls=calls, streams=streams,
            offer=ArenaOffer(1, (4096,), lambda _: 0, "1", lambda _: (-1, -1)),
            loop=loop, log=LOG, boot_id=read_boot_id(),
        )  # fmt: skip
        listener.listen(folder, 0o600, -1)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) as client:
            client.connect(f"{folder}.attach")
            client.send(codec.encode_attach_call(AttachCall(1, 1, "e", scheduler=True, rank=0, world_size=1)))
            answer = await asyncio.wait_for(loop.sock_recv(client, 4096), 10)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(*opened)
        listener.close()
        return answer

    reply = codec.decode_attach_reply(asyncio.run(run()))
    assert reply.protocol == 0 and reply.error.startswith(FAILED)
    assert errors(rig, "answer") == 1


def test_a_call_whose_answer_cannot_be_encoded_is_answered_and_the_next_one_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encode = server_end.encode_frame  # type: ignore[attr-defined]

    def some(number: int, method: int, body: bytes) -> bytes:
        if number == 1:
            raising()
        frame: bytes = encode(number, method, body)
        return frame

    monkeypatch.setattr(server_end, "encode_frame", some)

    async def run() -> None:
        daemon = Daemon()
        daemon.calls.answer = Confirmed()
        daemon.send(1, 2, method="Release")
        (one, failed), (two, fine) = await daemon.answers(2)
        assert (one, two) == (1, 2)
        assert FAILED in str(failed) and fine == Confirmed()
        assert daemon.end.idle
        daemon.end.close()

    asyncio.run(run())


def test_a_call_is_answered_although_it_cannot_be_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, answers = Rig(), list[Any]()
    calls = DepotCalls(
        rig.depot, capabilities=raising, committed=lambda: None, counters=rig.depot.counters, log=LOG
    )  # fmt: skip
    monkeypatch.setattr(rig.depot.counters, "observe", raising)
    message = encode(GetCapabilitiesCall(1, 1)).SerializeToString()
    calls.start(DEPOT["GetCapabilities"], message, answers.append)
    (answer,) = answers
    assert str(answer).startswith(FAILED)
    assert errors(rig, "answer") == 1
