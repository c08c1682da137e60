"""Engines that speculate, and what their tests compare: tokens, and what became of the drafts.

Tokens alone do not show a wrong draft layer, because the target verifies every draft. So each comparison counts the
drafts too, one request at a time. The references are the same request computed, and from the engine's own cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo.engine import Answer, Engine
from demo.toys import DENSE, GEMMA3, HYBRID, Toy
from tests.e2e.fleet import Fleet, Loaded
from tests.rigs.speculative_toys import make_eagle3, make_hybrid_mtp, make_markov

EXTENSION = "tests.e2e.speculative_worker.SpeculativeWorker"
GENERATED = 64
DRAFTS = 3
"""A step, of all engines but those of MTP that say another number."""
SOME_ACCEPTED = {"hybrid": 0.3, "dense": 0.5}
"""`alpha` of the toys: about a quarter of all drafts are accepted, and few tokens are said twice."""
MOST_ACCEPTED = 0.5
DENSE_CHUNK = 256
HYBRID_CHUNK = 384
EVERY_CHUNK = {"prefix_cache_retention_interval": HYBRID_CHUNK, "max_num_batched_tokens": HYBRID_CHUNK + 1}
"""A checkpoint at each chunk, of prompts and of generated tokens. A run that is computed, one from the engine's cache
and a load have the same last step, so their bytes are equal. One token more than a chunk: vLLM's CPU backend ends in a
last step of one computed token."""
SHORT_STEPS = {"max_num_batched_tokens": DENSE_CHUNK + 44}
"""Steps end within a chunk, and windows move on while a prompt is computed."""
CHUNKS = {
    "mtp_1": HYBRID_CHUNK,
    "mtp_2": HYBRID_CHUNK,
    "mtp_3": HYBRID_CHUNK,
    "ngram_hybrid": HYBRID_CHUNK,
    "eagle3_3": DENSE_CHUNK,
    "draft_model": DENSE_CHUNK,
    "ngram_dense": DENSE_CHUNK,
    "ngram_gemma3": DENSE_CHUNK,
}
"""An engine of each method. `other_steps` names its twin."""
COMPUTE = {"max_load_tokens": 0}
"""Params of a request that is computed, whatever the daemon has."""
NGRAM = {"method": "ngram", "num_speculative_tokens": DRAFTS, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


def define(fleet: Fleet) -> None:
    """Say how to start the engines of the tests of speculation."""
    models = fleet.models

    def engine(name: str, toy: Toy, model: Path, speculation: dict[str, Any], **arguments: Any) -> None:
        extended = {"worker_extension_cls": EXTENSION, "speculative_config": speculation} | arguments
        fleet.define(name, toy, extended, model=model)
        if name in CHUNKS:
            steps = EVERY_CHUNK if toy is HYBRID else SHORT_STEPS
            fleet.define(other_steps(name), toy, extended | steps, model=model)

    some, most = (make_hybrid_mtp(alpha, models) for alpha in (SOME_ACCEPTED["hybrid"], MOST_ACCEPTED))
    for drafts in (1, 2, 3):
        engine(f"mtp_{drafts}", HYBRID, some, _mtp(drafts))
    engine("mtp_3_most_accepted", HYBRID, most, _mtp(DRAFTS), prefix_cache_retention_interval=HYBRID_CHUNK)
    engine("ngram_hybrid", HYBRID, make_markov(HYBRID, MOST_ACCEPTED, models), NGRAM)

    dense = make_markov(DENSE, SOME_ACCEPTED["dense"], models)
    clone = {"method": "draft_model", "num_speculative_tokens": DRAFTS, "model": str(dense)}
    engine("draft_model", DENSE, dense, clone, block_size=32)
    for seed in (3, 4):
        head = make_eagle3(SOME_ACCEPTED["dense"], models, seed)
        drafter = {"method": "eagle3", "num_speculative_tokens": DRAFTS, "model": str(head)}
        engine(f"eagle3_{seed}", DENSE, dense, drafter, block_size=32)
    fleet.define("dense_markov", DENSE, {"block_size": 32, "worker_extension_cls": EXTENSION}, model=dense)
    engine("ngram_dense", DENSE, dense, NGRAM, block_size=32)
    engine("ngram_gemma3", GEMMA3, make_markov(GEMMA3, MOST_ACCEPTED, models), NGRAM, block_size=32)


def other_steps(name: str) -> str:
    """The engine like this one whose steps have another number of tokens. A hybrid's has a checkpoint at each chunk."""
    return f"{name}_every_chunk" if CHUNKS[name] == HYBRID_CHUNK else f"{name}_short_steps"


def _mtp(drafts: int) -> dict[str, Any]:
    return {"method": "mtp", "num_speculative_tokens": drafts}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What must not depend on where a prompt's KV came from."""

    tokens: tuple[int, ...]
    drafts: int
    draft_tokens: int
    accepted_tokens: int


def outcome(answer: Answer) -> Outcome:
    """Without the drafts that nobody made: vLLM pads a row with one token left to compute, and rejects them."""
    counts = answer.prompt
    padded = counts.computed_tokens == 1
    return Outcome(answer.tokens, counts.drafts - padded, counts.draft_tokens - padded * DRAFTS, counts.accepted_tokens)


@dataclass(frozen=True, slots=True)
class Runs:
    """One prompt: computed, from the engine's own cache, and from the daemon."""

    cold: Answer
    own: Answer
    loaded: Loaded

    @property
    def boundaries(self) -> tuple[int, int]:
        """Tokens that the engine's own cache and the daemon served."""
        return self.own.local_tokens, self.loaded.external_tokens

    def check(self, chunk_tokens: int) -> None:
        """The daemon serves as deep as the engine's own cache, but for less than a chunk, and nothing else differs."""
        own, external = self.boundaries
        assert external > own - chunk_tokens
        assert (self.own.external_tokens, self.loaded.local_tokens, self.loaded.served.tokens) == (0, 0, external)
        assert self.own.prompt.draft_tokens, "nothing was drafted"
        assert outcome(self.loaded.answer) == outcome(self.own)


def runs(fleet: Fleet, engine: Engine, ids: Sequence[int], max_tokens: int = GENERATED) -> Runs:
    fleet.forget(engine)
    cold = engine.ask(ids, max_tokens, COMPUTE)
    own = engine.ask(ids, max_tokens, COMPUTE)
    fleet.forget(engine)
    return Runs(cold, own, fleet.ask(engine, ids, max_tokens))


def next_turn(fleet: Fleet, ids: Sequence[int], answer: Answer) -> list[int]:
    return [*ids, *answer.tokens, *fleet.prompt(40)]
