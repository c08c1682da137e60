"""The hybrid toy: attention and recurrent state in one model (bfloat16, so one request at a time)."""

from __future__ import annotations

from pathlib import Path

import pytest
from kvdepot.core.calls import Kind

from demo.engine import Engine
from demo.scenarios import await_lookups
from tests.e2e import arena_bytes
from tests.e2e.fleet import Fleet
from tests.e2e.hybrid import CHUNK, GROUPS, LENGTHS, boundary, check_loads, digests_by_place, store, wrong
from tests.rigs.ctl_process import text

ENGINES = ("hybrid", "hybrid_dense_checkpoints")


@pytest.fixture
def engine(fleet: Fleet) -> Engine:
    return fleet.engine("hybrid")


@pytest.mark.requirement("P4", "P3")
def test_ten_of_ten_from_a_second_engine_and_after_a_restart(fleet: Fleet, engine: Engine) -> None:
    prompts = [fleet.prompt(tokens) for tokens in LENGTHS]
    reference = store(fleet, engine, prompts)
    other = fleet.engine("hybrid_dense_checkpoints")
    check_loads(fleet, other, prompts, reference)
    own = [other.ask(ids) for ids in prompts]
    assert [one.local_tokens for one in own] == [boundary(len(ids)) for ids in prompts]
    assert [one.tokens for one in own] == reference

    namespaces = fleet.daemon.status().namespaces
    assert "PYTHONHASHSEED" not in engine.options.process_environment()
    check_loads(fleet, fleet.restart("hybrid"), prompts, reference)
    assert [one.namespace_id for one in fleet.daemon.status().namespaces] == [one.namespace_id for one in namespaces]


@pytest.mark.requirement("C1")
def test_interior_chunks_without_a_checkpoint_serve_deeper_boundaries(fleet: Fleet, engine: Engine) -> None:
    deep = fleet.prompt(4 * CHUNK + 20)
    (reference,) = store(fleet, engine, [deep])
    # Its attention is there for every chunk, its state only at the end.
    inner = deep[: 2 * CHUNK + 50]
    missed = fleet.ask(engine, inner)
    assert (missed.external_tokens, missed.served.bytes) == (0, 0)
    fleet.forget(engine)
    loaded = fleet.ask(engine, deep)
    assert loaded.external_tokens == 4 * CHUNK
    assert loaded.tokens == reference
    fleet.forget(engine)
    hit = fleet.ask(engine, inner)
    assert hit.external_tokens == 2 * CHUNK  # the miss has stored the checkpoint that it lacked
    assert hit.tokens == missed.tokens
    fleet.forget(engine)
    longer = fleet.ask(engine, deep + fleet.prompt(100))
    assert longer.external_tokens == 4 * CHUNK


@pytest.mark.requirement("C1")
def test_one_state_per_group_is_loaded_into_the_slot_at_the_boundary(fleet: Fleet, engine: Engine) -> None:
    ids = fleet.prompt(3 * CHUNK + 20)
    (reference,) = store(fleet, engine, [ids])
    known = fleet.audited("hybrid")
    loaded = fleet.ask(engine, ids)
    assert loaded.tokens == reference
    fleet.forget(engine)
    lines = [line for line in fleet.audit("hybrid", known) if line["event"] == "loaded"]
    states = [line for line in lines if line["kind"] == "state"]
    assert {line["group"] for line in lines} == GROUPS
    assert [(line["boundary_tokens"], len(line["blocks"])) for line in states] == [(3 * CHUNK, 1)] * 3


@pytest.mark.requirement("C2")
@pytest.mark.parametrize("chunks", [1, 3])
def test_a_prompt_of_exactly_whole_chunks(fleet: Fleet, engine: Engine, chunks: int) -> None:
    ids = fleet.prompt(chunks * CHUNK)
    cold = engine.ask(ids)
    local = engine.ask(ids)
    fleet.forget(engine)
    again = fleet.ask(engine, ids)
    assert again.external_tokens == again.served.tokens == local.local_tokens <= (chunks - 1) * CHUNK
    assert again.tokens == local.tokens == cold.tokens
    more = ids + fleet.prompt(30)
    (reference,) = store(fleet, engine, [more])
    loaded = fleet.ask(engine, more)
    assert (loaded.external_tokens, loaded.tokens) == (chunks * CHUNK, reference)


@pytest.mark.requirement("C5")
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_a_local_hit_is_continued_from_the_daemon(fleet: Fleet, engine: Engine, chunks: int) -> None:
    ids = fleet.prompt(4 * CHUNK + 25)
    (reference,) = store(fleet, engine, [ids])
    engine.ask(ids[: chunks * CHUNK + 5], 1)
    mixed = fleet.ask(engine, ids)
    assert (mixed.local_tokens, mixed.external_tokens) == (chunks * CHUNK, (4 - chunks) * CHUNK)
    assert mixed.served.tokens == mixed.external_tokens
    assert mixed.tokens == reference


@pytest.mark.requirement("B1")
def test_generated_tokens_and_their_checkpoints_are_loaded_in_the_next_turn(fleet: Fleet, engine: Engine) -> None:
    producer = fleet.engine("hybrid_dense_checkpoints")
    first = fleet.prompt(300)
    answer = producer.ask(first, 520)
    second = first + list(answer.tokens) + fleet.prompt(30)
    local = producer.ask(second)
    assert local.local_tokens == 2 * CHUNK
    fleet.forget(producer)
    for consumer in (producer, engine):
        external = fleet.ask(consumer, second)
        assert external.external_tokens == external.served.tokens == 2 * CHUNK
        assert external.tokens == local.tokens


