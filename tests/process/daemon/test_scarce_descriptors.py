"""A host that has no descriptor or process left for a moment: nothing spins, and all of it comes back."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kvdepot.core.calls import AttachCall
from kvdepot.proto import codec
from kvdepot.server.attach import attach
from kvdepot.server.attach.attach import ArenaOffer, AttachListener
from kvdepot.server.daemon.checksums import ChecksumService
from kvdepot.server.platform import processes
from kvdepot.server.platform.processes import peer_pidfd, read_boot_id

from tests.fakes.scarce_descriptors import no_descriptor_left
from tests.rigs.engine_rig import Rig


def _descriptors(_: int) -> tuple[int, int]:
    return os.open(os.devnull, os.O_RDWR), os.open(os.devnull, os.O_RDONLY)


@contextlib.contextmanager
def _none_given_back() -> Iterator[None]:
    """What earlier tests left behind gives its descriptors back before, not in the middle."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextlib.contextmanager
def _no_descriptor_left() -> Iterator[None]:
    with _none_given_back(), no_descriptor_left():
        yield


def _attach(path: Path) -> socket.socket:
    client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    client.connect(f"{path}.attach")
    client.send(codec.encode_attach_call(AttachCall(1, 1, "e", scheduler=True, rank=0, world_size=1)))
    return client


_NO_CALLS: Any = None  # nobody asks for a call socket
_NO_STREAMS: Any = SimpleNamespace(tidy=lambda _: None, close=lambda: None)


@pytest.mark.requirement("I4")
def test_without_descriptors_the_listener_waits_instead_of_spinning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(attach, "ACCEPT_PAUSE_SECONDS", 0.1)
    path = Path(tempfile.mkdtemp(prefix="kvd", dir="/tmp"), "a")

    async def run() -> bytes:
        loop = asyncio.get_running_loop()
        offer = ArenaOffer(
            1, (4096,), lambda _: 0, "1", lambda _: (os.open(os.devnull, os.O_RDWR), os.open(os.devnull, os.O_RDONLY))
        )
        log = logging.getLogger("scarce")
        listener = AttachListener(
            depot=Rig().depot,
            calls=_NO_CALLS,
            offer=offer,
            streams=_NO_STREAMS,
            loop=loop,
            log=log,
            boot_id=read_boot_id(),
        )
        listener.listen(path, 0o600, -1)
        with contextlib.closing(_attach(path)) as client:
            with _no_descriptor_left():
                await asyncio.sleep(0.25)
            answer = await asyncio.wait_for(loop.sock_recv(client, 4096), 5)
        listener.close()
        return answer

    with caplog.at_level(logging.WARNING, "scarce"):
        assert codec.decode_attach_reply(asyncio.run(run())).protocol == 1
    assert 1 <= sum("cannot accept" in record.message for record in caplog.records) <= 4


@pytest.mark.requirement("I4")
def test_an_attachment_without_a_descriptor_for_it_ends() -> None:
    path = Path(tempfile.mkdtemp(prefix="kvd", dir="/tmp"), "a")
    rig = Rig()

    def none_left(_: int) -> tuple[int, int]:
        raise OSError("no descriptor left")

    async def run() -> bytes:
        loop = asyncio.get_running_loop()
        offer = ArenaOffer(1, (4096,), lambda _: 0, "1", none_left)
        log = logging.getLogger("scarce")
        listener = AttachListener(
            depot=rig.depot,
            calls=_NO_CALLS,
            offer=offer,
            streams=_NO_STREAMS,
            loop=loop,
            log=log,
            boot_id=read_boot_id(),
        )
        listener.listen(path, 0o600, -1)
        with contextlib.closing(_attach(path)) as client:
            answer = await asyncio.wait_for(loop.sock_recv(client, 4096), 5)
        listener.close()
        return answer

    assert asyncio.run(run()) == b""
    assert [info.connections for info in rig.depot.attachments()] == [0]


@pytest.mark.requirement("I6")
@pytest.mark.parametrize("new_kernel", [True, False])
def test_a_process_that_could_be_watched_is_not_attached_unwatched(
    monkeypatch: pytest.MonkeyPatch, new_kernel: bool
) -> None:
    if not new_kernel:
        monkeypatch.setattr(processes, "SO_PEERPIDFD", 9999)
    path = Path(tempfile.mkdtemp(prefix="kvd", dir="/tmp"), "a")
    rig = Rig()

    def none_left(connection: socket.socket, pid: int) -> int | None:
        with _no_descriptor_left():
            return peer_pidfd(connection, pid)

    monkeypatch.setattr(processes, "peer_pidfd", none_left)

    async def run() -> bytes:
        loop = asyncio.get_running_loop()
        offer = ArenaOffer(
            1, (4096,), lambda _: 0, "1", lambda _: (os.open(os.devnull, os.O_RDWR), os.open(os.devnull, os.O_RDONLY))
        )
        listener = AttachListener(
            depot=rig.depot, calls=_NO_CALLS, offer=offer, streams=_NO_STREAMS, loop=loop,
            log=logging.getLogger("scarce"), boot_id=read_boot_id(),
        )  # fmt: skip
        listener.listen(path, 0o600, -1)
        with contextlib.closing(_attach(path)) as client:
            answer = await asyncio.wait_for(loop.sock_recv(client, 4096), 5)
        listener.close()
        return answer

    reply = codec.decode_attach_reply(asyncio.run(run()))
    assert reply.protocol == 0 and "cannot be watched: Too many open files" in reply.error
    assert list(rig.depot.attachments()) == []


@pytest.mark.parametrize("failing", ["Popen", "pidfd_open"])
def test_a_checksum_worker_that_cannot_start_is_tried_again(monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("not now")

    monkeypatch.setattr(subprocess if failing == "Popen" else os, failing, refuse)
    later: list[tuple[float, Any]] = []
    loop: Any = SimpleNamespace(call_later=lambda seconds, what: later.append((seconds, what)))
    arena: Any = SimpleNamespace(parts=((os.open(os.devnull, os.O_RDWR), 4096),))
    with _none_given_back():
        before = len(list(Path("/proc/self/fd").iterdir()))
        service = ChecksumService(
            arena=arena, depot=Rig().depot, loop=loop, log=logging.getLogger("scarce"), quarantine=lambda _: None
        )
        service.start()
        service.start()
        os.close(arena.parts[0][0])
        after = len(list(Path("/proc/self/fd").iterdir()))
    assert [seconds for seconds, _ in later] == [0.1, 0.2]
    assert all(what == service.start for _, what in later)
    assert service.pid is None
    assert after == before - 1
