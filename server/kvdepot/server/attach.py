"""The attachment socket: who an engine's processes are, the arena's descriptor for them, their death (DESIGN 4).

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
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import kvdepot.server.processes as processes
from kvdepot.core import limits
from kvdepot.core.calls import AttachCall, AttachReply
from kvdepot.core.errors import InvalidArgument, KvDepotError, LimitExceeded, NotReady, ProtocolMismatch
from kvdepot.proto import codec
from kvdepot.server.accepting import Acceptor, SpareDescriptors, silent_max
from kvdepot.server.config_schema import ATTACH_SUFFIX
from kvdepot.server.engine.engine import Engine
from kvdepot.server.engine.types import Liveness, ProcessIdentity, Watch
from kvdepot.server.guard import engine_guard
from kvdepot.server.logs import Seldom
from kvdepot.server.rpc.call_socket import CallSocket
from kvdepot.server.rpc.depot_calls import DepotCalls
from kvdepot.server.streams import StreamProxies, StreamProxy

CONNECTIONS_MAX = 8192
STRANGERS_MAX = 64
"""Connections that have not attached yet: one more and the oldest is closed."""
STRANGER_SECONDS = 5.0
ACCEPT_PAUSE_SECONDS = 0.5
"""Without descriptors left: the listener stays readable, and asking it in a loop would starve everything else."""
_FINISH_STEP_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class ArenaOffer:
    """What an accepted process gets: `open_descriptor` makes a fresh descriptor of the arena."""

    arena_id: int
    arena_bytes: int
    daemon_version: str
    open_descriptor: Callable[[], int]


class AttachListener:
    """Owns the listening socket and the connections. The pidfd of an attached process is its attachment's.

    `admit` says whether attachments are taken at the moment (a stopping daemon takes none).
    """

    def __init__(
        self,
        *,
        engine: Engine,
        calls: DepotCalls,
        offer: ArenaOffer,
        streams: StreamProxies,
        loop: asyncio.AbstractEventLoop,
        log: logging.Logger,
        boot_id: bytes,
        spare: SpareDescriptors | None = None,
    ) -> None:
        self._engine = engine
        self._calls = calls
        self._offer = offer
        self._streams = streams
        self._loop = loop
        self._log = log
        self._guard = engine_guard(engine.counters.add)
        self._boot_id = boot_id
        self._spare = spare
        self._strangers_max = silent_max(STRANGERS_MAX)
        self._listeners: dict[Path, Acceptor] = {}
        self._connections: dict[int, _Connection] = {}  # by descriptor, oldest first
        self._strangers: dict[int, asyncio.TimerHandle] = {}  # the same order
        self._refusals = Seldom(loop.time)
        self._admits = True

    def listen(self, daemon_socket: Path, mode: int, group_id: int) -> None:
        """Bind beside the daemon's socket and accept. Raises OSError.

        The caller holds the lock of `daemon_socket`, so an old socket file beside it is nobody's.
        """
        path = daemon_socket.with_name(f"{daemon_socket.name}{ATTACH_SUFFIX}")
        path.unlink(missing_ok=True)
        self._streams.tidy(daemon_socket)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            listener.bind(os.fspath(path))
            os.chown(path, -1, group_id)
            path.chmod(mode)
        except OSError:
            listener.close()
            raise
        self._listeners[path] = Acceptor(
            listener, partial(self._accepted, daemon_socket), name="attach", loop=self._loop, log=self._log,
            seldom=self._refusals, spare=self._spare, pause_seconds=ACCEPT_PAUSE_SECONDS,
        )  # fmt: skip

    def watch_adopted(self) -> None:
        """Notice the death of processes that attached to an earlier run and may never connect again."""
        for info in self._engine.attachments():
            state, pidfd = processes.watch_process(info.process, self._boot_id)
            if pidfd is not None:
                self._watch(info.attachment, pidfd)
            elif state is Liveness.DEAD:
                self._died(info.attachment)

    def refuse_new(self) -> None:
        """From now on attachments, and calls over call sockets, are answered "not ready"."""
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
        self._engine.unwatch()
        self._streams.close()
        for path, listener in self._listeners.items():
            listener.close()
            path.unlink(missing_ok=True)
        self._listeners.clear()

    def _accepted(self, daemon_socket: Path, peer: socket.socket) -> None:
        connection = _Connection(peer, daemon_socket)
        if len(self._connections) >= CONNECTIONS_MAX:
            self._refuse(connection, LimitExceeded("attach connections", CONNECTIONS_MAX + 1, CONNECTIONS_MAX))
            return
        if len(self._strangers) >= self._strangers_max:
            self._drop(self._connections[next(iter(self._strangers))])
        self._connections[connection.fd] = connection
        self._strangers[connection.fd] = self._loop.call_later(STRANGER_SECONDS, self._drop, connection)
        self._loop.add_reader(connection.fd, self._readable, connection)

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
        client, pidfd = self._identify(connection.socket)
        process = client
        if call.stream:
            _close(pidfd)
            process, pidfd = self._start_proxy(connection)
        try:
            attached = self._engine.attach(
                process, call.engine_id, scheduler=call.scheduler, rank=call.rank, world_size=call.world_size,
                client=client,
            )  # fmt: skip
        except Exception:
            _close(pidfd)
            raise
        connection.attachment = attached.attachment
        self._strangers.pop(connection.fd).cancel()
        if pidfd is not None:
            self._watch(attached.attachment, pidfd)
        theirs = self._open_calls(connection) if call.calls else None
        try:
            self._answer(connection, attached.session, protocol, theirs)
        finally:
            if theirs is not None:
                theirs.close()
        self._log.info(
            "attached engine=%s pid=%d rank=%d scheduler=%s stream=%s",
            call.engine_id, process.pid, call.rank, call.scheduler, call.stream,
        )  # fmt: skip

    def _open_calls(self, connection: _Connection) -> socket.socket | None:
        """The process's end of a call socket; None without descriptors: gRPC does.

        What an earlier connection of this process has sent is not begun any more: this one declares what it holds.
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

    def _start_proxy(self, connection: _Connection) -> tuple[ProcessIdentity, int]:
        """The process that will touch extents for the one that connected, and a pidfd of it."""
        proxy = connection.proxy = self._streams.start(connection.daemon_socket)
        try:
            pidfd = os.dup(proxy.pidfd)
        except OSError as error:
            raise NotReady(f"no proxy can be watched: {error}") from error
        return self._named(proxy.pid, pidfd), pidfd

    def _identify(self, peer: socket.socket) -> tuple[ProcessIdentity, int | None]:
        """Who connected, and a pidfd of it, which proves meanwhile that the pid is its.

        Where the kernel names no pidfd, its pid is all that is known, and its death is proven to the next daemon only.
        """
        pid, _ = processes.peer_credentials(peer)
        try:
            pidfd = processes.peer_pidfd(peer, pid)
        except OSError as error:
            raise NotReady(f"process {pid} cannot be watched: {error.strerror}") from error
        process = self._named(pid, pidfd)
        if processes.has_ended(pidfd) if pidfd is not None else pid > 0 and not process.pid:
            _close(pidfd)
            raise InvalidArgument(f"the process {pid} that connected has ended", advice="connect from a living process")
        return process, pidfd

    def _named(self, pid: int, pidfd: int | None) -> ProcessIdentity:
        """Closes `pidfd` where it raises NotReady."""
        try:
            return processes.identify(pid, pidfd, self._boot_id)
        except OSError as error:
            _close(pidfd)
            raise NotReady(f"cannot read when process {pid} started: {error.strerror}") from error

    def _answer(self, connection: _Connection, session: bytes, protocol: int, calls: socket.socket | None) -> None:
        reply = AttachReply(
            protocol=protocol,
            session=session,
            arena_id=self._offer.arena_id,
            arena_bytes=self._offer.arena_bytes,
            daemon_version=self._offer.daemon_version,
            stream=connection.proxy.name if connection.proxy is not None else "",
            calls=calls is not None,
        )
        try:
            descriptor = self._descriptor(connection, session)
            try:
                descriptors = [descriptor] if calls is None else [descriptor, calls.fileno()]
                rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
                connection.socket.sendmsg([codec.encode_attach_reply(reply)], [rights])
            finally:
                os.close(descriptor)
        except OSError as error:  # gone already, it does not read, or no descriptor is left: as good as disconnected
            self._complain("cannot answer", error)
            self._ended(connection)

    def _complain(self, what: str, error: OSError) -> None:
        if self._refusals.due(f"{what}: {error.errno}"):
            self._log.warning("attach: %s: %s", what, error)

    def _descriptor(self, connection: _Connection, session: bytes) -> int:
        """What goes with the answer: the arena, or the lifeline of the proxy."""
        proxy = connection.proxy
        if proxy is None:
            return self._offer.open_descriptor()
        assert connection.attachment is not None
        proxy.begin(connection.attachment, session)
        return proxy.lifeline.detach()  # closed once it is sent, so that only the client has it

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
        watch = self._engine.watch_of(attachment)
        if watch is not None and watch.ended:
            self._died(attachment)
        else:
            self._engine.disconnected(attachment)

    def _watch(self, attachment: int, pidfd: int) -> None:
        """Takes the pidfd over."""
        self._engine.watch(attachment, _Watch(self._loop, pidfd, partial(self._reported, attachment)))

    def _reported(self, attachment: int, watch: Watch) -> None:
        """A death, which says nothing of another process that has the slot now."""
        if self._engine.watch_of(attachment) is watch:
            self._died(attachment)

    def _died(self, attachment: int) -> None:
        for connection in [one for one in self._connections.values() if one.attachment == attachment]:
            self._drop(connection)
        orphans = set(self._engine.process_dead(attachment))
        self._log.info("process of attachment %d ended, %d others attach anew", attachment, len(orphans))
        for connection in [one for one in self._connections.values() if one.attachment in orphans]:
            self._drop(connection)
            assert connection.attachment is not None
            self._engine.disconnected(connection.attachment)

    def _drop(self, connection: _Connection) -> None:
        timer = self._strangers.pop(connection.fd, None)
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
        self.daemon_socket = daemon_socket  # beside the one that was connected to
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
