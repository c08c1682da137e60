"""The operators' services over TCP with TLS: each caller has a certificate of a known CA, and names in it.

The handshake refuses who has no such certificate. Which names may do what is checked for each call, so a reload takes
rights away from open connections too. A certificate that was accepted counts until the connection is replaced, which
happens every few minutes, and for as long as TLS resumes its session: `TICKET_SECONDS`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import grpc
from kvdepot.core import limits
from kvdepot.server.platform.addresses import TCP, url_address
from kvdepot.server.platform.grpc_guards import guards
from kvdepot.server.platform.logs import LogThrottle
from kvdepot.server.platform.own_thread import in_own_thread
from kvdepot.server.platform.tls_files import CONNECTION_SECONDS_MAX, Pem, TlsFiles
from kvdepot.server.rpc.service import Service

_OPTIONS: Final = (
    ("grpc.max_receive_message_length", 256 << 10),  # an operator's calls are short
    ("grpc.max_send_message_length", limits.MESSAGE_BYTES_MAX),
    ("grpc.max_concurrent_streams", 16),
    ("grpc.so_reuseport", 0),
)
CONNECTIONS_MAX: Final = 64
IDLE_SECONDS: Final = 30.0
"""Without a call: a certificate that is valid and not allowed could keep all connections otherwise."""
TICKET_SECONDS: Final = 60.0
"""How long a session can be resumed, for which TLS does not check the certificate again: whether it has expired."""
_CALL_SECONDS_MAX: Final = 600.0
"""How long a call may continue after that."""
LOOK_SECONDS: Final = 5.0
"""How often the files are looked at. A thread does it, for files of a mount that hangs."""
_ANSWER_SECONDS: Final = 1.0
"""How long that is waited for. If it takes longer, the certificates in use are given again, as if nothing changed."""


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
        self._server = grpc.aio.server(options=(*_OPTIONS, *guards(CONNECTIONS_MAX, IDLE_SECONDS), *age))
        self._server.add_generic_rpc_handlers(tuple(services))
        self._files = files
        self._loop = loop
        self._log = log
        self._throttle = LogThrottle(loop.time)
        self._pem = pem
        self._new: list[deque[Any]] = []  # of each address: certificates that gRPC has not taken yet
        self._looking: asyncio.Task[None] | None = None
        self._reading: asyncio.Task[Pem | None] | None = None  # of the files, until they have answered

    @property
    def expires_at(self) -> float:
        """Return the end of the certificate in use, in unix seconds."""
        return self._pem.expires_at

    async def listen(self, addresses: Sequence[tuple[str, int]]) -> tuple[str, ...]:
        """Bind and serve. Return the URLs, with the ports that were taken for port 0. Raise OSError."""
        urls = []
        for host, port in addresses:
            address = url_address(host, port)
            new: deque[Any] = deque(maxlen=1)
            credentials = grpc.dynamic_ssl_server_credentials(
                _certificates(self._pem), partial(_taken, new), require_client_authentication=True
            )
            self._new.append(new)
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
        for task in (self._looking, self._reading):
            if task is not None:
                task.cancel()
        await self._server.stop(seconds)

    async def _look(self) -> None:
        """Take new files for connections from now on, without a restart. End the sessions that could be resumed."""
        given_at = self._loop.time()
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            pem = await self._changed()
            if pem is not None:
                self._pem = pem
                self._log.info("certificates replaced, for new connections")
            next_look_at = self._loop.time() + LOOK_SECONDS + _ANSWER_SECONDS
            if pem is not None or next_look_at > given_at + TICKET_SECONDS:
                given_at = self._loop.time()
                for new in self._new:  # with the same ones too: gRPC then makes new keys for tickets
                    new.append(_certificates(self._pem))

    async def _changed(self) -> Pem | None:
        """Return new certificates. None: there are none, they cannot be used, or the files do not answer now."""
        if self._reading is None:
            self._reading = self._loop.create_task(in_own_thread(self._files.load_changed))
        await asyncio.wait((self._reading,), timeout=_ANSWER_SECONDS)
        if not self._reading.done():
            if self._throttle.due("hangs"):
                self._log.warning("certificates of [tls] not read, those in use stay: their files do not answer")
            return None
        reading, self._reading = self._reading, None
        try:
            return reading.result()
        except Exception as error:  # noqa: BLE001 - whatever it is, the next look may work
            if self._throttle.due(str(error)):
                self._log.warning("new certificates not used, the former ones stay in use: %s", error)
            return None


def _taken(new: deque[Any]) -> Any:
    """Return new certificates once, on a thread of gRPC before a handshake. None: nothing has changed."""
    try:
        return new.pop()
    except IndexError:
        return None


def _certificates(pem: Pem) -> Any:
    return grpc.ssl_server_certificate_configuration([(pem.key, pem.cert)], root_certificates=pem.client_ca)
