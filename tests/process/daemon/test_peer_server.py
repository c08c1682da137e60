"""What callers with a certificate, or without, can do to the process that sends to peers: take little, for a while."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from kvdepot.core.calls import Kind
from kvdepot.server.daemon import peer_source
from kvdepot.server.io import peer_server
from kvdepot.server.io.framing import HEAD
from kvdepot.server.io.jobs import ABSENT, FILES_PER_STAT
from kvdepot.server.io.peer_wire import (
    ALPN,
    FROM_READER,
    TO_READER,
    AskLocate,
    Exact,
    Locate,
    Located,
    Pull,
    Unconnected,
    Wanted,
)
from kvdepot.server.platform.paced import BURST_SECONDS

from tests.rigs import hasty_peer_server
from tests.rigs.certificates import Files
from tests.rigs.engine_rig import ARENA_ID
from tests.rigs.hasty_peer_server import PLACES
from tests.rigs.live_peer_source import FILL, KEYS, OBJECT_BYTES, Live, live, run
from tests.rigs.patience import patient, until, wait_until
from tests.rigs.peer_fleet import PEER

NOTHING = FROM_READER.pack(Locate(()))


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))  # not the current directory
    monkeypatch.setattr(peer_source, "_MODULE", hasty_peer_server.__name__)


@contextmanager
def connected(one: Live, files: Files | None = None) -> Iterator[ssl.SSLSocket]:
    """A connection with a certificate of the authority, to send what one likes."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(one.authority.pem)
    cert, key = (files.cert, files.key) if files else (one.settings.cert, one.settings.key)
    context.load_cert_chain(cert, key)
    context.set_alpn_protocols([ALPN])
    raw = socket.create_connection(one.source.addresses[0], patient(30.0))
    with context.wrap_socket(raw) as connection:
        yield connection


@contextmanager
def asked(one: Live) -> Iterator[ssl.SSLSocket]:
    """A connection that was in time with its first question. On a busy machine it may not be the first one."""
    with contextlib.ExitStack() as connections:
        found: list[ssl.SSLSocket] = []

        def is_answered() -> bool:
            with contextlib.suppress(OSError):
                connection = connections.enter_context(connected(one))
                found.extend([connection] if answered(connection) else [])
            return bool(found)

        wait_until(is_answered, "a question was in time")
        yield found[0]


def ended(connection: ssl.SSLSocket) -> bool:
    """Wait for the other side to close the connection, and return whether it sent nothing before."""
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def answered(connection: ssl.SSLSocket) -> bool:
    connection.sendall(NOTHING)
    found = TO_READER.read(Exact(connection.recv_into))
    return found is not None and isinstance(found[1], Located)


@pytest.mark.requirement("N3")
def test_who_asks_nothing_is_disconnected_long_before_who_has_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(hasty_peer_server.ASKING, "2")

    async def test() -> None:
        async with live(tmp_path) as one:
            stranger = one.authority.issue("stranger", "URI:spiffe://fleet/engine")

            def silent() -> None:
                with asked(one) as peer, connected(one, stranger) as other:
                    assert ended(other)
                    assert answered(peer)

            await asyncio.to_thread(silent)

    run(test)


def test_a_question_without_an_answer_of_the_daemon_ends_its_connection_and_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(hasty_peer_server.ANSWERING, "0.2")

    async def test() -> None:
        async with live(tmp_path) as one:
            monkeypatch.setattr(one.source._questions, "call", lambda _: None)

            def unheard() -> None:
                with connected(one) as connection:
                    connection.sendall(NOTHING)
                    assert ended(connection)

            await asyncio.to_thread(unheard)
            await one.counted("peer_refused_connections.no_answer")

    run(test)


@pytest.mark.requirement("N3")
def test_a_question_that_comes_byte_by_byte_ends_its_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(hasty_peer_server.ASKING, "2")

    async def test() -> None:
        async with live(tmp_path) as one:

            def drip() -> None:
                with connected(one) as connection:
                    connection.settimeout(0.05)
                    endless = iter(HEAD.pack(60_000, 0, 0) + bytes(60_000))

                    def is_over() -> bool:
                        try:
                            connection.send(bytes([next(endless)]))
                            return connection.recv(1) == b""
                        except TimeoutError:
                            return False
                        except OSError:
                            return True

                    wait_until(is_over, "the connection has ended")

            await asyncio.to_thread(drip)
            assert await one.pulled(one.peer()) == bytes([FILL]) * OBJECT_BYTES

    run(test)


