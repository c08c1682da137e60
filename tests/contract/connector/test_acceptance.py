"""Counters of draft tokens: those of vLLM itself, apart for requests with loaded KV (row C6)."""

from __future__ import annotations

from typing import Any

import pytest
from kvdepot.client.vllm.base import compat, versions

from tests.fakes.drafting_engine import DraftingEngine
from tests.fakes.scripted_engine import BLOCK, ScriptedEngine
from tests.rigs.connector_rig import Make, prompt


class VllmCounts:
    """What vLLM's own statistics say of drafts."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self.drafted = self.accepted = 0
        engine.observe = self._observe

    def _observe(self, stats: Any) -> None:
        if stats.spec_decoding_stats is not None:
            self.drafted += stats.spec_decoding_stats.num_draft_tokens
            self.accepted += stats.spec_decoding_stats.num_accepted_tokens


def counted(engine: ScriptedEngine, kv: str) -> tuple[int, int]:
    """Draft tokens and accepted ones, of requests with such KV."""
    counters = engine.connector.sides.current.counters
    return counters[f"draft_tokens.{kv}"], counters[f"accepted_tokens.{kv}"]


@pytest.mark.requirement("C6")
@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize("method", [pytest.param("ngram", marks=pytest.mark.long(seconds=25)), "mtp"])
def test_draft_tokens_are_counted_as_vllm_counts_them(make: Make, method: str, runs_ahead: bool) -> None:
    for kv in ("computed", "loaded"):
        engine = make(DraftingEngine, method=method, draft_tokens=3, runs_ahead=runs_ahead)
        vllm = VllmCounts(engine)
        ids = [engine.add(prompt(2.5 + number, seed=number), max_tokens=2 * BLOCK) for number in range(3)]
        engine.run()
        engine.settle()
        # From 0.33 on vLLM takes back what it has accepted after a request's last token.
        taken_back = sum(len(engine.outputs[each]) - 2 * BLOCK for each in ids)
        taken_back *= not versions.before(compat.VLLM_VERSION, (0, 33))
        drafted, accepted = counted(engine, kv)
        assert drafted == vllm.drafted
        # A step that runs ahead may end the request before vLLM takes them back.
        least = vllm.accepted - taken_back
        assert least <= accepted <= (vllm.accepted if runs_ahead else least)
        assert 0 < vllm.accepted < vllm.drafted
        engine.assert_clean()


def test_an_engine_without_drafts_counts_nothing(make: Make) -> None:
    engine = make()
    engine.generate(prompt(2.5))
    assert engine.side.acceptance is None
