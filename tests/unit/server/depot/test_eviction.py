"""What goes when room is needed (design.md#eviction): units, their order, and what must stay."""

from __future__ import annotations

import pytest
from kvdepot.core.calls import EndRequestCall, Kind
from kvdepot.core.greedy_dual import GreedyDualSizeFrequency
from kvdepot.core.planner import GroupSpec
from kvdepot.server.depot.tree import evicting

from tests.rigs.engine_rig import CHUNK, HYBRID, Client, Rig, audit, path, spec_of

BOTH = (Kind.ATTENTION, Kind.STATE)
ATTENTION = (Kind.ATTENTION,)
WINDOWS = spec_of(
    GroupSpec(Kind.ATTENTION, 16, rank_block_bytes=(4096,)),
    GroupSpec(Kind.WINDOW, 16, window_tokens=CHUNK + 17, rank_block_bytes=(4096,)),  # reaches into two chunks
    name="windows",
)


def checkpoint(client: Client, keys: list[bytes], *at: int, request: str = "") -> None:
    """Store the path with states at the ends of these chunks only."""
    client.store(keys, ATTENTION, request=request)
    for chunk in at:
        parent = keys[chunk - 1] if chunk else bytes(16)
        client.store([keys[chunk]], (Kind.STATE,), start=chunk, parent=parent, request=request)


def depth(client: Client, keys: list[bytes]) -> int:
    return client.locate(keys).boundary_tokens // CHUNK


def objects(rig: Rig) -> int:
    return rig.depot.status().tier.objects


def evict(rig: Rig) -> int:
    """How many objects went with one unit."""
    before = objects(rig)
    assert rig.depot._ram.evict_one("room", rig.depot._ram.rooms[0])
    audit(rig.depot)
    return before - objects(rig)


def test_a_leaf_s_state_takes_the_attention_that_only_it_made_usable() -> None:
    rig = Rig()
    client = rig.attach(spec=HYBRID)
    keys = path("p", 6)
    checkpoint(client, keys, 1, 5)
    rig.now += 1
    client.acquire([*keys[:2], keys[1]], [*ATTENTION, *ATTENTION, Kind.STATE])  # lent: its state stays
    assert evict(rig) == 5  # chunks 2 to 5 and the state at 5
    assert depth(client, keys) == 2
    assert objects(rig) == 3


def test_a_branch_keeps_the_attention_that_others_need() -> None:
    rig = Rig()
    client = rig.attach(spec=HYBRID)
    trunk = path("trunk", 3)
    for name in ("one", "two"):
        rig.now += 1
        branch = path(name, 2)
        client.store([*trunk, *branch], ATTENTION)
        client.store([branch[1]], (Kind.STATE,), start=4, parent=branch[0])
    assert evict(rig) == 3  # two chunks and a state; the trunk is the other branch's as well
    assert depth(client, [*trunk, *path("two", 2)]) == 5
    assert evict(rig) == 6


def test_the_state_of_an_inner_node_goes_alone() -> None:
    rig = Rig(eviction="lru")
    client = rig.attach(spec=HYBRID)
    keys = path("p", 4)
    checkpoint(client, keys[:2], 1)
    rig.now += 1
    client.store(keys[2:], ATTENTION, start=2, parent=keys[1])
    client.store(keys[3:], (Kind.STATE,), start=3, parent=keys[2])
    assert evict(rig) == 1
    assert depth(client, keys) == 4
    assert depth(client, keys[:3]) == 0
    assert evict(rig) == 5


def test_the_last_state_of_a_path_never_goes_without_what_it_made_usable() -> None:
    """Else attention would stay that nobody could use."""
    rig = Rig()
    client = rig.attach(spec=HYBRID)
    keys = path("p", 4)
    checkpoint(client, keys, 1, request="r")
    client.store(keys[2:], ATTENTION, start=2, parent=keys[1], request="r")  # in progress, no state yet
    ram = rig.depot._ram
    assert not ram.evict_one("room", ram.rooms[0])
    rig.depot.end_request(EndRequestCall(client.session, "r"))
    assert depth(client, keys) == 2
    assert evict(rig) == 3


