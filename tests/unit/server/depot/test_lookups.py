"""Locates that ask shared tiers, and what a shared tier changes in the engine. The medium is in memory."""

from __future__ import annotations

import pytest
from kvdepot.core.calls import ROOT_KEY, AcquireOutcome, Kind
from kvdepot.core.objectfile import Codec, ObjectHeader, ObjectName, payload_sum
from kvdepot.core.planner import GroupSpec
from kvdepot.server.depot.loads import lookups as lookups_module
from kvdepot.server.depot.tree.evicting import UNIT_NODES_MAX
from kvdepot.server.depot.tree.free_slots import free_slot
from kvdepot.server.depot.types import Quota, TierConfig, WritePolicy
from kvdepot.server.storage.base import IoOutcome

from tests.fakes.shared_memory_tier import SharedMedium, file_of
from tests.rigs.engine_rig import CHUNK, HYBRID, Rig, audit, key, path, spec_of
from tests.rigs.tier_rig import (
    ATTENTION,
    BOTH,
    COMMIT,
    EVICT,
    SECOND_USE,
    boundary,
    published,
    read,
    reboot,
    rig_over,
    store,
)

WINDOWED = spec_of(
    GroupSpec(Kind.ATTENTION, 16, rank_block_bytes=(4096,)),
    GroupSpec(Kind.WINDOW, 16, window_tokens=49, rank_block_bytes=(4096,)),  # two chunks
    name="windowed",
)


def put(medium: SharedMedium, namespace: bytes, key: bytes, parent: bytes, kind: Kind, tokens: int) -> None:
    """Of a namespace of DENSE's and HYBRID's sizes, zeros."""
    payload = bytes(HYBRID.object_bytes[kind])
    name, total = ObjectName(namespace, key, parent, kind, tokens, len(payload)), payload_sum([payload])
    header = ObjectHeader(name, Codec.NONE, len(payload), total, total, sequence=0, created_at=0)
    medium.files[file_of(name)] = header.pack() + payload


@pytest.mark.requirement("T3")
def test_what_another_node_published_is_located_and_loaded() -> None:
    keys = path("p", 5)
    rig, client = rig_over(keys[:3])
    answers = client.locate_later(keys)
    assert answers == []
    rig.shared.run()
    assert [(one.boundary_tokens, one.tier) for one in answers] == [(3 * CHUNK, "nfs")]
    granted = client.acquire_later(keys[:3], ATTENTION * 3, 1)
    rig.shared.run()
    assert granted[0].outcome is AcquireOutcome.GRANTED and read(rig, granted[0]) == {7}
    audit(rig.depot)
    counted = {what: rig.counter(f"tier_probed_objects.nfs/{what}") for what in ("asked", "found", "absent")}
    assert counted == {"asked": 5, "found": 3, "absent": 2}
    assert rig.counter("locate_waits.done") == 1


@pytest.mark.requirement("T3")
def test_a_miss_says_that_it_was_looked_up() -> None:
    rig, client = rig_over(path("p", 1))
    assert boundary(client, path("absent", 3)) == 0
    assert rig.counter("misses.probe_absent") == 1 and rig.counter("misses.unknown") == 0


@pytest.mark.requirement("P10")
def test_what_a_shared_tier_did_not_give_has_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, client = rig_over(path("p", 1))
    answers = [client.locate_later(path("absent", 3))]
    rig.shared.run()
    answers.append(client.locate_later(path("late", 3)))
    rig.now += 1.0
    rig.depot.answer_locates()
    monkeypatch.setattr(lookups_module, "WALKS_MAX", 0)
    answers.append(client.locate_later(path("refused", 3)))
    assert [one.miss for (one,) in answers] == ["probe_absent", "probe_late", "probe_refused"]


def test_a_locate_that_needs_no_look_up_is_answered_at_once() -> None:
    keys = path("p", 4)
    rig, client = rig_over([])
    store(client, keys)
    (reply,) = client.locate_later(keys)
    assert (reply.boundary_tokens, reply.tier, rig.shared.searched) == (4 * CHUNK, "ram", [])
    (reply,) = client.locate_later([*keys, key("more")], high_tokens=4 * CHUNK)
    assert rig.shared.searched == []


