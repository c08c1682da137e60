"""Sessions with many leases end in slices: others are answered meanwhile, and everything comes back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from kvdepot.core.calls import AcquireOutcome, CommitOutcome, ReserveOutcome
from kvdepot.core.errors import UnknownSession
from kvdepot.server.depot import departures
from kvdepot.server.depot.sessions import sessions as sessions_module
from kvdepot.server.depot.types import Membership

from tests.rigs.engine_rig import Client, Rig, audit, path, process

LEASES, OBJECTS = 6, 4
OBJECT_BYTES = 8192


class Watched:
    """A pidfd of a process that has ended tells so until it is closed."""

    ended = True
    closed = False

    def close(self) -> None:
        self.closed = True


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(departures, "OBJECTS_AT_ONCE", 2 * OBJECTS)


def busy(rig: Rig, **options: object) -> tuple[Client, list[int]]:
    """An engine with reservations and loads."""
    client = rig.attach("busy", 10, **options)  # type: ignore[arg-type]
    client.store(path("loaded", OBJECTS))
    for _ in range(LEASES // 2):
        assert client.acquire(path("loaded", OBJECTS))[1].outcome is AcquireOutcome.GRANTED
    return client, [client.reserve(path(f"written {number}", OBJECTS))[0] for number in range(LEASES)]


def lent(rig: Rig) -> int:
    return rig.depot.status().tier.lent_bytes


def slices(rig: Rig) -> int:
    count = 0
    while rig.depot.trim():
        count += 1
        audit(rig.depot)
    return count


def test_what_a_dead_engine_was_lent_returns_in_slices_and_its_session_goes_with_the_last() -> None:
    rig = Rig(data_pages=256)
    client, _ = busy(rig)
    watched = Watched()
    rig.depot.watch(client.attachment, watched)
    other = rig.attach("other", 20)
    rig.depot.process_dead(client.attachment)
    assert watched.closed, "it would go on telling"
    assert 0 < lent(rig) < (LEASES + 1) * OBJECTS * OBJECT_BYTES
    with pytest.raises(UnknownSession):
        client.locate(path("loaded", OBJECTS))
    other.store(path("meanwhile", OBJECTS))
    assert len(rig.depot.attachments()) == 2
    assert slices(rig) >= 1
    assert lent(rig) == 0 and len(rig.depot.attachments()) == 1
    assert other.reserve(path("written 0", OBJECTS))[1].outcomes == bytes([ReserveOutcome.GRANTED] * OBJECTS)
    audit(rig.depot)


@pytest.mark.requirement("I4")
def test_engines_that_end_at_once_share_a_slice() -> None:
    """Else a host that kills all engines holds the loop for as many slices as there are of them."""
    rig = Rig(data_pages=512)
    clients = [rig.attach(f"e{number}", 10 + number) for number in range(4)]
    for number, client in enumerate(clients):
        for lease in range(2):
            client.reserve(path((number, lease), OBJECTS))
    for client in clients:
        rig.depot.process_dead(client.attachment)
    assert lent(rig) == 6 * OBJECTS * OBJECT_BYTES
    assert slices(rig) >= 2
    assert lent(rig) == 0 and rig.depot.attachments() == ()


@pytest.mark.requirement("I4")
def test_leases_over_their_deadline_end_in_slices_between_two_ticks() -> None:
    rig = Rig(data_pages=512, lease_deadline_seconds=10.0)
    client = rig.attach()
    for number in range(6):
        client.reserve(path(number, OBJECTS))
    rig.now += 11.0
    assert rig.depot.tick() and rig.counter("expired_leases.write") == 2
    assert slices(rig) == 1 and rig.counter("expired_leases.write") == 6, "two in the tick, two in each slice"


def test_its_death_reported_twice_changes_nothing() -> None:
    rig = Rig(data_pages=256)
    client, _ = busy(rig)
    for _ in range(3):
        rig.depot.process_dead(client.attachment)
    slices(rig)
    rig.depot.process_dead(client.attachment)
    assert lent(rig) == 0 and rig.depot.attachments() == ()
    audit(rig.depot)


def test_an_engine_of_the_same_name_starts_while_the_dead_one_leaves() -> None:
    rig = Rig(data_pages=256)
    client, _ = busy(rig)
    rig.depot.process_dead(client.attachment)
    again = rig.attach("busy", 11)
    again.store(path("new", OBJECTS))
    slices(rig)
    assert again.locate(path("new", OBJECTS)).boundary_tokens and lent(rig) == 0
    assert [info.process.pid for info in rig.depot.attachments()] == [11]
    audit(rig.depot)


def test_a_process_that_comes_back_while_its_session_ends_finds_all_leases_expired() -> None:
    rig = Rig(data_pages=256, grace_seconds=60.0)
    client, written = busy(rig)
    rig.depot.disconnected(client.attachment)
    rig.now += 61
    rig.depot.tick()
    assert rig.counter("expired_leases.write") < LEASES, "the test lost its teeth"
    again = rig.attach("busy", 10)
    assert again.attachment == client.attachment
    for lease in written:
        assert set(again.commit(lease, *range(OBJECTS))) == {CommitOutcome.EXPIRED}
    assert again.locate(path("loaded", OBJECTS)).boundary_tokens, "its namespace is registered"
    slices(rig)
    assert again.locate(path("loaded", OBJECTS)).boundary_tokens
    audit(rig.depot)


def test_a_process_that_dies_while_its_session_ends_leaves_nothing() -> None:
    rig = Rig(data_pages=256, grace_seconds=60.0)
    client, _ = busy(rig)
    rig.depot.disconnected(client.attachment)
    rig.now += 61
    rig.depot.tick()
    rig.depot.process_dead(client.attachment)
    slices(rig)
    assert lent(rig) == 0 and rig.depot.attachments() == ()
    assert [namespace.sessions for namespace in rig.depot._tree.namespaces.by_slot.values()] == [0]
    audit(rig.depot)


def test_a_daemon_that_ends_while_a_dead_engine_leaves_gives_back_the_rest_at_its_next_start() -> None:
    rig = Rig(data_pages=256)
    client, _ = busy(rig)
    rig.depot.process_dead(client.attachment)
    rig.dead.add(10)
    rig.crash()
    assert lent(rig) == 0 and rig.depot.attachments() == ()
    audit(rig.depot)


@pytest.mark.parametrize("end", [Rig.crash, None])
def test_leases_over_their_deadline_end_tick_by_tick(end: Callable[[Rig], object] | None) -> None:
    rig = Rig(data_pages=256, lease_deadline_seconds=10.0)
    client, written = busy(rig)
    rig.now += 11
    rig.depot.tick()
    assert 0 < rig.counter("expired_leases.write") < LEASES
    if end is not None:
        end(rig)
        return
    for _ in range(LEASES):
        rig.depot.tick()
    assert rig.counter("expired_leases.write") == LEASES
    assert set(client.commit(written[-1], 0)) == {CommitOutcome.EXPIRED}
    audit(rig.depot)


@pytest.mark.requirement("I6")
@pytest.mark.parametrize("dies", [True, False])
def test_a_session_that_makes_room_between_two_slices_takes_no_slot_of_the_one_behind_it(
    monkeypatch: pytest.MonkeyPatch, *, dies: bool
) -> None:
    monkeypatch.setattr(departures, "OBJECTS_AT_ONCE", OBJECTS)
    rig = Rig(grace_seconds=60.0)
    client = rig.attach("leaves", 10)
    lease, _ = client.reserve(path("p", OBJECTS))
    rig.depot.disconnected(client.attachment)
    if dies:
        rig.depot.process_dead(client.attachment)
    else:
        rig.now += 61
        rig.depot._departures.tick()
        rig.depot._departures.drop(rig.depot._sessions.by_slot[0].leases[lease])
    assert len(rig.depot._departures._leaving) == 1 and not lent(rig), "the test lost its teeth"
    monkeypatch.setattr(sessions_module, "SESSIONS_MAX", 2)
    next_one = rig.attach("next", 11)
    next_one.store(path("p", OBJECTS))
    rig.depot.tick()
    assert slices(rig) == 0
    assert [info.process.pid for info in rig.depot.attachments()] == [11]
    assert len(rig.depot.status().sessions) == 1
    assert rig.attach("third", 12).session != next_one.session
    assert len(rig.depot.status().sessions) == 2
    assert next_one.acquire(path("p", OBJECTS))[1].outcome is AcquireOutcome.GRANTED
    audit(rig.depot)


@pytest.mark.requirement("I6")
def test_a_dead_engine_whose_lease_cannot_be_ended_keeps_its_slot_until_it_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig(data_pages=256)
    client, _ = busy(rig)
    with monkeypatch.context() as broken:
        broken.setattr(rig.depot._stores, "drop", lambda _: 1 / 0)
        rig.depot.process_dead(client.attachment)
        slices(rig)
        assert lent(rig) == LEASES * OBJECTS * OBJECT_BYTES
        assert [info.process.pid for info in rig.depot.attachments()] == [10]
        other = rig.attach("other", 20)
    rig.depot.tick()
    slices(rig)
    assert lent(rig) == 0
    assert [info.attachment for info in rig.depot.attachments()] == [other.attachment]
    assert rig.counter("internal_errors.tick") == LEASES
    audit(rig.depot)


def test_a_dead_engine_whose_requests_cannot_be_ended_goes_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(data_pages=256)
    client, _ = busy(rig)
    monkeypatch.setattr(rig.depot._requests, "end_session", lambda _: 1 / 0)
    rig.depot.process_dead(client.attachment)
    slices(rig)
    assert lent(rig) == 0 and rig.depot.attachments() == ()
    audit(rig.depot)


def test_a_rank_that_comes_back_without_its_scheduler_waits_for_no_slices() -> None:
    """It comes at once, and nobody may come back to that session."""
    rig = Rig(data_pages=256)
    client, _ = busy(rig)
    rank = rig.depot.attach(process(11), Membership("busy", scheduler=False, rank=0, world_size=1), client=process(10))
    assert rig.depot.process_dead(client.attachment) == (rank.attachment,)
    rig.depot.disconnected(rank.attachment)
    expired = rig.counter("expired_leases.write")
    again = rig.depot.attach(process(11), Membership("busy", scheduler=True, rank=0, world_size=1))
    assert rig.counter("expired_leases.write") == expired < LEASES
    assert again.attachment != rank.attachment
    slices(rig)
    assert rig.counter("expired_leases.write") == LEASES
    audit(rig.depot)