@pytest.mark.requirement("N3")
def test_one_host_does_not_get_all_connections_and_gets_another_for_one_that_ends(tmp_path: Path) -> None:
    async def test() -> None:
        async with live(tmp_path) as one:

            def many() -> None:
                with connected(one) as first, connected(one) as second:
                    with connected(one) as last:
                        assert all(map(answered, (first, second, last)))
                        with connected(one) as other:
                            assert answered(other) and ended(other)
                        assert all(map(answered, (first, second, last)))
                    wait_until(lambda: _stays(one), "the place of one that has ended is free")

            await asyncio.to_thread(many)
            await until(lambda: one.counters.get("peer_refused_connections.limit"), "it is counted")

    assert PLACES == 3
    run(test)


@pytest.mark.requirement("N3")
def test_one_host_does_not_get_all_new_connections(tmp_path: Path) -> None:
    async def test() -> None:
        async with live(tmp_path) as one:

            def many() -> None:
                with connected(one), connected(one), connected(one) as last:
                    with pytest.raises(OSError), connected(one):
                        pass
                    assert answered(last)
                    wait_until(lambda: _stays(one), "one that was answered leaves its place to a new one")

            await asyncio.to_thread(many)
            await until(lambda: one.counters.get("peer_refused_connections.limit"), "it is counted")

    assert PLACES == 3
    run(test)


@pytest.mark.requirement("N3", "B3")
def test_a_reader_that_asks_nothing_makes_room_for_another_and_loads_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(hasty_peer_server.IDLE, "0")

    async def test() -> None:
        async with live(tmp_path) as one:
            reader = one.peer()
            assert await one.pulled(reader) == bytes([FILL]) * OBJECT_BYTES

            def others() -> None:
                with contextlib.ExitStack() as connections:
                    for _ in range(2 * PLACES):
                        other = connections.enter_context(connected(one))
                        assert answered(other) and answered(other)

            await asyncio.to_thread(others)
            assert await one.pulled(reader) == bytes([FILL]) * OBJECT_BYTES
            assert not one.counters.get("peer_refused_connections.limit")

    run(test)


def _stays(one: Live) -> bool:
    """Whether a connection is open after its first answer."""
    try:
        with connected(one) as connection:
            return answered(connection) and answered(connection)
    except OSError:
        return False


@pytest.mark.requirement("N3")
def test_a_host_without_room_for_a_thread_costs_connections_and_no_later_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(hasty_peer_server.THREADLESS, "5")

    async def test() -> None:
        async with live(tmp_path) as one:
            await asyncio.to_thread(wait_until, lambda: _stays(one), "it is served")
            await one.counted("peer_refused_connections.limit", 5)
            assert one.counters.get("peer_servers.started") == 1

    run(test)


@pytest.mark.requirement("N3")
def test_refused_connections_cost_the_daemon_few_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with live(tmp_path) as one:
            heard: list[int] = []
            handle = one.source.handle

            def noted(number: int, message: object) -> None:
                if isinstance(message, Unconnected):
                    heard.append(message.times)
                handle(number, message)  # type: ignore[arg-type]

            monkeypatch.setattr(one.source, "handle", noted)
            began = time.monotonic()
            for _ in range(50):
                socket.create_connection(one.source.addresses[0]).close()
            await one.counted_at_least("peer_refused_connections", 50)
            times = (time.monotonic() - began) / peer_server._TELL_SECONDS + 1
            assert sum(heard) == 50 and len(heard) <= 2 * times, "at each time one for each of two reasons"

    run(test)


@pytest.mark.requirement("N3")
def test_questions_of_peers_take_a_share_of_the_loop_and_all_are_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions = 80

    async def test() -> None:
        async with live(tmp_path) as one:
            wanted = Wanted(one.client.namespace, KEYS[0], Kind.ATTENTION)
            question = FROM_READER.pack(Locate((wanted,) * FILES_PER_STAT))
            spent: list[float] = []
            handle = one.source._handle

            def timed(number: int, message: object) -> None:
                before = time.thread_time()
                handle(number, message)  # type: ignore[arg-type]
                if isinstance(message, AskLocate):
                    spent.append(time.thread_time() - before)

            monkeypatch.setattr(one.source, "_handle", timed)

            def ask() -> None:
                with connected(one) as connection:
                    for _ in range(questions):
                        connection.sendall(question)
                        found = TO_READER.read(Exact(connection.recv_into))
                        assert found is not None and found[1] == Located((OBJECT_BYTES,) * FILES_PER_STAT, ARENA_ID)

            before = time.monotonic()
            await asyncio.gather(*(asyncio.to_thread(ask) for _ in range(PLACES)))
            seconds = time.monotonic() - before
            assert len(spent) == PLACES * questions
            assert sum(spent) <= peer_source.QUESTIONS_SHARE * seconds + BURST_SECONDS + max(spent)

    run(test)


