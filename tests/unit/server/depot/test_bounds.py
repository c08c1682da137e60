"""What clients may ask for again and again without filling a table, hanging the engine or costing it its memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kvdepot.core import limits
from kvdepot.core.calls import AcquireOutcome, CommitOutcome, DeclareCall, Kind, ReserveOutcome
from kvdepot.core.errors import LimitExceeded, NoRoom
from kvdepot.core.planner import GroupSpec
from kvdepot.server.depot import depot as engine_module
from kvdepot.server.depot.sessions import sessions as sessions_module
from kvdepot.server.depot.sessions import shares as shares_module
from kvdepot.server.depot.stores import store as store_module
from kvdepot.server.depot.tiering import tiering as tiering_module
from kvdepot.server.depot.tree import namespaces as namespaces_module
from kvdepot.server.depot.tree import tree as tree_module
from kvdepot.server.depot.types import Membership, Owner, ProcessIdentity

from tests.fakes.memory_tier import Medium
from tests.rigs.engine_rig import BOOT, CHUNK, DENSE, HYBRID, Client, Rig, audit, path, process, spec_of
from tests.rigs.seeds import drawn
from tests.rigs.tier_rig import COMMIT, in_tier, reboot, store


@pytest.mark.requirement("I4")
@pytest.mark.parametrize("seed", drawn(range(4)))
def test_a_namespace_of_whole_paths_is_dropped_from_the_leaves_up(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """In slices; and freed nodes are no roots, although the last of the free list has no link."""
    monkeypatch.setattr(namespaces_module, "NAMESPACES_MAX", 2)
    monkeypatch.setattr(engine_module, "_NAMESPACE_EVICTIONS_MAX", 5)
    rig = Rig(seed=seed)
    leaving = rig.attach("leaving", pid=11, spec=replace(DENSE, epoch="old"))
    leaving.store(path("p", 8))
    rig.depot.process_dead(leaving.attachment)
    staying = rig.attach("staying", pid=12)
    with pytest.raises(NoRoom):
        rig.depot.register_namespace(staying.session, replace(DENSE, epoch="new"))
    assert rig.depot.status().tier.objects == 3
    audit(rig.depot)
    rig.depot.register_namespace(staying.session, replace(DENSE, epoch="new"))
    assert rig.depot.status().tier.objects == 0
    audit(rig.depot)


@pytest.mark.requirement("I4")
def test_a_namespace_that_a_tier_found_and_an_engine_registered_gives_its_slot_up_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(namespaces_module, "NAMESPACES_MAX", 2)
    rig = Rig(tier=COMMIT)
    store(rig.attach(), path("p", 2))
    rig.tier.run()
    reboot(rig)
    assert in_tier(rig) == 2
    leaving = rig.attach()
    staying = rig.attach("staying", pid=12, spec=replace(DENSE, epoch="other"))
    rig.depot.process_dead(leaving.attachment)
    rig.depot.register_namespace(staying.session, replace(DENSE, epoch="new"))
    assert in_tier(rig) == 0
    audit(rig.depot)


@pytest.mark.requirement("I4")
def test_a_refused_attachment_leaves_no_session_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions_module, "ATTACHMENTS_MAX", 1)
    rig = Rig()
    rig.attach("first", pid=1)
    for number in range(3):
        with pytest.raises(NoRoom, match="attachments"):
            rig.depot.attach(process(2), Membership(f"e{number}", scheduler=True, rank=0, world_size=1))
    assert len(rig.depot.status().sessions) == 1


@pytest.mark.requirement("I4")
def test_sessions_of_invisible_processes_end_with_their_loans() -> None:
    """Their death is never proven, and they are not recognised when they return: only a loan keeps the slots."""
    rig = Rig(grace_seconds=60.0)
    hidden = ProcessIdentity(0, 0, BOOT)
    lenders = Client(rig, rig.depot.attach(hidden, Membership("lent", scheduler=True, rank=0, world_size=1)), DENSE)
    lenders.reserve(path("p", 1))
    idle = rig.depot.attach(hidden, Membership("idle", scheduler=True, rank=0, world_size=1))
    rig.depot.tick()
    assert len(rig.depot.attachments()) == 2
    for attachment in (lenders.attachment, idle.attachment):
        rig.depot.disconnected(attachment)
    rig.now += 61
    rig.depot.tick()
    assert [info.attachment for info in rig.depot.attachments()] == [lenders.attachment]
    assert rig.depot.status().tier.lent_bytes == 8192
    audit(rig.depot)


@pytest.mark.requirement("I6")
def test_after_a_restart_a_process_finds_its_own_session_beside_an_orphaned_one() -> None:
    """Else its leases would be lost and its extents stay lent for as long as it lives."""
    rig = Rig()
    for pid, scheduler, rank in ((2, False, 0), (1, True, -1)):
        attached = rig.depot.attach(process(pid), Membership("e", scheduler=scheduler, rank=rank, world_size=1))
    orphaned = Client(rig, attached, DENSE)
    orphaned.reserve(path("orphaned", 1))
    rig.depot.process_dead(attached.attachment)
    client = rig.attach("e", pid=3)
    lease, _ = client.reserve(path("p", 1))
    rig.dead.add(1)
    rig.crash()
    client = rig.attach("e", pid=3)
    assert rig.depot.declare(DeclareCall(client.session, (lease,))).lost == ()
    assert client.commit(lease, 0) == bytes([CommitOutcome.COMMITTED])
    audit(rig.depot)


def test_what_the_worker_has_already_is_not_searched_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep of the whole table at each commit would block the loop for milliseconds in a large arena."""
    rig = Rig()
    client = rig.attach()
    client.store(path("p", 3))
    assert [rig.depot.next_to_sum() is None for _ in range(4)] == [False, False, False, True]
    monkeypatch.setattr(rig.depot._checksums, "_sweep", lambda: pytest.fail("swept"))
    assert rig.depot.next_to_sum() is None
    monkeypatch.undo()
    client.store(path("q", 1))
    assert rig.depot.next_to_sum() is not None


