"""Where a hybrid's requests resume: every checkpoint, every split of local and external, states without attention.

Serially, each compared with the same engine's own cache hit at the same boundary.
"""

from __future__ import annotations

from typing import Any

import pytest
from kvdepot.core.calls import Kind

from demo.engine import Engine
from tests.e2e import arena_bytes
from tests.e2e.fleet import AuditMark, Fleet, Loaded
from tests.e2e.hybrid import CHUNK

pytestmark = pytest.mark.long
ENGINES = ("hybrid", "hybrid_dense_checkpoints", "hybrid_fine")
FINE = 96  # of its `prefix_match_unit`


@pytest.fixture
def engine(fleet: Fleet) -> Engine:
    return fleet.engine("hybrid")


def own_hit(engine: Engine, ids: list[int], boundary: int) -> tuple[int, ...]:
    """The tokens of a request that resumes at the boundary by the engine's own cache."""
    answer = engine.ask(ids)
    assert answer.local_tokens == boundary
    return answer.tokens


def moved(fleet: Fleet, name: str, event: str, since: AuditMark) -> list[dict[str, Any]]:
    fleet.settle()
    return [line for line in fleet.audit(name, since) if line["event"] == event]


def stored_states(fleet: Fleet, engine: Engine, ids: list[int]) -> list[int]:
    """The boundaries of the states that a new prompt leaves in the daemon."""
    fleet.settle()
    before = arena_bytes.committed(fleet.daemon.arena)
    engine.ask(ids, 1)
    fleet.settle()
    stored = arena_bytes.committed(fleet.daemon.arena) - before
    return sorted(one.boundary_tokens for one in stored if one.kind is Kind.STATE)


@pytest.mark.requirement("C4")
def test_one_checkpoint_a_prompt_or_one_a_chunk(fleet: Fleet, engine: Engine) -> None:
    every = fleet.engine("hybrid_dense_checkpoints")
    deep = fleet.prompt(5 * CHUNK + 20)
    assert stored_states(fleet, engine, fleet.prompt(5 * CHUNK + 20)) == [5 * CHUNK]
    assert stored_states(fleet, every, deep) == [chunk * CHUNK for chunk in range(1, 6)]
    for chunks in (3, 5):
        # Engines of either density resume at the deepest one that the prompts share.
        longer = deep[: chunks * CHUNK] + fleet.prompt(CHUNK - 50)
        for one in (every, engine):
            fleet.forget(one)
            loaded = fleet.ask(one, longer)
            assert loaded.external_tokens == loaded.served.tokens == chunks * CHUNK
            assert loaded.tokens == own_hit(one, longer, chunks * CHUNK)


@pytest.mark.requirement("C5")
def test_every_split_of_local_and_external(fleet: Fleet) -> None:
    engine = fleet.engine("hybrid_dense_checkpoints")
    deep = fleet.prompt(5 * CHUNK + 25)
    engine.ask(deep, 1)
    prompts = {end: deep[: end * CHUNK + 25] for end in range(2, 6)}
    references = {end: own_hit(engine, ids, end * CHUNK) for end, ids in prompts.items()}
    for end, ids in prompts.items():
        for split in range(end):
            fleet.forget(engine)
            if split:
                engine.ask(deep[: split * CHUNK + 5], 1)
            mixed = fleet.ask(engine, ids)
            assert (mixed.local_tokens, mixed.external_tokens) == (split * CHUNK, (end - split) * CHUNK)
            assert mixed.served.tokens == mixed.external_tokens
            assert mixed.tokens == references[end]


def without_its_state(fleet: Fleet, engine: Engine) -> tuple[list[int], tuple[int, ...], Loaded]:
    """A prompt whose attention the engine has, and whose state only the daemon has; its tokens; and how it went."""
    deep = fleet.prompt(5 * CHUNK + 20)
    short = deep[: 3 * CHUNK + 20]
    engine.ask(short, 1)
    reference = own_hit(engine, short, 3 * CHUNK)
    engine.ask(deep, 1)
    fleet.forget(engine)
    loaded = fleet.ask(engine, deep)
    assert loaded.external_tokens == 5 * CHUNK  # with it every chunk's attention, and the last chunk's state
    return short, reference, loaded


