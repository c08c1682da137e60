"""One process's attachment to the daemon: the connection that is its liveness, and the arena that came with it."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import select
import socket
import threading
import time
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from kvdepot.client.arena_map import ArenaMap, Population
from kvdepot.client.backoff import Backoff
from kvdepot.client.transports.attach import Attached, AttachError, attach
from kvdepot.client.transports.stream import StreamArena
from kvdepot.core.arena import ArenaFormatError
from kvdepot.core.calls import STREAM_READY, AttachCall
from kvdepot.core.limits import PROTOCOL_MAX, PROTOCOL_MIN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvdepot.client.copy.base import Arena
    from kvdepot.client.endpoint import Endpoint

BACKOFF_FIRST_SECONDS = 0.05
BACKOFF_MAX_SECONDS = 1.0
"""A refused local connection costs microseconds; a daemon that is back should be used soon."""
HANDSHAKE_SECONDS_MAX = 4.0
"""Less than the 5 s within which an outage is logged."""
SAY_AGAIN_SECONDS = 60.0
"""From one log line of a refusal to the next with the same reason, however often the daemon goes and comes."""
POPULATE_PIECE_BYTES = 32 << 20
"""Populated between two looks at the connection: some 5 ms."""
PROXY_START_SECONDS_MAX = 30.0
"""Half a second of a free core."""
PROXY_END_SECONDS_MAX = 1.0


class Miss(StrEnum):
    """Why an attempt to attach failed."""

    ABSENT = "absent"  # nobody listens
    SILENT = "silent"  # it did not answer in time
    REFUSED = "refused"


class Transport(StrEnum):
    """How a process reaches the arena's bytes."""

    AUTO = "auto"  # shm, and where that turns out to be impossible, stream
    SHM = "shm"
    STREAM = "stream"


