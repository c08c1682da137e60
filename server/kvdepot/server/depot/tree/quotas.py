"""Quotas: what each tenant and each namespace may hold of one tier, and holds (ADR 16).

One `Account` a tier. An entry of the configuration holds *owners* to its capacity: a
tenant with all its namespaces, or a namespace. For each namespace at most two decide, one
for the total of its tenant and one for itself: the most specific of those that match.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import Final

from kvdepot.core.report import QuotaOwnerStatus, QuotaStatus
from kvdepot.server.depot.tree.evicting import Evictor, Shortage
from kvdepot.server.depot.tree.holding import Demotion
from kvdepot.server.depot.tree.namespaces import Namespace
from kvdepot.server.depot.types import EVERY, ID_DIGITS, Quota

OWNERS_REPORTED_MAX: Final = 64
"""Of one entry in one tier, the fullest."""
_EVICTIONS_FOR_ROOM: Final = 64
"""Objects dropped to make room for one, the last unit beyond; where a capacity became smaller, `trim` goes on."""


class Owner:
    """The owner of one quota: the namespaces (slots) that share its capacity. All sizes are bytes."""

    def __init__(
        self, key: tuple[object, ...], quota: Quota, capacity_bytes: int, tenant: str | None, namespace: str
    ) -> None:
        self.key = key
        self.quota = quota
        self.capacity_bytes = capacity_bytes
        self.tenant = tenant
        self.namespace = namespace
        self.slots: set[int] = set()
        self.used_bytes = 0
        self.shortage = Shortage()
        self.refused_objects = 0
        self.evicted_objects = 0

    def __str__(self) -> str:
        whose = "an unknown tenant" if self.tenant is None else f"tenant {self.tenant!r}"
        return f"namespace {self.namespace!r} of {whose}" if self.namespace else whose

    def status(self) -> QuotaOwnerStatus:
        return QuotaOwnerStatus(
            self.tenant, self.namespace, self.used_bytes, self.refused_objects, self.evicted_objects
        )  # fmt: skip


class Account:
    """The quota account of one tier. `quotas` are all entries of the configuration. `evictor` is the tier's.

    No quota applies to an exempt tier.
    """

    def __init__(self, tier: str, quotas: Sequence[Quota], evictor: Evictor, *, exempt: bool = False) -> None:
        self._tier = tier
        self._exempt = exempt
        self._quotas: list[Quota] = []
        self._evictor = evictor
        self._held: defaultdict[int, int] = defaultdict(int)  # by namespace slot
        self._objects: defaultdict[int, int] = defaultdict(int)  # by namespace slot
        self._owners: dict[tuple[object, ...], Owner] = {}
        self._owners_of: dict[int, tuple[Owner, ...]] = {}  # by namespace slot
        # Objects, by what an entry is about: owners come and go, capacities change, and no count ever falls.
        self._refused: defaultdict[tuple[str, str | None], int] = defaultdict(int)
        self._evicted: defaultdict[tuple[str, str | None], int] = defaultdict(int)
        self.configure(quotas)

    def configure(self, quotas: Sequence[Quota]) -> None:
        """Use these entries from now on. The caller has every namespace enter again."""
        for slot in list(self._owners_of):
            self.leave(slot)
        # Of two about the same tenant and namespace the one that names the tier stands for both.
        about = {_about(quota): quota for tier in (EVERY, self._tier) for quota in quotas if quota.tier == tier}
        self._quotas = [] if self._exempt else list(about.values())

    @property
    def watched(self) -> bool:
        """Whether any entry is about this tier."""
        return bool(self._quotas)

    # Who holds what

    def held_bytes(self, slot: int) -> int:
        return self._held[slot]

    def objects(self, slot: int) -> int:
        """Return the number of objects that `add` has counted."""
        return self._objects[slot]

    def add(self, slot: int, objects: int, size_bytes: int) -> None:
        """Count a change of what lies here of the namespace, dying objects included."""
        self._objects[slot] += objects
        self.hold(slot, self._held[slot] + size_bytes)

    def hold(self, slot: int, held_bytes: int) -> None:
        """Set what the namespace holds."""
        change = held_bytes - self._held[slot]
        self._held[slot] = held_bytes
        for owner in self._owners_of.get(slot, ()):
            owner.used_bytes += change

    def enter(self, namespace: Namespace) -> None:
        """Assign owners to a namespace that is new, or whose tenant and label are known now."""
        self.leave(namespace.slot)
        owners = [self._owner(namespace, total=total) for total in (True, False)]
        for owner in filter(None, owners):
            owner.slots.add(namespace.slot)
            owner.used_bytes += self._held[namespace.slot]
        self._owners_of[namespace.slot] = tuple(filter(None, owners))

    def leave(self, slot: int) -> None:
        for owner in self._owners_of.pop(slot, ()):
            owner.slots.discard(slot)
            owner.used_bytes -= self._held[slot]
            if not owner.slots:
                del self._owners[owner.key]

    def _owner(self, namespace: Namespace, *, total: bool) -> Owner | None:
        quota = deciding(self._quotas, namespace, total=total)
        if quota is None or quota.capacity_bytes is None:
            return None
        # A tenant that is not known is one of its own: nobody loses anything for others' sake.
        tenant = ("unknown", namespace.slot) if namespace.tenant is None else namespace.tenant
        each = quota.namespace == EVERY
        key = (quota, tenant, namespace.id if each else b"")
        if key not in self._owners:
            shown = namespace.id.hex() if each else quota.namespace or ""
            self._owners[key] = Owner(key, quota, quota.capacity_bytes, namespace.tenant, shown)
        return self._owners[key]

    # Who may hold what

    def capacity_bytes(self, slot: int) -> int | None:
        """Return the least capacity that an entry allows the namespace."""
        return min((owner.capacity_bytes for owner in self._owners_of.get(slot, ())), default=None)

    def over(self, slot: int, size_bytes: int, share: float = 1.0) -> Owner | None:
        """Return an owner that would exceed this share of its capacity with so much more in the namespace."""
        for owner in self._owners_of.get(slot, ()):
            if owner.used_bytes + size_bytes > share * owner.capacity_bytes:
                return owner
        return None

    def placed(self, slot: int, size_bytes: int) -> None:
        """Note that an object of the namespace got room."""
        for owner in self._owners_of.get(slot, ()):
            owner.shortage.placed(size_bytes)

    def relieve(self, lent_bytes: Callable[[Collection[int]], int], demotion: Demotion) -> None:
        """Drop an orphan of an owner whose object lacked room. `lent_bytes`: of namespaces, what cannot go now."""
        for owner in list(self._owners.values()):
            free_bytes, slots = owner.capacity_bytes - owner.used_bytes, owner.slots
            if not self._evictor.lacks(owner.shortage, free_bytes, slots):
                continue
            if owner.capacity_bytes - lent_bytes(slots) < owner.shortage.size_bytes:
                continue  # all orphans together would not make room
            if self._count(owner, self._evictor.drop_orphan("quota", slots, demotion)):
                self._owners[owner.key] = self._owners.pop(owner.key)  # after the others

    def make_room(self, slot: int, size_bytes: int) -> bool:
        """Return whether so much more may lie in the namespace. Evict what its own owners need the least."""
        left = _EVICTIONS_FOR_ROOM
        while (owner := self.over(slot, size_bytes)) is not None and left > 0:
            gone = self._evict(owner) if size_bytes <= owner.capacity_bytes else 0
            if not gone:
                return False
            left -= gone
        return owner is None

    def trim(self, high: float, low: float, limit: int, demotion: Demotion | None = None) -> bool:
        """Evict owners from above `high` of their capacity to `low` of it. Return whether more is due.

        An owner's share is `limit` divided by their number: no further unit of it once so many objects have gone.
        """
        full = [owner for owner in self._owners.values() if owner.used_bytes > high * owner.capacity_bytes]
        more = False
        for owner in full:
            left = max(limit // len(full), 1)
            while left > 0 and owner.used_bytes > low * owner.capacity_bytes:
                objects, done = self._evictor.evict_ahead("quota", owner.slots, demotion)
                self._count(owner, objects)
                if not done:
                    self._count(owner, self._evictor.drop_orphan("quota", owner.slots, demotion))
                    break
                left -= done
            more |= left <= 0
        return more

    def _evict(self, owner: Owner) -> int:
        return self._count(owner, self._evictor.evict_one("quota", owner.slots))

    def _count(self, owner: Owner, objects: int) -> int:
        owner.evicted_objects += objects
        self._evicted[_about(owner.quota)] += objects
        return objects

    def refuse(self, owner: Owner, objects: int = 1) -> None:
        """Count objects that were refused because of the owner's quota."""
        owner.refused_objects += objects
        self._refused[_about(owner.quota)] += objects

    # What an operator sees

    def statuses(self) -> tuple[QuotaStatus, ...]:
        """Return the status of each entry about this tier that limits anything."""
        return tuple(self._status(quota) for quota in self._quotas if quota.capacity_bytes is not None)

    def _status(self, quota: Quota) -> QuotaStatus:
        owners = [owner for owner in self._owners.values() if owner.quota is quota]
        owners.sort(key=lambda owner: owner.used_bytes, reverse=True)
        return QuotaStatus(
            tenant=quota.tenant,
            namespace=quota.namespace or "",
            tier=self._tier,
            capacity_bytes=quota.capacity_bytes or 0,
            owners_count=len(owners),
            owners=tuple(owner.status() for owner in owners[:OWNERS_REPORTED_MAX]),
            refused_objects=self._refused[_about(quota)],
            evicted_objects=self._evicted[_about(quota)],
        )


def _about(quota: Quota) -> tuple[str, str | None]:
    return quota.tenant, quota.namespace


def deciding(quotas: Sequence[Quota], namespace: Namespace, *, total: bool) -> Quota | None:
    """Return the entry about a namespace, or about the total of its tenant; None: no limit."""
    ranked = [
        (*rank, quota.tenant != EVERY, quota)
        for quota in quotas
        if (quota.namespace is None) is total
        and quota.tenant in (EVERY, namespace.tenant)
        and (rank := _rank(quota.namespace, namespace)) is not None
    ]
    return max(ranked, key=lambda one: one[:-1])[-1] if ranked else None


def _rank(text: str | None, namespace: Namespace) -> tuple[int, int] | None:
    """Return how precisely the text names the namespace: all, by label, by digits of its id; None: not at all."""
    if text in (None, EVERY):
        return 0, 0
    if ID_DIGITS.fullmatch(text):
        return (2, len(text)) if namespace.id.hex().startswith(text) else None
    return (1, 0) if text == namespace.label else None
