"""A chaos run: engines at work, faults from the plan, and a look at everything in between."""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import grpc
from kvdepot.core.report import DaemonStatus
from kvdepot.core.units import parse_size_bytes
from kvdepot.server.storage.base import IoOutcome
from kvdepot.server.tiers.health import RETRY_SECONDS_MAX

from tests.chaos.all_faults import LEFT_OUT, possible
from tests.chaos.depot import GRACE_SECONDS, LEASE_SECONDS, RAMS_SHARED, Depot, Mount, Settings, unexplained
from tests.chaos.faults import Ending, World
from tests.chaos.fleet import Engine, Fleet
from tests.chaos.messages import Command
from tests.chaos.models import FLEETS
from tests.chaos.plan import Phase, phases
from tests.chaos.watch import Watch, accounts, contents, degraded, owed
from tests.rigs.daemon_process import ARENA_FILES
from tests.rigs.disk_daemon import differences, on_medium
from tests.rigs.patience import patience

DRAIN_SECONDS: Final = 60.0
SETTLE_SECONDS: Final = LEASE_SECONDS + GRACE_SECONDS + RETRY_SECONDS_MAX + 40.0
"""What is queued for a tier of no use waits until that has tried again."""
PROGRESS_SECONDS: Final = 60.0
RECOVERY_SECONDS: Final = RETRY_SECONDS_MAX + 40.0
"""All with room for a machine that does other things."""
KEPT_OBJECTS_MIN: Final = 30
"""So many objects in RAM with a checksum: a SIGKILL keeps some."""
_START_SECONDS: Final = 10.0
"""What a run takes to begin. On a machine on which it takes longer, everything may."""
_POLL_SECONDS: Final = 0.05


class ViolationError(AssertionError):
    """An invariant does not hold."""


@dataclass(slots=True)
class Outcome:
    """What a run has come to. `counts`: of all engines together."""

    seed: int
    seconds: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    quiet_looks: int = 0
    samples: Counter[str] = field(default_factory=Counter)
    medium_bytes_max: int = 0
    memory_bytes_max: int = 0
    left_out: list[str] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    finding: str = ""
    damaged: Counter[str] = field(default_factory=Counter)  # by the final fscks: all of it by our own hands
    daemon: Counter[str] = field(default_factory=Counter)  # counters of all its runs

    def record(self) -> dict[str, Any]:
        names = ("seed", "seconds", "quiet_looks", "medium_bytes_max", "memory_bytes_max", "left_out", "finding")
        found = {name: getattr(self, name) for name in names}
        for name in ("faults", "counts", "samples", "damaged", "daemon"):
            found[name] = dict(sorted(getattr(self, name).items()))
        return found | {"events": self.events}


def kept_by_a_kill(status: DaemonStatus) -> int:
    """Return how many objects of RAM have a checksum. 0: too few of them, which may all be evicted until the kill."""
    ram = status.tiers[0]
    summed = ram.objects - ram.pending_checksums
    return summed if summed >= KEPT_OBJECTS_MIN else 0


