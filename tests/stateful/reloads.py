"""Reloads in the engines' world: every setting of the depot that a file can change, while engines store and load.

A reload moves nothing and ends nothing. What is above a smaller limit may stay for a while, and never grows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any, Final

import numpy as np
from hypothesis import strategies as st
from kvdepot.server.depot.types import EVERY, DepotConfig, Quota, TierConfig, WritePolicy

from tests.rigs.engine_rig import Rig
from tests.rigs.quota_audit import accounts, check_within_quotas, owners

PAGE: Final = 4096
WATERMARKS: Final = ((1.0, 0.9), (0.9, 0.7), (0.9, 0.7), (0.5, 0.3), (0.1, 0.05))
QUOTAS: Final = (
    (),
    (Quota(namespace="*", tier="ram", capacity_bytes=5 * PAGE), Quota(tier="memory", capacity_bytes=3 * 12288)),
    (Quota(namespace="odd", tier="ram", capacity_bytes=2 * PAGE), Quota(tenant="", capacity_bytes=9 * PAGE)),
    (Quota(capacity_bytes=30 * PAGE), Quota(tier="ram"), Quota(namespace="*", tier="memory", capacity_bytes=1)),
    (),
    (Quota(namespace="*", capacity_bytes=20 * PAGE),),
)
DEPOT: Final[Mapping[str, Sequence[Any]]] = {
    "credit_bytes": (2 * PAGE, 8 * PAGE, 14 * PAGE),
    "lease_deadline_seconds": (0.5, 10.0, 10.0, 100.0),
    "grace_seconds": (0.0, 5.0, 30.0),
    "watermarks": WATERMARKS,
    "loads_in_flight": (1, 3),
    "prefetch_share": (0.0, 0.1, 0.25, 1.0),
    "pin_share": (0.0, 0.1, 0.25, 0.9),
    "lend_disks": (False, True),
    "audit_sample": (0.0, 0.5, 1.0),
    "quotas": QUOTAS,
}
"""`watermarks` are two fields."""
TIER: Final[Mapping[str, Sequence[Any]]] = {
    "write": tuple(WritePolicy),
    "write_bytes_per_day": (0.0, 12288.0, 1e12),
    "load_weight": (0.0, 1.0, 3.0),
    "watermarks": WATERMARKS,
}
Values = Mapping[str, Sequence[Any]]
Changes = Mapping[str, Any]


def changes_of(values: Values) -> st.SearchStrategy[dict[str, Any]]:
    """Return changes of some of these settings, or of none."""
    return st.fixed_dictionaries({}, optional={name: st.sampled_from(some) for name, some in values.items()})


def drawn_changes(values: Values, random: Random) -> dict[str, Any]:
    return {name: random.choice(some) for name, some in values.items() if random.random() < 0.2}


class Reloads:
    """The reloads of a world, and what is above a limit because of them."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self.count = 0
        self.above = 0  # reloads after which something was above its limit
        self._held: list[dict[int, int]] = []  # by tier: what each namespace slot held when it was looked at
        self._credit: dict[int, int] = {}  # by session slot
        self._loads: dict[int, int] = {}
        self.prefetch_bytes: list[int] = []
        """By room: what prefetch may still pin there, in addition to its share."""

    def reload(self, depot: Changes, tier: Changes) -> None:
        """Have the daemon run with other settings. `tier`: of each lower tier."""
        rig = self._rig
        config = replace(rig.config, **_fields(depot))
        tiers = {one.tier.name: replace(one.config, **_fields(tier)) for one in rig.depot._tree.tiers}
        before = _state(rig)
        rig.depot.configure(config, tiers)
        for name, former, now in zip(before, before.values(), _state(rig).values(), strict=True):
            assert former == now, f"a reload has changed {name}"
        rig.config = config
        rig.tier_config = tiers.get("memory", rig.tier_config)
        rig.shared_config = tiers.get("nfs", rig.shared_config)
        self.count += 1
        _check_in_force(rig, config, tiers)
        self.above += any(one.used_bytes > one.capacity_bytes for one in owners(rig.depot))
        self.look()

    def look(self) -> None:
        """Take what there is now for the most that may be above a limit: after a reload, a start, or an opening."""
        depot = self._rig.depot
        self._held = [dict(account._held) for account in accounts(depot)]
        sessions = depot._sessions.by_slot
        self._credit = {slot: one.credit_used_bytes for slot, one in sessions.items()}
        self._loads = {slot: one.loads for slot, one in sessions.items()}
        pins = depot._ram.pins.prefetch
        self.prefetch_bytes = [pins.bytes_in(room.number) for room in depot._ram.rooms]

    def check(self) -> None:
        """Assert that nothing has grown that is above its limit."""
        if not self.count:
            check_within_quotas(self._rig.depot)
            return
        self._check_quotas()
        depot, config = self._rig.depot, self._rig.config
        for slot, session in depot._sessions.by_slot.items():
            assert session.credit_used_bytes <= max(config.credit_bytes, self._credit.get(slot, 0)), "above its credit"
            assert session.loads <= max(config.loads_in_flight, self._loads.get(slot, 0)), "too many loads"
            deadlines = [lease.deadline for lease in session.leases.values()]
            assert all(one <= other for one, other in pairwise(deadlines)), "one that is over would not be met"
            assert max(deadlines, default=0.0) <= self._rig.now + config.lease_deadline_seconds, "a longer deadline"
        finite = [one.deadline for one in depot._prefetch._requests.values() if one.tokens]
        assert max(finite, default=0.0) <= self._rig.now + config.lease_deadline_seconds, "pinned for longer"
        self.look()

    def _check_quotas(self) -> None:
        for account, held in zip(accounts(self._rig.depot), self._held, strict=True):
            for owner in account._owners.values():
                if owner.used_bytes > owner.capacity_bytes:
                    grown = [slot for slot in owner.slots if account.held_bytes(slot) > held.get(slot, 0)]
                    assert not grown, f"{owner} is above its quota, and gets more"

    @property
    def evicted_of_disks(self) -> float:
        counts = self._rig.depot.counters.snapshot()
        return sum(count for name, count in counts.items() if name.startswith("tier_evicted_objects."))

    def check_reached(self, evicted: float) -> None:
        """Assert that every limit is kept: nothing is lent or pinned any more, and tiers had time to evict.

        `evicted`: of disks, some ticks ago. A disk that may hold less than one path takes it from RAM and evicts it in
        turn. RAM waits for it each time, which is no growth, and is known.
        """
        depot, config = self._rig.depot, self._rig.config
        if self.evicted_of_disks > evicted:
            return
        check_within_quotas(depot)
        for room in depot._ram.rooms:
            assert room.used_bytes <= config.high_watermark * room.size_bytes, "RAM stays above its watermark"
        for tier in depot._tree.disks:
            below = tier.used_bytes <= tier.config.high_watermark * tier.tier.capacity_bytes
            # The path to what RAM has alone stays, as long as RAM is below its own watermark.
            assert below or tier.evictor.victim() is None, "a disk stays above its watermark"


