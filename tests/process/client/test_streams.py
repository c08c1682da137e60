"""A client that cannot map the arena, against a real daemon: whatever ends, its bytes are right or not there."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kvdepot.client import attachment
from kvdepot.client.arena_map import ArenaMap
from kvdepot.client.attachment import Attachment, EngineProcess, Transport
from kvdepot.client.copy.base import Direction, IndeterminateError
from kvdepot.client.transports import attach, stream
from kvdepot.client.transports.stream import StreamArena
from kvdepot.core.arena import ArenaFormatError
from kvdepot.core.calls import CommitOutcome, ReserveOutcome, ReserveReply

from tests.rigs.child_processes import children
from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.engine_client import OBJECT_BYTES, EngineClient, prompt_keys
from tests.rigs.patience import wait_until
from tests.rigs.stopping import stop, stopped

COUNT = 3
_NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def shared_daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess() as running:
        yield running


@pytest.fixture
def daemon(shared_daemon: DaemonProcess) -> DaemonProcess:
    """Without a proxy of an earlier test; running, whatever that test has done to it."""
    if shared_daemon.process is None:
        shared_daemon.start()
    wait_until(lambda: not proxies(shared_daemon) and not sockets(shared_daemon))  # ended, and known to have
    return shared_daemon


@pytest.fixture
def name() -> str:
    """Of an engine: this process lives on, and with it what a session of an earlier test knows of it."""
    return f"engine-{next(_NUMBERS)}"


@pytest.fixture
def client(daemon: DaemonProcess, name: str) -> Iterator[EngineClient]:
    with EngineClient(daemon.endpoint, name, transport=Transport.STREAM) as client:
        yield client


def proxies(daemon: DaemonProcess) -> list[int]:
    """Their pids."""
    return children(daemon.pid, b"stream_proxy")


def sockets(daemon: DaemonProcess) -> list[str]:
    return sorted(path.name for path in daemon.directory.glob("*.stream-*"))


def arena_of(client: EngineClient) -> StreamArena:
    assert isinstance(client.worker.arena, StreamArena)
    return client.worker.arena


def store(client: EngineClient, name: str, count: int = COUNT) -> list[bytes]:
    keys = prompt_keys(name, count)
    lease, granted = client.reserve(keys)
    assert client.copy(granted, 0, Direction.STORE)
    assert list(client.commit(lease, count)) == [CommitOutcome.COMMITTED] * count
    client.session.end_request("r")
    return keys


def load_equals(client: EngineClient, keys: list[bytes]) -> bool:
    lease, acquired = client.acquire(keys)
    held = client.copy(acquired, 32, Direction.LOAD)
    client.session.release([lease])
    return held and client.equal_blocks(0, 32, len(keys))


def comes_back(client: EngineClient, name: str) -> None:
    """Attached by another proxy, it stores and loads, and nothing is owed."""
    client.wait_attached()
    client.fill(0, COUNT, seed=len(name))
    assert load_equals(client, store(client, name))
    client.wait_nothing_owed()


@pytest.mark.requirement("I1")
def test_what_one_stores_by_streams_another_maps_and_the_other_way_round(
    daemon: DaemonProcess, client: EngineClient, name: str
) -> None:
    with EngineClient(daemon.endpoint, "mapping") as mapping:
        client.fill(0, 8, seed=1)
        mapping.fill(0, 8, seed=1)
        keys = store(client, "streamed", 8)
        assert load_equals(mapping, keys)
        assert load_equals(client, keys)
        client.fill(0, 8, seed=2)
        mapping.fill(0, 8, seed=2)
        assert load_equals(client, store(mapping, "mapped", 8))
        client.wait_nothing_owed()
        (session,) = [one for one in client.status().sessions if one.engine_id == name]
        assert sorted(session.pids) == sorted([os.getpid(), *proxies(daemon)]), "the proxy stands for the rank"


@pytest.mark.parametrize("why", ["no descriptor", "not mappable"])
def test_auto_uses_streams_where_the_arena_cannot_be_mapped(
    daemon: DaemonProcess, name: str, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    receive = attach._receive

    def refuse(*_: object) -> None:
        raise ArenaFormatError("it is not for you")

    def only_sockets(connection: socket.socket) -> tuple[bytes, list[int]]:
        """As a security module may have it."""
        data, descriptors = receive(connection)
        for one in list(descriptors):
            if not stat.S_ISSOCK(os.fstat(one).st_mode):
                os.close(one)
                descriptors.remove(one)
        return data, descriptors

    if why == "no descriptor":
        monkeypatch.setattr(attach, "_receive", only_sockets)
    else:
        monkeypatch.setattr(attachment, "ArenaMap", refuse)
    with EngineClient(daemon.endpoint, name, transport=Transport.AUTO) as client:
        client.fill(0, COUNT, seed=3)
        assert load_equals(client, store(client, name))
        assert isinstance(client.worker.arena, StreamArena)


@pytest.mark.requirement("I8")
def test_auto_maps_the_arena_once_an_older_daemon_is_upgraded(
    daemon: DaemonProcess, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A daemon of an earlier format sends one descriptor. Streams go on with it, and no longer."""
    ask, old = attach.attach, [True]

    def as_older(*arguments: Any) -> attach.Attached:
        accepted = ask(*arguments)
        if not old:
            return accepted
        reply = replace(accepted.reply, daemon_version="0.1.0")
        if reply.stream or not accepted.descriptors:
            return replace(accepted, reply=reply)
        for descriptor in accepted.descriptors:
            os.close(descriptor)
        return replace(accepted, reply=reply, descriptors=(), arrived=1)

    monkeypatch.setattr(attachment, "attach", as_older)
    with EngineClient(daemon.endpoint, name, transport=Transport.AUTO) as client:
        client.fill(0, COUNT, seed=5)
        keys = store(client, name)
        assert isinstance(client.worker.arena, StreamArena)
        assert "the daemon (version 0.1.0) is older than this client and has to be upgraded" in caplog.text
        assert "streams are used, which are slower" in caplog.text
        before = client.locate(keys)
        old.clear()
        daemon.stop()
        daemon.start()
        wait_until(lambda: isinstance(client.worker.arena, ArenaMap), "the arena is mapped")
        client.wait_attached()
        wait_until(lambda: client.locate(keys) == before, "what was adopted is verified")
        assert load_equals(client, keys)
        wait_until(lambda: not proxies(daemon), "no proxy is left")