class Harness:
    """One run. `plant`: the engines store a wrong byte now and then, which has to be found."""

    def __init__(self, seed: int, *, nodes: int = 1, plant: bool = False, say: Callable[[str], None] = print) -> None:
        """`nodes`: daemons, each with a disk; two have a directory that they share as well."""
        self.outcome = Outcome(seed)
        self._say = say
        self._began = time.monotonic()
        self._patience = 1.0
        rng = random.Random(f"settings {seed}")
        self._mount = mount = Mount(nodes)
        self.worlds: list[World] = []
        try:
            for node, models in enumerate(FLEETS[nodes]):
                settings = Settings(write=rng.choice(["commit", "second_use"]))
                if nodes > 1:
                    settings.shared, settings.ram = mount.path / "shared", RAMS_SHARED[0]
                depot = Depot(mount, settings, node)
                fleet = Fleet(models, depot.daemon.endpoint, seed, plant=plant)
                self.worlds.append(World(depot, fleet, Watch(depot)))
        except BaseException:
            self.close()
            raise
        self.outcome.left_out = [*mount.left_out, LEFT_OUT]
        self._faults = possible(self.worlds[0].depot)

    def run(self, seconds: float, *, faults_min: int = 0) -> Outcome:
        """`outcome.finding` is empty when everything held. However late it began, half of `seconds` is for faults.

        It goes on until there were `faults_min` of them: on a busy machine each takes its time.
        """
        try:
            self._start()
            until = max(self._began + seconds, time.monotonic() + seconds / 2)
            plan = phases(self.outcome.seed, {name: group for name, (group, _) in self._faults.items()})
            while time.monotonic() < until or self.outcome.faults.total() < faults_min:
                self._phase(next(plan))
            self._finish()
        except ViolationError as error:
            self.outcome.finding = str(error)
        finally:
            for world in self.worlds:
                world.watch.stop()
            self._add_up()
            for world in self.worlds:
                world.fleet.close()
        return self.outcome

    def close(self) -> None:
        try:
            for world in self.worlds:
                world.depot.close()
        finally:
            self._mount.close()

    @property
    def logs(self) -> list[str]:
        """Of the daemons."""
        return [world.depot.daemon.log for world in self.worlds]

    def _start(self) -> None:
        for world in self.worlds:
            world.depot.start()
            world.fleet.start()
        for world in self.worlds:
            self._must_be(world.depot.wait_ready())
        self._patience = max(1.0, (time.monotonic() - self._began) / _START_SECONDS)
        for world in self.worlds:
            world.watch.start()
        self._event("started")

    # --- one phase

    def _phase(self, phase: Phase) -> None:
        rng = random.Random(phase.draw)
        self._work(phase.load_seconds)
        struck = [self.worlds[(phase.draw + number) % len(self.worlds)] for number in range(len(phase.faults))]
        expected_kept = self._expected_kept(phase, struck[0])
        endings: list[Ending] = []
        names = " + ".join(phase.faults)
        for name, world in zip(phase.faults, struck, strict=True):
            endings.append(self._faults[name][1](world, rng))
            self.outcome.faults[name] += 1
        self._work(phase.fault_seconds)
        for end in endings:
            end()
        ended = time.monotonic()
        self._check()
        self._recover()
        if expected_kept and struck[0].depot.status().counters.get("adopted_objects.adopted", 0.0) == 0:
            raise ViolationError(f"I8: {expected_kept} objects with checksums were in RAM, and none was kept")
        counts = self._counts()
        self._event(
            f"{phase.number:3} {names}, {phase.fault_seconds:.1f} s, back after {time.monotonic() - ended:.1f} s:"
            f" {counts['requests']} requests, {counts['hits']} hits, {counts['checked_objects']} objects checked"
        )
        if phase.quiet:
            self._quiet()

    def _work(self, seconds: float) -> None:
        """Let the engines work, and read what they say."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._check()
            time.sleep(min(_POLL_SECONDS, seconds))

    def _check(self) -> None:
        for world in self.worlds:
            world.found(*world.fleet.read(), *world.watch.take())
            if world.depot.ended:
                world.found(f"the daemon ended by itself: {world.depot.daemon.log[-3000:]}")
        findings = [finding for world in self.worlds for finding in world.findings]
        if findings:
            raise ViolationError("\n".join(findings[:5]))

    def _must_be(self, wrong: str) -> None:
        if wrong:
            raise ViolationError(wrong)

    def _expected_kept(self, phase: Phase, world: World) -> int:
        """How many objects of a daemon that is killed now have to be kept. It is asked now: a watch may be late."""
        if phase.faults == ("daemon kill",) and world.depot.expected.up:
            with contextlib.suppress(grpc.RpcError):
                return kept_by_a_kill(world.depot.status())
        return 0

    def _counts(self) -> Counter[str]:
        return sum((world.fleet.counts for world in self.worlds), Counter())

    def _recover(self) -> None:
        """Faults have ended: the daemons answer, and engines that lost a process begin anew."""
        for world in self.worlds:
            if not world.depot.running:
                world.depot.start()
        for world in self.worlds:
            self._must_be(world.depot.wait_ready())
            world.found(*world.fleet.repair())
        self._check()

    # --- quiet

    def _quiet(self) -> None:
        """Nothing is owed when nobody does anything; the accounts are right; and everybody can go on (I5)."""
        self._command(Command.PAUSE)
        self._until(DRAIN_SECONDS, self._busy, "I5: engines do not come to rest")
        self._until(SETTLE_SECONDS, lambda: self._owed(running=True), "I5: still owed when all is quiet")
        self._until(RECOVERY_SECONDS, self._degraded, "T5: a tier does not come back")
        self._until(RECOVERY_SECONDS, self._accounts, "I4: capacity is lost")
        for world in self.worlds:
            world.depot.capacity_bytes_max = parse_size_bytes(world.depot.settings.capacity)
        before = {engine.engine_id: engine.counts for engine in self._engines()}
        self._command(Command.GO_ON)
        self._until(PROGRESS_SECONDS, lambda: self._stuck(before), "I2: engines get nothing any more")
        self.outcome.quiet_looks += 1
        statuses = [world.depot.status() for world in self.worlds]
        tiers = ", ".join(f"{tier.name} {tier.objects} objects" for status in statuses for tier in status.tiers)
        self._event(f"    quiet: nothing owed, the accounts are right ({tiers})")

    def _until(self, seconds: float, wrong: Callable[[], Sequence[str]], what: str) -> None:
        began = time.monotonic()
        said: Sequence[str] = ["no answer"]
        while said:
            if time.monotonic() > began + seconds * max(self._patience, patience()):
                raise ViolationError(f"{what}: {'; '.join(said)}")
            self._check()
            with contextlib.suppress(grpc.RpcError):
                said = wrong()
            time.sleep(_POLL_SECONDS if said else 0)

    def _engines(self) -> list[Engine]:
        return [engine for world in self.worlds for engine in world.fleet.engines]

    def _command(self, command: Command) -> None:
        for world in self.worlds:
            world.fleet.command(command)

    def _busy(self) -> list[str]:
        return [f"{one.engine_id}: {one.last.state}" for one in self._engines() if not one.last.idle]

    def _owed(self, *, running: bool) -> list[str]:
        found = []
        for node, world in enumerate(self.worlds):
            engines = {engine.engine_id for engine in world.fleet.engines} if running else set()
            found += [f"node {node}: {one}" for one in owed(world.depot.status(), engines)]
        return found

    def _degraded(self) -> list[str]:
        return [wrong for world in self.worlds for wrong in degraded(world.depot.status())]

    def _accounts(self) -> list[str]:
        return [wrong for one in self.worlds for wrong in accounts(one.depot.status(), contents(one.depot))]

    def _stuck(self, before: dict[str, Counter[str]]) -> list[str]:
        found = []
        for engine in self._engines():
            done = engine.counts - before[engine.engine_id]
            if not done["hits"] or not done["commit_committed"]:
                found.append(
                    f"{engine.engine_id}: {done['requests']} requests, {done['hits']} hits,"
                    f" {done['commit_committed']} objects stored; {engine.last.state}; {dict(done)}"
                )
        return found

    # --- the end

    def _finish(self) -> None:
        self._quiet()
        self._command(Command.PAUSE)
        self._until(DRAIN_SECONDS, self._busy, "I5: engines do not come to rest")
        for world in self.worlds:
            world.found(*world.fleet.end())
        self._until(SETTLE_SECONDS, lambda: self._owed(running=False), "T7: engines that ended leave something")
        self._add_up()
        for world in self.worlds:
            self._stop(world.depot)
        if len(self.worlds) > 1:
            self._must_be("\n".join(self.worlds[0].depot.shared.audit()))
        self._check()

    def _stop(self, depot: Depot) -> None:
        tier, counters = depot.tier(), depot.status().counters
        self._must_be(depot.stop())
        verdict = depot.fsck()
        if isinstance(verdict, str):
            raise ViolationError(verdict)
        self._must_be(unexplained(verdict, depot.damages))
        damaged = Counter({str(k): n for k, n in verdict.outcomes.items() if k is not IoOutcome.OK and n})
        self.outcome.damaged += damaged
        objects, used_bytes = on_medium(verdict)
        # What we have damaged, the scrubber may find while it stops.
        fewer = bool(depot.damages) and objects <= tier.objects and used_bytes <= tier.used_bytes
        if not damaged and not fewer:
            self._must_be(differences(verdict, tier, counters))
        if depot.daemon.arena_files != ARENA_FILES:
            raise ViolationError(f"T7: left in memory: {depot.daemon.arena_files}")
        self._event(f"stopped; on the medium {objects} objects, whole but for {dict(damaged) or 'nothing'}")

    # --- what is said

    def _event(self, text: str) -> None:
        line = f"{time.monotonic() - self._began:7.1f} {text}"
        self.outcome.events.append(line)
        self._say(line)

    def _add_up(self) -> None:
        outcome = self.outcome
        outcome.seconds = round(time.monotonic() - self._began, 1)
        outcome.counts = self._counts()
        watches = [world.watch for world in self.worlds]
        outcome.samples = sum((watch.samples for watch in watches), Counter())
        outcome.daemon = sum((watch.counters for watch in watches), Counter())
        outcome.medium_bytes_max = max(watch.medium_bytes_max for watch in watches)
        outcome.memory_bytes_max = max(watch.memory_bytes_max for watch in watches)
