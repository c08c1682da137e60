"""The shadow audit's book-keeping: whom it asks, what it costs, and how it ends (design.md#audit)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kvdepot.core.calls import CommitOutcome, EndRequestCall, Kind, ReserveOutcome
from kvdepot.core.elements import OPAQUE, ElementRun, Elements
from kvdepot.core.errors import LimitExceeded, NamespaceRefused
from kvdepot.core.keys import NamespaceSpec
from kvdepot.core.limits import ELEMENT_PARTS_MAX, ELEMENT_RUNS_MAX
from kvdepot.core.misses import MissReason
from kvdepot.server.depot.stores import store as store_module
from kvdepot.server.depot.stores.audits import AUDITS_MAX, OUTCOMES
from kvdepot.server.depot.types import Owner, Quota, TenantBudget, TierConfig, WritePolicy

from tests.rigs.engine_rig import CHUNK, DENSE, HYBRID, Client, Rig, audit, path, unpack

GRANTED, PRESENT = ReserveOutcome.GRANTED, ReserveOutcome.PRESENT
COMMITTED, EXPIRED = CommitOutcome.COMMITTED, CommitOutcome.EXPIRED
OBJECT = 8192
ELEMENTS: Elements = {Kind.ATTENTION: (ElementRun("bfloat16", OBJECT),)}
HYBRID_ELEMENTS: Elements = {
    **ELEMENTS, Kind.STATE: (ElementRun("bfloat16", 1000), ElementRun("float32", 4000)),
}  # fmt: skip
KEYS = path("p", 3)


def rig_of(**config: object) -> Rig:
    """Everything is drawn; room for two scratches of DENSE."""
    return Rig(**({"data_pages": 256, "audit_sample": 1.0} | config))  # type: ignore[arg-type]


def attach(
    rig: Rig, engine: str = "engine", pid: int = 10, spec: NamespaceSpec = DENSE, elements: Elements = ELEMENTS
) -> Client:
    return rig.attach(engine, pid, spec, elements)


def recompute(client: Client, keys: list[bytes] = KEYS[:1]) -> int:
    """The lease of an engine that has computed again what is there."""
    lease, reply = client.reserve(keys)
    assert set(reply.outcomes) == {GRANTED}
    return lease


def figures(rig: Rig) -> dict[str, float]:
    return {name: rig.counter(f"audits.{name}") for name in OUTCOMES if rig.counter(f"audits.{name}")}


def compare(rig: Rig, *, drifted: bool = False) -> int:
    """The worker's part; how many it had to compare."""
    count = 0
    while (pair := rig.depot.next_to_compare()) is not None:
        rig.depot.compared(pair.row, drifted=drifted)
        count += 1
    audit(rig.depot)
    return count


def check_nothing_is_left(rig: Rig, objects: int) -> None:
    """No scratch, no loan, no credit."""
    audit(rig.depot)
    tier = rig.depot.status().tier
    assert (tier.objects, tier.used_bytes, tier.lent_bytes) == (objects, objects * OBJECT, 0)
    assert all(session.credit_used_bytes == 0 for session in rig.depot.status().sessions)
    assert not rig.depot._audits._writing and not rig.depot._audits._pairs


def test_what_is_computed_again_is_written_beside_and_compared() -> None:
    rig = rig_of()
    one, other = attach(rig), attach(rig, "other", 11)
    one.store(KEYS)
    ((_, row, offset, _, generation),) = unpack(one.acquire(KEYS[:1])[1].extents)
    lease, reply = other.reserve(KEYS[:1])
    ((_, scratch, place, length, granted),) = unpack(reply.extents)
    assert (reply.outcomes, length) == (bytes([GRANTED]), OBJECT)
    assert scratch != row and place != offset
    assert rig.depot._ram.rows.generation[scratch] == granted  # what a rank looks at before and after its copy
    assert rig.depot.status().sessions[1].credit_used_bytes == 0
    audit(rig.depot)
    assert other.commit(lease, 0) == bytes([COMMITTED]) == other.commit(lease, 0)
    pair = rig.depot.next_to_compare()
    assert pair is not None and rig.depot.next_to_compare() is None
    assert (pair.row, pair.stored, pair.recomputed) == (scratch, ((offset, OBJECT),), ((place, OBJECT),))
    assert pair.runs == ELEMENTS[Kind.ATTENTION]
    audit(rig.depot)
    assert rig.depot.compared(pair.row, drifted=False) is None
    assert figures(rig) == {"same": 1}
    assert rig.depot._ram.rows.generation[row] == generation
    one.release(*rig.depot._sessions.of(one.session).leases)
    assert one.locate(KEYS).boundary_tokens == 3 * CHUNK
    check_nothing_is_left(rig, 3)


