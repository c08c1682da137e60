"""Sliding windows on real engines: only what a window reaches is moved, and every byte of it is predicted."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
from kvdepot.core.calls import Kind

from demo.engine import Engine
from tests.e2e import arena_bytes
from tests.e2e.fleet import Fleet
from tests.e2e.sizing import assert_size_is_what_the_daemon_reports

pytestmark = pytest.mark.long
ENGINES = ("gemma3", "gpt_oss", "mistral")
CHUNK = 256
BLOCK = 32
TOKEN_BYTES = 2 * 2 * 64 * 4  # of one layer: keys and values, heads, dimensions, float32


@dataclass(frozen=True, slots=True)
class Model:
    """Layers of a toy, and how its windows reach back from a boundary."""

    full_layers: int
    window_layers: int
    window_tokens: int

    @property
    def reach_tokens(self) -> int:
        """A token sees the window - 1 before it; vLLM keeps whole blocks."""
        return -(-(self.window_tokens - 1) // BLOCK) * BLOCK

    def load_bytes(self, boundary: int, local: int = 0) -> int:
        """What the objects of a load have: all attention from the first chunk that is missing, and the window's."""
        attention = boundary - local // CHUNK * CHUNK
        window = boundary - max(local, boundary - self.reach_tokens) // CHUNK * CHUNK
        return (self.full_layers * attention + self.window_layers * window) * TOKEN_BYTES

    def all_full_bytes(self, boundary: int) -> int:
        return (self.full_layers + self.window_layers) * boundary * TOKEN_BYTES


MODELS = {"gemma3": Model(1, 5, 512), "gpt_oss": Model(2, 2, 256), "mistral": Model(0, 4, 500)}
EVERY_MODEL = pytest.mark.parametrize("name", ENGINES)


@pytest.fixture
def engine(fleet: Fleet, name: str) -> Engine:
    return fleet.engine(name)


@pytest.mark.requirement("D1", "D2", "D3")
@EVERY_MODEL
def test_a_load_moves_what_the_geometry_predicts(fleet: Fleet, engine: Engine, name: str) -> None:
    model = MODELS[name]
    ids = fleet.prompt(3000)
    cold = fleet.ask(engine, ids)
    fleet.forget(engine)
    known = fleet.audited(name)
    loaded = fleet.ask(engine, ids)
    assert (cold.external_tokens, cold.served.bytes) == (0, 0)
    assert loaded.external_tokens == loaded.answer.completion.cached_tokens == 2816
    assert loaded.tokens == cold.tokens
    assert loaded.served.bytes == model.load_bytes(2816)
    assert_size_is_what_the_daemon_reports(fleet, name)
    if model.full_layers:
        assert loaded.served.tokens == 2816
    share = (model.full_layers * 2816 + model.window_layers * model.reach_tokens) / (
        (model.full_layers + model.window_layers) * 2816
    )
    assert loaded.served.bytes / model.all_full_bytes(2816) == share < 0.6

    fleet.forget(engine)
    blocks: Counter[tuple[str, int]] = Counter()
    for line in fleet.audit(name, known):
        assert line["event"] == "loaded"
        blocks[line["kind"], line["group"]] += len(line["blocks"])
    # Windows are a kind of their own only while the hybrid allocator is on.
    assert {kind for kind, _ in blocks} == ({"attention", "window"} if model.full_layers else {"window"})
    for (kind, _), count in blocks.items():
        assert count * BLOCK == (2816 if kind == "attention" else model.reach_tokens)


