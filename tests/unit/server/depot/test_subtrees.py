"""A subtree that is too large to be dropped in one go: cut off at once, reclaimed slice by slice."""

from __future__ import annotations

from random import Random

import pytest
from kvdepot.core.calls import AcquireOutcome, CommitOutcome, EndRequestCall, ReserveOutcome
from kvdepot.server.depot.tree.free_slots import drop_namespace
from kvdepot.server.depot.tree.index import NONE, Index
from kvdepot.server.depot.tree.tree import DROP_NODES_MAX

from tests.rigs.engine_rig import CHUNK, HYBRID, Client, Rig, audit, path
from tests.rigs.seeds import RUN_SEED
from tests.rigs.tier_rig import COMMIT, in_tier, reboot, settle, store

LONG = 40


def cut(rig: Rig, keys: list[bytes]) -> None:
    """The first chunk of the path is found to be corrupt."""
    tree = rig.depot._tree
    node = tree.index.find(0, keys[0])
    tree.drop_corrupt(tree.index.row(node, 1))


def a_long_path(**config: object) -> tuple[Rig, Client, list[bytes]]:
    rig = Rig(data_pages=256, drop_nodes_max=3, **config)  # type: ignore[arg-type]
    client = rig.attach()
    keys = path("p", LONG)
    store(client, keys)
    return rig, client, keys


@pytest.mark.requirement("I1", "I4")
def test_what_was_cut_off_is_found_by_nobody_and_goes_in_slices() -> None:
    rig, client, keys = a_long_path()
    store(client, path("other", 3))
    cut(rig, keys)
    audit(rig.depot)
    index = rig.depot._tree.index
    assert index.count > LONG, "the subtree was dropped in one go"
    assert client.locate(keys).boundary_tokens == 0
    assert client.acquire(keys[-1:])[1].outcome is AcquireOutcome.MISSING
    assert list(client.reserve(keys[5:6], start=5, parent=keys[4])[1].outcomes) == [ReserveOutcome.NO_PARENT]
    assert client.locate(path("other", 3)).boundary_tokens == 3 * CHUNK
    slices = 0
    while index.count > 3:
        before = index.count
        rig.depot.tick()
        audit(rig.depot)
        assert before - index.count <= 2 * 3
        slices += 1
    assert slices >= LONG / 3
    assert rig.counter("dropped_objects.below_dropped") == LONG
    assert client.locate(path("other", 3)).boundary_tokens == 3 * CHUNK
    assert rig.depot.status().tier.used_bytes == 3 * 2 * 4096


@pytest.mark.requirement("I1")
def test_chunks_stored_anew_have_nothing_to_do_with_those_that_were_cut_off() -> None:
    rig, client, keys = a_long_path(tier=COMMIT)
    settle(rig)
    cut_from_both(rig, keys)
    rig.depot.tick()
    lease, reply = client.reserve(keys[:20])
    assert set(reply.outcomes) == {ReserveOutcome.GRANTED}
    audit(rig.depot)
    assert set(client.commit(lease, *range(20))) == {CommitOutcome.COMMITTED}
    settle(rig)
    settle(rig)
    assert client.locate(keys).boundary_tokens == 20 * CHUNK
    assert (rig.depot.status().tier.objects, in_tier(rig), rig.depot._tree.index.count) == (20, 20, 20)


def cut_from_both(rig: Rig, keys: list[bytes]) -> None:
    """Both copies of its first chunk are lost."""
    tree = rig.depot._tree
    node = tree.index.find(0, keys[0])
    tree.tiers[0].drop(node, 1)
    tree.drop_corrupt(tree.index.row(node, 1))
    assert tree.index.count > LONG // 2


@pytest.mark.requirement("I5", "I6")
def test_leases_on_what_was_cut_off_end_as_others() -> None:
    rig, client, keys = a_long_path()
    read, reply = client.acquire(keys)
    assert reply.outcome is AcquireOutcome.GRANTED
    write, reserved = client.reserve(path("tail", 2), start=LONG, parent=keys[-1])
    assert set(reserved.outcomes) == {ReserveOutcome.GRANTED}
    used_bytes = rig.depot.status().tier.used_bytes
    cut(rig, keys)
    assert set(client.commit(write, 0, 1)) == {CommitOutcome.NO_PARENT}
    settle_in_ram(rig)
    assert rig.depot.status().tier.used_bytes == used_bytes - 2 * 2 * 4096, "a reader may still copy from them"
    client.release(read)
    audit(rig.depot)
    assert rig.depot.status().tier.used_bytes == 0


def test_a_request_that_ends_on_what_was_cut_off_stands_on_it_no_more() -> None:
    rig = Rig(data_pages=256, drop_nodes_max=3)
    client = rig.attach(spec=HYBRID)
    keys = path("p", LONG)
    lease, _ = client.reserve(keys, request="r")
    client.commit(lease, *range(LONG))
    cut(rig, keys)
    audit(rig.depot)
    rig.depot.end_request(EndRequestCall(client.session, "r"))
    audit(rig.depot)


def settle_in_ram(rig: Rig) -> None:
    for _ in range(2 * LONG):
        rig.depot.tick()
        audit(rig.depot)


