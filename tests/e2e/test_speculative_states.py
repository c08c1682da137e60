"""States of generated tokens under speculation: found by the next turn, and right to the byte's rounding.

That a load equals the engine's own hit cannot show a wrong state: both come from the same block. So its bytes are
compared with those of a prefill. Each check has a control that it fails.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from kvdepot.core.calls import Kind

from demo.engine import Answer, Engine
from demo.toys import prompt
from tests.e2e import arena_bytes
from tests.e2e.fleet import Fleet
from tests.e2e.speculation import COMPUTE, DENSE_CHUNK, GENERATED, HYBRID_CHUNK, next_turn, runs

pytestmark = pytest.mark.long(seconds=60)

LAYERS = 3  # with a recurrent state, of the hybrid toy
CONV_TOKENS = 3  # with a meaning at a boundary: the kernel's width less one
CONV_VALUES = 2 * 4 * 64 + 8 * 64  # of a token
TEMPORAL_VALUES = 8 * 64 * 64
BOUNDARY = 2 * HYBRID_CHUNK
ANSWER_TOKENS = 100
LENGTHS = range(BOUNDARY - 68, BOUNDARY - 4, 8)
"""Of prompts whose answers go over the boundary."""
FIRST_LAYER_ROUNDING = 0.02
"""Of the first layer's temporal part, relative to its norm. 0.005 was measured, and 0.06 for another last token."""
ROUNDING = 0.05
"""Median of all parts. A single one may differ more: the toy has experts, and rounding may choose another one."""
LARGEST_ROUNDING = 0.25
"""Of a single part. 0.04 was measured, and 1.4 for a convolution without its copy (docs/testing.md)."""
Part = npt.NDArray[np.float32]
Stated = tuple[Answer, list[Part] | None]


def parts(state: bytes, drafts: int) -> list[Part]:
    """The convolution's tokens and the temporal part of each layer, in turn."""
    found: list[Part] = []
    for block in np.frombuffer(state, np.uint8).reshape(LAYERS, -1):
        conv_bytes = (CONV_TOKENS + drafts) * CONV_VALUES * 2
        conv = block[: CONV_TOKENS * CONV_VALUES * 2].view(np.uint16).astype(np.uint32) << 16  # bfloat16
        found += [conv.view(np.float32), block[conv_bytes : conv_bytes + TEMPORAL_VALUES * 4].view(np.float32)]
    return found


def ask_for_state(fleet: Fleet, engine: Engine, ids: list[int], drafts: int, max_tokens: int = 1) -> Stated:
    """The answer, and the state at the boundary that its request stored; None without one."""
    fleet.forget(engine)
    arena = fleet.daemon.arena
    before = arena_bytes.committed(arena)
    answer = engine.ask(ids, max_tokens)
    engine.drain()
    fleet.settle()
    stored = [
        one
        for one in arena_bytes.committed(arena) - before
        if (one.kind, one.boundary_tokens) == (Kind.STATE, BOUNDARY)
    ]
    return answer, parts(arena_bytes.read(arena, stored[0]), drafts) if stored else None


def differences(state: list[Part], reference: list[Part]) -> list[float]:
    """Of each part, relative to its norm."""
    return [
        float(np.linalg.norm(part - other) / np.linalg.norm(other))
        for part, other in zip(state, reference, strict=True)
    ]


def same_tokens(found: list[float]) -> bool:
    """Whether two states are of the same tokens. The first layer reads embeddings only: its convolution is exact."""
    first = found[0] == 0 and found[1] < FIRST_LAYER_ROUNDING
    return first and float(np.median(found)) < ROUNDING and max(found) < LARGEST_ROUNDING


def print_row(name: str, found: list[list[float]]) -> None:
    """The row of these states in docs/testing.md: `pytest -rP tests/e2e/test_speculative_states.py`."""
    table = np.array(found)
    columns = [table[:, 1].max(), np.median(table, axis=1).max(), table[:, 2::2].max(), table[:, 3::2].max()]
    print(f"| {name} | {len(found)} |", " | ".join(f"{100 * value:.1f} %" for value in columns), "|")


def compare_with_prefill(fleet: Fleet, engine: Engine, drafts: int, seed: str) -> tuple[list[list[float]], list[float]]:
    """Of each state of an answer: how far it is from that of a prefill. And of a prefill with another last token."""
    decoded = []
    for tokens in LENGTHS:
        ids = prompt(tokens, f"{seed}-{tokens}")
        answer, state = ask_for_state(fleet, engine, ids, drafts, ANSWER_TOKENS)
        if state is not None:
            decoded.append(([*ids, *answer.tokens][: BOUNDARY + 20], state))
    fleet.forget(engine)
    engine.reset_connector()  # an epoch in which the daemon has nothing of these tokens
    rest = prompt(HYBRID_CHUNK, f"{seed}-rest")
    found: list[list[float]] = []
    other: list[float] = []
    for ids, state in decoded:
        _, reference = ask_for_state(fleet, engine, ids + rest, drafts)
        assert reference is not None
        found.append(differences(state, reference))
        if not other:
            ids[BOUNDARY - 1] ^= 1
            _, reference = ask_for_state(fleet, engine, ids + rest, drafts)
            assert reference is not None
            other = differences(state, reference)
    return found, other


