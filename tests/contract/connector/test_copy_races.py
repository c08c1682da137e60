"""The order of copies with vLLM's real scheduler and the real scheduler side, which decide when blocks serve again.

A checker by vector clocks is told what each step and each copy accesses. Threads take turns by a seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from random import Random
from typing import Any, Final

import pytest
import torch
from kvdepot.client.copy import revocable
from kvdepot.client.copy.base import Direction
from kvdepot.client.copy.device import DeviceCopier
from kvdepot.client.vllm.scheduling import sides
from kvdepot.client.vllm.worker import copy_thread
from kvdepot.client.vllm.worker import rank as rank_module

from tests.fakes.call_orders import ORDERS
from tests.fakes.direct_session import DirectDepot
from tests.fakes.race_engine import RaceEngine
from tests.fakes.race_rank import RaceCopier, RaceRank, RaceTimeline
from tests.fakes.scripted_engine import BLOCK
from tests.rigs.connector_rig import cold
from tests.rigs.interleaving import Interleaving, Participant
from tests.rigs.races import Queues, Races
from tests.rigs.seeds import drawn, steps_until

STEPS: Final = 100
LIVE_MAX: Final = 5
PAGE_BYTES: Final = 2048  # of `RankMemory`


class Rank(RaceRank):
    """The thread that enters is the actor `copies`."""

    def __init__(self, *arguments: Any, actors: dict[Participant, int], threads: Interleaving, copies: int) -> None:
        super().__init__(*arguments)
        self._by_thread = actors
        self._threads = threads
        self._copies = copies

    def enter(self) -> None:
        self._by_thread[self._threads.current] = self._copies
        self.races.order(self._copies, self._threads.current.known)
        super().enter()


class History:
    """An engine on a depot of its own, and what has to be known to check its order."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        folder: Path,
        seed: int,
        *,
        ranks: int = 1,
        early: int = 0,
        hybrid: bool = False,
        **options: Any,
    ) -> None:
        """`early`: marks lie so many steps before their place."""
        self.random = Random(seed)
        self.threads = Interleaving(self.random)
        kinds = ("copies", "forwards", "stores", "loads")
        self.races = Races(["engine", *(f"{kind} of rank {rank}" for rank in range(ranks) for kind in kinds)])
        self._actors: dict[Participant, int] = {self.threads.current: 0}
        self.threads.sent = lambda: self.races.now(self._host())
        self.threads.received = lambda clock: self.races.order(self._host(), clock)
        for module in (copy_thread, revocable):
            monkeypatch.setattr(module, "threading", self.threads.threading)
        monkeypatch.setattr(copy_thread, "deque", Queues(self.races, self._host))
        self.devices = [self._rank(1 + 4 * rank, seed, early, 4 if hybrid else 64) for rank in range(ranks)]
        started = count()

        def copier(views: Sequence[torch.Tensor], *_: Any) -> DeviceCopier:
            return RaceCopier(views, self.devices[next(started)])

        monkeypatch.setattr(rank_module, "_copier", copier)
        timelines = [device.timeline for device in self.devices]
        self.engine = RaceEngine(
            DirectDepot(), folder, monkeypatch, ranks=ranks, timelines=timelines, devices=self.devices,
            switch=self.threads.switch, hybrid=hybrid, blocks=60 if hybrid else 28, step_tokens=64,
            retention=BLOCK if hybrid else None, **options,
        )  # fmt: skip
        for device, memory in zip(self.devices, self.engine.memories, strict=True):
            begin = memory.raw.data_ptr()
            device.paged(range(begin, begin + memory.raw.numel()), PAGE_BYTES)

    def _host(self) -> int:
        return self._actors[self.threads.current]

    def _rank(self, first: int, seed: int, early: int, cell_bytes: int) -> Rank:
        timeline = RaceTimeline(seed + first, early, races=self.races, engine=0, queue=first + 1)
        queues = {Direction.STORE: first + 2, Direction.LOAD: first + 3}
        return Rank(
            timeline, queues, self._host, self.threads.point, lambda _: None, cell_bytes,
            actors=self._actors, threads=self.threads, copies=first,
        )  # fmt: skip

    def broken(self) -> bool:
        """Return whether races are found in a random history, in which the engine may read wrong bytes."""
        with suppress(AssertionError):
            self.run()
        self.close()
        return bool(self.races.found)

    def run(self) -> list[str]:
        """Return the races of a random history."""
        engine, live = self.engine, list[str]()
        for _ in steps_until(lambda: engine.loaded_reports, STEPS):
            self._act(live)
            engine.step()
            live = [name for name in live if name in engine.scheduler.requests]
        engine.run()
        while engine.connector.has_pending_push_work():
            engine.step()
        self.close()
        return self.races.found

    def close(self) -> None:
        """End the engine, and all threads."""
        self.engine.close()
        self.threads.finish()

    def _act(self, live: list[str]) -> None:
        engine, random = self.engine, self.random
        match random.randrange(12):
            case 0 | 1 | 2 | 3 if len(live) < LIVE_MAX:
                first, tokens = random.randrange(3), random.randrange(BLOCK, 9 * BLOCK)
                prompt = [(first * 131 + number * 7) % 1000 for number in range(tokens)]
                live.append(engine.add(prompt, random.randint(1, 20)))
            case 4 if live:
                engine.abort(random.choice(live))
            case 5:
                engine.scheduler.reset_prefix_cache()
            case _:
                pass


