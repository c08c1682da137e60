"""The token hit rate: one number for operators, and the sources that make it up."""

from __future__ import annotations

import pytest
from kvdepot.core.hit_rate import HitRate

COUNTERS = {
    "prompt_tokens": 1_200_000.0,
    "served_tokens.nvme": 36_000.0,
    "served_tokens.ram": 336_000.0,
    "served_tokens.engine": 480_000.0,
    "served_tokens.other": 0.0,
    "saved_prefill_seconds": 290.4,
    "hit_tokens": 7.0,
}


@pytest.mark.requirement("O2")
def test_the_hit_rate_is_of_all_prompt_tokens_and_names_its_sources() -> None:
    hits = HitRate.of(COUNTERS)
    assert hits.percent == pytest.approx(71)
    assert str(hits) == ("71 % of 1.2 M tokens (engine 40 %, ram 28 %, nvme 3 %), 4 min 50 s of prefill saved")


def test_the_prefill_rate_is_of_loaded_tokens_alone() -> None:
    assert HitRate.of(COUNTERS).prefill_rate == pytest.approx(372_000 / 290.4)
    assert HitRate.of({"served_tokens.ram": 5.0}).prefill_rate == 0


def test_without_prompts_or_hits_nothing_is_divided_and_nothing_invented() -> None:
    assert str(HitRate.of({})) == "unknown: no prompt has ended yet"
    assert str(HitRate.of({"prompt_tokens": 842.0, "served_tokens.ram": 0.0})) == "0 % of 842 tokens"
