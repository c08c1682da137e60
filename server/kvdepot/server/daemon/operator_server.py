"""The operators' side of the daemon: their socket, what each of them may call, and the log of their calls."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final

from kvdepot.core.errors import ConfigError
from kvdepot.core.report import DaemonStatus
from kvdepot.server.config.config import Config
from kvdepot.server.config.operators import Operators
from kvdepot.server.config.schema import DaemonTable
from kvdepot.server.config.tls import load_tls
from kvdepot.server.daemon.control import Control
from kvdepot.server.depot.depot import Depot
from kvdepot.server.platform.accepting import SpareDescriptors
from kvdepot.server.platform.audit_log import AuditLog
from kvdepot.server.rpc.admin_socket import AdminSocket
from kvdepot.server.rpc.callers import certificate_of
from kvdepot.server.rpc.control_service import control_service
from kvdepot.server.rpc.listener import OPERATORS, GrpcListener
from kvdepot.server.rpc.operator_calls import OperatorCalls
from kvdepot.server.rpc.operator_service import operator_service
from kvdepot.server.rpc.tls_listener import TlsListener

_OWN_MODE: Final = 0o600


class OperatorServer:
    """Services for operators. The admin socket knows who calls; gRPC behind it listens for this process alone."""

    def __init__(
        self, config: Config, *, depot: Depot, control: Control, status: Callable[[], DaemonStatus],
        loop: asyncio.AbstractEventLoop, log: logging.Logger, spare: SpareDescriptors, count: Callable[[str], None],
    ) -> None:  # fmt: skip
        """Open the audit log and the files of TLS. Raise ConfigError."""
        self._log = log
        self._audit = _open_audit(config, log, count)
        self._admin = AdminSocket(config.tables.daemon.rpc_socket, loop=loop, log=log, spare=spare)
        self._calls = OperatorCalls(lambda context: self._admin.peer(context.peer()), config.operators, self._audit)
        self._remote_calls = OperatorCalls(certificate_of, config.operators, self._audit)
        here, remote = (
            (operator_service(status, depot.listing, depot.records, calls, log), control_service(control, calls, log))
            for calls in (self._calls, self._remote_calls)
        )
        self._grpc = GrpcListener(here, OPERATORS, sockets=1)
        self._tls = None
        if config.tables.tls.on:
            files = config.tables.tls.files
            self._tls = TlsListener(remote, files, load_tls(config.file, files), loop=loop, log=log)

    @property
    def certificate_seconds_left(self) -> float | None:
        """Return the time until the daemon's certificate expires, negative after it; None without TLS."""
        return None if self._tls is None else self._tls.expires_at - time.time()

    async def listen(self, daemon: DaemonTable) -> None:
        """Raise OSError if a socket cannot be had."""
        if self._tls is not None:
            urls = await self._tls.listen(daemon.tcp_addresses)
            if urls:
                self._log.info("operators with a certificate connect to %s", ", ".join(urls))
        await self._grpc.listen((daemon.rpc_socket,), _OWN_MODE, -1)
        for path in daemon.admin_sockets:
            self._admin.listen(path, daemon.admin_mode_bits, daemon.admin_group_id)
        self._log.info("operators connect to %s", ", ".join(map(str, daemon.admin_sockets)))

    async def set_serving(self, serving: bool) -> None:
        await self._grpc.set_serving(serving)

    def configure(self, operators: Operators) -> None:
        """Let others call from now on, and open the audit log again."""
        for calls in (self._calls, self._remote_calls):
            calls.operators = operators
        self._audit.reopen()

    async def stop(self, seconds: float) -> None:
        """Let calls in flight end, for at most so long, and close the sockets."""
        await asyncio.gather(*(server.stop(seconds) for server in (self._grpc, self._tls) if server is not None))
        self._admin.close()

    async def close(self) -> None:
        """Close the audit log. Nobody is answered any more."""
        await self._audit.close()


def _open_audit(config: Config, log: logging.Logger, count: Callable[[str], None]) -> AuditLog:
    """Raise ConfigError."""
    path = config.tables.audit.path
    try:
        return AuditLog(path, log, count)
    except OSError as error:
        raise ConfigError(config.file, "audit.path", f"cannot use {path}: {error.strerror}") from error
