"""The composition root: creates, connects, starts and stops all parts of the daemon.

It decides nothing about objects. Its states are starting, serving, stopping and stopped; it never goes back.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import secrets
import time
from dataclasses import replace
from functools import partial
from importlib.metadata import version

from kvdepot.core import limits
from kvdepot.core.calls import Capabilities
from kvdepot.core.errors import ConfigError, KvDepotError, NoRoom
from kvdepot.core.proc_text import MEMORY_KINDS
from kvdepot.core.records import RequestRecord
from kvdepot.core.report import DaemonStatus, TierStatus
from kvdepot.server.arena.arena_file import NOTHING_KEPT, ArenaFile, KeptFiles, describe, open_arena
from kvdepot.server.arena.growing import Growing
from kvdepot.server.arena.holding import Holding, held_files
from kvdepot.server.arena.populate import RETRY_SECONDS, Growth
from kvdepot.server.attach.attach import ArenaOffer, AttachListener
from kvdepot.server.attach.streams import StreamProxies
from kvdepot.server.config import arena_directory
from kvdepot.server.config.config import Config
from kvdepot.server.config.depot_settings import depot_config
from kvdepot.server.config.memory_room import MIB, file_system
from kvdepot.server.config.set_quotas import SetQuotas
from kvdepot.server.config.tier_settings import depot_tier_config
from kvdepot.server.daemon.checksums import ChecksumService
from kvdepot.server.daemon.control import Control, Reread
from kvdepot.server.daemon.lower_tiers import LowerTiers
from kvdepot.server.daemon.operator_server import OperatorServer
from kvdepot.server.daemon.peer_source import PeerSource
from kvdepot.server.daemon.start_checks import arena_request, cannot_listen, check_host, lock_file, locked_files
from kvdepot.server.daemon.state_file import StateFile
from kvdepot.server.depot.counters import Counters
from kvdepot.server.depot.depot import Depot
from kvdepot.server.depot.types import Liveness, ProcessIdentity
from kvdepot.server.observe.health import HttpListener, Readiness, readiness
from kvdepot.server.observe.live_figures import LiveFigures
from kvdepot.server.observe.metrics import exposition
from kvdepot.server.observe.summary import summary_line
from kvdepot.server.observe.tracing import Tracing
from kvdepot.server.observe.verdicts import Verdicts
from kvdepot.server.platform import processes
from kvdepot.server.platform.accepting import SPARE_DESCRIPTORS, SpareDescriptors
from kvdepot.server.platform.addresses import host_and_port
from kvdepot.server.platform.file_lock import InodeLock
from kvdepot.server.platform.guard import engine_guard
from kvdepot.server.platform.logs import drain, make_log
from kvdepot.server.platform.service_notify import ServiceNotifier
from kvdepot.server.rpc.depot_calls import DepotCalls
from kvdepot.server.rpc.depot_service import depot_service
from kvdepot.server.rpc.listener import ENGINES, GrpcListener

TABLES_NAME, OTHERS_NAME = "arena", "arena-data"
"""Of the arena's descriptors, where the supervisor keeps them. Generations and data have one name."""
TICK_SECONDS = 0.1
TRIM_SECONDS = 0.005
DRAIN_SECONDS = 5.0
"""What an orderly stop waits for outstanding checksums: without them the next daemon drops the objects."""
CLOSE_SECONDS = 7.0
"""What tiers get to finish what is in flight: with the rest of a stop, less than 10 s whatever a medium does."""
GRACE_SECONDS = 1.0
"""What calls in flight get at a stop."""
_DRAIN_STEP_SECONDS = 0.01


