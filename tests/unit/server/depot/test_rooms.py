"""Parts of RAM: no tenant loses an object, waits or is refused because another one's part is full (S2, S4)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kvdepot.core.calls import AcquireOutcome, Kind, ReserveOutcome
from kvdepot.core.keys import NamespaceSpec
from kvdepot.server.depot.tiering import prefetch as prefetch_module
from kvdepot.server.depot.types import Owner, TenantBudget

from tests.rigs.engine_rig import CHUNK, DENSE, Client, Rig, audit, path, unpack
from tests.rigs.tier_rig import COMMIT, read, reboot, store, verify, write

OBJECT = 8192
PART = 2 << 20
OBJECTS = PART // OBJECT
"""That a part has room for."""
LATER, NO_ROOM, GRANTED = ReserveOutcome.LATER, ReserveOutcome.NO_ROOM, ReserveOutcome.GRANTED
TENANTS = ("a", "b")


def rig_of(parts: tuple[int, ...] = (PART, PART), **options: object) -> Rig:
    budgets = {name: TenantBudget(None, None) for name in TENANTS}
    config = {"rows": 1024, "lent_rows": 1024, "tenants": budgets} | options
    return Rig(parts=parts, **config)  # type: ignore[arg-type]


def spec(tenant: str, label: str = "dense") -> NamespaceSpec:
    return replace(DENSE, tenant=tenant, label=label)


def client_of(rig: Rig, tenant: str, label: str = "dense") -> Client:
    uid = TENANTS.index(tenant) + 1
    return rig.attach(f"{tenant}-{label}", uid * 10, spec=spec(tenant, label), owner=Owner(uid, tenant=tenant))


def used(rig: Rig) -> list[int]:
    """Return how many objects lie in each part."""
    audit(rig.depot)
    return [room.used_bytes // OBJECT for room in rig.depot._ram.rooms]


def there(client: Client, keys: list[bytes]) -> bool:
    lease, reply = client.acquire(keys)
    client.release(lease)
    return reply.outcome is AcquireOutcome.GRANTED


@pytest.mark.requirement("S2", "S4")
def test_a_full_part_takes_its_own_objects_and_never_those_of_another_one() -> None:
    rig = rig_of()
    a, b = client_of(rig, "a"), client_of(rig, "b")
    kept = path("kept", 20)
    b.store(kept)
    for prompt in range(8):
        a.store(path(("hog", prompt), OBJECTS // 4))
    assert used(rig) == [OBJECTS, 20]
    assert there(b, kept)
    assert there(a, path(("hog", 7), OBJECTS // 4))


@pytest.mark.requirement("S4")
def test_what_one_tenant_holds_takes_nothing_from_another_one() -> None:
    rig = rig_of()
    a, b = client_of(rig, "a"), client_of(rig, "b")
    lent = path("lent", OBJECTS)
    a.store(lent)
    assert a.acquire(lent)[1].outcome is AcquireOutcome.GRANTED
    assert set(a.reserve(path("more", 2))[1].outcomes) <= {LATER, NO_ROOM}
    b.store(path("b", OBJECTS))
    assert there(b, path("b", OBJECTS))
    assert used(rig) == [OBJECTS, OBJECTS]


@pytest.mark.requirement("S4")
def test_each_part_has_its_share_of_the_rows() -> None:
    rig = rig_of(rows=100)
    a, b = client_of(rig, "a"), client_of(rig, "b")
    a.store(path("a", 40))
    a.store(path("a2", 40))
    assert used(rig) == [50, 0], "half of the rows"
    b.store(path("b", 50))
    assert used(rig) == [50, 50] and there(b, path("b", 50))


@pytest.mark.requirement("S4")
def test_watermarks_hold_for_each_part_and_the_parts_take_turns() -> None:
    rig = rig_of(high_watermark=0.75, low_watermark=0.5, evictions_at_once=8)
    a, b = client_of(rig, "a"), client_of(rig, "b")
    for one in range(10):
        a.store(path(("a", one), OBJECTS // 10))
    b.store(path("b", OBJECTS // 2))
    full = used(rig)
    while rig.depot.trim():
        assert used(rig)[1] == full[1], "it is below its own mark"
    assert full[0] > OBJECTS * 3 // 4 and used(rig)[0] <= OBJECTS // 2
    for one in range(10):
        a.store(path(("c", one), OBJECTS // 10))
        b.store(path(("d", one), OBJECTS // 10))
    before, gone = used(rig), [0, 0]
    for _ in range(2):
        rig.depot.trim()
        gone = [gone[part] + was - now for part, (was, now) in enumerate(zip(before, used(rig), strict=True))]
    assert all(gone), "each had its turn"


@pytest.mark.requirement("S4")
def test_who_has_a_part_that_grows_is_told_to_come_later() -> None:
    rig = rig_of()
    rig.populated_at_start = False
    rig.wipe()
    rig.start()
    rig.depot.ready(PART, 1)
    a, b = client_of(rig, "a"), client_of(rig, "b")
    assert a.reserve(path("a", 1))[1].outcomes == bytes([LATER])
    b.store(path("b", 4))
    rig.depot.ready(PART, 0)
    a.store(path("a", 4))
    assert used(rig) == [4, 4]


@pytest.mark.requirement("S4")
def test_credit_bounds_a_tenant_within_its_part() -> None:
    rig = rig_of((PART, 2 * PART), tenants={"a": TenantBudget(OBJECT * 8, None), "b": TenantBudget(None, None)})
    a, b = client_of(rig, "a"), client_of(rig, "b")
    assert a.reserve(path("a", 16))[1].outcomes.count(GRANTED) == 8
    granted = sum(b.reserve(path(("b", one), 32))[1].outcomes.count(GRANTED) for one in range(16))
    assert granted == 2 * OBJECTS, "all of its part"
    status = {one.name: one for one in rig.depot.status().tenants}
    assert (status["a"].credit_bytes, status["b"].credit_bytes) == (OBJECT * 8, 2 * PART)
    audit(rig.depot)


@pytest.mark.requirement("I8", "S2")
def test_after_a_restart_objects_lie_in_the_part_of_their_tenant() -> None:
    rig = rig_of()
    a, b = client_of(rig, "a"), client_of(rig, "b")
    store(a, path("a", 10), 1)
    store(b, path("b", 10), 2)
    verify(rig)
    rig.dead |= {10, 20}
    rig.crash()
    assert (rig.report.kept, dict(rig.report.dropped)) == (20, {}) and used(rig) == [10, 10]
    verify(rig)
    b = client_of(rig, "b")  # the other one first
    assert read(b, b.acquire(path("b", 10))[1]) == {2}
    b.store(path("more", OBJECTS - 10))
    a = client_of(rig, "a")
    assert read(a, a.acquire(path("a", 10))[1]) == {1}
    a.store(path("more", 10))
    assert used(rig) == [20, OBJECTS]


@pytest.mark.requirement("I8", "S2")
def test_loans_of_both_tenants_outlive_the_daemon() -> None:
    rig = rig_of()
    a, b = client_of(rig, "a"), client_of(rig, "b")
    a.store(path("a", 4))
    rig.sum_all()
    a.acquire(path("a", 4))
    lease, _ = b.reserve(path("b", 4))
    rig.crash()
    assert used(rig) == [4, 4]
    b = client_of(rig, "b")
    assert set(b.commit(lease, 0, 1, 2, 3)) == {1}
    client_of(rig, "a").store(path("more", OBJECTS - 4))
    assert used(rig) == [OBJECTS, 4]


@pytest.mark.requirement("I8", "S2")
@pytest.mark.parametrize("tenant", TENANTS)
def test_what_was_going_at_the_end_of_the_daemon_is_free_once_its_loan_ends(tenant: str) -> None:
    """Its namespace has nothing else, so nothing says in which part it lies."""
    rig = rig_of()
    client = client_of(rig, tenant)
    client.store(path("p", 4))
    rig.sum_all()
    lease, _ = client.acquire(path("p", 4))
    tree = rig.depot._tree
    tree.drop_subtree(tree.index.find(tree.namespaces.by_id[client.namespace].slot, path("p", 4)[0]))
    rig.crash()
    assert (dict(rig.report.dropped), rig.report.pinned) == ({"dying": 4}, 4)
    client = client_of(rig, tenant)
    assert sum(used(rig)) == 4
    client.release(lease)
    assert used(rig) == [0, 0] and rig.counter("leaked_objects") == 0


@pytest.mark.requirement("S2", "I1")
def test_objects_in_another_part_than_their_namespace_are_damage() -> None:
    rig = rig_of()
    a, b = client_of(rig, "a"), client_of(rig, "b")
    a.store(path("a", 4))
    b.store(path("b", 4))
    rig.sum_all()
    rows = rig.depot._ram.rows
    last = int(rows.keys.tolist().index(path("a", 4)[3]))
    rows.offsets[last] = PART + 100 * OBJECT
    rig.dead |= {10, 20}
    rig.crash()
    assert dict(rig.report.dropped) == {"torn_extent": 1} and used(rig) == [3, 4]


@pytest.mark.requirement("S2", "I1")
def test_a_load_of_an_object_in_another_part_is_refused_and_nothing_there_is_freed() -> None:
    rig = rig_of()
    a, b = client_of(rig, "a"), client_of(rig, "b")
    a.store(path("a", 4))
    b.store(path("b", 4))
    rows = rig.depot._ram.rows
    for key, offset in ((path("a", 4)[3], PART), (path("a", 4)[2], PART - 4096)):
        rows.offsets[int(rows.keys.tolist().index(key))] = offset
        assert a.acquire([key])[1].outcome is AcquireOutcome.REFUSED
    rig.depot.tick()
    assert not there(a, path("a", 4)) and there(a, path("a", 2)) and there(b, path("b", 4))
    assert rig.counter("leaked_objects") == 2
    b.store(path("more", OBJECTS - 4))
    assert there(b, path("b", 4)), "its bytes were not given to another object"


@pytest.mark.requirement("S2")
def test_offsets_count_from_the_start_of_the_part() -> None:
    rig = rig_of()
    a, b = client_of(rig, "a"), client_of(rig, "b")
    for client, fill in ((a, 1), (b, 2)):
        lease, reply = client.reserve(path("p", 4))
        assert max(offset + length for _, _, offset, length, _ in unpack(reply.extents)) <= PART
        write(client, reply.extents, fill)
        client.commit(lease, 0, 1, 2, 3)
        assert read(client, client.acquire(path("p", 4))[1]) == {fill}
    assert rig.buffer[:PART].tobytes().find(2) < 0 and rig.buffer[PART:].tobytes().find(1) < 0


@pytest.mark.requirement("S2", "I1")
def test_an_extent_that_reaches_into_the_next_part_is_damage() -> None:
    rig = rig_of()
    a = client_of(rig, "a")
    a.store(path("a", 4))
    rig.sum_all()
    rows = rig.depot._ram.rows
    rows.offsets[int(rows.keys.tolist().index(path("a", 4)[3]))] = PART - 4096
    rig.dead |= {10}
    rig.crash()
    assert dict(rig.report.dropped) == {"torn_extent": 1} and used(rig) == [3, 0]


@pytest.mark.requirement("S4")
def test_pins_of_operators_have_a_share_of_each_part() -> None:
    rig = rig_of(pin_share=0.25)
    a, b = client_of(rig, "a"), client_of(rig, "b")
    a.store(path("a", OBJECTS))
    b.store(path("b", OBJECTS))
    rig.depot.pins.pin(a.namespace, b"", 1000.0)
    rig.depot.pins.pin(b.namespace, b"", 1000.0)
    while rig.depot.pins.run_once():
        pass
    assert [rig.depot._ram.pins.user.bytes_in(part) for part in range(2)] == [PART // 4, PART // 4]
    audit(rig.depot)


@pytest.mark.requirement("S4")
def test_prefetch_for_a_full_part_does_not_hold_up_that_for_another_one() -> None:
    rig = rig_of(tier=COMMIT, tier_handles=1024, tier_bytes=16 << 20)
    prompts = {name: path(name, 8) for name in TENANTS}
    for name in TENANTS:
        store(client_of(rig, name), prompts[name])
        while rig.tier.run():
            pass
    reboot(rig)
    a, b = client_of(rig, "a"), client_of(rig, "b")
    full = path("full", OBJECTS)
    a.store(full)
    a.acquire(full)  # nothing there may go
    while rig.tier.run():
        pass
    a.locate(prompts["a"], request="ra")
    assert len(rig.depot._prefetch) == 1 and not rig.tier.jobs, "it waits"
    reply = b.locate(prompts["b"], request="rb")
    assert (reply.boundary_tokens, reply.tier) == (8 * CHUNK, "memory")
    while rig.tier.run():
        pass
    assert used(rig) == [OBJECTS, 8] and b.locate(prompts["b"], request="rb").tier == "ram"


@pytest.mark.requirement("S4")
@pytest.mark.parametrize(("limit", "most"), [("REQUESTS_MAX", 6), ("KEYS_MAX", 24)])
def test_prefetch_requests_of_one_part_take_no_place_of_another_one(
    monkeypatch: pytest.MonkeyPatch, limit: str, most: int
) -> None:
    monkeypatch.setattr(prefetch_module, limit, most)
    rig = rig_of(tier=COMMIT, tier_handles=1024, tier_bytes=16 << 20)
    prompts = {name: [path((name, number), 4) for number in range(5)] for name in TENANTS}
    for name in TENANTS:
        for prompt in prompts[name]:
            store(client_of(rig, name), prompt)
            while rig.tier.run():
                pass
    reboot(rig)
    a, b = client_of(rig, "a"), client_of(rig, "b")
    for number, prompt in enumerate(prompts["a"]):
        a.locate(prompt, request=f"r{number}")
    assert (len(rig.depot._prefetch), rig.counter("prefetch_refused_requests")) == (3, 2)
    for number, prompt in enumerate(prompts["b"]):
        b.locate(prompt, request=f"r{number}")
    assert (len(rig.depot._prefetch), rig.counter("prefetch_refused_requests")) == (6, 4)
    a.end_request("r0")
    b.locate(prompts["b"][4], request="r4")
    assert len(rig.depot._prefetch) == 5, "the place that is free is the other part's"
    a.locate(prompts["a"][4], request="r4")
    assert len(rig.depot._prefetch) == 6
    audit(rig.depot)


def test_a_namespace_that_has_left_leaves_its_room() -> None:
    rig = rig_of()
    a = client_of(rig, "a")
    slot = rig.depot._tree.namespaces.by_id[a.namespace].slot
    rooms = rig.depot._ram.rooms
    assert rooms.of(slot) is rooms[0] and rooms[0].slots == {slot}
    rig.depot._tree.left(slot)
    assert rooms.of(slot) is None and rooms[0].slots == set()


def test_an_audit_is_bounded_in_the_part_of_its_object() -> None:
    """What another tenant has in its part leaves no less room for it."""
    rig = rig_of(high_watermark=0.5)
    a, b = client_of(rig, "a"), client_of(rig, "b")
    a.store(path("a", OBJECTS))
    b.store(path("b", 1))
    audits, ram = rig.depot._audits, rig.depot._ram
    namespace = rig.depot._tree.namespaces.by_id[b.namespace]
    stored = ram._index.row(ram._index.find(namespace.slot, path("b", 1)[0]), Kind.ATTENTION)
    assert audits._place(namespace, stored, ram.rooms[1]) != 0xFFFF_FFFF
    assert ram.rooms[1].rows_used == 2
