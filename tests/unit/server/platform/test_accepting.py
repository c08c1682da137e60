"""Listeners on a host without descriptors or memory: nothing spins, one line an event, and what matters is answered."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import resource
import socket
from collections import deque
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from kvdepot.server.observe.health import HttpListener, Readiness
from kvdepot.server.platform import accepting, grpc_guards
from kvdepot.server.platform.accepting import _ACCEPTS_PER_EVENT, Acceptor, SpareDescriptors, silent_max
from kvdepot.server.platform.grpc_guards import connections_max
from kvdepot.server.platform.logs import REPEAT_SECONDS, LogThrottle, UnhandledErrors

from tests.fakes.scarce_descriptors import no_descriptor_left

LOG = logging.getLogger("accepting")
_PAUSE_SECONDS = 0.05


class Refusing:
    """A listening socket of which accept(2) fails as often as is said, then gives a connection, then has none."""

    def __init__(self, real: socket.socket, errors: list[int], until: int) -> None:
        self._real = real
        self._errors = deque(errors)
        self._until = until
        self.enough = asyncio.Event()  # it was asked so often
        self.asked = 0
        self.took_seconds = 0.0

    def accept(self) -> tuple[socket.socket, object]:
        self.asked += 1
        if self.asked == self._until:
            self.enough.set()
        if self._errors:
            number = self._errors.popleft()
            raise OSError(number, os.strerror(number))
        return self._real.accept()

    def __getattr__(self, name: str) -> object:
        return getattr(self._real, name)


def accept_after(errors: list[int], asked: int, spare: SpareDescriptors | None = None) -> tuple[int, Refusing]:
    """(connections that were accepted, the listener) after so many calls of accept(2), with one peer in the backlog."""

    async def run() -> tuple[int, Refusing]:
        loop, accepted = asyncio.get_running_loop(), list[socket.socket]()
        with socket.socket(socket.AF_UNIX) as real, socket.socket(socket.AF_UNIX) as peer:
            real.setblocking(False)
            real.bind("")
            listener = Refusing(real, errors, asked)
            acceptor = Acceptor(
                listener, accepted.append, name="test", loop=loop, log=LOG,  # type: ignore[arg-type]
                throttle=LogThrottle(lambda: 0.0), spare=spare, pause_seconds=_PAUSE_SECONDS,
            )  # fmt: skip
            peer.connect(real.getsockname())
            began = loop.time()
            await listener.enough.wait()
            listener.took_seconds = loop.time() - began
            acceptor.close()
            for connection in accepted:
                connection.close()
            return len(accepted), listener

    return asyncio.run(run())


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EINVAL, errno.EIO])
def test_an_error_that_repeats_is_one_line_and_no_loop(number: int, caplog: pytest.LogCaptureFixture) -> None:
    accepted, listener = accept_after([number] * 1000, 4)
    assert accepted == 0
    assert listener.took_seconds >= 3 * _PAUSE_SECONDS, "it asks once, then waits"
    assert [record.getMessage() for record in caplog.records] == [
        f"test: cannot accept: [Errno {number}] {os.strerror(number)}"
    ]


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM])
def test_the_peer_is_met_when_there_is_room_again(number: int) -> None:
    assert accept_after([number] * 2, 3)[0] == 1


@pytest.mark.parametrize("number", [errno.ECONNABORTED, errno.EPROTO, errno.ENETDOWN])
def test_a_connection_that_is_gone_already_delays_nobody(number: int, caplog: pytest.LogCaptureFixture) -> None:
    accepted, _ = accept_after([number] * 3, 4)
    assert (accepted, caplog.records) == (1, [])
    _, listener = accept_after([number] * 100_000, 3 * _ACCEPTS_PER_EVENT)
    assert listener.took_seconds >= 2 * _PAUSE_SECONDS, "one that does not end is waited for, too"
    assert len(caplog.records) == 1


def test_spare_descriptors_are_given_up_for_a_listener_that_has_to_answer(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    spare = SpareDescriptors(4, LOG, lambda: now)
    assert accept_after([errno.EMFILE], 2, spare)[0] == 1
    assert not caplog.records
    assert not spare.give_up()
    spare.refill()
    assert not spare.give_up(), "whoever was accepted needs more of them"
    now = 5.0
    spare.refill()
    assert spare.give_up()


def test_health_is_answered_while_no_descriptor_is_left(caplog: pytest.LogCaptureFixture) -> None:
    def request(address: tuple[str, int]) -> Callable[[], bytes]:
        peer = socket.create_connection(address)
        peer.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")

        def answer() -> bytes:
            with closing(peer):
                return peer.recv(4096)

        return answer

    async def run() -> list[bytes]:
        loop = asyncio.get_running_loop()
        spare = SpareDescriptors(8, LOG, loop.time)
        listener = HttpListener(
            metrics=bytes, summary=str, health=lambda: Readiness(ready=True, reason=""), log=LOG, spare=spare
        )
        address = (await listener.listen("127.0.0.1", 0)).rpartition(":")
        asking = [request((address[0], int(address[2]))) for _ in range(3)]
        with no_descriptor_left():
            for _ in range(20):
                spare.refill()
                await asyncio.sleep(0.02)
        answers = [await loop.run_in_executor(None, ask) for ask in asking]
        listener.close()
        spare.give_up()
        return answers

    assert all(b" 200 OK" in answer for answer in asyncio.run(run()))
    assert len(caplog.records) <= 2


def test_scarce_descriptors_are_told_of_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    with no_descriptor_left():
        spare = SpareDescriptors(2, LOG, lambda: now)
        for _ in range(1000):
            spare.refill()
        assert len(caplog.records) == 1 and "LimitNOFILE" in caplog.text
        now = REPEAT_SECONDS
        spare.refill()
        assert len(caplog.records) == 2
    spare.refill()
    assert spare.give_up()


def test_what_a_callback_raises_is_one_line_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    def fail(number: int) -> None:
        raise OSError(number, os.strerror(number))

    async def run() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(UnhandledErrors(LOG, loop.time))
        for _ in range(500):
            loop.call_soon(fail, errno.ENFILE)
        loop.call_soon(fail, errno.EIO)
        await asyncio.sleep(0.02)

    asyncio.run(run())
    assert len(caplog.records) == 2


@pytest.mark.parametrize(
    ("descriptors", "listeners", "connections", "silent"),
    [(128, 1, 32, 8), (256, 1, 64, 16), (1024, 1, 256, 64), (1024, 8, 32, 64), (65536, 1, 4096, 64),
     (resource.RLIM_INFINITY, 1, 4096, 64), (20, 1, 16, 4)],
)  # fmt: skip
def test_connections_leave_most_descriptors_free(
    descriptors: int, listeners: int, connections: int, silent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_guards.resource, "getrlimit", lambda _: (descriptors, descriptors))  # type: ignore[attr-defined]
    assert connections_max(listeners) == connections
    assert silent_max(64) == silent


def test_every_listener_of_the_daemon_is_guarded() -> None:
    """asyncio's own servers log a traceback a connection, and gRPC's accept without an end by default."""
    root = Path(accepting.__file__).parents[1]
    texts = {path.name: path.read_text() for path in root.rglob("*.py")}
    assert [name for name, text in texts.items() if "start_server(" in text or "start_unix_server(" in text] == []
    servers = [name for name, text in texts.items() if "grpc.aio.server(" in text or "grpc.server(" in text]
    assert sorted(servers) == ["listener.py", "stream_proxy.py", "tls_listener.py"]
    assert all("guards(" in texts[name] for name in servers)


def test_spare_descriptors_go_with_their_owner() -> None:
    """A daemon that cannot start, within a process that lives on, keeps none."""
    spare = SpareDescriptors(4, LOG, lambda: 0.0)
    held = spare._held
    assert len(held) == 4
    del spare
    gc.collect()
    assert not held, "each is closed"
