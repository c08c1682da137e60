"""Loads and stores off at run time (row I1e): at once, for one namespace or all, whatever is in flight."""

from __future__ import annotations

from hashlib import blake2b

import pytest
from kvdepot.core.calls import AcquireOutcome, CommitOutcome, Kind, ReserveOutcome
from kvdepot.core.control import Switch
from kvdepot.core.errors import LimitExceeded, NotFound
from kvdepot.core.misses import MissReason
from kvdepot.server.depot.tree import switches
from kvdepot.server.depot.tree.switches import Switches

from tests.rigs.engine_rig import CHUNK, DENSE, HYBRID, Rig, audit, path
from tests.rigs.tier_rig import COMMIT, in_ram, on_tier_only, store

KEYS = path("p", 3)


@pytest.mark.requirement("I1e")
@pytest.mark.parametrize("everywhere", [True, False])
def test_nothing_is_loaded_while_loads_are_off(everywhere: bool) -> None:
    rig = Rig()
    client, other = rig.attach("one", 10), rig.attach("other", 11, HYBRID)
    client.store(KEYS)
    other.store(KEYS, (Kind.ATTENTION, Kind.STATE))
    assert rig.depot.switch(Switch.LOADS, b"" if everywhere else client.namespace, on=False) == 0
    located = client.locate(KEYS, request="r")
    assert (located.boundary_tokens, located.miss) == (0, MissReason.LOADS_OFF)
    reply = client.acquire(KEYS)[1]
    assert (reply.outcome, reply.reason) == (AcquireOutcome.REFUSED, "the operator has switched loads off")
    assert (rig.counter("misses.loads_off"), rig.counter("refused_loads.loads_off")) == (1, 1)
    assert other.locate(KEYS).boundary_tokens == (0 if everywhere else 3 * CHUNK)
    (record,) = rig.depot.records.explain("r")
    assert record.lookup is not None
    assert (record.lookup.miss, record.lookup.chunks_by_tier, record.lookup.missing_key) == (
        "loads_off",
        {"ram": 3},
        KEYS[0],
    )
    client.store(path("more", 1))
    rig.depot.switch(Switch.LOADS, b"" if everywhere else client.namespace, on=True)
    assert client.locate(KEYS).boundary_tokens == 3 * CHUNK
    assert client.acquire(KEYS)[1].outcome is AcquireOutcome.GRANTED
    audit(rig.depot)


@pytest.mark.requirement("I1e")
@pytest.mark.parametrize("everywhere", [True, False])
def test_nothing_is_stored_while_stores_are_off(everywhere: bool) -> None:
    rig = Rig()
    client, other = rig.attach("one", 10), rig.attach("other", 11, HYBRID)
    client.store(KEYS[:1])
    rig.depot.switch(Switch.STORES, b"" if everywhere else client.namespace, on=False)
    _, reply = client.reserve(KEYS)
    assert set(reply.outcomes) == {ReserveOutcome.REFUSED}
    assert reply.reason == "the operator has switched stores off"
    assert (rig.counter("refused_stores.stores_off"), rig.counter("reserved_objects.refused")) == (3, 3)
    assert client.locate(KEYS).boundary_tokens == CHUNK
    assert other.reserve(KEYS)[1].outcomes[0] == (ReserveOutcome.REFUSED if everywhere else ReserveOutcome.GRANTED)
    assert client.locate(KEYS).miss == MissReason.STORES_OFF
    rig.depot.switch(Switch.STORES, b"" if everywhere else client.namespace, on=True)
    client.store(KEYS)
    audit(rig.depot)


@pytest.mark.requirement("I1e")
def test_what_was_reserved_before_is_not_committed_after() -> None:
    rig = Rig()
    client = rig.attach()
    lease, _ = client.reserve(KEYS)
    assert client.commit(lease, 0) == bytes([CommitOutcome.COMMITTED])
    assert rig.depot.switch(Switch.STORES, client.namespace, on=False) == 1
    assert client.commit(lease, 1) == bytes([CommitOutcome.EXPIRED])
    rig.depot.switch(Switch.STORES, client.namespace, on=True)
    assert client.commit(lease, 1, 2) == bytes([CommitOutcome.EXPIRED, CommitOutcome.NO_PARENT])
    located = client.locate(KEYS)
    assert (located.boundary_tokens, located.miss) == (CHUNK, MissReason.STORES_OFF)
    assert rig.counter("refused_stores.stores_off") == 1
    status = rig.depot.status()
    assert (status.sessions[0].leases, status.sessions[0].credit_used_bytes, status.tier.lent_bytes) == (0, 0, 0)
    audit(rig.depot)