@pytest.mark.requirement("P11")
def test_what_nobody_could_resume_at_goes_first_once_no_request_stands_on_it() -> None:
    rig = Rig()
    client = rig.attach(spec=HYBRID)
    checkpoint(client, path("old", 2), 1)
    rig.now += 50
    client.store(path("unfinished", 3), ATTENTION)
    client.store(path("in progress", 3), ATTENTION, request="r")
    assert evict(rig) == 3
    assert depth(client, path("old", 2)) == 2
    assert evict(rig) == 3
    assert depth(client, path("old", 2)) == 0
    assert not rig.depot._ram.evict_one("room", rig.depot._ram.rooms[0])
    assert objects(rig) == 3


def test_a_unit_longer_than_the_limit_goes_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evicting, "UNIT_NODES_MAX", 4)
    rig = Rig(eviction="lru")
    client = rig.attach(spec=HYBRID)
    checkpoint(client, path("long", 10), 9)
    rig.now += 1
    checkpoint(client, path("other", 2), 1)
    assert [evict(rig) for _ in range(3)] == [5, 4, 2]
    assert depth(client, path("other", 2)) == 2


@pytest.mark.requirement("D2")
def test_windows_that_reach_into_several_chunks_stay_as_long_as_a_boundary_needs_them() -> None:
    rig = Rig()
    client = rig.attach(spec=WINDOWS)
    keys = path("p", 5)
    client.store(keys, (Kind.ATTENTION, Kind.WINDOW))
    tree = rig.depot._tree
    nodes = [tree.index.find(0, key) for key in keys]
    assert [tree.usable.usable(node) for node in nodes] == [True] * 5
    tree.drop_row(nodes[1], Kind.WINDOW)
    audit(rig.depot)
    assert [tree.usable.usable(node) for node in nodes] == [True, False, False, True, True]
    assert evict(rig) in (1, 2)
    audit(rig.depot)
    assert depth(client, keys) >= 4


def test_a_window_that_the_boundary_below_reaches_into_does_not_leave_before_it() -> None:
    rig = Rig()
    client = rig.attach(spec=WINDOWS)
    keys = path("p", 3)
    client.store(keys, (Kind.ATTENTION, Kind.WINDOW))
    lease, _ = client.acquire([keys[2]] * 2, [Kind.ATTENTION, Kind.WINDOW])  # lent: the leaf stays
    assert not rig.depot._ram.evict_one("room", rig.depot._ram.rooms[0]), (
        "each window is needed by the boundary of its chunk and the next"
    )
    assert depth(client, keys) == 3
    client.release(lease)
    assert evict(rig) > 0


def test_what_is_lent_is_passed_over_until_it_is_given_back() -> None:
    rig = Rig()
    client = rig.attach()
    client.store(path("p", 2))
    lease, _ = client.acquire(path("p", 2))
    assert not rig.depot._ram.evict_one("room", rig.depot._ram.rooms[0])
    client.release(lease)
    assert evict(rig) == 1


def test_a_path_that_was_continued_outlives_one_that_was_not() -> None:
    """Cost-weighted: the conversation's uses count for what it added, and its older chunks for the chunks below."""
    rig = Rig(data_pages=24)
    client = rig.attach()
    talk = path("talk", 4)
    client.store(talk[:2])
    for turns in (2, 3):
        _, reply = client.acquire(talk[:turns])
        assert reply.extents
        client.release(rig.leases)
        client.store([talk[turns]], start=turns, parent=talk[turns - 1])
    for scan in range(20):
        rig.now += 1
        client.store(path(scan, 2))
        audit(rig.depot)
        if scan == 5:
            assert depth(client, talk) == 4
            assert depth(client, path(0, 2)) == 0
    assert depth(client, talk) == 0, "what was used once must not stay for ever"


def dense(client: Client, request: str, *paths: list[bytes]) -> None:
    """A request that stores states at all chunks of a path, given in parts, and ends."""
    start, parent = 0, bytes(16)
    for part in paths:
        client.store(part, BOTH, start=start, parent=parent, request=request)
        start, parent = start + len(part), part[-1]
    client.rig.depot.end_request(EndRequestCall(client.session, request))


