"""The connector's scheduler side: what vLLM's scheduler asks, answered without waiting (DESIGN 4, 7).

Everything here runs on the engine's scheduler thread; what the daemon answers arrives
through `session.poll()` on that same thread, so nothing is shared and nothing is locked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

from kvdepot.client.vllm.adapters import Adapter, LoadedAdapters, adapter_of
from kvdepot.client.vllm.events import KvEvents
from kvdepot.client.vllm.kept import KeptAttention
from kvdepot.client.vllm.loads import Loads, ResolveBlocks
from kvdepot.client.vllm.metadata import AdapterRead, Geometry, RankMeta, StepMeta
from kvdepot.client.vllm.pace import Pace
from kvdepot.client.vllm.pins import BlockHolds, BlockPool
from kvdepot.client.vllm.provenance import Provenance
from kvdepot.client.vllm.requests import EngineRequest, RequestState, exclusion, load_tokens_max
from kvdepot.client.vllm.stats import SchedulerStats
from kvdepot.client.vllm.stores import BoundaryOffers, Stores
from kvdepot.core.misses import MissReason

if TYPE_CHECKING:
    from kvdepot.client.session import DepotSession
    from kvdepot.client.vllm.namespaces import Namespaces
    from kvdepot.client.vllm.settings import Settings
    from kvdepot.core.planner import Planner


_COMPUTED_SOUNDLY: Final = ("", "adapter_unknown")
"""Exclusions of requests whose blocks count for others: what they are hashed by is what they are computed of."""


ADAPTERS_SECONDS: Final = 1.0
"""How often the adapters of running requests are looked up."""


class Adapters(Protocol):
    """Content digests of LoRA adapters."""

    def salt(self, lora_request: Any) -> bytes | None:
        """The salt of a request's keys; None while the digest is not known (or cannot be)."""

    def read(self, read: AdapterRead) -> bool:
        """The engine has read an adapter's files; returns whether they were others before."""


