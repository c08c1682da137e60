"""Which of the engine's own attention blocks a load reuses, if their KV also depends on the token after them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from kvdepot.client.vllm.scheduling.local_reuse import LocalReuse
from kvdepot.core.calls import Kind
from kvdepot.core.planner import GroupSpec, Planner

BLOCK = 16
STEP = 32
PLANNER = Planner([GroupSpec(Kind.ATTENTION, BLOCK, 0, (1,)), GroupSpec(Kind.STATE, STEP, 0, (1,))], STEP)
HASHES = [b"%d" % end for end in range(BLOCK, 8 * BLOCK + 1, BLOCK)]


def reused(cached_blocks: list[int], *, proven_by_next: bool, hashes: list[bytes] = HASHES) -> int:
    """Return up to which token a load to the end reuses. `cached_blocks`: their indices in the prompt."""
    cached = {HASHES[index]: index + 1 for index in cached_blocks}
    holds: Any = SimpleNamespace(
        pinned_blocks=0, cached=lambda block_hash, _: cached.get(block_hash), pin_now=lambda _: None
    )
    provenance: Any = SimpleNamespace(counts=lambda *_: True)
    local = LocalReuse(holds, PLANNER, [0, 1], BLOCK, 100, provenance, proven_by_next=proven_by_next)
    prefix = local.pin(hashes, 0, len(hashes) * BLOCK // STEP * STEP)
    assert local.begins(hashes, 0) == (prefix is not None)
    return prefix.tokens if prefix is not None else 0


@pytest.mark.requirement("A1")
@pytest.mark.parametrize(("blocks", "tokens"), [(1, 0), (2, 32), (3, 32), (4, 64), (5, 64), (8, 128)])
def test_without_draft_layers_every_cached_block_is_reused(blocks: int, tokens: int) -> None:
    assert reused(list(range(blocks)), proven_by_next=False) == tokens


@pytest.mark.requirement("A1", "C6")
@pytest.mark.parametrize(("blocks", "tokens"), [(2, 0), (3, 32), (4, 32), (5, 64), (8, 96)])
def test_with_draft_layers_the_block_after_it_proves_its_last_token(blocks: int, tokens: int) -> None:
    """The cached block has the KV of another next token if a request with another one computed it."""
    assert reused(list(range(blocks)), proven_by_next=True) == tokens


@pytest.mark.requirement("C6")
def test_a_block_without_a_hash_proves_nothing() -> None:
    assert reused([0, 1, 2], proven_by_next=True, hashes=HASHES[:2]) == 0
    assert reused([0, 1, 3], proven_by_next=True) == 0