@dataclass(frozen=True, slots=True)
class EngineProcess:
    """Which process of which engine attaches."""

    engine_id: str  # the same for all processes of an engine
    scheduler: bool
    rank: int = -1  # -1: no worker in this process
    world_size: int = 1  # workers of the engine

    def call(self, client_version: str) -> AttachCall:
        return AttachCall(
            PROTOCOL_MIN, PROTOCOL_MAX, self.engine_id, self.scheduler, self.rank, self.world_size, client_version,
            parts=True,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _State:
    session: bytes | None = None
    arena: Arena | None = None
    refusal: str = ""
    daemon_version: str = ""


class Attachment:
    """Keeps a process attached, by a thread of its own. Never raises into the engine.

    A worker makes one per rank; a DepotSession makes its own. Both may live in one process.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        process: EngineProcess,
        *,
        map_arena: bool = True,
        transport: Transport = Transport.AUTO,
        on_change: Callable[[bytes | None, socket.socket | None], None] | None = None,
        client_version: str = "",
        backoff: Backoff | None = None,
        log: logging.Logger | None = None,
        on_missed: Callable[[str, Miss], None] | None = None,
    ) -> None:
        """Prepare an attachment; `start` begins it.

        Args:
            endpoint: where the daemon listens.
            process: which process of which engine attaches.
            map_arena: whether this process reaches extents, by whatever transport.
            transport: how it reaches them.
            on_change: called on the attachment's thread after each attach and each loss, with the session's token or
                None. After an attach it also gets a call socket, if the daemon gave one, which the callee closes.
            client_version: for the daemon's records.
            backoff: between attempts.
            log: of refusals.
            on_missed: called on the attachment's thread after each attempt that failed, with the reason in
                words. Its owner logs that no daemon is there: one process of an engine is enough.
        """
        self._endpoint = endpoint
        self._call = process.call(client_version)
        self._map_arena = map_arena
        self._transport = transport
        self._streams = transport is Transport.STREAM and map_arena
        self._unmapped: tuple[str, int] | None = None  # the daemon's version and the arena that could not be mapped
        self._on_change = on_change
        self._backoff = backoff or Backoff(BACKOFF_FIRST_SECONDS, BACKOFF_MAX_SECONDS, random.random)
        self._log = log or logging.getLogger(__name__)
        self._on_missed = on_missed
        self._said_refusal, self._said_refusal_at = "", 0.0
        self._state = _State()  # replaced as a whole by the thread, read by anybody
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._closing = False
        self._population: Population | None = None
        self._stale: bytes | None = None
        self._again = False
        self._thread = threading.Thread(target=self._run, name="kvdepot-attachment", daemon=True)

    def start(self) -> None:
        """Start the thread. Return at once."""
        self._thread.start()

    @property
    def arena(self) -> Arena | None:
        """The arena of the last attach; kept while disconnected. Compare `arena_id` with the grant's before use.

        By streams it serves nothing any more once disconnected.
        """
        return self._state.arena

    @property
    def session(self) -> bytes | None:
        """The session's token, None while not attached."""
        return self._state.session

    @property
    def refusal(self) -> str:
        """Why the daemon refused the last attach, in its words; empty if it did not."""
        return self._state.refusal

    @property
    def daemon_version(self) -> str:
        """The version of the daemon that this process is attached to; empty while it is not attached."""
        return self._state.daemon_version

    def renew(self, session: bytes) -> None:
        """Attach again, because the daemon no longer knows `session`. Nothing happens if that is done already."""
        self._stale = session
        self._signal()

    def reconnect(self) -> None:
        """Attach again, whatever the session."""
        self._again = True
        self._signal()

    def end(self) -> None:
        """Have the thread end, and with it the connection. The daemon sees the end of file. Return at once."""
        self._closing = True
        self._signal()

    def close(self) -> None:
        """As `end`, and wait for the thread, for a bounded time. Safe to call twice."""
        self.end()
        if self._thread.is_alive():
            self._thread.join(HANDSHAKE_SECONDS_MAX + 1)
        self._state = _State()

    def _signal(self) -> None:
        # Closed by the thread as its last act: nobody is left to be woken.
        with contextlib.suppress(OSError, ValueError):
            os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        try:
            while not self._closing:
                connection = self._try_attach()
                if connection is None:
                    self._pause(self._backoff.next_seconds())
                    continue
                failed = ""
                with connection:
                    try:
                        self._hold(connection)
                    except Exception as error:  # noqa: BLE001 - as in `_try_attach`
                        failed = f"the attachment failed: {error!r}"
                    # A forked child has the connection too: closed here alone, the daemon would never hear of it.
                    with contextlib.suppress(OSError):
                        connection.shutdown(socket.SHUT_RDWR)
                self._end_stream()
                self._publish(_State(None, self._state.arena))
                if failed:
                    self._refused(failed)
                    self._pause(self._backoff.next_seconds())
        finally:
            self._end_stream()
            if self._population is not None:
                self._population.close()
            wake, self._wake = self._wake, -1
            os.close(wake)

    def _try_attach(self) -> socket.socket | None:
        """Make one attempt. An exception must not end this thread, because no other one attaches again."""
        try:
            return self._attach()
        except Exception as error:  # noqa: BLE001 - whatever it is
            self._refused(f"attaching failed: {error!r}")
            return None

    def _attach(self) -> socket.socket | None:
        """Attach once. Return None if that failed; `refusal` has the reason if there is a daemon."""
        self._again = False
        call = replace(self._call, stream=self._streams, calls=self._call.scheduler and self._on_change is not None)
        try:
            accepted = attach(self._endpoint.attach_path, call, HANDSHAKE_SECONDS_MAX)
        except AttachError as error:
            if error.by_daemon:
                self._refused(str(error))
            else:
                self._missed("", str(error), Miss.ABSENT if error.in_time else Miss.SILENT)
            return None
        daemon = (accepted.reply.daemon_version, accepted.reply.arena_id)
        if self._streams and self._unmapped not in (None, daemon):
            accepted.close()  # it is upgraded, or has another arena: this one may be mapped
            self._streams = False
            return None
        try:
            arena = self._connect_proxy(accepted) if self._streams else self._adopt(accepted)
        except (ArenaFormatError, OSError) as error:
            accepted.connection.close()
            if accepted.calls is not None:
                accepted.calls.close()
            self._cannot_reach(daemon, error)
            return None
        self._backoff.reset()
        self._said_refusal = ""
        version = accepted.reply.daemon_version
        self._publish(_State(accepted.reply.session, arena, daemon_version=version), accepted.calls)
        return accepted.connection

    def _cannot_reach(self, daemon: tuple[str, int], error: Exception) -> None:
        """Note why the arena cannot be reached. Continue with streams: this daemon's arena will not be mapped later."""
        if self._streams or self._transport is not Transport.AUTO:
            self._refused(f"the arena cannot be {'reached by streams' if self._streams else 'mapped'}: {error}")
            return
        self._refused(f"the arena cannot be mapped: {error}; streams are used, which are slower")
        self._streams, self._unmapped = True, daemon

    def _refused(self, reason: str) -> None:
        if reason != self._said_refusal or time.monotonic() > self._said_refusal_at + SAY_AGAIN_SECONDS:
            self._said_refusal, self._said_refusal_at = reason, time.monotonic()
            self._log.warning("kvdepot: not attached to %s: %s", self._endpoint, reason)
        self._missed(reason, reason, Miss.REFUSED)

    def _missed(self, refusal: str, reason: str, miss: Miss) -> None:
        """Note an attempt that failed. `refusal`: the reason, if a daemon was there."""
        if refusal != self._state.refusal:
            self._publish(_State(None, self._state.arena, refusal))
        if self._on_missed is not None and not self._closing:
            self._on_missed(reason, miss)

    def _adopt(self, accepted: Attached) -> Arena | None:
        """Return the mapping to use: the present one if it is of the same arena. Take over the descriptors.

        Raise OSError for another part of the same arena: the user is in another tenant since the daemon's restart.
        Offsets of earlier grants count in the present mapping, those of later ones in the other one.
        """
        known, arena_id = self._state.arena, accepted.reply.arena_id
        same = known is not None and known.arena_id == arena_id and not isinstance(known, StreamArena)
        if not self._map_arena or same:
            given = accepted.descriptors[:1]
            moved = same and isinstance(known, ArenaMap) and not all(map(known.is_of, given))
            _close(accepted.descriptors)
            if moved:
                raise OSError("this user is in another tenant now, whose data is another file: restart this process")
            return known
        if not accepted.descriptors:
            raise OSError(
                f"{accepted.arrived} of its descriptors arrived: the daemon (version {accepted.reply.daemon_version})"
                " is older than this client and has to be upgraded, or something takes descriptors away"
            )
        data, generations = accepted.descriptors
        try:
            arena = ArenaMap(data, generations, accepted.reply.arena_bytes)
            if arena.arena_id != arena_id:
                raise ArenaFormatError(f"generations: arena {arena.arena_id:016x}, the daemon said {arena_id:016x}")
        except (ArenaFormatError, OSError):
            os.close(data)
            raise
        finally:
            os.close(generations)
        if self._population is not None:
            self._population.close()
        self._population = Population(arena, data)
        return arena  # the old mapping goes with the last copy that uses it

    def _connect_proxy(self, accepted: Attached) -> StreamArena:
        """Wait until the proxy serves, and connect. Take over the descriptor. Raise OSError."""
        if not accepted.descriptors:
            raise OSError("the lifeline's descriptor did not arrive")
        if not accepted.reply.stream:
            _close(accepted.descriptors)
            raise OSError("this daemon has no streams; upgrade it")
        lifeline = socket.socket(fileno=accepted.descriptors[0])
        self._await_proxy(lifeline, accepted.connection)
        arena = StreamArena(
            arena_id=accepted.reply.arena_id,
            size_bytes=accepted.reply.arena_bytes,
            target=self._endpoint.stream_target(accepted.reply.stream),
            session=accepted.reply.session,
            lifeline=lifeline,
            on_end=self._signal,
            log=self._log,
        )
        try:
            arena.connect(HANDSHAKE_SECONDS_MAX)
        except OSError:
            arena.end()
            raise
        return arena

    def _await_proxy(self, lifeline: socket.socket, connection: socket.socket) -> None:
        until = time.monotonic() + PROXY_START_SECONDS_MAX
        poller = select.poll()
        for one in (lifeline, connection, self._wake):
            poller.register(one, select.POLLIN)
        while not self._closing:
            ready = dict(poller.poll(max(until - time.monotonic(), 0.0) * 1000))
            if self._wake in ready:
                os.eventfd_read(self._wake)
            elif lifeline.fileno() in ready and lifeline.recv(len(STREAM_READY)) == STREAM_READY:
                return
            else:
                raise OSError("the proxy or the daemon ended" if ready else "the proxy does not start")
        raise OSError("closing")

    def _end_stream(self) -> None:
        """Have the proxy end, and wait a moment for it: until it is dead it has this rank's place."""
        if isinstance(self._state.arena, StreamArena):
            self._state.arena.end()
            poller = select.poll()
            poller.register(self._state.arena.lifeline, 0)
            poller.poll(PROXY_END_SECONDS_MAX * 1000)

    def _hold(self, connection: socket.socket) -> None:
        """Wait until the connection or the proxy has ended, is to be renewed, or this is closing."""
        stream = self._state.arena if isinstance(self._state.arena, StreamArena) else None
        poller = select.poll()
        poller.register(connection, select.POLLIN | select.POLLHUP)
        poller.register(self._wake, select.POLLIN)
        if stream is not None:
            poller.register(stream.lifeline, select.POLLHUP)
        while not (self._closing or self._again or self._stale == self._state.session or (stream and stream.ended)):
            ready = dict(poller.poll(self._populate()))
            if self._wake in ready:
                os.eventfd_read(self._wake)
                del ready[self._wake]
            if ready:
                return  # neither daemon nor proxy say anything after their first words: this is the end of file

    def _populate(self) -> float | None:
        """Populate a piece of the mapping. Return the milliseconds until the next one, or None when it is complete."""
        if self._population is None:
            return None
        seconds = self._population.step(POPULATE_PIECE_BYTES)
        if seconds is None:
            self._population.close()
            self._population = None
            return None
        return seconds * 1000

    def _pause(self, seconds: float) -> None:
        waiting = select.poll()  # select(2) knows no descriptors above 1023
        waiting.register(self._wake, select.POLLIN)
        if waiting.poll(seconds * 1000):
            os.eventfd_read(self._wake)

    def _publish(self, state: _State, calls: socket.socket | None = None) -> None:
        self._state = state
        if self._on_change is not None and not self._closing:
            self._on_change(state.session, calls)
        elif calls is not None:
            calls.close()


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