@pytest.mark.requirement("I1e")
def test_what_is_being_read_for_a_load_is_refused_at_once_and_a_granted_one_goes_on() -> None:
    rig = Rig(tier=COMMIT)
    client = on_tier_only(rig, KEYS)
    store(client, path("warm", 1))
    granted, _ = client.acquire(path("warm", 1))
    answers = client.acquire_later(KEYS, bytes([Kind.ATTENTION]) * 3, client.lease())
    assert answers == []
    assert rig.depot.switch(Switch.LOADS, client.namespace, on=False) == 1
    assert [(one.outcome, one.reason) for one in answers] == [
        (AcquireOutcome.REFUSED, "the operator has switched loads off")
    ]
    assert rig.counter("refused_loads.loads_off") == 1
    rig.tier.run()
    audit(rig.depot)
    client.release(granted)
    assert rig.depot.status().tier.lent_bytes == 0
    assert rig.depot.status().sessions[0].leases == 0


@pytest.mark.requirement("I1e")
def test_nothing_is_read_ahead_while_loads_are_off() -> None:
    rig = Rig(tier=COMMIT)
    client = on_tier_only(rig, KEYS)
    assert client.locate(KEYS, request="r").boundary_tokens == 3 * CHUNK
    assert rig.depot.status().tier.prefetching_requests == 1
    rig.depot.switch(Switch.LOADS, b"", on=False)
    assert rig.depot.status().tier.prefetching_requests == 0
    assert client.locate(KEYS, request="r").boundary_tokens == 0
    rig.tier.run()
    assert (rig.depot.status().tier.prefetching_requests, rig.depot.status().tier.prefetched_bytes) == (0, 0)
    assert in_ram(rig) <= 3
    audit(rig.depot)


@pytest.mark.requirement("I1e")
def test_one_switch_for_all_leaves_the_single_ones_as_they_are() -> None:
    rig = Rig()
    client = rig.attach()
    client.store(KEYS)
    rig.depot.switch(Switch.LOADS, client.namespace, on=False)
    rig.depot.switch(Switch.LOADS, b"", on=False)
    rig.depot.switch(Switch.LOADS, b"", on=True)
    assert client.locate(KEYS).boundary_tokens == 0
    assert rig.depot.switches.status().loads_off_namespaces == (client.namespace,)


@pytest.mark.requirement("I4")
def test_only_what_is_there_is_switched_off_and_not_more_than_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    rig.attach()
    unknown = bytes(16)
    with pytest.raises(NotFound):
        rig.depot.switch(Switch.LOADS, unknown, on=False)
    rig.depot.switch(Switch.LOADS, unknown, on=True)
    monkeypatch.setattr(switches, "NAMESPACES_OFF_MAX", 2)
    some = Switches(lambda: 0.0)
    ids = [blake2b(bytes([at]), digest_size=16).digest() for at in range(3)]
    for one in (*ids[:2], ids[0]):
        some.set(Switch.STORES, one, on=False)
    with pytest.raises(LimitExceeded, match="stores off"):
        some.set(Switch.STORES, ids[2], on=False)
    assert DENSE.namespace_id() not in some.status().stores_off_namespaces


@pytest.mark.requirement("I1e")
def test_a_switch_is_off_since_the_first_was_switched_off_also_after_a_restart() -> None:
    now = 100.0
    some = Switches(lambda: now)
    some.set(Switch.LOADS, bytes(16), on=False)
    now = 160.0
    some.set(Switch.LOADS, b"", on=False)
    now = 220.0
    assert (some.status().loads_off_seconds, some.status().stores_off_seconds) == (120.0, 0.0)
    next_run = Switches(lambda: now)
    next_run.restore(some.status())
    now = 230.0
    assert next_run.status().loads_off_seconds == 130.0
    next_run.set(Switch.LOADS, b"", on=True)
    assert next_run.status().loads_off_seconds == 130.0, "one is still off by name"
    next_run.set(Switch.LOADS, bytes(16), on=True)
    assert next_run.status().loads_off_seconds == 0.0