@pytest.mark.requirement("D4", "D1")
def test_a_full_local_hit_moves_nothing_and_every_group_is_stored(fleet: Fleet, engine: Engine) -> None:
    known = fleet.audited("hybrid")
    ids = fleet.prompt(2 * CHUNK + 10)
    cold = engine.ask(ids)
    before = fleet.daemon.settle()
    local = fleet.ask(engine, ids)
    after = fleet.daemon.settle()
    assert (local.local_tokens, local.external_tokens, local.served.bytes) == (2 * CHUNK, 0, 0)
    assert local.tokens == cold.tokens
    assert after.counters["granted_write_bytes"] == before.counters["granted_write_bytes"]
    stored = [line for line in fleet.audit("hybrid", known) if line["event"] == "stored"]
    assert {line["group"] for line in stored} == GROUPS


@pytest.mark.parametrize("kind", [Kind.ATTENTION, Kind.STATE])
def test_control_damaged_bytes_change_the_tokens_and_the_audit_sees_them(
    fleet: Fleet, engine: Engine, kind: Kind
) -> None:
    known = fleet.audited("hybrid")
    ids = fleet.prompt(2 * CHUNK + 10)
    before = arena_bytes.committed(fleet.daemon.arena)
    (reference,) = store(fleet, engine, [ids])
    stored = arena_bytes.committed(fleet.daemon.arena) - before
    assert sorted((one.boundary_tokens, one.kind) for one in stored) == [
        (CHUNK, Kind.ATTENTION), (2 * CHUNK, Kind.ATTENTION), (2 * CHUNK, Kind.STATE),
    ]  # fmt: skip
    arena_bytes.damage(fleet.daemon.arena, max(one for one in stored if one.kind == kind))
    damaged = fleet.ask(engine, ids)
    assert damaged.external_tokens == 2 * CHUNK
    assert damaged.tokens != reference
    assert {place[1] for place in wrong(digests_by_place(fleet.audit("hybrid", known)))} == {kind.name.lower()}


@pytest.mark.requirement("P4")
def test_under_concurrency_what_is_loaded_has_the_digest_of_what_was_stored(fleet: Fleet, engine: Engine) -> None:
    known = fleet.audited("hybrid")
    shared = fleet.prompt(2 * CHUNK)
    prompts = [shared[: CHUNK * (1 + number % 2)] + fleet.prompt(40 + CHUNK * (number % 3)) for number in range(20)]
    done = engine.generate(prompts, 8)
    assert [one.error for one in done] == [""] * len(prompts)
    fleet.forget(engine)
    before = engine.totals()
    done = engine.generate(prompts, 8)
    assert [one.error for one in done] == [""] * len(prompts)
    assert engine.totals().since(before).external_tokens >= CHUNK * len(prompts) // 2
    fleet.forget(engine)
    digests = digests_by_place(fleet.audit("hybrid", known))
    loaded = {place: found for place, found in digests.items() if found["loaded"]}
    assert {place[3] for place in loaded} == GROUPS
    assert wrong(digests) == {}


@pytest.mark.requirement("P4")
@pytest.mark.long(seconds=220)
@pytest.mark.timeout(1200)
def test_ten_of_ten_across_ten_restarts(fleet: Fleet, engine: Engine) -> None:
    prompts = [fleet.prompt(tokens) for tokens in LENGTHS]
    reference = store(fleet, engine, prompts)
    for number, (ids, tokens) in enumerate(zip(prompts, reference, strict=True)):
        engine = fleet.restart("hybrid", kill=number % 2 == 0)
        loaded = fleet.ask(engine, ids)
        assert loaded.external_tokens == loaded.served.tokens == boundary(len(ids))
        assert loaded.tokens == tokens


@pytest.mark.requirement("P4")
def test_what_was_exported_is_loaded_from_a_daemon_that_had_nothing(
    fleet: Fleet, engine: Engine, tmp_path: Path
) -> None:
    known = fleet.audited("hybrid")
    prompts = [fleet.prompt(tokens) for tokens in (2 * CHUNK + 9, 4 * CHUNK + 120, 7 * CHUNK + 40)]
    engine.ask(prompts[0], 1)
    fleet.settle()
    namespace = fleet.namespace_told()
    text(fleet.daemon.endpoint, "evict", namespace, "--yes")  # with what other tests have damaged
    fleet.forget(engine)
    reference = store(fleet, engine, prompts)
    file = tmp_path / "warm.kvdx"
    assert text(fleet.daemon.endpoint, "export", namespace, str(file)) == ""
    fleet.daemon.stop()
    fleet.daemon.arena.unlink()
    fleet.daemon.start()
    fleet.wait_attached()
    await_lookups(engine, fleet.daemon)
    assert fleet.ask(engine, prompts[0]).external_tokens == 0
    fleet.forget(engine)
    assert text(fleet.daemon.endpoint, "import", str(file)) == ""
    check_loads(fleet, engine, prompts, reference)
    fleet.forget(engine)
    digests = digests_by_place(fleet.audit("hybrid", known))
    assert wrong(digests) == {} and {place[3] for place, found in digests.items() if found["loaded"]} == GROUPS
