"""The source's side of the peer tier: the process that sends, readers' questions, and the ends of leases (ADR 78).

The daemon decides who gets what, and touches no payload. The process that sends is written down as a worker, and is
killed if it does not confirm the end of a lease in time. Over NIXL another process lends (`nixl_lender`), under leases
of the process that sends.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from functools import partial
from typing import Final

from kvdepot.core.data_mapping import DataParts, pack_parts
from kvdepot.core.errors import ConfigError, KvDepotError, NoRoom
from kvdepot.core.report import ReaderStatus
from kvdepot.server.config.config import Config
from kvdepot.server.config.peers import Peers
from kvdepot.server.daemon.nixl_lender import NixlLender
from kvdepot.server.daemon.peer_readers import PeerReaders
from kvdepot.server.daemon.peer_summaries import GATHER_SECONDS, PeerSummaries
from kvdepot.server.depot.counters import Counters
from kvdepot.server.depot.loads.peer_leases import PeerLease, PeerLeases
from kvdepot.server.io.jobs import ABSENT, UNKNOWN
from kvdepot.server.io.peer_wire import (
    FROM_DAEMON,
    TO_DAEMON,
    UNCONNECTED,
    AskLocate,
    AskPull,
    AskSummary,
    Ended,
    Gathered,
    Granted,
    Lane,
    Lender,
    Located,
    Refusal,
    Refused,
    Sent,
    SummaryWords,
    Unconnected,
)
from kvdepot.server.io.proven_child import ProvenChild
from kvdepot.server.platform.addresses import TCP, url_address
from kvdepot.server.platform.backoff import Backoff
from kvdepot.server.platform.guard import engine_guard
from kvdepot.server.platform.listening import bind_all
from kvdepot.server.platform.paced import Paced
from kvdepot.server.storage.base import ObjectName

_MODULE: Final = "kvdepot.server.io.peer_server"
_NICENESS: Final = 5
"""As I/O workers: a load of another node waits for it."""
LEASE_SECONDS: Final = 30.0
CONFIRM_SECONDS: Final = 5.0
"""What the end of a lease may come late. Then the process that sends is killed."""
QUESTIONS_SHARE: Final = 0.2
"""Of the loop's time, for the questions of all peers together: enough for 20,000 names a second."""
_BACKLOG: Final = 64
_DEATH_SECONDS: Final = 1.0
_Up = AskLocate | AskPull | AskSummary | Ended | Unconnected
_Down = Located | Granted | Refused | SummaryWords | Gathered


