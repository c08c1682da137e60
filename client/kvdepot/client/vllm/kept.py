"""Attention that the engine still has behind its local hit (ADR 23).

vLLM's local hit ends where every group has its block. A recurrent state is evicted long
before the attention around it, so behind that hit there often lies attention that only
lacks its state. Such blocks are copied within the engine's own tensors, and of the daemon
nothing but the rest is asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvdepot.core.calls import Kind

if TYPE_CHECKING:
    from kvdepot.client.vllm.adapters import Adapter
    from kvdepot.client.vllm.pins import BlockHolds
    from kvdepot.client.vllm.provenance import Provenance
    from kvdepot.core.planner import Planner


@dataclass(frozen=True, slots=True)
class KeptSpan:
    """Consecutive cached blocks of one group."""

    group: int  # index into the planner's groups
    table_block: int  # where the first one belongs in the request's block table
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Kept:
    """Pinned blocks that hold a prefix's attention up to `tokens`."""

    tokens: int
    spans: tuple[KeptSpan, ...]

    @property
    def block_ids(self) -> tuple[int, ...]:
        return tuple(block_id for span in self.spans for block_id in span.block_ids)


class KeptAttention:
    """Finds and pins such blocks. Used on the scheduler's thread only."""

    def __init__(
        self, holds: BlockHolds, planner: Planner, group_ids: Sequence[int], hash_block_tokens: int, pinned_max: int,
        provenance: Provenance,
    ) -> None:  # fmt: skip
        """`group_ids`: planner group -> engine group. `pinned_max`: blocks pinned by all copies in progress."""
        self._holds = holds
        self._provenance = provenance
        self._step_tokens = planner.scheduler_block_tokens
        self._groups = [
            (group, group_ids[group], planner.groups[group].block_tokens) for group in planner.groups_of(Kind.ATTENTION)
        ]
        # Of attention alone the local hit is all that there is; hashes coarser than a block do not name it.
        self._on = planner.kinds != (Kind.ATTENTION,) and all(
            block_tokens % hash_block_tokens == 0 for _, _, block_tokens in self._groups
        )
        self._hash_block_tokens = hash_block_tokens
        self._pinned_max = pinned_max

    def pin(
        self, hashes: Sequence[bytes], local_tokens: int, boundary_tokens: int, adapter: Adapter | None = None
    ) -> Kept | None:
        """What is cached beyond `local_tokens` without a gap, due to `release`. None when there is nothing."""
        if not self._on or not self._groups:
            return None
        room = self._pinned_max - self._holds.pinned_blocks
        found: dict[int, list[int]] = {group: [] for group, _, _ in self._groups}
        end = local_tokens
        while end + self._step_tokens <= boundary_tokens:
            blocks = self._cached(hashes, end, adapter)
            if blocks is None or sum(map(len, blocks.values())) > room:
                break
            for group, ids in blocks.items():
                found[group] += ids
                room -= len(ids)
            end += self._step_tokens
        if end == local_tokens:
            return None
        spans = [KeptSpan(group, local_tokens // size, tuple(found[group])) for group, _, size in self._groups]
        kept = Kept(end, tuple(spans))
        self._holds.pin_now(kept.block_ids)
        return kept

    def begins(self, hashes: Sequence[bytes], local_tokens: int, adapter: Adapter | None = None) -> bool:
        """Whether anything is cached right behind `local_tokens`."""
        known = local_tokens + self._step_tokens <= len(hashes) * self._hash_block_tokens
        return self._on and bool(self._groups) and known and self._cached(hashes, local_tokens, adapter) is not None

    def _cached(self, hashes: Sequence[bytes], begin: int, adapter: Adapter | None) -> dict[int, list[int]] | None:
        """Per group the blocks of one scheduler block; None when one is missing."""
        found: dict[int, list[int]] = {}
        for group, engine_group, block_tokens in self._groups:
            found[group] = []
            for end in range(begin + block_tokens, begin + self._step_tokens + 1, block_tokens):
                # The chain's hash at a block's end names its whole prefix.
                block_id = self._holds.cached(hashes[end // self._hash_block_tokens - 1], engine_group)
                if block_id is None or not self._provenance.counts(block_id, adapter):
                    return None
                found[group].append(block_id)
        return found

    def release(self, kept: Kept) -> None:
        """Every rank has copied them, or none will."""
        self._holds.unpin(kept.block_ids)
