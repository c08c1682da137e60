"""What the audit of engines that draft would find: each rule of the connector is taken away, and its test fails.

Each rule is shown twice: with it an engine loads right bytes, and as deep as it can; without it the audit of
`tests/fakes/drafting_engine.py` fires.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from kvdepot.client.vllm.scheduling.candidates import StoreCandidates
from kvdepot.client.vllm.scheduling.origins import Origins
from kvdepot.client.vllm.scheduling.scheduler import SchedulerSide
from kvdepot.client.vllm.scheduling.state_offers import StateOffers
from kvdepot.core.calls import Kind
from kvdepot.core.planner import Planner

from tests.fakes.call_orders import ORDERS
from tests.fakes.draft_audit import DraftAudit
from tests.fakes.drafting_engine import DraftingEngine
from tests.fakes.scripted_engine import BLOCK
from tests.rigs.connector_rig import Make, cold, prompt, step_until
from tests.rigs.patience import wait_until

Patch = pytest.MonkeyPatch
Start = Callable[..., DraftingEngine]
STATES: dict[str, Any] = {"hybrid": True, "retention": BLOCK, "blocks": 160}
EACH_BLOCK: dict[str, Any] = STATES | {"step_tokens": BLOCK}  # has a state of a prompt
TURN = prompt(3.5)
GENERATED = 70


@pytest.fixture
def start(make: Make) -> Start:
    """Starts engines that draft."""

    def started(**options: Any) -> DraftingEngine:
        engine = make(DraftingEngine, **options)
        assert isinstance(engine, DraftingEngine)
        return engine

    return started


def no_patch(_: Patch) -> None:
    """The product is as it is."""


def without_padding_rule(patch: Patch) -> None:
    """A load may leave one token to compute."""
    patch.setattr(Planner, "high_boundary", lambda self, tokens: max(tokens - 1, 0) // BLOCK * BLOCK)


def without_next_token(patch: Patch) -> None:
    """A key covers what its block's hash covers."""
    init = SchedulerSide.__init__
    patch.setattr(SchedulerSide, "__init__", lambda *one, **rest: init(*one, **(rest | {"lookahead_tokens": 0})))


def without_waiting_offers(patch: Patch) -> None:
    """An offer whose key is not known yet is dropped."""
    ready = StateOffers.ready

    def now_or_never(offers: StateOffers, state: Any, computed_tokens: int) -> Any:
        found = ready(offers, state, computed_tokens)
        if not found:
            offers.drop(state, "control")
        return found

    patch.setattr(StateOffers, "ready", now_or_never)


def with_states_of_tables(patch: Patch) -> None:
    """A state is taken from the end of a request's block table, where other models have the newest block."""
    candidate = StoreCandidates._candidate

    def of_table(candidates: StoreCandidates, state: Any, planned: Any, tables: Any) -> Any:
        found = candidate(candidates, state, planned, tables)
        if found is None or planned.kind is not Kind.STATE:
            return found
        groups = [candidates._group_ids[span.group] for span in planned.spans]
        blocks = [(tables[group][-1],) for group in groups]
        spans = [replace_ids(span, ids) for span, ids in zip(found.spans, blocks, strict=True)]
        hold = candidates._holds.hold(tuple(block for ids in blocks for block in ids))
        return type(found)(planned, tuple(spans), hold)

    patch.setattr(StoreCandidates, "_candidate", of_table)


def replace_ids(span: Any, ids: tuple[int, ...]) -> Any:
    return type(span)(span.group, span.object_block, ids)


def without_padded_rows_excluded(patch: Patch) -> None:
    """What a request computes after a row that vLLM has padded is stored."""
    patch.setattr(Origins, "_stop", lambda *_: None)


def with_early_copies(patch: Patch) -> None:
    """What a step offers is sent with the same step, and copied before its forward."""
    add_stores = SchedulerSide.add_stores

    def at_once(side: SchedulerSide, meta: Any, scheduled: Any) -> None:
        add_stores(side, meta, scheduled)
        side.session.poll()
        if side.stores is not None:
            side.stores.dispatch(meta)

    patch.setattr(SchedulerSide, "add_stores", at_once)


def without_state_copies(patch: Patch) -> None:
    """The runner does not copy a state into its boundary's block after sampling."""
    patch.setattr(DraftingEngine, "_postprocess", lambda *_: None)


def copies_at_once(engine: DraftingEngine) -> None:
    """Stores are copied when their message comes, before the forward of that step."""
    for worker in engine.workers:
        side: Any = worker.worker_side
        bind = worker.bind_connector_metadata

        def bound(meta: Any, side: Any = side, bind: Callable[[Any], None] = bind) -> None:
            bind(meta)
            side._copies.submit((), meta.stores)
            sent = {op.op_id for op in meta.stores}
            wait_until(lambda: sent <= {outcome.op.op_id for outcome in side._copies._done}, "they are copied")

        worker.bind_connector_metadata = bound
        side.start_stores = lambda meta: None


def continued(start: Start, turn: list[int] = TURN, **options: Any) -> tuple[DraftingEngine, list[int]]:
    """An engine that takes the next turn of a conversation that another engine has begun. And the turn."""
    start(**options).generate(turn, GENERATED)
    return start(**options), [*turn, *cold(turn, GENERATED - 5)]


