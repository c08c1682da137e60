"""TCP sockets on each address of a host, of which some may not be there."""

from __future__ import annotations

import errno
import socket
from typing import Any

import pytest
from kvdepot.server.platform import listening
from kvdepot.server.platform.listening import bind_all

ABSENT, HERE = "192.0.2.1", "127.0.0.1"  # the first one is kept for documents (RFC 5737)


def _has(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """The name of the host has these addresses. The host has HERE alone, whatever the kernel lets one bind."""
    bind = listening._bind

    def bind_here(family: int, address: Any) -> socket.socket:
        if address[0] != HERE:
            raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")
        return bind(family, address)

    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in addresses]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    monkeypatch.setattr(listening, "_bind", bind_here)


@pytest.mark.parametrize("addresses", [(ABSENT, HERE), (HERE, ABSENT), (HERE, HERE)])
def test_an_address_that_the_host_does_not_have_is_skipped(
    monkeypatch: pytest.MonkeyPatch, addresses: tuple[str, ...]
) -> None:
    _has(monkeypatch, *addresses)
    (listener,) = bind_all("a name", 0)
    with listener:
        assert listener.getsockname()[0] == HERE


def test_without_any_of_its_addresses_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    _has(monkeypatch, ABSENT, "192.0.2.2")
    with pytest.raises(OSError, match="Cannot assign requested address"):
        bind_all("a name", 0)


def test_a_port_that_is_taken_is_an_error_and_leaves_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server((HERE, 0)) as taken:
        port = taken.getsockname()[1]
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", address) for address in ((HERE, 0), (HERE, port))]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
        with pytest.raises(OSError) as refused:
            bind_all("a name", 0)
    assert refused.value.errno == errno.EADDRINUSE
