"""Budgets of RAM: no user and no tenant holds all of it, by reservations or by loans (S4, I4)."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from typing import Any

import pytest
from kvdepot.core.arena import NO_ROW, LentMode
from kvdepot.core.calls import AcquireOutcome, Kind, ReserveOutcome
from kvdepot.core.planner import GroupSpec
from kvdepot.server.depot.loads import acquires
from kvdepot.server.depot.sessions.session import Session
from kvdepot.server.depot.types import Membership, Owner, TenantBudget

from tests.rigs.engine_rig import DENSE, Client, Rig, audit, path, process, spec_of
from tests.rigs.tier_rig import ATTENTION, COMMIT, on_tier_only, reboot, settle, store

PAGES = 64
OBJECTS = PAGES // 2
"""That RAM has room for."""
GRANTED, LATER = ReserveOutcome.GRANTED, ReserveOutcome.LATER
CREDIT = 28 * 8192


def rig_of(**config: object) -> Rig:
    return Rig(PAGES, **({"credit_bytes": CREDIT} | config))  # type: ignore[arg-type]


def user(rig: Rig, uid: int, number: int = 0, tenant: str | None = None) -> Client:
    spec = DENSE if tenant is None else replace(DENSE, tenant=tenant)
    return rig.attach(f"e{number}", uid * 10 + number, spec=spec, owner=Owner(uid, tenant=tenant))


def reserved(client: Client, name: str, most: int = OBJECTS) -> int:
    """Return how many objects of a prompt are granted."""
    outcomes = [outcome for one in range(most) for outcome in client.reserve(path((name, one), 1))[1].outcomes]
    assert set(outcomes) <= {GRANTED, LATER, ReserveOutcome.NO_ROOM}
    return outcomes.count(GRANTED)


@pytest.mark.requirement("S4")
def test_sessions_of_one_user_leave_room_for_another_user() -> None:
    """Four of them would have reserved everything."""
    rig = rig_of()
    assert sum(reserved(user(rig, 1, number), f"hog{number}") for number in range(4)) == OBJECTS * 7 // 8
    assert reserved(user(rig, 2), "honest") == OBJECTS // 8
    assert rig.counter("budget_refusals.stores") > 0
    audit(rig.depot)


@pytest.mark.requirement("S4")
def test_users_that_hold_something_have_equal_parts_at_least() -> None:
    rig = rig_of()
    assert reserved(user(rig, 2), "first", OBJECTS // 2) == OBJECTS // 2
    assert sum(reserved(user(rig, 1, number), f"second{number}") for number in range(4)) == OBJECTS // 2


@pytest.mark.requirement("S4")
def test_a_user_has_what_others_leave_of_seven_eighths() -> None:
    """A small lease of another user would have cost it 3/8 of RAM. The others find an eighth at any time."""
    rig = rig_of()
    honest = user(rig, 2)
    assert reserved(honest, "honest", 1) == 1
    assert sum(reserved(user(rig, 1, number), f"hog{number}") for number in range(4)) == OBJECTS * 7 // 8 - 1
    assert reserved(honest, "more") == OBJECTS // 8
    audit(rig.depot)


@pytest.mark.requirement("S4")
def test_what_others_are_lent_leaves_less_too() -> None:
    rig = rig_of()
    honest = user(rig, 2)
    honest.store(path("h", 6))
    assert honest.acquire(path("h", 6))[1].outcome is AcquireOutcome.GRANTED
    assert sum(reserved(user(rig, 1, number), f"hog{number}") for number in range(4)) == OBJECTS * 7 // 8 - 6


@pytest.mark.requirement("S4", "I8")
def test_loads_of_an_earlier_run_count_before_their_engine_registers_a_namespace() -> None:
    rig = rig_of()
    honest = user(rig, 2)
    honest.store(path("h", 6))
    assert honest.acquire(path("h", 6))[1].outcome is AcquireOutcome.GRANTED
    rig.crash()
    rig.depot.attach(process(20), Membership("e0", scheduler=True, rank=0, world_size=1, owner=Owner(2)))
    assert sum(reserved(user(rig, 1, number), f"hog{number}") for number in range(4)) == OBJECTS * 7 // 8 - 6


@pytest.mark.requirement("S4")
def test_many_users_have_a_quarter_each() -> None:
    rig = rig_of()
    for uid in range(2, 6):
        assert reserved(user(rig, uid), f"{uid}", 6) == 6
    assert reserved(user(rig, 1), "hog") == OBJECTS // 4


@pytest.mark.requirement("S4")
def test_a_single_engine_has_its_whole_credit() -> None:
    rig = rig_of(credit_bytes=OBJECTS * 8192)
    assert reserved(user(rig, 1), "a") == OBJECTS


@pytest.mark.requirement("S4")
def test_what_is_lent_to_read_counts_once_for_each_object() -> None:
    rig = rig_of()
    hog, honest = user(rig, 1), user(rig, 2)
    for one in range(OBJECTS):
        hog.store(path(one, 1))
    for _ in range(2):  # the second time lends nothing more
        granted = [hog.acquire(path(one, 1))[1].outcome for one in range(OBJECTS)]
        assert granted.count(AcquireOutcome.GRANTED) == OBJECTS * 7 // 8
        assert set(granted) == {AcquireOutcome.GRANTED, AcquireOutcome.LATER}
    assert reserved(honest, "honest") == OBJECTS // 8
    assert reserved(hog, "more") == 0
    assert rig.counter("budget_refusals.loads") > 0
    audit(rig.depot)


@pytest.mark.requirement("S4")
def test_what_ends_may_be_held_again() -> None:
    rig = rig_of()
    hog = user(rig, 1)
    for one in range(OBJECTS):
        hog.store(path(one, 1))
    for _ in range(3):
        lease, reply = hog.acquire([path(one, 1)[0] for one in range(OBJECTS * 7 // 8)])
        assert reply.outcome is AcquireOutcome.GRANTED
        hog.release(lease)
    lease, reserved_now = hog.reserve(path("r", 20))
    assert set(reserved_now.outcomes) == {GRANTED}
    hog.abandon(lease)
    granted = [hog.acquire(path(one, 1))[1].outcome for one in range(OBJECTS)]
    assert granted.count(AcquireOutcome.GRANTED) == OBJECTS - 20, "that the reservation has not evicted"


@pytest.mark.requirement("S4")
@pytest.mark.parametrize(
    ("given", "hog", "honest"),
    [
        ({"a": None, "b": None}, 16, 16),
        ({"a": None, "b": None, "c": None, "d": None}, 8, 8),
        ({"a": 4 * 8192, "b": None}, 4, 28),
        ({"a": 4 * 8192, "b": 6 * 8192}, 4, 6),
    ],
)
def test_each_tenant_has_its_credit_whatever_others_hold(given: dict[str, int | None], hog: int, honest: int) -> None:
    rig = rig_of(tenants={name: TenantBudget(credit) for name, credit in given.items()}, credit_bytes=1 << 30)
    assert sum(reserved(user(rig, number, number, "a"), f"hog{number}") for number in range(3)) == hog
    assert reserved(user(rig, 9, tenant="b"), "honest") == honest


@pytest.mark.requirement("S4", "I8")
def test_an_engine_that_comes_back_brings_what_it_holds() -> None:
    rig = rig_of()
    hog = user(rig, 1)
    assert reserved(hog, "hog") == OBJECTS * 7 // 8
    rig.crash()
    assert reserved(user(rig, 1), "hog again") == 0
    audit(rig.depot)


@pytest.mark.requirement("S4")
def test_an_object_larger_than_the_share_has_no_room() -> None:
    rig = rig_of(tenants={"a": TenantBudget(4096), "b": TenantBudget()})
    client = user(rig, 1, tenant="a")
    assert client.reserve(path("p", 1))[1].outcomes == bytes([ReserveOutcome.NO_ROOM])


@pytest.mark.requirement("S4")
def test_small_objects_count_what_they_take() -> None:
    spec = spec_of(GroupSpec(Kind.ATTENTION, 16, rank_block_bytes=(50,)))  # 100 bytes, a page
    rig = rig_of(tenants={"a": TenantBudget(4 * 4096), "b": TenantBudget()})
    client = rig.attach(spec=replace(spec, tenant="a"), owner=Owner(1, tenant="a"))
    for one in range(8):
        client.store(path(one, 1))
    granted = [client.acquire(path(one, 1))[1].outcome for one in range(8)]
    assert granted.count(AcquireOutcome.GRANTED) == 4


@pytest.mark.requirement("S4")
def test_what_has_to_be_read_into_ram_counts_before_it_is_read() -> None:
    rig, most = Rig(PAGES, tier=COMMIT, credit_bytes=CREDIT), OBJECTS * 7 // 8 - 1
    keys = path("p", most + 1)
    client = on_tier_only(rig, keys)
    assert reserved(user(rig, 1), "other", 1) == 1
    answers = client.acquire_later(keys[:most], ATTENTION * most, 1)
    (refused,) = client.acquire_later(keys[most:], ATTENTION, 2)
    settle(rig)
    assert [answers[0].outcome, refused.outcome] == [AcquireOutcome.GRANTED, AcquireOutcome.LATER]
    assert refused.reason.startswith("the engines of this user or tenant hold their share of RAM")
    client.release(1)
    answers = client.acquire_later(keys[1:], ATTENTION * most, 3)
    settle(rig)
    assert answers[0].outcome is AcquireOutcome.GRANTED
    audit(rig.depot)


@pytest.mark.requirement("S4")
@pytest.mark.parametrize("tenant", [None, "a"])
def test_loads_that_wait_for_a_lower_tier_count_before_they_have_room(
    tenant: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four at once: each fits alone, and has room for one object only when the next one asks."""
    monkeypatch.setattr(acquires, "PLACED_AT_ONCE", 1)
    tenants = {} if tenant is None else {"a": TenantBudget(OBJECTS * 7 // 8 * 8192), "b": TenantBudget()}
    rig = Rig(PAGES, tier=COMMIT, credit_bytes=CREDIT, tenants=tenants)
    rig.places_at_once = False
    for number in range(4):
        store(user(rig, 1, number, tenant), path(number, 8))
        rig.tier.run()
    reboot(rig)
    hogs = [user(rig, 1, number, tenant) for number in range(4)]
    honest = user(rig, 2, tenant=tenant and "b")
    assert reserved(honest, "honest", 1) == 1
    answers = [one.acquire_later(path(number, 8), ATTENTION * 8, 1) for number, one in enumerate(hogs)]
    assert [reply.outcome for replies in answers for reply in replies] == [AcquireOutcome.LATER]
    assert reserved(hogs[3], "more") == (4 if tenant else 3), "what three loads leave of seven eighths"
    audit(rig.depot)
    while rig.depot.place_some():
        audit(rig.depot)
    settle(rig)
    assert [replies[0].outcome for replies in answers[:3]] == [AcquireOutcome.GRANTED] * 3
    assert reserved(honest, "rest") == (3 if tenant else 4), "of what is left of all of RAM"
    hogs[0].release(1)
    assert reserved(hogs[3], "again") == (8 if tenant else 4)
    audit(rig.depot)


@pytest.mark.requirement("S4")
@pytest.mark.parametrize("tenant", [None, "a"])
def test_what_several_loads_wait_for_counts_once(tenant: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a reboot many requests begin with one prefix, and none of it has room yet."""
    monkeypatch.setattr(acquires, "PLACED_AT_ONCE", 1)
    tenants = {} if tenant is None else {"a": TenantBudget(12 * 8192), "b": TenantBudget()}
    rig = Rig(PAGES, tier=COMMIT, credit_bytes=CREDIT, tenants=tenants)
    rig.places_at_once = False
    keys = path("p", 10)
    store(user(rig, 1, 0, tenant), keys)
    rig.tier.run()
    reboot(rig)
    one, two = user(rig, 1, 0, tenant), user(rig, 1, 1, tenant)
    other = user(rig, 2, tenant=tenant and "b")
    assert reserved(other, "other", 1) == 1
    loads = [(one, 1), (one, 2), (one, 3), (two, 4)]
    answers = [client.acquire_later(keys, ATTENTION * 10, lease) for client, lease in loads]
    assert answers == [[]] * 4, "none is refused"
    if tenant:
        assert [one.credit_used_bytes for one in rig.depot.status().tenants] == [10 * 8192, 8192]
    assert reserved(two, "more", 4) == (2 if tenant else 4)
    audit(rig.depot)
    while rig.depot.place_some():
        audit(rig.depot)
    settle(rig)
    assert [reply.outcome for replies in answers for reply in replies] == [AcquireOutcome.GRANTED] * 4


@pytest.mark.requirement("S4")
def test_objects_to_be_read_into_ram_count_their_own_size() -> None:
    """Not that of the largest kind: 8 of that one would be twice RAM."""
    rig, keys = Rig(PAGES, tier=COMMIT, credit_bytes=CREDIT), path("p", 8)
    client = on_tier_only(rig, keys)
    rig.depot.register_namespace(client.session, LARGE_STATES)
    assert reserved(user(rig, 1), "other", 1) == 1
    answers = client.acquire_later(keys, ATTENTION * 8, 1)
    settle(rig)
    assert [reply.outcome for reply in answers] == [AcquireOutcome.GRANTED]


@pytest.mark.requirement("S4")
def test_objects_in_several_extents_count_their_own_size() -> None:
    rig, keys = rig_of(), path("p", 8)
    client = rig.attach()
    rig.depot.register_namespace(client.session, LARGE_STATES)
    ram = rig.depot._ram
    pages = [ram.rooms[0].allocator.allocate(4096) or [] for _ in range(PAGES)]
    for ((offset, length),) in pages[:40:2]:  # 20 pages that do not touch
        ram.rooms[0].allocator.free(offset, length)
    client.store(keys)
    first, _ = client.acquire(keys[:4])
    assert (ram.rows.nexts[ram.lent.rows[ram.lent.modes == LentMode.READ]] != NO_ROW).all()
    assert client.acquire(keys[4:])[1].outcome is AcquireOutcome.GRANTED
    session = rig.depot._sessions.of(client.session)
    assert rig.depot._budgets.reservable(session, 1 << 30).size_bytes == CREDIT - 8 * 8192
    client.release(first)
    assert rig.depot._budgets.reservable(session, 1 << 30).size_bytes == CREDIT - 4 * 8192


@pytest.mark.requirement("S4")
def test_damaged_links_do_not_keep_the_count_busy() -> None:
    rig = rig_of()
    client = user(rig, 1)
    client.store(path("p", 2))
    client.acquire(path("p", 2))
    ram = rig.depot._ram
    ram.rows.nexts[ram.lent.rows[ram.lent.modes == LentMode.READ]] = 0
    assert rig.depot._budgets.reservable(rig.depot._sessions.of(client.session), 1 << 30).size_bytes < 0


@pytest.mark.requirement("S4")
def test_the_count_of_what_is_lent_takes_no_array_of_all_rows() -> None:
    rows = 1 << 16
    rig = Rig(PAGES, rows=rows, credit_bytes=CREDIT)
    client = user(rig, 1)
    client.store(path("p", 4))
    client.acquire(path("p", 4))
    session = rig.depot._sessions.of(client.session)
    tracemalloc.start()
    try:
        assert rig.depot._budgets.reservable(session, 1 << 30).size_bytes == CREDIT - 4 * 8192
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < rows // 2


def stored(client: Client, name: str, count: int) -> list[bytes]:
    for one in range(count):
        client.store(path((name, one), 1))
    return [path((name, one), 1)[0] for one in range(count)]


@pytest.mark.requirement("S4")
def test_one_load_of_all_of_ram_is_granted_while_nobody_holds_anything() -> None:
    """A locate offers it, and "later" would be the answer at every try."""
    rig = rig_of()
    client, other = user(rig, 1), user(rig, 2)
    keys = stored(client, "p", OBJECTS)
    lease, reply = client.acquire(keys)
    assert reply.outcome is AcquireOutcome.GRANTED
    assert client.acquire(keys[:1])[1].outcome is AcquireOutcome.LATER, "the party holds something"
    client.release(lease)
    assert other.acquire(keys[:1])[1].outcome is AcquireOutcome.GRANTED
    assert client.acquire(keys)[1].outcome is AcquireOutcome.LATER, "another one holds something"


@pytest.mark.requirement("S4")
def test_a_load_beyond_the_credit_of_a_tenant_is_never_granted() -> None:
    rig = rig_of(tenants={"a": TenantBudget(4 * 8192), "b": TenantBudget()})
    client = user(rig, 1, tenant="a")
    assert client.acquire(stored(client, "p", 5))[1].outcome is AcquireOutcome.LATER


@pytest.mark.requirement("S4")
def test_objects_that_exist_nowhere_are_missing_also_over_budget() -> None:
    """ "Later" would have the engine ask again for what nobody has."""
    rig = rig_of()
    client = user(rig, 1)
    keys = stored(client, "p", 2)
    assert client.acquire(keys[:1])[1].outcome is AcquireOutcome.GRANTED
    assert reserved(client, "full") == OBJECTS * 7 // 8 - 1
    assert client.acquire(keys[1:])[1].outcome is AcquireOutcome.LATER
    refusals = rig.counter("budget_refusals.loads")
    assert client.acquire(path("nowhere", 1))[1].outcome is AcquireOutcome.MISSING
    assert client.acquire([keys[1], *path("nowhere", 1)])[1].outcome is AcquireOutcome.MISSING
    assert client.acquire(path(("full", 0), 1))[1].outcome is AcquireOutcome.MISSING, "it is being stored"
    assert rig.counter("budget_refusals.loads") == refusals == 1


LARGE_STATES = spec_of(
    GroupSpec(Kind.ATTENTION, 16, rank_block_bytes=(4096,)),
    GroupSpec(Kind.STATE, 32, rank_block_bytes=(16 * 4096,)),
    name="large",
)
SMALL = spec_of(GroupSpec(Kind.ATTENTION, 16, rank_block_bytes=(50,)))  # 100 bytes, a page


@pytest.mark.requirement("S4")
def test_small_objects_do_not_fill_the_table_of_rows() -> None:
    """They are few bytes, and each takes a row."""
    rig = Rig(256, rows=32, lent_rows=256, credit_bytes=1 << 19)
    hog = rig.attach("hog", 10, spec=SMALL, owner=Owner(1))
    assert reserved(hog, "hog", 40) == 32 * 7 // 8
    assert reserved(user(rig, 2), "honest", 10) == 4
    audit(rig.depot)


@pytest.mark.requirement("S4")
def test_rows_that_others_have_leave_less_too() -> None:
    """Those of the honest user are few bytes, of which RAM has most left."""
    rig = Rig(256, rows=32, lent_rows=256, credit_bytes=1 << 19)
    honest = rig.attach("honest", 20, spec=SMALL, owner=Owner(2))
    assert reserved(honest, "honest", 10) == 10
    assert reserved(rig.attach("hog", 10, spec=SMALL, owner=Owner(1)), "hog", 40) == 32 * 7 // 8 - 10
    assert reserved(honest, "more", 10) == 4


@pytest.mark.requirement("S4")
def test_loads_of_one_object_do_not_fill_the_table_of_loans() -> None:
    rig = Rig(PAGES, lent_rows=64, credit_bytes=CREDIT, loads_in_flight=100)
    hog, honest = user(rig, 1), user(rig, 2)
    hog.store(path("p", 1))
    granted = [hog.acquire(path("p", 1))[1].outcome for _ in range(70)]
    assert granted.count(AcquireOutcome.GRANTED) == 64 * 7 // 8
    honest.store(path("h", 4))
    assert honest.acquire(path("h", 4))[1].outcome is AcquireOutcome.GRANTED
    audit(rig.depot)


class CountedPasses(dict[int, Session]):
    """Sessions by slot, which count how often somebody looks at all of them."""

    passes = 0

    def values(self) -> Any:
        self.passes += 1
        return super().values()


def test_a_status_looks_at_all_sessions_once_and_counts_an_object_once_for_each_tenant() -> None:
    """However many tenants there are: the loop waits meanwhile."""
    tenants = {name: TenantBudget() for name in "abcd"} | {"e": TenantBudget(2 * 8192, sessions=3)}
    rig = Rig(PAGES * 4, tenants=tenants)
    large = spec_of(GroupSpec(Kind.ATTENTION, 16, rank_block_bytes=(6 * 4096,)), name="large", tenant="b")
    one, two = user(rig, 1, 0, "a"), user(rig, 2, 1, "a")
    three = rig.attach("e3", 30, spec=large, owner=Owner(3, tenant="b"))
    one.store(path("p", 3))
    three.store(path("p", 2))
    one.acquire(path("p", 2))
    one.acquire(path("p", 1))
    two.acquire(path("p", 3))
    three.acquire(path("p", 2))
    three.reserve(path("q", 1))
    budgets = rig.depot._budgets
    budgets._sessions.by_slot = sessions = CountedPasses(budgets._sessions.by_slot)
    statuses = {status.name: status for status in budgets.tenants(rig.depot._tree.namespaces.by_slot.values())}
    assert sessions.passes == 1
    used = {name: (status.sessions, status.credit_used_bytes) for name, status in statuses.items()}
    assert used == {"a": (2, 3 * 8192), "b": (1, 3 * 12 * 4096), "c": (0, 0), "d": (0, 0), "e": (0, 0)}
    rest = (PAGES * 4 * 4096 - 2 * 8192) // 4
    assert [status.credit_bytes for status in statuses.values()] == [rest] * 4 + [2 * 8192]
    assert [status.sessions_max for status in statuses.values()] == [(1024 - 3) // 4] * 4 + [3]
