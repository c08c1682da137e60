"""What engines with a drafter store and load: keys with the next token, checkpoints of decode, two tokens left."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from kvdepot.client.vllm.scheduling import requests
from kvdepot.client.vllm.scheduling.state_offers import StateOffers
from kvdepot.core.calls import AcquireCall, Kind
from kvdepot.core.planner import Planner

from tests.fakes.call_orders import V2
from tests.fakes.draft_audit import DraftAudit
from tests.fakes.drafting_engine import DraftingEngine
from tests.fakes.scripted_engine import BLOCK
from tests.rigs.connector_rig import Make, cold, prompt

HYBRID: dict[str, Any] = {"hybrid": True, "retention": BLOCK, "step_tokens": BLOCK}


def depth(make: Make, tokens: Sequence[int], **options: Any) -> int:
    """Return how many tokens of a prompt a fresh engine loads. Its answer must be right."""
    engine = make(DraftingEngine, **options)
    assert engine.generate(tokens) == cold(list(tokens))
    engine.assert_clean()
    (hit,) = engine.hits.values()
    return int(hit)


@pytest.mark.requirement("C6", "C2")
@pytest.mark.parametrize("method", ["mtp", "ngram"])
def test_a_load_leaves_two_tokens_to_a_recurrent_model(make: Make, method: str) -> None:
    tokens = prompt(6.5)
    make(DraftingEngine, method=method, **HYBRID).generate(tokens)
    depths = [depth(make, tokens[: 5 * BLOCK + more], method=method, **HYBRID) for more in (1, 2, 3)]
    assert depths == [4 * BLOCK, 5 * BLOCK, 5 * BLOCK]


@pytest.mark.requirement("C6", "C2")
def test_a_load_leaves_one_token_to_a_model_without_states(make: Make) -> None:
    tokens = prompt(6.5)
    make(DraftingEngine).generate(tokens)
    assert depth(make, tokens[: 5 * BLOCK + 1]) == 5 * BLOCK


@pytest.mark.requirement("C6")
def test_with_one_token_left_a_recurrent_model_would_compute_a_wrong_state(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine of these tests does as vLLM does: the next step reads the state, and finds it wrong."""
    tokens = prompt(6.5)
    make(DraftingEngine, **HYBRID).generate(tokens)
    monkeypatch.setattr(
        Planner, "high_boundary", lambda self, count: max(count - 1, 0) // self.chunk_tokens * self.chunk_tokens
    )
    with pytest.raises(AssertionError):
        depth(make, tokens[: 5 * BLOCK + 1], **HYBRID)


@pytest.mark.requirement("C6", "C7")
@pytest.mark.parametrize(("method", "hit"), [("mtp", 4), ("eagle3", 4), ("draft_model", 5), ("ngram", 5)])
def test_a_boundary_is_found_if_what_the_drafter_has_read_of_it_is_equal(make: Make, method: str, hit: int) -> None:
    tokens = prompt(6.5)
    make(DraftingEngine, method=method).generate(tokens)
    other = [*tokens[: 5 * BLOCK], 999, 998, 997]
    assert depth(make, other, method=method) == hit * BLOCK
    assert depth(make, [*tokens[: 5 * BLOCK + 1], 998, 997], method=method) == 5 * BLOCK


@pytest.mark.requirement("C6")
def test_a_key_without_the_next_token_serves_what_the_drafter_read_of_another_one(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "lookahead_salt", lambda *_: b"")
    monkeypatch.setattr(DraftAudit, "_drafts", lambda *_: False)  # it would find such a key when it is stored
    tokens = prompt(6.5)
    make(DraftingEngine).generate(tokens)
    with pytest.raises(AssertionError, match="stale draft KV"):
        depth(make, [*tokens[: 5 * BLOCK], 999, 998, 997])


def next_turn(make: Make, **options: Any) -> int:
    """Return how many tokens the second turn of a conversation loads on another engine."""
    options |= {"draft_tokens": 3, **HYBRID}
    first = make(DraftingEngine, **options)
    tokens = prompt(2.5)
    answer = first.generate(tokens, 75)
    assert answer == cold(tokens, 75)
    first.settle()
    first.assert_clean()
    turn = [*tokens, *answer, *prompt(0.5, seed=1)]
    return depth(make, turn, **options)


@pytest.mark.requirement("C4", "B1")
def test_the_next_turn_finds_checkpoints_of_decode(make: Make) -> None:
    """Without accepted drafts each step ends at the next token, so every checkpoint comes before its key."""
    assert next_turn(make, acceptance=0) == 7 * BLOCK


