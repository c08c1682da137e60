"""What peers are lent of RAM: only what may be served, few and small, and free only at a proven end (ADR 78)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kvdepot.core.calls import ROOT_KEY, Kind, ReserveOutcome
from kvdepot.core.control import Switch
from kvdepot.core.objectfile import payload_sum
from kvdepot.server.depot.loads.peer_leases import LEASES_MAX, PeerLease, PeerLeases
from kvdepot.server.depot.tree import namespaces
from kvdepot.server.depot.types import Owner, TenantBudget
from kvdepot.server.io.chunk_words import words_of_names
from kvdepot.server.io.jobs import ABSENT, UNKNOWN
from kvdepot.server.io.peer_wire import Refusal
from kvdepot.server.storage.base import ObjectName, UnknownWorker

from tests.rigs.engine_rig import CHUNK, DENSE, Client, Rig, audit, path
from tests.rigs.tier_rig import COMMIT, store, verify, write

OBJECT_BYTES = 8192
SENDER = 7000


def rig_of(pages: int = 64, **config: object) -> tuple[Rig, Client, PeerLeases, int]:
    """A depot, an engine, and a process that sends."""
    rig = Rig(pages, **config)  # type: ignore[arg-type]
    leases = rig.depot.peer_leases
    return rig, rig.attach(), leases, leases.workers.started(SENDER)


def names(client: Client, keys: list[bytes]) -> list[ObjectName]:
    parents = [ROOT_KEY, *keys]
    return [
        ObjectName(client.namespace, one, parents[at], Kind.ATTENTION, (at + 1) * CHUNK, OBJECT_BYTES)
        for at, one in enumerate(keys)
    ]


def located(leases: PeerLeases, client: Client, keys: list[bytes], tenant: str | None = None) -> list[int]:
    return list(leases.locate(tenant, ((client.namespace, one, Kind.ATTENTION) for one in keys)))


def granted(leases: PeerLeases, name: ObjectName, worker: int, tenant: str | None = None) -> PeerLease:
    lease = leases.lease(tenant, name, worker)
    assert isinstance(lease, PeerLease), lease
    return lease


@pytest.mark.requirement("T3")
def test_a_lease_has_the_extents_and_the_checksum_of_the_object() -> None:
    rig, client, leases, worker = rig_of()
    keys = path("p", 3)
    store(client, keys, fill=9)
    verify(rig)
    assert located(leases, client, [*keys, b"0" * 16]) == [OBJECT_BYTES] * 3 + [ABSENT]
    lease = granted(leases, names(client, keys)[1], worker)
    data = b"".join(bytes(rig.buffer[offset : offset + length]) for offset, length in lease.extents)
    assert data == bytes([9]) * OBJECT_BYTES
    assert lease.raw_sum == payload_sum([memoryview(data)])
    audit(rig.depot)


@pytest.mark.requirement("T3")
def test_an_object_without_a_checksum_is_not_offered() -> None:
    rig, client, leases, worker = rig_of()
    keys = path("p", 2)
    store(client, keys)
    assert located(leases, client, keys) == [UNKNOWN, UNKNOWN], "it is there, and will be had soon"
    assert leases.lease(None, names(client, keys)[0], worker) is Refusal.GONE
    verify(rig)
    assert located(leases, client, keys) == [OBJECT_BYTES] * 2


@pytest.mark.requirement("T3")
def test_an_adopted_object_is_offered_once_it_is_verified() -> None:
    rig, client, leases, _ = rig_of()
    keys = path("p", 2)
    store(client, keys)
    verify(rig)
    rig.crash()
    client = rig.attach()
    leases = rig.depot.peer_leases
    assert located(leases, client, keys) == [UNKNOWN, UNKNOWN]
    verify(rig)
    assert located(leases, client, keys) == [OBJECT_BYTES] * 2


@pytest.mark.requirement("T3")
def test_what_a_peer_asks_for_is_verified_first() -> None:
    rig, client, _, _ = rig_of(pages=128)
    many = path("many", 40)
    store(client, many)
    verify(rig)
    rig.crash()
    client = rig.attach()
    assert located(rig.depot.peer_leases, client, many[30:32]) == [UNKNOWN, UNKNOWN]
    first = [rig.depot.next_to_sum() for _ in range(2)]
    assert {rig.depot._tree.ram.rows.keys[one.row].tobytes() for one in first if one} == set(many[30:32])


@pytest.mark.requirement("T3")
def test_what_is_being_written_is_neither_offered_nor_absent() -> None:
    _, client, leases, worker = rig_of()
    keys = path("p", 2)
    client.reserve(keys)
    assert located(leases, client, keys) == [UNKNOWN, UNKNOWN]
    assert leases.lease(None, names(client, keys)[0], worker) is Refusal.GONE


@pytest.mark.requirement("T3")
def test_another_parent_boundary_or_length_is_another_object() -> None:
    rig, client, leases, worker = rig_of()
    keys = path("p", 2)
    store(client, keys)
    verify(rig)
    name = names(client, keys)[1]
    for other in (
        replace(name, parent=ROOT_KEY), replace(name, boundary_tokens=CHUNK), replace(name, raw_bytes=OBJECT_BYTES - 1)
    ):  # fmt: skip
        assert leases.lease(None, other, worker) is Refusal.FOREIGN
    assert leases.lease(None, replace(name, kind=Kind.STATE), worker) is Refusal.GONE
    assert leases.lease(None, replace(name, namespace=bytes(16)), worker) is Refusal.GONE
    assert not len(leases)


@pytest.mark.requirement("B5")
@pytest.mark.parametrize("ends", ["confirmed", "reaped"])
def test_extents_are_not_reused_before_the_end_is_proven(ends: str) -> None:
    rig, client, leases, worker = rig_of(pages=8)  # RAM for four objects
    keys = path("p", 1)
    store(client, keys, fill=9)
    verify(rig)
    lease = granted(leases, names(client, keys)[0], worker)
    rig.depot.deletion(client.namespace, keys[0]).run_once()
    assert located(leases, client, keys) == [ABSENT]

    def outcomes() -> list[ReserveOutcome]:
        replies = [client.reserve(path(("other", number), 1))[1] for number in range(4)]
        for reply in replies:
            write(rig, reply.extents, 1)
        audit(rig.depot)
        return [ReserveOutcome(reply.outcomes[0]) for reply in replies]

    assert outcomes().count(ReserveOutcome.GRANTED) == 3
    assert {byte for offset, length in lease.extents for byte in rig.buffer[offset : offset + length]} == {9}
    if ends == "confirmed":
        assert leases.end(lease.number) and not leases.end(lease.number)
    else:
        leases.end_all()
        leases.workers.dead(worker)
    assert (len(leases), leases.lent_bytes) == (0, 0)
    assert outcomes().count(ReserveOutcome.GRANTED) == 1
    audit(rig.depot)


@pytest.mark.requirement("B5")
def test_the_next_daemon_keeps_what_a_sender_of_before_may_still_read() -> None:
    rig, client, leases, worker = rig_of()
    keys = path("p", 1)
    store(client, keys)
    verify(rig)
    granted(leases, names(client, keys)[0], worker)
    rig.crash()
    assert rig.report.pinned + rig.report.kept == 1 and rig.depot.status().tier.lent_bytes == OBJECT_BYTES
    rig.dead.add(SENDER)
    rig.crash()
    assert rig.depot.status().tier.lent_bytes == 0
    audit(rig.depot)


@pytest.mark.requirement("B5")
def test_leases_are_few_and_their_bytes_a_part_of_ram() -> None:
    rig, client, leases, worker = rig_of(pages=512, rows=512, lent_rows=512)
    keys = path("p", LEASES_MAX + 2)
    store(client, keys)
    verify(rig)
    found = [leases.lease(None, name, worker) for name in names(client, keys)]
    most = min(LEASES_MAX, leases.bytes_max // OBJECT_BYTES)
    assert 1 < most < len(keys)
    assert [isinstance(one, PeerLease) for one in found] == [True] * most + [False] * (len(keys) - most)
    assert found[-1] is Refusal.BUSY
    leases.end(1)
    assert isinstance(leases.lease(None, names(client, keys)[-1], worker), PeerLease)
    assert leases.lease(None, names(client, keys)[-1], worker) is Refusal.BUSY


@pytest.mark.requirement("T3")
def test_an_object_larger_than_the_part_is_lent_alone() -> None:
    rig, client, leases, worker = rig_of(pages=8)
    keys = path("p", 2)
    store(client, keys)
    verify(rig)
    assert leases.bytes_max < OBJECT_BYTES
    granted(leases, names(client, keys)[0], worker)
    assert leases.lease(None, names(client, keys)[1], worker) is Refusal.BUSY


def test_nothing_is_lent_to_a_process_that_is_not_written_down() -> None:
    rig, client, leases, worker = rig_of()
    keys = path("p", 1)
    store(client, keys)
    verify(rig)
    leases.workers.dead(worker)
    with pytest.raises(UnknownWorker):
        leases.lease(None, names(client, keys)[0], worker)
    assert (len(leases), leases.lent_bytes) == (0, 0)
    audit(rig.depot)


@pytest.mark.requirement("T3")
@pytest.mark.parametrize("how", ["all", "one", "drain"])
def test_what_operators_switch_off_is_not_lent(how: str) -> None:
    rig, client, leases, worker = rig_of()
    keys = path("p", 1)
    store(client, keys)
    verify(rig)
    if how == "drain":
        rig.depot.drain(draining=True)
    else:
        rig.depot.switch(Switch.LOADS, b"" if how == "all" else client.namespace, on=False)
    assert located(leases, client, keys) == [ABSENT]
    assert leases.lease(None, names(client, keys)[0], worker) is Refusal.GONE


@pytest.mark.requirement("S4")
def test_a_peer_of_a_tenant_sees_the_objects_of_its_tenant_alone() -> None:
    rig = Rig(tenants={"a": TenantBudget(), "b": TenantBudget()})
    leases = rig.depot.peer_leases
    worker = leases.workers.started(SENDER)
    one, other = (
        rig.attach(f"e-{tenant}", 10 + at, replace(DENSE, tenant=tenant), owner=Owner(at, tenant=tenant))
        for at, tenant in enumerate("ab")
    )
    for client in (one, other):
        store(client, path("p", 1))
    verify(rig)
    for client, mine, foreign in ((one, "a", "b"), (other, "b", "a")):
        assert located(leases, client, path("p", 1), mine) == [OBJECT_BYTES]
        assert located(leases, client, path("p", 1), foreign) == [ABSENT]
        assert leases.lease(foreign, names(client, path("p", 1))[0], worker) is Refusal.GONE
        granted(leases, names(client, path("p", 1))[0], worker, mine)


@pytest.mark.requirement("S4")
def test_a_namespace_of_an_unknown_tenant_is_nobodys() -> None:
    """After a restart, until an engine registers it."""
    rig = Rig(tenants={"a": TenantBudget()})
    client = rig.attach(spec=replace(DENSE, tenant="a"), owner=Owner(1, tenant="a"))
    store(client, path("p", 1))
    verify(rig)
    rig.crash()
    verify(rig)
    assert located(rig.depot.peer_leases, client, path("p", 1), "a") == [ABSENT]
    client = rig.attach(spec=replace(DENSE, tenant="a"), owner=Owner(1, tenant="a"))
    assert located(rig.depot.peer_leases, client, path("p", 1), "a") == [OBJECT_BYTES]


def summarized(leases: PeerLeases, client: Client, keys: list[bytes], tenant: str | None = None) -> list[bool]:
    """Return which of these chunks are in what is gathered for summaries."""
    chunks = leases.chunks(tenant)
    rows = range(0, chunks.places, 3)
    words = {word for start in rows for word in chunks.words(start, min(start + 3, chunks.places)).tolist()}
    return [word in words for word in words_of_names([(client.namespace, key) for key in keys]).tolist()]


@pytest.mark.requirement("T3")
def test_a_summary_has_what_can_be_lent_and_nothing_else() -> None:
    rig, client, leases, _ = rig_of()
    keys = path("p", 3)
    store(client, keys[:2])
    assert summarized(leases, client, keys) == [False] * 3, "there is no checksum yet"
    verify(rig)
    assert summarized(leases, client, keys) == [True, True, False]
    rig.crash()
    client, leases = rig.attach(), rig.depot.peer_leases
    assert not any(summarized(leases, client, keys)), "not verified in this run"
    verify(rig)
    assert summarized(leases, client, keys) == [True, True, False]
    rig.depot.deletion(client.namespace, keys[1]).run_once()
    assert summarized(leases, client, keys) == [True, False, False]


@pytest.mark.requirement("T3")
@pytest.mark.parametrize("how", ["all", "one", "drain", "invalid"])
def test_what_is_not_served_is_in_no_summary(how: str) -> None:
    rig, client, leases, _ = rig_of()
    other = rig.attach("other", 11, replace(DENSE, label="other", epoch="other"))
    keys = path("p", 2)
    for one in (client, other):
        store(one, keys)
    verify(rig)
    assert summarized(leases, client, keys) == summarized(leases, other, keys) == [True, True]
    if how == "drain":
        rig.depot.drain(draining=True)
    elif how == "invalid":
        leases._namespaces.by_id[client.namespace].invalid = True
    else:
        rig.depot.switch(Switch.LOADS, b"" if how == "all" else client.namespace, on=False)
    assert summarized(leases, client, keys) == [False, False]
    assert all(summarized(leases, other, keys)) is (how in ("one", "invalid"))


@pytest.mark.requirement("S4")
def test_a_summary_for_a_peer_of_a_tenant_has_chunks_of_this_tenant_alone() -> None:
    rig = Rig(tenants={"a": TenantBudget(), "b": TenantBudget()})
    leases = rig.depot.peer_leases
    one, other = (
        rig.attach(f"e-{tenant}", 10 + at, replace(DENSE, tenant=tenant), owner=Owner(at, tenant=tenant))
        for at, tenant in enumerate("ab")
    )
    for client in (one, other):
        store(client, path("p", 1))
    verify(rig)
    for client, mine, foreign in ((one, "a", "b"), (other, "b", "a")):
        assert summarized(leases, client, path("p", 1), mine) == [True]
        assert summarized(leases, client, path("p", 1), foreign) == [False]
    chunks = leases.chunks("a")
    assert len(chunks.words(0, chunks.places)) == 1


@pytest.mark.requirement("S4")
def test_a_summary_has_nothing_of_another_tenant_that_gets_a_slot_while_it_is_gathered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(namespaces, "NAMESPACES_MAX", 1)
    rig = Rig(tier=COMMIT, tenants={"a": TenantBudget(), "b": TenantBudget()})
    keys, leases = path("p", 2), rig.depot.peer_leases
    one = rig.attach("e-a", 10, replace(DENSE, tenant="a"), owner=Owner(0, tenant="a"))
    chunks = leases.chunks("a")
    rig.depot.process_dead(one.attachment)
    other = rig.attach("e-b", 11, replace(DENSE, tenant="b"), owner=Owner(1, tenant="b"))
    store(other, keys)
    verify(rig)
    rig.tier.run()
    assert other.namespace != one.namespace and len(rig.depot._tree.namespaces.by_slot) == 1
    assert not len(chunks.words(0, chunks.places))