def test_drift_takes_the_chunk_with_all_that_followed_it_from_every_tier_and_says_so() -> None:
    rig = rig_of(tier=TierConfig(write=WritePolicy.COMMIT))
    one, other = attach(rig), attach(rig, "other", 11)
    one.store(KEYS)
    rig.tier.run()
    assert rig.depot.status().lower_tiers[0].objects == 3
    other.commit(recompute(other, KEYS[:2]), 1)
    pair = rig.depot.next_to_compare()
    assert pair is not None
    drift = rig.depot.compared(pair.row, drifted=True)
    assert drift is not None and (drift.key, drift.kind, drift.chunks, drift.shared_tiers) == (KEYS[1], 1, 2, ())
    assert drift.namespace_id == one.namespace
    assert rig.depot.status().lower_tiers[0].objects == rig.depot.status().tier.objects == 1
    located = one.locate(KEYS)
    assert (located.boundary_tokens, located.miss) == (CHUNK, MissReason.DRIFT)
    assert (figures(rig), rig.counter("dropped_objects.below_drifted")) == ({"drifted": 1}, 1)
    audit(rig.depot)
    lease, reply = one.reserve(KEYS[1:2], start=1, parent=KEYS[0])
    assert reply.outcomes == bytes([GRANTED]) and rig.depot.status().sessions[0].credit_used_bytes == OBJECT
    assert one.commit(lease, 0) == bytes([COMMITTED])
    assert one.locate(KEYS).boundary_tokens == 2 * CHUNK


def test_drift_of_a_state_takes_its_chunk_too() -> None:
    rig = rig_of()
    client = attach(rig, spec=HYBRID, elements=HYBRID_ELEMENTS)
    client.store(KEYS[:1], (Kind.ATTENTION, Kind.STATE))
    lease, reply = client.reserve(KEYS[:1], (Kind.STATE,))
    assert reply.outcomes == bytes([GRANTED])
    client.commit(lease, 0)
    pair = rig.depot.next_to_compare()
    assert pair is not None and pair.runs == HYBRID_ELEMENTS[Kind.STATE]
    assert rig.depot.compared(pair.row, drifted=True) is not None
    assert rig.depot.status().tier.objects == rig.depot.status().tier.used_bytes == 0
    audit(rig.depot)


@pytest.mark.parametrize("sample", [0.0, 0.25])
def test_only_a_sample_is_asked_for(sample: float) -> None:
    rig = rig_of(audit_sample=sample)
    client = attach(rig)
    client.store(KEYS)
    granted = 0
    for _ in range(400):
        lease, reply = client.reserve(KEYS[:1])
        assert (reply.extents == b"") == (reply.outcomes == bytes([PRESENT]))
        granted += reply.outcomes == bytes([GRANTED])
        client.commit(lease, 0)
        compare(rig)
    assert abs(granted - 400 * sample) <= 40 * bool(sample)
    assert figures(rig) == ({"same": granted} if sample else {})
    check_nothing_is_left(rig, 3)


def test_an_audited_path_was_used() -> None:
    rig = rig_of(eviction="lru", rows=8, data_pages=256)
    client = attach(rig)
    old, new = path("old", 1), path("new", 5)
    client.store(old)
    rig.now += 1
    client.store(new)
    rig.now += 1
    client.commit(recompute(client, old), 0)
    compare(rig)
    client.store(path("more", 3))
    assert client.locate(old).boundary_tokens == CHUNK


