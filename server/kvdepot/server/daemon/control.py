"""Changes that operators make to a running daemon: the depot applies them at once, then the state file keeps them.

Epoch bumps are the exception: they are saved first, so that no run repeats a counter. A change continues to its end,
even if its caller is gone. Every change is one log line.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
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
from kvdepot.server.config.config import Config
from kvdepot.server.config.memory_room import file_system
from kvdepot.server.config.reloading import changes, lost_bytes, refuse_what_needs_a_restart, replaces_arena, values
from kvdepot.server.config.schema import DISK_KIND
from kvdepot.server.config.set_quotas import SetQuotas, spelled
from kvdepot.server.daemon.state_file import KeptPin, OperatorState, StateFile
from kvdepot.server.depot.depot import Depot
from kvdepot.server.platform.guard import engine_guard
from kvdepot.server.platform.own_thread import in_own_thread

Reread = Callable[[], Config]
"""Reads and checks the configuration again, the command line over it. Raises ConfigError."""


_STEP_SECONDS: Final = 0.1
"""As often as tiers tick."""
_TELL_SECONDS: Final = 0.5

Reply = TypeVar("Reply", covariant=True)
Result = TypeVar("Result")


class LongWork(Protocol[Reply]):
    """What an operator waits for, and sees in progress."""

    @property
    def hurried(self) -> bool:
        """Return whether the work needs no pause between slices."""

    def run_once(self) -> bool:
        """Do one slice. Return False at the end."""

    def reply(self) -> Reply:
        """Return the progress."""


class Control:
    """One daemon's. Every change is a line of the log.

    `configure` has the daemon run with another configuration; it cannot fail. `readiness_changed` is called when it
    has. `reread` is None where there is no file.
    """

    def __init__(
        self, depot: Depot, state: StateFile, config: Config, *,
        reread: Reread | None, configure: Callable[[Config], None],
        readiness_changed: Callable[[], Awaitable[None]], quotas: SetQuotas, log: logging.Logger,
    ) -> None:  # fmt: skip
        self._depot = depot
        self._guard = engine_guard(depot.counters.add)
        self._state = state
        self._config = config
        self._reread = reread
        self._configure = configure
        self._readiness_changed = readiness_changed
        self._log = log
        self._quotas = quotas
        self._reloads = 0  # that have begun
        self._in_effect = 0  # the number of the last one that took effect
        self._changing = set[asyncio.Task[Any]]()
        self._epochs = depot.invalidation.epochs  # that are kept, or about to be
        depot.invalidation.inherited = self._inherited
        depot.tell_undropped(self._undropped)
        self._verifications = 0
        self._prefetches = 0

    def restore(self) -> None:
        """Apply the operator settings of the state file. Raise ConfigError if it cannot be read."""
        if not self._state.writable:
            self._log.warning(
                "state file is not writable: %s; operator settings will be lost on restart", self._state.path
            )
        kept, now = self._state.read(), time.time()
        switches = kept.switches
        self._depot.switches.restore(switches)
        self._epochs = self._depot.invalidation.epochs = kept.epochs
        if kept.epochs.bump or kept.epochs.invalidated_namespaces:
            self._log.info(
                "restored epoch: %d; %d namespaces invalidated individually",
                kept.epochs.bump, len(kept.epochs.invalidated_namespaces),
            )  # fmt: skip
        self._quotas.restore(kept.quotas)
        if kept.quotas:
            self._configure(self._config)
        for entry in kept.quotas:
            self._log.info("restored operator quota: %s, %s bytes", entry.subject, entry.capacity_bytes)
        for pin in kept.pins:
            if pin.until > now:
                # A clock that was set back makes none longer than it can be.
                seconds = min(pin.until - now, PIN_SECONDS_MAX)
                self._depot.pins.restore(pin.namespace_id, pin.key, seconds)
                self._log.info("restored pin: %s, for %.0f s", _shown(pin.namespace_id, pin.key), seconds)
        for switch, state in switch_states(switches).items():
            if state.anywhere_off:
                whom = "all namespaces" if state.off else ", ".join(one.hex() for one in state.off_namespaces)
                self._log.warning("restored switch: %s off for %s", switch, whom)

    # Switches

    async def switch(self, call: SwitchCall) -> SwitchReply:
        leases = self._switch(call)
        not_persisted = await self._keep()
        return SwitchReply(self._depot.switches.status(), leases, not_persisted)

    def quarantine(self, namespace_id: bytes) -> None:
        """Switch loads off for a namespace of which an audit found wrong bytes, until an operator switches them on."""
        if self._depot.switches.off(Switch.LOADS, namespace_id):
            return
        try:
            self._switch(SwitchCall(Switch.LOADS, on=False, namespace_id=namespace_id))
        except LimitExceeded:  # as many are off by name as can be
            self._switch(SwitchCall(Switch.LOADS, on=False))
        self._begin(self._kept())

    def _undropped(self, namespace_id: bytes) -> None:
        """Quarantine a namespace soon. The depot calls this while it drops."""
        self._log.error("a disk that cannot be written may have bytes in doubt: namespace %s", namespace_id.hex())
        asyncio.get_running_loop().call_soon(self._guard.call, "task", self.quarantine, namespace_id)

    def _inherited(self, namespace_id: bytes) -> None:
        self._log.warning("switches stay off for namespace %s, which follows an invalidated one", namespace_id.hex())
        self._begin(self._kept())

    def _switch(self, call: SwitchCall) -> int:
        leases = self._depot.switch(call.switch, call.namespace_id, on=call.on)
        whom = f"namespace {call.namespace_id.hex()}" if call.namespace_id else "all namespaces"
        self._log.warning("%s switched %s for %s", call.switch, "on" if call.on else "off", whom)
        return leases

    def _begin(self, change: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        """Run a change to its end, even if its caller is gone by a deadline or ^C."""
        task = self._guard.task("task", change, asyncio.get_running_loop())
        self._changing.add(task)
        task.add_done_callback(self._changing.discard)
        return task

    async def close(self, seconds: float) -> None:
        """Wait as long as that for changes that are under way."""
        if self._changing:
            await asyncio.wait(self._changing, timeout=seconds)

    async def _keep(self) -> str:
        """Save the operator settings. Return why the next run will not know them; empty if it will."""
        return await asyncio.shield(self._begin(self._kept()))

    async def _kept(self) -> str:
        now = time.time()
        pins = tuple(KeptPin(one.namespace_id, one.key, now + one.seconds_left) for one in self._depot.pins.statuses())
        state = OperatorState(self._depot.switches.status(), pins, self._quotas.kept(), self._epochs)
        not_persisted = await self._state.write(state)
        if not_persisted:
            self._depot.counters.add("failed_state_writes")
            self._log.error("state file not written: %s", not_persisted)
        return not_persisted

    async def drain(self, *, draining: bool) -> int:
        """Grant nothing more, or again; how many leases were granted before and have not ended."""
        leases = self._depot.drain(draining=draining)
        self._log.warning("draining: no more leases are granted" if draining else "resumed: leases are granted again")
        await self._readiness_changed()
        return leases

    # The epoch

    async def bump(self, call: BumpCall) -> BumpReply:
        """Invalidate what was stored so far: of a namespace, or of all.

        It is kept first, then done: no run gives a counter again under which one before has stored.
        """
        return await asyncio.shield(self._begin(self._bump(call)))

    async def _bump(self, call: BumpCall) -> BumpReply:
        if call.namespace_id:
            void = self._depot.invalidation.covers(call.namespace_id)
            epochs = self._epochs if void else self._epochs.with_invalidated(call.namespace_id)
        else:
            epochs = self._epochs.with_all_invalidated(call.to)
        changed = epochs != self._epochs
        self._epochs = epochs
        not_persisted = await self._kept()
        done = self._depot.invalidation.begin(epochs)  # without what another call has added and not kept yet
        not_persisted = await self._kept() or not_persisted  # switches have gone over to the heirs
        whom = (
            f"namespace {call.namespace_id.hex()}"
            if call.namespace_id
            else f"all namespaces, bump counter {epochs.bump}"
        )
        self._log.warning(
            "epoch bumped: %s, %d namespaces and %d chunks invalidated, %d leases in progress",
            whom, done.namespaces, done.chunks, done.leases,
        )  # fmt: skip
        shared = tuple(tier.name for tier in self._config.tables.tier if tier.kind != DISK_KIND)
        return BumpReply(
            epochs, changed, done.namespaces, done.chunks, done.leases, shared, not_persisted or self._volatile()
        )

    def _volatile(self) -> str:
        """Return what a reboot would do to saved settings; empty if they survive."""
        path = self._state.path
        if not self._config.tables.tier or file_system(path.parent) not in MEMORY_KINDS:
            return ""
        return (
            f"saved until the node reboots, but tiers keep their objects: {path} is in memory; "
            "set [daemon] state to a file on disk"
        )

    # Contents

    async def pin(self, call: PinCall) -> PinReply:
        """Pin a name. Return after the sweep of RAM, as far as the share of pins allows."""
        pins = self._depot.pins
        pins.pin(call.namespace_id, call.key, call.seconds)
        await self._swept()
        found = pins.status(call.namespace_id, call.key) or PinStatus(call.namespace_id, call.key)  # it was short
        self._log.warning(
            "pinned: %s, for %.0f s, %d objects, %d bytes",
            _shown(call.namespace_id, call.key), call.seconds, found.objects, found.size_bytes,
        )  # fmt: skip
        return PinReply(found, await self._keep())

    async def unpin(self, namespace_id: bytes, key: bytes) -> str:
        """Remove a pin. Return why the next run will not know; empty if it will."""
        self._depot.pins.unpin(namespace_id, key)
        await self._swept()
        self._log.warning("unpinned: %s", _shown(namespace_id, key))
        return await self._keep()

    async def _swept(self) -> None:
        for _ in iter(self._depot.pins.run_once, False):
            await asyncio.sleep(0)

    # Quotas

    def quotas(self, subject: QuotaSubject | None = None) -> tuple[QuotaEntry, ...]:
        """Return the quotas in effect: all, or the one of the subject. Raise InvalidArgument."""
        entries = self._quotas.in_effect(self._config.tables)
        return entries if subject is None else tuple(one for one in entries if one.subject == spelled(subject))

    async def set_quota(self, entry: QuotaEntry) -> str:
        """Set a quota, in effect before this returns. Return why the next run will not know; empty if it will."""
        self._quotas.set(self._config.tables, entry)
        self._configure(self._config)
        capacity = "none" if entry.capacity_bytes is None else f"{entry.capacity_bytes} bytes"
        self._log.warning("operator quota set: %s, %s", entry.subject, capacity)
        return await self._keep()

    async def delete_quota(self, subject: QuotaSubject) -> str:
        """Delete an operator's quota. The entry of the configuration is in effect again."""
        self._quotas.delete(subject)
        self._configure(self._config)
        self._log.warning("operator quota removed: %s", subject)
        return await self._keep()

    async def evict(self, namespace_id: bytes, key: bytes) -> EvictReply:
        """Delete in slices, between which other calls are served. Objects that arrive meanwhile may stay."""
        deletion = self._depot.deletion(namespace_id, key)
        for _ in iter(deletion.run_once, False):
            await asyncio.sleep(0)
        what = f"chunk {key.hex()} and every chunk after it" if key else "all chunks"
        self._log.warning("evicted: %s of namespace %s, %d chunks", what, namespace_id.hex(), deletion.chunks)
        return deletion.reply()

    async def verify(self, call: VerifyCall) -> AsyncGenerator[VerifyReply, None]:
        """Read again what is there, and yield how far it is. Closed, it stops. One at a time: raises LimitExceeded."""
        _one_at_a_time("verifications at once", self._verifications)
        verification = self._depot.verification(call)
        self._log.warning("verification started: %s", _asked(call))
        self._verifications += 1
        try:
            async for reply in _progress(verification):
                yield reply
        finally:
            self._verifications -= 1
            verification.cancel()
            for tier in verification.reply().tiers:
                self._log.warning("verification ended: %s", _verified(tier))

    async def prefetch(self, namespace_id: bytes, key: bytes) -> AsyncGenerator[PrefetchReply, None]:
        """Read into RAM what tiers below it have, likewise."""
        _one_at_a_time("prefetches at once", self._prefetches)
        warming = self._depot.operator_prefetch(namespace_id, key)
        self._log.warning("operator prefetch started: %s", _shown(namespace_id, key))
        self._prefetches += 1
        try:
            async for reply in _progress(warming):
                yield reply
        finally:
            self._prefetches -= 1
            warming.cancel()
            found = warming.reply()
            self._log.warning(
                "operator prefetch ended: %d objects read, %d bytes; %d already in RAM%s%s%s",
                found.read, found.read_bytes, found.present,
                _counted("; refused", found.refused), _counted("; failed", found.failed), _rest(found.reason),
            )  # fmt: skip

    # The configuration

    def configuration(self) -> ConfigReply:
        return ConfigReply(self._config.file, values(self._config))

    async def compare(self) -> ReloadReply:
        """Return how the file differs from the running configuration. Raise ConfigError for a bad file."""
        after = await self._read()
        before = self._config
        return ReloadReply(
            after.file, changes(before, after), replaces_arena(before, after), lost_bytes(before, after)
        )  # fmt: skip

    async def reload(self) -> ReloadReply:
        """Apply the whole file or nothing. Raise ConfigError.

        No reload waits for another one, whose read may hang for as long as the daemon runs. If one that began later has
        taken effect, this one has nothing to add.
        """
        self._reloads += 1
        number = self._reloads
        try:
            after = await self._read()
            if number < self._in_effect:
                return ReloadReply(after.file, ())
            found = changes(self._config, after)
            refuse_what_needs_a_restart(self._config, after, found)
        except KvDepotError as error:
            for refusal in error.all if isinstance(error, ConfigError) else (error,):
                self._log.error("configuration not reloaded: %s", refusal)
            raise
        # "auto" may mean another size by now; the arena has the one of the start.
        self._config, self._in_effect = replace(after, capacity_bytes=self._config.capacity_bytes), number
        self._configure(self._config)
        for one in found:
            self._log.warning("configuration changed: %s is %s, was %s", one.key, one.after, one.before)
        if not found:
            self._log.info("configuration unchanged: %s", after.file)
        if after.note:
            self._log.warning("configuration: %s", after.note)
        if self._quotas.kept() and any(one.key.startswith("quota[") for one in found):
            self._log.warning("operator quotas stay in effect: see `kvdepotctl quota list`")
        return ReloadReply(after.file, found)

    async def _read(self) -> Config:
        if self._reread is None:
            raise ConfigError(
                self._config.file,
                "",
                "the daemon runs without a configuration file",
                advice="start kvdepotd with one: kvdepotd serve FILE",
            )
        try:
            return await in_own_thread(self._reread)
        except OSError as error:
            raise ConfigError(
                self._config.file, "", f"cannot be read: {error.strerror or error}", of_host=True
            ) from error


