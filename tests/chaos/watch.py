"""The invariants that hold at every moment, looked at from outside again and again, and those of a quiet depot."""

from __future__ import annotations

import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

import grpc
from kvdepot.client.ctl.calls import connect
from kvdepot.client.endpoint import Endpoint
from kvdepot.core.allocator import GRANULE_BYTES
from kvdepot.core.calls import Kind
from kvdepot.core.listing import NamespaceContents
from kvdepot.core.report import DaemonStatus
from kvdepot.core.units import parse_size_bytes
from kvdepot.server.tiers.shared.tier import COUNTING, NO_GRANT

from tests.chaos.depot import Depot
from tests.chaos.models import MODELS
from tests.rigs.disk_daemon import medium_bytes
from tests.rigs.patience import patience
from tests.rigs.process_memory import used_bytes

_SAMPLE_SECONDS: Final = 0.2
_MEMORY_EVERY: Final = 5
"""Samples: walking the page tables of all of a daemon's processes takes milliseconds."""
_SILENT_SECONDS_MAX: Final = 60.0
"""Of a daemon that is up. It was started, or continued, at least so long ago."""
_NO_ANSWER: Final = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)


@dataclass(slots=True)
class Judge:
    """What one status says, also compared with the ones before."""

    run: tuple[int, int] = (0, 0)  # pid and run
    counters: Mapping[str, float] = field(default_factory=dict)

    def findings(self, status: DaemonStatus) -> Iterator[str]:
        run = (status.pid, status.run)
        if run == self.run:
            for name, before in self.counters.items():
                now = status.counters.get(name, 0.0)
                if now < before:
                    yield f"counter {name} went from {before} to {now} (P10)"
        self.run, self.counters = run, status.counters
        for tier in status.tiers:
            figures = {
                name: value
                for name in ("capacity", "ready", "used", "lent", "queued", "written_today", "quarantined")
                for value in [getattr(tier, f"{name}_bytes")]
            }
            if min(figures.values()) < 0 or min(tier.objects, tier.unverified_objects, tier.queued_objects) < 0:
                yield f"a figure of tier {tier.name} is negative: {tier}"
            if tier.used_bytes > tier.capacity_bytes or tier.ready_bytes > tier.capacity_bytes:
                yield f"I4: tier {tier.name} uses more than it has: {tier}"
            if tier.lent_bytes > tier.used_bytes:
                yield f"tier {tier.name} lent more than is used: {tier}"
        for session in status.sessions:
            if not 0 <= session.credit_used_bytes <= session.credit_bytes:
                yield f"I4: credit of {session.engine_id}: {session}"


class Watch:
    """Samples on a thread of its own, until it is stopped."""

    def __init__(self, depot: Depot) -> None:
        self._depot = depot
        self._judge = Judge()
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._findings: list[str] = []
        self._answered_at = time.monotonic()
        self._log_at = 0
        self.status: DaemonStatus | None = None
        self._ended: Counter[str] = Counter()  # counters of runs that are over
        self.samples: Counter[str] = Counter()
        self.medium_bytes_max = 0
        self.memory_bytes_max = 0
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.ident is not None:  # else it was never started
            self._thread.join()

    @property
    def counters(self) -> Counter[str]:
        """The daemon's, of all its runs, as far as they were seen."""
        return self._ended + Counter(self.status.counters if self.status else {})

    def take(self) -> list[str]:
        with self._lock:
            found, self._findings = self._findings, []
        return found

    def _run(self) -> None:
        number = 0
        while not self._stop.wait(_SAMPLE_SECONDS):
            number += 1
            try:
                found = [*self._status(), *self._medium(), *self._log()]
                if number % _MEMORY_EVERY == 0:
                    found += self._memory()
            except Exception:  # noqa: BLE001 - a watch that is blind finds nothing
                found = [f"the watch failed: {traceback.format_exc()}"]
            with self._lock:
                self._findings += found

    def _status(self) -> list[str]:
        expected = self._depot.expected
        if not expected.up:
            return []
        try:
            status = self._depot.status()
        except grpc.RpcError as error:
            code = error.code()
            if expected is not self._depot.expected:
                return []  # it was killed, or stopped, meanwhile
            if code not in _NO_ANSWER:
                return [f"the status is answered by {code}: {error.details()}"]
            silent = time.monotonic() - max(expected.since, self._answered_at)
            return [f"I4: the daemon is silent for {silent:.0f} s"] if silent > _SILENT_SECONDS_MAX * patience() else []
        self._answered_at = time.monotonic()
        if self.status is not None and (self.status.pid, self.status.run) != (status.pid, status.run):
            self._ended.update(self.status.counters)
        self.status = status
        self.samples["status"] += 1
        return list(self._judge.findings(status))

    def _medium(self) -> list[str]:
        depot = self._depot
        limit = depot.capacity_bytes_max
        found = medium_bytes(depot.backing)
        self.medium_bytes_max = max(self.medium_bytes_max, found)
        self.samples["medium"] += 1
        over = [f"I4: {found} bytes on the medium, the capacity is {limit}"] if found > limit else []
        return [*over, *(depot.shared.findings() if depot.settings.shared else [])]

    def _memory(self) -> list[str]:
        expected = self._depot.expected
        if not expected.up:
            return []
        try:
            found = used_bytes(self._depot.daemon)
        except (OSError, AssertionError):  # it has ended meanwhile, or has no arena yet
            return []
        if expected is not self._depot.expected:
            return []
        self.memory_bytes_max = max(self.memory_bytes_max, found)
        self.samples["memory"] += 1
        limit = parse_size_bytes(self._depot.settings.ram)
        return [f"I4: {found} bytes of memory, the capacity is {limit}"] if found > limit else []

    def _log(self) -> list[str]:
        """A traceback is a callback that raised: nobody knows what it left undone."""
        path = self._depot.daemon.log_path
        if not path.exists():
            return []
        with path.open("rb") as file:
            file.seek(self._log_at)
            text = file.read()
        whole, end, _ = text.rpartition(b"\n")
        self._log_at += len(whole) + len(end)
        at = whole.find(b"Traceback (most recent call last)")
        return [f"a traceback in the daemon's log:\n{whole[at - 300 if at > 300 else 0 :][:4000].decode()}"] * (at >= 0)


