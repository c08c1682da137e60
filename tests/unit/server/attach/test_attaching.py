"""Which process is taken to be the one that connected, and what a proxy hears of it."""

from __future__ import annotations

import array
import asyncio
import errno
import logging
import os
import socket
import tempfile
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
from kvdepot.core.calls import AttachCall, AttachReply
from kvdepot.core.errors import NotReady
from kvdepot.proto import codec
from kvdepot.server.attach import attach as attach_module
from kvdepot.server.attach.attach import ArenaOffer, AttachListener
from kvdepot.server.attach.streams import StreamProxy
from kvdepot.server.config.schema import STREAM_SUFFIX
from kvdepot.server.depot.types import Membership
from kvdepot.server.io.stream_wire import OPENING, Opening
from kvdepot.server.platform import processes
from kvdepot.server.platform.identity import Owner
from kvdepot.server.platform.processes import read_boot_id

from tests.rigs.engine_rig import Rig, process

_NO_STREAMS: Any = SimpleNamespace(tidy=lambda _: None, close=lambda: None)
_NO_CALLS: Any = None


def _descriptors(_: int) -> tuple[int, int]:
    return os.open(os.devnull, os.O_RDWR), os.open(os.devnull, os.O_RDONLY)


def attached(
    rig: Rig, streams: Any = _NO_STREAMS, *, stream: bool = False, rank: int = 0, knows_parts: bool = False,
    parts: tuple[int, ...] = (4096,),
) -> tuple[AttachReply, list[int]]:  # fmt: skip
    """What this process is answered when it attaches, and the descriptors that came along."""
    path = Path(tempfile.mkdtemp(prefix="kvd", dir="/tmp"), "a")
    call = AttachCall(1, 1, "e", scheduler=not stream, rank=rank, world_size=1, stream=stream, parts=knows_parts)

    async def run() -> tuple[AttachReply, list[int]]:
        loop = asyncio.get_running_loop()
        listener = AttachListener(
            depot=rig.depot, calls=_NO_CALLS,
            offer=ArenaOffer(1, parts, lambda _: 0, "1", _descriptors), streams=streams, loop=loop,
            log=logging.getLogger("attaching"), boot_id=read_boot_id(),
        )  # fmt: skip
        listener.listen(path, 0o600, -1)
        with closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)) as client:
            client.connect(f"{path}.attach")
            client.send(codec.encode_attach_call(call))
            readable = asyncio.Event()
            loop.add_reader(client, readable.set)
            await asyncio.wait_for(readable.wait(), 10)
            loop.remove_reader(client)
            answer, ancillary, _, _ = client.recvmsg(8192, socket.CMSG_SPACE(12))
        listener.close()
        descriptors = array.array("i", b"".join(data for _, _, data in ancillary))
        return codec.decode_attach_reply(answer), list(descriptors)

    return asyncio.run(run())


def seen_as(monkeypatch: pytest.MonkeyPatch, pid: int, *, ticks: int | None, pidfd: int | None) -> None:
    """What the kernel says of who connects. `ticks`: when it started, None where nobody can tell."""
    monkeypatch.setattr(processes, "peer_credentials", lambda _: (pid, 0, 0))
    monkeypatch.setattr(processes, "peer_pidfd", lambda *_: pidfd)
    monkeypatch.setattr(processes, "start_ticks", lambda _: ticks)


@pytest.mark.requirement("I6")
@pytest.mark.parametrize("pid", [1, 4711])
def test_a_process_that_ended_before_it_was_looked_at_is_not_attached(
    monkeypatch: pytest.MonkeyPatch, pid: int
) -> None:
    """Also the first of a container, where the kernel names no pidfd."""
    rig = Rig()
    seen_as(monkeypatch, pid, ticks=None, pidfd=None)
    reply, descriptors = attached(rig)
    assert reply.protocol == 0 and f"process {pid} that connected has ended" in reply.error
    assert not descriptors and not rig.depot.attachments()


