"""Whose KV a request's tokens are: only what this engine computed and kvdepot loaded may be stored.

vLLM counts tokens as computed when it schedules them, also those that another connector of the engine promises to load
(a sibling below MultiConnector). Such a load may fail after kvdepot has reserved the chunks, and a sibling may keep KV
with a loss. So a request counts only if each of its steps begins where the last one ended, or at first within the
engine's local hit and what kvdepot loaded. Other requests store nothing, nor does what is computed on their blocks.

A step that begins before the end of the last one, without a preemption, says that something of it was not computed.
Rejected drafts say nothing: they lie after the tokens that have hashes.

A recurrent model computes a wrong state of a request that is admitted with one token left to compute, because vLLM pads
it to a row of drafts (docs/adr/0061). kvdepot's loads leave two tokens. vLLM's own hits may leave one.

vLLM 0.32 names blocks when it schedules the step that computes them. With priorities it may then preempt the request
for another one of the same step. The names stay, and the next hit on them reads bytes that nobody has computed.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kvdepot.client.vllm.scheduling.loads import ResolveBlocks
    from kvdepot.client.vllm.scheduling.namespaces import Namespaces
    from kvdepot.client.vllm.scheduling.provenance import Provenance
    from kvdepot.client.vllm.scheduling.requests import RequestState
    from kvdepot.client.vllm.scheduling.state_offers import BoundaryOffers
    from kvdepot.client.vllm.scheduling.stores import Stores

LOGGER = logging.getLogger("vllm.kvdepot")

_COMPUTED_SOUNDLY: Final = ("", "adapter_unknown")
"""Exclusions of requests with blocks that count for others: their hashes cover what they are computed from."""


class Origins:
    """Follows the steps of all requests. Used on the scheduler's thread only."""

    def __init__(
        self,
        provenance: Provenance,
        stores: Stores,
        namespaces: Namespaces,
        counters: Counter[str],
        hash_block_tokens: int,
    ) -> None:
        self._provenance = provenance
        self._stores = stores
        self._namespaces = namespaces
        self._counters = counters
        self._hash_block_tokens = hash_block_tokens
        self._unloaded: set[RequestState] = set()  # got blocks since the last step, and no load of kvdepot's
        self._told = False

    def asked(self, state: RequestState, local_tokens: int) -> None:
        """Note a local hit, in whole blocks: vLLM is about to admit a request, for the first time or again."""
        state.admitted = state.tail_unknown = True
        state.hit_tokens = state.sound_tokens = local_tokens
        state.noted_tokens = 0

    def allocated(self, state: RequestState, loaded_tokens: int) -> None:
        """Note that a request has its blocks, and what kvdepot loads into them.

        Without a load of kvdepot's the engine may resume within a block. That is looked up now: later the cache may
        also have what another connector has loaded for this request.
        """
        if not state.tail_unknown:
            return
        state.tail_unknown = False
        if not loaded_tokens:
            self._unloaded.add(state)
        tail = self._provenance.tail_tokens(state.request.block_hashes, state.hit_tokens)
        state.sound_tokens = state.hit_tokens + (loaded_tokens or tail)

    def sibling_loads(self, state: RequestState, tokens: int) -> None:
        """Trust a load of another kvdepot of this engine: its bytes are verified, and a failed load asks again."""
        self._unloaded.discard(state)
        state.sound_tokens = state.hit_tokens + tokens

    def step(
        self,
        requests: Mapping[str, RequestState],
        scheduled: Mapping[str, int],
        offloads: Mapping[str, BoundaryOffers],
        resolve: ResolveBlocks,
        drafts: Container[str] = (),
        preempted: Iterable[str] = (),
    ) -> None:
        """Check where the requests of a step begin, and note the blocks that they compute.

        In the order of their admission: a request may hit what an earlier one of the same step brings.

        `drafts` are the requests of a recurrent model with drafts in this step. `preempted` are those since the last.
        """
        for request_id in preempted:
            if (state := requests.get(request_id)) is not None and request_id not in scheduled:
                self._preempted(state)
        for waiting in self._unloaded:
            if waiting.request_id not in scheduled and requests.get(waiting.request_id) is waiting:
                # Another connector loads them asynchronously. Others may hit them before the request's first step.
                tables = resolve(waiting.request_id)
                self._provenance.foreign(tables, waiting.hit_tokens, waiting.request.num_tokens)
        self._unloaded.clear()
        for request_id in {**scheduled, **offloads}:
            state = requests.get(request_id)
            if state is None:
                continue
            begin, tokens = state.request.num_computed_tokens, scheduled.get(request_id, 0)
            # A step may begin before its tokens are known (asynchronous scheduling).
            hashed = len(state.request.block_hashes) * self._hash_block_tokens
            end = min(begin + tokens, hashed)
            if tokens:
                self._check(state, begin, resolve, drafts)
                state.sound_tokens, state.covered_tokens = begin + tokens, end
            if state.foreign:
                self._provenance.foreign(resolve(request_id), state.hit_tokens, begin + tokens)
            elif self._provenance.watches(state.adapter):
                self._note(state, end, offloads.get(request_id, ()), resolve)

    def _preempted(self, state: RequestState) -> None:
        """Look for blocks of a preempted request that have their names, and that no step has computed."""
        computed = min(state.sound_tokens, state.request.num_tokens - 1)
        if state.admitted or not self._provenance.named_beyond(state.request.block_hashes, max(computed, 0)):
            return  # admitted again, or the usual case
        if not state.foreign:
            self._stop(state, "preempted")

    def _check(self, state: RequestState, begin: int, resolve: ResolveBlocks, drafts: Container[str]) -> None:
        first, state.admitted = state.admitted, False
        if state.foreign:
            return
        if begin > state.sound_tokens or (first and begin and self._hits_foreign(state, begin, resolve)):
            self._stop(state, "foreign")
        elif first and state.request_id in drafts:  # padding: nothing has drafted for it yet
            self._stop(state, "padded")
        elif not first and begin < state.covered_tokens:
            state.hit_tokens = begin
            self._stop(state, "rolled_back")
            self._stores.retract(state, "rolled_back")

    def _hits_foreign(self, state: RequestState, begin: int, resolve: ResolveBlocks) -> bool:
        """Return whether the local hit of an admitted request has blocks that do not count."""
        if not self._provenance.any_foreign:
            return False
        hit = state.hit_tokens
        within_a_block = hit < begin < hit + self._provenance.longest_tokens  # perhaps a copy of a foreign block
        tables = resolve(state.request_id)
        return within_a_block or self._provenance.hits_foreign(tables, state.request.block_hashes, hit)

    def _stop(self, state: RequestState, why: str) -> None:
        state.foreign = True
        state.invalidate(why)
        self._counters[f"store_stopped_{why}"] += 1
        if not self._told:
            self._told = True
            LOGGER.info(
                "kvdepot: a request has KV of another connector of this engine, or of a failed, padded or preempted "
                "step, and is not stored; logged once"
            )

    def _note(self, state: RequestState, end: int, offers: BoundaryOffers, resolve: ResolveBlocks) -> None:
        """Note the blocks that this step computes, once a hash names them."""
        named = self._stores.offers.is_named
        states = [block_id for group, block_id, boundary in offers if named(state, group, block_id, boundary)]
        if states or end // self._hash_block_tokens > state.noted_tokens // self._hash_block_tokens:
            sound = state.excluded in _COMPUTED_SOUNDLY and not state.invalid
            sound = sound and state.store_epoch == self._namespaces.epoch_number
            tables: Sequence[Sequence[int]] = resolve(state.request_id)
            self._provenance.computed(tables, state.noted_tokens, end, states, state.adapter, sound=sound)
            state.noted_tokens = end
