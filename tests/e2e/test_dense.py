"""The dense toy in float32: cold, local and external runs agree exactly, however a batch is cut."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from kvdepot.core.calls import Kind

from demo.engine import Engine
from tests.e2e import arena_bytes
from tests.e2e.fleet import Fleet
from tests.e2e.sizing import assert_size_is_what_the_daemon_reports

ENGINES = ("dense",)
CHUNK = 256
BLOCK = 32  # of the engine here, so that local hits end inside chunks


@pytest.fixture
def engine(fleet: Fleet) -> Engine:
    return fleet.engine("dense")


def test_every_process_of_an_engine_is_forked(engine: Engine) -> None:
    """Else this vLLM sets a variable that the fork server does not know, and starts are slow again."""
    titles = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in engine.processes()}
    front, core, worker = sorted(pid for pid, title in titles.items() if title.startswith((b"VLLM", b"fork server")))
    parents = [re.findall(r"PPid:\s*(\d+)", Path(f"/proc/{pid}/status").read_text()) for pid in (front, core, worker)]
    assert parents[0] == parents[1] == parents[2]


@pytest.mark.requirement("P4")
def test_concurrent_requests_get_equal_tokens_from_the_daemon(fleet: Fleet, engine: Engine) -> None:
    shared = fleet.prompt(1100)
    prompts = [shared[:length] + fleet.prompt(200) for length in (300, 600, 600, 1100)] + [
        fleet.prompt(tokens) for tokens in (700, 1500, 2300, 3000)
    ]
    cold = [engine.ask(ids).tokens for ids in prompts]
    fleet.forget(engine)
    vllm, daemon = engine.totals(), fleet.daemon.served()
    again = engine.generate(prompts, 16)
    assert [done.tokens for done in again] == cold
    assert [done.error for done in again] == [""] * len(prompts)
    hits = engine.totals().since(vllm)
    expected = sum((len(ids) - 1) // CHUNK * CHUNK for ids in prompts)
    assert hits.external_tokens + hits.local_tokens >= expected
    # A request that finds the first blocks of a chunk in the engine still gets the whole chunk's object.
    served = fleet.daemon.served().since(daemon)
    assert hits.external_tokens <= served.tokens < hits.external_tokens + CHUNK * len(prompts)


@pytest.mark.requirement("P4", "P10")
def test_vllm_and_the_daemon_count_the_same_hit_tokens(fleet: Fleet, engine: Engine) -> None:
    ids = fleet.prompt(3000)
    cold = fleet.ask(engine, ids)
    fleet.forget(engine)
    loaded = fleet.ask(engine, ids)
    assert (cold.external_tokens, cold.served.bytes) == (0, 0)
    assert loaded.external_tokens == loaded.served.tokens == 2816
    assert_size_is_what_the_daemon_reports(fleet, "dense")
    assert (cold.answer.prompt.connector_tokens, loaded.answer.prompt.connector_tokens) == (0, 2816)
    assert loaded.answer.completion.cached_tokens == 2816
    assert loaded.tokens == cold.tokens


@pytest.mark.requirement("C2")
@pytest.mark.parametrize(
    ("tokens", "hit"), [(CHUNK, 0), (CHUNK + 1, CHUNK), (2 * CHUNK, CHUNK), (4 * CHUNK, 3 * CHUNK)]
)
def test_the_last_prompt_token_is_always_computed(fleet: Fleet, engine: Engine, tokens: int, hit: int) -> None:
    ids = fleet.prompt(tokens)
    cold = fleet.ask(engine, ids)
    fleet.forget(engine)
    again = fleet.ask(engine, ids)
    assert again.external_tokens == again.served.tokens == hit
    assert again.tokens == cold.tokens


@pytest.mark.requirement("D4")
def test_a_full_local_hit_moves_nothing(fleet: Fleet, engine: Engine) -> None:
    ids = fleet.prompt(2000)
    cold = fleet.ask(engine, ids)
    before = fleet.daemon.settle()
    local = fleet.ask(engine, ids)
    after = fleet.daemon.settle()
    assert (local.local_tokens, local.external_tokens, local.served.bytes) == (1984, 0, 0)
    assert local.tokens == cold.tokens
    assert after.counters["granted_write_bytes"] == before.counters["granted_write_bytes"]
    assert after.tiers[0].objects == before.tiers[0].objects


@pytest.mark.requirement("C5")
@pytest.mark.parametrize("local", [BLOCK, 128, 256, 480, 640, 960])
def test_a_local_hit_is_continued_from_the_daemon(fleet: Fleet, engine: Engine, local: int) -> None:
    ids = fleet.prompt(1100)
    cold = fleet.ask(engine, ids)
    fleet.forget(engine)
    engine.ask(ids[:local], 1)
    mixed = fleet.ask(engine, ids)
    assert (mixed.local_tokens, mixed.external_tokens) == (local, 1024 - local)
    assert mixed.served.tokens == 1024 - local // CHUNK * CHUNK
    assert mixed.tokens == cold.tokens


@pytest.mark.requirement("B2")
def test_a_load_of_less_than_64_tokens_is_skipped(fleet: Fleet, engine: Engine) -> None:
    ids = fleet.prompt(600)
    cold = fleet.ask(engine, ids)
    fleet.forget(engine)
    engine.ask(ids[: 512 - BLOCK], 1)
    skipped = fleet.ask(engine, ids)
    assert (skipped.local_tokens, skipped.external_tokens, skipped.served.bytes) == (512 - BLOCK, 0, 0)
    assert skipped.tokens == cold.tokens


@pytest.mark.requirement("B1")
def test_generated_tokens_are_loaded_in_the_next_turn(fleet: Fleet, engine: Engine) -> None:
    first = fleet.prompt(300)
    answer = engine.ask(first, 520)
    second = first + list(answer.tokens) + fleet.prompt(30)
    local = engine.ask(second)
    assert local.local_tokens > 3 * CHUNK  # else the reference below would not be a hit of the engine's own
    fleet.forget(engine)
    external = fleet.ask(engine, second)
    assert external.external_tokens == external.served.tokens == 3 * CHUNK
    assert external.tokens == local.tokens


def test_control_damaged_bytes_change_the_tokens_and_i1c_a_restarted_daemon_drops_them(
    fleet: Fleet, engine: Engine
) -> None:
    ids = fleet.prompt(1500)
    before = arena_bytes.committed(fleet.daemon.arena)
    cold = fleet.ask(engine, ids)
    fleet.daemon.settle(summed=True)
    engine.reset_prefix_cache()
    stored = arena_bytes.committed(fleet.daemon.arena) - before
    assert [(one.boundary_tokens, one.kind) for one in sorted(stored)] == [
        (boundary, Kind.ATTENTION) for boundary in range(CHUNK, 1500, CHUNK)
    ]
    arena_bytes.damage(fleet.daemon.arena, next(one for one in stored if one.boundary_tokens == 3 * CHUNK))
    # RAM that never left the daemon's hands is not verified again: the damage must show, or the bytes are not used.
    damaged = fleet.ask(engine, ids)
    assert damaged.external_tokens == 1280
    assert damaged.tokens != cold.tokens

    fleet.daemon.kill()
    fleet.daemon.start()
    fleet.wait_attached()
    status = fleet.daemon.settle()
    assert status.counters["corrupt_objects"] == 1
    engine.reset_prefix_cache()
    verified = fleet.ask(engine, ids)
    assert verified.external_tokens == 2 * CHUNK
    assert verified.tokens == cold.tokens


@pytest.mark.requirement("D1")
def test_an_aborted_request_leaves_nothing_and_the_next_one_is_served(fleet: Fleet, engine: Engine) -> None:
    prompts = [fleet.prompt(2000) for _ in range(4)]
    cold = [engine.ask(ids).tokens for ids in prompts]
    fleet.forget(engine)
    for step in range(6):  # known prompts are loading, new ones computing and storing when they are aborted
        mixed = prompts + [fleet.prompt(1500) for _ in range(2)]
        names = [f"abort-{step}-{number}" for number in range(len(mixed))]
        begun = engine.begin(mixed, 64, names=names)
        engine.pause(0.02 * step)
        engine.abort(names)
        engine.finish(begun)
        fleet.forget(engine)
    status = fleet.daemon.settle()
    assert {(s.credit_used_bytes, s.leases, s.lent_objects) for s in status.sessions} == {(0, 0, 0)}
    again = [fleet.ask(engine, ids) for ids in prompts]
    assert [one.tokens for one in again] == cold
    assert [one.external_tokens for one in again] == [1792] * len(prompts)
