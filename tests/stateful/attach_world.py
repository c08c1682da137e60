"""The daemon's own listener and proxies over the engine's tables, and processes of a fake kernel that come and go.

The sockets are real and so is the loop. What the world knows of its own accord: who owns a slot, who may write what.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from kvdepot.core.arena import LentMode
from kvdepot.core.calls import AttachCall, DeclareCall
from kvdepot.proto import codec
from kvdepot.server.attach import streams
from kvdepot.server.attach.attach import ArenaOffer, AttachListener
from kvdepot.server.attach.streams import StreamProxies
from kvdepot.server.depot.sessions.session import Session
from kvdepot.server.depot.sessions.workers import Workers
from kvdepot.server.depot.tree.rows import COMMITTED
from kvdepot.server.depot.types import Attached, Liveness, Owner, ProcessIdentity, TierConfig
from kvdepot.server.platform import processes
from kvdepot.server.platform.addresses import ATTACH_SUFFIX
from kvdepot.server.storage.base import Loan, Tier, WorkerRegistry

from tests.fakes.process_kernel import FakeKernel, FakeProcess, Sight, file_of
from tests.rigs.engine_rig import BOOT, Client, Rig, audit, path, unpack
from tests.stateful.attach_owners import STREAMS_MAX, Owners, Parties

GRACE_SECONDS = 60.0
_LOG = logging.getLogger("attach-world")
_LOG.disabled = True
_TURNS = 6
"""Of the loop, until all that has come is dealt with: accepted, read, answered; a call socket takes some."""
_NO_CALLS: Any = None  # nobody makes one


def _descriptors(_: int) -> tuple[int, int]:
    return os.open(os.devnull, os.O_RDWR), os.open(os.devnull, os.O_RDONLY)


class ListenerRig(Rig):
    """Asks the daemon's own code who lives."""

    registry: Workers

    def liveness(self, identity: ProcessIdentity) -> Liveness:
        return processes.liveness(identity, BOOT)

    def identify(self, pid: int) -> ProcessIdentity:
        return processes.identify(pid, None, BOOT)

    def _tiers(self, registry: WorkerRegistry) -> list[tuple[Tier, TierConfig]]:
        assert isinstance(registry, Workers)
        self.registry = registry
        return []


@dataclass(eq=False)
class Link:
    """One connection that was attached. `holder` touches the extents: the process that connected, or its proxy."""

    socket: socket.socket
    process: FakeProcess
    holder: FakeProcess
    slot: int
    token: bytes
    session: Session
    engine_id: str
    client: Client | None  # of a scheduler: nobody else makes calls
    lifeline: list[int]

    @property
    def scheduler(self) -> bool:
        return self.client is not None


@dataclass(eq=False)
class Held:
    """What an engine was granted and has not given back: some of `holders` may write it as long as they live."""

    engine_id: str
    process: FakeProcess
    lease: int
    extents: list[tuple[int, int]]
    holders: list[FakeProcess]

    @property
    def living(self) -> bool:
        return not all(holder.ended for holder in self.holders)


@dataclass(eq=False)
class Worker:
    process: FakeProcess
    number: int
    loans: list[Loan] = field(default_factory=list)


class _Proxy:
    """A stream proxy, as `subprocess.Popen` shows it."""

    def __init__(self, process: FakeProcess, owner: Owner, theirs: socket.socket, *, hangs: bool) -> None:
        self.process = process
        self.owner = owner  # of the process that it serves
        self.pid = process.pid
        self._theirs = theirs
        self._hangs = hangs

    def poll(self) -> int | None:
        return 0 if self.process.ended else None

    def wait(self) -> int:
        return 0

    def kill(self) -> None:
        if not self._hangs:
            self.end()

    def end(self) -> None:
        self._theirs.close()
        self.process.end()


