"""What operators change in a running daemon: the engine does it at once, then it is kept for the next run."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any, Final, Protocol, TypeVar

from kvdepot.core.control import (
    PIN_SECONDS_MAX,
    BumpCall,
    BumpReply,
    ConfigReply,
    EvictReply,
    PinCall,
    PinReply,
    PrefetchReply,
    QuotaEntry,
    QuotaSubject,
    ReloadReply,
    Switch,
    SwitchCall,
    SwitchReply,
    VerifiedTier,
    VerifyCall,
    VerifyReply,
    switch_states,
)
from kvdepot.core.errors import ConfigError, KvDepotError, LimitExceeded
from kvdepot.core.proc_text import MEMORY_KINDS
from kvdepot.core.report import PinStatus
from kvdepot.server.config import Config
from kvdepot.server.engine.engine import Engine
from kvdepot.server.guard import engine_guard
from kvdepot.server.memory_room import file_system
from kvdepot.server.own_thread import in_own_thread
from kvdepot.server.reloading import changes, refuse_what_needs_a_restart, values
from kvdepot.server.set_quotas import SetQuotas, spelled
from kvdepot.server.state_file import KeptPin, OperatorState, StateFile

Reread = Callable[[], Config]
"""Reads and checks the configuration again, the command line over it. Raises ConfigError."""


_STEP_SECONDS: Final = 0.1
"""As often as tiers tick."""
_TELL_SECONDS: Final = 0.5

Reply = TypeVar("Reply", covariant=True)
Result = TypeVar("Result")


class LongWork(Protocol[Reply]):
    """What an operator waits for, and sees going on."""

    @property
    def hurried(self) -> bool:
        """It waits for nothing but its turn."""

    def run_once(self) -> bool:
        """A slice; False when it is over."""

    def reply(self) -> Reply:
        """How far it is."""


class Control:
    """One daemon's. Every change is a line of the log.

    `configure` has the daemon run with another configuration; it cannot fail. `readiness_changed` is called when it
    has. `reread` is None where there is no file.
    """

    def __init__(
        self, engine: Engine, state: StateFile, config: Config, *,
        reread: Reread | None, configure: Callable[[Config], None],
        readiness_changed: Callable[[], Awaitable[None]], quotas: SetQuotas, log: logging.Logger,
    ) -> None:  # fmt: skip
        self._engine = engine
        self._guard = engine_guard(engine.counters.add)
        self._state = state
        self._config = config
        self._reread = reread
        self._configure = configure
        self._readiness_changed = readiness_changed
        self._log = log
        self._quotas = quotas
        self._reloading = asyncio.Lock()
        self._changing = set[asyncio.Task[Any]]()
        self._epochs = engine.voiding.epochs  # that are kept, or about to be
        self._verifications = 0
        self._prefetches = 0

    def restore(self) -> None:
        """What the run before was told. Raises ConfigError when that cannot be read."""
        if not self._state.writable:
            self._log.warning(
                "cannot write to %s: what operators switch off will be on after a restart", self._state.path.parent
            )
        kept, now = self._state.read(), time.time()
        switches = kept.switches
        self._engine.switches.restore(switches)
        self._epochs = self._engine.voiding.epochs = kept.epochs
        if kept.epochs.bump or kept.epochs.void:
            self._log.info(
                "epoch, as before: bump counter %d, %d namespaces void by themselves",
                kept.epochs.bump, len(kept.epochs.void),
            )  # fmt: skip
        self._quotas.restore(kept.quotas)
        if kept.quotas:
            self._configure(self._config)
        for entry in kept.quotas:
            self._log.info("quota is set, as before: %s: %s bytes", entry.subject, entry.capacity_bytes)
        for pin in kept.pins:
            if pin.until > now:
                # A clock that was set back makes none longer than it can be.
                seconds = min(pin.until - now, PIN_SECONDS_MAX)
                self._engine.pins.restore(pin.namespace_id, pin.key, seconds)
                self._log.info("pinned, as before, for %.0f s: %s", seconds, _shown(pin.namespace_id, pin.key))
        for switch, state in switch_states(switches).items():
            if state.anywhere_off:
                whom = "all namespaces" if state.off else ", ".join(one.hex() for one in state.off_namespaces)
                self._log.warning("%s are off, as before, for %s", switch, whom)

    # Switches

    async def switch(self, call: SwitchCall) -> SwitchReply:
        leases = self._switch(call)
        not_kept = await self._keep()
        return SwitchReply(self._engine.switches.status(), leases, not_kept)

    def quarantine(self, namespace_id: bytes) -> None:
        """Loads off for a namespace of which an audit has found wrong bytes, until an operator says otherwise."""
        if self._engine.switches.off(Switch.LOADS, namespace_id):
            return
        try:
            self._switch(SwitchCall(Switch.LOADS, on=False, namespace_id=namespace_id))
        except LimitExceeded:  # as many are off as can be by themselves
            self._switch(SwitchCall(Switch.LOADS, on=False))
        self._begin(self._kept())

    def _switch(self, call: SwitchCall) -> int:
        leases = self._engine.switch(call.switch, call.namespace_id, on=call.on)
        whom = f"namespace {call.namespace_id.hex()}" if call.namespace_id else "all namespaces"
        self._log.warning("%s switched %s for %s", call.switch, "on" if call.on else "off", whom)
        return leases

    def _begin(self, change: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        """A change that goes on to its end whoever asked for it: a caller may be gone by its deadline, or by ^C."""
        task = self._guard.task("task", change, asyncio.get_running_loop())
        self._changing.add(task)
        task.add_done_callback(self._changing.discard)
        return task

    async def close(self, seconds: float) -> None:
        """Wait as long as that for changes that are under way."""
        if self._changing:
            await asyncio.wait(self._changing, timeout=seconds)

    async def _keep(self) -> str:
        """Empty, or why the next run will not know."""
        return await asyncio.shield(self._begin(self._kept()))

    async def _kept(self) -> str:
        now = time.time()
        pins = tuple(KeptPin(one.namespace_id, one.key, now + one.seconds_left) for one in self._engine.pins.statuses())
        state = OperatorState(self._engine.switches.status(), pins, self._quotas.kept(), self._epochs)
        not_kept = await self._state.write(state)
        if not_kept:
            self._engine.counters.add("failed_state_writes")
            self._log.error("%s", not_kept)
        return not_kept

    async def drain(self, *, draining: bool) -> int:
        """Grant nothing more, or again; how many leases were granted before and have not ended."""
        leases = self._engine.drain(draining=draining)
        self._log.warning("draining: nothing is granted" if draining else "resumed")
        await self._readiness_changed()
        return leases

    # The epoch

    async def bump(self, call: BumpCall) -> BumpReply:
        """Make void what was stored so far: of a namespace, or of all.

        It is kept first, then done: no run gives a counter again under which one before has stored.
        """
        return await asyncio.shield(self._begin(self._bump(call)))

    async def _bump(self, call: BumpCall) -> BumpReply:
        if call.namespace_id:
            void = self._engine.voiding.void(call.namespace_id)
            epochs = self._epochs if void else self._epochs.with_void(call.namespace_id)
        else:
            epochs = self._epochs.with_all_void(call.to)
        changed = epochs != self._epochs
        self._epochs = epochs
        not_kept = await self._kept()
        done = self._engine.voiding.begin(self._epochs)  # with what another call has added meanwhile
        not_kept = await self._kept() or not_kept  # switches have gone over to the heirs
        whom = f"namespace {call.namespace_id.hex()}" if call.namespace_id else f"all, bump counter {epochs.bump}"
        self._log.warning(
            "epoch bumped: %s: %d namespaces with %d chunks are void, %d leases in progress",
            whom, done.namespaces, done.chunks, done.leases,
        )  # fmt: skip
        shared = tuple(tier.name for tier in self._config.tables.tier if tier.kind == "shared")
        return BumpReply(
            epochs, changed, done.namespaces, done.chunks, done.leases, shared, not_kept or self._volatile()
        )

    def _volatile(self) -> str:
        """What a reboot would do to what is kept."""
        path = self._state.path
        if not self._config.tables.tier or file_system(path.parent) not in MEMORY_KINDS:
            return ""
        return f"kept until the node reboots, which tiers outlive: {path} is in memory; [daemon] state names a file"

    # Contents

    async def pin(self, call: PinCall) -> PinReply:
        """Returns when what RAM has of it is pinned, as far as the share of pins goes."""
        pins = self._engine.pins
        pins.pin(call.namespace_id, call.key, call.seconds)
        await self._swept()
        found = pins.status(call.namespace_id, call.key) or PinStatus(call.namespace_id, call.key)  # it was short
        self._log.warning(
            "pinned for %.0f s: %s: %d objects, %d bytes",
            call.seconds, _shown(call.namespace_id, call.key), found.objects, found.bytes,
        )  # fmt: skip
        return PinReply(found, await self._keep())

    async def unpin(self, namespace_id: bytes, key: bytes) -> str:
        """Empty, or why the next run will not know."""
        self._engine.pins.unpin(namespace_id, key)
        await self._swept()
        self._log.warning("unpinned %s", _shown(namespace_id, key))
        return await self._keep()

    async def _swept(self) -> None:
        for _ in iter(self._engine.pins.run_once, False):
            await asyncio.sleep(0)

    # Quotas

    def quotas(self, subject: QuotaSubject | None = None) -> tuple[QuotaEntry, ...]:
        """Those in effect: all, or the one about the subject where there is one. Raises InvalidArgument."""
        entries = self._quotas.in_effect(self._config.tables)
        return entries if subject is None else tuple(one for one in entries if one.subject == spelled(subject))

    async def set_quota(self, entry: QuotaEntry) -> str:
        """In effect before it returns; empty, or why the next run will not know."""
        self._quotas.set(self._config.tables, entry)
        self._configure(self._config)
        capacity = "none" if entry.capacity_bytes is None else f"{entry.capacity_bytes} bytes"
        self._log.warning("quota set to %s: %s", capacity, entry.subject)
        return await self._keep()

    async def delete_quota(self, subject: QuotaSubject) -> str:
        """The configuration's is in effect again, where it has one."""
        self._quotas.delete(subject)
        self._configure(self._config)
        self._log.warning("quota that was set is deleted: %s", subject)
        return await self._keep()

    async def evict(self, namespace_id: bytes, key: bytes) -> EvictReply:
        """In slices, between which others are served. What comes meanwhile may stay."""
        removal = self._engine.removal(namespace_id, key)
        for _ in iter(removal.run_once, False):
            await asyncio.sleep(0)
        what = f"chunk {key.hex()} and what is below it" if key else "everything"
        self._log.warning("evicted %s of namespace %s: %d chunks", what, namespace_id.hex(), removal.chunks)
        return removal.reply()

    async def verify(self, call: VerifyCall, tell: Callable[[VerifyReply], Awaitable[None]]) -> None:
        """Read again what is there, and tell how far it is; cancelled it stops. One at a time: raises LimitExceeded."""
        _one_at_a_time("verifications at once", self._verifications)
        verification = self._engine.verification(call)
        self._log.warning("verifying %s", _asked(call))
        self._verifications += 1
        try:
            await _told(verification, tell)
        finally:
            self._verifications -= 1
            verification.cancel()
            for tier in verification.reply().tiers:
                self._log.warning("%s", _verified(tier))

    async def prefetch(self, namespace_id: bytes, key: bytes, tell: Callable[[PrefetchReply], Awaitable[None]]) -> None:
        """Read into RAM what tiers below it have, likewise."""
        _one_at_a_time("prefetches at once", self._prefetches)
        warming = self._engine.warming(namespace_id, key)
        self._log.warning("reading ahead %s", _shown(namespace_id, key))
        self._prefetches += 1
        try:
            await _told(warming, tell)
        finally:
            self._prefetches -= 1
            warming.cancel()
            found = warming.reply()
            self._log.warning(
                "read ahead %d objects, %d bytes; %d were there%s%s%s", found.read, found.read_bytes, found.there,
                _counted("; refused", found.refused), _counted("; failed", found.failed), _rest(found.reason),
            )  # fmt: skip

    # The configuration

    def configuration(self) -> ConfigReply:
        return ConfigReply(self._config.file, values(self._config.tables))

    async def compare(self) -> ReloadReply:
        """How the file differs from what the daemon runs with. Raises ConfigError for one that is wrong."""
        after = await self._read()
        return ReloadReply(after.file, changes(self._config.tables, after.tables))

    async def reload(self) -> ReloadReply:
        """All of it or, with a ConfigError that names every key at fault, nothing."""
        async with self._reloading:
            try:
                after = await self._read()
                found = changes(self._config.tables, after.tables)
                refuse_what_needs_a_restart(self._config, after, found)
            except KvDepotError as error:
                self._log.error("not reloaded: %s", error)
                raise
            # "auto" may mean another size by now; the arena has the one of the start.
            self._config = replace(after, capacity_bytes=self._config.capacity_bytes)
            self._configure(self._config)
            for one in found:
                self._log.warning("reloaded: %s is %s, was %s", one.key, one.after, one.before)
            if not found:
                self._log.info("reloaded: %s says nothing new", after.file)
            if self._quotas.kept() and any(one.key.startswith("quota[") for one in found):
                self._log.warning("quotas that operators have set stay in place of the file's: `kvdepotctl quota list`")
            return ReloadReply(after.file, found)

    async def _read(self) -> Config:
        if self._reread is None:
            raise ConfigError(self._config.file, "", "there is no file to read again", advice="start kvdepotd with one")
        return await in_own_thread(self._reread)