def _one_at_a_time(what: str, running: int) -> None:
    if running:
        raise LimitExceeded(what, running + 1, 1, advice="wait for the other one, or stop it with ^C where it runs")


async def _progress(work: LongWork[Reply]) -> AsyncGenerator[Reply, None]:
    """Do the work to its end, and yield how far it is now and then."""
    clock = asyncio.get_running_loop().time
    tell_at = clock()
    while work.run_once():
        if clock() >= tell_at:
            tell_at = clock() + _TELL_SECONDS
            yield work.reply()
        await asyncio.sleep(0 if work.hurried else _STEP_SECONDS)
    yield work.reply()


def _asked(call: VerifyCall) -> str:
    what = "all namespaces"
    if call.namespace_id:
        below = f"chunk {call.key.hex()} and every chunk after it, of " if call.key else ""
        what = f"{below}namespace {call.namespace_id.hex()}"
    where = f"tier {call.tier}" if call.tier else "all tiers"
    return f"{what} in {where}, at most {call.bytes_per_second} bytes/s each"


def _verified(tier: VerifiedTier) -> str:
    found = f"{tier.verified} objects verified in tier {tier.tier}"
    return found + _counted("; damaged", tier.damaged) + _counted("; skipped", tier.skipped) + _rest(tier.reason)


def _counted(what: str, found: Mapping[str, int]) -> str:
    return f"{what}: {', '.join(f'{count} {why}' for why, count in found.items())}" if found else ""


def _rest(reason: str) -> str:
    return f"; the rest was not read: {reason}" if reason else ""


def _shown(namespace_id: bytes, key: bytes) -> str:
    namespace = f"namespace {namespace_id.hex()}"
    return f"the prefix up to chunk {key.hex()} of {namespace}" if key else namespace