def test_shm_that_cannot_be_mapped_is_not_attached_and_says_why(
    daemon: DaemonProcess, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no memory")

    monkeypatch.setattr(attachment, "ArenaMap", refuse)
    with closing(EngineClient(daemon.endpoint, name, transport=Transport.SHM).start(attached=False)) as client:
        wait_until(lambda: "cannot be mapped: no memory" in client.worker.refusal)
        assert client.worker.session is None
        assert not proxies(daemon)


@pytest.mark.requirement("I8")
@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_daemon_restarted_between_reserve_and_commit_keeps_the_lease(
    daemon: DaemonProcess, client: EngineClient, how: str
) -> None:
    client.fill(0, COUNT, seed=4)
    keys = prompt_keys(how, COUNT)
    lease, granted = client.reserve(keys)
    before = arena_of(client)
    getattr(daemon, how)()
    wait_until(lambda: before.proxy_dead and before.ended, "the proxy ends with its daemon, and is given up")
    assert not client.copy(granted, 0, Direction.STORE), "and stores nothing any more"
    daemon.start()
    client.wait_attached()
    assert client.copy(granted, 0, Direction.STORE), "the lease has outlived the daemon, so has its place"
    assert list(client.commit(lease, COUNT)) == [CommitOutcome.COMMITTED] * COUNT
    assert load_equals(client, keys)
    client.wait_nothing_owed()


@pytest.mark.requirement("I6")
def test_a_proxy_killed_in_a_store_is_a_doubt_that_its_death_ends(
    daemon: DaemonProcess, client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease, granted = client.reserve(prompt_keys("killed", COUNT))
    (proxy,) = proxies(daemon)
    stop(proxy)
    messages = StreamArena._messages

    def killed_in_it(arena: StreamArena, *of: Any) -> Iterator[Any]:
        """A proxy that is dead before the call is no doubt."""
        threading.Timer(0.2, os.kill, (proxy, signal.SIGKILL)).start()
        yield from messages(arena, *of)

    monkeypatch.setattr(StreamArena, "_messages", killed_in_it)
    with pytest.raises(IndeterminateError) as doubt:
        client.copy(granted, 0, Direction.STORE)
    wait_until(lambda: doubt.value.over)
    client.session.abandon(lease)
    monkeypatch.undo()
    comes_back(client, "after a kill")
    assert proxy not in proxies(daemon)
    wait_until(lambda: len(sockets(daemon)) == len(proxies(daemon)) == 1)


@pytest.mark.requirement("I6")
def test_a_proxy_that_hangs_in_a_store_is_ended_by_the_daemon_before_the_doubt_is_over(
    daemon: DaemonProcess, client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "STORE_SECONDS_MAX", 0.3)
    lease, granted = client.reserve(prompt_keys("hangs", COUNT))
    (proxy,) = proxies(daemon)
    with stopped(daemon.pid, proxy):  # nobody can end it now
        with pytest.raises(IndeterminateError) as doubt:
            client.copy(granted, 0, Direction.STORE)
        assert not doubt.value.over
        daemon.resume()
        wait_until(lambda: doubt.value.over)
    client.session.abandon(lease)
    monkeypatch.undo()
    comes_back(client, "after a hang")


@pytest.mark.requirement("P5")
def test_a_proxy_that_hangs_costs_a_load_its_deadline_and_then_its_place(
    daemon: DaemonProcess, client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "STALL_SECONDS", 0.2)
    client.fill(0, COUNT, seed=5)
    keys = store(client, "stored")
    lease, acquired = client.acquire(keys)
    before = [layer.clone() for layer in client.layers]
    arena = arena_of(client)
    (proxy,) = proxies(daemon)
    monkeypatch.setattr(stream.StreamArena.load, "__defaults__", (0.3,))
    with stopped(proxy):
        assert not client.copy(acquired, 32, Direction.LOAD)
        while not arena.ended:  # on a slow machine the call's deadline came before the stall was known
            assert not client.copy(acquired, 32, Direction.LOAD)
        assert all((one == two).all() for one, two in zip(before, client.layers, strict=True)), "no block was touched"
        wait_until(lambda: arena.proxy_dead)
    monkeypatch.undo()
    client.session.release([lease])
    client.wait_attached()
    assert load_equals(client, keys)
    client.wait_nothing_owed()


@pytest.mark.requirement("I1a")
def test_a_stopped_proxy_keeps_its_extents_beyond_every_deadline() -> None:
    with (
        DaemonProcess(ram="320MiB", config='[policy]\nlease_deadline = "3s"\n') as daemon,
        EngineClient(daemon.endpoint, transport=Transport.STREAM) as client,
        EngineClient(daemon.endpoint, "filler") as filler,
    ):
        client.fill(0, 8, seed=6)
        lease, granted = client.reserve(prompt_keys("held", 8))
        assert isinstance(granted, ReserveReply)
        assert client.copy(granted, 0, Direction.STORE)
        (proxy,) = proxies(daemon)
        stop(proxy)
        wait_until(lambda: any("expired" in name for name in client.status().counters), "the deadline")
        arena = filler.worker.arena
        assert isinstance(arena, ArenaMap)
        held = [(offset, length) for _, _, offset, length, _ in _unpacked(granted)]
        written = [bytes(arena.buffer[offset : offset + length]) for offset, length in held]
        filled = 0
        while filled < 1.2 * arena.size_bytes:
            keys = prompt_keys(f"fill{filled}", 512)
            other, fill = filler.reserve(keys)
            assert isinstance(fill, ReserveReply)
            for _, _, offset, length, _ in _unpacked(fill):
                arena.buffer[offset : offset + length] = b"\xee" * length
            filled += list(fill.outcomes).count(ReserveOutcome.GRANTED) * OBJECT_BYTES
            filler.commit(other, len(keys))
        assert [bytes(arena.buffer[offset : offset + length]) for offset, length in held] == written
        os.kill(proxy, signal.SIGCONT)
        assert not client.copy(granted, 0, Direction.STORE), "the deadline has ended the service"
        assert list(client.commit(lease, 8)) == [CommitOutcome.EXPIRED] * 8


def _unpacked(reply: ReserveReply) -> list[tuple[int, ...]]:
    words = memoryview(reply.extents).cast("Q")
    return [tuple(words[at : at + 5]) for at in range(0, len(words), 5)]


@pytest.mark.requirement("T7")
def test_an_engine_killed_in_a_store_leaves_nothing(daemon: DaemonProcess) -> None:
    command = [sys.executable, "-m", "tests.rigs.streaming_engine", daemon.endpoint, "victim"]
    victim = subprocess.Popen(command, cwd=Path(__file__).parents[3], stdout=subprocess.PIPE)
    assert victim.stdout is not None
    assert victim.stdout.readline() == b"storing\n"
    assert len(proxies(daemon)) == 1
    victim.kill()
    victim.communicate()
    with EngineClient(daemon.endpoint, "watching") as watching:
        wait_until(lambda: "victim" not in [one.engine_id for one in watching.status().sessions])
        watching.wait_nothing_owed()
        wait_until(lambda: not proxies(daemon) and not sockets(daemon))


@pytest.mark.requirement("T7")
def test_a_rank_that_detaches_takes_its_proxy_with_it(daemon: DaemonProcess, client: EngineClient, name: str) -> None:
    client.worker.close()
    wait_until(lambda: not proxies(daemon))
    wait_until(lambda: not sockets(daemon))
    (session,) = [one for one in client.status().sessions if one.engine_id == name]
    assert session.ranks_attached == 0


def test_what_an_earlier_run_left_beside_the_socket_is_removed_at_start(daemon: DaemonProcess) -> None:
    daemon.kill()
    daemon.directory.joinpath("d.sock.stream-7").touch()
    other = daemon.directory.joinpath("other.sock.stream-7")
    other.touch()
    daemon.start()
    assert sockets(daemon) == ["other.sock.stream-7"]
    other.unlink()


@pytest.mark.requirement("I4")
@pytest.mark.parametrize(("limit", "says"), [(0, "0 processes of uid"), (1, "1 processes of uid")])
def test_proxies_are_bounded_and_the_refusal_names_the_key(limit: int, says: str) -> None:
    with DaemonProcess(config=f"[sessions]\nstreams = {limit}\n") as daemon:
        attached = [EngineClient(daemon.endpoint, f"e{n}", transport=Transport.STREAM).start() for n in range(limit)]
        with closing(EngineClient(daemon.endpoint, "more", transport=Transport.STREAM).start(attached=False)) as more:
            wait_until(lambda: says in more.worker.refusal and "[sessions] streams" in more.worker.refusal)
            assert len(proxies(daemon)) == limit
            for client in attached:
                client.close()
            if limit:
                comes_back(more, "place")


@pytest.mark.requirement("I4")
def test_a_proxy_of_a_refused_attachment_does_not_stay(daemon: DaemonProcess, client: EngineClient, name: str) -> None:
    (proxy,) = proxies(daemon)
    second = Attachment(client.endpoint, EngineProcess(name, scheduler=False, rank=0), transport=Transport.STREAM)
    second.start()
    wait_until(lambda: f"process {proxy} is already rank 0" in second.refusal)
    second.close()
    wait_until(lambda: proxies(daemon) == [proxy])
    assert sockets(daemon) == ["d.sock.stream-0"]
    comes_back(client, "still there")


def test_the_proxys_socket_has_the_daemons_mode(daemon: DaemonProcess, client: EngineClient) -> None:
    (path,) = daemon.directory.glob("*.stream-*")
    assert path.stat().st_mode == daemon.socket.stat().st_mode
