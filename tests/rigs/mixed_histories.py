"""One random history of two engines with requests of several voices (tests/fakes/mixed_engine.py)."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
from kvdepot.client.vllm.scheduling import sides

from tests.fakes.call_orders import ORDERS
from tests.fakes.direct_session import DirectDepot
from tests.fakes.mixed_engine import MixedEngine, voices
from tests.fakes.scripted_engine import BLOCK, ScriptedEngine, model_folder
from tests.rigs.byte_audit import ByteWatch, note_owners
from tests.rigs.connector_histories import LIVE_MAX, act, sleep
from tests.rigs.connector_rig import evict
from tests.rigs.turns import run_turns

STEPS = 200
GENERATED_MAX = 16
"""So that there are many requests: most of them start, load and end within few steps."""
MODELS: dict[str, dict[str, Any]] = {
    "dense": {"blocks": 36},
    "windows": {"windows": (40,), "blocks": 70},
    "hybrid": {"hybrid": True, "blocks": 100},
}


def draw_engine(random: Random, model: str, *, priorities: bool) -> dict[str, Any]:
    """Options of an engine, of which the same ones give engines that share."""
    order: tuple[str, ...] = ORDERS[random.choice(list(ORDERS))]
    options: dict[str, Any] = {"order": order, "runs_ahead": random.random() < 0.5}
    options |= {"ranks": random.randint(1, 2)} | MODELS[model]
    if model == "hybrid":
        block = random.choice((BLOCK, BLOCK, 2 * BLOCK))
        return options | {"state_block": block, "retention": block}
    if priorities:  # for whom others are preempted
        options["blocks"] = options["blocks"] * 2 // 3
    return options | {"settings": {"chunk_tokens": random.choice((BLOCK, 2 * BLOCK, 4 * BLOCK))}}


def run_mixed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, random: Random, *, model: str, priorities: bool
) -> list[ByteWatch]:
    """Run it until both engines have stored, and loads were of several voices. Return the watches."""
    monkeypatch.setattr(sides, "cache_path", lambda: folder / "digests.json")
    depot, options, choices = DirectDepot(), draw_engine(random, model, priorities=priorities), voices(random)
    owners, model_at = note_owners(monkeypatch), model_folder(folder / "model")
    watches: list[ByteWatch] = []

    def begin() -> ByteWatch:
        engine = MixedEngine(
            depot, model_at, monkeypatch, random=random, choices=choices, adapters=folder, priorities=priorities,
            step_tokens=random.choice((40, 48, 64, 70, 128)), **options,
        )  # fmt: skip
        watches.append(ByteWatch(engine, owners, Random(random.random())))
        return watches[-1]

    def act_mixed(engine: ScriptedEngine, depot: DirectDepot, random: Random, live: list[str], *rest: Any) -> None:
        match random.randrange(32):
            case 0 if not depot.lent():
                depot.restart()
            case 1:
                evict(engine, random.randint(1, 6))
            case 2:
                _watch_of(watches, engine).failing = random.choice((0.5, 1.0))
            case 3 if random.random() < 0.2:
                sleep(engine)
            case 4 | 5 if len(live) > 1:
                _watch_of(watches, engine).squeeze(random.choice((1, 2, 4)), random.randint(1, 8))
            case 6 | 7 | 8 | 9:
                _watch_of(watches, engine).failing = 0.0
            case number if number < 18 and len(live) < LIVE_MAX:
                prompt, generated_max = rest
                live.append(engine.add(prompt(random), random.randint(1, generated_max)))
            case _:
                act(engine, depot, random, live, *rest)

    def enough(watch: ByteWatch) -> bool:
        return watch.stored > 0 and len({voice for each in watches for voice in each.loaded}) > 1

    return run_turns(begin, depot, random, acts=act_mixed, enough=enough, steps=STEPS, generated_max=GENERATED_MAX)


def _watch_of(watches: list[ByteWatch], engine: ScriptedEngine) -> ByteWatch:
    return next(watch for watch in watches if watch.engine is engine)
