"""A session of TLS is resumed without a look at its certificate, so not for long."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import threading
from pathlib import Path
from typing import Final

import pytest
from kvdepot.server.platform.tls_files import Pem, TlsFiles
from kvdepot.server.rpc import tls_listener
from kvdepot.server.rpc.tls_listener import TlsListener

from tests.rigs.certificates import SERVER, Authority, Files
from tests.rigs.patience import patient, wait_until

LOG = logging.getLogger("tests.tls")


class HungFiles(TlsFiles):
    """Of a mount that hangs once the listener has started."""

    def __init__(self, cert: Path, key: Path, client_ca: Path) -> None:
        super().__init__(cert, key, client_ca)
        self.asked = 0
        self.released: Final = threading.Event()

    def load_changed(self) -> Pem | None:
        self.asked += 1
        self.released.wait()
        return None


class Client:
    """Connects with one certificate, and keeps the session of its first connection."""

    def __init__(self, authority: Authority, issued: Files) -> None:
        self._context = ssl.create_default_context(cafile=authority.pem)
        self._context.load_cert_chain(issued.cert, issued.key)
        self._context.maximum_version = ssl.TLSVersion.TLSv1_2  # whose session is there after the handshake
        self._context.set_alpn_protocols(["h2"])
        self._session: ssl.SSLSession | None = None

    def resumes(self, port: int) -> bool:
        """Connect. Return whether that resumed the first connection's session."""
        with (
            socket.create_connection(("127.0.0.1", port), patient(30)) as plain,
            self._context.wrap_socket(plain, server_hostname="localhost", session=self._session) as secure,
        ):
            assert secure.recv(1)
            if self._session is None:
                self._session = secure.session
            return bool(secure.session_reused)


@pytest.fixture
def authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Authority:
    monkeypatch.setattr(tls_listener, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr(tls_listener, "TICKET_SECONDS", 3600.0)
    return Authority(tmp_path)


async def ends_sessions(authority: Authority, files: TlsFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait until a listener with these files resumes a session no more."""
    client = Client(authority, authority.issue("client", "DNS:a"))
    listener = TlsListener((), files, files.load(), loop=asyncio.get_running_loop(), log=LOG)
    (url,) = await listener.listen([("127.0.0.1", 0)])
    port = int(url.rpartition(":")[2])
    await asyncio.to_thread(client.resumes, port)
    assert await asyncio.to_thread(client.resumes, port), "else the test shows nothing"
    monkeypatch.setattr(tls_listener, "TICKET_SECONDS", 0.0)
    await asyncio.to_thread(wait_until, lambda: not client.resumes(port))
    await listener.stop(0)


@pytest.mark.requirement("S3")
def test_a_session_cannot_be_resumed_after_a_while(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    server = authority.issue("server", *SERVER)
    asyncio.run(ends_sessions(authority, TlsFiles(server.cert, server.key, authority.pem), monkeypatch))


@pytest.mark.requirement("S3")
def test_a_mount_that_hangs_keeps_no_session_resumable(
    authority: Authority, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tls_listener, "_ANSWER_SECONDS", 0.1)
    server = authority.issue("server", *SERVER)
    files = HungFiles(server.cert, server.key, authority.pem)
    try:
        asyncio.run(ends_sessions(authority, files, monkeypatch))
    finally:
        files.released.set()
    assert files.asked == 1
    assert caplog.text.count("their files do not answer") == 1