class PeerSource:
    """Everything runs on the loop's thread.

    Counts `peer_located_objects.found`, `.absent` and `.pending`, `peer_pulls.` and how each ended or why it was
    refused, `peer_sent_bytes.` and the lane, `peer_given_summaries.` and whether it was gathered for it,
    `peer_refused_connections.` and why, `peer_servers.started`, `.crashed` and
    `.killed`.
    """

    def __init__(
        self, config: Config, data: DataParts, leases: PeerLeases, *, arena_id: int,
        loop: asyncio.AbstractEventLoop, log: logging.Logger, counters: Counters, lease_seconds: float = LEASE_SECONDS,
        gather_seconds: float = GATHER_SECONDS,
    ) -> None:  # fmt: skip
        """Build it without a process. `data`: of the arena."""
        self._data = data
        self._arena_id = arena_id
        self._file = config.file
        tls = config.tables.tls
        self._files = tls.cert, tls.key, tls.client_ca
        self._address = config.tables.daemon.peers_address
        self._peers = config.peers
        self._leases = leases
        self._loop = loop
        self._log = log
        self._count = counters.add
        self._guard = engine_guard(counters.add)
        self._questions = Paced(QUESTIONS_SHARE, loop)  # of the process that runs now
        self._summaries = PeerSummaries(
            leases, self._tell, unsent=lambda: self._child is not None and self._child.unsent, arena_id=arena_id,
            questions=self._questions, loop=loop, guard=self._guard, every_seconds=gather_seconds,
        )  # fmt: skip
        self._lease_seconds = lease_seconds
        self._lender: NixlLender | None = None
        if config.tables.daemon.lend_nixl:
            self._lender = NixlLender(data, loop=loop, log=log, count=counters.add)
        self._borrowed: set[int] = set()  # leases over NIXL
        self._readers = PeerReaders()
        self._listening: list[socket.socket] = []
        self._child: ProvenChild | None = None
        self._worker = -1
        self._killed = False
        self._timers: dict[int, asyncio.TimerHandle] = {}  # by lease
        self._started_at = 0.0
        self._backoff = Backoff()
        self._respawn: asyncio.TimerHandle | None = None
        self._closed = False
        self._died = asyncio.Event()

    @property
    def pid(self) -> int | None:
        return None if self._child is None else self._child.pid

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """Return host and port of each socket that listens."""
        return [one.getsockname()[:2] for one in self._listening]

    def readers(self) -> tuple[ReaderStatus, ...]:
        """Return who has loaded from here in this run."""
        return self._readers.statuses()

    async def listen(self) -> None:
        """Listen at every address of the configured host, and start the process that sends. Raise ConfigError."""
        if self._address is None:
            return
        try:
            # In a thread: names may have to be looked up.
            self._listening = await self._loop.run_in_executor(None, bind_all, *self._address)
            for listening in self._listening:
                listening.setblocking(True)  # for the process that accepts
                listening.listen(_BACKLOG)
        except OSError as error:
            raise ConfigError(self._file, "daemon.listen_peers", f"cannot listen: {error}") from error
        self._log.info("peers connect to %s", ", ".join(f"{TCP}{url_address(*one)}" for one in self.addresses))
        self._start()
        if self._lender is not None:
            self._lender.start()

    def configure(self, peers: Peers) -> None:
        """Let others ask from now on. Who has borrowed over NIXL could read RAM until the process that lends ends."""
        gone = self._peers.tenants.keys() - peers.tenants.keys()
        self._peers = peers
        if gone and self._lender is not None:
            self._lender.replace()

    async def close(self) -> None:
        """End the process that sends. What it was lent is free when its death is proven, within a second."""
        self._closed = True
        for listening in self._listening:
            listening.close()
        if self._lender is not None:
            await self._lender.close()
        if self._respawn is not None:
            self._respawn.cancel()
        if self._child is not None:
            self._died.clear()
            self._kill()
            try:
                await asyncio.wait_for(self._died.wait(), _DEATH_SECONDS)
            except TimeoutError:
                self._child.forget()
        self._questions.clear()
        self._end_timers()

    # The process

    def _start(self) -> None:
        self._respawn = None
        try:
            fds = [one.fileno() for one in self._listening]
            lanes = Lane.STREAM if self._lender is None else Lane.NIXL
            self._child = child = ProvenChild(
                _MODULE,
                lambda socket_fd: (pack_parts(self._data), socket_fd, os.getpid(), *self._files, lanes, *fds),
                (*(fd for fd, _ in self._data), *fds),
                niceness=_NICENESS, loop=self._loop, listener=self,
            )  # fmt: skip
        except OSError as error:
            self._start_later(f"cannot be started: {error}")
            return
        self._killed = False
        self._started_at = self._loop.time()
        self._count("peer_servers.started", 1)
        try:
            self._worker = self._leases.workers.started(child.pid)
        except NoRoom as error:
            self._log.warning("peers: their server cannot be written down: %s", error.message)
            self._worker = -1
            self._kill()

    def _start_later(self, why: str) -> None:
        if self._closed:
            return
        seconds = self._backoff.next_seconds()
        self._log.warning("peers: their server %s; the next one starts in %.1f s", why, seconds)
        self._respawn = self._loop.call_later(seconds, self._start)

    def _kill(self) -> None:
        if self._child is not None and not self._killed:
            self._killed = True
            if not self._closed:
                self._count("peer_servers.killed", 1)
            self._child.kill()

    def _overdue(self, lease: int) -> None:
        self._log.warning("peers: their server %s did not end lease %d in time; it is killed", self.pid, lease)
        self._kill()

    def _end_timers(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    # What it says (`ChildListener`)

    def take(self, received: bytearray) -> list[tuple[int, _Up]]:
        return list(TO_DAEMON.take(received))

    def handle(self, number: int, message: _Up) -> None:
        handle = partial(self._guard.call, "peers", self._handle, number, message)
        if isinstance(message, AskLocate | AskPull | AskSummary):
            self._questions.call(handle)  # a connection has one at most, and asks no other before the answer
        else:
            handle()

    def broken(self, why: str) -> None:
        self._log.error("peers: their server %s: %s", self.pid, why)
        self._kill()

    def died(self, status: int) -> None:
        self._questions.clear()  # their numbers mean others to the next one
        self._summaries.forget()
        self._end_timers()
        self._borrowed.clear()
        self._serve_borrowers()
        self._count(f"peer_pulls.{Sent.CUT}", len(self._leases))
        self._guard.call("peers", self._leases.end_all)
        self._readers.ended_all()
        if self._worker >= 0:
            self._guard.call("peers", self._leases.workers.dead, self._worker)
        self._child, self._worker = None, -1
        self._died.set()
        if not self._killed:
            self._count("peer_servers.crashed", 1)
        self._backoff.ran(self._loop.time() - self._started_at)
        self._start_later(f"ended with {status}")

    def _handle(self, number: int, message: _Up) -> None:
        match message:
            case AskLocate():
                self._answer(number, self._locate(message))
            case AskPull():
                self._pull(number, message)
            case AskSummary(names):
                self._summarize(number, names)
            case Ended():
                self._end(message)
            case Unconnected(reason, times):
                known = reason if reason in UNCONNECTED else "handshake"
                self._count(f"peer_refused_connections.{known}", times)

    def _answer(self, number: int, answer: _Down) -> None:
        if self._child is not None:
            self._child.send(FROM_DAEMON.pack(answer, number))

    def _tell(self, words: SummaryWords) -> None:
        self._answer(0, words)

    def _summarize(self, number: int, names: tuple[str, ...]) -> None:
        allowed, tenant = self._peers.tenant_of(names)
        if not allowed:
            self._count("peer_refused_connections.not_allowed", 1)
            self._answer(number, Refused(Refusal.NOT_ALLOWED))
            return

        def gathered(words: Gathered) -> None:
            same = self._peers.tenant_of(names) == (True, tenant)  # else a reload has come meanwhile
            self._answer(number, words if same else Refused(Refusal.NOT_ALLOWED))

        gathers = self._summaries.ask(tenant, gathered)
        self._count(f"peer_given_summaries.{'new' if gathers else 'kept'}", 1)

    def _locate(self, question: AskLocate) -> Located | Refused:
        allowed, tenant = self._peers.tenant_of(question.names)
        if not allowed:
            self._count("peer_refused_connections.not_allowed", 1)
            return Refused(Refusal.NOT_ALLOWED)
        lengths = self._leases.locate(tenant, ((one.namespace, one.key, one.kind) for one in question.wanted))
        absent, pending = lengths.count(ABSENT), lengths.count(UNKNOWN)
        self._count("peer_located_objects.found", len(lengths) - absent - pending)
        self._count("peer_located_objects.absent", absent)
        self._count("peer_located_objects.pending", pending)
        return Located(lengths, self._arena_id)

    def _pull(self, number: int, question: AskPull) -> None:
        """Lease an object. It may have to be read from a disk first, and the process may have ended then."""
        allowed, tenant = self._peers.tenant_of(question.names)
        if not allowed:
            self._answer(number, self._refused(Refusal.NOT_ALLOWED))
            return
        asks = self._child

        def read(why_not: Refusal | None) -> None:
            if self._child is asks:
                self._answer(number, self._lease(question, why_not))

        if self._why_not_lent(question) or not self._leases.read(tenant, question.name, read):
            read(None)

    @property
    def _nixl(self) -> Lender | None:
        """Return the agent that lends over NIXL now."""
        return None if self._lender is None else self._lender.lender

    def _why_not_lent(self, question: AskPull) -> Refusal | None:
        return Refusal.NOT_LENT if question.borrows and self._nixl is None else None

    def _lease(self, question: AskPull, why_not: Refusal | None) -> Granted | Refused:
        """Lease an object to who is a peer now. `why_not`: there is a reason already."""
        allowed, tenant = self._peers.tenant_of(question.names)
        if not allowed:  # a reload has come while it was read
            return self._refused(Refusal.NOT_ALLOWED)
        lease = why_not or self._why_not_lent(question) or self._leased(tenant, question.name)
        reader = self._peers.name_of(question.names), tenant
        if isinstance(lease, Refusal):
            self._readers.refused(*reader, lease)
            return self._refused(lease)
        self._readers.leased(*reader, lease.number, question.name.raw_bytes)
        late = self._lease_seconds + CONFIRM_SECONDS
        self._timers[lease.number] = self._loop.call_later(late, self._overdue, lease.number)
        if question.borrows:
            self._borrowed.add(lease.number)
            self._serve_borrowers()
        return Granted(
            lease.number, lease.raw_sum, lease.generation, self._lease_seconds, lease.extents,
            self._nixl if question.borrows else None,
        )  # fmt: skip

    def _serve_borrowers(self) -> None:
        if self._lender is not None:
            self._lender.serve(on=bool(self._borrowed))

    def _refused(self, why: Refusal) -> Refused:
        self._count(f"peer_pulls.{why}", 1)
        return Refused(why)

    def _leased(self, tenant: str | None, name: ObjectName) -> PeerLease | Refusal:
        if self._killed or self._worker < 0:
            return Refusal.BUSY
        try:
            return self._leases.lease(tenant, name, self._worker)
        except (KvDepotError, LookupError) as error:  # nothing can be lent to this process
            self._log.warning("peers: nothing can be lent to their server %s: %s", self.pid, error)
            self._kill()
            return Refusal.BUSY

    def _end(self, ended: Ended) -> None:
        timer = self._timers.pop(ended.lease, None)
        if timer is not None:
            timer.cancel()
        if self._leases.end(ended.lease):
            self._readers.ended(ended.lease, ended.sent, ended.sent_bytes)
            lane = Lane.NIXL if ended.lease in self._borrowed else Lane.STREAM
            self._count(f"peer_pulls.{ended.sent}", 1)
            self._count(f"peer_sent_bytes.{lane}", ended.sent_bytes)
        self._borrowed.discard(ended.lease)
        self._serve_borrowers()