@pytest.mark.requirement("I8")
def test_at_a_stop_first_sums_come_before_verification() -> None:
    """What is adopted keeps the sum it has; what has none would be dropped by the next daemon."""
    rig = Rig()
    rig.attach().store(path("p", 3))
    rig.sum_all()
    rig.crash()
    client = rig.attach()
    client.store(path("q", 2))
    job = rig.depot.next_to_sum()
    assert job is not None
    assert job.verify
    rig.depot.finish_sums()
    client.locate(path("p", 3))  # asks for verification, in vain
    assert rig.depot.unsummed == 2
    assert rig.sum_all() == 2
    assert rig.depot.unsummed == 0
    assert rig.depot.status().tier.unverified_objects == 3
    audit(rig.depot)


@pytest.mark.requirement("I1d")
def test_an_engine_may_change_its_weights_as_often_as_it_likes() -> None:
    rig = Rig()
    client = rig.attach()
    for epoch in range(limits.NAMESPACES_PER_SESSION_MAX + 3):
        client.namespace, _ = rig.depot.register_namespace(client.session, replace(DENSE, epoch=str(epoch)))
        client.store(path("p", 1))
    idle = [namespace for namespace in rig.depot._tree.namespaces.by_slot.values() if not namespace.sessions]
    assert len(idle) == 4  # and may give up their slots; the first one is the rig's own
    audit(rig.depot)


