"""How much of each request can be stored: after a step, and at the request's end (design.md#store).

A chunk can be stored when it is computed and has a key. A key covers only known tokens, and so neither drafts that may
be rejected, nor tokens that are not known when a step begins (asynchronous scheduling). With draft layers the key also
needs the tokens after the chunk. They may be a request's last ones: then no step schedules it again (docs/adr/0061).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvdepot.client.vllm.base.settings import Settings
    from kvdepot.client.vllm.scheduling.namespaces import Namespaces
    from kvdepot.client.vllm.scheduling.requests import RequestState
    from kvdepot.client.vllm.scheduling.state_offers import BoundaryOffers
    from kvdepot.client.vllm.scheduling.stores import Stores
    from kvdepot.core.planner import Planner

Tables = Sequence[Sequence[int]]
"""A request's block table per engine group."""


class StoreSteps:
    """Gives complete chunks to `Stores`. Used on the scheduler's thread only.

    `update_keys` adds the keys of a request's chunks that are known by now, and returns their number.
    """

    def __init__(
        self,
        stores: Stores,
        namespaces: Namespaces,
        planner: Planner,
        settings: Settings,
        update_keys: Callable[[RequestState], int],
    ) -> None:
        self._stores = stores
        self._namespaces = namespaces
        self._chunk_tokens = planner.chunk_tokens
        self._store_decode = settings.store_decode
        self._update_keys = update_keys

    @property
    def _on(self) -> bool:
        return self._namespaces.ranks_ready and self._namespaces.registered_id is not None

    def step(self, requests: Mapping[str, RequestState], scheduled: Mapping[str, int], block_state: Any) -> None:
        """Store what a step completes. `block_state` is vLLM's, valid only while the step is built."""
        if not self._on:
            return
        offloads: Mapping[str, BoundaryOffers] = block_state.boundary_state_offloads
        for request_id in {**scheduled, **offloads}:
            if (state := requests.get(request_id)) is not None:
                computed = state.request.num_computed_tokens + scheduled.get(request_id, 0)
                tables = partial(block_state.resolve_block_ids, request_id)
                self._consider(state, computed, tables, offloads.get(request_id, ()))

    def last(self, state: RequestState, tables: Tables) -> None:
        """Store what a request's last tokens have completed. Its blocks are still its own.

        A request that waits for a load is left out: vLLM counts the tokens of the load as computed.
        """
        if self._on and not state.admitted:
            request = state.request
            # Nothing is computed of the last token. A step that began before its tokens were known may have counted it.
            computed = min(request.num_computed_tokens, request.num_tokens - 1)
            self._consider(state, computed, lambda: tables)

    def _consider(
        self, state: RequestState, computed: int, tables: Callable[[], Tables], offers: BoundaryOffers = ()
    ) -> None:
        """Store what is complete of a request. Drafts may be among the `computed` tokens."""
        if state.excluded or state.store_stopped:
            self._stores.offers.drop(state, state.store_stopped)
            return
        if not self._store_decode:
            prompt_tokens = state.request.num_prompt_tokens
            computed = min(computed, prompt_tokens)
            offers = [offer for offer in offers if offer[2] <= prompt_tokens]
        if computed // self._chunk_tokens <= state.next_chunk and not offers and state not in self._stores.offers:
            return  # as most steps of a decode: block tables need not be read
        computed = min(computed, self._update_keys(state) * self._chunk_tokens)
        self._stores.consider(state, computed, tables(), offers)