@pytest.mark.requirement("I4")
def test_names_are_asked_for_in_slices_up_to_the_first_hole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookups_module, "SLICE_CHUNKS", 4)
    keys = path("p", 40)
    rig, client = rig_over(keys[:10])
    assert boundary(client, keys) == 10
    assert [len(names) for names in rig.shared.searched] == [4, 4, 4], "the third has the hole"
    assert [name.key for names in rig.shared.searched for name in names] == keys[:12], "parents first"
    assert boundary(client, keys) == 10
    assert [name.key for name in rig.shared.searched[-1]] == keys[10:14], "what is known is not asked for again"


def test_a_first_slice_is_small() -> None:
    rig, client = rig_over(path("p", 100), data_pages=256)
    assert boundary(client, path("absent", 500)) == 0
    assert [len(names) for names in rig.shared.searched] == [16], "most prompts end in what nobody has"
    assert boundary(client, path("p", 500)) == 100
    assert [len(names) for names in rig.shared.searched] == [16, 16, 128]


@pytest.mark.requirement("I4")
def test_a_walk_asks_for_so_many_names_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookups_module, "SLICE_CHUNKS", 4)
    monkeypatch.setattr(lookups_module, "NAMES_PER_WALK_MAX", 5)
    keys = path("p", 6)
    rig, client = rig_over(keys)
    assert boundary(client, keys) == 5
    assert [len(names) for names in rig.shared.searched] == [4, 1]
    assert boundary(client, keys) == 6, "the next one goes on there"


def test_ten_requests_for_one_prefix_cause_one_look_up() -> None:
    keys = path("p", 3)
    rig, client = rig_over(keys)
    answers = [client.locate_later([*keys, key("own", number)]) for number in range(10)]
    assert len(rig.shared.searched) == 1
    rig.shared.search(rig.shared.searches[0])
    assert [len(one) for one in answers] == [1] + [0] * 9, "the others ask for their own tails behind it"
    rig.shared.run()
    assert [one[0].boundary_tokens for one in answers] == [3 * CHUNK] * 10
    asked = [file_of(name) for names in rig.shared.searched for name in names]
    assert len(asked) == len(set(asked)) == 13
    same = [client.locate_later(path("absent", 3)) for _ in range(10)]
    before = len(rig.shared.searched)
    assert before == 11
    rig.shared.run()
    assert all(same) and len(rig.shared.searched) == before, "nobody asks again for what was absent a moment ago"
    audit(rig.depot)


def test_every_tier_s_knowledge_counts_object_by_object() -> None:
    """Attention on the local disk, the state on the shared one."""
    keys = path("p", 4)
    medium = SharedMedium()
    published(medium, keys, HYBRID, BOTH)
    for file in [file for file in medium.files if file[2] == Kind.ATTENTION]:
        del medium.files[file]
    rig = Rig(tier=COMMIT, shared=EVICT, shared_medium=medium)
    client = rig.attach(spec=HYBRID)
    store(client, keys)
    rig.tier.run()
    reboot(rig)
    client = rig.attach(spec=HYBRID)
    assert boundary(client, keys) == 4
    assert {name.kind for names in rig.shared.searched for name in names} == {Kind.STATE}
    (asked,) = rig.shared.searched
    assert [name.key for name in asked] == keys


def test_a_state_alone_is_no_boundary_and_no_path() -> None:
    keys = path("p", 2)
    medium = SharedMedium()
    published(medium, keys, HYBRID, BOTH)
    del medium.files[next(file for file in medium.files if file[1:] == (keys[0], Kind.ATTENTION))]
    rig = Rig(shared=COMMIT, shared_medium=medium)
    assert boundary(rig.attach(spec=HYBRID), keys) == 0
    assert rig.shared.handles == set(), "what cannot be reached takes no room"


def test_windows_that_end_at_a_boundary_are_looked_up_too() -> None:
    keys = path("p", 4)
    medium = SharedMedium()
    published(medium, keys, WINDOWED, (Kind.ATTENTION, Kind.WINDOW))
    del medium.files[next(file for file in medium.files if file[1:] == (keys[1], Kind.WINDOW))]
    rig = Rig(shared=COMMIT, shared_medium=medium)
    assert boundary(rig.attach(spec=WINDOWED), keys) == 4
    del medium.files[next(file for file in medium.files if file[1:] == (keys[3], Kind.WINDOW))]
    rig = Rig(shared=COMMIT, shared_medium=medium)
    assert boundary(rig.attach(spec=WINDOWED), keys) == 1, "two chunks reach to 2 and to 3"