class SchedulerSide:
    """One per engine. `loads_on` and `stores_on` say what this engine's role and policy allow.

    `event_kinds`: as `KvEvents` takes them.
    """

    def __init__(
        self,
        session: DepotSession,
        namespaces: Namespaces,
        planner: Planner,
        settings: Settings,
        adapters: Adapters,
        *,
        hash_block_tokens: int,
        group_ids: Sequence[int],
        world_size: int,
        clock: Callable[[], float],
        event_kinds: Sequence[str] | None = None,
        loads_on: bool = True,
        stores_on: bool = True,
        alone: bool = True,
        counts_items: bool = False,
        ranks: Sequence[str] = (),
        after_another: bool = False,
    ) -> None:
        """`alone`: no other engine core and no other stage of a pipeline waits for this one's steps.

        `counts_items`: as `exclusion` takes it. `ranks`: digests of the facts that this side was built with.
        `after_another`: what the engine has cached until now was not computed or loaded under this side's eyes.
        """
        self.session = session
        self.namespaces = namespaces
        self.planner = planner
        self.counters: Counter[str] = Counter()
        self._settings = settings
        self._adapters = adapters
        self._loaded_adapters = LoadedAdapters()
        self._looked_at = clock()
        self._hash_block_tokens = hash_block_tokens
        self._group_ids = tuple(group_ids)
        self._world_size = world_size
        self._clock = clock
        self._loads_on = loads_on and settings.load_weight > 0
        self._stores_on = stores_on
        self._alone = alone
        self._counts_items = counts_items
        self._computed = False  # in the step before
        self._requests: dict[str, RequestState] = {}
        self._geometry: Geometry | None = Geometry(planner.chunk_tokens, planner.groups, tuple(ranks))
        self._after_another = after_another
        self._suspended = False  # the engine has taken its KV memory away
        self.events = KvEvents(planner, self._group_ids, hash_block_tokens, event_kinds)
        self.pace = Pace(clock)
        self.loads = Loads(
            session, namespaces, planner, settings, clock, self.counters, self.events, self.pace, self._group_ids,
            world_size,
        )  # fmt: skip
        self.stats = SchedulerStats(self)
        self.stores: Stores | None = None
        self.holds: BlockHolds | None = None
        self.provenance: Provenance | None = None

    def bind_pool(self, pool: BlockPool) -> None:
        """The engine's block pool exists: from now on blocks can be held, and so stored. Once."""
        self.holds = BlockHolds.of(pool)
        pinned_max = self.holds.pinned_max(self._settings.max_pinned_blocks)
        self.provenance = Provenance(self.holds, self.planner, self._group_ids, self._hash_block_tokens)
        if self._after_another:
            self.provenance.begin()
        self.loads.kept = KeptAttention(
            self.holds, self.planner, self._group_ids, self._hash_block_tokens, pinned_max, self.provenance
        )  # fmt: skip
        self.stores = Stores(
            self.session, self.namespaces, self.planner, self.holds, self._settings, self._clock,
            self.counters, self.events, self._group_ids, self._world_size,
        )  # fmt: skip

    def _poll(self) -> None:
        self.session.poll()
        if self.namespaces.update():
            self._begin_epoch()

    def new_request(self, request: EngineRequest) -> None:
        """Remember the request and ask the daemon what it has of it."""
        known = self._requests.get(request.request_id)
        if known is not None:
            if known.request is request:
                return
            self._finished(known)
        state = RequestState(request, self._clock(), store_epoch=self.namespaces.epoch_number)
        state.load_tokens_max = load_tokens_max(request)
        state.excluded = exclusion(request, counts_items=self._counts_items)
        if request.lora_request is not None:
            self._check_adapter(state, request.lora_request)
        self._requests[request.request_id] = state
        if state.excluded:
            self.counters[f"excluded_{state.excluded}"] += 1
            state.miss = MissReason.EXCLUDED
            return
        self._poll()
        self._update_keys(state)
        if self._loads_on and not request.skip_reading_prefix_cache:
            self.loads.locate(state)

    def _check_adapter(self, state: RequestState, lora_request: Any) -> None:
        state.adapter = adapter_of(lora_request)
        salt, replaced = self._loaded_adapters.asked(lora_request, self._adapters.salt(lora_request))
        self._replace(replaced)
        if salt is None:
            state.excluded = state.excluded or "adapter_unknown"
            state.void = self._loaded_adapters.doubted(state.adapter)
        state.salt = salt or b""

    def _replace(self, adapters: set[Adapter]) -> None:
        """Of requests with these adapters nothing more is stored or loaded, nor of what the engine has of them."""
        for adapter in adapters:
            self.counters["adapters_replaced"] += 1
            if self.provenance is not None:
                self.provenance.replaced(adapter)
            if self.stores is not None:
                self.stores.replaced(adapter)
        for state in self._requests.values():
            if state.adapter in adapters:
                self._void(state, "adapter")
                self.loads.stop(state)
                state.excluded = state.excluded or "adapter_unknown"

    def _look_at_adapters(self) -> None:
        """Whether the files of adapters that requests run with are still those that they began with."""
        self._looked_at = self._clock()
        for adapter in {state.adapter for state in self._requests.values() if state.adapter is not None}:
            lora_request = self._loaded_adapters.current(adapter)
            if lora_request is not None:
                self._replace(self._loaded_adapters.checked(adapter, self._adapters.salt(lora_request)))

    def _adapters_read(self, reads: Sequence[AdapterRead]) -> None:
        for read in reads:
            if self._adapters.read(read):
                self._replace(self._loaded_adapters.read(read.load))
        if reads:
            self._look_at_adapters()

    @staticmethod
    def _void(state: RequestState, why: str) -> None:
        state.void = True
        state.store_stopped = state.store_stopped or why

    def _update_keys(self, state: RequestState) -> int:
        return state.update_keys(self.planner.chunk_tokens, self._hash_block_tokens)

    def matched(self, request: EngineRequest, local_tokens: int) -> tuple[int | None, bool]:
        """Tokens that can be loaded beyond the engine's own; None: ask again. Idempotent."""
        state = self._requests.get(request.request_id)
        if state is None:
            return 0, False
        if state.excluded:
            self._check_local_hit(state, local_tokens)
            return 0, False
        self._poll()
        self._update_keys(state)
        offer = self.loads.offer(state, local_tokens) if self._loads_on and not self._suspended else (0, False)
        if offer[0] is not None:
            self._check_local_hit(state, local_tokens)
        return offer

    def _check_local_hit(self, state: RequestState, local_tokens: int) -> None:
        """The engine is about to compute the request on what its own cache has of it."""
        state.noted_tokens = 0
        if self.provenance is not None and not self.provenance.counts_up_to(
            state.request.block_hashes, local_tokens, state.adapter
        ):
            self._void(state, "epoch")
            self.counters["store_stopped_void_cache"] += 1

    def allocated(self, request: EngineRequest, external_tokens: int) -> None:
        """Blocks are there for the tokens that were offered: start the load. None were: the request is computed."""
        if external_tokens > 0:
            self.loads.allocated(self._requests[request.request_id], external_tokens)
        elif state := self._requests.get(request.request_id):
            self.loads.missed(state)

    def allocation_failed(self, request: EngineRequest, external_tokens: int) -> None:
        """Something went wrong in `allocated`: the engine must still hear of the load."""
        if external_tokens > 0:
            state = self._requests.get(request.request_id) or RequestState(request, self._clock())
            self.loads.fail_allocated(state)

    def build(self, scheduler_output: Any) -> StepMeta:
        """This step's message to the ranks. The one place where block tables may be read."""
        meta = StepMeta()
        self.add_loads(meta, scheduler_output)
        self.add_stores(meta, scheduler_output)
        return meta

    def add_loads(self, meta: StepMeta, scheduler_output: Any) -> None:
        """Loads granted or failed since the last step. What is in `meta` is sent even if this raises later."""
        meta.geometry, self._geometry = self._geometry, None
        meta.question = self.namespaces.question()
        computes = bool(scheduler_output.num_scheduled_tokens)
        # Not behind a step that computes: its tokens may be waited for yet (asynchronous scheduling).
        meta.idle, self._computed = self._alone and not (computes or self._computed), computes
        self.pace.step(scheduler_output.scheduled_new_reqs, self._requests)
        if self._clock() - self._looked_at >= ADAPTERS_SECONDS:
            self._look_at_adapters()
        self._poll()
        block_state = scheduler_output.kv_connector_block_state
        resolve: ResolveBlocks | None = block_state.resolve_block_ids if block_state is not None else None
        self.loads.build(meta, resolve)

    def add_stores(self, meta: StepMeta, scheduler_output: Any) -> None:
        """New chunks are held and asked for, granted ones are sent. An error costs stores, never a load."""
        if self.stores is None or not self._stores_on or self._suspended:
            return
        block_state = scheduler_output.kv_connector_block_state
        self.stores.dispatch(meta)
        if self.provenance is not None and self.provenance.on and block_state is not None:
            self._note(self.provenance, scheduler_output.num_scheduled_tokens, block_state)
        if block_state is not None and self.namespaces.ranks_ready and self.namespaces.usable is not None:
            self._consider(self.stores, scheduler_output.num_scheduled_tokens, block_state)
        self.stores.ask()

    def _note(self, provenance: Provenance, scheduled: dict[str, int], block_state: Any) -> None:
        """What this step computes, block by block."""
        offloads: dict[str, BoundaryOffers] = block_state.boundary_state_offloads
        for request_id in {**scheduled, **offloads}:
            state = self._requests.get(request_id)
            if state is None or not provenance.watches(state.adapter):
                continue
            hashed = len(state.request.block_hashes) * self._hash_block_tokens  # a step may run ahead of its tokens
            computed = min(state.request.num_computed_tokens + scheduled.get(request_id, 0), hashed)
            states = [block_id for _, block_id, _ in offloads.get(request_id, ()) if block_id]
            if states or computed // self._hash_block_tokens > state.noted_tokens // self._hash_block_tokens:
                tables = block_state.resolve_block_ids(request_id)
                sound = state.excluded in _COMPUTED_SOUNDLY and not state.void
                sound = sound and state.store_epoch == self.namespaces.epoch_number
                provenance.computed(tables, state.noted_tokens, computed, states, state.adapter, sound=sound)
                state.noted_tokens = computed

    def _consider(self, stores: Stores, scheduled: dict[str, int], block_state: Any) -> None:
        offloads: dict[str, BoundaryOffers] = block_state.boundary_state_offloads
        for request_id, tokens in scheduled.items():
            self._consider_request(stores, request_id, tokens, offloads.get(request_id, ()), block_state)
        for request_id, offers in offloads.items():
            if request_id not in scheduled:
                self._consider_request(stores, request_id, 0, offers, block_state)

    def _consider_request(
        self, stores: Stores, request_id: str, scheduled: int, offers: BoundaryOffers, block_state: Any
    ) -> None:
        state = self._requests.get(request_id)
        if state is None or state.excluded or state.store_stopped:
            return
        request = state.request
        computed = request.num_computed_tokens + scheduled
        if not self._settings.store_decode:
            computed = min(computed, request.num_prompt_tokens)
        if computed // self.planner.chunk_tokens <= state.next_chunk and not offers:
            return
        # Only what the hashes cover: with asynchronous scheduling a step runs ahead of its tokens.
        computed = min(computed, self._update_keys(state) * self.planner.chunk_tokens)
        stores.consider(state, computed, block_state.resolve_block_ids(request_id), offers)

    def output(self, meta: RankMeta | None) -> None:
        """What the ranks have finished."""
        if meta is None:
            return
        self._adapters_read(meta.adapters)  # before anything that the same step has stored is committed
        self.acknowledged(meta)

    def acknowledged(self, meta: RankMeta) -> None:
        """All of it but what concerns the present side alone: adapters that were read."""
        for rank, arena in meta.arenas.items():
            self.namespaces.rank_arena(rank, arena)
        for op_id, (ranks, failed) in meta.loads.items():
            self.loads.acknowledged(op_id, ranks, failed, suspended=op_id in meta.suspended)
        if self.stores is not None:
            for op_id, (ranks, indices) in meta.stores.items():
                self.stores.acknowledged(op_id, ranks, indices)

    def finished(self, request: EngineRequest) -> dict[str, Any] | None:
        """The request is over, done or aborted, at whatever step its load and its stores are.

        Returns the `kv_transfer_params` of its output.
        """
        state = self._requests.pop(request.request_id, None)
        return None if state is None else self._finished(state)

    def _finished(self, state: RequestState) -> dict[str, Any] | None:
        self.pace.finished(state.request)
        self.loads.finished(state)
        ends_later = self.stores is not None and self.stores.finished(state)
        if state.located and not ends_later:
            self.session.end_request(state.depot_id, state.end)
        return self.loads.handoffs.params(state)

    def reset(self) -> None:
        """The engine's caches are void (weights changed in place): begin a new epoch."""
        if self.namespaces.reset():
            self._begin_epoch()

    def _begin_epoch(self) -> None:
        """Nothing that was looked up, loaded or computed before may be used, or stored, any more."""
        self.counters["epochs"] += 1
        self.events.reset()
        self._give_up("epoch")
        if self.provenance is not None:
            self.provenance.begin()

    def _give_up(self, why: str) -> None:
        """Load and store nothing more of what is under way, nor of the requests that there are."""
        self.loads.reset(why)
        for state in self._requests.values():
            state.lookup = None
            self._void(state, why)
        if self.stores is not None:
            self.stores.reset(why)

    def suspend(self) -> None:
        """The engine takes its KV memory away: nothing is offered or stored until `resume`."""
        self._suspended = True
        self._give_up("suspended")

    def resume(self) -> None:
        """KV memory is there again, with nothing in it."""
        self._suspended = False

    # --- the end of this side, where the engine goes on with another one

    def retire(self) -> list[EngineRequest]:
        """Give up everything, but wait for what ranks are copying. Returns the engine's requests.

        Until `over`, `add_ends`, `acknowledged` and `pending` are called.
        """
        requests = [state.request for state in self._requests.values()]
        self.namespaces.close()
        self.events.reset()
        self._give_up("replaced")
        for state in self._requests.values():
            if self.stores is not None:
                self.stores.finished(state)
        self._requests.clear()
        return requests

    def adopt(self, requests: Iterable[EngineRequest]) -> None:
        """Requests of the side before. They may load; what they have computed was not under this side's eyes."""
        for request in requests:
            self.new_request(request)
            self._void(self._requests[request.request_id], "replaced")

    def add_ends(self, meta: StepMeta) -> None:
        """Of a side that has retired: loads that no rank will see, and those that must not succeed any more."""
        self.session.poll()
        self.loads.build(meta, None)

    @property
    def over(self) -> bool:
        """No rank has anything in hand of a side that has retired, and the daemon owes it no answer that lends."""
        return not self.loads.active and (self.stores is None or not self.stores.open_requests)

    def pending(self) -> bool:
        """Whether the engine has to keep stepping although it has no request.

        Also for the load of an aborted request: its lease and its blocks wait for the ranks' word.
        """
        if self.loads.pending():
            return True
        return self.stores is not None and self._stores_on and self.stores.pending()
