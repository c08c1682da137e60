"""Steps with drafts: rejected ones are no failed step, and a padded row of a recurrent model is not stored."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from kvdepot.client.vllm.scheduling.origins import Origins
from kvdepot.client.vllm.scheduling.provenance import Provenance
from kvdepot.client.vllm.scheduling.requests import RequestState
from kvdepot.core.calls import Kind

BLOCK = 16
TABLES = [[*range(1, 9)]]


class Rig:
    """One request with its steps."""

    def __init__(self, tokens: int) -> None:
        holds: Any = SimpleNamespace(block_hash=lambda block_id: b"%d" % block_id, cached=lambda *_: None)
        planner: Any = SimpleNamespace(groups=[SimpleNamespace(block_tokens=BLOCK)], kinds=(Kind.ATTENTION,))
        self.provenance = Provenance(holds, planner, [0], BLOCK)
        self.named = set[int]()  # offered blocks that have their state's name
        offers = SimpleNamespace(is_named=lambda state, group, block_id, boundary: block_id in self.named)
        stores: Any = SimpleNamespace(retract=lambda *_: None, offers=offers)
        namespaces: Any = SimpleNamespace(epoch_number=0)
        self.counters: Counter[str] = Counter()
        self.origins = Origins(self.provenance, stores, namespaces, self.counters, BLOCK)
        self.request: Any = SimpleNamespace(request_id="r", num_computed_tokens=0, num_tokens=tokens)
        self.state = RequestState(self.request, 0.0)
        self.admit(0)

    def admit(self, local_tokens: int) -> None:
        self.request.block_hashes = [b"hash"] * (self.request.num_tokens // BLOCK)
        self.origins.asked(self.state, local_tokens)
        self.origins.allocated(self.state, 0)

    def step(self, begin: int, scheduled: int, drafts: tuple[str, ...] = ()) -> str:
        """Take a step with the tokens that are known now. Return why the request is not stored any more."""
        self.request.num_computed_tokens = begin
        self.request.block_hashes = [b"hash"] * (self.request.num_tokens // BLOCK)
        self.origins.step({"r": self.state}, {"r": scheduled}, {}, lambda _: TABLES, drafts)
        return self.state.store_stopped


@pytest.mark.requirement("C6")
@pytest.mark.parametrize("accepted", range(4))
def test_rejected_drafts_are_no_failed_step(accepted: int) -> None:
    rig = Rig(40)
    assert not rig.step(0, 40)
    for _ in range(12):
        rig.request.num_tokens += 1  # sampled
        begin = rig.request.num_tokens - 1
        assert not rig.step(begin, 4, ("r",))
        rig.request.num_tokens += accepted
    assert not rig.counters


@pytest.mark.requirement("C6")
@pytest.mark.parametrize("accepted", range(4))
def test_rejected_drafts_of_steps_that_run_ahead_are_no_failed_step(accepted: int) -> None:
    """A step begins behind all drafts of the one before, whose output is read after it is scheduled."""
    rig, drafts = Rig(40), 3
    assert not rig.step(0, 40)
    computed, unread = 40, [(1, 0)]  # of each unread step: tokens, rejected drafts
    for _ in range(12):
        assert not rig.step(computed, 1 + drafts, ("r",))
        computed += 1 + drafts
        unread.append((1 + accepted, drafts - accepted))
        tokens, rejected = unread.pop(0)
        rig.request.num_tokens += tokens
        computed -= rejected
    assert not rig.counters


@pytest.mark.requirement("I1")
def test_a_failed_step_with_drafts_is_found() -> None:
    rig = Rig(40)
    assert not rig.step(0, 40)
    rig.request.num_tokens = 41
    assert not rig.step(40, 4, ("r",))
    rig.request.num_tokens = 42
    assert rig.step(16, 25) == "rolled_back"


@pytest.mark.requirement("I1", "C6")
def test_a_padded_row_is_not_stored_and_its_blocks_do_not_count() -> None:
    """vLLM computes a wrong state if a request is admitted with one token left: its own hit may leave just one."""
    rig = Rig(33)
    rig.admit(32)
    assert rig.step(32, 4, ("r",)) == "padded"
    assert rig.state.foreign
    assert rig.provenance.any_foreign_of([3])
    assert not rig.provenance.any_foreign_of([1, 2])
    assert rig.counters["store_stopped_padded"] == 1


@pytest.mark.requirement("C4")
def test_a_row_without_padding_is_stored() -> None:
    rig = Rig(34)
    rig.admit(32)
    assert not rig.step(32, 2)
    rig.request.num_tokens = 35
    assert not rig.step(34, 4, ("r",)), "drafts of a later step are drafts"


@pytest.mark.requirement("I1")
@pytest.mark.parametrize("reused", [True, False])
def test_an_offered_block_that_is_reused_in_the_same_step_stays_foreign(reused: bool) -> None:
    rig, offered = Rig(40), 8
    rig.named = set() if reused else {offered}
    rig.provenance.foreign([[offered]], 0, BLOCK)  # it was given to a request of which a sibling loads KV
    rig.origins.step({"r": rig.state}, {"r": 40}, {"r": [(0, offered, 32)]}, lambda _: [[*range(1, 4)]])
    assert rig.provenance.any_foreign_of([offered]) == reused