@pytest.mark.requirement("I2")
def test_the_wait_is_bounded_and_the_look_up_goes_on_for_the_next_locate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookups_module, "SLICE_CHUNKS", 2)
    keys = path("p", 4)
    rig, client = rig_over(keys)
    store(client, keys[:1])
    answers, other = client.locate_later(keys), client.locate_later(keys)
    rig.depot.tick()
    assert answers == other == []
    rig.now += 0.41
    rig.depot.tick()
    assert [one.boundary_tokens for one in answers + other] == [CHUNK, CHUNK], "what is known by then"
    assert len(rig.depot._locates._look_ups) == 1, "who asked goes on, who waited with it does not"
    rig.shared.run()
    assert len(answers) == len(other) == 1
    (reply,) = client.locate_later(keys)
    assert reply.boundary_tokens == 4 * CHUNK
    assert (rig.counter("locate_waits.late"), len(rig.depot._locates._look_ups)) == (2, 0)
    audit(rig.depot)


@pytest.mark.requirement("I2")
def test_what_is_known_is_answered_while_the_engine_still_waits_for_it() -> None:
    keys = path("p", 4)
    rig, client = rig_over(keys)
    store(client, keys[:1])
    known = client.locate_later(keys, wait_seconds=0.05)
    unknown = client.locate_later(path("q", 2), wait_seconds=0.05)
    rig.now += 0.03
    rig.depot.answer_locates()
    assert [one.boundary_tokens for one in known] == [CHUNK]
    assert unknown == [], "nothing in time is nothing: what comes later serves who still queues"
    rig.now += 0.4
    rig.depot.answer_locates()
    assert [one.boundary_tokens for one in unknown] == [0]


@pytest.mark.requirement("I4")
def test_walks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookups_module, "WALKS_MAX", 3)
    rig, client = rig_over(path("p", 1))
    waiting = [client.locate_later(path(number, 2)) for number in range(3)]
    (reply,) = client.locate_later(path("p", 1))
    assert reply.boundary_tokens == 0 and rig.counter("misses.probe_refused") == 1
    rig.shared.run()
    assert all(len(one) == 1 for one in waiting)
    assert boundary(client, path("p", 1)) == 1


@pytest.mark.requirement("I2")
def test_a_long_prompt_that_is_answered_at_once_does_not_hold_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookups_module, "SLICE_CHUNKS", 1)
    keys = path("p", 20)
    rig, client = rig_over(keys)
    rig.shared.automatic = True
    answers = client.locate_later(keys)
    assert answers == [] and len(rig.shared.searched) == 8
    for _ in range(2):
        rig.depot.tick()
    assert [one.boundary_tokens for one in answers] == [20 * CHUNK]


@pytest.mark.requirement("P5")
def test_nothing_is_looked_up_where_the_breaker_is_open() -> None:
    keys = path("p", 2)
    rig, client = rig_over(keys)
    rig.shared.readable = False
    (reply,) = client.locate_later(keys)
    assert reply.boundary_tokens == 0 and rig.shared.searched == []
    rig.shared.readable = True
    answers = client.locate_later(keys)
    rig.shared.readable = False
    rig.shared.search(rig.shared.searches[0], answered=False)
    assert [one.boundary_tokens for one in answers] == [0]
    assert rig.counter("tier_probed_objects.nfs/unanswered") == 2
    rig.shared.readable = True
    assert boundary(client, keys) == 2, "it counts as absent for nobody else"


@pytest.mark.requirement("I5")
def test_a_session_that_ends_while_it_waits_leaves_nothing_behind() -> None:
    keys = path("p", 2)
    rig, client = rig_over(keys)
    answers = client.locate_later(keys)
    rig.depot.process_dead(client.attachment)
    rig.shared.run()
    assert len(answers) == 1 and len(rig.depot._locates._look_ups) == 0
    audit(rig.depot)
    answers = (client := rig.attach(pid=12)).locate_later(path("q", 2))
    namespaces = rig.depot._tree.namespaces
    namespace = namespaces.by_id[client.namespace]
    rig.depot.process_dead(client.attachment)
    free_slot(rig.depot._tree, [namespace], 100)
    assert namespace.id not in namespaces.by_id
    rig.shared.run()
    assert [one.boundary_tokens for one in answers] == [0] and len(rig.depot._locates._look_ups) == 0
    assert namespace.id not in namespaces.by_id, "what is found is nobody's"
    audit(rig.depot)


