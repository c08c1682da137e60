"""The real connector in every runner's call order, with vLLM's real schedulers, over the daemon's real engine.

Random admissions, aborts, preemptions, resets, sleeps, repeated handshakes, empty steps, held and lost replies, an
absent daemon, and ranks' messages that come twice, late and out of order. In every step the forward checks each byte
that it reads (tests/fakes/scripted_engine.py).
"""

from __future__ import annotations

import contextlib
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest
from kvdepot.client.vllm.scheduling import sides
from kvdepot.core.calls import AcquireCall, LocateCall, ReserveCall
from kvdepot.core.keys import chunk_key

from tests.fakes.call_orders import ORDERS
from tests.fakes.direct_session import DirectDepot
from tests.fakes.late_words import LateWords
from tests.fakes.scripted_engine import BLOCK, ScriptedEngine, model_folder, next_token
from tests.rigs.seeds import drawn, steps_until

STEPS = 220
"""For those that load nothing for long: what was stored before a change of weights is of no use behind it."""
LIVE_MAX = 5
TOKENS_MAX = 24


def _prompt(random: Random) -> list[int]:
    """One of few beginnings, so that requests share them."""
    seed, blocks = random.randrange(3), random.randint(1, 10)
    return [(seed * 131 + i * 7) % 1000 for i in range(blocks * BLOCK + random.randrange(BLOCK))]


class Watch:
    """What must hold in every step, besides right bytes."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self.engine = engine
        self.allocated: Counter[str] = Counter()  # loads that the connector was told to begin
        self.written_late: list[int] = []
        self.stored = 0
        allocated = engine.connector.update_state_after_alloc

        def update(request: Any, blocks: Any, tokens: int) -> None:
            self.allocated[request.request_id] += tokens > 0
            allocated(request, blocks, tokens)

        engine.connector.update_state_after_alloc = update
        for worker in engine.workers:
            self._watch(worker)

    def _watch(self, worker: Any) -> None:
        """No block is written once its request was reported."""
        given: dict[str, set[int]] = {}
        over: set[int] = set()
        bind, results, copies = worker.bind_connector_metadata, worker.get_transfer_results, worker.worker_side._copies
        load = copies._load

        def binding(meta: Any) -> None:
            for op in meta.loads:
                given.setdefault(op.request_id, set()).add(op.op_id)
            bind(meta)

        def reporting(finished: set[str]) -> Any:
            found = results(finished)
            for request_id in found.finished_recving:
                over.update(given.pop(request_id, ()))
            return found

        def loading(op: Any) -> list[int]:
            failed: list[int] = load(op)
            self.written_late += [op.op_id] * (op.op_id in over)
            return failed

        worker.bind_connector_metadata, worker.get_transfer_results, copies._load = binding, reporting, loading

    def check(self, scheduled: Any) -> None:
        engine = self.engine
        reported = Counter(engine.loaded_reports + engine.failed_reports)
        assert not reported - self.allocated, "a load that never was, or twice"
        assert not self.written_late
        for op in scheduled.kv_connector_metadata.stores:
            for copied in op.objects:
                self.stored += 1
                covered = (request.block_hashes for request in engine.requests.values())
                last = copied.boundary_tokens // BLOCK - 1
                assert any(len(hashes) > last and chunk_key(hashes[last]) == copied.key for hashes in covered)

    def finish(self) -> None:
        engine = self.engine
        engine.run()
        engine.settle()
        while engine.connector.has_pending_push_work():
            engine.step()
        assert Counter(engine.loaded_reports + engine.failed_reports) == self.allocated
        assert not self.written_late
        assert not any(session.leases for session in engine.depot.engine._sessions.by_slot.values())
        engine.reset()
        engine.assert_clean()


def _act(engine: ScriptedEngine, depot: DirectDepot, random: Random, live: list[str]) -> None:
    scheduler = engine.scheduler
    match random.randrange(24):
        case 0 | 1 | 2 | 3 if len(live) < LIVE_MAX:
            live.append(engine.add(_prompt(random), random.randint(1, TOKENS_MAX)))
        case 4 if live:
            engine.abort(random.choice(live))
        case 5:
            with contextlib.suppress(RuntimeError):  # pinned blocks, or a load on its way: whoever resets tries again
                scheduler.reset_prefix_cache(reset_running_requests=True)
        case 6:
            scheduler.reset_prefix_cache()
        case 7 if random.random() < 0.2:
            scheduler.reset_prefix_cache(reset_connector=True)
        case 8:
            depot.held = {random.choice((AcquireCall, LocateCall, ReserveCall))}
        case 9:
            depot.lost = {random.choice((AcquireCall, ReserveCall))}
        case 10:
            depot.present = random.random() < 0.7
        case 11:
            _say_again(engine)
        case 12 if random.random() < 0.1:
            _sleep(engine)
        case _:
            depot.held, depot.lost, depot.present = set(), set(), True
            engine.session.let_go()


def _say_again(engine: ScriptedEngine) -> None:
    """What was said at the start."""
    for worker, memory in zip(engine.workers, engine.memories, strict=True):
        worker.register_kv_caches(dict(memory.caches))
    engine.connector.bind_kv_cache_manager(engine.scheduler.kv_cache_manager)
    engine.shake_hands()
    for request in engine.scheduler.requests.values():
        engine.connector.on_new_request(request)


def _sleep(engine: ScriptedEngine) -> None:
    """Where vLLM can: with pinned blocks, or a load on its way, it cannot."""
    with contextlib.suppress(RuntimeError):
        if engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True):
            engine.discard()
            engine.change_weights()
            engine.wake_up()


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
        _act(engine, depot, random, live)
        watch.check(engine.step())
        live = [name for name in live if name in engine.scheduler.requests]
    depot.held, depot.lost, depot.present = set(), set(), True
    engine.session.let_go()
    words.calm()
    watch.finish()
    for request in engine.requests.values():
        known = list(request.prompt_token_ids)
        for token in request.output_token_ids:
            assert token == next_token(known)
            known.append(token)
    engine.close()