@pytest.mark.parametrize(
    "elements", [{}, {Kind.ATTENTION: (ElementRun(OPAQUE, OBJECT),)}, {Kind.ATTENTION: (ElementRun("float4", OBJECT),)}]
)
def test_an_engine_that_says_nothing_of_its_types_is_not_audited(elements: Elements) -> None:
    rig = rig_of()
    client = attach(rig, elements=elements)
    client.store(KEYS)
    assert client.reserve(KEYS)[1].outcomes == bytes([PRESENT] * 3)
    assert figures(rig) == {"unknown_type": 3}
    attach(rig, "newer", 11)
    assert client.reserve(KEYS[:1])[1].outcomes == bytes([GRANTED])


@pytest.mark.parametrize(
    ("elements", "refusal"),
    [
        ({Kind.ATTENTION: (ElementRun("bfloat16", OBJECT - 2),)}, NamespaceRefused),
        ({Kind.STATE: (ElementRun("bfloat16", OBJECT),)}, NamespaceRefused),
        ({Kind.ATTENTION: (ElementRun("int8", 1),) * (ELEMENT_RUNS_MAX + 1)}, LimitExceeded),
        ({Kind.ATTENTION: (ElementRun("int8", 0, ELEMENT_PARTS_MAX + 1),)}, LimitExceeded),
    ],
)
def test_elements_that_do_not_cover_the_objects_are_refused(elements: Elements, refusal: type[Exception]) -> None:
    rig = rig_of()
    with pytest.raises(refusal):
        attach(rig, elements=elements)
    assert not rig.depot.status().namespaces


@pytest.mark.requirement("I4")
def test_no_more_than_its_share_of_ram_and_so_many_at_once() -> None:
    rig = rig_of()  # 1 MiB: a share of 32 KiB, four scratches
    client = attach(rig)
    keys = path("many", 6)
    client.store(keys)
    lease, reply = client.reserve(keys)
    assert reply.outcomes == bytes([GRANTED] * 4 + [PRESENT] * 2)
    client.commit(lease, 0, 1)
    assert client.reserve(keys[:1])[1].outcomes == bytes([PRESENT])  # what waits for the worker counts
    assert compare(rig) == 2
    assert client.reserve(keys[:3])[1].outcomes == bytes([GRANTED, GRANTED, PRESENT])
    large = rig_of(data_pages=4096, rows=256)
    client = attach(large)
    keys = path("many", AUDITS_MAX + 2)
    client.store(keys)
    outcomes = client.reserve(keys)[1].outcomes
    assert outcomes == bytes([GRANTED] * AUDITS_MAX + [PRESENT] * 2)
    assert figures(large) == {"no_room": 2}


@pytest.mark.requirement("S4")
def test_audits_in_one_part_leave_their_number_to_another_one() -> None:
    budgets = {name: TenantBudget(None, None) for name in ("a", "b")}
    rig = rig_of(parts=(4 << 20, 4 << 20), rows=1024, lent_rows=1024, tenants=budgets)
    keys, half = path("many", AUDITS_MAX), AUDITS_MAX // 2
    for uid, tenant in enumerate(budgets, 1):
        client = rig.attach(tenant, uid, replace(DENSE, tenant=tenant), ELEMENTS, owner=Owner(uid, tenant=tenant))
        client.store(keys)
        assert client.reserve(keys)[1].outcomes == bytes([GRANTED] * half + [PRESENT] * half)
    audit(rig.depot)


@pytest.mark.parametrize("tight", ["bytes", "rows", "quota"])
def test_an_audit_displaces_nothing(tight: str) -> None:
    """Up to the watermark RAM is for objects; a scratch is never what makes it evict."""
    quotas = (Quota(tier="ram", capacity_bytes=100 * OBJECT),) if tight == "quota" else ()
    rig = rig_of(
        high_watermark=0.9, low_watermark=0.8, quotas=quotas, rows=110 if tight == "rows" else 256,
        data_pages={"bytes": 220}.get(tight, 1024),
    )  # fmt: skip
    client = attach(rig)
    keys = path("full", 99)
    client.store(keys[:89])
    assert client.commit(recompute(client, keys[:1]), 0) == bytes([COMMITTED])
    compare(rig)
    client.store(keys[89:], start=89, parent=keys[88])
    before = rig.depot.status().tier
    assert client.reserve(keys[:1])[1].outcomes == bytes([PRESENT])
    assert rig.depot.status().tier == before
    assert figures(rig) == {"same": 1, "no_room": 1}