def test_a_closing_daemon_answers_who_waits() -> None:
    rig, client = rig_over(path("p", 2))
    answers = client.locate_later(path("p", 2))
    rig.depot._locates.close()
    assert [one.boundary_tokens for one in answers] == [0]
    assert client.locate_later(path("p", 2)) and len(rig.shared.searched) == 1
    rig.shared.stop()
    assert len(rig.depot._locates._look_ups) == 0


@pytest.mark.requirement("P6")
def test_a_file_that_vanished_is_a_miss_once_and_what_is_left_is_offered() -> None:
    keys = path("p", 4)
    rig, client = rig_over(keys)
    assert boundary(client, keys) == 4
    del rig.shared_medium.files[(client.namespace, keys[2], int(Kind.ATTENTION))]
    answers = client.acquire_later(keys, ATTENTION * 4, 1)
    rig.shared.run()
    assert [one.outcome for one in answers] == [AcquireOutcome.MISSING]
    audit(rig.depot)
    assert boundary(client, keys) == 2
    assert rig.counter("tier_reads.nfs/gone") == 1 and rig.counter("tier_damaged_objects.nfs/gone") == 0
    _, reply = client.acquire(keys[:2])
    assert reply.outcome is AcquireOutcome.GRANTED, "they were read before"


def test_a_disk_that_is_gone_keeps_its_objects() -> None:
    """Its directory went, and may come back: GONE says nothing of one object there."""
    rig = Rig(tier=COMMIT)
    client = rig.attach()
    store(client, path("p", 1))
    rig.tier.run()
    reboot(rig)
    client = rig.attach()
    rig.tier.fail_next(IoOutcome.GONE)
    client.acquire_later(path("p", 1), ATTENTION, 1)
    rig.tier.run()
    assert rig.depot.status().lower_tiers[0].objects == 1
    audit(rig.depot)


@pytest.mark.requirement("P6")
def test_a_client_with_a_wrong_chain_of_keys_misses_and_the_file_serves_the_others() -> None:
    keys = path("p", 3)
    rig, client = rig_over(keys)
    wrong = [keys[0], keys[2]]
    assert boundary(client, wrong) == 2
    answers = client.acquire_later(wrong, ATTENTION * 2, 1)
    rig.shared.run()
    assert [one.outcome for one in answers] == [AcquireOutcome.MISSING]
    assert not rig.shared_medium.quarantined
    assert rig.counter("tier_reads.nfs/foreign") == 1 and rig.counter("tier_damaged_objects.nfs/foreign") == 0
    audit(rig.depot)
    assert boundary(client, keys) == 3
    answers = client.acquire_later(keys, ATTENTION * 3, 2)
    rig.shared.run()
    assert [one.outcome for one in answers] == [AcquireOutcome.GRANTED]
    audit(rig.depot)


@pytest.mark.requirement("P6")
@pytest.mark.parametrize("where", ["header", "payload", "length", "another"])
def test_a_wrong_file_is_quarantined_and_never_served(where: str) -> None:
    keys = path("p", 2)
    rig, client = rig_over(keys)
    file = (client.namespace, keys[1], int(Kind.ATTENTION))
    blob = bytearray(rig.shared_medium.files[file])
    if where == "another":
        blob[:] = rig.shared_medium.files[(client.namespace, keys[0], int(Kind.ATTENTION))]
    elif where == "length":
        del blob[-4096:]
    else:
        blob[20 if where == "header" else 5000] ^= 1
    rig.shared_medium.files[file] = bytes(blob)
    assert boundary(client, keys) == 2
    answers = client.acquire_later(keys, ATTENTION * 2, 1)
    rig.shared.run()
    assert [one.outcome for one in answers] == [AcquireOutcome.MISSING]
    assert rig.shared_medium.quarantined == [bytes(blob)]
    assert boundary(client, keys) == 1
    store(client, keys, fill=9)
    rig.shared.run()
    assert rig.shared_medium.files[file] != bytes(blob), "it was published anew"
    audit(rig.depot)


