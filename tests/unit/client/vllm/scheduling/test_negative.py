"""Boundaries that are not offered for a while."""

from __future__ import annotations

import pytest
from kvdepot.client.vllm.scheduling.negative import ENTRIES_MAX, NEGATIVE_SECONDS, NegativeCache


@pytest.mark.requirement("P8")
def test_a_key_is_avoided_for_its_time_and_no_longer() -> None:
    now = 100.0
    cache = NegativeCache(lambda: now)
    cache.add(b"a")
    assert b"a" in cache
    assert b"b" not in cache
    now += NEGATIVE_SECONDS / 2
    cache.add(b"b")
    now += NEGATIVE_SECONDS / 2
    assert b"a" not in cache
    assert b"b" in cache


@pytest.mark.requirement("P8", "I4")
def test_the_oldest_key_is_forgotten_first() -> None:
    cache = NegativeCache(lambda: 0.0)
    for number in range(ENTRIES_MAX + 1):
        cache.add(number.to_bytes(16, "little"))
    assert (0).to_bytes(16, "little") not in cache
    assert (1).to_bytes(16, "little") in cache
    assert ENTRIES_MAX.to_bytes(16, "little") in cache