@pytest.mark.requirement("I4")
def test_specs_are_bounded_and_those_of_idle_namespaces_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces_module, "SPECS_BYTES_MAX", 5_000)
    rig = Rig()
    leaving = rig.attach("leaving", pid=1, spec=replace(DENSE, identity={"model": "a" * 3_000}))
    leaving.store(path("p", 2))
    rig.sum_all()
    rig.depot.process_dead(leaving.attachment)
    using = rig.attach("using", pid=2, spec=replace(DENSE, identity={"model": "b" * 3_000}))
    specs = {namespace.id: namespace.spec for namespace in rig.depot._tree.namespaces.by_slot.values()}
    assert specs == {leaving.namespace: None, using.namespace: using.spec}
    with pytest.raises(NoRoom, match="specs"):
        rig.attach("third", pid=3, spec=leaving.spec)
    rig.depot.process_dead(using.attachment)
    again = rig.attach("fourth", pid=4, spec=leaving.spec)
    assert again.locate(path("p", 2)).boundary_tokens == 2 * CHUNK
    audit(rig.depot)


@pytest.mark.requirement("S4", "I4")
def test_a_users_specs_are_bounded_by_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own idle ones go first, and those of others stay."""
    monkeypatch.setattr(shares_module, "USER", replace(shares_module.USER, spec_bytes=5_000))
    rig = Rig()

    def register(name: str, uid: int) -> Client:
        attached = rig.depot.attach(
            process(ord(name)), Membership(name, scheduler=True, rank=0, world_size=1, owner=Owner(uid))
        )  # fmt: skip
        return Client(rig, attached, replace(DENSE, identity={"model": name * 3_000}))

    others = register("a", 1)
    rig.depot.process_dead(others.attachment)
    leaving = register("b", 2)
    rig.depot.process_dead(leaving.attachment)
    using = register("c", 2)
    with pytest.raises(NoRoom, match="uid 2"):
        register("d", 2)
    specs = {namespace.id for namespace in rig.depot._tree.namespaces.by_slot.values() if namespace.spec}
    assert specs == {others.namespace, using.namespace}
    register("e", 3)
    audit(rig.depot)


@pytest.mark.requirement("S4", "I4")
def test_a_user_has_its_share_of_sessions_and_attachments(monkeypatch: pytest.MonkeyPatch) -> None:
    """At its share, idle sessions of its own end before grace. Those of others stay."""
    monkeypatch.setattr(shares_module, "USER", replace(shares_module.USER, sessions=3, attachments=4))
    rig = Rig()

    def attach(name: str, uid: int, pid: int, rank: int = 0) -> int:
        return rig.depot.attach(
            process(pid), Membership(name, scheduler=not rank, rank=rank, world_size=4, owner=Owner(uid))
        ).attachment  # fmt: skip

    rig.depot.disconnected(attach("idle", 1, 10))
    for number in range(3):
        attach(f"e{number}", 2, 20 + number)
    with pytest.raises(LimitExceeded, match="sessions of uid 2: 4 is more than 3"):
        attach("e3", 2, 23)
    attach("e0", 2, 24, 1)
    with pytest.raises(LimitExceeded, match="attachments of uid 2: 5 is more than 4"):
        attach("e0", 2, 25, 2)
    slot = attach("e1", 2, 21)  # it has this one
    rig.depot.disconnected(slot)
    rig.depot.disconnected(slot)
    attach("e3", 2, 26)
    attach("e0", 3, 30)
    assert len(rig.depot.status().sessions) == 5  # of user 1, three of user 2, of user 3
    audit(rig.depot)


@pytest.mark.requirement("I4")
def test_an_object_larger_than_the_arena_evicts_nothing() -> None:
    rig = Rig(data_pages=8)
    client = rig.attach()
    client.store(path("p", 2))
    huge = spec_of(GroupSpec(Kind.STATE, CHUNK, rank_block_bytes=(9 * 4096,)), name="huge")
    other = rig.attach("huge", pid=20, spec=huge)
    assert other.reserve(path("q", 1), (Kind.STATE,))[1].outcomes == bytes([ReserveOutcome.NO_ROOM])
    assert client.locate(path("p", 2)).boundary_tokens == 2 * CHUNK


@pytest.mark.requirement("I4")
def test_a_reply_has_no_more_pieces_than_a_message_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    client = rig.attach()
    client.store(path("p", 3))
    monkeypatch.setattr(limits, "FRAGMENTS_PER_REPLY_MAX", 2)
    assert client.acquire(path("p", 3))[1].outcome is AcquireOutcome.REFUSED
    assert client.acquire(path("p", 2))[1].outcome is AcquireOutcome.GRANTED
    monkeypatch.setattr(store_module, "_FRAGMENT_WORDS_MAX", 5)
    later = [ReserveOutcome.GRANTED, ReserveOutcome.LATER, ReserveOutcome.LATER]
    assert client.reserve(path("q", 3))[1].outcomes == bytes(later)
    audit(rig.depot)


@pytest.mark.requirement("I8")
def test_watermarks_evict_nothing_while_the_arena_is_being_populated() -> None:
    """Else a daemon killed in that time would drop at once what it has just adopted."""
    rig = Rig(high_watermark=0.95, low_watermark=0.5)
    rig.attach().store(path("p", 8))
    rig.sum_all()
    rig.populated_at_start = False
    rig.crash()
    rig.depot.tick()
    assert rig.depot.status().tier.objects == 8
    rig.depot.ready(rig.layout.data_bytes)
    rig.depot.tick()
    assert rig.depot.status().tier.objects == 8


@pytest.mark.requirement("I4")
def test_what_a_namespace_turns_out_to_need_is_settled_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_module, "REFRESH_NODES_MAX", 4)
    rig = Rig(tier=COMMIT)
    client = rig.attach(spec=HYBRID)
    client.store(path("p", 20))
    rig.tier.run()
    reboot(rig)
    usable, nodes = rig.depot._tree.usable, rig.depot._tree.index.nodes().tolist()
    assert sum(map(usable.usable, nodes)) == 20
    rig.attach(spec=HYBRID)  # there is a state of every boundary: nobody could resume at any of these
    assert sum(map(usable.usable, nodes)) == 16
    for _ in range(5):
        rig.depot.tick()
    audit(rig.depot)
    assert sum(map(usable.usable, nodes)) == 0


@pytest.mark.requirement("I4")
@pytest.mark.parametrize(("room", "kept"), [(4096, ["b", "c"]), (0, ["a", "b"])])
def test_a_full_table_takes_in_the_namespaces_that_were_found_last(
    monkeypatch: pytest.MonkeyPatch, room: int, kept: list[str]
) -> None:
    rig = Rig(tier=COMMIT)
    for epoch in "abc":
        rig.attach(epoch, pid=ord(epoch), spec=replace(DENSE, epoch=epoch)).store(path(epoch, 2))
        rig.tier.run()
    monkeypatch.setattr(namespaces_module, "NAMESPACES_MAX", 2)
    monkeypatch.setattr(tiering_module, "_DROPPED_MAX", room)
    reboot(rig)
    audit(rig.depot)
    ids = {replace(DENSE, epoch=epoch).namespace_id(): epoch for epoch in "abc"}
    assert sorted(ids[one] for one in rig.depot._tree.namespaces.by_id) == kept
    assert in_tier(rig) == 4
    assert len(rig.medium.stored) == 4


@pytest.mark.requirement("I4")
def test_what_is_found_takes_no_slot_of_what_ram_has(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(tier=COMMIT)
    rig.attach("disk", pid=11, spec=replace(DENSE, epoch="disk")).store(path("d", 2))
    rig.tier.run()
    disk, rig.medium = rig.medium, Medium()
    reboot(rig)
    rig.attach("ram", pid=12).store(path("r", 2))
    rig.sum_all()
    monkeypatch.setattr(namespaces_module, "NAMESPACES_MAX", 1)
    rig.medium = disk
    rig.crash()
    audit(rig.depot)
    assert rig.counter("tier_found_objects.memory/no_namespace") == 2
    assert (rig.depot.status().tier.objects, len(disk.stored)) == (2, 0)