@pytest.mark.requirement("C4")
@pytest.mark.parametrize("acceptance", [0.3, 0.8])
def test_no_checkpoint_is_lost_that_accepted_drafts_step_over(make: Make, acceptance: float) -> None:
    """A scheduler that runs ahead registers a state, then frees its block, and then offers it."""
    engine = make(DraftingEngine, acceptance=acceptance, draft_tokens=3, order=V2, runs_ahead=True, **HYBRID)
    engine.generate(prompt(2.5), 200)
    engine.settle()
    assert engine.side.counters["stored_objects"] == 2 * ((40 + 200 - 1) // BLOCK), "attention and state of each chunk"
    engine.assert_clean()


@pytest.mark.requirement("C4")
def test_offers_that_do_not_wait_for_their_key_are_lost(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    ready = StateOffers.ready

    def impatient(self: StateOffers, state: Any, computed_tokens: int) -> Any:
        now = ready(self, state, computed_tokens)
        for boundary in set(self._waiting.get(state, {})) - set(now):
            self._drop(self._pop(state, boundary), "impatient")
        return now

    monkeypatch.setattr(StateOffers, "ready", impatient)
    assert next_turn(make, acceptance=0) < 7 * BLOCK


@pytest.mark.requirement("C4")
@pytest.mark.parametrize("hybrid", [False, True], ids=["dense", "hybrid"])
def test_a_last_token_may_be_the_one_that_a_key_needs(make: Make, hybrid: bool) -> None:
    options = HYBRID if hybrid else {}
    tokens = prompt(4)
    engine = make(DraftingEngine, **options)
    answer = engine.generate(tokens, 1)
    engine.settle()
    engine.assert_clean()
    assert depth(make, [*tokens, *answer, 7], **options) == 4 * BLOCK
    assert depth(make, [*tokens, (answer[0] + 1) % 1000, 7], **options) == 3 * BLOCK


@pytest.mark.requirement("C4")
def test_chunks_that_the_last_drafts_complete_are_stored(make: Make) -> None:
    """With all drafts right, the last step has tokens of which no step before it knew that they come."""
    tokens = prompt(3.5)
    options: dict[str, Any] = {"acceptance": 1, "draft_tokens": 7, "method": "draft_model"}
    answer = make(DraftingEngine, **options).generate(tokens, 25)  # 1 + 3 * 8
    assert depth(make, [*tokens, *answer, 7], **options) == 5 * BLOCK


ENDS = ["epoch", "suspended", "stopped", "replaced", "rolled back"]


@pytest.mark.requirement("P11")
@pytest.mark.parametrize("how", ENDS)
def test_an_offer_that_waits_ends_with_the_stores_of_its_request(make: Make, how: str) -> None:
    engine = make(DraftingEngine, **HYBRID)
    tokens = prompt(4)
    state = engine.side._requests[engine.add(tokens, 30)]
    stores = engine.side.stores
    while state not in stores.offers:
        engine.step()
    match how:
        case "epoch":
            engine.connector.reset_cache()
        case "suspended":
            engine.side.suspend()
            engine.side.resume()
        case "stopped":
            state.store_stopped = "no_room"
            engine.step()
        case "replaced":
            stores.replaced(None)
        case _:
            stores.retract(state, "rolled_back")
    assert state not in stores.offers
    assert (3, Kind.STATE) not in state.stored
    engine.run()
    engine.settle()
    engine.assert_clean()


@pytest.mark.requirement("P11", "C4")
@pytest.mark.parametrize("known", [True, False], ids=["token known", "token unknown"])
def test_at_an_abort_an_offer_is_stored_if_its_key_is_known(make: Make, known: bool) -> None:
    engine = make(DraftingEngine, order=V2, runs_ahead=not known, **HYBRID)
    request_id = engine.add(prompt(4), 30)
    state = engine.side._requests[request_id]
    offers = engine.side.stores.offers
    while state not in offers:
        engine.step()
    engine.abort(request_id)
    assert state not in offers
    assert ((3, Kind.STATE) in state.stored) == known
    assert engine.side.counters["store_dropped_finished"] == (not known)
    engine.run()
    engine.settle()
    engine.assert_clean()


@pytest.mark.requirement("A1", "C6")
def test_of_kept_attention_the_last_block_is_loaded(make: Make) -> None:
    """Whether the engine's own block has read the right next token, the block after it would say."""
    tokens = prompt(8.5)
    engine = make(DraftingEngine, blocks=128, **HYBRID)
    engine.generate(tokens)
    engine.settle()
    states = [
        block
        for block in engine.pool.blocks
        if block.block_hash is not None and engine.layout.kv_cache_groups[_group(block)].layer_names[0][0] == "s"
    ]
    engine.pool.evict_blocks({block.block_id for block in states})
    shorter = [*tokens[: 6 * BLOCK + 1], 999]
    assert engine.generate(shorter) == cold(shorter)
    acquired = [call for call in engine.depot.calls if isinstance(call, AcquireCall)][-1]
    assert list(engine.hits.values())[-1] == 6 * BLOCK
    assert len(acquired.kinds) == 2, "the last block's attention, and the state"


def _group(block: Any) -> int:
    return int.from_bytes(block.block_hash[-4:], "big")
