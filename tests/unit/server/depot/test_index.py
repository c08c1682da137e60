"""The hash table against a dict, and the ended leases' bounds."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from kvdepot.core.arena import NO_ROW
from kvdepot.core.calls import CommitOutcome, Kind
from kvdepot.server.depot.counters import Counters
from kvdepot.server.depot.sessions.session import REMEMBERED_BYTES_MAX, Ended
from kvdepot.server.depot.tree.index import NONE, Index
from kvdepot.server.storage.base import NO_HANDLE

from tests.rigs.seeds import drawn


@pytest.mark.parametrize("seed", [*drawn(range(1)), *drawn(range(1, 8), [pytest.mark.long(seconds=1)])])
def test_index_equals_a_dict_under_churn_with_colliding_keys(seed: int) -> None:
    random = Random(seed)
    index = Index(64, random.randbytes)
    model: dict[tuple[int, bytes], int] = {}
    # Few distinct homes: only four values of the second half, so chains form and wrap around.
    keys = [random.randbytes(8) + bytes([i % 4]) * 8 for i in range(96)]
    for _ in range(3000):
        name = (random.randrange(2), random.choice(keys))
        if name in model:
            index.remove(model.pop(name))
        elif len(model) < 64:
            model[name] = index.add(*name, NONE, 32)
        for namespace, some in ((0, keys[:12]), (1, keys[:12]), (0, keys), (1, keys)):
            expected = [model.get((namespace, k), NONE) for k in some]
            assert index.find_many(namespace, b"".join(some)).tolist() == expected
        assert index.find(*name) == model.get(name, NONE)
    assert index.count == len(model)
    assert sorted(index.leaves_of(0).tolist()) == sorted(node for (n, _), node in model.items() if n == 0)


def test_leaves_come_before_their_parents() -> None:
    index = Index(16, Random(0).randbytes)
    top = index.add(0, b"t" * 16, NONE, 32)
    sides = [index.add(0, bytes([i]) * 16, top, 64) for i in range(3)]
    below = index.add(0, b"b" * 16, sides[1], 96)
    order = index.leaves_first(top, 8)
    assert sorted(order) == sorted([top, *sides, below])
    assert order.index(below) < order.index(sides[1]) < order.index(top)
    index.remove(below)
    index.remove(sides[1])
    assert sorted(index.children(top)) == sorted([sides[0], sides[2]])


def test_a_node_has_a_row_and_handles_per_kind() -> None:
    index = Index(4, Random(0).randbytes, tiers=2)
    node = index.add(0, b"t" * 16, NONE, 32)
    assert not index.has_objects(node)
    index.set_handle(1, node, Kind.STATE, 7)
    assert index.has_objects(node) and index.rows_of(node) == []
    assert index.handle(1, node, Kind.STATE) == 7
    assert index.handle(0, node, Kind.STATE) == index.handle(1, node, Kind.ATTENTION) == NO_HANDLE
    assert (index.kinds_in_tier(1, node), index.kinds_in_tier(0, node)) == ([Kind.STATE], [])
    index.set_handle(1, node, Kind.STATE, NO_HANDLE)
    index.set_row(node, Kind.ATTENTION, 3)
    assert index.has_objects(node)
    child = index.add(0, b"c" * 16, node, 64)
    index.set_row(child, Kind.STATE, 4)
    index.set_row(child, Kind.ATTENTION, 5)
    index.set_handle(0, child, Kind.STATE, 1)
    assert (index.children_in_ram(node), index.children_in_tier(0, node), index.children_in_tier(1, node)) == (1, 1, 0)
    index.set_row(child, Kind.STATE, NO_ROW)
    index.set_row(child, Kind.ATTENTION, NO_ROW)
    index.set_handle(0, child, Kind.STATE, NO_HANDLE)
    assert (index.children_in_ram(node), index.children_in_tier(0, node)) == (0, 0)
    index.remove(child)
    index.set_row(node, Kind.ATTENTION, NO_ROW)
    index.remove(node)
    again = index.add(0, b"u" * 16, NONE, 64)
    assert again == node and not index.has_objects(again) and index.boundary(again) == 64


@pytest.mark.parametrize("seed", drawn(range(8)))
def test_many_nodes_at_once_are_the_same_as_one_by_one(seed: int) -> None:
    random = Random(seed)
    index = Index(64, random.randbytes)
    names = [(random.randrange(3), random.randbytes(8) + bytes([i % 4]) * 8) for i in range(60)]
    above = [random.randrange(-1, at) for at in range(60)]
    slots = np.array([slot for slot, _ in names], np.uint16)
    keys = np.frombuffer(b"".join(key for _, key in names), np.uint64).reshape(-1, 2)
    nodes = index.add_many(slots, keys, np.arange(1, 61, dtype=np.uint32) * 32)
    assert [index.boundary(node) for node in nodes.tolist()] == list(range(32, 61 * 32, 32))
    order = random.sample(range(60), 60)
    index.link_many(nodes[order], np.array([nodes[above[at]] if above[at] >= 0 else NONE for at in order], np.int64))
    assert [index.find(*name) for name in names] == nodes.tolist()
    for at, node in enumerate(nodes.tolist()):
        assert sorted(index.children(node)) == [nodes[child] for child in range(60) if above[child] == at]
        assert index.parent(node) == (nodes[above[at]] if above[at] >= 0 else NONE)
    assert sorted(index.leaves(index.nodes()).tolist()) == [node for node in nodes.tolist() if index.is_leaf(node)]
    for at in reversed(range(60)):
        index.remove(int(nodes[at]))
        assert index.find(*names[at]) == NONE
        assert index.count == at
    assert index.add(*names[0], NONE, 32) == nodes[0]


@pytest.mark.requirement("I4")
def test_ended_leases_are_bounded_in_number_and_bytes() -> None:
    ended = Ended(3)
    for lease in range(5):
        ended.add(lease, bytes([CommitOutcome.COMMITTED]))
    assert [lease in ended for lease in range(5)] == [False, False, True, True, True]
    assert ended.outcome(4, 0) == CommitOutcome.COMMITTED
    assert ended.outcome(4, 1) == ended.outcome(0, 0) == CommitOutcome.LOST
    ended.add(9, b"\x01" * REMEMBERED_BYTES_MAX)
    assert len(ended) == 1


@pytest.mark.requirement("P10")
def test_counters_never_decrease() -> None:
    counters = Counters()
    counters.add("expired_leases.read", 2)
    with pytest.raises(ValueError, match="decrease"):
        counters.add("expired_leases.read", -1)
    assert counters.snapshot() == {"expired_leases.read": 2}
