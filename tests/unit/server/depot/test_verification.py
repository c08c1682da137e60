"""Verification at an operator's word: at its pace, behind everything else, never waiting for what does not answer."""

from __future__ import annotations

from collections import deque

import pytest
import xxhash
from kvdepot.core.control import VerifiedTier, VerifyCall
from kvdepot.core.errors import NotFound
from kvdepot.server.depot.operators import verification as module
from kvdepot.server.depot.operators.verification import Verification
from kvdepot.server.depot.tree import walks
from kvdepot.server.depot.types import ToSum
from kvdepot.server.storage.base import OTHER_KEYS, IoOutcome

from tests.rigs.engine_rig import CHUNK, Rig, audit, path
from tests.rigs.tier_rig import COMMIT, in_ram, in_tier, reboot, settle, store

KEYS = path("p", 4)
OBJECT = 8192
FAST = 1 << 40


def sum_next(rig: Rig) -> ToSum | None:
    """As the checksum worker does it."""
    job = rig.depot.next_to_sum()
    if job is not None:
        answer(rig, job)
    return job


def answer(rig: Rig, job: ToSum) -> None:
    state = xxhash.xxh3_128()
    for offset, length in job.extents:
        state.update(rig.buffer[offset : offset + length])
    total = state.intdigest()
    rig.depot.summed(job.row, job.generation, total & (1 << 64) - 1, total >> 64)


def stored(**options: object) -> Rig:
    """Four objects of one path, in both tiers, with their sums."""
    rig = Rig(**({"tier": COMMIT} | options))  # type: ignore[arg-type]
    store(rig.attach(), KEYS)
    rig.tier.run()
    while sum_next(rig):
        pass
    return rig


def found(verification: Verification) -> dict[str, VerifiedTier]:
    return {tier.tier: tier for tier in verification.reply().tiers}


def begun(rig: Rig, call: VerifyCall) -> Verification:
    """With all in hand that may be."""
    verification = rig.depot.verification(call)
    for _ in range(3):
        assert verification.run_once()
        rig.now += 0.1
    return verification


def finish(rig: Rig, verification: Verification) -> dict[str, VerifiedTier]:
    for _ in range(100):
        if not verification.run_once():
            audit(rig.depot)
            return found(verification)
        sum_next(rig)
        rig.tier.run()
        rig.now += 0.1
    raise AssertionError(found(verification))


def test_what_it_names_is_read_once_and_two_at_a_time() -> None:
    rig = stored()
    verification = begun(rig, VerifyCall(FAST))
    assert len(rig.tier.jobs) == 2
    jobs = [rig.depot.next_to_sum() for _ in range(3)]
    assert jobs[2] is None
    for job in jobs[:2]:
        assert job is not None
        answer(rig, job)
    tiers = finish(rig, verification)
    for tier in tiers.values():
        assert (tier.objects, tier.verified, tier.verified_bytes, tier.finished) == (4, 4, 4 * OBJECT, True)
        assert (tier.damaged, tier.skipped, tier.reason) == ({}, {}, "")


