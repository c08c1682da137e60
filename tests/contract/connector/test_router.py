"""KV events, as a public router decodes and indexes them: Dynamo's, fed by vLLM's own publisher over a socket.

A parent hash, block size, group, kind of cache, medium or locality that the router does not understand shows as blocks
that it does not have. So does an event that it cannot decode.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from kvdepot.client.vllm.scheduling import tier_checks
from kvdepot.core.calls import FindTiersCall, FindTiersReply, Nearest
from kvdepot.server.depot.depot import Depot
from vllm.distributed.kv_events import BlockStored
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.request import Request

from tests.fakes.scripted_engine import BLOCK, ScriptedEngine
from tests.rigs.connector_rig import Make, cold, evict, prompt
from tests.rigs.dynamo_router import NEEDS_ROUTER, Blocks, DynamoRouter
from tests.rigs.patience import wait_until

pytestmark = NEEDS_ROUTER
NOTHING = Blocks(0, 0, 0)
_PLACES = {"R": Nearest.RAM, "B": Nearest.BELOW_RAM, "A": Nearest.ABSENT}


@pytest.fixture
def router() -> Iterator[DynamoRouter]:
    router = DynamoRouter()
    yield router
    router.close()


def lose_everything(engine: ScriptedEngine) -> None:
    """Let the daemon evict all, and have no room for it again."""
    depot = engine.depot.engine
    evict(engine)
    depot.configure(replace(depot._config, credit_bytes=1), {})


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"settings": {"chunk_tokens": 2 * BLOCK}},
        {"latent": True},
        {"windows": (2 * BLOCK,), "settings": {"chunk_tokens": BLOCK}, "blocks": 128},
        {"hybrid": True, "retention": BLOCK, "step_tokens": BLOCK},
    ],
    ids=["dense", "chunks of two blocks", "latent", "windows", "hybrid"],
)
def test_the_router_knows_what_the_daemon_has_and_forgets_what_it_has_lost(
    make: Make, router: DynamoRouter, options: dict[str, Any]
) -> None:
    engine = make(events=True, **options)
    router.follow(engine, outside_only=True)
    tokens, other = prompt(6.5), prompt(6.5, seed=1)
    engine.generate(tokens)
    router.wait(Blocks(0, 6, 0), tokens)
    assert router.blocks(tokens[: 3 * BLOCK]) == (0, 3, 0)
    assert router.blocks([*tokens[: 2 * BLOCK], *other]) == (0, 2, 0), "the same prefix"
    assert router.blocks(other) == NOTHING
    engine.reset()
    lose_everything(engine)
    assert engine.generate(tokens) == cold(tokens)
    router.wait(NOTHING, tokens)


def test_the_daemons_blocks_outlive_those_of_the_engine(make: Make, router: DynamoRouter) -> None:
    """The same hashes, on two media: the engine reuses its blocks for another prompt."""
    engine = make(events=True, blocks=12)
    router.follow(engine)
    tokens = prompt(6.5)
    engine.generate(tokens)
    router.wait(Blocks(6, 0, 0), tokens)
    engine.generate(prompt(10.5, seed=1))
    router.wait(Blocks(0, 6, 0), tokens)
    assert engine.generate(tokens) == cold(tokens)
    assert engine.side.counters["loaded_tokens"] == 6 * BLOCK, "the router was right"
    router.wait(Blocks(6, 0, 0), tokens)


def test_the_daemons_blocks_outlive_a_reset_of_the_engines_cache(make: Make, router: DynamoRouter) -> None:
    """The event of a reset makes the router forget all blocks of the engine, also those of the daemon."""
    engine = make(events=True)
    router.follow(engine)
    tokens = prompt(6.5)
    engine.generate(tokens)
    router.wait(Blocks(6, 0, 0), tokens)
    engine.reset()
    engine.generate(prompt(0.5, seed=1))  # too short to be stored: it makes the engine step
    router.wait(Blocks(0, 6, 0), tokens)


def test_the_router_follows_what_the_daemon_moves_and_loses(
    make: Make, router: DynamoRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the end of a prompt is in RAM and its beginning is not: this router never goes back to RAM."""
    monkeypatch.setattr(tier_checks, "ROUND_SECONDS", 0.0)
    engine = make(events=True)
    router.follow(engine, outside_only=True)
    tokens = prompt(6.5)
    engine.generate(tokens)
    router.wait(Blocks(0, 6, 0), tokens)
    order = sorted(engine.side.events.announced.items(), key=lambda one: one[1].blocks.number)
    for places, expected in (
        ("RRRRBB", Blocks(0, 4, 2)),
        ("BRRRBB", Blocks(0, 0, 6)),
        ("RRRRRB", Blocks(0, 5, 1)),
        ("RRRAAA", Blocks(0, 3, 0)),
    ):
        tiers = {key: _PLACES[place] for (key, _), place in zip(order, places, strict=True)}
        monkeypatch.setattr(Depot, "find_tiers", partial(_find_tiers, tiers))
        engine.generate(prompt(0.5, seed=1))
        router.wait(expected, tokens)


