"""Sessions that end while their processes live: what goes, what stays, and how much of it one process can leave."""

from __future__ import annotations

import pytest
from kvdepot.core.calls import AcquireOutcome, ReserveOutcome
from kvdepot.core.errors import LimitExceeded, NoRoom, UnknownSession
from kvdepot.server.depot.sessions import sessions as sessions_module
from kvdepot.server.depot.sessions.sessions import LENT_SESSIONS_MAX
from kvdepot.server.depot.stores.store import Stores
from kvdepot.server.depot.types import Membership

from tests.fakes.raising import Faults, Point
from tests.rigs.engine_rig import Client, Rig, audit, path, process

OBJECT = 8192
GRANTED = ReserveOutcome.GRANTED


def leave(rig: Rig, client: Client, seconds: float = 61.0) -> None:
    """Its connection ends, its process lives."""
    rig.depot.disconnected(client.attachment)
    rig.now += seconds
    rig.depot.tick()


@pytest.mark.requirement("I5")
def test_an_ended_session_that_is_lent_nothing_goes_while_its_process_lives() -> None:
    rig = Rig(grace_seconds=60.0)
    client = rig.attach()
    keys = path("p", 2)
    client.store(keys)
    client.release(client.acquire(keys)[0])
    leave(rig, client, 59.0)
    assert len(rig.depot.attachments()) == 1, "within grace it may come back to it"
    rig.now += 2
    rig.depot.tick()
    assert rig.depot.attachments() == ()
    assert rig.depot.status().sessions == ()
    with pytest.raises(UnknownSession):
        client.locate(keys)
    assert rig.attach().locate(keys).boundary_tokens
    audit(rig.depot)


@pytest.mark.requirement("I6")
def test_an_ended_session_stays_with_its_loans_and_goes_with_the_last_of_them() -> None:
    rig = Rig(grace_seconds=60.0)
    client = rig.attach()
    lease, _ = client.reserve(path("p", 1))
    leave(rig, client)
    assert rig.depot.status().tier.lent_bytes == OBJECT
    again = rig.attach()
    assert again.attachment == client.attachment
    again.abandon(lease)
    leave(rig, again)
    assert rig.depot.attachments() == ()
    assert rig.depot.status().tier.lent_bytes == 0


@pytest.mark.requirement("I5")
def test_adopted_sessions_that_are_lent_nothing_go_after_grace_too() -> None:
    rig = Rig(grace_seconds=60.0)
    for number in range(3):
        rig.attach(f"e{number}", pid=10)
    rig.crash()
    assert len(rig.depot.attachments()) == 3
    rig.now += 61
    rig.depot.tick()
    assert rig.depot.attachments() == ()


@pytest.mark.requirement("I4")
def test_a_process_that_makes_engine_after_engine_takes_no_slot_from_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sessions_module, "SESSIONS_MAX", 40)
    rig = Rig(grace_seconds=60.0)
    stays = rig.attach("stays", pid=11)
    lends = rig.attach("lends", pid=12)
    lends.reserve(path("p", 1))
    rig.depot.disconnected(lends.attachment)
    for number in range(200):  # within grace
        rig.depot.disconnected(rig.attach(f"e{number}", pid=10).attachment)
        rig.now += 0.01
    assert len(rig.depot.status().sessions) < 40
    stays.locate(path("p", 1))
    assert rig.attach("lends", pid=12).session == lends.session, "what is lent something stays"
    recent = rig.depot.attach(process(10), Membership("e199", scheduler=True, rank=0, world_size=1))
    assert recent.attachment in {info.attachment for info in rig.depot.attachments() if info.connections}
    audit(rig.depot)


@pytest.mark.requirement("I4")
def test_full_tables_are_said_with_what_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions_module, "SESSIONS_MAX", 2)
    rig = Rig()
    for number in range(2):
        rig.attach(f"e{number}", pid=10 + number)
    with pytest.raises(NoRoom, match="all 2 sessions are in use") as refused:
        rig.attach("e2", pid=12)
    assert "end engines that are not needed" in str(refused.value)
    assert "capacity" not in str(refused.value)