@pytest.mark.requirement("I6")
def test_a_pidfd_says_that_a_process_has_ended_whose_pid_another_has(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    ended, end = os.pipe()  # readable, as the pidfd of a process that has ended
    os.write(end, b"\0")
    os.close(end)
    seen_as(monkeypatch, 4711, ticks=1, pidfd=ended)
    reply, descriptors = attached(rig)
    assert reply.protocol == 0 and "has ended" in reply.error
    assert not descriptors and not rig.depot.attachments()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(ended)


@pytest.mark.parametrize(("pid", "ticks"), [(4711, 1), (0, None)], ids=["without pidfds", "of another namespace"])
def test_a_process_without_a_pidfd_is_attached(monkeypatch: pytest.MonkeyPatch, pid: int, ticks: int | None) -> None:
    rig = Rig()
    seen_as(monkeypatch, pid, ticks=ticks, pidfd=None)
    reply, received = attached(rig)
    for descriptor in received:
        os.close(descriptor)
    assert (reply.protocol, reply.error) == (1, "")
    assert [info.process.pid for info in rig.depot.attachments()] == [pid]


def test_a_proxy_hears_whom_it_serves_before_its_client_has_the_lifeline() -> None:
    rig = Rig()
    lifeline, proxys = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    process: Any = SimpleNamespace(pid=os.getpid(), poll=lambda: 0)
    name = f"{STREAM_SUFFIX}0".lstrip(".")
    proxy = StreamProxy(name, Path(name), process, lifeline, os.pidfd_open(os.getpid()), Owner(0))
    inode = os.fstat(lifeline.fileno()).st_ino
    streams: Any = SimpleNamespace(tidy=lambda _: None, close=proxy.forget, start=lambda *_: proxy)
    reply, (received,) = attached(rig, streams, stream=True)
    with closing(proxys):
        begun = Opening(rig.depot.attachments()[0].attachment, reply.session)
        assert list(OPENING.take(bytearray(proxys.recv(4096)))) == [(0, begun)]
    assert (reply.protocol, reply.stream) == (1, name)
    assert os.fstat(received).st_ino == inode
    os.close(received)


def _no_proxy(*_: object) -> None:
    raise NotReady("no proxy")


@pytest.mark.requirement("I1", "S2")
def test_a_client_of_version_0_3_0_does_not_map_one_of_several_parts() -> None:
    """It copies in the part that it has mapped first, also where its user is in another tenant by now."""
    rig = Rig()
    reply, descriptors = attached(rig, parts=(4096, 4096))
    assert reply.protocol == 0 and "restart the engine" in reply.error
    assert not descriptors and not rig.depot.attachments()
    streams: Any = SimpleNamespace(tidy=lambda _: None, close=lambda: None, start=_no_proxy)
    reply, _ = attached(rig, streams, stream=True, parts=(4096, 4096))
    assert "no proxy" in reply.error, "a proxy has the part of its present tenant"
    for more in ({"parts": (4096, 4096), "knows_parts": True}, {"parts": (4096, 4096), "rank": -1}, {}):
        reply, descriptors = attached(rig, **more)  # type: ignore[arg-type]
        assert (reply.protocol, reply.error) == (1, "")
        for descriptor in descriptors:
            os.close(descriptor)


@pytest.mark.requirement("S4", "I4")
def test_no_proxy_is_started_for_an_attachment_that_is_refused() -> None:
    rig = Rig()
    owner = Owner(os.geteuid(), processes.pid_namespace(os.getpid(), None))
    rig.depot.attach(process(10), Membership("e", scheduler=False, rank=0, world_size=1, owner=owner))
    started: list[object] = []
    streams: Any = SimpleNamespace(tidy=lambda _: None, close=lambda: None, start=lambda *_: started.append(1))
    reply, _ = attached(rig, streams, stream=True)
    assert "already rank 0" in reply.error and not started


@pytest.mark.requirement("I6")
def test_a_process_that_cannot_be_watched_is_attached_and_watched_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """`epoll_ctl` has a limit for each user: the pidfd is closed, and opened again."""
    rig = Rig()
    watches: list[int] = []
    watch = attach_module._Watch

    def watching(*arguments: Any) -> Any:
        watches.append(arguments[1])
        if len(watches) == 1:
            raise OSError(errno.ENOSPC, "injected")
        return watch(*arguments)

    monkeypatch.setattr(attach_module, "_Watch", watching)
    monkeypatch.setattr(attach_module, "WATCH_AGAIN_SECONDS", 0.0)
    descriptors = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    reply, received = attached(rig)
    for descriptor in received:
        os.close(descriptor)
    assert (reply.protocol, reply.error) == (1, "")
    assert len(watches) == 2
    assert len(os.listdir("/proc/self/fd")) == descriptors  # noqa: PTH208


def test_the_kernel_says_in_which_pid_namespace_a_process_is() -> None:
    own, pidfd = Path("/proc/self/ns/pid").stat().st_ino, os.pidfd_open(os.getpid())
    assert processes.pid_namespace(os.getpid(), pidfd) == processes.pid_namespace(os.getpid(), None) == own
    os.close(pidfd)


def test_a_pid_namespace_that_the_kernel_does_not_show_is_0() -> None:
    with Path(os.devnull).open() as no_pidfd:  # the call is unknown, as before Linux 6.11
        assert processes.pid_namespace(1 << 30, no_pidfd.fileno()) == 0
    assert processes.pid_namespace(0, None) == 0


_CALL: Final = codec.encode_attach_call(AttachCall(1, 1, "e", scheduler=True, rank=0, world_size=1))


def told(monkeypatch: pytest.MonkeyPatch, steps: list[tuple[int, bytes]]) -> list[str]:
    """Connect as these users, one after another, and send what is given. Return what the daemon says last to each.

    "" is a connection that goes on, and "closed" one that the daemon has closed without a word.
    """
    uids = iter([uid for uid, sent in steps for _ in range(2 if sent else 1)])
    monkeypatch.setattr(processes, "peer_credentials", lambda _: (os.getpid(), next(uids), 0))
    path = Path(tempfile.mkdtemp(prefix="kvd", dir="/tmp"), "a")

    async def run() -> list[str]:
        loop = asyncio.get_running_loop()
        listener = AttachListener(
            depot=Rig().depot, calls=_NO_CALLS,
            offer=ArenaOffer(1, (4096,), lambda _: 0, "1", _descriptors), streams=_NO_STREAMS, loop=loop,
            log=logging.getLogger("attaching"), boot_id=read_boot_id(),
        )  # fmt: skip
        listener.listen(path, 0o600, -1)
        clients = []
        for _, sent in steps:
            clients.append(client := socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK))
            client.connect(f"{path}.attach")
            for _ in range(20 if not sent else 0):  # turns of the loop, in which it is accepted
                await asyncio.sleep(0)
            if sent:
                client.send(sent)
                readable = asyncio.Event()
                loop.add_reader(client, readable.set)
                await asyncio.wait_for(readable.wait(), 10)
                loop.remove_reader(client)
        found = [_last_word(client) for client in clients]
        listener.close()
        return found

    return asyncio.run(run())


def _last_word(client: socket.socket) -> str:
    with closing(client):
        try:
            answer = client.recv(8192)
        except BlockingIOError:
            return ""
        return codec.decode_attach_reply(answer).error if answer else "closed"


@pytest.mark.requirement("S4", "I4")
def test_a_user_has_its_share_of_the_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attach_module, "CONNECTIONS_OF_A_USER_MAX", 2)
    found = told(monkeypatch, [(1, _CALL), (1, _CALL), (1, b""), (2, _CALL)])
    assert found[:2] == ["", ""] and found[3] == ""
    assert found[2].startswith("attach connections of uid 1: 3 is more than 2")


@pytest.mark.requirement("S4", "I4")
def test_silent_connections_of_one_user_push_out_their_own_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without users, the oldest one would go: another user's."""
    monkeypatch.setattr(attach_module, "silent_max", lambda _: 2)
    assert told(monkeypatch, [(1, b""), (2, b""), (2, b""), (2, b"")]) == ["", "closed", "closed", ""]
