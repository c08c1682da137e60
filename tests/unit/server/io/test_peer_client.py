"""The reader's connection to a peer: whose name is resolved each time, and whose addresses share the time there is."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from kvdepot.server.io import peer_client
from kvdepot.server.io.peer_client import Peer
from kvdepot.server.io.peer_wire import Locate, Located, PeerSettings, Summarize

from tests.fakes.lying_source import FAILED_SUMMARIES, LyingSource
from tests.rigs import ports
from tests.rigs.certificates import Authority
from tests.rigs.patience import patient
from tests.rigs.peer_fleet import PEER

DEADLINE_SECONDS = patient(10.0)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def source(authority: Authority) -> Iterator[LyingSource]:
    with LyingSource(authority.issue("peer", PEER), authority.pem, lambda key: key) as source:
        yield source


@pytest.fixture
def peer(source: LyingSource, tmp_path: Path) -> Iterator[Peer]:
    files = (f"{tmp_path / 'peer.pem'}", f"{tmp_path / 'peer.key'}", f"{tmp_path / 'ca.pem'}")
    peer = Peer(PeerSettings("node-a", source.port, *files, (PEER,), timeout_seconds=2 * DEADLINE_SECONDS))
    yield peer
    peer.close()


@pytest.fixture
def nowhere() -> Iterator[int]:
    """A port at which nobody listens."""
    with ports.held() as holder:
        yield ports.port_of(holder)


def resolve_to(monkeypatch: pytest.MonkeyPatch, *ports: int) -> None:
    """Let the name mean these ports of this host from now on."""

    def found(host: str, port: int, *_: object, **__: object) -> list[object]:
        of_name = ports if host == "node-a" else (port,)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", one)) for one in of_name]

    monkeypatch.setattr(socket, "getaddrinfo", found)


@pytest.mark.requirement("T3")
def test_a_name_that_moves_is_found_at_the_next_connection(
    peer: Peer, source: LyingSource, monkeypatch: pytest.MonkeyPatch, nowhere: int
) -> None:
    resolve_to(monkeypatch, nowhere)
    with pytest.raises(OSError, match="Connection refused"):
        peer.ask(Locate(()))
    resolve_to(monkeypatch, source.port)
    assert peer.ask(Locate(())) == Located(())
    resolve_to(monkeypatch, nowhere)
    assert peer.ask(Locate(())) == Located(()), "the connection stays where it is"
    peer.close()
    with pytest.raises(OSError, match="Connection refused"):
        peer.ask(Locate(()))


@pytest.mark.requirement("N3")
def test_an_address_that_does_not_answer_leaves_time_for_the_next_one(
    peer: Peer, source: LyingSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve_to(monkeypatch, 1, 2, source.port)
    real = socket.create_connection
    seconds: list[float] = []

    def silent(address: tuple[str, int], timeout: float) -> socket.socket:
        seconds.append(timeout)
        if address[1] != source.port:
            raise TimeoutError
        return real(address, timeout)

    monkeypatch.setattr(socket, "create_connection", silent)
    assert peer.ask(Locate(())) == Located(())
    assert len(seconds) == 3 and sum(seconds) <= DEADLINE_SECONDS / 2


def test_a_host_without_any_address_that_answers_says_why(
    peer: Peer, monkeypatch: pytest.MonkeyPatch, nowhere: int
) -> None:
    resolve_to(monkeypatch, nowhere, nowhere)
    with pytest.raises(OSError, match=r"node-a:\d+: .*refused"):
        peer.ask(Locate(()))


@pytest.mark.requirement("S3")
def test_a_renewal_that_is_half_done_costs_no_connection_and_one_that_is_done_is_used(
    peer: Peer, source: LyingSource, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve_to(monkeypatch, source.port)

    def connect() -> str:
        peer.close()
        assert peer.ask(Locate(())) == Located(())
        return source.readers[-1]

    first = connect()
    new = authority.issue("new", PEER)
    files = authority.pem.with_name("peer.pem"), authority.pem.with_name("peer.key")
    files[0].write_bytes(new.cert.read_bytes())
    assert connect() == first, "the key is still that of before"
    files[1].write_bytes(new.key.read_bytes())
    assert connect() != first
    files[1].unlink()
    assert connect() != first


@pytest.mark.requirement("S3")
def test_an_old_connection_is_made_again_so_that_a_source_outlives_no_change_of_the_ca(
    peer: Peer, source: LyingSource, authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve_to(monkeypatch, source.port)
    monkeypatch.setattr(peer_client, "CONNECTION_SECONDS_MAX", 0.0)
    for number in (1, 2):
        assert peer.ask(Locate(())) == Located(())
        assert len(source.readers) == number
    other = Authority.in_folder(tmp_path / "other", "ca")
    authority.pem.write_bytes(other.pem.read_bytes())
    with pytest.raises(OSError, match="certificate verify failed"):
        peer.ask(Locate(()))


@pytest.mark.requirement("N3")
@pytest.mark.parametrize("lie", ["dripped summary", "stalled summary"])
def test_an_answer_that_takes_too_long_as_a_whole_is_none(peer: Peer, source: LyingSource, lie: str) -> None:
    source.summaries = FAILED_SUMMARIES[lie]
    peer = Peer(replace(peer._settings, host="127.0.0.1"), answer_seconds=0.3)
    with pytest.raises(OSError, match=r"timed out|takes too long"):
        peer.ask(Summarize(0))
    peer.close()