def test_a_store_gets_all_credit_and_room_while_audits_are_under_way() -> None:
    rig = rig_of(credit_bytes=4 * OBJECT, kept_back_share=0.0)
    client = attach(rig)
    client.store(KEYS)
    recompute(client, KEYS)
    lease, reply = client.reserve(path("new", 4))
    assert reply.outcomes == bytes([GRANTED] * 4)
    assert set(client.commit(lease, 0, 1, 2, 3)) == {COMMITTED}


@pytest.mark.requirement("T7")
def test_what_is_given_back_unwritten_leaves_nothing() -> None:
    rig = rig_of()
    client = attach(rig)
    client.store(KEYS)
    lease, _ = client.reserve(KEYS[:2], request="r")
    client.abandon(lease, 0)
    rig.depot.end_request(EndRequestCall(client.session, "r"))
    client.abandon(lease)
    assert figures(rig) == {"unwritten": 2}
    assert client.locate(KEYS).boundary_tokens == 3 * CHUNK
    check_nothing_is_left(rig, 3)


@pytest.mark.requirement("I5", "I6")
def test_an_expired_audit_keeps_its_bytes_until_its_writer_is_done_or_dead() -> None:
    rig = rig_of(lease_deadline_seconds=5.0)
    one, other = attach(rig), attach(rig, "other", 11)
    one.store(KEYS)
    late = recompute(one)
    recompute(other)
    rig.now += 6
    rig.depot.tick()
    assert rig.depot.status().tier.lent_bytes == 2 * OBJECT
    assert one.commit(late, 0) == bytes([EXPIRED])
    assert rig.depot.status().tier.lent_bytes == OBJECT
    rig.depot.process_dead(other.attachment)
    assert figures(rig) == {"unwritten": 2} and compare(rig) == 0
    check_nothing_is_left(rig, 3)


@pytest.mark.requirement("T7")
def test_a_session_that_dies_in_the_middle_leaves_nothing() -> None:
    rig = rig_of()
    one, other = attach(rig), attach(rig, "other", 11)
    one.store(KEYS)
    lease, _ = other.reserve(KEYS)
    other.commit(lease, 1)
    rig.depot.process_dead(other.attachment)
    audit(rig.depot)
    assert compare(rig) == 1  # what it had written is compared all the same
    assert figures(rig) == {"unwritten": 2, "same": 1}
    check_nothing_is_left(rig, 3)


def test_a_comparison_of_what_was_evicted_meanwhile_is_none() -> None:
    rig = rig_of()
    client = attach(rig)
    client.store(KEYS)
    lease = recompute(client, KEYS[:1])
    for _ in iter(rig.depot.deletion(client.namespace, b"").run_once, False):
        pass
    assert client.commit(lease, 0) == bytes([EXPIRED])
    assert figures(rig) == {"gone": 1}
    check_nothing_is_left(rig, 0)
    client.store(KEYS)


def test_what_went_while_it_was_compared_is_not_dropped_again() -> None:
    rig = rig_of()
    client = attach(rig)
    client.store(KEYS)
    client.commit(recompute(client), 0)
    pair = rig.depot.next_to_compare()
    assert pair is not None
    rig.depot.deletion(client.namespace, KEYS[0]).run_once()
    client.store(KEYS[:1])
    audit(rig.depot)
    assert rig.depot.compared(pair.row, drifted=True) is None
    assert figures(rig) == {"gone": 1}
    assert client.locate(KEYS).boundary_tokens == CHUNK
    check_nothing_is_left(rig, 1)


def test_what_a_lower_tier_has_when_ram_has_lost_it_is_there() -> None:
    rig = rig_of(tier=TierConfig(write=WritePolicy.COMMIT), data_pages=256, eviction="lru")
    client = attach(rig)
    client.store(KEYS[:1])
    rig.tier.run()
    lease = recompute(client)
    rig.depot._ram.evictor.evict_to(rig.depot._ram.rooms[0], 0, 100, "watermark")
    assert client.commit(lease, 0) == bytes([COMMITTED])
    assert figures(rig) == {"gone": 1}
    audit(rig.depot)
    assert client.reserve(KEYS[:1])[1].outcomes == bytes([PRESENT])  # what RAM does not have is not asked for


