"""Every method of speculation that is served: ten of ten, across restarts, engines, splits and lengths."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from demo.toys import prompt
from tests.e2e.fleet import Fleet
from tests.e2e.speculation import (
    CHUNKS,
    COMPUTE,
    DENSE_CHUNK,
    DRAFTS,
    GENERATED,
    HYBRID_CHUNK,
    next_turn,
    other_steps,
    outcome,
    runs,
)

pytestmark = pytest.mark.long
LENGTHS = (780, 900, 1000, 1160, 1200, 1500, 1540, 1700, 1930, 2000)


@pytest.fixture(scope="module", params=CHUNKS)
def name(request: pytest.FixtureRequest, fleet: Fleet) -> Iterator[str]:
    """Each method's engine. Tests of one method run together, because all engines at once take 13 GB."""
    name: str = request.param
    yield name
    fleet.end(name)
    fleet.end(other_steps(name))


@pytest.mark.requirement("C6", "C7", "P4")
@pytest.mark.long(seconds=120)
@pytest.mark.timeout(900)
def test_ten_of_ten_and_after_a_restart(fleet: Fleet, name: str) -> None:
    chunk, engine = CHUNKS[name], fleet.engine(name)
    prompts = [fleet.prompt(tokens) for tokens in LENGTHS]
    before = [runs(fleet, engine, ids) for ids in prompts]
    for one in before:
        one.check(chunk)
        assert one.cold.tokens == one.own.tokens
    engine = fleet.restart(name, kill=True)
    for ids, one in zip(prompts, before, strict=True):
        loaded = fleet.ask(engine, ids, GENERATED)
        assert loaded.external_tokens == one.loaded.external_tokens
        assert outcome(loaded.answer) == outcome(one.own)
    for ids, one in zip(prompts, before, strict=True):
        runs(fleet, engine, next_turn(fleet, ids, one.own)).check(chunk)


@pytest.mark.requirement("C6", "C7", "P4")
@pytest.mark.long(seconds=60)
@pytest.mark.parametrize("back", [False, True], ids=["there", "back"])
def test_an_engine_with_other_steps_loads_what_another_stored(fleet: Fleet, name: str, back: bool) -> None:
    chunk = CHUNKS[name]
    writer, reader = (other_steps(name), name) if back else (name, other_steps(name))
    # The same ones in each run: other steps round a hybrid's states in another way, which may change a token.
    prompts = [prompt(tokens, f"speculative-steps-{writer}-{tokens}") for tokens in LENGTHS]
    stored = [runs(fleet, fleet.engine(writer), ids) for ids in prompts]
    engine = fleet.engine(reader)
    for ids, one in zip(prompts, stored, strict=True):
        fleet.forget(engine)
        loaded = fleet.ask(engine, ids, GENERATED)
        assert loaded.external_tokens >= one.own.local_tokens - chunk, fleet.told(1)
        assert loaded.external_tokens == loaded.served.tokens > 0, fleet.told(1)
        assert outcome(loaded.answer) == outcome(one.own)


@pytest.mark.requirement("C5", "C6", "P4")
def test_every_split_of_local_and_external(fleet: Fleet, name: str) -> None:
    chunk = CHUNKS[name]
    engine = fleet.engine(other_steps(name))
    deep = fleet.prompt(4 * chunk + 25)
    whole = runs(fleet, engine, deep)
    whole.check(chunk)
    for split in range(1, 4):
        fleet.forget(engine)
        engine.ask(deep[: split * chunk + 5], 1, COMPUTE)
        mixed = fleet.ask(engine, deep, GENERATED)
        assert mixed.local_tokens + mixed.external_tokens == 4 * chunk
        assert outcome(mixed.answer) == outcome(whole.own)


@pytest.mark.requirement("C2", "C6", "C7", "P4")
@pytest.mark.long(seconds=60)
def test_twenty_lengths_around_a_boundary(fleet: Fleet, name: str) -> None:
    chunk, recurrent = CHUNKS[name], CHUNKS[name] == HYBRID_CHUNK
    engine = fleet.engine(other_steps(name) if recurrent else name)
    deep = fleet.prompt(4 * chunk + 20)
    engine.ask(deep, 1)
    lengths = set(range(3 * chunk - 8, 3 * chunk + 12))
    if name == "ngram_hybrid":  # vLLM's CPU backend ends in a step that computes one token of a prompt
        lengths ^= {3 * chunk + 1, 3 * chunk + 12}
    for tokens in sorted(lengths):
        one = runs(fleet, engine, deep[:tokens], 24)
        one.check(chunk)
        # One token left to compute of a recurrent model would be padded with drafts that nobody made.
        assert one.loaded.external_tokens == (tokens - 1 - recurrent) // chunk * chunk
        assert outcome(one.loaded.answer) == outcome(one.cold)


@pytest.mark.requirement("C6")
@pytest.mark.parametrize(
    ("name", "chunk", "found"),
    [
        ("mtp_3_every_chunk", HYBRID_CHUNK, 1),
        ("eagle3_3", DENSE_CHUNK, 1),
        ("draft_model", DENSE_CHUNK, 2),
        ("ngram_dense", DENSE_CHUNK, 2),
    ],
)
def test_only_draft_layers_that_look_ahead_tell_prompts_by_the_token_after_a_boundary(
    fleet: Fleet, name: str, chunk: int, found: int
) -> None:
    engine = fleet.engine(name)
    ids = fleet.prompt(3 * chunk + 20)
    engine.ask(ids, 1)
    fleet.forget(engine)
    assert fleet.ask(engine, ids, 1).external_tokens == 3 * chunk
    other = list(ids)
    other[2 * chunk] ^= 1
    fleet.forget(engine)
    loaded = fleet.ask(engine, other)
    assert loaded.external_tokens == found * chunk
    fleet.forget(engine)
    assert engine.ask(other, params=COMPUTE).tokens == loaded.tokens


@pytest.mark.requirement("C6")
def test_engines_share_what_does_not_depend_on_their_drafters(fleet: Fleet) -> None:
    ids = fleet.prompt(700)
    cold = fleet.engine("dense_markov").ask(ids).tokens
    fleet.settle()
    for name, external in (("ngram_dense", 512), ("draft_model", 0), ("eagle3_3", 0), ("eagle3_4", 0)):
        loaded = fleet.ask(fleet.engine(name), ids)
        assert (loaded.external_tokens, loaded.tokens) == (external, cold), name
        fleet.settle()
        fleet.end(name)
    loaded = fleet.ask(fleet.engine("dense_markov"), ids)
    assert (loaded.external_tokens, loaded.tokens) == (512, cold)


@pytest.mark.requirement("C6", "P4")
def test_concurrent_requests_get_the_tokens_of_a_computed_run(fleet: Fleet) -> None:
    engine = fleet.engine("draft_model")
    shared = fleet.prompt(2 * DENSE_CHUNK)
    prompts = [shared + fleet.prompt(tokens) for tokens in (1, 2, 40, 300)] + [fleet.prompt(1100), fleet.prompt(600)]
    cold = [engine.ask(ids, GENERATED).tokens for ids in prompts]
    fleet.forget(engine)
    before = engine.totals()
    again = engine.generate(prompts, GENERATED)
    assert [(done.error, done.tokens) for done in again] == [("", tokens) for tokens in cold]
    counts = engine.totals().since(before)
    assert counts.external_tokens + counts.local_tokens >= 4 * 2 * DENSE_CHUNK + 1024 + 512
    assert 0 < counts.draft_tokens - DRAFTS <= counts.accepted_tokens  # one prompt has one token left to compute
