"""The operators' calls: each has a caller, whose role allows it, and a line in the audit log.

A call is answered after its line is written. A call with many replies has two lines: `started`, and its end.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime
from enum import Enum
from typing import Any, Final

from kvdepot.core.control import ReloadCall
from kvdepot.core.errors import KvDepotError, PermissionDenied
from kvdepot.core.printable import printable
from kvdepot.core.secrets import mask_secrets
from kvdepot.proto.methods import OPERATOR, Method
from kvdepot.server.config.operators import Operators, Role
from kvdepot.server.platform.audit_log import AuditLog
from kvdepot.server.platform.logs import LogThrottle
from kvdepot.server.platform.peers import Peer
from kvdepot.server.rpc.callers import Certificate

Caller = Peer | Certificate

_READS: Final = frozenset({*OPERATOR, "ListQuotas", "GetConfig"})
"""Methods that a reader may call. Every other method is an admin's, also a new one."""
TEXT_MAX: Final = 256
"""Characters of one argument in a line."""
ITEMS_MAX: Final = 64
"""Entries of one argument in a line."""


class Call:
    """A call of an operator, from its arrival to its line."""

    def __init__(self, method: Method[Any, Any], caller: Caller | None, role: Role | None) -> None:
        self._method = method
        self._caller = caller
        self._role = role
        self._arguments: Any = None
        self._only_reads = False

    def decode(self, request: bytes) -> Any:
        """Return the call's value. Raise PermissionDenied, or what a malformed message raises."""
        if self._caller is None:
            raise PermissionDenied("the connection did not come over the admin socket", advice="connect to that one")
        if self._role is None:
            raise self._denied()
        try:
            call = self._method.call.parse(request)
        except Exception:
            if self._role >= Role.ADMIN or self._method.name in _READS:
                raise
            raise self._denied() from None
        self._arguments = shown(call)
        self._only_reads = _reads(self._method, call)
        self.check(self._role)
        return call

    def check(self, role: Role | None) -> None:
        """Raise PermissionDenied if the caller, who has that role now, may not make this call."""
        self._role = role
        if role is None or not (role >= Role.ADMIN or self._only_reads):
            raise self._denied()

    def _denied(self) -> PermissionDenied:
        assert self._caller is not None
        may = "is no operator" if self._role is None else f"may only read, and {self._method.name} needs an admin"
        return PermissionDenied(f"{self.who} {may}", advice=_advice(self._caller))

    @property
    def caller(self) -> Caller | None:
        return self._caller

    @property
    def who(self) -> str:
        return "" if self._caller is None else _named(self._caller)

    @property
    def of_stranger(self) -> bool:
        """Return whether a host calls that has a certificate and no role: it must not fill the log."""
        return self._role is None and isinstance(self._caller, Certificate)

    @property
    def level(self) -> int:
        """Return the level of the line of a call that was allowed. Who looks every second must not fill a log."""
        return logging.DEBUG if self._only_reads else logging.INFO

    def line(self, outcome: str) -> Mapping[str, Any]:
        """Return the fields of the call's line."""
        role = self._role
        peer = self._caller if isinstance(self._caller, Peer) else None
        certificate = self._caller if isinstance(self._caller, Certificate) else None
        return {
            "time": datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="milliseconds"),
            "uid": None if peer is None else peer.uid,
            "gid": None if peer is None else peer.gid,
            "pid": None if peer is None else peer.pid,
            "executable": None if peer is None else peer.executable[:TEXT_MAX],
            "command": None if peer is None else peer.command[:TEXT_MAX],
            "certificate": None if certificate is None else [_cut(name) for name in certificate.names[:ITEMS_MAX]],
            "address": None if certificate is None else certificate.address,
            "role": None if role is None else role.name.lower(),
            "verb": self._method.name,
            "arguments": self._arguments,
            "outcome": outcome,
        }


class OperatorCalls:
    """Knows the callers and their roles, and writes the lines.

    `caller_of` returns who makes a call; None for connections that have no operator.
    """

    def __init__(self, caller_of: Callable[[Any], Caller | None], operators: Operators, audit: AuditLog) -> None:
        self._caller_of = caller_of
        self.operators = operators
        self._audit = audit
        self._strangers = LogThrottle(time.monotonic)

    @asynccontextmanager
    async def call(self, method: Method[Any, Any], context: Any) -> AsyncIterator[Call]:
        """Yield a call with this context of gRPC. At its end its line is written, with the outcome."""
        caller = self._caller_of(context)
        call = Call(method, caller, _role(self.operators, caller))
        try:
            yield call
        except asyncio.CancelledError:
            self._audit.put(call.line("cancelled"))  # the caller is gone: nobody waits
            raise
        except Exception as error:
            if call.of_stranger and not self._strangers.due(call.who):
                raise
            await self._audit.write(call.line(error.code if isinstance(error, KvDepotError) else KvDepotError.code))
            raise
        await self._audit.write(call.line("ok"), level=call.level)

    async def started(self, call: Call) -> None:
        """Write that a call with many replies is allowed, and begins."""
        await self._audit.write(call.line("started"))

    def check(self, call: Call) -> None:
        """Raise PermissionDenied if a reload has taken the right to this call away. Before each of many replies."""
        call.check(_role(self.operators, call.caller))


def _role(operators: Operators, caller: Caller | None) -> Role | None:
    match caller:
        case Peer():
            return operators.role(caller.uid, caller.groups)
        case Certificate():
            return operators.role_of_names(caller.names)
    return None


def _advice(caller: Caller) -> str | None:
    """Return what the daemon's operator can do. None: what `PermissionDenied` says for a user of the host."""
    if isinstance(caller, Peer):
        return None
    return "add a name of the certificate to [tls] allow_readers or allow_admins in the daemon's configuration"


def _named(caller: Caller) -> str:
    if isinstance(caller, Peer):
        return f"uid {caller.uid}"
    if not caller.names:
        return "a certificate without a DNS or URI name"
    return f"the certificate of {_cut(printable(', '.join(caller.names)))}"


def shown(value: Any) -> Any:
    """Return a call's value for a line of JSON: ids in hexadecimal, secrets masked, texts and lists cut."""
    if is_dataclass(value):
        return {field.name: shown(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Enum):
        return value.name.lower()
    if isinstance(value, bytes):
        return _cut(value[:TEXT_MAX].hex())
    if isinstance(value, str):
        return _cut(mask_secrets(value[: 16 * TEXT_MAX]))
    if isinstance(value, Mapping):
        return {_cut(str(key)): shown(entry) for key, entry in list(value.items())[:ITEMS_MAX]}
    if isinstance(value, list | tuple | set | frozenset):
        return [shown(entry) for entry in list(value)[:ITEMS_MAX]]
    return value


def _cut(text: str) -> str:
    return text if len(text) <= TEXT_MAX else f"{text[: TEXT_MAX - 3]}..."


def _reads(method: Method[Any, Any], call: object) -> bool:
    return method.name in _READS or (isinstance(call, ReloadCall) and call.dry_run)