@pytest.mark.requirement("I1", "C6", "C7")
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("runs_ahead", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("acceptance", [0.0, 1.0])
def test_a_next_turn_resumes_at_a_state_from_decode(
    start: Start, order: str, runs_ahead: bool, acceptance: float
) -> None:
    if order.startswith("v1") and runs_ahead:
        pytest.skip("vLLM's V1 runner computes wrong states when it runs ahead, and is refused (#51571)")
    options: dict[str, Any] = {
        "order": ORDERS[order],
        "runs_ahead": runs_ahead,
        "acceptance": acceptance,
        "draft_tokens": 3,
    }
    engine, turn = continued(start, **STATES, **options)
    assert engine.generate(turn) == cold(turn)
    assert next(iter(engine.hits.values())) >= len(TURN) + 3 * BLOCK, "no state of the last turn's decode"
    engine.assert_clean()


@pytest.mark.requirement("I1", "C6")
def test_control_the_padding_rule(start: Start, monkeypatch: Patch) -> None:
    """A load that leaves one token leads to a wrong state, in vLLM's own code."""
    for loaded, change in ((3 * BLOCK, no_patch), (4 * BLOCK, without_padding_rule)):
        change(monkeypatch)
        start(**EACH_BLOCK).generate(prompt(6.5))
        engine, shorter = start(**EACH_BLOCK), prompt(6.5)[: 4 * BLOCK + 1]
        request_id = engine.add(shorter)
        step_until(engine, "it begins", partial(engine.hits.__contains__, request_id))
        assert engine.hits[request_id] == loaded
        if change is no_patch:
            engine.run()
            assert engine.answer(request_id) == cold(shorter)
        else:
            with pytest.raises(AssertionError, match="without the state"):
                engine.run()


@pytest.mark.requirement("I1", "C6")
@pytest.mark.parametrize("method", ["mtp", "eagle3"])
def test_control_the_next_token_in_a_key(start: Start, monkeypatch: Patch, method: str) -> None:
    """Two prompts part directly at a boundary: the draft KV before it is of the first one."""
    one, other = ([*prompt(3), token, *prompt(2, seed=1)] for token in (1, 2))
    start(method=method).generate(one)
    engine = start(method=method)
    assert engine.generate(other) == cold(other)
    assert list(engine.hits.values()) == [2 * BLOCK]
    without_next_token(monkeypatch)
    with pytest.raises(AssertionError, match="a chunk of nobody is stored"):
        start(method=method).generate(prompt(3.5, seed=2))
    monkeypatch.setattr(DraftAudit, "_drafts", lambda *_: False)  # what is stored is not looked at
    one, other = ([*prompt(3, seed=3), *tokens[3 * BLOCK :]] for tokens in (one, other))
    start(method=method).generate(one)
    with pytest.raises(AssertionError, match="stale draft KV"):
        start(method=method).generate(other)


@pytest.mark.requirement("C6")
def test_without_draft_kv_prompts_that_part_at_a_boundary_share_it(start: Start) -> None:
    one, other = ([*prompt(3), token, *prompt(2, seed=1)] for token in (1, 2))
    start(method="draft_model").generate(one)
    engine = start(method="draft_model")
    assert engine.generate(other) == cold(other)
    assert list(engine.hits.values()) == [3 * BLOCK]


@pytest.mark.requirement("B1", "C4", "C6")
def test_control_offers_that_wait_for_their_key(start: Start, monkeypatch: Patch) -> None:
    """Of one token a step, each state is offered before the token after it is known."""
    depths: list[int] = []
    for seed, change in enumerate((no_patch, without_waiting_offers)):
        change(monkeypatch)
        engine, turn = continued(start, prompt(3.5, seed), **STATES, acceptance=0.0)
        assert engine.generate(turn) == cold(turn)
        depths += engine.hits.values()
    assert depths[0] >= len(TURN) + 3 * BLOCK
    assert depths[1] < len(TURN)


@pytest.mark.requirement("I1", "C6")
@pytest.mark.parametrize(
    "change", [with_states_of_tables, without_state_copies, with_early_copies], ids=lambda change: change.__name__
)
def test_control_where_and_when_states_are_taken(
    start: Start, monkeypatch: Patch, change: Callable[[Patch], None]
) -> None:
    change(monkeypatch)
    options = STATES | {"method": "ngram", "draft_tokens": 3}
    acceptance = 0.0 if change is with_early_copies else 1.0  # offered in the step that computes it, or later
    engine = start(**options, acceptance=acceptance)
    if change is with_early_copies:
        copies_at_once(engine)
    engine.generate(TURN, GENERATED)
    other, turn = start(**options), [*TURN, *cold(TURN, GENERATED - 5)]
    with pytest.raises(AssertionError, match="without the state"):
        other.generate(turn)


@pytest.mark.requirement("I1", "C6")
def test_control_states_after_a_row_that_vllm_has_padded(start: Start, monkeypatch: Patch) -> None:
    """vLLM's own hit may leave one token. What it computes from there is not stored."""
    options = EACH_BLOCK | {"method": "ngram"}
    for seed, change in enumerate((no_patch, without_padded_rows_excluded)):
        turn = prompt(6.5, seed)[: 4 * BLOCK + 1]
        change(monkeypatch)
        engine, other = start(**options), start(**options)
        engine.generate(prompt(6.5, seed))
        engine.generate(turn, GENERATED)
        longer = [*turn, *cold(turn, GENERATED - 5)]
        if change is no_patch:
            assert other.generate(longer) == cold(longer)
            assert list(other.hits.values()) == [4 * BLOCK]
        else:
            with pytest.raises(AssertionError, match="without the state"):
                other.generate(longer)
