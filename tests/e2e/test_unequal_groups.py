"""Groups of blocks of 32 and of 512 tokens, with three layers and with four, in one model (P12).

Attention and recurrent state in blocks of 16 and of 1,056 tokens cannot be had from a real engine: in align mode
vLLM gives both the same block. tests/contract/connector/test_hybrid.py has them, with vLLM's own block managers.
"""

from __future__ import annotations

from collections import Counter

import pytest
from kvdepot.core.calls import Kind

from demo.engine import Engine
from tests.e2e import arena_bytes
from tests.e2e.fleet import Fleet

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
ENGINES = ("gemma4",)
CHUNK = 512
BLOCK = {"attention": 32, "window": 512}
LAYERS = {"attention": 3, "window": 4}
TOKEN_BYTES = {"attention": 2 * 2 * 256 * 4, "window": 2 * 1 * 32 * 4}  # of a layer: keys and values, heads, ...
REACH_TOKENS = 1024  # a window of 700 in blocks of 512


@pytest.fixture
def engine(fleet: Fleet) -> Engine:
    return fleet.engine("gemma4")


def load_bytes(boundary: int, local: int = 0) -> int:
    tokens = {"attention": boundary - local, "window": boundary - max(local, boundary - REACH_TOKENS)}
    return sum(tokens[kind] * LAYERS[kind] * TOKEN_BYTES[kind] for kind in LAYERS)


@pytest.mark.requirement("P12", "D2")
def test_a_load_fills_blocks_of_both_sizes(fleet: Fleet, engine: Engine) -> None:
    ids = fleet.prompt(3000)
    cold = fleet.ask(engine, ids)
    fleet.forget(engine)
    known = fleet.audited("gemma4")
    loaded = fleet.ask(engine, ids)
    assert cold.external_tokens == 0
    assert loaded.external_tokens == loaded.served.tokens == 5 * CHUNK
    assert loaded.tokens == cold.tokens
    assert loaded.served.bytes == load_bytes(5 * CHUNK)
    fleet.forget(engine)
    tokens: Counter[str] = Counter()
    groups = set()
    for line in fleet.audit("gemma4", known):
        assert line["event"] == "loaded"
        groups.add(line["group"])
        tokens[line["kind"]] += len(line["blocks"]) * BLOCK[line["kind"]]
    assert len(groups) == 2
    assert tokens == {"attention": 5 * CHUNK, "window": REACH_TOKENS}


@pytest.mark.requirement("P12", "C5")
@pytest.mark.parametrize("local", [CHUNK, 2 * CHUNK, 3 * CHUNK])
def test_a_local_hit_is_continued_from_the_daemon(fleet: Fleet, engine: Engine, local: int) -> None:
    ids = fleet.prompt(4 * CHUNK + 40)
    cold = fleet.ask(engine, ids)
    fleet.forget(engine)
    engine.ask(ids[: local + 1], 1)
    mixed = fleet.ask(engine, ids)
    assert (mixed.local_tokens, mixed.external_tokens) == (local, 4 * CHUNK - local)
    assert mixed.served.bytes == load_bytes(4 * CHUNK, local)
    assert mixed.tokens == cold.tokens


@pytest.mark.requirement("P12")
@pytest.mark.parametrize("kind", [Kind.ATTENTION, Kind.WINDOW])
def test_control_damage_in_either_group_changes_the_tokens(fleet: Fleet, engine: Engine, kind: Kind) -> None:
    ids = fleet.prompt(2 * CHUNK + 40)
    before = arena_bytes.committed(fleet.daemon.arena)
    cold = fleet.ask(engine, ids)
    fleet.daemon.settle(summed=True)
    engine.reset_prefix_cache()
    stored = arena_bytes.committed(fleet.daemon.arena) - before
    assert {(one.boundary_tokens, one.kind) for one in stored} == {
        (chunk * CHUNK, kind) for chunk in (1, 2) for kind in (Kind.ATTENTION, Kind.WINDOW)
    }
    arena_bytes.damage(fleet.daemon.arena, max(one for one in stored if one.kind is kind))
    damaged = fleet.ask(engine, ids)
    assert damaged.external_tokens == 2 * CHUNK
    assert damaged.tokens != cold.tokens


@pytest.mark.requirement("P12", "P3")
def test_an_engine_that_was_restarted_loads_what_it_stored(fleet: Fleet, engine: Engine) -> None:
    ids = fleet.prompt(3 * CHUNK + 40)
    cold = engine.ask(ids)
    fleet.settle()
    loaded = fleet.ask(fleet.restart("gemma4"), ids)
    assert (loaded.external_tokens, loaded.tokens) == (3 * CHUNK, cold.tokens), fleet.told()
    assert loaded.served.bytes == load_bytes(3 * CHUNK)