class Node:
    """One daemon. Locks and arena are taken in the constructor, which is where a start is refused.

    `notify` tells the supervisor. `kept`: descriptors that it kept over a restart, taken over. `reread` is asked
    at a reload; None: there is no file.
    """

    def __init__(
        self,
        config: Config,
        *,
        log: logging.Logger,
        loop: asyncio.AbstractEventLoop,
        notify: ServiceNotifier,
        kept: KeptFiles = NOTHING_KEPT,
        reread: Reread | None,
    ) -> None:
        config = config.placed()
        self._notify = notify
        self._reread = reread
        self._config = config
        self._log = log
        self._loop = loop
        self._started_at = time.monotonic()
        self._spare = SpareDescriptors(SPARE_DESCRIPTORS, log, loop.time)
        self._boot_id = processes.read_boot_id()
        self._version = version("kvdepot")
        check_host(config)
        self._locks = [lock_file(config, *file) for file in locked_files(config)]
        for event in () if config.tables.ram.path else arena_directory.move_former(config.arena_path):
            log.warning("arena: %s", event)
        self._state = StateFile(config.state_path)
        self._arena = self._open_arena(kept + held_files(config.arena_path))
        notify.keep(TABLES_NAME, self._arena.tables_fd)
        notify.keep(OTHERS_NAME, *self._arena.files[1:])
        self._quotas = SetQuotas()
        self._serving = False
        self._stopping = False
        self._tick_handle: asyncio.TimerHandle | None = None
        self._trim_handle: asyncio.TimerHandle | None = None
        self._health_task: asyncio.Task[None] | None = None
        self._told_ready = False
        self._compose()

    def _compose(self) -> None:
        arena, superblock = self._arena, self._arena.superblock
        self._counters = counters = Counters()
        self._guard = engine_guard(counters.add)
        self._verdicts = Verdicts(counters, time.monotonic)
        self._holding = Holding(
            arena, may_start=not self._notify.is_heard, count=counters.add, loop=self._loop, log=self._log
        )
        self._tiers = tiers = LowerTiers(self._config, arena=arena, counters=counters, loop=self._loop, log=self._log)
        self._tracing = self._make_tracing()
        self._depot = Depot(
            arena.tables,
            arena_id=superblock.arena_id,
            run=superblock.run,
            clock=time.monotonic,
            random_bytes=secrets.token_bytes,
            config=depot_config(self._config, self._quotas),
            counters=counters,
            tiers=tiers.make,
            identify=self._identify,
            request_over=None if self._tracing is None else partial(self._trace, self._tracing),
        )
        numbers = {name: number for number, name in enumerate(self._config.parts)}

        def part_of(tenant: str | None) -> int:
            """Return the part of the data of a tenant. Nobody of another tenant is given it."""
            return numbers[tenant or ""] if numbers else 0

        offer = ArenaOffer(superblock.arena_id, arena.layout.parts, part_of, self._version, arena.open_for_engine)
        tables = self._config.tables
        streams = StreamProxies(
            arena_fds=(arena.tables_fd, arena.generations_fd), parts=[fd for fd, _ in arena.parts], part_of=part_of,
            count_max=tables.sessions.streams, mode=tables.daemon.mode_bits, tenants=len(tables.tenant),
            group_id=tables.daemon.group_id, loop=self._loop, log=self._log, count=counters.add,
        )  # fmt: skip
        self._streams = streams
        self._control = Control(
            self._depot, self._state, self._config,
            reread=self._reread, configure=self._configure,
            readiness_changed=self._tell_readiness, quotas=self._quotas, log=self._log,
        )  # fmt: skip
        self._operators = OperatorServer(
            self._config, depot=self._depot, control=self._control, status=self.status,
            loop=self._loop, log=self._log, spare=self._spare, count=counters.add,
        )  # fmt: skip
        self._peers = PeerSource(
            self._config, arena.parts, self._depot.peer_leases, arena_id=superblock.arena_id, loop=self._loop,
            log=self._log, counters=counters,
        )  # fmt: skip
        self._control.restore()
        self._checksums = ChecksumService(
            arena=arena, depot=self._depot, loop=self._loop, log=self._log, quarantine=self._control.quarantine
        )
        self._growing = Growing(arena, memory_alone=tables.ram.sealed, loop=self._loop, grew=self._grew)
        calls = DepotCalls(
            self._depot,
            capabilities=self.capabilities, committed=self._checksums.wake, counters=counters, log=self._log,
        )  # fmt: skip
        self._attach = AttachListener(
            depot=self._depot, calls=calls, offer=offer, streams=streams,
            loop=self._loop, log=self._log, boot_id=self._boot_id, spare=self._spare, tenants=self._config.tenants,
        )  # fmt: skip
        self._grpc = GrpcListener((depot_service(calls),), ENGINES, sockets=len(tables.daemon.sockets))
        self._live = LiveFigures(counters, time.monotonic, self.status, self._depot.records.latest)
        self._http = HttpListener(
            metrics=exposition(self.status, counters.histograms), summary=lambda: summary_line(self.status()),
            health=self.readiness, figures=self._live.figures if tables.daemon.page else None,
            log=self._log, spare=self._spare,
        )  # fmt: skip

    async def start(self) -> None:
        """Adopt, populate, listen. Raises ConfigError when an address cannot be had; then `stop` is still due."""
        self._log.info("arena opened: %s", describe(self._arena))
        if self._config.tables.ram.sealed:
            self._holding.start()
        report = self._depot.adopt(self._alive)
        self._log.info("adopted objects: %s", report)
        self._checksums.start()
        self._growing.free_unused(self._log, lent=report.lent_beyond > 0)
        self._growing.start()
        tables = self._config.tables.daemon
        try:
            for path in tables.sockets:
                self._attach.listen(path, tables.mode_bits, tables.group_id)
            self._attach.watch_adopted()
            self._start_tiers()
            await self._operators.listen(tables)
            await self._peers.listen()
            await self._grpc.listen(tables.sockets, tables.mode_bits, tables.group_id)
        except OSError as error:
            raise ConfigError(self._config.file, "daemon.listen", f"cannot listen: {error}") from error
        self._log.info("listening on %s", ", ".join(f"unix://{path}" for path in tables.sockets))
        await self._listen_http(tables.metrics)
        self._serving = True
        await self._tell_readiness()
        self._tick()
        self._notify("READY=1")
        # What lives now lives long: the collector need not look at it again (design.md#index).
        gc.collect()
        gc.freeze()

    async def stop(self) -> None:
        """Stop granting, let calls in flight end, drain the sums, leave the arena to the next daemon."""
        self._stopping = True
        self._log.info("stopping")
        self._notify("STOPPING=1")
        self._attach.refuse_new()
        await self._set_serving(serving=False)
        await asyncio.gather(
            self._grpc.stop(GRACE_SECONDS),
            self._operators.stop(GRACE_SECONDS),
            self._attach.finish_calls(GRACE_SECONDS),
            self._peers.close(),
        )
        await self._control.close(GRACE_SECONDS)
        drained, closed, _ = await asyncio.gather(self._drain(), self._close_tiers(), self._close_tracing())
        for handle in (self._tick_handle, self._trim_handle):
            if handle is not None:
                handle.cancel()
        self._http.close()
        self._attach.close()
        await self._operators.close()
        self._checksums.close()
        self._holding.close()
        self._growing.stop()
        kept = "" if drained else ", some objects without a checksum will be dropped"
        if not closed:
            self._log.warning("tier not closed: no answer in %.0f s, its device may hang", CLOSE_SECONDS)
        self._log.info("stopped: the arena %s stays for the next daemon%s", self._arena.path, kept)

    def begin_reload(self) -> asyncio.Task[None]:
        """Start the reload that SIGHUP asks for. The log has the outcome; a refused reload changes nothing."""
        return self._guard.task("task", self._reload(), self._loop)

    async def _reload(self) -> None:
        with contextlib.suppress(KvDepotError):
            await self._control.reload()

    async def _tell_readiness(self) -> None:
        found = self.readiness()
        await self._set_serving(serving=found.ready)
        if found.ready != self._told_ready:
            self._told_ready = found.ready
            if found.ready:
                self._log.info("ready to serve")
            else:
                self._log.info("not ready: %s", found.reason)

    async def _set_serving(self, *, serving: bool) -> None:
        for server in (self._grpc, self._operators):
            await server.set_serving(serving)

    def _renew_readiness(self) -> None:
        """Tell of another readiness. What failed is tried again at the next tick."""
        if self.readiness().ready != self._told_ready and (self._health_task is None or self._health_task.done()):
            self._health_task = self._guard.task("task", self._tell_readiness(), self._loop)

    def _configure(self, config: Config) -> None:
        """Run with another configuration, in which only live keys differ."""
        self._config, tables = config, config.tables
        tiers = {tier.name: depot_tier_config(tier) for tier in tables.tier}
        self._depot.configure(depot_config(config, self._quotas), tiers)
        self._tiers.configure(config)
        self._streams.count_max = tables.sessions.streams
        self._operators.configure(config.operators)
        self._peers.configure(config.peers)
        make_log(tables.log.level, tables.log.format)

    def readiness(self) -> Readiness:
        return readiness(
            serving=self._serving,
            stopping=self._stopping,
            ready_bytes=self._growing.now.ready_bytes,
            growth_reason=self._growing.now.reason,
            tiers_reason=self._tiers.trouble,
            draining=self._depot.switches.draining,
        )

    def capabilities(self) -> Capabilities:
        return Capabilities(
            protocol_min=limits.PROTOCOL_MIN,
            protocol_max=limits.PROTOCOL_MAX,
            daemon_version=self._version,
            arena_id=self._arena.superblock.arena_id,
            ready_bytes=self._growing.now.ready_bytes,
            limits=limits.advertised(),
        )

    def status(self) -> DaemonStatus:
        health = self.readiness()
        depot = self._depot.status()
        status = DaemonStatus(
            daemon_version=self._version,
            pid=os.getpid(),
            uptime_seconds=time.monotonic() - self._started_at,
            ready=health.ready,
            reason=health.reason,
            arena_id=self._arena.superblock.arena_id,
            run=self._arena.superblock.run,
            tiers=(self._tier(depot.tier), *depot.lower_tiers),
            sessions=depot.sessions,
            namespaces=depot.namespaces,
            quotas=depot.quotas,
            tenants=depot.tenants,
            counters=depot.counters,
            switches=self._depot.switches.status(),
            pins=self._depot.pins.statuses(),
            epochs=self._depot.invalidation.epochs,
            histograms=self._counters.histogram_statuses(),
            certificate_seconds_left=self._operators.certificate_seconds_left,
            readers=self._peers.readers(),
        )
        return replace(status, health=self._verdicts.health(status))

    def _open_arena(self, kept: KeptFiles) -> ArenaFile:
        config = self._config
        folder = config.arena_path.parent
        kind = file_system(folder)
        if kind and kind not in MEMORY_KINDS:
            self._log.warning("arena is on a disk: %s; set [ram] path to a directory on tmpfs or hugetlbfs", folder)
        self._tables_lock = InodeLock(config.arena_path, f"the arena {config.arena_path}")
        request, random_bytes = arena_request(config), secrets.token_bytes
        arena = open_arena(request, kept=kept, boot_id=self._boot_id, random_bytes=random_bytes, alive=self._alive)
        self._tables_lock.follow(arena.tables_fd)
        return arena

    def _start_tiers(self) -> None:
        """Have the tiers open. Raises ConfigError where another daemon has a directory."""
        try:
            self._depot.start_tiers()
        except ConfigError as error:
            raise ConfigError(self._config.file, error.key, error.reason, advice=error.advice) from error

    def _make_tracing(self) -> Tracing | None:
        """Return the tracing of the configuration. Raise ConfigError."""
        trace = self._config.tables.trace
        if not trace.endpoint:
            return None
        return Tracing(trace.endpoint, trace.sample, file=self._config.file, version=self._version, log=self._log)

    def _trace(self, tracing: Tracing, record: RequestRecord) -> None:
        """Trace a request that is over, after the engine's answer."""
        self._loop.call_soon(self._guard.call, "task", tracing.ended, record)

    async def _close_tiers(self) -> bool:
        try:
            await asyncio.wait_for(self._depot.close_tiers(), CLOSE_SECONDS)
        except TimeoutError:
            return False
        return True

    async def _close_tracing(self) -> None:
        if self._tracing is not None:
            await self._tracing.close()

    def _identify(self, pid: int) -> ProcessIdentity:
        """Return the identity of a child that is not reaped yet, so that its pid cannot be reused. Raise NoRoom."""
        try:
            return processes.identify(pid, None, self._boot_id)
        except OSError as error:
            raise NoRoom(f"cannot read when process {pid} started: {error.strerror}") from error

    def _alive(self, process: ProcessIdentity) -> Liveness:
        return processes.liveness(process, self._boot_id)

    def _tier(self, tier: TierStatus) -> TierStatus:
        state = "ready" if self._growing.now.done and not self._growing.now.reason else "growing"
        return replace(
            tier,
            capacity_bytes=self._config.capacity_bytes,
            ready_bytes=self._growing.now.ready_bytes,
            state="degraded" if self._growing.now.reason else state,
            reason=self._growing.now.reason,
        )

    def _grew(self, part: int, before: Growth, growth: Growth) -> None:
        self._depot.ready(growth.ready_bytes, part)
        if growth.reason and not before.reason:
            self._log.error("arena stopped growing: %s; retry every %.0f s", growth.reason, RETRY_SECONDS)
        elif before.reason and not growth.reason:
            self._log.info("arena grows again")
        if growth.done and (growth := self._growing.now).done:
            self._log.info("arena populated: %s", "locked into memory" if growth.locked else "not locked into memory")
        self._renew_readiness()
        self._notify(f"STATUS={self._progress()}")

    def _progress(self) -> str:
        """Return one line for the supervisor."""
        growth, size_bytes = self._growing.now, sum(self._arena.rooms)
        populated = f"{growth.ready_bytes // MIB} of {size_bytes // MIB} MiB of the arena are populated"
        return f"degraded: {growth.reason}" if growth.reason else populated

    def _tick(self) -> None:
        due, self._tick_handle = self._tick_handle, self._loop.call_later(TICK_SECONDS, self._tick)
        if due is not None:
            lag = self._loop.time() - due.when()
            self._guard.call("tick", lambda: self._counters.observe("loop_lag_seconds", lag))
        self._guard.each(
            "tick", self._tick_engine, self._checksums.wake, self._spare.refill, lambda: drain(self._log),
            self._renew_readiness, self._notify.alive, self._verdicts.note, self._live.note,
        )  # fmt: skip

    def _tick_engine(self) -> None:
        if self._depot.tick() and self._trim_handle is None:
            self._trim_handle = self._loop.call_later(TRIM_SECONDS, self._trim)

    def _trim(self) -> None:
        """Trim one slice between two ticks, so that no slice is long."""
        self._trim_handle = None
        if self._depot.trim():
            self._trim_handle = self._loop.call_later(TRIM_SECONDS, self._trim)

    async def _drain(self) -> bool:
        """Take the pending checksums. Return whether every committed object has one now."""
        until = self._loop.time() + DRAIN_SECONDS
        self._depot.finish_sums()
        while not self._checksums.drained:
            if self._loop.time() > until:
                return False
            await asyncio.sleep(_DRAIN_STEP_SECONDS)
        return True

    async def _listen_http(self, address: str) -> None:
        if not address:
            return
        try:
            bound = await self._http.listen(*host_and_port(address))
        except OSError as error:
            raise cannot_listen(self._config, error) from error
        self._log.info("metrics on http://%s/metrics, health on /healthz", bound)
