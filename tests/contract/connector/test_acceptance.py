"""Counters of draft tokens: those of vLLM itself, apart for requests with loaded KV (row C6)."""

from __future__ import annotations

from typing import Any

from kvdepot.client.vllm.base import compat, versions

from tests.contract.connector.test_pressure import Speculating
from tests.fakes.scripted_engine import BLOCK, ScriptedEngine
from tests.rigs.connector_rig import PATIENCE_SECONDS, Make, prompt
from tests.rigs.patience import Deadline


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


def test_draft_tokens_are_counted_as_vllm_counts_them(make: Make) -> None:
    for kv in ("computed", "loaded"):
        engine = make(drafts=3)
        vllm = VllmCounts(engine)
        ids = [engine.add(prompt(2.5 + number, seed=number), max_tokens=2 * BLOCK) for number in range(3)]
        speculating, until = Speculating(engine, seed=3), Deadline(PATIENCE_SECONDS)
        while engine.scheduler.has_requests():
            assert not until.is_over()
            speculating.step()
        engine.settle()
        # From 0.33 on vLLM takes back what it has accepted after a request's last token.
        taken_back = sum(len(engine.outputs[each]) - 2 * BLOCK for each in ids)
        taken_back *= not versions.before(compat.VLLM_VERSION, (0, 33))
        assert counted(engine, kv) == (vllm.drafted, vllm.accepted - taken_back)
        assert 0 < vllm.accepted < vllm.drafted
        engine.assert_clean()


def test_an_engine_without_drafts_counts_nothing(make: Make) -> None:
    engine = make()
    engine.generate(prompt(2.5))
    assert engine.side.acceptance is None
