"""The books of quotas, kept anew by brute force (row T8), and a watch over whose objects go for their sake."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvdepot.core.arena import RowState
from kvdepot.core.calls import Kind
from kvdepot.server.depot.depot import Depot
from kvdepot.server.depot.tree.evicting import Evictor
from kvdepot.server.depot.tree.lower_tier import LowerTier
from kvdepot.server.depot.tree.quotas import Account, Owner
from kvdepot.server.depot.tree.ram import RamTier


def accounts(engine: Depot) -> list[Account]:
    return [holding.account for holding in engine._tree.holdings]


def owners(engine: Depot) -> Iterator[Owner]:
    return (owner for account in accounts(engine) for owner in account._owners.values())


def audit_quotas(engine: Depot) -> None:
    """Assert that the books say what lies where."""
    tree, ram = engine._tree, engine._ram
    held: Counter[int] = Counter()
    for row in range(ram.rows.count):
        state = ram.rows.state[row]
        if state not in (RowState.FREE, RowState.CONTINUATION) and row not in ram.unreusable:
            held[ram.rows.namespace[row]] += ram.rounded_bytes(row)
    assert {slot: size for slot, size in ram.account._held.items() if size} == held
    for tier in tree.tiers:
        if not tier.account.watched:
            assert not any(tier.account._held.values()), "a book that nobody keeps"
            continue
        lies: Counter[int] = Counter()
        for node in tree.index.nodes().tolist():
            kinds = [kind for kind in Kind if tier.has(node, kind)]
            lies[tree.index.namespace(node)] += sum(tier.cost_bytes(node, kind) for kind in kinds)
        for slot, namespace in tree.namespaces.by_slot.items():
            for kind, size_bytes in namespace.object_bytes.items():
                lies[slot] += tier._writing[slot][kind] * tier.tier.cost_bytes(size_bytes)
        assert {slot: size for slot, size in tier.account._held.items() if size} == +lies
    for account in accounts(engine):
        for owner in account._owners.values():
            assert owner.slots <= set(tree.namespaces.by_slot)
            assert owner.used_bytes == sum(account.held_bytes(slot) for slot in owner.slots)


def check_within_quotas(engine: Depot) -> None:
    """I4: nobody holds more than it may, in any tier."""
    for owner in owners(engine):
        assert owner.used_bytes <= owner.capacity_bytes, f"{owner}: {owner.used_bytes} of {owner.capacity_bytes}"


@contextmanager
def only_owners_lose() -> Iterator[None]:
    """Within it, every eviction for a quota takes from nobody else."""
    evict_one: Callable[..., int] = Evictor.evict_one

    def watched(self: Evictor, reason: str, slots: set[int] | None = None) -> int:
        before = _objects(self._holding)
        evicted = evict_one(self, reason, slots)
        after = _objects(self._holding)
        if reason == "quota":
            assert slots, "an eviction for a quota has owners"
            assert {slot for slot in before if before[slot] != after[slot]} <= set(slots), "others lost objects"
        return evicted

    Evictor.evict_one = watched  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        Evictor.evict_one = evict_one  # type: ignore[method-assign]


def _objects(holding: object) -> dict[int, int]:
    assert isinstance(holding, LowerTier | RamTier)
    if isinstance(holding, LowerTier):
        return {slot: sum(holding.contents(slot).values()) for slot in holding._namespaces.by_slot}
    return {slot: sum(namespace.objects.values()) for slot, namespace in holding._namespaces.by_slot.items()}
