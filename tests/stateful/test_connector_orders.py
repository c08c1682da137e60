"""The real connector in every runner's call order, with vLLM's real schedulers, over the daemon's real engine.

Random admissions, aborts, preemptions, resets, sleeps, repeated handshakes, empty steps, held and lost replies, an
absent daemon, and ranks' messages that come twice, late and out of order. In every step the forward checks each byte
that it reads (tests/fakes/scripted_engine.py).
"""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from kvdepot.client.vllm.scheduling import sides

from tests.fakes.call_orders import ORDERS
from tests.fakes.direct_session import DirectDepot
from tests.fakes.late_words import LateWords
from tests.fakes.scripted_engine import BLOCK, ScriptedEngine, model_folder
from tests.rigs.connector_histories import Watch, act, check_answers
from tests.rigs.seeds import drawn, steps_until

STEPS = 220
"""For those that load nothing for long: what was stored before a change of weights is of no use behind it."""


@pytest.mark.requirement("I1", "I3", "I5", "I6")
@pytest.mark.timeout(300)  # on a busy machine
@pytest.mark.parametrize("seed", [*drawn([0]), *drawn([1, 2], [pytest.mark.long(seconds=2)])])
@pytest.mark.parametrize("hybrid", [False, True], ids=["dense", "hybrid"])
@pytest.mark.parametrize("runs_ahead", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("order", ORDERS)
def test_random_requests_in_every_call_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: str, runs_ahead: bool, hybrid: bool, seed: int
) -> None:
    random, depot = Random(f"{order} {runs_ahead} {hybrid} {seed}"), DirectDepot()
    monkeypatch.setattr(sides, "cache_path", lambda: tmp_path / "digests.json")
    engine = ScriptedEngine(
        depot, model_folder(tmp_path / "model"), monkeypatch, order=ORDERS[order], runs_ahead=runs_ahead, hybrid=hybrid,
        blocks=60 if hybrid else 28, retention=BLOCK if hybrid else None, ranks=random.randint(1, 2), step_tokens=64,
    )  # fmt: skip
    watch, live = Watch(engine), list[str]()
    engine.deliver = words = LateWords(random)
    for _ in steps_until(lambda: watch.stored and watch.allocated.total(), STEPS):
        act(engine, depot, random, live)
        watch.check(engine.step())
        live = [name for name in live if name in engine.scheduler.requests]
    depot.held, depot.lost, depot.present = set(), set(), True
    engine.session.let_go()
    words.calm()
    watch.finish()
    check_answers(engine)
    engine.close()
