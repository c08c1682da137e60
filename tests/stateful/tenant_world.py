"""Engines of three tenants, each of which has a part of the data, in the engines' world (docs/adr/0070)."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from random import Random
from typing import Any, Final

import numpy as np
import pytest
from kvdepot.core.calls import AcquireCall, Kind, ReserveOutcome
from kvdepot.core.control import Switch
from kvdepot.core.errors import PermissionDenied, UnknownNamespace
from kvdepot.core.planner import GroupSpec
from kvdepot.server.depot.tree.rooms import Room
from kvdepot.server.depot.types import TenantBudget, TierConfig

from tests.rigs.engine_rig import Client, audit, key, spec_of
from tests.stateful.engine_world import DEPTH, World
from tests.stateful.reloads import DEPOT, TIER

PART_BYTES: Final = 2 << 20
"""The least. It has room for 12 objects of \"a\"."""
UNIT: Final = 21 * 4096
SPECS: Final = {
    "a": spec_of(GroupSpec(Kind.ATTENTION, 16, rank_block_bytes=(UNIT,)), name="dense", tenant="one"),
    "b": spec_of(GroupSpec(Kind.ATTENTION, 16, rank_block_bytes=(UNIT,)), name="dense", tenant="two"),
    "c": spec_of(
        GroupSpec(Kind.ATTENTION, 16, rank_block_bytes=(UNIT * 3 // 2,)),
        GroupSpec(Kind.STATE, 32, rank_block_bytes=(UNIT - 96,)),
        name="odd",
        tenant="two",
    ),
    "d": spec_of(
        GroupSpec(Kind.ATTENTION, 16, rank_block_bytes=(UNIT // 2,)),
        GroupSpec(Kind.WINDOW, 16, window_tokens=65, rank_block_bytes=(UNIT // 4,)),
        name="windowed",
        tenant="three",
    ),
}
TENANTS: Final = tuple(sorted({spec.tenant for spec in SPECS.values()}))
BUDGETS: Final = (TenantBudget(), TenantBudget(8 * UNIT, 200), TenantBudget(16 * UNIT))
OF_TENANTS: Final = {name: values for name, values in DEPOT.items() if name != "quotas"} | {
    "credit_bytes": (16 * UNIT, 48 * UNIT),
    "tenants": [dict(zip(TENANTS, budgets, strict=True)) for budgets in product(BUDGETS, repeat=len(TENANTS))],
}
"""What a reload may change. A quota would be in a store's way, and a budget is never less than an object."""


class TenantWorld(World):
    """One daemon with a part for each tenant. What one does never hinders another one."""

    settings = OF_TENANTS, TIER

    def __init__(self, tier: TierConfig | None = None, **others: Any) -> None:
        options: dict[str, Any] = {
            "rows": 66, "lent_rows": 96, "tier_bytes": 36 * UNIT, "credit_bytes": 48 * UNIT,
            "parts": (PART_BYTES,) * len(TENANTS), "tenants": dict.fromkeys(TENANTS, TenantBudget(None, None)),
        }  # fmt: skip
        super().__init__(tier=tier, specs=SPECS, **options | others)
        self.unhindered = 0  # stores that found room because nothing of the tenant was in the way
        self.beside_full = 0  # of them, those while the part of another tenant was full

    def room(self, who: str) -> Room:
        found = self.rig.depot._ram.rooms.of_tenant(self.engines[who].spec.tenant)
        assert found is not None
        return found

    def trespass(self, who: str, other: str) -> None:
        """An engine asks for what another tenant has, by its namespace and by its keys."""
        client, theirs = self.attach(who), self.attach(other)
        if client.spec.tenant == theirs.spec.tenant:
            return
        depot = self.rig.depot
        with pytest.raises(PermissionDenied):
            depot.register_namespace(client.session, theirs.spec)
        with pytest.raises(UnknownNamespace):
            call = AcquireCall(client.session, client.lease(), theirs.namespace, key("shared", 0), bytes([1]), "")
            depot.acquire(call, lambda reply: pytest.fail(f"answered: {reply}"))

    def move(self, who: str, tenant: str) -> None:
        """The daemon starts anew, and the engine's user is in another tenant. What its process holds, it keeps."""
        self.crash()
        engine = self.engines[who]
        engine.spec = replace(engine.spec, tenant=tenant)
        engine.outdated.clear()  # it may not ask again: it does not know the former namespace any more
        self.attach(who)

    def grow(self, *, steps: int) -> None:
        """The daemon starts anew, and its parts are populated piece by piece, the last one first."""
        self.rig.populated_at_start = False
        try:
            self.crash()
        finally:
            self.rig.populated_at_start = True
        for step in range(1, steps + 1):
            for part in reversed(range(len(TENANTS))):
                self.rig.depot.ready(PART_BYTES * step // steps, part)
                audit(self.rig.depot)

    def hog(self, who: str) -> None:
        """An engine reserves more than its part has, and commits nothing."""
        for path in range(2, 10):
            self.reserve(who, path, 0, DEPTH, (Kind.ATTENTION,))

    def quiet(self, tenant: str) -> None:
        """The engines of a tenant give back what they hold, and their requests end."""
        for name, engine in self.engines.items():
            if engine.spec.tenant == tenant:
                self.attach(name)
                self.give_up(name)
                for lease in list(engine.reads):
                    self.release(name, lease)
                for lease in list(engine.writes):
                    self.abandon(name, lease, [])
                for path in range(10):
                    self.leave_queue(name, path)
                    self.end_request(name, path)

    def check_unhindered(self, who: str) -> None:
        """A tenant of whom nothing is lent or pinned finds room for an object, whatever the others hold."""
        client = self.attach(who)
        if self._in_the_way(who, client):
            return
        keys = [key("unhindered", who, self.unhindered)]
        lease, reply = client.reserve(keys)
        assert reply.outcomes == bytes([ReserveOutcome.GRANTED]), f"{who}: {reply}"
        client.abandon(lease)
        self.unhindered += 1
        others = [name for name, one in self.engines.items() if one.spec.tenant != client.spec.tenant]
        self.beside_full += any(map(self._is_full, others))

    def _in_the_way(self, who: str, client: Client) -> bool:
        """Return whether something of its own tenant, or of an operator, may refuse a store."""
        depot, room, tenant = self.rig.depot, self.room(who), client.spec.tenant
        slots = room.slots or set()
        kept = {slot for slot, _ in depot._tree.in_use._requests} | set(depot._ram.evictor.orphan_slots())
        if depot.switches.refusal(Switch.STORES, client.namespace) or kept & slots:
            return True
        sessions = [one for one in depot._sessions.by_slot.values() if one.owner and one.owner.tenant == tenant]
        pins = depot._ram.pins
        return bool(
            any(one.leases for one in sessions)
            or depot._ram.lent_bytes(room=room)
            or pins.user.bytes_in(room.number)
            or pins.prefetch.bytes_in(room.number)
        )

    def _is_full(self, who: str) -> bool:
        """Return whether the part of its tenant has no room for an object of the engine."""
        ram = self.rig.depot._ram
        least_bytes = min(map(ram.rounded, self.engines[who].spec.object_bytes.values()))
        return self.room(who).allocator.free_bytes < least_bytes

    def check(self) -> None:
        """What the world checks, and that no row names bytes outside the part of its namespace's tenant."""
        super().check()
        ram, by_slot = self.rig.depot._ram, self.rig.depot._tree.namespaces.by_slot
        for engine in self.engines.values():
            for held in (*engine.writes.values(), *engine.reads.values()):
                for one in held.values():
                    namespace = self.rig.depot._tree.namespaces.by_id.get(one.name[0])
                    room = ram.rooms.of(namespace.slot) if namespace is not None else None
                    assert room is not None or namespace is None or namespace.spec is None
                    inside = [room is None or room.start <= o <= o + n <= room.end for _, o, n, _ in one.fragments]
                    assert all(inside), "an extent lies outside the part of its tenant"
        assert self.rig.counter("leaked_objects") == 0, "bytes that nobody can use until the next start"
        assert set(np.unique(ram.rows.namespaces[ram.rows.states != 0]).tolist()) <= by_slot.keys()


def act_of_tenants(world: TenantWorld, random: Random, who: str) -> None:
    """A random action that only tenants have."""
    match random.randrange(12):
        case 0:
            world.grow(steps=random.choice([1, 3]))
        case 1:
            world.move(who, random.choice(TENANTS))
        case 2 | 3 | 4:
            world.trespass(who, random.choice(sorted(SPECS)))
        case 5 | 6:
            world.hog(who)
        case _:
            world.quiet(world.engines[who].spec.tenant)
            world.check_unhindered(who)