def _find_tiers(tiers: dict[bytes, Nearest], call: FindTiersCall) -> FindTiersReply:
    return FindTiersReply(bytes(tiers[call.keys[at : at + 16]] for at in range(0, len(call.keys), 16)))


def test_a_request_goes_to_the_engine_that_can_load_its_prompt(make: Make, router: DynamoRouter) -> None:
    first, second = (make(events=True) for _ in range(2))
    workers = [router.follow(engine, outside_only=True) for engine in (first, second)]
    tokens, other = prompt(6.5), prompt(6.5, seed=1)
    first.generate(tokens)
    second.generate(other)
    router.wait(Blocks(0, 6, 0), tokens, workers[0])
    router.wait(Blocks(0, 6, 0), other, workers[1])
    assert [router.select(tokens), router.select(other)] == workers
    first.reset()
    assert first.generate(other) == cold(other)
    router.wait(Blocks(0, 6, 0), other, workers[0])


def test_a_prompt_with_an_adapter_is_known_by_the_adapters_name(
    make: Make, router: DynamoRouter, tmp_path: Path
) -> None:
    """Dynamo takes the name out of the extra keys."""
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "weights").write_bytes(b"content")
    engine = make(events=True)
    engine.scheduler.lora_config = None  # how many at once is not the point
    router.follow(engine, outside_only=True)
    tokens, adapter = prompt(6.5), LoRARequest("adapter", 1, str(folder))
    wait_until(lambda: engine.side._adapters.salt(adapter) is not None, "the adapter's files are read")
    engine.add(tokens, lora_request=adapter)
    engine.run()
    router.wait(Blocks(0, 6, 0), tokens, lora_name="adapter")
    assert router.blocks(tokens) == NOTHING
    assert router.blocks(tokens, lora_name="another") == NOTHING


def test_a_prompt_with_a_salt_is_known_by_the_salt(make: Make, router: DynamoRouter) -> None:
    """Only the first block's extra keys have it: the others follow by their parents. Dynamo marks salts of its own."""
    engine = make(events=True)
    router.follow(engine, outside_only=True)
    tokens = prompt(6.5)
    engine.add(tokens, cache_salt="dynamo-cache-salt:tenant")
    engine.run()
    router.wait(Blocks(0, 6, 0), tokens, cache_salt="tenant")
    assert router.blocks(tokens) == NOTHING
    assert router.blocks(tokens, cache_salt="another") == NOTHING


def test_a_prompt_with_a_picture_is_decoded(make: Make, router: DynamoRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a model's token for pictures, which is not set here, this router does not tell one from another."""
    engine = make(events=True)
    router.follow(engine, outside_only=True)
    tokens, digest = prompt(6.5), "0123456789abcdef" * 4
    monkeypatch.setattr(Request, "num_encoder_inputs", 0)  # this engine has no encoder
    engine.add(tokens, mm_features=[MultiModalFeatureSpec(None, "image", digest, PlaceholderRange(BLOCK, BLOCK))])
    engine.run()
    router.wait(Blocks(0, 6, 0), tokens)
    stored = [event for event in router.events() if isinstance(event, BlockStored)]
    assert [event.extra_keys for event in stored][:3] == [[None], [((digest, 0),)], [None]]


@pytest.mark.parametrize(
    ("changes", "known"),
    [
        ({"medium": "cpu"}, 0),
        ({"locality": "REMOTE"}, 0),
        ({"ownership": "kvdepot"}, 0),
        ({"kv_cache_spec_kind": "sliding_window"}, 0),
        ({"block_size": 2 * BLOCK}, 0),
        ({"token_ids": []}, 0),
        ({"parent_block_hash": None}, 1),
    ],
    ids=str,
)
def test_control_the_router_does_not_know_blocks_of_another_event(
    make: Make, router: DynamoRouter, changes: dict[str, Any], known: int
) -> None:
    engine = make(events=True)
    worker = router.follow(engine, outside_only=True, changes=changes)
    tokens = prompt(6.5)
    engine.generate(tokens)
    assert len(router.events()) == 6
    router.catch_up(worker)
    assert router.blocks(tokens) == (0, known, 0)
