"""The order in which an opening tells its objects, against a walk of the same tree (row T2)."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvdepot.core.calls import ROOT_KEY, Kind
from kvdepot.core.objectfile import ObjectName
from kvdepot.server.tiers.disk.columns import PutColumns
from kvdepot.server.tiers.disk.layout import FOLDERS, DiskLayout, segment_name
from kvdepot.server.tiers.disk.paths import depth_first
from kvdepot.server.tiers.disk.records import Put, pack_put
from kvdepot.server.tiers.disk.recovery import SnapshotFacts, make_store, read_index, write_generation

CHUNK = 16
SPACES = (b"one namespace...", b"another one.....")


def key_of(number: int) -> bytes:
    return number.to_bytes(16, "big")


def put_of(space: int, number: int, parent: int, boundary: int, kind: Kind, address: int = 0) -> Put:
    """`parent`: a number, 0 the root."""
    name = ObjectName(SPACES[space], key_of(number), key_of(parent) if parent else ROOT_KEY, kind, boundary, 4096)
    return Put(name, (1 << 40) + number, 1, 0, 4096, 0, 0, 0, ((address, 8192),))


def ordered(puts: list[Put]) -> list[Put]:
    order = depth_first(PutColumns.of(puts)).tolist()
    assert sorted(order) == list(range(len(puts)))
    return [puts[row] for row in order]


Chunk = tuple[bytes, bytes]
Nodes = st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, 40), st.integers(1, 4), st.sets(st.sampled_from(Kind), min_size=1)),
    max_size=40,
)


@pytest.mark.requirement("T2")
@given(nodes=Nodes, shuffled=st.randoms(use_true_random=False))
def test_every_subtree_is_told_at_a_stretch_behind_its_chunk(
    nodes: list[tuple[int, int, int, set[Kind]]], shuffled: Random
) -> None:
    """Parents are any earlier or later numbers, there or not: what does not end before its child is none."""
    puts = [
        put_of(space, number, parent, deep * CHUNK, kind)
        for number, (space, parent, deep, kinds) in enumerate(nodes, 1)
        for kind in kinds
    ]
    shuffled.shuffle(puts)
    told = ordered(puts)
    ends: dict[Chunk, int] = {}
    above: dict[Chunk, Chunk] = {}
    for put in puts:
        ends[put.name.namespace, put.name.key] = put.name.boundary_tokens
    for put in puts:
        chunk, parent = (put.name.namespace, put.name.key), (put.name.namespace, put.name.parent)
        if ends.get(parent, put.name.boundary_tokens) < put.name.boundary_tokens:
            above[chunk] = parent
    places: dict[Chunk, list[int]] = defaultdict(list)
    for place, put in enumerate(told):
        at: Chunk | None = (put.name.namespace, put.name.key)
        assert at is not None and (at not in places or told[place - 1].name.kind < put.name.kind)
        while at is not None:
            places[at].append(place)
            at = above.get(at)
    for chunk, found in places.items():
        assert found == list(range(found[0], found[0] + len(found))), "something else lies in between"
        assert (told[found[0]].name.namespace, told[found[0]].name.key) == chunk, "it follows what comes after it"


@pytest.mark.requirement("T2")
def test_paths_that_were_written_side_by_side_are_told_one_after_the_other(tmp_path: Path) -> None:
    puts = [
        put_of(0, path + deep, path + deep - 1 if deep else 0, CHUNK * (deep + 1), Kind.ATTENTION, (path + deep) * 8192)
        for deep in range(3)
        for path in (10, 20)
    ]
    layout = DiskLayout.plan(256 << 20, 1 << 20)
    for folder in FOLDERS:
        (tmp_path / folder).mkdir()
    store = make_store(tmp_path, layout, Random(1).randbytes)
    write_generation(tmp_path, store, 1, [pack_put(put) for put in puts], SnapshotFacts(1 << 41, 1 << 41, 0, 0, 0))
    (tmp_path / segment_name(0)).touch()
    os.truncate(tmp_path / segment_name(0), layout.length_of(0))
    index = read_index(tmp_path, store, layout)
    numbers = [int.from_bytes(put.name.key, "big") for put in index.puts]
    assert numbers in ([10, 11, 12, 20, 21, 22], [20, 21, 22, 10, 11, 12])


@pytest.mark.requirement("T2")
def test_none_and_one() -> None:
    assert ordered([]) == []
    one = put_of(0, 1, 1, CHUNK, Kind.STATE)  # its own parent
    assert ordered([one]) == [one]