Histories = Callable[..., History]


@pytest.fixture
def histories(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Histories]:
    """Makes them, one after the other."""
    monkeypatch.setattr(sides, "cache_path", lambda: tmp_path / "digests.json")
    yield lambda seed, **options: History(monkeypatch, folder, seed, **options)


OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "dense": {},
    "hybrid": {"hybrid": True},
    "windows": {"windows": [3 * BLOCK]},
    "two ranks": {"ranks": 2},
    "hybrid on two ranks": {"hybrid": True, "ranks": 2},
}
SHORT: Final = {("v1", "two ranks", True), ("v2", "dense", True), ("v1-deferred", "windows", False)}


@pytest.mark.requirement("I1", "P5")
@pytest.mark.parametrize(
    ("order", "options", "runs_ahead", "seed"),
    [
        pytest.param(
            order, options, runs_ahead, seed.values[0],
            id=f"{order}-{name}-{'async' if runs_ahead else 'sync'}-{seed.id}",
            marks=() if (order, name, runs_ahead) in SHORT else pytest.mark.long(seconds=5),
        )
        for order in ORDERS
        for name, options in OPTIONS.items()
        for runs_ahead in (False, True)
        for seed in drawn([0])
    ],
)  # fmt: skip
def test_no_two_accesses_race_when_vllm_decides_which_blocks_serve_again(
    histories: Histories, order: str, options: dict[str, Any], runs_ahead: bool, seed: int
) -> None:
    history = histories(seed, order=ORDERS[order], runs_ahead=runs_ahead, **options)
    assert not history.run()
    engine = history.engine
    for request_id, request in engine.requests.items():
        tokens = list(request.prompt_token_ids)
        assert engine.outputs[request_id] == cold(tokens, len(engine.outputs[request_id]))
    for timeline in engine.timelines:
        timeline.check()


@pytest.mark.long(seconds=20)
@pytest.mark.parametrize("seed", drawn([0]))
@pytest.mark.parametrize("early", [1, 2])
def test_control_marks_one_step_early_are_no_race_and_two_steps_early_are(
    histories: Histories, early: int, seed: int
) -> None:
    """The scheduler side sends a store one step after the one that computes its blocks. This is all the slack."""
    random = Random(seed)
    found = [histories(random.randrange(2**32), early=early, runs_ahead=True).broken() for _ in range(20)]
    assert any(found) is (early == 2)
