"""The connector against vLLM's real scheduler and block pool: what is stored is right, and every hold ends."""

from __future__ import annotations

from typing import Any

import pytest
from kvdepot.client.copy.base import Direction
from kvdepot.client.vllm.scheduling import stores as stores_module
from kvdepot.client.vllm.scheduling.requests import exclusion
from kvdepot.core.calls import (
    AbandonCall,
    AcquireCall,
    CommitCall,
    EndRequestCall,
    Kind,
    ReserveCall,
    ReserveOutcome,
    ReserveReply,
)
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.multimodal.hasher import MultiModalHasher
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.request import Request

from tests.fakes.direct_session import DirectDepot
from tests.fakes.scripted_engine import BLOCK, ScriptedEngine
from tests.rigs.connector_rig import Gate, Make, cold, prompt
from tests.rigs.patience import Deadline


def committed(engine: ScriptedEngine) -> int:
    return int(engine.depot.engine.counters.get("committed_objects.committed"))


def states(engine: ScriptedEngine) -> int:
    """State objects asked for."""
    return sum(call.kinds.count(Kind.STATE) for call in engine.depot.calls if isinstance(call, ReserveCall))


@pytest.mark.requirement("B1")
def test_generated_tokens_are_stored_too(make: Make) -> None:
    engine, other = make(), make()
    tokens = prompt(2.5)
    answer = engine.generate(tokens, max_tokens=3 * BLOCK)
    turn = [*tokens, *answer, *prompt(1, seed=9)]
    assert other.generate(turn) == cold(turn)
    assert list(other.hits.values()) == [len([*tokens, *answer]) // BLOCK * BLOCK]
    other.assert_clean()


@pytest.mark.requirement("B1")
def test_hybrid_stores_generated_checkpoints_with_retention(make: Make) -> None:
    options: dict[str, Any] = {"hybrid": True, "retention": BLOCK, "step_tokens": BLOCK}
    engine, other = make(**options), make(**options)
    tokens = prompt(2.5)
    answer = engine.generate(tokens, max_tokens=3 * BLOCK)
    turn = [*tokens, *answer, *prompt(1, seed=9)]
    assert other.generate(turn) == cold(turn)
    assert list(other.hits.values()) == [(len(tokens) + len(answer) - 1) // BLOCK * BLOCK]
    other.assert_clean()


def test_store_decode_off_stores_the_prompt_only(make: Make) -> None:
    engine = make(settings={"store_decode": False})
    engine.generate(prompt(2.5), max_tokens=3 * BLOCK)
    assert engine.side.counters["stored_objects"] == 2
    engine.assert_clean()


@pytest.mark.requirement("C4")
@pytest.mark.parametrize(("retention", "expected"), [(0, 1), (BLOCK, 6)])
def test_checkpoints_are_stored_exactly_as_the_engine_keeps_them(make: Make, retention: int, expected: int) -> None:
    engine = make(hybrid=True, retention=retention, step_tokens=BLOCK)
    engine.generate(prompt(6.5))
    assert states(engine) == expected
    assert committed(engine) == 6 + expected
    engine.assert_clean()


@pytest.mark.requirement("C1")
def test_interior_chunks_without_a_checkpoint_serve_deeper_boundaries(make: Make) -> None:
    tokens = prompt(6.5)
    make(hybrid=True, retention=0).generate(tokens)
    longer = [*tokens[: 6 * BLOCK], *prompt(3, seed=5)]
    other = make(hybrid=True, retention=0)
    assert other.generate(longer) == cold(longer)
    assert list(other.hits.values()) == [6 * BLOCK], "resumes at the only checkpoint"
    shorter = tokens[: 4 * BLOCK + 3]
    assert other.generate(shorter) == cold(shorter)
    assert list(other.hits.values())[1] == 0, "no checkpoint at or below it"
    other.assert_clean()


@pytest.mark.requirement("A3")
def test_a_state_that_is_offered_again_is_stored_once(make: Make) -> None:
    engine = make(hybrid=True, retention=0)
    tokens = prompt(5.5)
    engine.generate(tokens)
    before = committed(engine)
    engine.reset()
    engine.generate(tokens)
    engine.generate(tokens)
    assert committed(engine) == before
    engine.assert_clean()


@pytest.mark.parametrize("hybrid", [False, True], ids=["dense", "hybrid"])
@pytest.mark.parametrize("step", ["reserving", "granted", "dispatched"])
def test_a_request_aborted_at_any_step_of_a_store_leaves_nothing_behind(
    make: Make, gate: Gate, hybrid: bool, step: str
) -> None:
    engine = make(hybrid=hybrid)
    tokens = prompt(5.5)
    gate.close(direction=Direction.STORE)
    if step != "dispatched":
        engine.depot.held.add(ReserveCall)
    request_id = engine.add(tokens, max_tokens=400)
    engine.step()
    engine.step()
    if step == "granted":
        engine.session.let_go()
        engine.session.poll()
    if step == "dispatched":
        assert gate.reached()
        assert engine.side.holds.pinned_blocks
    engine.abort(request_id)
    assert engine.connector.has_pending_push_work()
    engine.depot.held.clear()
    engine.session.let_go()
    engine.step()
    gate.open()
    engine.run()
    engine.assert_clean()
    assert committed(engine) == 5 + hybrid, "its blocks stayed readable, so it was stored"
    assert engine.depot.count(EndRequestCall) == 1
    other = make(hybrid=hybrid)
    assert other.generate(tokens) == cold(tokens)
    assert list(other.hits.values()) == [5 * BLOCK]


@pytest.mark.parametrize("when", ["reserving", "granted"])
def test_a_block_reused_before_dispatch_is_not_stored(make: Make, when: str) -> None:
    """Between the grant and the next step all blocks go to somebody else: given back, never copied."""
    engine = make(blocks=12)
    tokens = prompt(5.5)
    engine.depot.held.add(ReserveCall)
    request_id = engine.add(tokens, max_tokens=1)
    while request_id in engine.scheduler.requests:
        engine.step()
    if when == "granted":
        engine.session.let_go()
        engine.session.poll()
    taken = engine.pool.get_new_blocks(11)
    for memory in engine.memories:
        for block in taken:
            memory.block("a0", block.block_id).fill_(7)
    if when == "reserving":
        engine.session.let_go()
        engine.session.poll()
    engine.depot.held.clear()
    engine.run()
    engine.pool.free_blocks(taken)
    assert engine.side.counters["store_dropped_reused"] == 5
    assert committed(engine) == 0
    assert engine.depot.count(AbandonCall)
    engine.assert_clean()


def test_a_reset_of_the_engines_cache_drops_what_was_not_dispatched(make: Make) -> None:
    engine = make()
    engine.depot.held.add(ReserveCall)
    request_id = engine.add(prompt(5.5), max_tokens=1)
    while request_id in engine.scheduler.requests:
        engine.step()
    engine.reset()
    engine.depot.held.clear()
    engine.session.let_go()
    engine.run()
    assert committed(engine) == 0
    engine.assert_clean()


@pytest.mark.requirement("I1d")
def test_nothing_stored_before_a_weight_change_is_served_after_it(make: Make) -> None:
    engine = make()
    tokens = prompt(5.5)
    engine.generate(tokens)
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    assert engine.generate(tokens) == cold(tokens)
    assert list(engine.hits.values()) == [0, 0]
    engine.reset()
    engine.generate(tokens)
    assert list(engine.hits.values()) == [0, 0, 5 * BLOCK], "the new epoch has its own"
    other = make()
    other.generate(tokens)
    assert list(other.hits.values()) == [5 * BLOCK], "an engine on the base weights reads the base weights' bytes"
    assert other.session.specs[0].epoch == "" != engine.session.specs[-1].epoch
    engine.assert_clean()


@pytest.mark.requirement("I1d")
def test_a_plain_prefix_cache_reset_changes_nothing(make: Make) -> None:
    engine = make()
    engine.generate(prompt(5.5))
    engine.reset()
    engine.generate(prompt(5.5))
    assert len(engine.session.specs) == 1
    assert list(engine.hits.values()) == [0, 5 * BLOCK]


@pytest.mark.requirement("I1d")
@pytest.mark.parametrize("settings", [{"keep_across_sleep": True}, {"weights_version": "7"}])
def test_the_user_may_name_the_weights_instead(make: Make, settings: dict[str, Any]) -> None:
    engine = make(settings=settings)
    engine.generate(prompt(5.5))
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.generate(prompt(5.5))
    assert list(engine.hits.values()) == [0, 5 * BLOCK]


@pytest.mark.requirement("I1d")
@pytest.mark.parametrize("step", ["reserving", "granted", "dispatched", "after"])
def test_a_request_alive_across_a_weight_change_stores_nothing(make: Make, gate: Gate, step: str) -> None:
    engine = make()
    gate.close(direction=Direction.STORE)
    if step != "dispatched":
        engine.depot.held.add(ReserveCall)
    request_id = engine.add(prompt(5.5), max_tokens=4 * BLOCK)
    engine.step()
    engine.step()
    if step == "granted":
        engine.session.let_go()
        engine.session.poll()
    if step == "dispatched":
        assert gate.reached()
    engine.connector.reset_cache()
    engine.depot.held.clear()
    engine.session.let_go()
    gate.open()
    engine.run()
    assert request_id not in engine.scheduler.requests
    assert committed(engine) == 0
    engine.assert_clean()


@pytest.mark.requirement("I1d")
def test_a_load_of_the_old_epoch_does_not_arrive(make: Make, gate: Gate) -> None:
    tokens = prompt(9.5)
    make().generate(tokens)
    engine = make()
    gate.close(batch_bytes=2048)
    request_id = engine.add(tokens)
    engine.step()
    engine.step()
    assert gate.reached()
    engine.connector.reset_cache()
    engine.step()
    gate.open()
    engine.run()
    assert engine.failed_reports == [request_id]
    assert engine.outputs[request_id] == cold(tokens)
    counted = engine.side.counters
    assert (counted["misses.weights_changed"], counted["load_failed_epoch"], counted["load_failed_copy"]) == (1, 1, 0)
    engine.assert_clean()


def test_a_lost_reservation_costs_the_store_and_nothing_else(make: Make) -> None:
    engine = make()
    engine.depot.lost.add(ReserveCall)
    assert engine.generate(prompt(5.5)) == cold(prompt(5.5))
    assert committed(engine) == 0
    engine.depot.lost.clear()
    engine.reset()
    engine.generate(prompt(5.5))
    assert committed(engine) == 5
    engine.assert_clean()


def test_without_credit_a_store_is_asked_for_again_and_then_dropped(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores_module, "RETRY_SECONDS", 0.001)
    engine = make()
    serve = engine.session._serve
    refusals = [0]

    def later(call: Any) -> Any:
        if isinstance(call, ReserveCall):
            refusals[0] += 1
            return ReserveReply(bytes([ReserveOutcome.LATER] * len(call.kinds)))
        return serve(call)

    engine.session._serve = later  # type: ignore[method-assign]
    engine.generate(prompt(3.5))
    assert refusals[0] == stores_module.TRIES_MAX + 1
    assert engine.side.counters["store_dropped_later"] == 3
    engine.assert_clean()


def test_a_full_depot_is_no_obstacle(make: Make) -> None:
    engine = make()
    for seed in range(3):
        engine.generate(prompt(20.5, seed), max_tokens=2)
        engine.reset()
    engine.assert_clean()


@pytest.mark.requirement("I2")
def test_a_dead_depot_keeps_the_engine_stepping_for_a_bounded_time(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores_module, "PENDING_SECONDS_MAX", 0.3)
    engine = make()
    engine.depot.held.add(ReserveCall)
    request_id = engine.add(prompt(5.5), max_tokens=1)
    limit = Deadline(10)
    while engine.scheduler.has_requests():
        engine.step()
        assert not limit.is_over()
    assert engine.outputs[request_id]


def test_strong_pins_are_bounded(make: Make, gate: Gate) -> None:
    engine = make(settings={"max_pinned_blocks": 3})
    gate.close(direction=Direction.STORE)
    engine.add(prompt(10.5), max_tokens=1)
    most = 0
    for _ in range(6):
        engine.step()
        most = max(most, engine.side.holds.pinned_blocks)
    assert most == 3
    gate.open()
    engine.run()
    assert committed(engine) == 10
    engine.assert_clean()


def test_chunks_hit_locally_and_unknown_to_the_depot_are_stored(make: Make) -> None:
    engine = make()
    tokens = prompt(5.5)
    engine.depot.present = False
    engine.generate(tokens)
    assert committed(engine) == 0
    engine.depot.present = True
    engine.settle()
    engine.generate(tokens)
    assert list(engine.hits.values()) == [0, 5 * BLOCK]
    assert committed(engine) == 5
    engine.assert_clean()


def test_a_parent_that_vanished_after_the_lookup_is_stored_anew(make: Make, depot: DirectDepot) -> None:
    """The lookup says that the chunks are there; then the depot forgets them; the store begins at the root."""
    tokens = prompt(8.5)
    make().generate(tokens[: 5 * BLOCK + 1])
    engine = make()
    serve = engine.session._serve
    orphaned: list[ReserveCall] = []

    def forget(call: Any) -> Any:
        reply = serve(call)
        if isinstance(call, ReserveCall) and not orphaned and call.parents[:16] != bytes(16):
            orphaned.append(call)
            engine.session.abandon(call.lease_id)
            return ReserveReply(bytes([ReserveOutcome.NO_PARENT] * len(call.kinds)))
        return reply

    engine.session._serve = forget  # type: ignore[method-assign]
    engine.generate(tokens, max_tokens=6)
    assert orphaned
    roots = [call for call in depot.calls if isinstance(call, ReserveCall) and call.parents[:16] == bytes(16)]
    assert len(roots) == 2, "the first engine's, and the one that begins anew"
    assert committed(engine) == 8
    engine.assert_clean()


DIGESTS = [MultiModalHasher.hash_kwargs(name, model_id="m", image="x") for name in ("blake3", "sha256", "sha512")]


@pytest.mark.requirement("P2")
@pytest.mark.parametrize(
    ("identifier", "excluded"),
    [
        *((digest, "") for digest in DIGESTS),
        ("adapter:" + DIGESTS[0], "multimodal_id"),  # of the vision tower with an adapter, whatever its content
        ("other:" + DIGESTS[0], "multimodal_id"),
        ("renderer0-mm-1-image-0", "multimodal_id"),  # with neither cache: vLLM's count of its requests
        ("picture-1", "multimodal_id"),  # multi_modal_uuids of a client
        ("adapter:picture-1", "multimodal_id"),
        ("", "multimodal_id"),
    ],
)
def test_a_picture_is_known_by_its_content_or_not_at_all(identifier: str, excluded: str) -> None:
    """A name that a client or a counter gives it is another picture's in another engine."""
    items = [
        MultiModalFeatureSpec(None, "image", name, PlaceholderRange(offset, 4))
        for offset, name in ((0, DIGESTS[0]), (8, identifier))
    ]
    adapter = LoRARequest("adapter", 1, "/path")
    request = Request("r", prompt(2), SamplingParams(max_tokens=1), None, mm_features=items, lora_request=adapter)
    assert exclusion(request) == excluded
    assert exclusion(request, counts_items=True) == "multimodal_id", "a digest of a number, perhaps"


def test_prompts_that_hashes_do_not_cover_are_neither_stored_nor_served(make: Make) -> None:
    engine = make()
    request_id = engine.add(prompt(5.5), resumable=False)
    engine.scheduler.requests[request_id].prompt_is_token_ids = [True] * len(prompt(5.5))
    state = engine.side._requests[request_id]
    state.excluded = exclusion(engine.scheduler.requests[request_id])
    engine.run()
    assert state.excluded == "prompt_embeds"
    assert not engine.depot.count(ReserveCall)
    assert not engine.depot.count(CommitCall)
    assert not engine.depot.count(AcquireCall)
