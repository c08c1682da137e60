r"""Recurrent states that vLLM has offered, until their boundary can be stored (docs/adr/0061).

    offered (held weakly) --key known, every group offered, computed--> taken by a store
            \--block reused, hash moved, request over, nothing more to store--> dropped

vLLM offers a state when its boundary has a hash. With a drafter the key also needs the tokens after the boundary. They
may come a step later, or with the request's last tokens. An offer is never read from a block table, and a block table
never replaces a lost offer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from kvdepot.client.vllm.base import compat
from kvdepot.core.calls import Kind

if TYPE_CHECKING:
    from kvdepot.client.vllm.identity.adapters import Adapter
    from kvdepot.client.vllm.scheduling.pins import BlockHolds, WeakHold
    from kvdepot.client.vllm.scheduling.requests import RequestState
    from kvdepot.core.planner import Planner

BoundaryOffers = Sequence[tuple[int, int, int]]
"""vLLM's hand-offs of recurrent states: (engine group, block id, boundary tokens)."""
BOUNDARIES_MAX: Final = 4
"""Boundaries of one request that wait. One waits for its key, and others can only lack a group."""


class StateOffers:
    """All offers that wait. Used on the scheduler's thread only."""

    def __init__(
        self,
        planner: Planner,
        holds: BlockHolds,
        group_ids: Sequence[int],
        hash_block_tokens: int,
        counters: Counter[str],
    ) -> None:
        """Take `group_ids`, planner group -> engine group."""
        self._chunk_tokens = planner.chunk_tokens
        self._members = planner.groups_of(Kind.STATE)
        self._holds = holds
        self._group_of = {engine: group for group, engine in enumerate(group_ids)}
        self._hash_block_tokens = hash_block_tokens
        self._counters = counters
        self._waiting: dict[RequestState, dict[int, dict[int, WeakHold]]] = {}  # boundary -> group -> its block

    def __contains__(self, state: RequestState) -> bool:
        return state in self._waiting

    def add(self, state: RequestState, offers: BoundaryOffers) -> None:
        """Hold what vLLM offers of a request in this step. A newer offer of a state replaces the older one."""
        for engine_group, block_id, boundary in offers:
            group = self._group_of.get(engine_group)
            if group is None or boundary % self._chunk_tokens or self._is_stored(state, boundary):
                continue
            if not self.is_named(state, engine_group, block_id, boundary):
                continue
            boundaries = self._waiting.setdefault(state, {})
            groups = boundaries.setdefault(boundary, {})
            if group in groups:
                self._holds.drop(groups[group])
            groups[group] = self._holds.hold((block_id,))

    def is_named(self, state: RequestState, engine_group: int, block_id: int, boundary: int) -> bool:
        """Return whether an offered block has the state's name: it was not taken back or reused in the same step."""
        return self._holds.named(block_id, self._name(state, engine_group, boundary))

    def _is_stored(self, state: RequestState, boundary: int) -> bool:
        """Return whether a state needs no store. vLLM also offers states that were loaded."""
        return (boundary // self._chunk_tokens - 1, Kind.STATE) in state.stored

    def _name(self, state: RequestState, engine_group: int, boundary: int) -> object:
        """Return the hash that the block of an offer must have, or None if the request does not have it."""
        hashes, end = state.request.block_hashes, boundary // self._hash_block_tokens
        return compat.block_name(hashes[end - 1], engine_group) if 0 < end <= len(hashes) else None

    def ready(self, state: RequestState, computed_tokens: int) -> Mapping[int, Mapping[int, int]]:
        """Return boundary -> group -> block id of what can be stored. Drop what cannot be read any more.

        `computed_tokens` are computed after this step, and in chunks with known keys.
        """
        ready: dict[int, dict[int, int]] = {}
        for boundary, groups in list(self._waiting.get(state, {}).items()):
            if self._is_stored(state, boundary):
                self._drop(self._pop(state, boundary), "")
            elif not all(self._holds.readable(hold) for hold in groups.values()):
                self._drop(self._pop(state, boundary), "reused")
            elif boundary <= computed_tokens and len(groups) == len(self._members):
                ready[boundary] = {group: hold.block_ids[0] for group, hold in groups.items()}
        waiting = sorted(boundary for boundary in self._waiting.get(state, ()) if boundary not in ready)
        for boundary in waiting[:-BOUNDARIES_MAX]:
            self._drop(self._pop(state, boundary), "incomplete")
        return ready

    def take(self, state: RequestState, chunk: int) -> WeakHold:
        """Return one hold on the blocks of a ready boundary, in the order of the groups. It waits no longer."""
        groups = self._pop(state, (chunk + 1) * self._chunk_tokens)
        return self._holds.join([groups[group] for group in self._members])

    def _pop(self, state: RequestState, boundary: int) -> dict[int, WeakHold]:
        boundaries = self._waiting[state]
        groups = boundaries.pop(boundary)
        if not boundaries:
            del self._waiting[state]
        return groups

    def drop(self, state: RequestState, reason: str) -> None:
        """Drop all offers of a request: nothing more of it is stored."""
        for groups in self._waiting.pop(state, {}).values():
            self._drop(groups, reason)

    def drop_all(self, reason: str) -> None:
        """Drop all offers, at the end of an epoch for example."""
        for state in list(self._waiting):
            self.drop(state, reason)

    def drop_adapter(self, adapter: Adapter, reason: str) -> None:
        """Drop the offers of requests with this adapter."""
        for state in [state for state in self._waiting if state.adapter == adapter]:
            self.drop(state, reason)

    def _drop(self, groups: Mapping[int, WeakHold], reason: str) -> None:
        """Drop the offers of one boundary. Count them as one object, unless they need no store."""
        for hold in groups.values():
            self._holds.drop(hold)
        if reason:
            self._counters[f"store_dropped_{reason}"] += 1