def score(rig: Rig, key: bytes) -> float:
    tree, ram = rig.depot._tree, rig.depot._ram
    assert isinstance(ram.evictor.policy, GreedyDualSizeFrequency)
    return ram.evictor.policy._score(tree.index.find(0, key))


def test_states_inside_a_path_go_before_those_where_requests_end_or_paths_part() -> None:
    rig = Rig()
    client = rig.attach(spec=HYBRID)
    trunk, *branches = path("trunk", 6), path("a", 2), path("b", 2)
    for name, branch in zip("ab", branches, strict=True):
        dense(client, name, trunk, branch)
    for _ in range(5 + 1 + 1):
        assert evict(rig) == 1
    assert [depth(client, trunk + branch) for branch in (*branches, path("c", 1))] == [8, 8, 6]
    assert depth(client, trunk[:5]) == 0


def test_where_a_request_ended_is_remembered_when_another_went_on_from_there() -> None:
    rig = Rig()
    client = rig.attach(spec=HYBRID)
    keys = path("p", 12)
    dense(client, "first turn", keys[:6])
    client.store(keys[6:], BOTH, start=6, parent=keys[5], request="second turn")  # acquires nothing
    for _ in range(10):
        assert evict(rig) == 1
    assert [depth(client, keys[:chunks]) for chunks in (5, 11, 12)] == [0, 6, 12]


def test_the_end_of_a_path_is_worth_more_once_the_states_inside_it_are_gone() -> None:
    """Then a request saves all of the path there, not its last chunk alone."""
    rig = Rig()
    client = rig.attach(spec=HYBRID)
    long, short = path("long", 6), path("short", 1)
    dense(client, "a", long)
    for _ in range(5):
        assert evict(rig) == 1
    dense(client, "b", short)
    assert evict(rig) == 2
    assert (depth(client, long), depth(client, short)) == (6, 0)


def test_after_a_restart_sparse_states_count_as_ends_of_requests() -> None:
    rig = Rig(data_pages=256)
    client = rig.attach(spec=HYBRID)
    sparse, everywhere = path("sparse", 6), path("dense", 12)
    checkpoint(client, sparse, 1, 3, 5)
    client.store(everywhere, BOTH)
    rig.sum_all()
    rig.crash()
    client = rig.attach(spec=HYBRID)
    rig.sum_all()
    inside, *ends = (score(rig, key) for key in (everywhere[5], sparse[1], sparse[3]))
    assert min(ends) > 8 * inside


def test_what_is_offered_again_counts_as_used_where_it_ends_only() -> None:
    """The chunks before were passed, which is no sign that a request would resume there."""
    rig = Rig()
    client = rig.attach(spec=HYBRID)
    keys = path("p", 6)
    client.store(keys, BOTH)
    client.reserve(keys[:4], BOTH)
    scores = [score(rig, key) for key in keys]
    assert all(scores[3] > 8 * inside for inside in (*scores[:3], scores[4]))


@pytest.mark.requirement("I4")
def test_a_tick_counts_objects_and_not_units() -> None:
    rig = Rig(data_pages=100, high_watermark=0.5, low_watermark=0.1, evictions_at_once=3)
    client = rig.attach(spec=HYBRID)
    for name in range(4):
        keys = path(name, 8)
        client.store(keys[:7])
        client.store(keys[7:], (Kind.ATTENTION, Kind.STATE), start=7, parent=keys[6])
    rig.depot.tick()
    assert rig.counter("evicted_objects.watermark") == 9, "more than the unit with which the limit was reached"
    audit(rig.depot)


def test_a_leaf_whose_window_came_back_above_it_may_go_when_its_request_has_ended() -> None:
    rig = Rig()
    client = rig.attach(spec=WINDOWS)
    keys = path("p", 2)
    client.store(keys, request="r")
    client.store(keys[1:], (Kind.WINDOW,), start=1, parent=keys[0], request="r")
    audit(rig.depot)
    client.store(keys[:1], (Kind.WINDOW,), request="r")
    audit(rig.depot)
    rig.depot.end_request(EndRequestCall(client.session, "r"))
    audit(rig.depot)
    assert rig.depot._ram.evict_one("room", rig.depot._ram.rooms[0])