@pytest.mark.requirement("D2")
@EVERY_MODEL
def test_nothing_outside_the_windows_is_read_and_damage_inside_shows(fleet: Fleet, engine: Engine, name: str) -> None:
    ids = fleet.prompt(1800)
    before = arena_bytes.committed(fleet.daemon.arena)
    cold = fleet.ask(engine, ids)
    fleet.daemon.settle(summed=True)
    engine.reset_prefix_cache()
    stored = sorted(arena_bytes.committed(fleet.daemon.arena) - before)
    windows = [one for one in stored if one.kind is Kind.WINDOW]
    boundaries = set(range(CHUNK, 1800, CHUNK))
    if name == "gpt_oss":  # between the ends of steps vLLM reuses what left the window before it is copied
        boundaries &= {one.boundary_tokens for one in windows} | set(range(512, 1800, 512)) | {1792}
    assert {one.boundary_tokens for one in windows} == boundaries
    reached = -(-MODELS[name].reach_tokens // CHUNK)
    for one in windows[:-reached]:
        arena_bytes.damage(fleet.daemon.arena, one)
    loaded = fleet.ask(engine, ids)
    assert (loaded.external_tokens, loaded.tokens) == (1792, cold.tokens)
    fleet.forget(engine)
    arena_bytes.damage(fleet.daemon.arena, windows[-1])
    # RAM that never left the daemon's hands is not verified again: the damage must show, or the bytes are not used.
    damaged = fleet.ask(engine, ids)
    assert damaged.external_tokens == 1792
    assert damaged.tokens != cold.tokens


@pytest.mark.requirement("D4")
@EVERY_MODEL
def test_a_full_local_hit_moves_nothing(fleet: Fleet, engine: Engine) -> None:
    ids = fleet.prompt(2000)
    cold = fleet.ask(engine, ids)
    before = fleet.daemon.settle()
    local = fleet.ask(engine, ids)
    after = fleet.daemon.settle()
    assert (local.local_tokens, local.external_tokens, local.served.bytes) == (1984, 0, 0)
    assert local.tokens == cold.tokens
    assert after.counters["granted_write_bytes"] == before.counters["granted_write_bytes"]


@pytest.mark.requirement("C5")
@EVERY_MODEL
@pytest.mark.parametrize("local", [96, 512, 928])
def test_a_local_hit_is_continued_from_the_daemon(fleet: Fleet, engine: Engine, name: str, local: int) -> None:
    ids = fleet.prompt(1100)
    cold = fleet.ask(engine, ids)
    fleet.forget(engine)
    engine.ask(ids[: local + 1], 1)
    mixed = fleet.ask(engine, ids)
    assert (mixed.local_tokens, mixed.external_tokens) == (local, 1024 - local)
    assert mixed.served.bytes == MODELS[name].load_bytes(1024, local)
    assert mixed.tokens == cold.tokens


@pytest.mark.requirement("P4")
def test_concurrent_requests_get_equal_tokens_from_the_daemon(fleet: Fleet) -> None:
    engine = fleet.engine("gemma3")
    shared = fleet.prompt(1100)
    prompts = [shared[:length] + fleet.prompt(200) for length in (300, 600, 600, 1100)] + [
        fleet.prompt(tokens) for tokens in (700, 1500, 2300, 3000)
    ]
    cold = [engine.ask(ids).tokens for ids in prompts]
    fleet.forget(engine)
    before = engine.totals()
    again = engine.generate(prompts, 16)
    assert [(done.error, done.tokens) for done in again] == [("", tokens) for tokens in cold]
    hits = engine.totals().since(before)
    assert hits.external_tokens + hits.local_tokens >= sum((len(ids) - 1) // CHUNK * CHUNK for ids in prompts)


@pytest.mark.requirement("P4")
@pytest.mark.long(seconds=100)
def test_engines_that_were_restarted_load_what_they_stored(fleet: Fleet) -> None:
    prompts = {name: fleet.prompt(2100) for name in ENGINES}
    cold = {name: fleet.engine(name).ask(prompts[name]).tokens for name in ENGINES}
    fleet.settle()
    for name in ENGINES:
        fleet.end(name)
    fleet.launch(ENGINES, fresh=True)
    for name in ENGINES:
        loaded = fleet.ask(fleet.engine(name), prompts[name])
        assert (loaded.external_tokens, loaded.tokens) == (2048, cold[name])
        assert loaded.served.bytes == MODELS[name].load_bytes(2048)


@pytest.mark.requirement("B1")
@EVERY_MODEL
def test_generated_tokens_are_loaded_in_the_next_turn(fleet: Fleet, engine: Engine, name: str) -> None:
    first = fleet.prompt(300)
    second = first + list(engine.ask(first, 520).tokens) + fleet.prompt(30)
    fleet.forget(engine)
    external = fleet.ask(engine, second)
    assert external.external_tokens == 3 * CHUNK
    assert external.served.bytes == MODELS[name].load_bytes(3 * CHUNK)
    fleet.forget(engine)
    engine.reset_connector()  # a new epoch, in which nothing is stored yet: this engine's last test
    recomputed = fleet.ask(engine, second)
    assert (recomputed.external_tokens, recomputed.tokens) == (0, external.tokens)
