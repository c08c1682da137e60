"""What the connector counts between two steps."""

from __future__ import annotations

from kvdepot.client.vllm.base.stats import KVDepotStats


def test_what_did_not_happen_is_not_said() -> None:
    stats = KVDepotStats()
    stats.add("hits", "ram", 0)
    assert stats.is_empty()
    stats.add("hits", "ram", 2)
    stats.add("hits", "ram", 1)
    stats.add("hits", "disk", -1)
    assert stats.data["counters"] == {"hits": {"ram": 3}}