def _fields(changes: Changes) -> dict[str, Any]:
    fields = dict(changes)
    if "watermarks" in fields:
        fields["high_watermark"], fields["low_watermark"] = fields.pop("watermarks")
    return fields


def _state(rig: Rig) -> dict[str, object]:
    """Return what no reload changes."""
    depot = rig.depot
    ram, tiering, prefetch = depot._ram, depot._tiering, depot._prefetch
    sessions = depot._sessions.by_slot
    return {
        "the tables": bytes(rig.tables),
        "a generation": bytes(rig.generations),
        "bytes of the data": bytes(rig.buffer),
        "leases": {slot: [(one.id, one.state) for one in s.leases.values()] for slot, s in sessions.items()},
        "credit": {slot: (s.credit_used_bytes, s.awaited_bytes, s.loads) for slot, s in sessions.items()},
        "attachments": list(depot._sessions.attachments),
        "free bytes": [(room.used_bytes, room.rows_used, room.allocator.ready_bytes) for room in ram.rooms],
        "what is in RAM": (ram.objects, ram.pending_checksums, ram.unverified, len(ram.detached)),
        "what is in tiers": [(tier.objects, tier.used_bytes, list(tier._kinds)) for tier in depot._tree.tiers],
        "the tree": sorted(depot._tree.index.nodes().tolist()),
        "writes that wait": [list(queue._waiting) for queue in tiering._queues.values()],
        "writes in progress": [list(queue._writing) for queue in tiering._queues.values()],
        "reads": list(tiering.promotions._readings),
        "jobs": [list(map(id, tier.jobs)) for tier in rig.lower_tiers],
        "prefetch": {owner: list(one.tokens) for owner, one in prefetch._requests.items()},
        "pins": np.flatnonzero(ram.pins.user.sizes).tolist(),
        "deferred victims": ram.evictor.deferred,
        "counters": depot.counters.snapshot(),
    }


def _check_in_force(rig: Rig, config: DepotConfig, tiers: Mapping[str, TierConfig]) -> None:
    """Assert that the status shows the new values, each worked out from the settings alone."""
    status = rig.depot.status()
    assert {one.credit_bytes for one in status.sessions} <= {config.credit_bytes}
    shown = {(one.tenant, one.namespace, one.tier): one.capacity_bytes for one in status.quotas}
    disks = [tier.tier.name for tier in rig.depot._tree.disks]
    assert shown == _quotas_of(config, ["ram", *disks])
    for one in status.lower_tiers:
        settings = tiers[one.name]
        target = settings.write_bytes_per_day if settings.write is WritePolicy.AUTO else 0
        assert one.write_target_bytes == int(target)
    budgets = config.tenants
    assert {one.name for one in status.tenants} == budgets.keys()
    for tenant in status.tenants:
        budget = budgets[tenant.name]
        assert budget.sessions in (None, tenant.sessions_max)
        assert budget.credit_bytes is None or tenant.credit_bytes <= budget.credit_bytes


def _quotas_of(config: DepotConfig, tiers: Sequence[str]) -> dict[tuple[str, str, str], int]:
    """Return the capacity of each subject in each of these tiers. An entry that names the tier decides."""
    found: dict[tuple[str, str, str], int | None] = {}
    for name in tiers:
        for tier in (EVERY, name):
            for one in config.quotas:
                if one.tier == tier:
                    found[one.tenant, one.namespace or "", name] = one.capacity_bytes
    return {subject: capacity for subject, capacity in found.items() if capacity is not None}
