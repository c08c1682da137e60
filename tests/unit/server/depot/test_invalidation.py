"""A bump of the epoch inside the engine (row P2): at once, in every tier, whatever is in flight."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kvdepot.core.calls import AcquireOutcome, CommitOutcome, Kind, ReserveOutcome
from kvdepot.core.control import Switch
from kvdepot.core.epochs import Epochs
from kvdepot.core.errors import StaleEpoch, UnknownNamespace
from kvdepot.core.keys import NamespaceSpec
from kvdepot.core.misses import MissReason
from kvdepot.server.depot.operators.invalidation import Invalidated

from tests.fakes.shared_memory_tier import SharedMedium
from tests.rigs.engine_rig import CHUNK, DENSE, HYBRID, Client, Rig, audit, path, unpack
from tests.rigs.tier_rig import COMMIT, on_tier_only, store

KEYS = path("p", 3)
BOTH = pytest.mark.parametrize("everywhere", [True, False], ids=["all", "one"])


def bump(rig: Rig, client: Client, *, everywhere: bool = False) -> Invalidated:
    epochs = rig.depot.invalidation.epochs
    after = epochs.with_all_invalidated() if everywhere else epochs.with_invalidated(client.namespace)
    return rig.depot.invalidation.begin(after)


def again(client: Client) -> NamespaceSpec:
    """Register it with the counter that the daemon says, as clients do."""
    with pytest.raises(StaleEpoch) as stale:
        client.rig.depot.register_namespace(client.session, client.spec)
    client.spec = replace(client.spec, bumps=stale.value.bumps)
    client.namespace, _ = client.rig.depot.register_namespace(client.session, client.spec)
    return client.spec


@pytest.mark.requirement("P2")
@BOTH
def test_what_was_stored_is_found_by_nobody(everywhere: bool) -> None:
    rig = Rig()
    client, other = rig.attach("one", 10), rig.attach("other", 11, HYBRID)
    client.store(KEYS)
    other.store(KEYS, (Kind.ATTENTION, Kind.STATE))
    assert bump(rig, client, everywhere=everywhere) == Invalidated(1 + everywhere, 3 * (1 + everywhere), 0)
    for ask in (client.locate, client.acquire, client.reserve):
        with pytest.raises(UnknownNamespace):
            ask(KEYS)
    assert again(client).bumps == 1
    assert client.locate(KEYS).boundary_tokens == 0
    late = rig.attach("late", 12, replace(DENSE, bumps=1))
    assert late.locate(KEYS).miss == MissReason.EPOCH_BUMPED
    if not everywhere:
        assert other.locate(KEYS).boundary_tokens == 3 * CHUNK
    rig.depot.tick()
    assert late.locate(KEYS).miss == MissReason.EPOCH_BUMPED, "when it is dropped too"
    client.store(KEYS)
    assert late.locate(KEYS).boundary_tokens == 3 * CHUNK
    for _ in range(3):
        rig.depot.tick()
    namespaces = {one.namespace_id: one.objects for one in rig.depot.status().namespaces}
    assert namespaces[DENSE.namespace_id()] == {}, "its room is free"
    audit(rig.depot)


@pytest.mark.requirement("P2")
def test_a_void_namespace_is_refused_to_every_engine_and_bumped_again_it_is_another() -> None:
    rig = Rig()
    client = rig.attach("one", 10)
    for bumps in (1, 2):
        client.store(KEYS)
        bump(rig, client)
        assert again(client).bumps == bumps
    with pytest.raises(StaleEpoch, match="has to be 2"):
        rig.attach("old", 11, replace(DENSE, bumps=1))
    assert rig.counter("stale_registrations") == 3
    assert rig.depot.invalidation.covers(DENSE.namespace_id())
    assert not rig.depot.invalidation.covers(client.namespace)


@pytest.mark.requirement("P2")
@BOTH
def test_a_load_in_progress_ends_with_another_generation_and_stays_lent(everywhere: bool) -> None:
    rig = Rig()
    client = rig.attach()
    client.store(KEYS)
    lease, reply = client.acquire(KEYS)
    granted = {row: generation for _, row, _, _, generation in unpack(reply.extents)}
    lent_bytes = rig.depot.status().tier.lent_bytes
    assert bump(rig, client, everywhere=everywhere).leases == 1
    generations = rig.depot._ram.rows.generation
    assert all(generations[row] != generation for row, generation in granted.items())
    for _ in range(3):
        rig.depot.tick()
    assert rig.depot.status().tier.lent_bytes == lent_bytes > 0, "ranks may be copying"
    client.release(lease)
    assert (rig.depot.status().tier.lent_bytes, rig.depot.status().tier.used_bytes) == (0, 0)
    audit(rig.depot)


@pytest.mark.requirement("P2")
@BOTH
def test_what_was_reserved_is_not_committed_and_its_room_returns(everywhere: bool) -> None:
    rig = Rig()
    client = rig.attach()
    lease, reply = client.reserve(KEYS)
    assert set(reply.outcomes) == {ReserveOutcome.GRANTED}
    assert bump(rig, client, everywhere=everywhere).leases == 1
    again(client)
    assert set(client.reserve(KEYS)[1].outcomes) == {ReserveOutcome.GRANTED}, "as another namespace"
    assert set(client.commit(lease, 0, 1, 2)) == {CommitOutcome.EXPIRED}
    assert client.locate(KEYS).boundary_tokens == 0
    rig.depot.tick()
    audit(rig.depot)


@pytest.mark.requirement("P2")
def test_an_acquire_that_waits_for_a_disk_is_refused_and_the_disk_s_copy_never_found_again() -> None:
    rig = Rig(tier=COMMIT)
    client = on_tier_only(rig, KEYS)
    replies = client.acquire_later(KEYS, bytes([Kind.ATTENTION]) * 3, client.lease())
    assert not replies, "its worker has not begun"
    bump(rig, client)
    (refused,) = replies
    assert (refused.outcome, refused.reason) == (AcquireOutcome.REFUSED, "the operator has bumped the epoch")
    assert rig.counter("refused_loads.epoch_bumped") == 1
    again(client)
    assert client.locate(KEYS).boundary_tokens == 0


@pytest.mark.requirement("P2")
@BOTH
def test_nothing_comes_back_with_the_next_run(everywhere: bool) -> None:
    rig = Rig(tier=COMMIT)
    client = rig.attach()
    store(client, KEYS)
    rig.tier.run()
    bump(rig, client, everywhere=everywhere)
    epochs = rig.depot.invalidation.epochs
    rig.crash()  # before anything was dropped
    rig.depot.invalidation.epochs = epochs
    rig.sum_all()
    with pytest.raises(StaleEpoch):
        rig.attach("old", 11)
    late = rig.attach("late", 12, replace(DENSE, bumps=1))
    assert late.locate(KEYS).boundary_tokens == 0
    # What no engine has registered in this run is void too, and all of it.
    assert rig.depot.invalidation.begin(epochs.with_all_invalidated()).namespaces == 2
    audit(rig.depot)


def test_a_namespace_that_no_engine_has_registered_can_be_bumped() -> None:
    rig = Rig()
    client = rig.attach()
    client.store(KEYS)
    rig.sum_all()
    rig.crash()
    rig.depot.invalidation.begin(Epochs().with_invalidated(DENSE.namespace_id()))
    assert rig.depot.invalidation.covers(DENSE.namespace_id())
    with pytest.raises(StaleEpoch, match="has to be 1"):
        rig.attach("again", 11)


@pytest.mark.requirement("I1e")
def test_what_is_switched_off_for_a_namespace_stays_off_for_what_comes_after_it() -> None:
    rig = Rig()
    client = rig.attach()
    rig.depot.switch(Switch.STORES, client.namespace, on=False)
    bump(rig, client)
    again(client)
    assert set(client.reserve(KEYS)[1].outcomes) == {ReserveOutcome.REFUSED}
    assert rig.depot.switches.status().stores_off_namespaces == (client.namespace,)


@pytest.mark.requirement("P2")
def test_a_locate_that_waits_for_a_shared_tier_finds_nothing() -> None:
    medium = SharedMedium()
    node = Rig(shared=COMMIT, shared_medium=medium)
    node.shared.automatic = True
    store(node.attach(), KEYS)
    node.shared.run()
    rig = Rig(shared=COMMIT, shared_medium=medium)
    client = rig.attach()
    answers = client.locate_later(KEYS)
    assert not answers
    bump(rig, client)
    rig.shared.run()
    assert [one.boundary_tokens for one in answers] == [0]
    again(client)
    answers = client.locate_later(KEYS)
    rig.shared.run()
    assert [one.boundary_tokens for one in answers] == [0], "it asks for other names"


@pytest.mark.requirement("P2")
def test_nothing_is_read_ahead_of_what_is_void() -> None:
    rig = Rig(tier=COMMIT, prefetch_share=0.5)
    client = on_tier_only(rig, KEYS)
    client.locate(KEYS, request="waits")
    assert rig.depot.status().tier.prefetching_requests == 1
    bump(rig, client)
    assert rig.depot.status().tier.prefetching_requests == 0
    rig.tier.run()
    rig.depot.tick()
    audit(rig.depot)


@pytest.mark.requirement("P2")
def test_what_a_run_had_no_time_to_delete_is_deleted_by_the_next_one() -> None:
    rig = Rig()
    client, other = rig.attach("one", 10), rig.attach("other", 11, HYBRID)
    client.store(KEYS)
    other.store(KEYS, (Kind.ATTENTION, Kind.STATE))
    rig.sum_all()
    bump(rig, client)
    epochs = rig.depot.invalidation.epochs
    rig.crash()
    assert rig.report.kept == 9
    rig.depot.invalidation.epochs = epochs
    rig.depot.invalidation.adopted()
    for _ in range(3):
        rig.depot.tick()
    assert rig.sum_all() == 6
    namespaces = {one.namespace_id: one.objects for one in rig.depot.status().namespaces}
    assert namespaces[DENSE.namespace_id()] == {}
    assert namespaces[other.namespace] == {Kind.ATTENTION: 3, Kind.STATE: 3}
    audit(rig.depot)