@pytest.mark.requirement("I6")
def test_what_drifted_while_it_is_lent_stays_until_it_is_given_back() -> None:
    rig = rig_of()
    client = attach(rig)
    client.store(KEYS[:1])
    reading, acquired = client.acquire(KEYS[:1])
    ((_, row, _, _, generation),) = unpack(acquired.extents)
    client.commit(recompute(client), 0)
    assert compare(rig, drifted=True) == 1
    assert rig.depot._ram.rows.generation[row] != generation  # its reader reports a failed load
    assert client.locate(KEYS).boundary_tokens == 0
    assert rig.depot.status().tier.lent_bytes == OBJECT
    client.release(reading)
    check_nothing_is_left(rig, 0)


def test_a_store_below_what_drifts_finds_no_parent() -> None:
    rig = rig_of()
    client = attach(rig)
    client.store(KEYS[:1])
    lease, reply = client.reserve(KEYS)
    assert reply.outcomes == bytes([GRANTED] * 3)
    client.commit(lease, 0)
    assert compare(rig, drifted=True) == 1
    assert client.commit(lease, 1, 2) == bytes([CommitOutcome.NO_PARENT] * 2)
    check_nothing_is_left(rig, 0)


def test_a_worker_that_dies_ends_its_comparisons() -> None:
    rig = rig_of()
    client = attach(rig)
    client.store(KEYS)
    lease, _ = client.reserve(KEYS[:2])
    client.commit(lease, 0, 1)
    pair = rig.depot.next_to_compare()
    rig.depot.sum_worker_died()
    assert figures(rig) == {"unanswered": 2} and rig.depot.next_to_compare() is None
    assert pair is not None and rig.depot.compared(pair.row, drifted=True) is None  # it had answered before
    check_nothing_is_left(rig, 3)


@pytest.mark.requirement("T1")
@pytest.mark.parametrize("dies", [False, True])
def test_a_scratch_is_never_adopted_and_its_writer_keeps_it(dies: bool) -> None:
    rig = rig_of()
    client = attach(rig)
    client.store(KEYS)
    rig.sum_all()
    lease, reply = client.reserve(KEYS[:2])
    client.commit(lease, 1)
    rig.dead |= {10} if dies else set()
    rig.crash()
    audit(rig.depot)
    assert (rig.report.kept, rig.report.reserved, rig.report.pinned) == (3, 0, 0 if dies else 1)
    assert rig.depot.status().tier.used_bytes == (3 if dies else 4) * OBJECT
    rig.sum_all()
    if not dies:
        ((_, scratch, place, _, granted), _) = unpack(reply.extents)
        assert rig.depot._ram.rows.extents(scratch) == ((place, OBJECT),)
        assert rig.depot._ram.rows.generation[scratch] != granted  # what its rank copies now fails
        client = attach(rig)
        assert client.commit(lease, 0) == bytes([CommitOutcome.NO_PARENT])
        assert client.locate(KEYS).boundary_tokens == 3 * CHUNK
    assert compare(rig) == 0
    check_nothing_is_left(rig, 3)


def test_switched_off_at_run_time_no_more_is_asked_for() -> None:
    rig = rig_of()
    client = attach(rig)
    client.store(KEYS)
    lease = recompute(client)
    rig.depot.configure(replace(rig.config, audit_sample=0.0), {})
    assert client.reserve(KEYS[:1])[1].outcomes == bytes([PRESENT])
    client.commit(lease, 0)
    assert compare(rig) == 1
    check_nothing_is_left(rig, 3)


@pytest.mark.requirement("I4")
def test_a_reply_without_room_for_more_pieces_asks_for_no_audit(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = rig_of()
    client = attach(rig)
    client.store(KEYS)
    monkeypatch.setattr(store_module, "_FRAGMENT_WORDS_MAX", 5)
    assert client.reserve(KEYS)[1].outcomes == bytes([GRANTED, PRESENT, PRESENT])
    audit(rig.depot)
