"""Random histories of an engine with the connector, and what must hold in each of their steps."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

from kvdepot.client.vllm.base.operations import ObjectCopy
from kvdepot.core.calls import AcquireCall, LocateCall, ReserveCall

from tests.fakes.direct_session import DirectDepot
from tests.fakes.draft_audit import key_of
from tests.fakes.scripted_engine import BLOCK, ScriptedEngine, next_token

LIVE_MAX = 5
TOKENS_MAX = 24


def prompt_of_few(random: Random) -> list[int]:
    """One of few beginnings, so that requests share them."""
    seed, blocks = random.randrange(3), random.randint(1, 10)
    return [(seed * 131 + i * 7) % 1000 for i in range(blocks * BLOCK + random.randrange(BLOCK))]


class Watch:
    """What must hold in every step, besides right bytes."""

    def __init__(self, engine: ScriptedEngine, lookahead_tokens: int = 0) -> None:
        """`lookahead_tokens`: after a chunk, which its key covers too."""
        self.engine = engine
        self._lookahead_tokens = lookahead_tokens
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
                assert self._named(copied), "a chunk with tokens that nobody knows"

    def _named(self, copied: ObjectCopy) -> bool:
        """Whether an object's key is of a prefix of some request."""
        requests = self.engine.requests.values()
        return copied.key in {key_of(one, copied.boundary_tokens, self._lookahead_tokens) for one in requests}

    def finish(self) -> None:
        engine = self.engine
        engine.run()
        engine.settle()
        while engine.connector.has_pending_push_work():
            engine.step()
        assert Counter(engine.loaded_reports + engine.failed_reports) == self.allocated
        assert not self.written_late
        sessions = engine.depot.engine._sessions.by_slot.values()
        own = {attached.attachment for attached in engine.session.ranks}
        assert not any(session.leases for session in sessions if own & session.attachments.keys())
        engine.reset()
        engine.assert_clean(engine.depot.lent() if len(sessions) > 1 else 0)


def act(
    engine: ScriptedEngine,
    depot: DirectDepot,
    random: Random,
    live: list[str],
    prompt: Callable[[Random], list[int]] = prompt_of_few,
    tokens_max: int = TOKENS_MAX,
) -> None:
    """One thing that may happen between two steps."""
    scheduler = engine.scheduler
    match random.randrange(24):
        case 0 | 1 | 2 | 3 if len(live) < LIVE_MAX:
            live.append(engine.add(prompt(random), random.randint(1, tokens_max)))
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
            sleep(engine)
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


def sleep(engine: ScriptedEngine) -> None:
    """Where vLLM can: with pinned blocks, or a load on its way, it cannot."""
    with contextlib.suppress(RuntimeError):
        if engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True):
            engine.discard()
            engine.change_weights()
            engine.wake_up()


def check_answers(engine: ScriptedEngine) -> None:
    """Every engine answers this, however the prefix came to be."""
    for request in engine.requests.values():
        known = list(request.prompt_token_ids)
        for token in request.output_token_ids:
            assert token == next_token(known)
            known.append(token)