def test_no_more_is_begun_than_the_rate_allows_and_no_lost_time_made_up_for() -> None:
    rig = stored()
    verification = rig.depot.verification(VerifyCall(OBJECT // 2, tier="memory"))
    verification.run_once()
    assert rig.tier.run() == 1
    rig.now += 1.7
    verification.run_once()
    assert not rig.tier.jobs
    rig.now += 60
    verification.run_once()
    assert rig.tier.run() == 1
    rig.now += 0.9
    verification.run_once()
    assert not rig.tier.jobs, "a second of the minute that was lost is made up for"
    rig.now += 0.2
    verification.run_once()
    assert rig.tier.run() == 1
    rig.now += 60
    assert finish(rig, verification)["memory"].verified == 4


def test_first_sums_and_loads_go_first() -> None:
    rig = stored()
    client = rig.attach("other", 11)
    verification = rig.depot.verification(VerifyCall(FAST, tier="ram"))
    verification.run_once()
    store(client, path("q", 1))
    job = rig.depot.next_to_sum()
    assert job is not None and not rig.depot._ram.rows.summed(job.row), "what would be lost without its sum"
    again = rig.depot.next_to_sum()
    assert again is not None and rig.depot._ram.rows.summed(again.row)
    store(client, path("r", 1))
    third = rig.depot.next_to_sum()
    assert third is not None and not rig.depot._ram.rows.summed(third.row), "though others are compared again"
    for one in (job, again, third):
        answer(rig, one)
    assert finish(rig, verification)["ram"].verified >= 4


def test_damage_ends_as_it_does_elsewhere_and_both_tiers_mend_each_other() -> None:
    rig = stored()
    row = rig.depot._tree.index.row(rig.depot._tree.index.find(0, KEYS[1]), 1)
    rig.buffer[rig.depot._ram.rows.offset[row]] ^= 1
    handle = next(handle for handle, name in rig.medium.names.items() if name.key == KEYS[2])
    blob = bytearray(rig.medium.stored[handle])
    blob[-1] ^= 1
    rig.medium.stored[handle] = bytes(blob)
    tiers = finish(rig, rig.depot.verification(VerifyCall(FAST)))
    assert (tiers["ram"].damaged, tiers["memory"].damaged) == ({"corrupt": 1}, {"corrupt": 1})
    assert (tiers["ram"].verified, tiers["memory"].verified) == (3, 3)
    assert rig.counter("corrupt_objects") == 1 and len(rig.medium.quarantined) == 1
    settle(rig)
    assert rig.attach().locate(KEYS).boundary_tokens == 4 * CHUNK
    assert (in_ram(rig), in_tier(rig)) == (3, 4), "what the tier lost is written again"


def test_what_has_no_sum_is_written_or_leaves_is_skipped_by_name() -> None:
    rig = stored()
    client = rig.attach("other", 11)
    store(client, path("q", 1))
    client.reserve(path("r", 1))  # while engines copy first sums wait
    verification = begun(rig, VerifyCall(FAST, tier="ram"))
    removal = rig.depot.deletion(client.namespace, KEYS[0])
    while removal.run_once():
        pass
    assert finish(rig, verification)["ram"].skipped == {"no_checksum": 1, "being_written": 1, "left": 4}


def test_what_was_adopted_is_verified_on_the_way() -> None:
    rig = stored()
    rig.crash()
    assert rig.depot.status().tier.unverified_objects == 4
    assert finish(rig, rig.depot.verification(VerifyCall(FAST, tier="ram")))["ram"].verified == 4
    assert rig.depot.status().tier.unverified_objects == 0


def test_a_checksum_worker_that_dies_is_replaced_and_one_that_hangs_is_not_waited_for() -> None:
    rig = stored()
    verification = begun(rig, VerifyCall(FAST, tier="ram"))
    assert rig.depot.next_to_sum() and rig.depot.next_to_sum()
    rig.depot.sum_worker_died()
    assert sum_next(rig) and sum_next(rig)
    verification.run_once()
    rig.now += module.SILENCE_SECONDS - 1
    assert verification.run_once()
    rig.now += 2
    assert not verification.run_once()
    ram = found(verification)["ram"]
    assert (ram.verified, ram.finished) == (2, True) and "no answer" in ram.reason


def test_a_tier_that_answers_too_late_or_goes_out_of_use_is_left_to_itself() -> None:
    rig = stored()
    verification = rig.depot.verification(VerifyCall(FAST, tier="memory"))
    verification.run_once()
    rig.tier.finish(rig.tier.jobs[0], IoOutcome.TIMEOUT)
    assert not verification.run_once()
    tier = found(verification)["memory"]
    assert (tier.skipped, tier.verified) == ({"timeout": 1}, 0) and "in time" in tier.reason
    rig.tier.run()
    assert found(verification)["memory"].verified == 0, "over is over"
    rig.tier.readable = False
    verification = rig.depot.verification(VerifyCall(FAST, tier="memory"))
    assert not verification.run_once()
    assert found(verification)["memory"].reason == "degraded"


@pytest.mark.parametrize("outcome", sorted(OTHER_KEYS))
def test_an_object_of_other_keys_is_skipped_and_not_damaged(outcome: IoOutcome) -> None:
    rig = stored()
    verification = rig.depot.verification(VerifyCall(FAST, tier="memory"))
    verification.run_once()
    rig.tier.finish(rig.tier.jobs[0], outcome)
    tier = finish(rig, verification)["memory"]
    assert (tier.damaged, tier.skipped[outcome]) == ({}, 1)


def test_cancelled_it_begins_nothing_more_and_the_next_one_begins_anew() -> None:
    rig = stored()
    verification = rig.depot.verification(VerifyCall(FAST))
    verification.run_once()
    job = rig.depot.next_to_sum()
    assert job is not None
    verification.cancel()
    assert not verification.run_once()
    again = rig.depot.verification(VerifyCall(FAST))
    again.run_once()
    answer(rig, job)
    rig.tier.run()
    assert {tier.verified for tier in finish(rig, again).values()} == {4}
    assert {tier.verified for tier in found(verification).values()} == {0}


def test_a_chunk_means_what_is_below_it_and_a_name_that_is_not_there_is_refused() -> None:
    rig = stored()
    client = rig.attach("other", 11)
    tiers = finish(rig, rig.depot.verification(VerifyCall(FAST, client.namespace, KEYS[1])))
    assert {tier: (one.objects, one.verified) for tier, one in tiers.items()} == {"ram": (0, 3), "memory": (0, 3)}
    for call in (VerifyCall(1, b"x" * 16), VerifyCall(1, client.namespace, b"x" * 16), VerifyCall(1, tier="floppy")):
        with pytest.raises(NotFound):
            rig.depot.verification(call)


def test_only_a_lower_tier_has_it() -> None:
    rig = stored()
    reboot(rig)
    tiers = finish(rig, rig.depot.verification(VerifyCall(FAST)))
    assert {tier: one.verified for tier, one in tiers.items()} == {"ram": 0, "memory": 4}


def test_a_chunk_with_more_children_than_are_gone_through_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walks, "_CHILDREN", 2)
    monkeypatch.setattr(walks, "_NUMBERS", 3)
    monkeypatch.setattr(walks, "_STEPS", 2)
    rig = stored()
    client = rig.attach("other", 11)
    for number in range(5):
        store(client, [KEYS[0], *path(f"branch {number}", 2)])
    tree = rig.depot._tree
    (namespace,) = tree.namespaces.by_slot.values()
    walk = walks.below(tree.index, tree.namespaces, namespace, deque([KEYS[0]]))
    met = [tree.index.key(node) for slice_ in walk for node in slice_]
    assert sorted(met) == sorted({*KEYS, *(key for number in range(5) for key in path(f"branch {number}", 2))})
    assert all(met.index(path(n, 2)[0]) < met.index(path(n, 2)[1]) for n in map("branch {}".format, range(5)))
    everything = [node for slice_ in walks.everything(tree.index) for node in slice_.tolist()]
    assert sorted(everything) == sorted(tree.index.nodes().tolist())
