"""Quotas: which entry decides, whose objects make room, what is answered, what is reported (row T8, I4)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvdepot.core.calls import AcquireOutcome, Kind, ReserveOutcome
from kvdepot.core.keys import NamespaceSpec
from kvdepot.core.planner import GroupSpec
from kvdepot.server.depot.tree.namespaces import Namespace
from kvdepot.server.depot.tree.quotas import deciding
from kvdepot.server.depot.types import EVERY, DepotConfig, Quota

from tests.rigs.engine_rig import CHUNK, HYBRID, Client, Rig, audit, path, spec_of
from tests.rigs.quota_audit import check_within_quotas, only_owners_lose, owners
from tests.rigs.tier_rig import COMMIT, EVICT, in_tier, reboot, settle, store, verify

PAGE = 4096
CHUNK_BYTES = 2 * PAGE
ON_TIER_BYTES = CHUNK_BYTES + PAGE  # with the header


@pytest.fixture(autouse=True)
def _watched() -> Iterator[None]:
    with only_owners_lose():
        yield


def dense(name: str, tenant: str = "") -> NamespaceSpec:
    return spec_of(GroupSpec(Kind.ATTENTION, 16, rank_block_bytes=(4096,)), name=name, tenant=tenant)


def used(rig: Rig, tier: str = "ram") -> dict[tuple[str | None, str], int]:
    return {
        (owner.tenant, owner.namespace): owner.used_bytes
        for quota in rig.depot.status().quotas
        if quota.tier == tier
        for owner in quota.owners
    }


def engines(rig: Rig, *specs: NamespaceSpec) -> list[Client]:
    return [rig.attach(f"engine-{at}", 10 + at, spec) for at, spec in enumerate(specs)]


# Which entry decides

texts = st.sampled_from([None, EVERY, "llama", "other", "00112233", "001122334455", "ffffffff"])
entries = st.builds(Quota, st.sampled_from([EVERY, "a", "b"]), texts)


def known(tenant: str | None) -> Namespace:
    namespace = Namespace(0, bytes.fromhex("00112233445566778899aabbccddeeff"), "llama", 0.0)
    namespace.tenant = tenant
    return namespace


@pytest.mark.requirement("T8")
@given(st.lists(entries, unique=True), st.sampled_from([None, "a", "c"]), st.booleans())
def test_the_most_specific_entry_that_matches_decides(
    quotas: list[Quota], tenant: str | None, total: bool
) -> None:  # fmt: skip
    """Namespace before tenant; an id before a label, more digits before fewer."""
    order = ["001122334455", "00112233", "llama", EVERY]
    matching = [
        quota
        for quota in quotas
        if quota.tenant in (EVERY, tenant) and (quota.namespace is None if total else quota.namespace in order)
    ]

    def specific(quota: Quota) -> tuple[int, bool]:
        named = 0 if quota.namespace is None else order.index(quota.namespace)
        return (named, quota.tenant == EVERY)

    expected = min(matching, key=specific, default=None)
    assert deciding(quotas, known(tenant), total=total) is expected


@pytest.mark.requirement("T8")
def test_none_is_an_exception_from_a_wider_entry() -> None:
    rig = Rig(quotas=(Quota(capacity_bytes=CHUNK_BYTES), Quota("rich")))
    poor, rich = engines(rig, dense("x", "poor"), dense("x", "rich"))
    rich.store(path("r", 8))
    _, reply = poor.reserve(path("p", 2))
    assert list(reply.outcomes) == [ReserveOutcome.GRANTED, ReserveOutcome.LATER]
    assert used(rig) == {("poor", ""): CHUNK_BYTES}


@pytest.mark.requirement("T8")
def test_an_entry_that_names_the_tier_stands_for_one_about_all_tiers_and_counts_on() -> None:
    """Both would be one series of /metrics."""
    every = Quota(capacity_bytes=CHUNK_BYTES)
    rig = Rig(tier=COMMIT, quotas=(every,))
    client = rig.attach()
    client.reserve(path("p", 2))
    refused = [(quota.tier, quota.refused_objects) for quota in rig.depot.status().quotas]
    assert refused == [("ram", 1), (rig.tier.name, 0)]
    for named in (Quota(tier="ram", capacity_bytes=3 * CHUNK_BYTES), Quota(tier="ram")):
        for quotas in ((every, named), (named, every)):
            rig.depot.configure(replace(rig.config, quotas=quotas), {})
            shown = [(one.tier, one.capacity_bytes, one.refused_objects) for one in rig.depot.status().quotas]
            of_ram = [("ram", named.capacity_bytes, 1)] if named.capacity_bytes else []
            assert shown == [*of_ram, (rig.tier.name, CHUNK_BYTES, 0)]
    _, reply = client.reserve(path("q", 3))
    assert list(reply.outcomes) == [ReserveOutcome.GRANTED] * 3, "no limit in RAM any more"


# RAM


@pytest.mark.requirement("T8", "I4")
def test_a_namespace_at_its_quota_evicts_its_own_least_useful_and_nobody_else_s() -> None:
    rig = Rig(quotas=(Quota(namespace="x", capacity_bytes=3 * CHUNK_BYTES),), eviction="lru")
    x, y = engines(rig, dense("x"), dense("y"))
    y.store(path("oldest", 4))
    for name in ("p", "q", "r"):
        rig.now += 1
        x.store(path(name, 1))
    rig.now += 1
    x.release(x.acquire(path("p", 1))[0])
    x.store(path("s", 1))
    assert [x.locate(path(name, 1)).boundary_tokens for name in "pqrs"] == [CHUNK, 0, CHUNK, CHUNK]
    assert y.locate(path("oldest", 4)).boundary_tokens == 4 * CHUNK
    assert rig.counter("evicted_objects.quota") == 1
    (quota,) = rig.depot.status().quotas
    assert (quota.evicted_objects, quota.owners[0].evicted_objects, quota.owners[0].used_bytes) == (
        1,
        1,
        3 * CHUNK_BYTES,
    )
    audit(rig.depot)


@pytest.mark.requirement("T8")
def test_a_tenant_s_namespaces_share_its_quota() -> None:
    rig = Rig(quotas=(Quota(tenant=EVERY, capacity_bytes=4 * CHUNK_BYTES),))
    one, two, other = engines(rig, dense("x", "a"), dense("y", "a"), dense("x", "b"))
    one.store(path("p", 2))
    other.store(path("p", 4))
    two.store(path("q", 3))
    assert used(rig) == {("a", ""): 4 * CHUNK_BYTES, ("b", ""): 4 * CHUNK_BYTES}
    assert one.locate(path("p", 2)).boundary_tokens == CHUNK
    assert other.locate(path("p", 4)).boundary_tokens == 4 * CHUNK
    audit(rig.depot)


@pytest.mark.requirement("T8")
def test_a_tenant_s_and_a_namespace_s_quota_hold_at_once() -> None:
    rig = Rig(quotas=(Quota(capacity_bytes=4 * CHUNK_BYTES), Quota(namespace=EVERY, capacity_bytes=3 * CHUNK_BYTES)))
    one, two = engines(rig, dense("x", "a"), dense("y", "a"))
    for name in range(5):
        one.store(path(name, 1))
        two.store(path(name, 1))
        check_within_quotas(rig.depot)
    sizes = used(rig)
    assert sizes["a", ""] == 4 * CHUNK_BYTES
    assert max(size for (_, namespace), size in sizes.items() if namespace) <= 3 * CHUNK_BYTES


@pytest.mark.requirement("T8", "I4")
def test_its_own_reservations_are_waited_for_and_its_own_path_is_not() -> None:
    rig = Rig(quotas=(Quota(capacity_bytes=2 * CHUNK_BYTES),))
    client = rig.attach()
    keys = path("long", 3)
    lease, reply = client.reserve(keys)
    assert list(reply.outcomes) == [ReserveOutcome.GRANTED, ReserveOutcome.GRANTED, ReserveOutcome.LATER]
    assert reply.reason.startswith("quota: tenant '' has 16384 of 16384 bytes")
    client.commit(lease, 0, 1)
    _, reply = client.reserve(keys[2:], start=2, parent=keys[1])
    assert list(reply.outcomes) == [ReserveOutcome.NO_ROOM], "what it would evict is what it continues"
    assert reply.reason.startswith("quota")
    client.store(path("other", 1))
    (quota,) = rig.depot.status().quotas
    assert quota.refused_objects == quota.owners[0].refused_objects == 2
    audit(rig.depot)


@pytest.mark.requirement("T8")
def test_an_object_above_its_quota_is_refused_and_costs_nobody_anything() -> None:
    rig = Rig(quotas=(Quota(namespace="big", capacity_bytes=CHUNK_BYTES + PAGE), Quota(capacity_bytes=20 * PAGE)))
    big = spec_of(GroupSpec(Kind.ATTENTION, 16, rank_block_bytes=(8192,)), name="big")
    small, huge = engines(rig, dense("small"), big)
    small.store(path("p", 4))
    _, reply = huge.reserve(path("q", 1))
    assert list(reply.outcomes) == [ReserveOutcome.NO_ROOM]
    assert small.locate(path("p", 4)).boundary_tokens == 4 * CHUNK


@pytest.mark.requirement("T8", "I6")
def test_dying_bytes_count_until_they_are_given_back() -> None:
    rig = Rig(quotas=(Quota(capacity_bytes=2 * CHUNK_BYTES),), lease_deadline_seconds=10.0)
    client = rig.attach()
    lease, _ = client.reserve(path("p", 2))
    rig.now += 11
    rig.depot.tick()  # service has ended; its ranks may still write
    _, reply = client.reserve(path("q", 1))
    assert list(reply.outcomes) == [ReserveOutcome.LATER]
    assert used(rig) == {("", ""): 2 * CHUNK_BYTES}
    client.abandon(lease)
    client.store(path("q", 1))
    assert used(rig) == {("", ""): CHUNK_BYTES}
    audit(rig.depot)


@pytest.mark.requirement("T8")
def test_a_busy_victim_stops_neither_the_next_one_nor_the_engine() -> None:
    rig = Rig(quotas=(Quota(capacity_bytes=3 * CHUNK_BYTES),), eviction="lru")
    client = rig.attach()
    for name in ("p", "q", "r"):
        rig.now += 1
        client.store(path(name, 1))
    held = [client.acquire(path(name, 1))[0] for name in ("p", "q")]
    client.store(path("s", 1))  # r goes, although it was used last
    assert [client.locate(path(name, 1)).boundary_tokens for name in "pqrs"] == [CHUNK, CHUNK, 0, CHUNK]
    held.append(client.acquire(path("s", 1))[0])
    _, reply = client.reserve(path("t", 1))
    assert list(reply.outcomes) == [ReserveOutcome.LATER]
    client.release(held[0])
    client.store(path("t", 1))
    assert client.locate(path("p", 1)).boundary_tokens == 0
    audit(rig.depot)


@pytest.mark.requirement("T8")
def test_an_abandoned_and_a_lost_object_leave_the_books() -> None:
    rig = Rig(quotas=(Quota(capacity_bytes=8 * CHUNK_BYTES),))
    client = rig.attach()
    lease, _ = client.reserve(path("p", 3))
    client.abandon(lease, 2)
    client.commit(lease, 0, 1)
    assert used(rig) == {("", ""): 2 * CHUNK_BYTES}
    rig.depot._tree.drop_subtree(0)
    assert used(rig) == {("", ""): 0}
    audit(rig.depot)


@pytest.mark.requirement("T8")
def test_near_a_quota_tick_makes_room_ahead_of_need_and_demotes() -> None:
    """As for a whole tier: above the high watermark, and what a tier below is to have is written first."""
    rig = Rig(tier=EVICT, quotas=(Quota(tier="ram", capacity_bytes=10 * CHUNK_BYTES),), high_watermark=0.9,
              low_watermark=0.6)  # fmt: skip
    client = rig.attach()
    for name in range(10):
        store(client, path(name, 1))
    settle(rig)
    assert used(rig) == {("", ""): 6 * CHUNK_BYTES}
    assert in_tier(rig) >= 4
    assert all(client.locate(path(name, 1)).boundary_tokens == CHUNK for name in range(10))


@pytest.mark.requirement("T8")
def test_a_quota_that_became_smaller_is_made_true_in_slices_and_what_was_learned_late_too() -> None:
    rig = Rig(evictions_at_once=3)
    one, two = engines(rig, dense("x", "a"), dense("y", "a"))
    for name in range(6):
        one.store(path(name, 1))
        two.store(path(name, 1))
    rig.sum_all()
    rig.config = _with_quotas(rig, Quota(capacity_bytes=8 * CHUNK_BYTES))
    rig.crash()
    rig.sum_all()
    assert used(rig) == {(None, ""): 6 * CHUNK_BYTES}, "whose they are is not known yet"
    rig.depot.tick()
    assert rig.depot.status().tier.objects == 12
    one, two = engines(rig, dense("x", "a"), dense("y", "a"))
    assert used(rig) == {("a", ""): 12 * CHUNK_BYTES}
    _, reply = one.reserve(path("new", 1))  # makes room itself, as far as one call may
    check_within_quotas(rig.depot)
    assert list(reply.outcomes) == [ReserveOutcome.GRANTED]
    audit(rig.depot)


@pytest.mark.requirement("T8")
def test_tick_evicts_at_most_its_share_and_comes_to_an_end() -> None:
    rig = Rig(evictions_at_once=3)
    client = rig.attach()
    for name in range(12):
        client.store(path(name, 1))
    rig.sum_all()
    rig.config = _with_quotas(rig, Quota(capacity_bytes=4 * CHUNK_BYTES))
    rig.crash()
    rig.sum_all()
    client = rig.attach()
    objects, more = [], []
    for _ in range(5):
        more.append(rig.depot.tick())
        objects.append(rig.depot.status().tier.objects)
    assert more == [True, True, True, False, False], "whether to go on before the next tick"
    assert objects[:2] == [9, 6]
    assert objects[3] == objects[4] <= 4
    check_within_quotas(rig.depot)


@pytest.mark.requirement("T8")
def test_a_tick_s_share_is_of_objects_however_long_the_units_are() -> None:
    rig = Rig(data_pages=256, evictions_at_once=8, high_watermark=0.5, low_watermark=0.1,
              quotas=(Quota(tier="ram", capacity_bytes=200 * PAGE),))  # fmt: skip
    client = rig.attach(spec=HYBRID)
    for name in range(6):
        keys = path(name, 10)
        client.store(keys)
        client.store(keys[-1:], (Kind.STATE,), start=9, parent=keys[-2])
    objects = [rig.depot.status().tier.objects]
    for _ in range(2):
        rig.depot.tick()
        objects.append(rig.depot.status().tier.objects)
    assert objects == [66, 55, 44], "a unit is a path and the state at its end"
    audit(rig.depot)


def _with_quotas(rig: Rig, *quotas: Quota) -> DepotConfig:
    return replace(rig.config, quotas=quotas)


# Tiers below


def test_ram_is_trimmed_as_a_whole_in_the_slice_that_trims_an_owner() -> None:
    rig = Rig(data_pages=20, evictions_at_once=1, high_watermark=1.0, low_watermark=0.1,
              quotas=(Quota(tenant="a", tier="ram", capacity_bytes=8 * CHUNK_BYTES),))  # fmt: skip
    client, other = engines(rig, dense("x", "a"), dense("y", "b"))
    client.store(path("p", 4))
    other.store(path("q", 4))
    rig.depot._ram.trim(0.4, 0.1, 1, rig.depot._tiering)
    assert rig.counter("evicted_objects.quota") == rig.counter("evicted_objects.watermark") == 1
    audit(rig.depot)


@pytest.mark.requirement("T8", "I4")
def test_a_tier_below_evicts_an_owner_s_own_and_drops_what_does_not_fit() -> None:
    rig = Rig(tier=COMMIT, quotas=(Quota(namespace="x", tier="memory", capacity_bytes=3 * ON_TIER_BYTES),))
    x, y = engines(rig, dense("x"), dense("y"))
    store(y, path("y", 4))
    for name in ("p", "q", "r", "s"):
        store(x, path(name, 1))
        rig.tier.run()
    assert used(rig, "memory") == {("", "x"): 3 * ON_TIER_BYTES}
    assert (in_tier(rig), rig.counter("tier_evicted_objects.memory/quota")) == (7, 1)
    keys = path("long", 5)
    store(x, keys)
    rig.tier.run()
    assert used(rig, "memory") == {("", "x"): 3 * ON_TIER_BYTES}
    assert rig.counter("tier_writes_dropped.memory/quota") == 1
    assert rig.counter("tier_writes_dropped.memory/no_parent") == 1
    node = [rig.depot._tree.index.find(rig.depot._tree.namespaces.by_id[x.namespace].slot, key) for key in keys]
    assert [rig.depot._tree.tiers[0].has(at, 1) for at in node] == [True, True, True, False, False]
    audit(rig.depot)


@pytest.mark.requirement("T8")
def test_what_is_being_written_counts() -> None:
    rig = Rig(tier=COMMIT, quotas=(Quota(tier="memory", capacity_bytes=2 * ON_TIER_BYTES),))
    client = rig.attach()
    for name in range(3):
        store(client, path(name, 1))
    assert len(rig.tier.jobs) == 2
    assert used(rig, "memory") == {("", ""): 2 * ON_TIER_BYTES}
    assert rig.counter("tier_writes_dropped.memory/quota") == 1
    audit(rig.depot)
    rig.tier.finish(rig.tier.jobs[0], None)
    audit(rig.depot)


@pytest.mark.requirement("T8")
def test_what_a_tier_finds_above_a_smaller_quota_goes_in_slices() -> None:
    rig = Rig(tier=COMMIT)
    client = rig.attach()
    for name in range(6):
        store(client, path(name, 1))
    rig.tier.run()
    rig.config = _with_quotas(rig, Quota(tier="memory", capacity_bytes=2 * ON_TIER_BYTES))
    reboot(rig)
    assert used(rig, "memory") == {(None, ""): 6 * ON_TIER_BYTES}
    rig.depot.tick()
    assert used(rig, "memory") == {(None, ""): ON_TIER_BYTES}, "to the low watermark"
    audit(rig.depot)


@pytest.mark.requirement("T8", "I4")
def test_ram_gives_up_the_end_of_a_path_that_goes_on_in_a_tier_below() -> None:
    """The tier has lost a chunk of a path, and may not have it again: RAM's copy of it may go all the same."""
    rig = Rig(tier=COMMIT)
    keys = path("p", 8)
    store(rig.attach(), keys)
    rig.tier.run()
    del rig.medium.stored[2]
    rig.config = _with_quotas(
        rig,
        Quota(tier="ram", capacity_bytes=2 * CHUNK_BYTES),
        Quota(tier="memory", capacity_bytes=4 * ON_TIER_BYTES),
    )
    rig.crash()
    client = rig.attach()
    for _ in range(40):
        rig.now += 1
        verify(rig)
        rig.tier.run()
        rig.depot.tick()
        audit(rig.depot)
    assert 0 < used(rig)["", ""] <= 2 * CHUNK_BYTES
    ram, memory = rig.depot.status().quotas
    assert ram.evicted_objects >= 6 and memory.owners[0].used_bytes <= 4 * ON_TIER_BYTES
    assert client.locate(keys).boundary_tokens >= CHUNK, "what is left is the beginning of the path"