@pytest.mark.requirement("A1")
def test_only_the_state_is_loaded_where_the_engine_has_the_attention(fleet: Fleet, engine: Engine) -> None:
    short, reference, _ = without_its_state(fleet, engine)
    known = fleet.audited("hybrid")
    (state_bytes,) = {
        one.length_bytes for one in arena_bytes.committed(fleet.daemon.arena) if one.kind is Kind.STATE
    }  # fmt: skip
    resumed = fleet.ask(engine, short)
    assert (resumed.local_tokens, resumed.external_tokens) == (0, 3 * CHUNK)
    assert resumed.served.bytes == state_bytes
    assert {(line["kind"], line["boundary_tokens"]) for line in moved(fleet, "hybrid", "loaded", known)} == {
        ("state", 3 * CHUNK)
    }
    assert resumed.tokens == reference
    assert own_hit(engine, short, 3 * CHUNK) == reference


@pytest.mark.requirement("A2")
def test_without_a_state_anywhere_it_computes(fleet: Fleet, engine: Engine) -> None:
    deep = fleet.prompt(5 * CHUNK + 20)
    engine.ask(deep, 1)
    fleet.settle()
    inner = deep[: 2 * CHUNK + 30]
    computed = fleet.ask(engine, inner)
    assert (computed.local_tokens, computed.external_tokens, computed.served.bytes) == (0, 0, 0)
    assert computed.tokens == own_hit(engine, inner, 2 * CHUNK)


@pytest.mark.requirement("A3")
def test_a_consumer_stores_what_it_received_at_most_once(fleet: Fleet, engine: Engine) -> None:
    producer = fleet.engine("hybrid_dense_checkpoints")
    deep = fleet.prompt(4 * CHUNK + 20)
    producer.ask(deep, 1)
    fleet.settle()
    known = fleet.audited("hybrid")
    written = fleet.daemon.status().counters["granted_write_bytes"]
    for ids, external in ((deep, 4 * CHUNK), (deep[: 3 * CHUNK + 20], 3 * CHUNK), (deep, 0)):
        assert fleet.ask(engine, ids).external_tokens == external
    assert moved(fleet, "hybrid", "stored", known) == []
    assert fleet.daemon.status().counters["granted_write_bytes"] == written
    longer = deep[: 4 * CHUNK] + fleet.prompt(CHUNK + 20)
    for _ in range(2):
        engine.ask(longer, 1)
    stored = moved(fleet, "hybrid", "stored", known)
    assert {line["boundary_tokens"] for line in stored} == {5 * CHUNK}
    assert len({(line["key"], line["kind"], line["group"]) for line in stored}) == len(stored)


def test_finer_hits_stay_the_engine_s_own_and_the_daemon_serves_whole_chunks(fleet: Fleet) -> None:
    engine = fleet.engine("hybrid_fine")
    others = arena_bytes.committed(fleet.daemon.arena)
    deep = fleet.prompt(4 * CHUNK + 250)
    ids = deep[: 2 * CHUNK + 250]
    cold = engine.ask(ids)
    tail = 250 // FINE * FINE
    assert own_hit(engine, ids, 2 * CHUNK + tail) == cold.tokens
    fleet.forget(engine)
    loaded = fleet.ask(engine, ids)
    assert loaded.external_tokens == loaded.served.tokens == 2 * CHUNK
    assert loaded.tokens == cold.tokens
    assert own_hit(engine, ids, 2 * CHUNK + tail) == cold.tokens
    # A deeper boundary in the daemon takes the place of the engine's own tail.
    engine.ask(deep, 1)
    reference = own_hit(engine, deep, 4 * CHUNK + tail)
    fleet.forget(engine)
    engine.ask(ids, 1)
    mixed = fleet.ask(engine, deep)
    assert (mixed.local_tokens, mixed.external_tokens) == (2 * CHUNK, 2 * CHUNK)
    assert mixed.tokens == reference
    stored = arena_bytes.committed(fleet.daemon.arena) - others
    assert stored and all(one.boundary_tokens % CHUNK == 0 for one in stored)
