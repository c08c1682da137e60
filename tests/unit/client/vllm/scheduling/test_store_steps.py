"""How much of a request counts as computed, in a step with drafts and at the request's end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from kvdepot.client.vllm.scheduling.requests import RequestState
from kvdepot.client.vllm.scheduling.store_steps import StoreSteps

CHUNK = 16
TABLES: list[list[int]] = [[]]


class Rig:
    """One request, and what is considered of it."""

    def __init__(self, lookahead_tokens: int) -> None:
        self.considered: list[int] = []
        stores: Any = SimpleNamespace(
            consider=lambda _state, computed, *_: self.considered.append(computed // CHUNK * CHUNK), offers=frozenset()
        )
        namespaces: Any = SimpleNamespace(ranks_ready=True, registered_id=b"id")
        planner: Any = SimpleNamespace(chunk_tokens=CHUNK)
        settings: Any = SimpleNamespace(store_decode=True)
        self.steps = StoreSteps(
            stores, namespaces, planner, settings, lambda state: state.update_keys(CHUNK, CHUNK, lookahead_tokens)
        )

    def state(self, known: int, computed: int) -> RequestState:
        request: Any = SimpleNamespace(
            request_id="r", num_tokens=known, num_computed_tokens=computed, all_token_ids=[0] * known,
            block_hashes=[b"hash"] * (known // CHUNK), mm_features=(),
        )  # fmt: skip
        return RequestState(request, 0.0)

    def step(self, known: int, computed: int, scheduled: int) -> list[int]:
        block_state = SimpleNamespace(boundary_state_offloads={}, resolve_block_ids=lambda _: TABLES)
        self.steps.step({"r": self.state(known, computed)}, {"r": scheduled}, block_state)
        return self.considered

    def end(self, known: int, computed: int) -> list[int]:
        self.steps.last(self.state(known, computed), TABLES)
        return self.considered


@pytest.mark.requirement("I1", "C6")
@pytest.mark.parametrize(("lookahead", "known", "stored"), [(0, 63, 48), (0, 64, 64), (1, 64, 48), (1, 65, 64)])
@pytest.mark.parametrize("ahead", [0, 5], ids=["in step", "ahead of its tokens"])
def test_drafts_do_not_count(lookahead: int, known: int, stored: int, ahead: int) -> None:
    """A step computes its drafts too, and one that runs ahead begins behind drafts that may be rejected."""
    assert Rig(lookahead).step(known, known - 1 + ahead, 8) == [stored]


@pytest.mark.requirement("I1", "C6")
@pytest.mark.parametrize(("lookahead", "known", "stored"), [(0, 64, 48), (0, 65, 64), (1, 64, 48), (1, 65, 64)])
@pytest.mark.parametrize("ahead", [0, 5], ids=["in step", "ahead of its tokens"])
def test_at_the_end_the_last_token_does_not_count(lookahead: int, known: int, stored: int, ahead: int) -> None:
    assert Rig(lookahead).end(known, known - 1 + ahead) == [stored]


@pytest.mark.requirement("I1")
def test_at_the_end_of_a_prefill_only_its_computed_tokens_count() -> None:
    assert Rig(0).end(64, 20) == [16]
    assert Rig(0).end(64, 15) == []