def test_what_a_look_up_found_is_not_written_again_and_what_others_published_counts_as_written() -> None:
    keys = path("p", 3)
    rig, client = rig_over(keys[:2], shared=SECOND_USE)
    assert boundary(client, keys) == 2
    client.acquire_later(keys[:2], ATTENTION * 2, 1)
    rig.shared.run()
    client.release(1)
    assert rig.shared.jobs == [] and rig.shared.already_there == 0
    rig = Rig(shared=COMMIT, shared_medium=rig.shared_medium)
    client = rig.attach()
    store(client, keys)
    rig.shared.run()
    assert rig.shared.already_there == 2 and len(rig.shared_medium.files) == 3
    assert rig.counter("tier_writes.nfs/ok") == 3
    audit(rig.depot)


def test_an_object_is_found_while_it_is_written() -> None:
    keys = path("p", 1)
    rig, client = rig_over([], shared=COMMIT)
    store(client, keys)
    published(rig.shared_medium, keys)
    tree = rig.depot._tree
    node = tree.index.find(0, keys[0])
    name = rig.shared.jobs[0].name
    rig.shared.look_up([name], lambda: None)
    rig.shared.search(rig.shared.searches[0])
    assert tree.tiers[0].has(node, Kind.ATTENTION)
    rig.shared.run()
    assert tree.tiers[0].has(node, Kind.ATTENTION) and len(rig.shared.handles) == 1
    audit(rig.depot)
    store(client, path("q", 1))
    lost = path("q", 1)[0]
    published(rig.shared_medium, [lost])
    tree.drop_row(tree.index.find(0, lost), Kind.ATTENTION)
    assert boundary(client, [lost]) == 1
    rig.shared.run()
    audit(rig.depot)


@pytest.mark.requirement("T8")
def test_quotas_leave_a_shared_tier_out() -> None:
    keys = path("p", 6)
    rig, client = rig_over(keys, quotas=(Quota(capacity_bytes=3 * 8192),))
    assert boundary(client, keys) == 3, "more of it the quota never lets into RAM"
    store(client, path("q", 3))
    rig.shared.run()
    assert {status.tier for status in rig.depot.status().quotas} == {"ram"}
    assert len(rig.shared.handles) == 6 and not rig.depot._tree.tiers[0].account.watched


@pytest.mark.requirement("I4")
def test_a_shared_tier_forgets_by_handles_and_leaves_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(shared=COMMIT, shared_handles=10, data_pages=64)
    for name in range(4):
        published(rig.shared_medium, path(name, 4))
    client = rig.attach()
    for name in range(4):
        assert boundary(client, path(name, 4)) == 4
        rig.now += 1
    assert len(rig.shared.handles) <= 10 and len(rig.shared_medium.files) == 16
    assert rig.counter("tier_evicted_objects.nfs/room") > 0
    assert boundary(client, path(0, 4)) == 4, "it is looked up again"
    monkeypatch.setattr(lookups_module, "SLICE_CHUNKS", 4)
    published(rig.shared_medium, path("long", 30))
    assert boundary(client, path("long", 30)) <= 10, "a path does not push itself out"
    assert boundary(client, path("long", 30)) >= 8
    rig.depot.tick()
    assert len(rig.shared.handles) <= 9
    audit(rig.depot)


@pytest.mark.requirement("I4")
def test_paths_of_more_than_a_thousand_nodes_are_found_and_forgotten_whole_of_each_other() -> None:
    """With a state at the end alone: nothing of a path is of use without the rest, and no eviction takes all of it."""
    chunks = UNIT_NODES_MAX + 200
    medium, prompts = SharedMedium(), [path(name, chunks) for name in range(2)]
    rig = Rig(shared=COMMIT, shared_medium=medium, shared_handles=chunks + 400, data_pages=2 * chunks + 64, rows=chunks)
    client = rig.attach(spec=HYBRID)
    for keys in prompts:
        for at, parent in enumerate([ROOT_KEY, *keys[:-1]]):
            put(medium, client.namespace, keys[at], parent, Kind.ATTENTION, (at + 1) * CHUNK)
        put(medium, client.namespace, keys[-1], keys[-2], Kind.STATE, chunks * CHUNK)
    for keys in (*prompts, prompts[0]):
        answers = client.locate_later(keys)
        rig.shared.run()
        assert answers[0].boundary_tokens == chunks * CHUNK, "what is left of it does not make room for the rest"
        rig.now += 1
    audit(rig.depot)
    assert len(rig.shared.handles) <= chunks + 400
    assert rig.counter("tier_evicted_objects.nfs/room") > 2 * (chunks - 400)
    assert len(medium.files) == 2 * (chunks + 1)


