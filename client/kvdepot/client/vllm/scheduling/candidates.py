"""Which objects of a request can be stored after a step, and from which blocks (design.md#store)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvdepot.client.vllm.base.operations import SpanCopy
from kvdepot.client.vllm.scheduling.state_offers import BoundaryOffers, StateOffers
from kvdepot.core.calls import Kind

if TYPE_CHECKING:
    from kvdepot.client.vllm.scheduling.pins import BlockHolds, WeakHold
    from kvdepot.client.vllm.scheduling.requests import RequestState
    from kvdepot.core.planner import PlannedObject, Planner


@dataclass(frozen=True, slots=True)
class Candidate:
    """One object that can be stored, and a hold on its blocks."""

    planned: PlannedObject
    spans: tuple[SpanCopy, ...]
    hold: WeakHold


class StoreCandidates:
    """Finds the objects that a step has completed. Asks nobody."""

    def __init__(
        self,
        planner: Planner,
        holds: BlockHolds,
        group_ids: Sequence[int],
        hash_block_tokens: int,
        counters: Counter[str],
    ) -> None:
        """Take the engine's planner and blocks. `group_ids`: planner group -> engine group."""
        self._planner = planner
        self._holds = holds
        self._group_ids = tuple(group_ids)
        self._counters = counters
        self.offers = StateOffers(planner, holds, group_ids, hash_block_tokens, counters)

    def take(
        self, state: RequestState, computed_tokens: int, tables: Sequence[Sequence[int]], offers: BoundaryOffers
    ) -> list[Candidate]:
        """Return the objects of a request that are complete, and not known to be stored. Each is returned once.

        Args:
            state: the request; its chunks count as considered afterwards.
            computed_tokens: tokens that are computed after this step, in chunks with known keys.
            tables: the request's block table per engine group.
            offers: recurrent states that vLLM hands out in this step.
        """
        candidates = []
        for planned in self._plan(state, computed_tokens, tables, offers):
            state.stored.add((planned.chunk, planned.kind))
            candidate = self._candidate(state, planned, tables)
            if candidate is None:
                state.given_up.add((planned.chunk, planned.kind))
                self._counters["store_dropped_no_source"] += 1
            else:
                candidates.append(candidate)
        return candidates

    def _plan(
        self, state: RequestState, computed_tokens: int, tables: Sequence[Sequence[int]], offers: BoundaryOffers
    ) -> Sequence[PlannedObject]:
        chunk_tokens = self._planner.chunk_tokens
        state.stored.update((chunk, Kind.ATTENTION) for chunk in range(state.next_chunk, state.assumed_chunks))
        self.offers.add(state, offers)
        ready = self.offers.ready(state, computed_tokens)
        first = min([state.next_chunk, *(boundary // chunk_tokens - 1 for boundary in ready)])
        plan = self._planner.store_plan(
            state.stored,
            computed_tokens,
            ready,
            alive_from=self._alive_from(tables, computed_tokens),
            first_chunk=max(first, 0),
        )
        state.next_chunk = max(state.next_chunk, computed_tokens // chunk_tokens)
        return plan.objects

    def _candidate(
        self, state: RequestState, planned: PlannedObject, tables: Sequence[Sequence[int]]
    ) -> Candidate | None:
        """Return an object with its blocks, or None if one of them is not there any more."""
        if planned.kind is Kind.STATE:
            hold = self.offers.take(state, planned.chunk)
            parts: list[tuple[int, ...]] = [(block_id,) for block_id in hold.block_ids]
        else:
            parts = [
                tuple(tables[self._group_ids[span.group]][span.table_block : span.table_block + span.blocks])
                for span in planned.spans
            ]
            if any(len(ids) != span.blocks for ids, span in zip(parts, planned.spans, strict=True)):
                return None
            block_ids = tuple(block_id for ids in parts for block_id in ids)
            if not self._holds.holdable(block_ids):
                return None
            hold = self._holds.hold(block_ids)
        spans = [SpanCopy(span.group, span.object_block, ids) for span, ids in zip(planned.spans, parts, strict=True)]
        return Candidate(planned, tuple(spans), hold)

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
