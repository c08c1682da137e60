"""Two daemons as children of `WeightedMultiConnector`: all tokens right, and each does without the other (row P9)."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from demo.daemon import Daemon
from demo.engine import ROOT, Engine, EngineOptions, depot_connector
from demo.scenarios import await_lookups
from demo.toys import DENSE, HYBRID, make_toy, prompt
from tests.e2e.fleet import CONFIGURATION, LOOKUP_TIMEOUT_SECONDS
from tests.rigs.patience import patience

TOYS = {"dense": (DENSE, {"block_size": 32}, 256), "hybrid": (HYBRID, {}, 384)}
PROMPTS = 4
TOKENS = 1300

pytestmark = [pytest.mark.long(seconds=75), pytest.mark.timeout(900)]


@dataclass
class Combined:
    """One engine, and what it combines."""

    engine: Engine
    light: Daemon
    heavy: Daemon
    chunk_tokens: int

    @property
    def boundary(self) -> int:
        return (TOKENS - 1) // self.chunk_tokens * self.chunk_tokens

    def forget(self, *daemons: Daemon) -> None:
        """Empty the engine's own cache once these have everything."""
        for daemon in daemons:
            daemon.settle()
        self.engine.reset_prefix_cache()

    def ask(self, ids: list[int], *daemons: Daemon) -> tuple[tuple[int, ...], list[int]]:
        """The tokens of a prompt of which all comes from these daemons, and how much from each."""
        before = [daemon.served() for daemon in daemons]
        answer = self.engine.ask(ids)
        given = [daemon.served().since(one).tokens for daemon, one in zip(daemons, before, strict=True)]
        assert sum(given) == answer.external_tokens == self.boundary
        return answer.tokens, given


@pytest.fixture(params=list(TOYS))
def combined(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Combined]:
    toy, arguments, chunk_tokens = TOYS[request.param]
    with ExitStack() as stack:
        light, heavy = (stack.enter_context(Daemon(CONFIGURATION, patience)) for _ in range(2))
        children = [
            depot_connector(
                daemon.endpoint,
                lookup_timeout_seconds=LOOKUP_TIMEOUT_SECONDS,
                lookup_min_seconds=LOOKUP_TIMEOUT_SECONDS,
                load_weight=weight,
            )
            for daemon, weight in ((light, 1.0), (heavy, 3.0))
        ]
        connector = {
            "kv_connector": "WeightedMultiConnector",
            "kv_connector_module_path": "kvdepot.client.vllm.weighted",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"connectors": children},
        }
        options = EngineOptions(toy, make_toy(toy, ROOT / "build" / "toys"), connector, arguments)
        engine = stack.enter_context(Engine(options, tmp_path / "engine.log"))
        for daemon in (light, heavy):
            daemon.wait_attached(1)
            await_lookups(engine, daemon)
        yield Combined(engine, light, heavy, chunk_tokens)


@pytest.mark.requirement("P9")
def test_two_daemons_in_one_engine(combined: Combined) -> None:
    engine, light, heavy = combined.engine, combined.light, combined.heavy
    prompts = [prompt(TOKENS, f"weighted-{number}") for number in range(PROMPTS)]
    for ids in prompts:
        engine.ask(ids)
    reference = [engine.ask(ids).tokens for ids in prompts]  # of hits in the engine's own cache
    combined.forget(light, heavy)
    assert light.status().tiers[0].objects == heavy.status().tiers[0].objects > 0, "both were given everything"

    # Either may have answered first. What it gives is right, and nobody computes.
    assert [combined.ask(ids, light, heavy)[0] for ids in prompts] == reference

    combined.forget(light, heavy)
    heavy.signal(signal.SIGSTOP)
    try:
        assert [combined.ask(ids, light)[0] for ids in prompts] == reference, "one that says nothing blocks nobody"
    finally:
        heavy.signal(signal.SIGCONT)

    combined.forget(light, heavy)
    light.kill()
    assert [combined.ask(ids, heavy)[0] for ids in prompts] == reference, "one that died takes nothing along"