@pytest.mark.requirement("I4")
def test_room_is_made_of_what_was_cut_off_before_anything_is_evicted() -> None:
    rig, client, keys = a_long_path()
    others = path("other", 80)
    store(client, others)
    cut(rig, keys)
    store(client, path("new", 40))
    audit(rig.depot)
    assert client.locate(others).boundary_tokens == 80 * CHUNK
    assert rig.counter("evicted_objects.room") == 0


@pytest.mark.requirement("I4")
def test_room_is_not_looked_for_in_all_that_was_cut_off_at_once() -> None:
    """What a lower tier alone has of it makes no room in RAM."""
    rig, _, keys = a_long_path(tier=COMMIT)
    settle(rig)
    reboot(rig)
    client = rig.attach()
    tree = rig.depot._tree
    tree._slices_left = 3
    for prompt in range(4):
        lease, reply = client.reserve(path(("other", prompt), 32))
        assert set(reply.outcomes) == {ReserveOutcome.GRANTED}
        client.commit(lease, *range(32))
    node = tree.index.find(0, keys[0])
    tree.tiers[0].drop(node, 1)
    tree.lost(node, 1)
    _, reply = client.reserve(path("new", 1))
    assert list(reply.outcomes) == [ReserveOutcome.GRANTED], "by an eviction"
    assert in_tier(rig) == LONG - 1 - 3 * 2 * 3, "three slices"
    settle(rig)
    assert tree.index.count == 128


@pytest.mark.requirement("T1", "I8")
def test_a_crash_leaves_nothing_of_it_behind_that_contradicts_what_was_stored_anew() -> None:
    rig, client, keys = a_long_path(tier=COMMIT)
    settle(rig)
    rig.sum_all()
    cut_from_both(rig, keys)
    store(client, keys[:2])
    rig.tier.run()
    rig.sum_all()
    rig.crash()
    audit(rig.depot)
    assert "repeated" not in rig.report.dropped
    rig.sum_all()
    client = rig.attach()
    assert client.locate(keys).boundary_tokens >= 2 * CHUNK
    audit(rig.depot)


def test_an_idle_namespace_with_a_subtree_cut_off_can_be_dropped() -> None:
    rig, _, keys = a_long_path()
    cut(rig, keys)
    tree = rig.depot._tree
    namespace = tree.namespaces.by_slot[0]
    while namespace.nodes:
        assert drop_namespace(tree, namespace, 7)
        audit(rig.depot)
    rig.depot.tick()
    assert tree.index.last_unlinked() == NONE


@pytest.mark.requirement("I4")
def test_a_slice_has_a_bounded_number_of_nodes_whatever_the_tree_looks_like() -> None:
    assert DROP_NODES_MAX <= 256
    rig = Rig(data_pages=512, rows=1024, lent_rows=600, drop_nodes_max=8)
    client = rig.attach()
    (root,) = path("root", 1)
    store(client, [root])
    for name in range(30):
        lease, _ = client.reserve(path(name, 6), start=1, parent=root)
        client.commit(lease, *range(6))
    cut(rig, [root])
    index = rig.depot._tree.index
    while index.count:
        before = index.count
        rig.depot.tick()
        assert before - index.count <= 16
    audit(rig.depot)


def test_find_knows_what_hangs_on_the_tree_after_any_number_of_cuts() -> None:
    """Against a walk to the root for every node, with cuts, removals and new nodes in between."""
    random = Random(f"{RUN_SEED} cuts")
    index = Index(512, random.randbytes)
    keys: dict[bytes, int] = {}
    lost: dict[int, bytes] = {}
    for _ in range(2000):
        action = random.random()
        if action < 0.6 and index.count < 400:
            key = random.randbytes(16)
            keys[key] = index.add(0, key, random.choice([NONE, *keys.values()]), 1)
        elif action < 0.65 and keys:
            node = random.choice(list(keys.values()))
            index.unlink(node)
            for key, at in list(keys.items()):
                while at not in (NONE, node):
                    at = index.parent(at)
                if at == node:
                    lost[keys.pop(key)] = key
        elif (node := index.last_unlinked()) != NONE:
            child = index.first_child(node)
            if child != NONE:
                index.unlink(child)
            else:
                index.remove(node)
                del lost[node]
        asked = [*keys, *lost.values()]
        random.shuffle(asked)
        asked = asked[: random.choice((20, 100))]
        expected = [keys.get(key, NONE) for key in asked]
        assert index.find_many(0, b"".join(asked)).tolist() == expected
        assert [index.find(0, key) for key in asked] == expected
        assert all(index.named(0, key) == node for node, key in lost.items())
    assert index.count == len(keys) + len(lost)


def test_what_was_cut_off_is_not_written_to_a_lower_tier_any_more() -> None:
    rig, _, keys = a_long_path(tier=COMMIT)
    for job in list(rig.tier.jobs):
        rig.tier.finish(job)
    assert in_tier(rig) == len(rig.tier.jobs) == 4
    cut_from_both(rig, keys)
    rig.tier.run()
    assert in_tier(rig) == len(rig.medium.stored) == 3, "what was written before, and waits to be reclaimed"
    audit(rig.depot)
    settle(rig)
    assert rig.depot._tree.index.count == 0