@pytest.mark.requirement("B1", "C4", "C6")
@pytest.mark.parametrize(
    ("name", "drafts", "least"),
    # Of 8 were found 8, 7 and 6. Without the offers that come before their key it was 2, 3 and 5.
    [("mtp_1_every_chunk", 1, 7), ("mtp_3_every_chunk", 3, 5), ("mtp_3_most_accepted", 3, 1)],
)
def test_the_next_turn_finds_the_states_of_an_answer(fleet: Fleet, name: str, drafts: int, least: int) -> None:
    """Where steps go over a boundary, vLLM may free its block before it offers the state: not all are there."""
    engine = fleet.engine(name)
    turns = []
    for tokens in LENGTHS:
        ids = prompt(tokens, f"speculative-turn-{tokens}")
        answer, state = ask_for_state(fleet, engine, ids, drafts, ANSWER_TOKENS)
        turns.append((next_turn(fleet, ids, answer), state is not None))
    computed = loaded = 0
    for ids, stored in turns:
        fleet.forget(engine)
        turn = fleet.ask(engine, ids, GENERATED)
        assert turn.external_tokens == turn.served.tokens
        assert (turn.external_tokens == BOUNDARY) == stored, fleet.told(1)
        fleet.forget(engine)
        cold = engine.ask(ids, GENERATED, COMPUTE)
        computed += cold.prompt.accepted_tokens
        loaded += turn.answer.prompt.accepted_tokens
    # States of steps and of a prefill are rounded in other ways, so single drafts differ. Of noise few are accepted.
    assert loaded > 0.7 * computed
    assert sum(stored for _, stored in turns) >= least


@pytest.mark.requirement("C6")
@pytest.mark.parametrize(
    ("name", "drafts"),
    [("mtp_1_every_chunk", 1), ("mtp_2_every_chunk", 2), ("mtp_3_every_chunk", 3), ("mtp_3_most_accepted", 3)],
)
def test_states_of_generated_tokens_are_those_of_a_prefill(fleet: Fleet, name: str, drafts: int) -> None:
    found, other = compare_with_prefill(fleet, fleet.engine(name), drafts, "speculative-bytes")
    print_row(name, found)
    print_row("another last token", [other])
    assert found and all(map(same_tokens, found)), found
    assert not same_tokens(other) and other[1] > FIRST_LAYER_ROUNDING, "one other token would show"


@pytest.mark.requirement("C6")
@pytest.mark.parametrize("layers", [LAYERS, 1], ids=["all", "last"])
def test_control_without_the_copy_after_sampling_states_are_of_other_tokens(fleet: Fleet, layers: int) -> None:
    engine = fleet.engine("mtp_3_most_accepted")
    engine.call_workers("leave_out_postprocess", 2 * layers)
    try:
        found, _ = compare_with_prefill(fleet, engine, 3, "speculative-control")
    finally:
        fleet.end("mtp_3_most_accepted")
    print_row(f"no copy in {layers} of {LAYERS} layers", found)
    assert found and not all(map(same_tokens, found)), found


@pytest.mark.requirement("C6")
@pytest.mark.parametrize(
    ("name", "prefix", "chunk"),
    [
        ("draft_model", "draft_model.", DENSE_CHUNK),
        ("eagle3_3", "model.layers.4.", DENSE_CHUNK),
        ("mtp_3_most_accepted", "mtp.", HYBRID_CHUNK),
    ],
)
def test_control_noise_in_draft_layers_shows_in_accepted_drafts_only(
    fleet: Fleet, name: str, prefix: str, chunk: int
) -> None:
    engine = fleet.engine(name)
    ids = fleet.prompt(3 * chunk + 20)
    whole = runs(fleet, engine, ids)
    whole.check(chunk)
    assert engine.call_workers("spoil_loads", prefix) != [[]]
    try:
        fleet.forget(engine)
        spoiled = fleet.ask(engine, ids, GENERATED)
    finally:
        engine.call_workers("spoil_loads", "")
    assert spoiled.external_tokens == whole.loaded.external_tokens
    assert spoiled.tokens == whole.own.tokens
    assert spoiled.answer.prompt.accepted_tokens < whole.own.prompt.accepted_tokens
    with pytest.raises(AssertionError):
        replace(whole, loaded=spoiled).check(chunk)


@pytest.mark.requirement("C2", "C6")
def test_control_one_token_left_after_a_load_changes_the_tokens(fleet: Fleet) -> None:
    """vLLM pads such a row with drafts that nobody made, and the state after them is used."""
    fleet.end("mtp_3_every_chunk")
    options = fleet.options("mtp_3_every_chunk")
    fleet.define(
        "mtp_3_unpadded", options.toy, options.arguments, model=options.model,
        connector_class=("OneTokenLeftConnector", "tests.e2e.one_token_left_connector"),
    )  # fmt: skip
    engine = fleet.engine("mtp_3_unpadded")
    deep = prompt(3 * HYBRID_CHUNK + 8, "speculative-one-token-left")
    engine.ask(deep, 1)
    ids = deep[: 2 * HYBRID_CHUNK + 1]
    fleet.forget(engine)
    cold = engine.ask(ids, GENERATED, COMPUTE)
    fleet.forget(engine)
    loaded = fleet.ask(engine, ids, GENERATED)
    assert loaded.external_tokens == 2 * HYBRID_CHUNK
    assert loaded.tokens != cold.tokens
    fleet.end("mtp_3_unpadded")
