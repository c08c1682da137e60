"""The attachment socket: identity, arena descriptor and death of engines' processes (design.md#attachments).

One SOCK_SEQPACKET connection a process: a datagram in, a datagram with the descriptors out, then
the open connection is the proof of life. Everything runs on the event loop's thread.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import logging
import os
import socket
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import kvdepot.server.platform.processes as processes
from kvdepot.core import limits
from kvdepot.core.calls import AttachCall, AttachReply
from kvdepot.core.errors import InvalidArgument, KvDepotError, LimitExceeded, NotReady, ProtocolMismatch
from kvdepot.proto import codec
from kvdepot.server.attach.streams import StreamProxies, StreamProxy
from kvdepot.server.config.tenants import NO_TENANTS, Tenants
from kvdepot.server.depot.depot import Depot
from kvdepot.server.depot.types import AttachmentInfo, Liveness, Membership, Owner, ProcessIdentity, Watch
from kvdepot.server.platform.accepting import Acceptor, SpareDescriptors, bound_socket, silent_max
from kvdepot.server.platform.addresses import ATTACH_SUFFIX
from kvdepot.server.platform.guard import engine_guard
from kvdepot.server.platform.logs import LogThrottle
from kvdepot.server.platform.peers import groups_of
from kvdepot.server.rpc.call_socket import CallSocket
from kvdepot.server.rpc.depot_calls import DepotCalls

CONNECTIONS_MAX = 8192
CONNECTIONS_OF_A_USER_MAX = CONNECTIONS_MAX // 4
"""Of one uid: attached or not, several of one process included."""
PENDING_CONNECTIONS_MAX = 64
"""Connections that have not attached yet: one more and the oldest is closed."""
PENDING_SECONDS = 5.0
ACCEPT_PAUSE_SECONDS = 0.5
"""Without descriptors left: the listener stays readable, and asking it in a loop would starve everything else."""
_FINISH_STEP_SECONDS = 0.01
WATCH_AGAIN_SECONDS = 5.0
"""So long a process that cannot be watched stays unwatched. Until then its death is not noticed."""


@dataclass(frozen=True, slots=True)
class ArenaOffer:
    """What an accepted process gets: `open_descriptors` makes new ones of a part of the data, and of the generations.

    `parts` is the size of each, `part_of` says which one a process of this tenant gets. It gets nothing of the others.
    """

    arena_id: int
    parts: tuple[int, ...]
    part_of: Callable[[str | None], int]
    daemon_version: str
    open_descriptors: Callable[[int], tuple[int, int]]


class AttachListener:
    """Owns the listening socket and the connections. The pidfd of an attached process is its attachment's.

    `admit` says whether attachments are taken at the moment (a stopping daemon takes none).
    """

    def __init__(
        self,
        *,
        depot: Depot,
        calls: DepotCalls,
        offer: ArenaOffer,
        streams: StreamProxies,
        loop: asyncio.AbstractEventLoop,
        log: logging.Logger,
        boot_id: bytes,
        spare: SpareDescriptors | None = None,
        tenants: Tenants = NO_TENANTS,
    ) -> None:
        self._depot = depot
        self._calls = calls
        self._offer = offer
        self._streams = streams
        self._loop = loop
        self._log = log
        self._guard = engine_guard(depot.counters.add)
        self._boot_id = boot_id
        self._spare = spare
        self._tenants = tenants
        self._pending_max = silent_max(PENDING_CONNECTIONS_MAX)
        self._listeners: dict[Path, Acceptor] = {}
        self._connections: dict[int, _Connection] = {}  # by descriptor, oldest first
        self._pending_connections: dict[int, asyncio.TimerHandle] = {}  # the same order
        self._refusals = LogThrottle(loop.time)
        self._unwatched: dict[int, asyncio.TimerHandle] = {}  # by attachment: when its process is watched again
        self._admits = True

    def listen(self, daemon_socket: Path, mode: int, group_id: int) -> None:
        """Bind next to the daemon's socket and accept. Raises OSError.

        The caller holds the lock of `daemon_socket`, so an old socket file next to it is nobody's.
        """
        path = daemon_socket.with_name(f"{daemon_socket.name}{ATTACH_SUFFIX}")
        self._streams.tidy(daemon_socket)
        listener = bound_socket(path, socket.SOCK_SEQPACKET, mode, group_id)
        self._listeners[path] = Acceptor(
            listener, partial(self._accepted, daemon_socket), name="attach", loop=self._loop, log=self._log,
            throttle=self._refusals, spare=self._spare, pause_seconds=ACCEPT_PAUSE_SECONDS,
        )  # fmt: skip

    def watch_adopted(self) -> None:
        """Watch processes that attached to an earlier run and may never connect again."""
        for info in self._depot.attachments():
            self._watch_identity(info)

    def _watch_identity(self, info: AttachmentInfo) -> None:
        """Watch a process whose connection does not say who it is."""
        state, pidfd = processes.watch_process(info.process, self._boot_id)
        if pidfd is not None:
            self._watch(info.attachment, pidfd)
        elif state is Liveness.DEAD:
            self._died(info.attachment)

    def refuse_new(self) -> None:
        """Answer further attachments, and calls over call sockets, with "not ready"."""
        self._admits = False
        for connection in self._connections.values():
            if connection.calls is not None:
                connection.calls.refuse_new()

    async def finish_calls(self, grace_seconds: float) -> None:
        """Let what was begun over call sockets be answered, for so long at most."""
        until = self._loop.time() + grace_seconds
        while not all(one.calls is None or one.calls.idle for one in self._connections.values()):
            if self._loop.time() > until:
                return
            await asyncio.sleep(_FINISH_STEP_SECONDS)

    def close(self) -> None:
        """Close everything. Engines see end of file and come back to the next daemon; nothing is freed."""
        for connection in list(self._connections.values()):
            self._drop(connection)
        self._depot.unwatch()
        for timer in self._unwatched.values():
            timer.cancel()
        self._streams.close()
        for path, listener in self._listeners.items():
            listener.close()
            path.unlink(missing_ok=True)
        self._listeners.clear()

    def _accepted(self, daemon_socket: Path, peer: socket.socket) -> None:
        connection = _Connection(peer, daemon_socket)
        own = sum(other.uid == connection.uid for other in self._connections.values())
        for what, count, most in (
            ("attach connections", len(self._connections), CONNECTIONS_MAX),
            (f"attach connections of uid {connection.uid}", own, CONNECTIONS_OF_A_USER_MAX),
        ):
            if count >= most:
                self._refuse(connection, LimitExceeded(what, count + 1, most))
                return
        if len(self._pending_connections) >= self._pending_max:
            self._drop(self._oldest_pending(connection.uid))
        self._connections[connection.fd] = connection
        self._pending_connections[connection.fd] = self._loop.call_later(PENDING_SECONDS, self._drop, connection)
        self._loop.add_reader(connection.fd, self._readable, connection)

    def _oldest_pending(self, uid: int) -> _Connection:
        """Return the oldest pending connection of the user that has most of them, with one more of `uid`."""
        pending = [self._connections[fd] for fd in self._pending_connections]
        most = Counter([*(one.uid for one in pending), uid]).most_common(1)[0][0]
        return next(one for one in pending if one.uid == most)

    def _readable(self, connection: _Connection) -> None:
        try:
            datagram, _, flags, _ = connection.socket.recvmsg(limits.ATTACH_DATAGRAM_BYTES_MAX)
        except BlockingIOError:
            return
        except OSError:  # reset by the peer
            datagram, flags = b"", 0
        if not datagram:
            self._ended(connection)
            return
        try:
            if flags & socket.MSG_TRUNC:
                raise InvalidArgument(f"datagram: longer than {limits.ATTACH_DATAGRAM_BYTES_MAX} bytes")
            self._attach(connection, codec.decode_attach_call(datagram))
        except Exception as error:  # noqa: BLE001 - a refusal, or whatever it is: who attaches hears of it
            if not isinstance(error, KvDepotError):
                self._guard.caught("answer", error)
                error = KvDepotError("the daemon failed on this call")
            self._refuse(connection, error)

    def _attach(self, connection: _Connection, call: AttachCall) -> None:
        if connection.attachment is not None:
            raise InvalidArgument("this connection is attached already", advice="send one datagram a connection")
        if not self._admits:
            raise NotReady("the daemon is stopping")
        protocol = min(call.protocol_max, limits.PROTOCOL_MAX)
        if protocol < max(call.protocol_min, limits.PROTOCOL_MIN):
            raise ProtocolMismatch(
                (limits.PROTOCOL_MIN, limits.PROTOCOL_MAX), (call.protocol_min, call.protocol_max)
            )  # fmt: skip
        self._check_parts(call)
        client, owner, pidfd = self._identify(connection.socket)
        member = Membership(call.engine_id, call.scheduler, call.rank, call.world_size, owner)
        process = client
        if call.stream:
            _close(pidfd)
            self._depot.check_attachment(client, member)
            process, pidfd = self._start_proxy(connection, owner)
        try:
            attached = self._depot.attach(process, member, client)
        except Exception:
            _close(pidfd)
            raise
        connection.attachment = attached.attachment
        self._pending_connections.pop(connection.fd).cancel()
        if pidfd is not None:
            self._watch(attached.attachment, pidfd)
        theirs = self._open_calls(connection) if call.calls else None
        try:
            self._answer(connection, attached.session, protocol, self._offer.part_of(owner.tenant), theirs)
        finally:
            if theirs is not None:
                theirs.close()
        self._log.info(
            "attached engine=%s uid=%d pid=%d rank=%d scheduler=%s stream=%s",
            call.engine_id, owner.uid, process.pid, call.rank, call.scheduler, call.stream,
        )  # fmt: skip

    def _check_parts(self, call: AttachCall) -> None:
        """Refuse a rank that would copy in the part that it has mapped once, whichever one its grants are of.

        Its user may be in another tenant after a restart of the daemon. Then it would read and overwrite the data of
        the former one. A proxy has the part of the present tenant.
        """
        maps = call.rank >= 0 and not call.stream
        if maps and not call.parts and len(self._offer.parts) > 1:
            raise InvalidArgument(
                "each tenant has data of its own here, and this client is too old to know that",
                advice="restart the engine with the daemon's version of kvdepot",
            )

    def _open_calls(self, connection: _Connection) -> socket.socket | None:
        """Return the process's end of a call socket; None without descriptors: gRPC is used then.

        Calls of an earlier connection of this process that have not begun are dropped: the new one declares its
        leases.
        """
        for other in self._connections.values():
            if other.attachment == connection.attachment and other.calls is not None:
                other.calls.close()
        calls = CallSocket(self._calls, loop=self._loop, log=self._log)
        try:
            theirs = calls.open()
        except OSError as error:
            self._complain("no call socket", error)
            return None
        connection.calls = calls
        return theirs

    def _start_proxy(self, connection: _Connection, owner: Owner) -> tuple[ProcessIdentity, int]:
        """Start the proxy that touches extents for the connected process. Return its identity and pidfd."""
        proxy = connection.proxy = self._streams.start(connection.daemon_socket, owner)
        try:
            pidfd = os.dup(proxy.pidfd)
        except OSError as error:
            raise NotReady(f"no proxy can be watched: {error}") from error
        return self._named(proxy.pid, pidfd), pidfd

    def _identify(self, peer: socket.socket) -> tuple[ProcessIdentity, Owner, int | None]:
        """Return who connected, its owner, and a pidfd that proves that the pid is not reused.

        If the kernel names no pidfd, only the pid is known, and only the next daemon can prove its death.
        """
        pid, uid, gid = processes.peer_credentials(peer)
        tenant = self._tenants.of(uid, (gid, *groups_of(peer)))
        try:
            pidfd = processes.peer_pidfd(peer, pid)
        except OSError as error:
            raise NotReady(f"process {pid} cannot be watched: {error.strerror}") from error
        process = self._named(pid, pidfd)
        owner = Owner(uid, processes.pid_namespace(pid, pidfd), tenant)
        if processes.has_ended(pidfd) if pidfd is not None else pid > 0 and not process.pid:
            _close(pidfd)
            raise InvalidArgument(f"the process {pid} that connected has ended", advice="connect from a living process")
        return process, owner, pidfd

    def _named(self, pid: int, pidfd: int | None) -> ProcessIdentity:
        """Return the identity of a process. Close `pidfd` before raising NotReady."""
        try:
            return processes.identify(pid, pidfd, self._boot_id)
        except OSError as error:
            _close(pidfd)
            raise NotReady(f"cannot read when process {pid} started: {error.strerror}") from error

    def _answer(
        self, connection: _Connection, session: bytes, protocol: int, part: int, calls: socket.socket | None
    ) -> None:  # fmt: skip
        reply = AttachReply(
            protocol=protocol,
            session=session,
            arena_id=self._offer.arena_id,
            arena_bytes=self._offer.parts[part],
            daemon_version=self._offer.daemon_version,
            stream=connection.proxy.name if connection.proxy is not None else "",
            calls=calls is not None,
        )
        try:
            descriptors = self._descriptors(connection, session, part)
            try:
                sent = descriptors if calls is None else (*descriptors, calls.fileno())
                rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", sent))
                connection.socket.sendmsg([codec.encode_attach_reply(reply)], [rights])
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
        except OSError as error:  # gone already, it does not read, or no descriptor is left: as good as disconnected
            self._complain("cannot answer", error)
            self._ended(connection)

    def _complain(self, what: str, error: OSError) -> None:
        if self._refusals.due(f"{what}: {error.errno}"):
            self._log.warning("attach: %s: %s", what, error)

    def _descriptors(self, connection: _Connection, session: bytes, part: int) -> tuple[int, ...]:
        """Return the descriptors that go with the answer: this part and generations, or the proxy's lifeline."""
        proxy = connection.proxy
        if proxy is None:
            return self._offer.open_descriptors(part)
        assert connection.attachment is not None
        proxy.begin(connection.attachment, session)
        return (proxy.lifeline.detach(),)  # closed once it is sent, so that only the client has it

    def _refuse(self, connection: _Connection, error: KvDepotError) -> None:
        if self._refusals.due(str(error)):
            self._log.warning("attach refused: %s", error)
        text = str(error).encode()[: limits.REASON_BYTES_MAX // 2].decode("utf-8", "ignore")
        reply = AttachReply(protocol=0, error=text, daemon_version=self._offer.daemon_version)
        with contextlib.suppress(OSError):  # it is closed next, whether or not it hears why
            connection.socket.send(codec.encode_attach_reply(reply))
        self._ended(connection)

    def _ended(self, connection: _Connection) -> None:
        """End of a connection: death when the kernel proves it, else only a disconnection."""
        self._drop(connection)
        attachment = connection.attachment
        if attachment is None:
            return
        watch = self._depot.watch_of(attachment)
        if watch is not None and watch.ended:
            self._died(attachment)
        else:
            self._depot.disconnected(attachment)

    def _watch(self, attachment: int, pidfd: int) -> None:
        """Watch a process, or try again later. Takes ownership of the pidfd."""
        try:
            watch = _Watch(self._loop, pidfd, partial(self._reported, attachment))
        except OSError as error:  # of epoll_ctl: a limit of this user, or no memory
            os.close(pidfd)
            self._complain("cannot watch a process", error)
            self._unwatched[attachment] = self._loop.call_later(WATCH_AGAIN_SECONDS, self._watch_again, attachment)
            return
        self._depot.watch(attachment, watch)

    def _watch_again(self, attachment: int) -> None:
        """Watch a process that could not be watched, unless it is gone or its slot is another's by now."""
        self._unwatched.pop(attachment, None)
        for info in self._depot.attachments():
            if info.attachment == attachment and self._depot.watch_of(attachment) is None:
                self._watch_identity(info)

    def _reported(self, attachment: int, watch: Watch) -> None:
        """Handle a death, unless another process has the slot now."""
        if self._depot.watch_of(attachment) is watch:
            self._died(attachment)

    def _died(self, attachment: int) -> None:
        for connection in [one for one in self._connections.values() if one.attachment == attachment]:
            self._drop(connection)
        orphans = set(self._depot.process_dead(attachment))
        self._log.info("attachment %d ended: its process ended, %d others must attach again", attachment, len(orphans))
        for connection in [one for one in self._connections.values() if one.attachment in orphans]:
            self._drop(connection)
            assert connection.attachment is not None
            self._depot.disconnected(connection.attachment)

    def _drop(self, connection: _Connection) -> None:
        timer = self._pending_connections.pop(connection.fd, None)
        if timer is not None:
            timer.cancel()
        if self._connections.pop(connection.fd, None) is not None:
            self._loop.remove_reader(connection.fd)
        connection.socket.close()
        if connection.calls is not None:
            connection.calls.close()
        if connection.proxy is not None:
            connection.proxy.kill()


class _Connection:
    def __init__(self, peer: socket.socket, daemon_socket: Path) -> None:
        self.socket = peer
        self.fd = peer.fileno()
        self.uid = processes.peer_credentials(peer)[1]
        self.daemon_socket = daemon_socket  # next to the one that was connected to
        self.attachment: int | None = None
        self.proxy: StreamProxy | None = None  # ends with the connection ...
        self.calls: CallSocket | None = None  # ... and so does this


class _Watch:
    """A pidfd on the loop, until it is closed: `report` is called when its process has ended."""

    def __init__(self, loop: asyncio.AbstractEventLoop, pidfd: int, report: Callable[[Watch], None]) -> None:
        self._loop = loop
        self._pidfd = pidfd
        loop.add_reader(pidfd, report, self)

    @property
    def ended(self) -> bool:
        return processes.has_ended(self._pidfd)

    def close(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)


def _close(fd: int | None) -> None:
    if fd is not None:
        os.close(fd)