@pytest.mark.requirement("I4")
def test_one_process_is_lent_extents_by_so_many_sessions_at_most() -> None:
    rig = Rig(data_pages=256, grace_seconds=60.0)
    for number in range(LENT_SESSIONS_MAX):
        client = rig.attach(f"e{number}", pid=10)
        assert client.reserve(path(number, 1))[1].outcomes == bytes([GRANTED])
        leave(rig, client)
    with pytest.raises(LimitExceeded, match="sessions of one process that are lent extents") as refused:
        rig.attach("one-more", pid=10)
    assert "end the process" in str(refused.value)
    assert len(rig.depot.status().sessions) == LENT_SESSIONS_MAX
    assert rig.attach("e0", pid=10).session, "it may come back to each of them"
    assert rig.attach("other", pid=11).reserve(path("other", 1))[1].outcomes == bytes([GRANTED])
    audit(rig.depot)


@pytest.mark.requirement("I4")
def test_sessions_that_were_open_before_are_lent_no_more_than_so_many_either() -> None:
    rig = Rig(data_pages=256)
    clients = [rig.attach(f"e{number}", pid=10) for number in range(LENT_SESSIONS_MAX + 1)]
    keys = path("p", 1)
    clients[0].store(keys)
    for number, client in enumerate(clients[:-1]):
        assert client.reserve(path(number, 1))[1].outcomes == bytes([GRANTED])
    refused = clients[-1].reserve(path("last", 1))[1]
    assert refused.outcomes == bytes([ReserveOutcome.REFUSED])
    assert f"{LENT_SESSIONS_MAX} other sessions" in refused.reason
    _, reply = clients[-1].acquire(keys)
    assert (reply.outcome, reply.reason) == (AcquireOutcome.REFUSED, refused.reason)
    assert clients[0].acquire(keys)[1].outcome is AcquireOutcome.GRANTED
    audit(rig.depot)


@pytest.mark.requirement("I4")
def test_what_a_process_has_left_counts_against_its_next_engines() -> None:
    """Else a process could have all of RAM pinned by engines that are gone."""
    rig = Rig(data_pages=256, credit_bytes=4 * OBJECT, loads_in_flight=2, grace_seconds=60.0)
    former = rig.attach("former", pid=10)
    keys = path("p", 3)
    former.store(keys)
    lease, _ = former.reserve(path("left", 3))
    former.acquire(keys)
    rig.depot.disconnected(former.attachment)
    client = rig.attach("next", pid=10)
    assert client.reserve(path("q", 2))[1].outcomes == bytes([GRANTED, ReserveOutcome.LATER])
    assert client.acquire(keys)[1].outcome is AcquireOutcome.GRANTED
    assert client.acquire(keys)[1].outcome is AcquireOutcome.LATER
    other = rig.attach("other", pid=11)
    assert set(other.reserve(path("r", 4))[1].outcomes) == {GRANTED}
    back = rig.attach("former", pid=10)  # what is lent to an engine that is there counts for it alone
    assert set(client.reserve(path("s", 3))[1].outcomes) == {GRANTED}
    back.abandon(lease)
    rig.depot.disconnected(back.attachment)
    audit(rig.depot)


def test_the_oldest_idle_session_goes_when_one_slot_too_many_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions_module, "SESSIONS_MAX", sessions_module._FREE_SLOTS + 4)
    rig = Rig(grace_seconds=60.0)
    for number in range(4):
        rig.depot.disconnected(rig.attach(f"e{number}", pid=10 + number).attachment)
        rig.now += 1
    rig.attach("e4", pid=14)
    assert len(rig.depot.status().sessions) == 5, "so many slots stay free"
    rig.attach("e5", pid=15)
    assert {pid for session in rig.depot.status().sessions for pid in session.pids} == {11, 12, 13, 14, 15}
    audit(rig.depot)


def test_a_session_leaves_its_namespaces_once_although_the_end_of_a_lease_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig()
    client, other = rig.attach(), rig.attach("other", 11)
    client.reserve(path("p", 1))
    faults = Faults(Point("drop", 1, after=False))
    faults.armed = True
    monkeypatch.setattr(Stores, "drop", faults.of("drop", Stores.drop))
    rig.depot.process_dead(client.attachment)
    assert rig.depot.status().tier.lent_bytes == OBJECT
    audit(rig.depot)
    rig.depot.tick()
    assert rig.depot.status().tier.lent_bytes == 0
    assert len(rig.depot.status().sessions) == 1
    assert other.reserve(path("p", 1))[1].outcomes == bytes([GRANTED])
    audit(rig.depot)