def _one_at_a_time(what: str, running: int) -> None:
    if running:
        raise LimitExceeded(what, running + 1, 1, advice="wait for the other one, or end it where it runs")


async def _told(work: LongWork[Reply], tell: Callable[[Reply], Awaitable[None]]) -> None:
    """To its end, telling of it now and then."""
    clock = asyncio.get_running_loop().time
    tell_at = clock()
    while work.run_once():
        if clock() >= tell_at:
            tell_at = clock() + _TELL_SECONDS
            await tell(work.reply())
        await asyncio.sleep(0 if work.hurried else _STEP_SECONDS)
    await tell(work.reply())


def _asked(call: VerifyCall) -> str:
    what = "everything"
    if call.namespace_id:
        below = f"chunk {call.key.hex()} and what is below it, of " if call.key else ""
        what = f"{below}namespace {call.namespace_id.hex()}"
    where = f"tier {call.tier}" if call.tier else "all tiers"
    return f"{what} in {where}, at most {call.bytes_per_second} bytes a second each"


def _verified(tier: VerifiedTier) -> str:
    found = f"verified {tier.verified} objects of tier {tier.tier}"
    return found + _counted("; damaged", tier.damaged) + _counted("; skipped", tier.skipped) + _rest(tier.reason)


def _counted(what: str, found: Mapping[str, int]) -> str:
    return f"{what}: {', '.join(f'{count} {why}' for why, count in found.items())}" if found else ""


def _rest(reason: str) -> str:
    return f"; the rest was not read: {reason}" if reason else ""


def _shown(namespace_id: bytes, key: bytes) -> str:
    namespace = f"namespace {namespace_id.hex()}"
    return f"the path to chunk {key.hex()} of {namespace}" if key else namespace
