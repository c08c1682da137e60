"""The planner against brute force, on random geometries: plans cover what they claim and never overlap."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import lcm

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvdepot.core.calls import Kind
from kvdepot.core.planner import GroupSpec, PlannedObject, Planner

A, W, S = Kind.ATTENTION, Kind.WINDOW, Kind.STATE


@st.composite
def planners(draw: st.DrawFn) -> Planner:
    """Small blocks with an awkward LCM, windows up to several chunks, one to three ranks."""
    ranks = draw(st.integers(1, 3))
    groups = []
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(Kind))
        replicated = draw(st.booleans())
        groups.append(
            GroupSpec(
                kind,
                draw(st.sampled_from([1, 2, 3, 4, 6])),
                window_tokens=draw(st.integers(2, 40)) if kind is W else 0,
                rank_block_bytes=tuple(draw(st.integers(1, 9)) for _ in range(1 if replicated else ranks)),
                replicated=replicated,
            )
        )
    block = lcm(*(group.block_tokens for group in groups))
    return Planner(groups, block * draw(st.integers(1, 3)))


@dataclass(frozen=True)
class Case:
    """A geometry with something local in the engine and a boundary beyond it."""

    planner: Planner
    local: int | Mapping[Kind, int]
    boundary: int

    def local_of(self, kind: Kind) -> int:
        return self.local if isinstance(self.local, int) else self.local.get(kind, 0)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    planner = draw(planners())
    boundary = draw(st.integers(1, 8)) * planner.chunk_tokens
    blocks = st.integers(0, boundary // planner.scheduler_block_tokens - 1).map(
        lambda block: block * planner.scheduler_block_tokens
    )
    beyond = st.integers(0, 3).map(lambda block: boundary + block * planner.scheduler_block_tokens)
    local: int | dict[Kind, int] = draw(blocks)
    if draw(st.booleans()):
        local = {A: draw(st.one_of(blocks, beyond)), W: draw(blocks), S: draw(blocks)}
    return Case(planner, local, boundary)


def needed_blocks(case: Case, group: int) -> set[int]:
    """Indices into the block table of the blocks a token at the boundary reads and the engine lacks, token by token."""
    spec = case.planner.groups[group]
    local = case.local_of(spec.kind)
    if spec.kind is S:
        return set() if local == case.boundary else {case.boundary // spec.block_tokens - 1}
    first = 0 if spec.kind is A else max(case.boundary - (spec.window_tokens - 1), 0)
    return {token // spec.block_tokens for token in range(first, case.boundary) if token >= local} - {
        token // spec.block_tokens for token in range(local)
    }


def placed_blocks(planner: Planner, objects: tuple[PlannedObject, ...], group: int) -> list[tuple[int, int, int]]:
    """(chunk, block in object, index in block table) of every planned block of the group."""
    return [
        (item.chunk, span.object_block + step, span.table_block + step)
        for item in objects
        for span in item.spans
        if span.group == group
        for step in range(span.blocks)
    ]


@pytest.mark.requirement("P1")
@given(planners())
def test_parts_tile_the_object_exactly(planner: Planner) -> None:
    for kind in Kind:
        at = 0
        for group in planner.groups_of(kind):
            spec = planner.groups[group]
            for rank, block_bytes in enumerate(spec.rank_block_bytes):
                start, end = planner.part_range(kind, group, rank)
                assert (start, end - start) == (at, planner.blocks_in_object(group) * block_bytes)
                at = end
        assert at == planner.object_bytes(kind)


@pytest.mark.requirement("P1")
@given(cases())
def test_a_load_plan_covers_what_is_needed_once_and_nothing_else(case: Case) -> None:
    planner, plan = case.planner, case.planner.load_plan(case.local, case.boundary)
    for group, spec in enumerate(planner.groups):
        placed = placed_blocks(planner, plan.objects, group)
        tables = [table for _, _, table in placed]
        assert len(tables) == len(set(tables))
        assert set(tables) == needed_blocks(case, group)
        per_chunk = planner.chunk_tokens // spec.block_tokens
        for chunk, block, table in placed:
            assert 0 <= block < planner.blocks_in_object(group)
            assert table == (chunk + 1) * per_chunk - planner.blocks_in_object(group) + block
    for item in plan.objects:
        assert item.spans
        assert all(planner.groups[span.group].kind is item.kind and span.blocks > 0 for span in item.spans)
    names = [(item.chunk, item.kind) for item in plan.objects]
    assert len(names) == len(set(names))
    assert set(names) <= set(planner.objects(case.boundary))


@pytest.mark.requirement("P1")
@given(planners(), st.integers(0, 9))
def test_objects_are_the_load_plan_from_nothing(planner: Planner, chunks: int) -> None:
    boundary = chunks * planner.chunk_tokens
    plan = planner.load_plan(0, boundary)
    assert planner.objects(boundary) == [(item.chunk, item.kind) for item in plan.objects]


flags = st.lists(st.sampled_from([1, 1, 1, 1, 0]), max_size=12).map(bytes)
presences = st.fixed_dictionaries({}, optional={A: flags, W: flags, S: flags})


def longest_by_force(case: Case, presence: Mapping[Kind, bytes], high: int) -> int:
    planner = case.planner
    own = [case.local_of(kind) for kind in planner.kinds]
    ends = [case.local_of(kind) for kind in planner.kinds if kind is not A]
    best = 0
    for boundary in range(planner.chunk_tokens, high + 1, planner.chunk_tokens):
        if boundary <= min(own) or any(boundary < end for end in ends):
            continue
        objects = planner.load_plan(case.local, boundary).objects
        if all(item.chunk < len(presence.get(item.kind, b"")) and presence[item.kind][item.chunk] for item in objects):
            best = boundary
    return best


@pytest.mark.requirement("P1")
@given(cases(), presences, st.integers(-1, 13), st.integers(0, 5))
def test_longest_boundary_equals_brute_force(case: Case, presence: dict[Kind, bytes], chunks: int, more: int) -> None:
    high = chunks * case.planner.chunk_tokens + more
    assert case.planner.longest_boundary(presence, case.local, high) == longest_by_force(case, presence, high)


@pytest.mark.requirement("P1")
@given(planners(), presences)
def test_legal_boundaries_are_those_of_which_every_object_is_present(
    planner: Planner, presence: dict[Kind, bytes]
) -> None:
    for chunks in range(14):
        assert planner.legal_boundaries(presence, chunks).tolist() == [
            all(presence.get(kind, b"")[at : at + 1] not in (b"", b"\0") for at, kind in planner.objects(end))
            for end in range(planner.chunk_tokens, chunks * planner.chunk_tokens + 1, planner.chunk_tokens)
        ]


@pytest.mark.requirement("P11")
@given(planners(), presences)
def test_a_longer_presence_never_shortens_the_answer(planner: Planner, presence: dict[Kind, bytes]) -> None:
    high = 12 * planner.chunk_tokens
    before = planner.longest_boundary(presence, 0, high)
    for kind in Kind:
        for chunk in range(12):
            more = bytearray(presence.get(kind, b"").ljust(12, b"\0"))
            more[chunk] = 1
            assert planner.longest_boundary({**presence, kind: bytes(more)}, 0, high) >= before


@pytest.mark.requirement("C2")
@given(planners(), st.integers(0, 400))
def test_the_high_boundary_leaves_the_last_block_to_the_engine(planner: Planner, tokens: int) -> None:
    block = planner.scheduler_block_tokens
    high = planner.high_boundary(tokens)
    assert high % planner.chunk_tokens == 0
    assert 0 <= high <= max((tokens - 1) // block * block, 0)
    assert high + planner.chunk_tokens > (tokens - 1) // block * block


class Depot:
    """Stores and loads token by token what the plans name: a block's content is (group, table index)."""

    def __init__(self, planner: Planner) -> None:
        self.planner = planner
        self.blocks: dict[tuple[int, Kind, int, int], int] = {}
        self.stored: set[tuple[int, Kind]] = set()

    def store(self, objects: tuple[PlannedObject, ...]) -> None:
        for item in objects:
            assert (item.chunk, item.kind) not in self.stored
            self.stored.add((item.chunk, item.kind))
            for span in item.spans:
                for step in range(span.blocks):
                    place = (item.chunk, item.kind, span.group, span.object_block + step)
                    assert place not in self.blocks
                    self.blocks[place] = span.table_block + step

    def presence(self, chunks: int) -> dict[Kind, bytes]:
        return {kind: bytes((chunk, kind) in self.stored for chunk in range(chunks)) for kind in Kind}

    def load(self, objects: tuple[PlannedObject, ...]) -> dict[int, set[int]]:
        """Per group the table indices that were filled with what belongs there."""
        filled: dict[int, set[int]] = {group: set() for group in range(len(self.planner.groups))}
        for item in objects:
            for span in item.spans:
                for step in range(span.blocks):
                    content = self.blocks[item.chunk, item.kind, span.group, span.object_block + step]
                    assert content == span.table_block + step
                    filled[span.group].add(content)
        return filled


