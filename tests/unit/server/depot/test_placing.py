"""Large loads from a lower tier: room is made in slices, and others are answered between two of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from kvdepot.core.arena import NO_ROW
from kvdepot.core.calls import AcquireOutcome
from kvdepot.server.depot.loads import acquires
from kvdepot.server.depot.tree.index import NONE
from kvdepot.server.storage.base import IoOutcome

from tests.rigs.engine_rig import Client, Rig, audit, path
from tests.rigs.tier_rig import ATTENTION, COMMIT, in_ram, on_tier_only, read, settle, store

KEYS = path("p", 6)
LEASE = 1


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Rig, Client]]:
    """A prompt that the tier alone has; room is made for one object after another."""
    monkeypatch.setattr(acquires, "PLACED_AT_ONCE", 1)

    def made(**options: object) -> tuple[Rig, Client]:
        rig = Rig(**({"data_pages": 64, "tier": COMMIT, "prefetch_share": 0.0} | options))  # type: ignore[arg-type]
        client = on_tier_only(rig, KEYS)
        rig.places_at_once = False
        return rig, client

    return made


def place_all(rig: Rig) -> int:
    slices = 0
    while rig.depot.place_some():
        slices += 1
    audit(rig.depot)
    return slices


def test_what_has_room_is_read_while_room_is_made_for_the_rest(cold: Callable[..., tuple[Rig, Client]]) -> None:
    rig, client = cold()
    answers = client.acquire_later(KEYS, ATTENTION * len(KEYS), LEASE)
    assert len(rig.tier.jobs) == 1
    rig.tier.run()
    assert not answers, "the first object is there, and nobody is told before all are"
    assert place_all(rig) == len(KEYS) - 2
    rig.tier.run()
    assert [reply.outcome for reply in answers] == [AcquireOutcome.GRANTED]
    assert read(rig, answers[0]) == {7}
    client.release(LEASE)
    audit(rig.depot)


def test_a_load_whose_reads_end_before_the_last_slice_is_answered_with_it(
    cold: Callable[..., tuple[Rig, Client]],
) -> None:
    rig, client = cold()
    answers = client.acquire_later(KEYS, ATTENTION * len(KEYS), LEASE)
    while rig.depot.place_some():
        rig.tier.run()
        assert not answers
    rig.tier.run()
    assert [reply.outcome for reply in answers] == [AcquireOutcome.GRANTED]
    audit(rig.depot)


def test_others_store_and_load_between_two_slices(cold: Callable[..., tuple[Rig, Client]]) -> None:
    rig, client = cold()
    answers = client.acquire_later(KEYS, ATTENTION * len(KEYS), LEASE)
    store(client, path("other", 2), fill=9)
    _, reply = client.acquire(path("other", 2))
    assert read(rig, reply) == {9}
    place_all(rig)
    rig.tier.run()
    assert read(rig, answers[0]) == {7}


def test_a_node_that_became_another_chunks_between_two_slices_is_not_taken_for_the_first(
    cold: Callable[..., tuple[Rig, Client]],
) -> None:
    rig, client = cold()
    index = rig.depot._tree.index
    node = index.find(0, KEYS[3])
    answers = client.acquire_later(KEYS, ATTENTION * len(KEYS), LEASE)
    removal = rig.depot.deletion(client.namespace, KEYS[3])
    while removal.run_once():
        pass
    settle(rig)
    others = path("other", 3)
    store(client, others, fill=9)
    assert node in {index.find(0, key) for key in others} - {NONE}, "the test lost its teeth"
    place_all(rig)
    rig.tier.run()
    assert [reply.outcome for reply in answers] == [AcquireOutcome.MISSING]
    settle(rig)
    assert rig.depot.status().tier.lent_bytes == 0


def test_a_load_that_finds_no_more_room_gives_back_what_it_had(cold: Callable[..., tuple[Rig, Client]]) -> None:
    rig, client = cold(data_pages=16)
    blocked, _ = client.reserve(path("writes", 5))
    answers = client.acquire_later(KEYS, ATTENTION * len(KEYS), LEASE)
    place_all(rig)
    rig.tier.run()
    assert [reply.outcome for reply in answers] == [AcquireOutcome.LATER]
    client.abandon(blocked)
    settle(rig)
    assert rig.depot.status().tier.lent_bytes == 0
    again = client.acquire_later(KEYS, ATTENTION * len(KEYS), LEASE + 1)
    place_all(rig)
    rig.tier.run()
    assert [reply.outcome for reply in again] == [AcquireOutcome.GRANTED]


@pytest.mark.parametrize("end", ["release", "death", "drain", "damage", "deadline"])
def test_what_ends_a_load_between_two_slices_ends_it_whole(cold: Callable[..., tuple[Rig, Client]], end: str) -> None:
    rig, client = cold(lease_deadline_seconds=10.0)
    answers = client.acquire_later(KEYS, ATTENTION * len(KEYS), LEASE)
    rig.depot.place_some()
    if end == "release":
        client.release(LEASE)
    elif end == "death":
        rig.depot.process_dead(client.attachment)
    elif end == "drain":
        rig.depot.drain(draining=True)
    elif end == "damage":
        rig.tier.finish(rig.tier.jobs[0], IoOutcome.IO_ERROR)
    else:
        rig.now += 11.0
        rig.depot.tick()
    assert place_all(rig) == 0, "nothing is placed for a load that has ended"
    assert len(answers) == 1 and answers[0].outcome is not AcquireOutcome.GRANTED
    settle(rig)
    assert rig.depot.status().tier.lent_bytes == 0
    assert in_ram(rig) <= len(KEYS)


@pytest.mark.parametrize("at", [0, 2, 5])
def test_a_slice_that_raises_ends_its_load_and_no_other(
    cold: Callable[..., tuple[Rig, Client]], at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, client = cold()
    promotions, calls = rig.depot._tiering.promotions, iter(range(100))
    place = promotions.place

    def placing(*arguments: object) -> int:
        if next(calls) == at:
            raise RuntimeError("a defect")
        return place(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(promotions, "place", placing)
    monkeypatch.setattr(acquires, "PLACED_AT_ONCE", 3)
    answers = client.acquire_later(KEYS, ATTENTION * len(KEYS), LEASE)
    place_all(rig)
    rig.tier.run()
    assert [reply.outcome for reply in answers] == [AcquireOutcome.MISSING]
    settle(rig)
    assert rig.depot.status().tier.lent_bytes == 0
    assert rig.counter("internal_errors.promotion") == 1
    again = client.acquire_later(KEYS, ATTENTION * len(KEYS), LEASE + 1)
    place_all(rig)
    rig.tier.run()
    assert [reply.outcome for reply in again] == [AcquireOutcome.GRANTED]
    audit(rig.depot)


@pytest.mark.parametrize("part", ["cancel", "abandon", "_drop"])
def test_a_load_that_finds_no_more_room_is_answered_whatever_raises(
    cold: Callable[..., tuple[Rig, Client]], monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    rig, client = cold()
    answers = client.acquire_later(KEYS, ATTENTION * len(KEYS), LEASE)
    rig.depot.place_some()
    with monkeypatch.context() as broken:
        broken.setattr(rig.depot._tiering.promotions, "place", lambda *_: NO_ROW)
        broken.setattr(rig.depot._tiering.promotions, part, lambda *_: 1 / 0)
        while rig.depot.place_some():
            pass
    assert [reply.outcome for reply in answers] == [AcquireOutcome.LATER]
    assert rig.depot.status().sessions[0].leases == 0
    rig.tier.run()
    again = client.acquire_later(KEYS, ATTENTION * len(KEYS), LEASE + 1)
    while rig.depot.place_some() or rig.tier.jobs:
        rig.tier.run()
    assert len(again) == 1 and len(answers) == 1
