"""Attachments, deaths, re-attachment, namespaces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from kvdepot.core.arena import NAMESPACES_MAX
from kvdepot.core.calls import (
    ROOT_KEY,
    AbandonCall,
    AcquireCall,
    CommitCall,
    CommitItem,
    CommitOutcome,
    DeclareCall,
    EndRequestCall,
    Kind,
    LocateCall,
    ReleaseCall,
    ReserveCall,
    ReserveOutcome,
)
from kvdepot.core.errors import (
    EngineIdInUse,
    InvalidArgument,
    LimitExceeded,
    NamespaceRefused,
    NotScheduler,
    UnknownSession,
)
from kvdepot.server.depot.types import Membership, ProcessIdentity

from tests.rigs.engine_rig import BOOT, CHUNK, DENSE, Client, Rig, audit, path, process


def test_a_process_joins_its_own_attachment() -> None:
    rig = Rig()
    scheduler = rig.depot.attach(process(10), Membership("e", scheduler=True, rank=-1, world_size=1))
    worker = rig.depot.attach(process(10), Membership("e", scheduler=False, rank=0, world_size=1))
    assert worker == scheduler
    (status,) = rig.depot.status().sessions
    assert (status.ranks_attached, status.scheduler_attached, status.pids) == (1, True, (10,))
    (info,) = rig.depot.attachments()
    assert (info.connections, info.rank) == (2, 0)


def test_several_ranks_of_one_process_have_attachments_of_their_own() -> None:
    rig = Rig()
    slots = {
        rig.depot.attach(process(10), Membership("e", scheduler=False, rank=r, world_size=3)).attachment
        for r in range(3)
    }
    assert len(slots) == 3
    assert rig.depot.status().sessions[0].ranks_attached == 3


def test_a_second_living_process_in_the_same_place_is_refused_by_name() -> None:
    rig = Rig()
    rig.depot.attach(process(10), Membership("e", scheduler=True, rank=0, world_size=2))
    with pytest.raises(EngineIdInUse, match="process 10 is already the scheduler"):
        rig.depot.attach(process(11), Membership("e", scheduler=True, rank=1, world_size=2))
    with pytest.raises(EngineIdInUse, match="process 10 is already rank 0"):
        rig.depot.attach(process(11), Membership("e", scheduler=False, rank=0, world_size=2))
    with pytest.raises(EngineIdInUse, match="2 workers"):
        rig.depot.attach(process(11), Membership("e", scheduler=False, rank=1, world_size=4))
    assert len(rig.depot.attachments()) == 1


@pytest.mark.parametrize(
    ("engine_id", "scheduler", "rank", "world_size", "error"),
    [
        ("", True, 0, 1, InvalidArgument),
        ("e" * 257, True, 0, 1, LimitExceeded),
        ("e", True, 0, 0, InvalidArgument),
        ("e", True, 0, 65, LimitExceeded),
        ("e", True, 1, 1, InvalidArgument),
        ("e", True, -2, 1, InvalidArgument),
        ("e", False, -1, 1, InvalidArgument),
    ],
)
def test_impossible_attachments_are_refused(
    engine_id: str, scheduler: bool, rank: int, world_size: int, error: type[Exception]
) -> None:
    rig = Rig()
    with pytest.raises(error):
        rig.depot.attach(process(10), Membership(engine_id, scheduler=scheduler, rank=rank, world_size=world_size))
    assert rig.depot.status().sessions == ()


@pytest.mark.requirement("T7")
def test_the_death_of_all_processes_returns_everything() -> None:
    rig = Rig()
    client = rig.attach()
    other = rig.attach("other", 11)
    keys = path("p", 2)
    client.store(keys)
    client.acquire(keys)
    client.reserve(path("q", 2))
    assert rig.depot.process_dead(client.attachment) == ()
    status = rig.depot.status()
    assert (status.tier.lent_bytes, status.tier.used_bytes, len(status.sessions)) == (0, 2 * 8192, 1)
    with pytest.raises(UnknownSession):
        client.locate(keys)
    assert other.locate(keys).boundary_tokens == 2 * CHUNK
    audit(rig.depot)


@pytest.mark.requirement("I1a")
def test_extents_stay_lent_while_one_rank_may_live() -> None:
    rig = Rig()
    scheduler = rig.depot.attach(process(10), Membership("e", scheduler=True, rank=-1, world_size=2))
    ranks = [rig.depot.attach(process(11 + r), Membership("e", scheduler=False, rank=r, world_size=2)) for r in (0, 1)]
    client = Client(rig, scheduler, DENSE)
    keys = path("p", 2)
    client.reserve(keys)
    to_close = rig.depot.process_dead(scheduler.attachment)
    assert set(to_close) == {rank.attachment for rank in ranks}
    assert rig.depot.status().tier.lent_bytes == 2 * 8192
    # The next engine of the same name works beside it and may store the same chunks.
    after = rig.attach("e", 20)
    assert after.reserve(keys)[1].outcomes == bytes([ReserveOutcome.GRANTED] * 2)
    rig.depot.process_dead(ranks[0].attachment)
    assert rig.depot.status().tier.lent_bytes == 4 * 8192
    rig.depot.process_dead(ranks[1].attachment)
    assert rig.depot.status().tier.lent_bytes == 2 * 8192
    audit(rig.depot)


def test_grace_ends_service_and_the_same_process_comes_back_to_its_leases() -> None:
    rig = Rig(grace_seconds=60.0)
    client = rig.attach()
    lease, _ = client.reserve(path("p", 1))
    rig.depot.disconnected(client.attachment)
    rig.now += 59
    rig.depot.tick()
    client.locate(path("p", 1))
    rig.now += 2
    rig.depot.tick()
    with pytest.raises(UnknownSession):
        client.locate(path("p", 1))
    assert rig.depot.status().tier.lent_bytes == 8192
    again = rig.attach()
    assert again.attachment == client.attachment
    assert again.session != client.session
    declared = rig.depot.declare(DeclareCall(again.session, (lease, 12345)))
    assert declared.lost == (12345,)
    assert again.commit(lease, 0) == bytes([CommitOutcome.EXPIRED])
    assert rig.depot.status().tier.used_bytes == 0
    audit(rig.depot)


def test_another_process_takes_the_name_of_an_unreachable_engine_only_after_grace() -> None:
    rig = Rig(grace_seconds=60.0)
    client = rig.attach()
    client.reserve(path("p", 1))
    rig.depot.disconnected(client.attachment)
    with pytest.raises(EngineIdInUse):
        rig.attach(pid=20)
    rig.now += 61
    rig.attach(pid=20)
    assert len(rig.depot.status().sessions) == 2
    assert rig.depot.status().tier.lent_bytes == 8192  # its death is not proven
    audit(rig.depot)


def test_processes_without_a_visible_pid_are_never_taken_for_each_other() -> None:
    rig = Rig()
    hidden = ProcessIdentity(0, 0, BOOT)
    rig.depot.attach(hidden, Membership("e", scheduler=True, rank=0, world_size=1))
    with pytest.raises(EngineIdInUse):
        rig.depot.attach(hidden, Membership("e", scheduler=True, rank=0, world_size=1))


def test_declare_frees_what_is_not_declared_and_names_what_is_lost() -> None:
    rig = Rig()
    client = rig.attach()
    keys = path("p", 2)
    client.store(keys)
    kept, _ = client.acquire(keys)
    dropped, _ = client.acquire(keys)
    store, _ = client.reserve(path("q", 1))
    reply = rig.depot.declare(DeclareCall(client.session, (kept, 999)))
    assert (reply.lost, reply.ranks_attached) == ((999,), 1)
    (status,) = rig.depot.status().sessions
    assert (status.leases, status.credit_used_bytes) == (1, 0)
    assert client.commit(store, 0) == bytes([CommitOutcome.LOST])
    client.release(dropped, kept)
    assert rig.depot.status().tier.lent_bytes == 0
    audit(rig.depot)


def test_a_spec_that_lies_about_sizes_is_refused_with_numbers() -> None:
    rig = Rig()
    client = rig.attach()
    lie = replace(DENSE, object_bytes={Kind.ATTENTION: 8191})
    with pytest.raises(NamespaceRefused, match=r"8191.*8192"):
        rig.depot.register_namespace(client.session, lie)
    assert rig.depot.status().namespaces[0].label == DENSE.label


@pytest.mark.requirement("I1d")
def test_another_epoch_is_another_namespace() -> None:
    rig = Rig()
    client = rig.attach()
    keys = path("p", 2)
    client.store(keys)
    client.namespace, _ = rig.depot.register_namespace(client.session, replace(DENSE, epoch="2"))
    assert client.locate(keys).boundary_tokens == 0
    assert len(rig.depot.status().namespaces) == 2


@pytest.mark.requirement("I4")
def test_a_full_namespace_table_gives_up_the_least_recently_used_idle_one() -> None:
    rig = Rig()
    keys = path("p", 1)
    for number in range(NAMESPACES_MAX + 3):
        client = rig.attach(f"e{number}", 100 + number, replace(DENSE, label=f"n{number}"))
        if number < 2:
            client.store(keys)
        if number != 1:
            rig.depot.process_dead(client.attachment)
        rig.now += 1
    labels = {namespace.label for namespace in rig.depot.status().namespaces}
    assert len(labels) == NAMESPACES_MAX
    # n1 is in use; n0 has contents, empty ones go before it.
    assert {"n0", "n1"} <= labels
    assert "n2" not in labels
    audit(rig.depot)


def test_ranks_may_attach_before_the_scheduler() -> None:
    rig = Rig()
    rig.depot.attach(process(11), Membership("e", scheduler=False, rank=0, world_size=1))
    assert not rig.depot.status().sessions[0].scheduler_attached
    rig.depot.attach(process(10), Membership("e", scheduler=True, rank=-1, world_size=1))
    assert rig.depot.status().sessions[0].scheduler_attached


@pytest.mark.requirement("S2")
def test_each_attachment_has_a_token_of_its_own_and_only_the_schedulers_makes_calls() -> None:
    rig = Rig()
    scheduler = rig.depot.attach(process(10), Membership("e", scheduler=True, rank=-1, world_size=2))
    first = rig.depot.attach(process(11), Membership("e", scheduler=False, rank=0, world_size=2))
    second = rig.depot.attach(process(12), Membership("e", scheduler=False, rank=1, world_size=2))
    assert len({scheduler.session, first.session, second.session}) == 3
    client = Client(rig, scheduler, DENSE)
    keys = path("p", 2)
    client.store(keys)
    lease, _ = client.reserve(path("q", 1))
    read, _ = client.acquire(keys)
    token, namespace = first.session, client.namespace
    items = (CommitItem(lease, b""),)
    calls: list[Callable[[], object]] = [
        lambda: rig.depot.register_namespace(token, DENSE),
        lambda: rig.depot.locate(LocateCall(token, namespace, b"".join(keys), 1 << 30), print),
        lambda: rig.depot.acquire(AcquireCall(token, 77, namespace, keys[0], b"\x01"), print),
        lambda: rig.depot.reserve(ReserveCall(token, 78, namespace, keys[0], ROOT_KEY, b"\x01", b"\0\1\0\0")),
        lambda: rig.depot.release(ReleaseCall(token, (read,))),
        lambda: rig.depot.commit(CommitCall(token, items)),
        lambda: rig.depot.abandon(AbandonCall(token, items)),
        lambda: rig.depot.declare(DeclareCall(token, ())),
        lambda: next(rig.depot.drop_undeclared(DeclareCall(token, ()))),
        lambda: rig.depot.end_request(EndRequestCall(token, "r")),
    ]
    before = rig.depot.status()
    for call in calls:
        with pytest.raises(NotScheduler, match="rank 0"):
            call()
    assert rig.depot.status().sessions == before.sessions
    assert client.commit(lease, 0) == bytes([CommitOutcome.COMMITTED])
    audit(rig.depot)


def test_a_process_that_is_scheduler_and_rank_has_one_token_for_both() -> None:
    """Over two connections, in either order: the process that holds the leases may end them."""
    rig = Rig()
    rank = rig.depot.attach(process(10), Membership("e", scheduler=False, rank=0, world_size=1))
    with pytest.raises(NotScheduler):
        rig.depot.declare(DeclareCall(rank.session, ()))
    scheduler = rig.depot.attach(process(10), Membership("e", scheduler=True, rank=-1, world_size=1))
    assert rank.session == scheduler.session
    assert rig.depot.declare(DeclareCall(scheduler.session, ())).ranks_attached == 1


def test_a_token_ends_with_its_attachment() -> None:
    rig = Rig()
    rig.depot.attach(process(10), Membership("e", scheduler=True, rank=-1, world_size=1))
    rank = rig.depot.attach(process(11), Membership("e", scheduler=False, rank=0, world_size=1))
    rig.depot.process_dead(rank.attachment)
    with pytest.raises(UnknownSession):
        rig.depot.declare(DeclareCall(rank.session, ()))
    audit(rig.depot)