@pytest.mark.requirement("S3")
def test_a_renewed_certificate_is_used_once_its_key_fits(tmp_path: Path) -> None:
    async def test() -> None:
        async with live(tmp_path) as one:
            own = one.authority.issue("reader", PEER)

            def shown() -> object:
                with connected(one, own) as connection:
                    assert answered(connection)
                    return (connection.getpeercert() or {})["serialNumber"]

            def renew() -> None:
                first = shown()
                new = one.authority.issue("new", PEER)
                Path(one.settings.cert).write_bytes(new.cert.read_bytes())
                for _ in range(5):
                    assert shown() == first
                Path(one.settings.key).write_bytes(new.key.read_bytes())
                wait_until(lambda: shown() != first, "the new one is shown")

            await asyncio.to_thread(renew)

    run(test)


MALFORMED = {
    "random": b"\xa5" * 64,
    "another type": HEAD.pack(0, 200, 0),
    "longer than any": HEAD.pack(0xFFFF_FFFF, 0, 0),
    "too many names": HEAD.pack(4, 0, 0) + struct.pack("<I", 0xFFFF_FFFF),
    "cut": FROM_READER.pack(Locate((Wanted(bytes(16), bytes(16), 1),) * FILES_PER_STAT))[:-1],
    "a name of another kind": FROM_READER.pack(Locate((Wanted(bytes(16), bytes(16), 0xFF),))),
}


@pytest.mark.requirement("N3")
@pytest.mark.parametrize("malformed", MALFORMED)
def test_frames_that_no_reader_sends_end_their_connection_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, malformed: str
) -> None:
    if malformed == "cut":  # the rest may come
        monkeypatch.setenv(hasty_peer_server.ASKING, "2")

    async def test() -> None:
        async with live(tmp_path) as one:

            def send() -> None:
                with asked(one) as other, connected(one) as connection:
                    connection.sendall(MALFORMED[malformed])
                    if malformed == "a name of another kind":
                        found = TO_READER.read(Exact(connection.recv_into))
                        assert found is not None and found[1] == Located((ABSENT,), ARENA_ID)
                    else:
                        assert ended(connection)
                    assert answered(other)

            await asyncio.to_thread(send)
            assert one.counters.get("peer_servers.crashed") == 0
            assert one.counters.get("io_failed_callbacks") + one.counters.get("internal_errors") == 0

    run(test)


@pytest.mark.requirement("N3")
def test_connections_leave_no_descriptor_and_no_thread_however_they_end(tmp_path: Path) -> None:
    async def test() -> None:
        async with live(tmp_path) as one:
            stranger = one.authority.issue("stranger", "URI:spiffe://fleet/engine")
            of_server = Path(f"/proc/{one.source.pid}")

            def used() -> tuple[int, int]:
                return len(list((of_server / "fd").iterdir())), len(list((of_server / "task").iterdir()))

            def connect(number: int) -> None:
                address = one.source.addresses[0]
                with contextlib.suppress(OSError):
                    match number % 5:
                        case 0:
                            socket.create_connection(address).close()
                        case 1:
                            with socket.create_connection(address) as raw:
                                raw.sendall(b"GET / HTTP/1.1\r\n\r\n" * 50)
                        case 2:
                            with connected(one) as connection:
                                connection.sendall(MALFORMED["random"])
                        case 3:
                            with connected(one, stranger) as connection:
                                connection.sendall(NOTHING)
                        case _:
                            with connected(one) as connection:
                                connection.sendall(FROM_READER.pack(Pull(one.name(0))))
                                connection.recv(1000)

            def many() -> None:
                wait_until(lambda: _stays(one), "it serves")
                before = used()  # perhaps with the thread of that one
                for number in range(60):
                    connect(number)
                wait_until(lambda: all(map(int.__le__, used(), before)), lambda: f"{used()} is no more than {before}")

            await asyncio.to_thread(many)
            await one.none_lent()
            assert one.counters.get("peer_servers.started") == 1

    run(test)


def test_a_pull_of_a_stranger_is_no_lease(tmp_path: Path) -> None:
    async def test() -> None:
        async with live(tmp_path) as one:
            stranger = one.authority.issue("stranger", "URI:spiffe://fleet/engine", f"DNS:{PEER}")

            def pull() -> None:
                with connected(one, stranger) as connection:
                    connection.sendall(FROM_READER.pack(Pull(one.name(0))))
                    assert TO_READER.read(Exact(connection.recv_into)) is not None
                    assert ended(connection)

            await asyncio.to_thread(pull)
            await one.counted("peer_pulls.not_allowed")
            await one.none_lent()

    run(test)