def owed(status: DaemonStatus, engines: set[str]) -> list[str]:
    """What is still lent, leased, reserved or queued, when nobody does anything (I5).

    What waits for a shared tier waits for its janitor's grants: they may take longer than any patience.
    """
    found = [
        f"{one.engine_id}: {one.leases} leases, {one.lent_objects} lent, {one.credit_used_bytes} bytes of credit used"
        for one in status.sessions
        if one.leases or one.lent_objects or one.credit_used_bytes
    ]
    others = {one.engine_id for one in status.sessions} - engines
    found += [f"sessions of {', '.join(sorted(others))}"] if others else []
    for tier in status.tiers:
        queued = tier.kind != "shared" and tier.queued_objects
        if tier.lent_bytes or queued or tier.unverified_objects:
            found.append(
                f"tier {tier.name}, {tier.state}: {tier.lent_bytes} bytes lent, {tier.queued_objects} queued,"
                f" {tier.unverified_objects} unverified"
            )
    return found


def degraded(status: DaemonStatus) -> list[str]:
    """Tiers below RAM that are not of use: a shared one needs a janitor, and room granted by it.

    What the janitor says of its last count is no trouble of the tier.
    """
    found = []
    for tier in status.tiers[1:]:
        shared = tier.kind == "shared"
        refused = NO_GRANT in tier.reason or COUNTING in tier.reason
        useless = not tier.janitor or refused if shared else bool(tier.reason)
        if (tier.state, tier.breaker) != ("ready", "closed") or useless:
            found.append(f"{tier.name}: {tier.state}, breaker {tier.breaker}, janitor {tier.janitor}, {tier.reason}")
    return found


def contents(depot: Depot) -> tuple[NamespaceContents, ...]:
    """What `kvdepotctl ls` shows."""
    with connect(Endpoint.parse(depot.daemon.endpoint), 10.0 * patience()) as operator:
        return operator.namespaces("", 1000).namespaces


def accounts(status: DaemonStatus, listed: tuple[NamespaceContents, ...]) -> list[str]:
    """A quiet depot: are the objects that are listed all that is used? What is more was lost."""
    found = []
    for number, tier in enumerate(status.tiers):
        if tier.kind == "shared":
            continue  # its figures are the whole directory's, as its janitor counted them
        objects = sum(sum(one.tiers[number].objects.values()) for one in listed)
        if objects != tier.objects:
            found.append(f"tier {tier.name}: {tier.objects} objects, {objects} listed")
    ram = status.tiers[0]
    expected = sum(
        count * -(-MODELS[one.label].planner.object_bytes(Kind(kind)) // GRANULE_BYTES) * GRANULE_BYTES
        for one in listed
        if one.label
        for kind, count in one.tiers[0].objects.items()
    )
    if expected != ram.used_bytes:
        found.append(f"RAM: {ram.used_bytes} bytes are used, the objects that are listed take {expected}")
    for quota in status.quotas:
        found += [f"more than {quota}" for owner in quota.owners if owner.used_bytes > quota.capacity_bytes]
        if (
            quota.tier == "ram"
            and not quota.namespace
            and ram.used_bytes != sum(one.used_bytes for one in quota.owners)
        ):
            found.append(f"RAM: {ram.used_bytes} bytes are used, of the only tenant's: {quota}")
    return found
