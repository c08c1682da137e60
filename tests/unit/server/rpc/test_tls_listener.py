"""A session of TLS is resumed without a look at its certificate, so not for long."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from pathlib import Path

import pytest
from kvdepot.server.platform.tls_files import TlsFiles
from kvdepot.server.rpc import tls_listener
from kvdepot.server.rpc.tls_listener import TlsListener

from tests.rigs.certificates import SERVER, Authority
from tests.rigs.patience import patient, wait_until

LOG = logging.getLogger("tests.tls")


@pytest.mark.requirement("S3")
def test_a_session_cannot_be_resumed_after_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls_listener, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr(tls_listener, "TICKET_SECONDS", 3600.0)
    authority = Authority(tmp_path)
    server, client = authority.issue("server", *SERVER), authority.issue("client", "DNS:a")
    context = ssl.create_default_context(cafile=authority.pem)
    context.load_cert_chain(client.cert, client.key)
    context.maximum_version = ssl.TLSVersion.TLSv1_2  # whose session is there after the handshake
    context.set_alpn_protocols(["h2"])

    def connected(port: int, session: ssl.SSLSession | None) -> tuple[bool | None, ssl.SSLSession | None]:
        """Return whether the session was resumed, and the session."""
        with (
            socket.create_connection(("127.0.0.1", port), patient(30)) as plain,
            context.wrap_socket(plain, server_hostname="localhost", session=session) as secure,
        ):
            assert secure.recv(1)
            return secure.session_reused, secure.session

    async def run() -> None:
        loop = asyncio.get_running_loop()
        files = TlsFiles(server.cert, server.key, authority.pem)
        listener = TlsListener((), files, files.load(), loop=loop, log=LOG)
        (url,) = await listener.listen([("127.0.0.1", 0)])
        port = int(url.rpartition(":")[2])
        _, session = await asyncio.to_thread(connected, port, None)
        resumed, _ = await asyncio.to_thread(connected, port, session)
        assert resumed, "else the test shows nothing"
        monkeypatch.setattr(tls_listener, "TICKET_SECONDS", 0.0)
        await asyncio.to_thread(wait_until, lambda: not connected(port, session)[0])
        await listener.stop(0)

    asyncio.run(run())
