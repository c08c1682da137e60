"""Two ranks that hold the same bytes: MLA's latent is stored once, a KV head that both have by each (docs/adr/0033)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import pytest
import torch

from demo.engine import ROOT, Engine
from demo.toys import LATENT, ONE_HEAD
from tests.e2e import arena_bytes
from tests.e2e.asking import LOOKUP_TIMEOUT_SECONDS, ask_until_loaded, warm_up
from tests.e2e.fleet import Fleet
from tests.e2e.hybrid import digests_by_place, wrong

CHUNK = 256
RANKS = 2
LAYERS = 4
TOKEN_BYTES = {
    "latent": LAYERS * (512 + 64) * 2,  # once
    "one_head": RANKS * LAYERS * 2 * 64 * 4,  # keys and values of the head, by each rank
}
HAS_AMX = torch.cpu._is_amx_tile_supported()

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
NEEDS_AMX = pytest.mark.skipif(not HAS_AMX, reason="vLLM has no prefix caching for MLA on CPUs without AMX")
BOTH = pytest.mark.parametrize("model", [pytest.param("latent", marks=NEEDS_AMX), "one_head"])


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    toys = [ONE_HEAD, *([LATENT] if HAS_AMX else [])]
    with Fleet(tmp_path_factory.mktemp("replicated"), ROOT / "build" / "toys") as fleet:
        for toy in toys:
            fleet.define(
                toy.name,
                toy,
                {"block_size": 32, "tensor_parallel_size": RANKS},
                lookup_timeout_seconds=LOOKUP_TIMEOUT_SECONDS,
                lookup_min_seconds=LOOKUP_TIMEOUT_SECONDS,
            )
        fleet.ensure_daemon()
        fleet.launch([toy.name for toy in toys])
        for toy in toys:
            warm_up(fleet, toy.name)
        yield fleet


def store(fleet: Fleet, engine: Engine, tokens: int) -> tuple[list[int], tuple[int, ...]]:
    """A new prompt that the daemon has and the engine has not, and its tokens after a local hit at its boundary."""
    ids = fleet.prompt(tokens)
    engine.ask(ids)
    local = engine.ask(ids)
    assert local.local_tokens == tokens // CHUNK * CHUNK  # bfloat16: another boundary would round otherwise
    fleet.forget(engine)
    return ids, local.tokens


@pytest.mark.requirement("P12")
@BOTH
def test_a_load_moves_a_latent_once_and_a_head_for_each_rank(fleet: Fleet, model: str) -> None:
    engine = fleet.engine(model)
    known = fleet.audited(model)
    for chunks in (2, 5):
        ids, reference = store(fleet, engine, CHUNK * chunks + 20)
        loaded = ask_until_loaded(fleet, engine, ids)
        assert loaded.external_tokens == loaded.served.tokens == CHUNK * chunks
        assert loaded.served.bytes == CHUNK * chunks * TOKEN_BYTES[model]
        assert loaded.tokens == reference
        fleet.forget(engine)
    found = digests_by_place(fleet.audit(model, known))
    assert {place[2] for place, digests in found.items() if digests["loaded"]} == set(range(RANKS))
    assert wrong(found) == {}  # of a latent: what rank 0 stored is what rank 1 had computed
    by_block: dict[tuple[str, int], set[str]] = defaultdict(set)
    for (key, _, _, _, block), digests in found.items():
        by_block[key, block] |= digests["stored"]
    assert {len(digests) for digests in by_block.values()} == {1}, "ranks differ"


@pytest.mark.requirement("P12")
@BOTH
def test_control_damaged_bytes_change_the_tokens(fleet: Fleet, model: str) -> None:
    engine = fleet.engine(model)
    before = arena_bytes.committed(fleet.daemon.arena)
    ids, reference = store(fleet, engine, 2 * CHUNK + 20)
    for one in arena_bytes.committed(fleet.daemon.arena) - before:
        arena_bytes.damage(fleet.daemon.arena, one)
    damaged = ask_until_loaded(fleet, engine, ids)
    assert damaged.external_tokens == 2 * CHUNK
    assert damaged.tokens != reference