@pytest.mark.requirement("C5")
@given(planners(), st.lists(st.integers(1, 30), min_size=1, max_size=6), st.data())
def test_what_was_stored_step_by_step_serves_every_split(
    planner: Planner, steps: list[int], data: st.DataObject
) -> None:
    depot, computed = Depot(planner), 0
    for step in steps:
        before, computed = computed, computed + step
        alive = {
            group: max(before - planner.groups[group].window_tokens + 1, 0) // planner.groups[group].block_tokens
            for group in planner.groups_of(W)
        }
        offers = {}
        ends = range(before // planner.chunk_tokens * planner.chunk_tokens, computed + 1, planner.chunk_tokens)
        for boundary in ends:
            if boundary > before and data.draw(st.booleans()):
                offers[boundary] = {group: 1000 + group for group in planner.groups_of(S)}
        plan = planner.store_plan(depot.stored, computed, offers, alive_from=alive)
        for item in plan.objects:
            assert (item.kind is S) == bool(item.block_ids)
            assert item.kind is not S or (item.chunk + 1) * planner.chunk_tokens in offers
        depot.store(plan.objects)
    chunks = computed // planner.chunk_tokens
    assert A not in planner.kinds or {(chunk, A) for chunk in range(chunks)} <= depot.stored
    for local in range(0, computed, planner.scheduler_block_tokens):
        boundary = planner.longest_boundary(depot.presence(chunks), local, computed)
        if boundary:
            filled = depot.load(planner.load_plan(local, boundary).objects)
            case = Case(planner, local, boundary)
            assert filled == {group: needed_blocks(case, group) for group in range(len(planner.groups))}