def test_a_hit_tells_the_shared_tier_of_the_whole_path_and_seldom() -> None:
    keys = path("p", 4)
    rig, client = rig_over(keys)
    assert boundary(client, keys) == 4

    def hit(depth: int) -> list[bytes]:
        rig.shared.told.clear()
        lease = client.lease()
        client.acquire_later(keys[depth - 1 : depth], ATTENTION, lease)
        rig.shared.run()
        client.release(lease)
        return [name.key for names in rig.shared.told for name in names]

    assert hit(3) == keys[:3], "also what this request had already, parents first"
    assert hit(3) == []
    assert hit(2) == keys[1:2] and hit(4) == keys[3:], "the path to it was told of a moment ago"
    rig.now += 1801
    assert hit(4) == keys, "all of it is served from RAM by now"
    audit(rig.depot)


def test_a_hit_tells_of_the_state_it_resumed_at_and_of_no_other() -> None:
    keys = path("p", 3)
    medium = SharedMedium()
    published(medium, keys, HYBRID, BOTH)
    rig = Rig(shared=COMMIT, shared_medium=medium)
    client = rig.attach(spec=HYBRID)
    assert boundary(client, keys) == 3
    for depth, states in ((3, keys[2:]), (1, keys[:1])):
        rig.shared.told.clear()
        client.acquire_later([*keys[:depth], keys[depth - 1]], ATTENTION * depth + bytes([Kind.STATE]), depth)
        rig.shared.run()
        told = [name for names in rig.shared.told for name in names]
        assert [name.key for name in told if name.kind == Kind.STATE] == states


def test_a_write_below_a_path_keeps_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = path("p", 3)
    rig, client = rig_over(keys[:2])
    assert boundary(client, keys) == 2
    client.acquire_later(keys[:2], ATTENTION * 2, 1)
    rig.shared.run()
    rig.now += 1801
    rig.shared.told.clear()
    lease, _ = client.reserve(keys[2:], start=2, parent=keys[1])
    client.commit(lease, 0)
    rig.shared.run()
    assert [name.key for names in rig.shared.told for name in names] == keys[:2]


def test_no_space_on_a_shared_tier_is_tried_again() -> None:
    rig, client = rig_over(path("p", 2))
    assert boundary(client, path("p", 2)) == 2
    store(client, path("q", 1))
    rig.shared.fail_next(IoOutcome.NO_SPACE)
    rig.shared.finish(rig.shared.jobs[0])
    assert rig.shared.jobs == []
    rig.depot.tick()
    rig.shared.run()
    assert len(rig.shared_medium.files) == 3
    audit(rig.depot)


@pytest.mark.parametrize("policy", list(WritePolicy))
def test_two_nodes_exchange_a_prefix(policy: WritePolicy) -> None:
    medium = SharedMedium()
    high = 0.05 if policy is WritePolicy.EVICT else 1.0
    one, two = (
        Rig(shared=TierConfig(policy), shared_medium=medium, high_watermark=high, low_watermark=high) for _ in range(2)
    )
    keys, client = path("p", 3), one.attach()
    store(client, keys)
    lease, _ = client.acquire(keys)
    client.release(lease)
    for _ in range(2):
        one.depot.tick()
        one.shared.run()
    other = two.attach()
    assert boundary(other, keys) == 3
    answers = other.acquire_later(keys, ATTENTION * 3, 1)
    two.shared.run()
    assert answers[0].outcome is AcquireOutcome.GRANTED and read(two, answers[0]) == {7}
    audit(one.depot)
    audit(two.depot)
