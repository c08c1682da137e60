"""The connector's scheduler side: what vLLM's scheduler asks, answered without waiting (design.md#connector).

Everything here runs on the engine's scheduler thread. The daemon's answers arrive through `session.poll()` on the same
thread, so nothing is shared and nothing is locked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

from kvdepot.client.vllm.base.engine_types import BlockPool, EngineRequest
from kvdepot.client.vllm.base.guard import make_all
from kvdepot.client.vllm.base.metadata import AdapterRead, Geometry, RankMeta, StepMeta
from kvdepot.client.vllm.identity.adapters import Adapter, LoadedAdapters, adapter_of
from kvdepot.client.vllm.scheduling.acceptance import Acceptance
from kvdepot.client.vllm.scheduling.events import KvEvents
from kvdepot.client.vllm.scheduling.loads import Loads, ResolveBlocks
from kvdepot.client.vllm.scheduling.local_reuse import LocalReuse
from kvdepot.client.vllm.scheduling.offers import Answer, Offers
from kvdepot.client.vllm.scheduling.origins import Origins
from kvdepot.client.vllm.scheduling.pins import BlockHolds
from kvdepot.client.vllm.scheduling.prefill_rate import PrefillRate
from kvdepot.client.vllm.scheduling.provenance import Provenance
from kvdepot.client.vllm.scheduling.request_ends import RequestEnds
from kvdepot.client.vllm.scheduling.requests import RequestState, exclusion, load_tokens_max, tokens_before_items
from kvdepot.client.vllm.scheduling.scheduler_stats import SchedulerStats
from kvdepot.client.vllm.scheduling.speculative import SpeculativeAcquires
from kvdepot.client.vllm.scheduling.store_steps import StoreSteps, Tables
from kvdepot.client.vllm.scheduling.stores import Stores
from kvdepot.client.vllm.scheduling.tier_checks import TierChecks
from kvdepot.core.calls import Kind
from kvdepot.core.misses import MissReason

if TYPE_CHECKING:
    from kvdepot.client.session import DepotSession
    from kvdepot.client.vllm.base.settings import Settings
    from kvdepot.client.vllm.scheduling.namespaces import Namespaces
    from kvdepot.core.planner import Planner


ADAPTERS_SECONDS: Final = 1.0
"""How often the adapters of running requests are looked up."""


class Adapters(Protocol):
    """Content digests of LoRA adapters."""

    def salt(self, lora_request: Any) -> bytes | None:
        """Return the salt of a request's keys, or None while the digest is not known, or if it cannot be known."""

    def read(self, read: AdapterRead) -> bool:
        """Note that the engine has read an adapter's files. Return whether it read other files before."""


