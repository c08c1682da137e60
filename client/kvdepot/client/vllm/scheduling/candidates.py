"""Which objects of a request can be stored after a step, and from which blocks (design.md#store)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvdepot.client.vllm.base.operations import SpanCopy
from kvdepot.core.calls import Kind

if TYPE_CHECKING:
    from kvdepot.client.vllm.scheduling.pins import BlockHolds
    from kvdepot.client.vllm.scheduling.requests import RequestState
    from kvdepot.core.planner import PlannedObject, Planner

BoundaryOffers = Sequence[tuple[int, int, int]]
"""vLLM's hand-offs of recurrent states: (engine group, block id, boundary tokens)."""


class StoreCandidates:
    """Finds the objects that a step has completed. Holds nothing and asks nobody."""

    def __init__(self, planner: Planner, holds: BlockHolds, group_ids: Sequence[int]) -> None:
        """Take the engine's planner and blocks. `group_ids`: planner group -> engine group."""
        self._planner = planner
        self._holds = holds
        self._group_ids = tuple(group_ids)
        self._group_of = {engine: group for group, engine in enumerate(group_ids)}

    def plan(
        self, state: RequestState, computed_tokens: int, tables: Sequence[Sequence[int]], offers: BoundaryOffers
    ) -> Sequence[PlannedObject]:
        """Return the objects of a request that are complete, and not known to be stored.

        Args:
            state: the request; its chunks count as considered afterwards.
            computed_tokens: tokens that are computed after this step, and covered by hashes.
            tables: the request's block table per engine group.
            offers: recurrent states that vLLM hands out in this step.
        """
        chunk_tokens = self._planner.chunk_tokens
        state.stored.update((chunk, Kind.ATTENTION) for chunk in range(state.next_chunk, state.assumed_chunks))
        by_boundary = self._offers_by_boundary(offers)
        first = min([state.next_chunk, *(boundary // chunk_tokens - 1 for boundary in by_boundary)])
        plan = self._planner.store_plan(
            state.stored,
            computed_tokens,
            by_boundary,
            alive_from=self._alive_from(tables, computed_tokens),
            first_chunk=max(first, 0),
        )
        state.next_chunk = max(state.next_chunk, computed_tokens // chunk_tokens)
        return plan.objects

    def spans(self, planned: PlannedObject, tables: Sequence[Sequence[int]]) -> tuple[SpanCopy, ...] | None:
        """Return the blocks of an object, or None if one of them is not there any more."""
        spans = []
        for place, span in enumerate(planned.spans):
            if planned.block_ids:
                ids: tuple[int, ...] = (planned.block_ids[place],)
            else:
                table = tables[self._group_ids[span.group]]
                ids = tuple(table[span.table_block : span.table_block + span.blocks])
            if len(ids) != span.blocks or not self._holds.holdable(ids):
                return None
            spans.append(SpanCopy(span.group, span.object_block, ids))
        return tuple(spans)

    def _offers_by_boundary(self, offers: BoundaryOffers) -> dict[int, dict[int, int]]:
        """Return boundary -> group -> block id, of offers with known groups, hashed blocks and whole chunks."""
        by_boundary: dict[int, dict[int, int]] = {}
        for engine_group, block_id, boundary in offers:
            group = self._group_of.get(engine_group)
            if group is None or not block_id or boundary % self._planner.chunk_tokens:
                continue
            if self._holds.block_hash(block_id) is None:
                continue  # taken back in the same step: the engine will overwrite it
            by_boundary.setdefault(boundary, {})[group] = block_id
        return by_boundary

    def _alive_from(self, tables: Sequence[Sequence[int]], computed_tokens: int) -> dict[int, int]:
        """Return window group -> the first table index from which on every computed block is there."""
        alive = {}
        for group in self._planner.groups_of(Kind.WINDOW):
            table = tables[self._group_ids[group]]
            index = min(computed_tokens // self._planner.groups[group].block_tokens, len(table))
            while index and table[index - 1]:
                index -= 1
            alive[group] = index
        return alive
