"""What is asked of a running daemon: its status, who it is, and an attachment as engines make it."""

from __future__ import annotations

import contextlib
import errno
import http.client
import json
import os
import secrets
import socket
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Final

import grpc
from kvdepot.client.attachment import EngineProcess
from kvdepot.client.credentials import Credentials, peer_credentials
from kvdepot.client.ctl.calls import connect
from kvdepot.client.transports.attach import Attached, AttachError, attach
from kvdepot.core.arena import PAGE_BYTES, ArenaFormatError, GenerationsHeader
from kvdepot.core.errors import KvDepotError, PermissionDenied

if TYPE_CHECKING:
    from kvdepot.client.endpoint import Endpoint
    from kvdepot.core.report import DaemonStatus

_ANSWER_BYTES_MAX: Final = 64 << 10


@dataclass(frozen=True, slots=True)
class Attachment:
    """`trouble`: empty where the arena's descriptors came through. `pids`: whom the daemon takes this process for."""

    trouble: str
    arena_bytes: int = 0
    pids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Daemon:
    """`silence`: why there is no status. `attach_error`: why the attachment socket cannot be connected to."""

    endpoint: Endpoint
    status: DaemonStatus | None = None
    silence: str = ""
    peer: Credentials | None = None
    attach_error: str = ""
    attachment: Attachment | None = None  # None: not tried

    @property
    def process(self) -> str:
        """Its folder in /proc, `self` where there is none."""
        return str(self.peer.pid) if self.peer is not None and self.peer.pid > 0 else "self"

    @property
    def uid(self) -> int | None:
        return None if self.peer is None else self.peer.uid

    @property
    def in_sight(self) -> bool:
        """Whether pids that it tells mean the same here."""
        return self.status is not None and self.peer is not None and self.peer.pid == self.status.pid


def ask(endpoint: Endpoint, timeout_seconds: float, *, attaching: bool) -> Daemon:
    """Ask the daemon, and raise nothing: a missing answer is a finding. Takes a few times `timeout_seconds` at most."""
    peer, attach_error = _peer(endpoint, timeout_seconds)
    try:
        status = _status(endpoint, timeout_seconds)
    except grpc.RpcError as error:
        return Daemon(endpoint, None, f"{error.code().name}: {error.details()}", peer, attach_error)
    except PermissionDenied as error:
        return Daemon(endpoint, None, f"{os.strerror(errno.EACCES)}: {error.message}", peer, attach_error)
    except KvDepotError as error:
        return Daemon(endpoint, None, str(error), peer, attach_error)
    attachment = _attach(endpoint, timeout_seconds) if attaching and peer is not None else None
    return Daemon(endpoint, status, "", peer, attach_error, attachment)


def _status(endpoint: Endpoint, timeout_seconds: float) -> DaemonStatus:
    with connect(endpoint, timeout_seconds) as operator:
        return operator.status()


def _peer(endpoint: Endpoint, timeout_seconds: float) -> tuple[Credentials | None, str]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(timeout_seconds)
        try:
            connection.connect(endpoint.attach_path)
            return peer_credentials(connection), ""
        except OSError as error:
            return None, error.strerror or str(error)


def _attach(endpoint: Endpoint, timeout_seconds: float) -> Attachment:
    """As the scheduler of an engine nobody has; the session ends with this process, and holds nothing meanwhile."""
    engine_id = f"kvdepotctl-doctor-{os.getpid()}-{secrets.token_hex(4)}"
    call = EngineProcess(engine_id, scheduler=True).call(version("kvdepot"))
    try:
        attached = attach(endpoint.attach_path, call, timeout_seconds)
    except AttachError as error:
        return Attachment(f"{'refused' if error.by_daemon else 'no answer'} at {endpoint.attach_path}: {error}")
    with attached.connection:
        try:
            trouble = _trouble_with(attached)
            status = _status(endpoint, timeout_seconds)
        except grpc.RpcError as error:
            return Attachment(f"the daemon does not answer any more: {error.code().name}")
        finally:
            for descriptor in attached.descriptors:
                os.close(descriptor)
    pids = next((session.pids for session in status.sessions if session.engine_id == engine_id), ())
    return Attachment(trouble, attached.reply.arena_bytes, pids)


def _trouble_with(attached: Attached) -> str:
    if not attached.descriptors:
        return "the answer came without descriptors"
    try:
        header = GenerationsHeader.unpack(os.pread(attached.descriptors[-1], PAGE_BYTES, 0))
    except (OSError, ArenaFormatError) as error:
        return f"the descriptor is no arena's: {error}"
    return "" if header.arena_id == attached.reply.arena_id else "the descriptor is another arena's"


def metrics_answer(address: str, timeout_seconds: float) -> str:
    """Who is at [daemon] metrics: `kvdepot`, `free`, or what else is there or is wrong with it."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    asked = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - compared, not bound
    connection = http.client.HTTPConnection(asked, int(port), timeout=timeout_seconds)
    try:
        connection.request("GET", "/healthz")
        answer = json.loads(connection.getresponse().read(_ANSWER_BYTES_MAX))
    except ConnectionRefusedError:
        return _bindable(host, int(port))
    except (OSError, http.client.HTTPException, ValueError) as error:
        return f"no good answer ({type(error).__name__}: {error})"
    finally:
        connection.close()
    return "kvdepot" if isinstance(answer, dict) and answer.keys() == {"ready", "reason"} else "something else"


def _bindable(host: str, port: int) -> str:
    try:
        with contextlib.closing(socket.create_server((host, port), family=_family(host))):
            return "free"
    except OSError as error:
        return f"nobody, and it cannot be bound: {error.strerror or error}"


def _family(host: str) -> int:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
