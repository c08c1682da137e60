"""Which of the engine's cached blocks count after an epoch began, or an adapter was replaced."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from kvdepot.client.vllm.identity.adapters import Adapter
from kvdepot.client.vllm.scheduling.provenance import Provenance
from kvdepot.core.calls import Kind

TABLES = [[3, 4, 5]]


@pytest.fixture
def provenance() -> Provenance:
    holds: Any = SimpleNamespace(block_hash=lambda block_id: b"hash%d" % block_id)
    planner: Any = SimpleNamespace(groups=[SimpleNamespace(block_tokens=16)], kinds=(Kind.ATTENTION,))
    return Provenance(holds, planner, [0], 16)


def counted(provenance: Provenance, adapter: Adapter | None = None) -> list[int]:
    return [block_id for block_id in TABLES[0] if provenance.counts(block_id, adapter)]


@pytest.mark.requirement("P2")
def test_of_each_epoch_only_what_was_computed_in_it_counts(provenance: Provenance) -> None:
    assert counted(provenance) == [3, 4, 5], "all, before the first one"
    for computed in ([3, 4], [4, 5]):
        provenance.begin()
        assert provenance.watches(None)
        assert not counted(provenance)
        first = TABLES[0].index(computed[0])
        provenance.computed(TABLES, 16 * first, 16 * (first + 2), (), None, sound=True)
        assert counted(provenance) == computed
    provenance.computed(TABLES, 16, 32, (), None, sound=False)
    assert counted(provenance) == [5], "it was computed on what does not count"


@pytest.mark.requirement("I1")
def test_foreign_blocks_count_again_once_they_are_computed(provenance: Provenance) -> None:
    assert not provenance.watches(None)
    provenance.foreign(TABLES, 16, 48)
    assert provenance.watches(None)
    assert counted(provenance) == [3]
    provenance.computed(TABLES, 16, 32, (), None, sound=False)
    assert counted(provenance) == [3]
    provenance.computed(TABLES, 16, 32, (), None, sound=True)
    assert counted(provenance) == [3, 4]
    assert provenance.any_foreign_of([4, 5])


@pytest.mark.requirement("I1", "I2")
def test_named_blocks_beyond_what_is_computed_are_found_in_a_few_lookups(provenance: Provenance) -> None:
    """The second group has blocks of four hashes."""
    asked: list[int] = []

    def cached(named: bytes, group: int) -> int | None:
        at = int(named)
        asked.append(at)
        return {0: {2: 3, 4: 4}, 1: {7: 5}}[group].get(at)

    holds: Any = SimpleNamespace(cached=cached)
    provenance._holds = holds
    provenance._groups, provenance.longest_tokens = [(0, 16), (1, 64)], 64
    hashes = [b"%d" % at for at in range(1000)]
    assert provenance.named_beyond(hashes, 2 * 16 + 3)
    assert [block_id for block_id in (3, 4, 5) if not provenance.any_foreign_of([block_id])] == []
    assert max(asked) == 12, "a gap of more than the longest block ends it"
    assert min(asked) == 2, "it ends beyond"
    assert not provenance.named_beyond(hashes, 16 * 16)
    assert not provenance.named_beyond(hashes, 16_000)


@pytest.mark.requirement("P2")
def test_of_an_adapter_that_was_replaced_nothing_counts_that_was_there(provenance: Provenance) -> None:
    old, other = ("old", "/old"), ("other", "/other")
    provenance.replaced(old)
    provenance.computed(TABLES, 0, 48, (), old, sound=True)
    assert counted(provenance, old) == counted(provenance, other) == [3, 4, 5]
    provenance.replaced(old)
    assert not counted(provenance, old)
    assert counted(provenance, None) == [3, 4, 5], "others are not watched"