class SchedulerSide:
    """The scheduler side of one engine, as long as the ranks' facts are the same.

    It is active, and then perhaps retired: it gives up everything, but waits for the copies of the ranks.

    Args:
        session: with the daemon.
        namespaces: of the engine's bytes.
        planner: of the engine's groups.
        settings: the operator's.
        adapters: digests of LoRA adapters.
        pool: the engine's block pool.
        hash_block_tokens: tokens per hash of the engine.
        lookahead_tokens: tokens after a block's end that the KV of its draft layers depends on.
        group_ids: planner group -> engine group.
        world_size: number of ranks.
        clock: monotonic, in seconds.
        event_kinds: as `KvEvents` takes them.
        loads_on: whether the engine's policy allows loads.
        stores_on: whether the engine's role allows stores.
        alone: whether no other engine core and no stage of a pipeline waits for this one's steps.
        counts_items: as `exclusion` takes it.
        keys_end_at_items: whether chunks that reach a picture, clip or sound have no key.
        ranks: digests of the facts that this side is built with.
        after_another: whether the engine may have cached blocks that this side has not seen computed.
        speculates: whether the engine verifies draft tokens.
    """

    def __init__(
        self,
        session: DepotSession,
        namespaces: Namespaces,
        planner: Planner,
        settings: Settings,
        adapters: Adapters,
        pool: BlockPool,
        *,
        hash_block_tokens: int,
        lookahead_tokens: int = 0,
        group_ids: Sequence[int],
        world_size: int,
        clock: Callable[[], float],
        event_kinds: Sequence[str] | None = None,
        loads_on: bool = True,
        stores_on: bool = True,
        alone: bool = True,
        counts_items: bool = False,
        keys_end_at_items: bool = False,
        ranks: Sequence[str] = (),
        after_another: bool = False,
        speculates: bool = False,
    ) -> None:
        self.session = session
        self.namespaces = namespaces
        self.planner = planner
        self.counters: Counter[str] = Counter()
        self._adapters = adapters
        self._loaded_adapters = LoadedAdapters()
        self._looked_at = clock()
        self._hash_block_tokens = hash_block_tokens
        self._lookahead_tokens = lookahead_tokens
        self._clock = clock
        self._loads_on = loads_on and settings.load_weight > 0
        self._stores_on = stores_on
        self._alone = alone
        self._counts_items, self._keys_end_at_items = counts_items, keys_end_at_items
        self._computed = False  # in the step before
        self._requests: dict[str, RequestState] = {}
        self._geometry: Geometry | None = Geometry(planner.chunk_tokens, planner.groups, tuple(ranks))
        self._suspended = False  # the engine has taken its KV memory away
        self.holds = BlockHolds.of(pool)
        self.provenance = Provenance(self.holds, planner, group_ids, hash_block_tokens)
        if after_another:
            self.provenance.begin()
        local_reuse = LocalReuse(
            self.holds, planner, group_ids, hash_block_tokens, self.holds.pinned_max(settings.max_pinned_blocks),
            self.provenance, proven_by_next=bool(lookahead_tokens),
        )  # fmt: skip
        self.events = KvEvents(planner, pool, group_ids, hash_block_tokens, event_kinds)
        self._tier_checks = TierChecks(session, namespaces, self.events, clock)
        self.prefill_rate = PrefillRate(clock)
        self.ends = RequestEnds(session, self.prefill_rate)
        self.acceptance = Acceptance(self.counters) if speculates else None
        speculative = SpeculativeAcquires(session, planner, settings, self.counters, local_reuse)
        self.loads = Loads(
            session, namespaces, planner, settings, clock, self.counters, self.events, speculative, local_reuse,
            group_ids, world_size,
        )  # fmt: skip
        self.offers = Offers(
            session, namespaces, planner, settings, clock, self.counters, self.events, self.prefill_rate, self.loads,
            speculative,
        )  # fmt: skip
        self.stores = Stores(
            session, namespaces, planner, self.holds, settings, clock, self.counters, self.events, self.ends,
            group_ids, hash_block_tokens, world_size,
        )  # fmt: skip
        self._store_steps = StoreSteps(self.stores, namespaces, planner, settings, self._update_keys)
        self._origins = Origins(self.provenance, self.stores, namespaces, self.counters, hash_block_tokens)
        self.stats = SchedulerStats(self)

    def _poll(self) -> None:
        self.session.poll()
        if self.namespaces.update():
            self._begin_epoch()

    def new_request(self, request: EngineRequest) -> None:
        """Remember a request, and ask the daemon what it has of it."""
        known = self._requests.get(request.request_id)
        if known is not None:
            if known.request is request:
                return
            self._finished(known)
        state = RequestState(request, self._clock(), store_epoch=self.namespaces.epoch_number)
        state.load_tokens_max = load_tokens_max(request)
        state.excluded = exclusion(request, counts_items=self._counts_items)
        state.keyed_tokens_max = tokens_before_items(request) if self._keys_end_at_items else None
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
            self.offers.locate(state)

    def _check_adapter(self, state: RequestState, lora_request: Any) -> None:
        state.adapter = adapter_of(lora_request)
        salt, replaced = self._loaded_adapters.asked(lora_request, self._adapters.salt(lora_request))
        self._replace(replaced)
        if salt is None:
            state.excluded = state.excluded or "adapter_unknown"
            state.invalid = self._loaded_adapters.indeterminate(state.adapter)
        state.salt = salt or b""

    def _replace(self, adapters: set[Adapter]) -> None:
        """Store and load nothing more for requests with these adapters, nor from blocks that they computed."""
        for adapter in adapters:
            self.counters["adapters_replaced"] += 1
            self.provenance.replaced(adapter)
            self.stores.replaced(adapter)
        for state in self._requests.values():
            if state.adapter in adapters:
                state.invalidate("adapter")
                self.loads.stop(state)
                state.excluded = state.excluded or "adapter_unknown"

    def _look_at_adapters_in_use(self) -> None:
        if self._clock() - self._looked_at >= ADAPTERS_SECONDS:
            self._look_at_adapters()

    def _look_at_adapters(self) -> None:
        """Check that the files of adapters in use are those that the requests began with."""
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

    def _update_keys(self, state: RequestState) -> int:
        return state.update_keys(self.planner.chunk_tokens, self._hash_block_tokens, self._lookahead_tokens)

    def matched(self, request: EngineRequest, local_tokens: int) -> tuple[int | None, bool]:
        """Return the tokens that can be loaded beyond the engine's own; None: ask again. Idempotent."""
        state = self._requests.get(request.request_id)
        if state is None:
            return 0, False
        state.local_tokens = local_tokens
        self._origins.asked(state, local_tokens)
        if state.excluded:
            self._check_local_hit(state, local_tokens)
            return 0, False
        self._poll()
        self._update_keys(state)
        offer: Answer = (0, False)
        if self._suspended:
            state.miss = MissReason.NOT_READY
        elif self._loads_on:
            offer = self.offers.offer(state, local_tokens)
        if offer[0] is not None:
            self._check_local_hit(state, local_tokens)
        return offer

    def _check_local_hit(self, state: RequestState, local_tokens: int) -> None:
        """Check the blocks of the engine's own cache on which a request will be computed."""
        if not self.provenance.counts_up_to(state.request.block_hashes, local_tokens, state.adapter):
            state.invalidate("epoch")
            self.counters["store_stopped_void_cache"] += 1

    def allocated(self, request: EngineRequest, external_tokens: int) -> None:
        """Begin the load of the offered tokens, or note that the request is computed. Its blocks are allocated."""
        state = self._requests.get(request.request_id)
        if state is not None:
            self._origins.allocated(state, external_tokens)
            self.ends.admitted(state, external_tokens)
        if external_tokens > 0:
            self.loads.allocated(self._requests[request.request_id], external_tokens)
        elif state is not None:
            self.offers.missed(state)

    def sibling_loads(self, request: EngineRequest, tokens: int) -> None:
        """Note that another kvdepot of this engine loads tokens of a request, beyond the engine's own."""
        state = self._requests.get(request.request_id)
        if state is not None:
            self._origins.sibling_loads(state, tokens)

    def allocation_failed(self, request: EngineRequest, external_tokens: int) -> None:
        """Report a load failed, because `allocated` raised."""
        if external_tokens > 0:
            state = self._requests.get(request.request_id) or RequestState(request, self._clock())
            self.loads.fail_allocated(state)

    def build(self, scheduler_output: Any) -> StepMeta:
        """Return this step's message to the ranks. Only here may block tables be read."""
        meta = StepMeta()
        self.add_loads(meta, scheduler_output)
        self.add_stores(meta, scheduler_output)
        return meta

    def add_loads(self, meta: StepMeta, scheduler_output: Any) -> None:
        """Add loads that were granted or have failed. What is in `meta` is sent, even if this raises later."""
        meta.geometry, self._geometry = self._geometry, None
        meta.probe_id, meta.resets = self.namespaces.probe(), self.namespaces.resets
        meta.computes = computes = bool(scheduler_output.num_scheduled_tokens)
        # Not after a step that computes: its tokens may still be waited for (asynchronous scheduling).
        meta.idle, self._computed = self._alone and not (computes or self._computed), computes
        block_state = scheduler_output.kv_connector_block_state
        resolve: ResolveBlocks | None = block_state.resolve_block_ids if block_state is not None else None
        # An error in one of these must not hold up a load: in every step, its request would wait for ever.
        calls: list[Callable[[], object]] = [
            partial(self.prefill_rate.step, scheduler_output.scheduled_new_reqs, self._requests),
            self._look_at_adapters_in_use,
            self._poll,
            partial(self.loads.build, meta, resolve),
            self._tier_checks.step,
        ]
        if self.acceptance is not None:
            scheduled, drafts = scheduler_output.num_scheduled_tokens, scheduler_output.scheduled_spec_decode_tokens
            calls.append(partial(self.acceptance.step, self._requests, scheduled, drafts))
        make_all(calls)

    def add_stores(self, meta: StepMeta, scheduler_output: Any) -> None:
        """Send granted stores, and hold and ask for new chunks. An error costs stores, never a load."""
        if not self._stores_on or self._suspended:
            return
        block_state = scheduler_output.kv_connector_block_state
        if block_state is not None:  # first: it may end stores
            recurrent = Kind.STATE in self.planner.kinds
            self._origins.step(
                self._requests,
                scheduler_output.num_scheduled_tokens,
                block_state.boundary_state_offloads,
                block_state.resolve_block_ids,
                drafts=scheduler_output.scheduled_spec_decode_tokens if recurrent else (),
                preempted=scheduler_output.preempted_req_ids or (),
            )
        self.stores.dispatch(meta)
        if block_state is not None:
            self._store_steps.step(self._requests, scheduler_output.num_scheduled_tokens, block_state)
        self.stores.ask()

    def output(self, meta: RankMeta | None) -> None:
        """Take the ranks' message: what they have finished, and adapters that they have read."""
        if meta is None:
            return
        self._adapters_read(meta.adapters)  # first: the same message may complete stores
        self.acknowledged(meta)

    def acknowledged(self, meta: RankMeta) -> None:
        """Take the part of the ranks' message that concerns every side: all but the adapters.

        Ranks say each thing once. So an exception in one acknowledgement must not lose the other ones.
        """
        calls: list[Callable[[], object]] = [
            partial(self.namespaces.rank_arena, rank, arena) for rank, arena in meta.arenas.items()
        ]
        for op_id, (ranks, failed) in meta.loads.items():
            suspended, corrupt = op_id in meta.suspended, op_id in meta.corrupt
            calls.append(partial(self.loads.acknowledged, op_id, ranks, failed, suspended=suspended, corrupt=corrupt))
        for op_id, (ranks, indices) in meta.stores.items():
            calls.append(partial(self.stores.acknowledged, op_id, ranks, indices))
        make_all(calls)

    def finished(self, request: EngineRequest, tables: Tables | None = None) -> dict[str, Any] | None:
        """Note the end of a request, done or aborted, at any step of its load and its stores.

        `tables` are its blocks per engine group. Return the `kv_transfer_params` of its output.
        """
        state = self._requests.pop(request.request_id, None)
        if state is None:
            return None
        calls: list[Callable[[], object]] = [partial(self._finished, state)]
        if self._stores_on and not self._suspended and tables is not None:
            calls.insert(0, partial(self._store_steps.last, state, tables))
        make_all(calls)
        return self.offers.transfer_params.params(state)

    def _finished(self, state: RequestState) -> None:
        calls: list[Callable[[], object]] = [
            partial(self.loads.finished, state),
            partial(self.prefill_rate.finished, state.request),
            partial(self.ends.count, state),
            partial(self._end, state),
        ]
        if self.acceptance is not None:
            calls.append(partial(self.acceptance.finished, state))
        make_all(calls)

    def _end(self, state: RequestState) -> None:
        """End its stores, and tell the daemon of its end, now or after them."""
        ends_later = self.stores.finished(state)
        if not ends_later and (state.located or self.session.attached):
            self.ends.send(state)

    def reset(self) -> None:
        """Begin an epoch, because the engine's caches are invalid: weights changed in place."""
        if self.namespaces.reset():
            self._begin_epoch()

    def _begin_epoch(self) -> None:
        """Use and store nothing more that was looked up, loaded or computed before."""
        self.counters["epochs"] += 1
        self.events.reset()
        self._give_up("epoch")
        self.provenance.begin()

    def _give_up(self, why: str) -> None:
        """Give up all loads and stores, and store nothing more of the present requests."""
        self.loads.reset(why)
        for state in self._requests.values():
            state.lookup = None
            state.invalidate(why)
        self.stores.reset(why)

    def suspend(self) -> None:
        """Offer and store nothing until `resume`: the engine takes its KV memory away."""
        self._suspended = True
        self._give_up("suspended")

    def resume(self) -> None:
        """Offer and store again: KV memory is back, with undefined content."""
        self._suspended = False

    # --- the end of this side, while the engine continues with another one

    def retire(self) -> list[EngineRequest]:
        """Give up everything, but wait for what ranks are copying. Return the engine's requests.

        `add_ends`, `acknowledged` and `pending` are called until the side is `over`.
        """
        requests = [state.request for state in self._requests.values()]
        self.namespaces.close()
        self.events.reset()
        self._give_up("replaced")
        for state in self._requests.values():
            self.stores.finished(state)
        self._requests.clear()
        return requests

    def adopt(self, requests: Iterable[EngineRequest]) -> None:
        """Take over the former side's requests. They may load, but not store: this side did not see them computed."""
        for request in requests:
            self.new_request(request)
            state = self._requests[request.request_id]
            state.sound_tokens = request.num_computed_tokens
            state.invalidate("replaced")

    def add_ends(self, meta: StepMeta) -> None:
        """Add the ends of a retired side: loads that no rank will see, and loads that must not succeed."""
        self.session.poll()
        self.loads.build(meta, None)

    @property
    def over(self) -> bool:
        """Whether no rank copies anything for this retired side, and no answer can lend it anything."""
        return not self.loads.active and not self.stores.open_requests

    def pending(self) -> bool:
        """Return whether the engine has to keep stepping although it has no request.

        Also for the load of an aborted request: its lease and its blocks wait for the ranks' report.
        """
        return self.loads.pending() or (self._stores_on and self.stores.pending())
