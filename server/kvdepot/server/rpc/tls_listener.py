"""The operators' services over TCP with TLS: each caller has a certificate of a known CA, and names in it.

The handshake refuses who has no such certificate. Which names may do what is checked for each call, so a reload takes
rights away from open connections too. A certificate that is used in an open connection counts until the connection is
replaced, which happens every few minutes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Final

import grpc
from kvdepot.server.config.addresses import TCP, url_address
from kvdepot.server.platform.grpc_guards import guards
from kvdepot.server.platform.logs import LogThrottle
from kvdepot.server.platform.own_thread import in_own_thread
from kvdepot.server.platform.tls_files import Pem, TlsFileError, TlsFiles
from kvdepot.server.rpc.listener import OPTIONS
from kvdepot.server.rpc.service import Service

CONNECTIONS_MAX: Final = 64
CONNECTION_SECONDS_MAX: Final = 600.0
"""After this time a client is told to connect again, with the certificate and under the CA of that time."""
_CALL_SECONDS_MAX: Final = 600.0
"""How long a call may continue after that."""
LOOK_SECONDS: Final = 5.0
"""How often the files are looked at. A thread does it, for files of a mount that hangs."""


class TlsListener:
    """Owns a grpc.aio server with these services alone: health and reflection would answer everybody of the CA."""

    def __init__(
        self,
        services: Sequence[Service],
        files: TlsFiles,
        pem: Pem,
        *,
        loop: asyncio.AbstractEventLoop,
        log: logging.Logger,
    ) -> None:
        """`pem`: what the files had when they were loaded."""
        age = (
            ("grpc.max_connection_age_ms", int(CONNECTION_SECONDS_MAX * 1000)),
            ("grpc.max_connection_age_grace_ms", int(_CALL_SECONDS_MAX * 1000)),
        )
        self._server = grpc.aio.server(options=(*OPTIONS, *guards(CONNECTIONS_MAX), *age))
        self._server.add_generic_rpc_handlers(tuple(services))
        self._files = files
        self._loop = loop
        self._log = log
        self._throttle = LogThrottle(loop.time)
        self._pem = pem
        self._new: Any = None  # certificates that gRPC does not have yet
        self._looking: asyncio.Task[None] | None = None

    async def listen(self, addresses: Sequence[tuple[str, int]]) -> tuple[str, ...]:
        """Bind and serve. Return the URLs, with the ports that were taken for port 0. Raise OSError."""
        credentials = grpc.dynamic_ssl_server_credentials(
            _certificates(self._pem), self._take_new, require_client_authentication=True
        )
        urls = []
        for host, port in addresses:
            address = url_address(host, port)
            try:
                taken = self._server.add_secure_port(address, credentials)
            except RuntimeError as error:
                raise OSError(f"cannot listen on {TCP}{address}: {error}") from error
            urls.append(f"{TCP}{url_address(host, taken)}")
        await self._server.start()
        self._looking = self._loop.create_task(self._look())
        return tuple(urls)

    async def stop(self, seconds: float) -> None:
        """Refuse new calls, and let calls in flight end for at most so long."""
        if self._looking is not None:
            self._looking.cancel()
        await self._server.stop(seconds)

    def _take_new(self) -> Any:
        """Return new certificates once, on a thread of gRPC before a handshake. None: nothing has changed."""
        new, self._new = self._new, None
        return new

    async def _look(self) -> None:
        """Take new files for connections from now on, without a restart."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                pem = await in_own_thread(self._files.load_changed)
            except TlsFileError as error:
                if self._throttle.due(str(error)):
                    self._log.warning("new certificates not used, the former ones stay in use: %s", error)
                continue
            if pem is not None:
                self._new = _certificates(pem)
                self._log.info("certificates replaced, for new connections")


def _certificates(pem: Pem) -> Any:
    return grpc.ssl_server_certificate_configuration([(pem.key, pem.cert)], root_certificates=pem.client_ca)