@pytest.mark.requirement("T8")
def test_a_load_that_a_quota_has_no_room_for_is_answered_and_not_offered() -> None:
    rig = Rig(tier=COMMIT)
    client = rig.attach()
    keys = path("p", 6)
    store(client, keys)
    rig.tier.run()
    rig.config = _with_quotas(rig, Quota(tier="ram", capacity_bytes=4 * CHUNK_BYTES))
    reboot(rig)
    client = rig.attach()
    assert client.locate(keys).boundary_tokens == 4 * CHUNK, "more of it would never be in RAM at once"
    _, reply = client.acquire(keys)
    assert (reply.outcome, reply.reason) == (AcquireOutcome.REFUSED, "quota: of tenant ''")
    answers = client.acquire_later(keys[:4], bytes([1] * 4), client.lease())
    rig.tier.run()
    assert answers[0].outcome is AcquireOutcome.GRANTED
    _, reply = client.acquire([keys[4]])
    assert reply.outcome is AcquireOutcome.LATER, "what is lent comes back"
    (quota,) = rig.depot.status().quotas
    assert quota.refused_objects == 6 + 1
    audit(rig.depot)


@pytest.mark.requirement("T8")
def test_an_owner_is_reported_as_long_as_it_has_namespaces() -> None:
    rig = Rig(quotas=(Quota(namespace=EVERY, capacity_bytes=PAGE * 9), Quota("a", "absent", capacity_bytes=5)))
    client = rig.attach(spec=dense("x", "t"))
    every, absent = rig.depot.status().quotas
    assert (every.owners_count, every.owners[0].tenant, every.owners[0].namespace) == (1, "t", client.namespace.hex())
    assert (absent.tenant, absent.namespace, absent.owners_count, absent.owners) == ("a", "absent", 0, ())
    namespace = rig.depot._tree.namespaces.by_id[client.namespace]
    rig.depot._tree.namespaces.remove(namespace)
    assert not list(owners(rig.depot))
