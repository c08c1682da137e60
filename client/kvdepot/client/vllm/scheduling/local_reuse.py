"""Local reuse of attention: what the engine still has after its local hit (docs/adr/0023).

vLLM's local hit ends where a group lacks its block. A recurrent state is evicted long before the attention around it.
So after that hit there is often attention that lacks only its state. Such blocks are copied within the engine's own
tensors, and the daemon supplies the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvdepot.core.calls import Kind

if TYPE_CHECKING:
    from kvdepot.client.vllm.identity.adapters import Adapter
    from kvdepot.client.vllm.scheduling.pins import BlockHolds
    from kvdepot.client.vllm.scheduling.provenance import Provenance
    from kvdepot.core.planner import Planner


@dataclass(frozen=True, slots=True)
class ReusedSpan:
    """Consecutive cached blocks of one group."""

    group: int  # index into the planner's groups
    table_block: int  # where the first one belongs in the request's block table
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReusedPrefix:
    """Pinned blocks that hold a prefix's attention up to `tokens`."""

    tokens: int
    spans: tuple[ReusedSpan, ...]

    @property
    def block_ids(self) -> tuple[int, ...]:
        return tuple(block_id for span in self.spans for block_id in span.block_ids)


class LocalReuse:
    """Finds and pins reusable blocks. Used on the scheduler's thread only."""

    def __init__(
        self, holds: BlockHolds, planner: Planner, group_ids: Sequence[int], hash_block_tokens: int, pinned_max: int,
        provenance: Provenance, *, proven_by_next: bool = False,
    ) -> None:  # fmt: skip
        """Take the engine's blocks.

        Args:
            holds: on the engine's blocks.
            planner: of the engine's groups.
            group_ids: planner group -> engine group.
            hash_block_tokens: tokens per hash of the engine.
            pinned_max: the blocks that all copies may pin.
            provenance: which of the engine's blocks count.
            proven_by_next: whether a block's KV also depends on the token after it, which its hash does not cover. It
                is reused only before a block that is cached too: the hash of that block covers the token.
        """
        self._holds = holds
        self._provenance = provenance
        self._step_tokens = planner.scheduler_block_tokens
        self._groups = [
            (group, group_ids[group], planner.groups[group].block_tokens) for group in planner.groups_of(Kind.ATTENTION)
        ]
        # With attention only, the local hit is all that there is. Hashes coarser than a block do not name it.
        self._on = planner.kinds != (Kind.ATTENTION,) and all(
            block_tokens % hash_block_tokens == 0 for _, _, block_tokens in self._groups
        )
        self._hash_block_tokens = hash_block_tokens
        self._pinned_max = pinned_max
        self._proven_by_next = proven_by_next

    def pin(
        self, hashes: Sequence[bytes], local_tokens: int, boundary_tokens: int, adapter: Adapter | None = None
    ) -> ReusedPrefix | None:
        """Pin what is cached beyond `local_tokens` without a gap, until `release`. Return None if there is nothing."""
        if not self._on or not self._groups:
            return None
        room = self._pinned_max - self._holds.pinned_blocks
        reused: dict[int, list[int]] = {group: [] for group, _, _ in self._groups}
        end = local_tokens
        while end + self._step_tokens <= boundary_tokens:
            blocks = self._cached(hashes, end, adapter)
            if blocks is None or sum(map(len, blocks.values())) > room:
                break
            for group, ids in blocks.items():
                reused[group] += ids
                room -= len(ids)
            end += self._step_tokens
        if end == local_tokens:
            return None
        spans = [ReusedSpan(group, local_tokens // size, tuple(reused[group])) for group, _, size in self._groups]
        kept = ReusedPrefix(end, tuple(spans))
        self._holds.pin_now(kept.block_ids)
        return kept

    def begins(self, hashes: Sequence[bytes], local_tokens: int, adapter: Adapter | None = None) -> bool:
        """Return whether anything is cached directly after `local_tokens`."""
        known = local_tokens + self._step_tokens <= len(hashes) * self._hash_block_tokens
        return self._on and bool(self._groups) and known and self._cached(hashes, local_tokens, adapter) is not None

    def _cached(self, hashes: Sequence[bytes], begin: int, adapter: Adapter | None) -> dict[int, list[int]] | None:
        """Return group -> blocks of one scheduler block, or None if one is missing."""
        blocks: dict[int, list[int]] = {}
        for group, engine_group, block_tokens in self._groups:
            blocks[group] = []
            for end in range(begin + block_tokens, begin + self._step_tokens + 1, block_tokens):
                block_id = self._cached_at(hashes, end, engine_group)
                if block_id is None or not self._provenance.counts(block_id, adapter):
                    return None
                blocks[group].append(block_id)
            next_end = begin + self._step_tokens + block_tokens
            if self._proven_by_next and self._cached_at(hashes, next_end, engine_group) is None:
                return None
        return blocks

    def _cached_at(self, hashes: Sequence[bytes], end: int, engine_group: int) -> int | None:
        """Return the cached block that ends at a token. The chain's hash there names its whole prefix."""
        at = end // self._hash_block_tokens
        return self._holds.cached(hashes[at - 1], engine_group) if at <= len(hashes) else None

    def counts(self, kept: ReusedPrefix) -> bool:
        """Return whether pinned blocks still count. In the step that pinned them, they may have turned out foreign."""
        return not self._provenance.any_foreign_of(kept.block_ids)

    def release(self, kept: ReusedPrefix) -> None:
        """Unpin blocks: every rank has copied them, or none will."""
        self._holds.unpin(kept.block_ids)