class AttachWorld:
    """All that processes do to one daemon, and what must hold whatever they do."""

    def __init__(self, kernel: FakeKernel, parties: Parties) -> None:
        self._stack = contextlib.ExitStack()
        gc.collect()  # descriptors that tests of before have dropped
        self._descriptors = _open_descriptors()
        self.kernel = kernel
        self._stack.enter_context(kernel.installed())
        self._stack.enter_context(parties.installed())
        self._stack.enter_context(mock.patch.object(streams, "spawn", self._spawn))
        self.loop = asyncio.new_event_loop()
        self.directory = Path(tempfile.mkdtemp(prefix="kvd", dir="/tmp"))
        self.parties = parties
        self.identities = Owners(kernel, parties)
        self.rig = ListenerRig(
            data_pages=parties.data_pages, rows=256, lent_rows=256, grace_seconds=GRACE_SECONDS, tenants=parties.budgets
        )
        self.links: list[Link] = []
        self.held: list[Held] = []
        self.workers: list[Worker] = []
        self.proxies: dict[int, _Proxy] = {}
        self.proxies_hang = False
        self.connecting: FakeProcess | None = None
        self.owners: dict[int, FakeProcess] = {}
        self.schedulers: dict[Session, set[FakeProcess]] = {}  # also those of earlier runs
        self.paths = 0
        self._listen()

    def _listen(self) -> None:
        proxies = StreamProxies(
            arena_fds=(-1, -1), parts=[-1], part_of=lambda _: 0,
            count_max=STREAMS_MAX, mode=0o600, group_id=-1, loop=self.loop, log=_LOG,
            tenants=len(self.parties.budgets),
            count=self.rig.depot.counters.add, starts_per_second=1e6,
        )  # fmt: skip
        self.listener = AttachListener(
            depot=self.rig.depot, calls=_NO_CALLS, streams=proxies, loop=self.loop, log=_LOG, boot_id=BOOT,
            offer=ArenaOffer(1, (4096,), lambda _: 0, "1", _descriptors),
            tenants=self.parties.of,
        )  # fmt: skip
        self.listener.listen(self.directory / "d", 0o600, -1)
        self.listener.watch_adopted()
        self.turn()

    def _spawn(self, *_: object) -> tuple[subprocess.Popen[bytes], socket.socket, int]:
        ours, theirs = socket.socketpair()
        process = self.kernel.start()
        assert self.connecting is not None
        proxy: Any = _Proxy(process, self.identities.of(self.connecting), theirs, hangs=self.proxies_hang)
        self.proxies[process.pid] = proxy
        return proxy, ours, process.pidfd()

    def turn(self, turns: int = _TURNS) -> None:
        for _ in range(turns):
            self.loop.call_soon(self.loop.stop)
            self.loop.run_forever()

    # What processes do

    def attach(
        self, process: FakeProcess, engine_id: str, *, scheduler: bool, rank: int, stream: bool, calls: bool
    ) -> Link | None:
        """None: it was refused, which is right only where somebody else has the place."""
        before = set(self.rig.depot._sessions.attachments.values())
        connection = self.kernel.connect(process, f"{self.directory / 'd'}{ATTACH_SUFFIX}")
        call = AttachCall(
            1, 1, engine_id, scheduler=scheduler, rank=rank, world_size=1, stream=stream, calls=calls and scheduler
        )
        connection.send(codec.encode_attach_call(call))
        self.connecting = process
        self.turn()
        answer, received, _, _ = socket.recv_fds(connection, 8192, 4)
        reply = codec.decode_attach_reply(answer)
        if not reply.protocol:
            connection.close()
            self._check_refusal(process, engine_id, reply.error)
            return None
        name = connection.getsockname()
        (ours,) = [one for one in self.listener._connections.values() if one.socket.getpeername() == name]
        slot = ours.attachment
        assert slot is not None
        holder = process
        if stream:
            proxy = ours.proxy
            assert proxy is not None
            holder = self.proxies[proxy.pid].process
        kept = received[:1] if stream else []
        for fd in received[len(kept) :]:
            os.close(fd)
        attachment = self.rig.depot._sessions.attachments[slot]  # the slot may be that of a session that has made room
        assert attachment not in before or self.owners[slot] is holder, "it joined another process's attachment"
        self.owners[slot] = holder
        session = attachment.session
        self.identities.attached(slot, process, session)
        others = [one for one in self.links if one.token == reply.session]
        assert all(one.slot == slot for one in others), "the token of another attachment"
        spec = self.identities.spec(process)
        client = Client(self.rig, Attached(reply.session, slot), spec) if scheduler else None
        link = Link(connection, process, holder, slot, reply.session, session, engine_id, client, kept)
        self.links.append(link)
        self._note_schedulers(session)
        if scheduler:
            self._declare(link)
        self.check()
        return link

    def _check_refusal(self, process: FakeProcess, engine_id: str, error: str) -> None:
        if self.identities.check_refusal(self.rig, process, engine_id, error):
            return
        assert "already" in error, error
        if "streams already" in error:
            running = [one.owner for one in self.proxies.values() if self._runs(one)]
            assert self.identities.has_its_proxies(process, running), "it has not got its share of proxies"
            return
        others = [
            self.owners[one.slot]
            for one in self.rig.depot._sessions.attachments.values()
            if one.session.engine == self.identities.engine(process, engine_id) and not one.session.ended
        ]
        known = process.sight is Sight.ALL or (self.kernel.numbers and self.kernel.names_peers)
        assert any(one is not process or not known for one in others), "refused for itself, or for another owner"

    def _note_schedulers(self, session: Session) -> None:
        """A session may be of an earlier run, and its scheduler of before have no connection any more."""
        schedulers = {self.owners[one.slot] for one in session.attachments.values() if one.scheduler}
        self.schedulers.setdefault(session, set()).update(schedulers)

    def _declare(self, link: Link) -> None:
        """It says what it still holds, and is told what of it is lost: nothing, if it is known to have been here."""
        mine = [one for one in self.held if one.engine_id == link.engine_id and one.process is link.process]
        assert link.client is not None
        self.identities.check_apart(self.rig, link.client, link.process)
        self.rig.depot.declare(DeclareCall(link.token, tuple(one.lease for one in mine)))

    def store(self, link: Link) -> None:
        self.paths += 1
        lease, extents = self._reserve(link)
        if extents:
            assert link.client is not None
            link.client.commit(lease, *range(len(extents)))

    def reserve(self, link: Link) -> None:
        lease, extents = self._reserve(link)
        if extents:
            holders = [one.holder for one in self.links if one.session is link.session]
            self.held.append(Held(link.engine_id, link.process, lease, extents, holders))

    def _reserve(self, link: Link) -> tuple[int, list[tuple[int, int]]]:
        self.paths += 1
        assert link.client is not None
        lease, reply = link.client.reserve(path(self.paths, 2))
        self.identities.check_budget(self.rig, link.session)
        extents = [(offset, offset + length) for _, _, offset, length, _ in unpack(reply.extents)]
        for held in self.held:
            for begin, end in held.extents if held.living else ():
                assert not any(begin < stop and start < end for start, stop in extents), "granted to two"
        return lease, extents

    def acknowledge(self, held: Held, link: Link) -> None:
        """The engine that was granted it abandons it, if it is this session's."""
        if link.client is not None and held.lease in link.session.leases:
            link.client.abandon(held.lease)
            self.held.remove(held)

    def disconnect(self, link: Link) -> None:
        self._forget(link)
        self.turn()

    def _forget(self, link: Link) -> None:
        self.links.remove(link)
        link.socket.close()
        for fd in link.lifeline:
            os.close(fd)

    def die(self, process: FakeProcess, *, first_the_sockets: bool, forked: bool) -> None:
        """`forked`: a child has copies of its sockets, so that only the pidfd tells of the end."""
        for link in [one for one in self.links if one.process is process and not forked]:
            self._forget(link)
        if first_the_sockets:
            self.turn()
        process.end()
        self.turn()

    def kill_proxy(self, proxy: _Proxy) -> None:
        proxy.end()
        self.turn()

    # What the daemon does

    def start_worker(self) -> None:
        process = self.kernel.start()
        number = self.rig.registry.started(process.pid)
        assert number not in self.owners, "its slot is somebody's"
        self.owners[number] = process
        self.workers.append(Worker(process, number))

    def work(self, worker: Worker) -> None:
        """It is handed an object, or answers the one that it has."""
        if worker.loans:
            worker.loans.pop().end()
            return
        rows = self.rig.depot._ram.rows
        committed = [row for row in range(rows.count) if rows.state[row] == COMMITTED]
        if committed:
            loan = self.rig.depot._tiering.promotions._loans.loan(committed[0], LentMode.READ)
            assert loan.begin(worker.number), "refused"
            worker.loans.append(loan)

    def end_worker(self, worker: Worker) -> None:
        self.workers.remove(worker)
        worker.process.end()
        for loan in worker.loans:
            loan.end()
        self.rig.registry.dead(worker.number)
        del self.owners[worker.number]

    def tick(self, seconds: float) -> None:
        self.rig.now += seconds
        self.rig.depot.tick()
        self.turn()
        for session in self.rig.depot._sessions.by_slot.values():
            idle = not session.connected and not session.leases and not session.worker
            assert not idle or self.rig.now - session.idle_since < GRACE_SECONDS, "a session that nobody needs stays"

    def restart(self, *, workers_live: bool, dying: Sequence[FakeProcess]) -> None:
        """`dying`: these end while no daemon runs."""
        self.listener.close()
        self.turn()
        for link in list(self.links):
            assert link.socket.recv(1) == b"", "the connection outlives the daemon"
            self._forget(link)
        self.schedulers.clear()
        for worker in self.workers:
            if not workers_live:
                worker.process.end()
        self.workers.clear()
        for process in dying:
            process.end()
        self.rig.crash()
        self.identities.restarted(self.rig)
        self._listen()

    # What must hold at any time

    def check(self) -> None:
        attachments = self.rig.depot._sessions.attachments
        self.owners = {slot: owner for slot, owner in self.owners.items() if slot in attachments}
        assert self.owners.keys() == attachments.keys()
        self._check_watches()
        self._check_links()
        self.identities.check(self.rig)
        audit(self.rig.depot)

    def _check_watches(self) -> None:
        """Whoever owns a slot is watched for it, and every pidfd that is open is such a watch, or a proxy's own."""
        expected = {one.process: 1 for one in self.proxies.values() if not one.process.ended and self._runs(one)}
        for slot, attachment in self.rig.depot._sessions.attachments.items():
            owner, watch = self.owners[slot], attachment.watch
            if watch is not None:
                assert file_of(os.fstat(watch._pidfd)) == owner.file, "it watches another process"  # type: ignore[attr-defined]
                assert not owner.ended, "its end went unnoticed"
                expected[owner] = expected.get(owner, 0) + 1
            ours = any(worker.number == slot for worker in self.workers)
            connected = attachment.connections > 0 and not ours
            nameable = self.kernel.names_peers or owner.sight is not Sight.NOTHING
            assert watch is not None or not (connected and nameable), "nobody would notice its end"
        assert dict(self.kernel.open_pidfds()) == expected, "a pidfd that belongs to no slot"

    def _runs(self, proxy: _Proxy) -> bool:
        return proxy.pid in {one.pid for one in self.listener._streams._proxies.values()}

    def _check_links(self) -> None:
        """Nobody loses a connection or a session but by an end of its own, or of its scheduler."""
        sessions = self.rig.depot._sessions
        for link in list(self.links):
            if self._at_end(link):
                own = [link.holder, *self.schedulers.get(link.session, ())]
                assert any(one.ended for one in own), "closed, and all who matter live"
                self._forget(link)
                continue
            if sessions.attachments[link.slot].watch is not None:  # else a child that has the socket keeps it open
                assert not link.holder.ended
            assert sessions.by_token[link.token] is sessions.attachments[link.slot]
            assert sessions.attachments[link.slot].session is link.session
            assert sessions.attachments[link.slot].connections == sum(one.slot == link.slot for one in self.links)

    @staticmethod
    def _at_end(link: Link) -> bool:
        with contextlib.suppress(BlockingIOError):
            return link.socket.recv(1, socket.MSG_PEEK) == b""
        return False

    def finish(self, processes_: Sequence[FakeProcess]) -> None:
        """When all have ended nothing is left, but for what nobody can know the end of."""
        for worker in list(self.workers):
            self.end_worker(worker)
        for proxy in list(self.proxies.values()):
            proxy.end()
        for process in processes_:
            self.die(process, first_the_sockets=False, forked=False)
        for one in self.kernel.all:
            one.end()
        self.turn()
        self.check()
        for link in list(self.links):  # its child had the socket, and has ended too
            assert self.rig.depot._sessions.attachments[link.slot].watch is None, "its end went unnoticed"
            self.disconnect(link)
        self.tick(0.0)
        self.tick(GRACE_SECONDS + 1)
        self.check()
        for slot, attachment in self.rig.depot._sessions.attachments.items():
            assert self.owners[slot].sight is not Sight.ALL, "it ended, and its slot is taken"
            assert attachment.watch is None
            assert attachment.session.leases
        if not self.owners:
            status = self.rig.depot.status()
            assert (status.tier.lent_bytes, status.sessions) == (0, ())
            assert not self.rig.depot._sessions.by_token

    def close(self) -> None:
        for link in list(self.links):
            self._forget(link)
        self.listener.close()
        self.turn()
        self.loop.close()
        for proxy in self.proxies.values():
            proxy.end()
        shutil.rmtree(self.directory)
        self._stack.close()
        self.kernel.close()
        left = _open_descriptors() - self._descriptors  # another thread of this process may close some of before
        assert not left, f"left: {left}"


def _open_descriptors() -> set[tuple[str, str]]:
    """Return each descriptor of this process with what it refers to."""
    found = set()
    for descriptor in list(Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            found.add((descriptor.name, str(descriptor.readlink())))
    return found
