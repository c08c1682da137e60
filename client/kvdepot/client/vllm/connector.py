"""`KVDepotConnector`: vLLM's connector interface, as a thin facade over the two sides (DESIGN 7).

Refusals at start are raised, with what to set. After start nothing is: every method is
guarded, and answers a miss when anything goes wrong (I3).

What vLLM calls once at its start it may call again (0.33: at each wake-up). The same facts
change nothing. Others end the scheduler side that there is, and begin another one with the
same epoch (docs/adr/0047).
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterable
from typing import Any

from kvdepot.client.attachment import Attachment, EngineProcess
from kvdepot.client.session import DepotSession
from kvdepot.client.vllm import compat, identity
from kvdepot.client.vllm.adapter_reads import AdapterReads
from kvdepot.client.vllm.elements import elements_of
from kvdepot.client.vllm.guard import Failures, guarded, nothing
from kvdepot.client.vllm.metadata import NUMBERS, RankFacts, RankMeta, StepMeta
from kvdepot.client.vllm.namespaces import Namespaces
from kvdepot.client.vllm.rank import replace_caches, start_rank
from kvdepot.client.vllm.refusals import cacheable_groups, check_engine
from kvdepot.client.vllm.scheduler import SchedulerSide
from kvdepot.client.vllm.settings import Settings, parse_settings
from kvdepot.client.vllm.stats import KVDepotPromMetrics, KVDepotStats
from kvdepot.client.vllm.weights import Digests, LoraSalts, WeightsSource, cache_path, weights_source
from kvdepot.client.vllm.worker import WorkerSide
from kvdepot.core.errors import ConfigError, KvDepotError

LOGGER = logging.getLogger("vllm.kvdepot")  # below vLLM's logger, so that its handlers apply


def _no_match(*_args: Any, **_kwargs: Any) -> tuple[int | None, bool]:
    return 0, False


def _free_now(*_args: Any, **_kwargs: Any) -> tuple[bool, dict[str, Any] | None]:
    return False, None


def _no_results(*_args: Any, **_kwargs: Any) -> Any:
    return compat.KVConnectorTransferResults()


def _no_events(*_args: Any, **_kwargs: Any) -> tuple[Any, ...]:
    return ()


def _report_load(self: KVDepotConnector, request: Any, blocks: Any, num_external_tokens: int) -> None:  # noqa: ARG001 - as the method
    self.fail_allocated(request, num_external_tokens)


class KVDepotConnector(compat.KVConnectorBase_V1, compat.SupportsHMA):
    """One in the scheduler process, one in each worker."""

    _cache_hit_source = compat.CacheHitSource.HOST
    _heard: tuple[RankFacts, ...] | None = None  # all ranks' facts, as the scheduler side knows them; None: not yet

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        """Raises ConfigError or PlannerError for an engine or settings that cannot work."""
        compat.check_version()
        compat.check_interface(KVDepotConnector)
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self.settings: Settings = parse_settings(transfer.kv_connector_extra_config)
        check_engine(vllm_config, kv_cache_config, self.settings)
        self.failures = Failures(LOGGER)
        self.scheduler_side: SchedulerSide | None = None
        self.worker_side: WorkerSide | None = None
        self._facts: RankFacts | None = None  # this rank's
        self._world_size = int(vllm_config.parallel_config.world_size)
        self._session: DepotSession | None = None
        self._session_ranks = 0
        self._former: list[SchedulerSide] = []  # whose last copies the ranks have in hand
        self._epoch: Namespaces | None = None  # of the last scheduler side: the next one goes on with it
        self._reset_early = False  # before there was any
        self._stepped = False  # and so the engine may have cached something
        self._last_stats, self._last_events = KVDepotStats(), list[Any]()  # of former sides
        self._pool: Any = None
        self._group_ids = cacheable_groups(kv_cache_config)
        identity.check_geometry(vllm_config, kv_cache_config, self._group_ids, self.settings)
        self._engine_id = str(transfer.engine_id)
        self._digests: Digests | None = None
        self._salts: LoraSalts | None = None  # it remembers what the ranks said, which they do not say again
        self._weights = WeightsSource()
        self._loads_on = transfer.kv_load_failure_policy == "recompute"
        self._adapter_reads: AdapterReads | None = None
        if role == compat.KVConnectorRole.SCHEDULER:
            self._start_scheduler()
        elif vllm_config.lora_config is not None:
            self._adapter_reads = AdapterReads(int(vllm_config.parallel_config.rank))

    def _start_scheduler(self) -> None:
        config = self._vllm_config
        self._weights = weights_source(config.model_config, config.load_config, self.settings.model_revision)
        self._digests = Digests(cache_path())
        self._salts = LoraSalts(self._digests)
        if self._weights.folder is not None:
            self._digests.get(self._weights.folder)
        if not self._loads_on:
            LOGGER.warning(
                "kvdepot: kv_load_failure_policy is %r: it stores and never loads, because a failed load would fail "
                "the request; set it to 'recompute'",
                config.kv_transfer_config.kv_load_failure_policy,
            )

    # --- both sides

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache: a store that does not happen is a later miss."""
        return False

    @guarded(nothing)
    def get_kv_connector_stats(self) -> KVDepotStats | None:
        """What happened on this side since the last call, which every step makes; None: nothing."""
        stats, self._last_stats = self._last_stats, KVDepotStats()
        if self.scheduler_side is not None:
            self.scheduler_side.stats.add_to(stats)
        if self.worker_side is not None:
            self.worker_side.add_stats(stats)
        stats.add("errors", "", self.failures.take())
        return None if stats.is_empty() else stats

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVDepotStats:
        return KVDepotStats(data if data is not None else {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVDepotPromMetrics:
        return KVDepotPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @guarded(nothing)
    def shutdown(self) -> None:
        """End threads and connections, bounded."""
        worker, self.worker_side = self.worker_side, None
        scheduler, self.scheduler_side = self.scheduler_side, None
        session, self._session = self._session, None
        if worker is not None:
            worker.close()
        if scheduler is not None:
            LOGGER.info("kvdepot: %s", dict(sorted((scheduler.counters + self.failures.counts).items())))
        sessions = {side.session for side in self._former} | ({session} if session is not None else set())
        self._former.clear()
        for ended in sessions:
            ended.end()
        for ended in sessions:
            ended.close()
        if self._digests is not None:
            self._digests.close()

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:  # noqa: ARG003 - vLLM's signature
        """Copies end before KV memory goes, and what is stored is of the weights that computed it."""
        return True

    @guarded(nothing)
    def unregister_kv_caches(self) -> None:
        """KV memory goes: end the copies, and wait for them for a bounded time. Load and store nothing meanwhile."""
        if self.worker_side is not None and not self.worker_side.suspend():
            LOGGER.error("kvdepot: a copy has not ended before the engine takes its KV memory away")
        if self.scheduler_side is not None:
            self.scheduler_side.suspend()

    @guarded(nothing)
    def restore_kv_caches(self) -> None:
        """KV memory is there again, at the same addresses: copy again."""
        if self.worker_side is not None:
            self.worker_side.resume()
        if self.scheduler_side is not None:
            self.scheduler_side.resume()

    # --- worker side

    @guarded(nothing)
    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Learn the layers and begin to attach, in the background. The same ones again: nothing happens."""
        if self.worker_side is not None and self._facts is not None:
            self._facts = replace_caches(
                self.worker_side, self._facts, kv_caches, self._kv_cache_config, self._group_ids, self.settings,
                self.failures,
            )  # fmt: skip
            self.worker_side.resume()  # what is registered is there
            return
        parallel = self._vllm_config.parallel_config
        rank = int(parallel.rank)
        attachment = Attachment(
            self.settings.endpoint,
            EngineProcess(self._engine_id, scheduler=False, rank=rank, world_size=int(parallel.world_size)),
            transport=self.settings.transport,
            log=LOGGER,
        )
        self.worker_side, self._facts = start_rank(
            rank, kv_caches, self._kv_cache_config, self._group_ids, attachment, self.settings, self.failures
        )
        attachment.start()

    @guarded(nothing)
    def get_handshake_metadata(self) -> RankFacts | None:
        return self._facts

    @guarded(nothing)
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ARG002 - vLLM's signature
        if self.worker_side is not None and isinstance(self._connector_metadata, StepMeta):
            self.worker_side.start_loads(self._connector_metadata)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: loads are asynchronous, between steps."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: stores are block by block, after the forward."""

    @guarded(nothing)
    def wait_for_save(self) -> None:
        if self.worker_side is not None and isinstance(self._connector_metadata, StepMeta):
            self.worker_side.start_stores(self._connector_metadata)

    @guarded(_no_results)
    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:  # noqa: ARG002 - vLLM's signature
        return self.worker_side.results() if self.worker_side is not None else _no_results()

    @guarded(nothing)
    def build_connector_worker_meta(self) -> RankMeta | None:
        meta = self.worker_side.take_meta() if self.worker_side is not None else None
        return self._adapter_reads.add_to(meta) if self._adapter_reads is not None else meta

    # --- scheduler side

    @guarded(nothing)
    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """The same pool again: nothing happens. Another one: its block ids mean other blocks."""
        if gpu_block_pool is self._pool:
            return
        known, self._pool = self._pool, gpu_block_pool
        if self.scheduler_side is None:
            return
        if known is None:
            self.scheduler_side.bind_pool(gpu_block_pool)
        elif self._heard is not None:
            self._begin_side(self._heard)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """Every rank's facts: with them the scheduler side can be built.

        At start it raises PlannerError for a geometry that cannot work: the engine has not started yet. vLLM repeats
        the call at each wake-up, and then nothing is raised.
        """
        if self._heard is None:
            self._heard = ()
            self._heard = self._facts_of(metadata)
            self._begin_side(self._heard)
        else:
            self._hear_again(metadata)

    @staticmethod
    def _facts_of(metadata: dict[tuple[int, int], Any]) -> tuple[RankFacts, ...]:
        # Beside another connector the ranks' answers may be that one's: none of ours is a reason to stay idle.
        own = (found for found in metadata.values() if isinstance(found, RankFacts))
        return tuple(sorted(own, key=lambda found: found.rank))

    @guarded(nothing)
    def _hear_again(self, metadata: dict[tuple[int, int], Any]) -> None:
        """The same changes nothing; nor does a part of it, as long as the engine has as many ranks as before."""
        facts = self._facts_of(metadata)
        before, self._world_size = self._world_size, int(self._vllm_config.parallel_config.world_size)
        complete = not identity.check_ranks(facts, self._world_size)
        known = facts == self._heard if complete else set(facts) <= set(self._heard or ())
        if known and before == self._world_size and (self.scheduler_side is not None or not complete):
            return
        self._heard = facts
        try:
            self._begin_side(facts)
        except KvDepotError as error:
            LOGGER.error("kvdepot: stores and loads nothing: %s", error)
        self._forget_former()

    def _begin_side(self, facts: tuple[RankFacts, ...]) -> None:
        """End the scheduler side that there is, and build one from all ranks' facts. Raises PlannerError."""
        requests = self._end_side()
        problem = identity.check_ranks(facts, self._world_size)
        if problem:
            LOGGER.error("kvdepot: stores and loads nothing: %s", problem)
            return
        config = self._vllm_config
        groups = identity.group_specs(self._kv_cache_config, self._group_ids, facts, config.parallel_config)
        planner = identity.engine_planner(config, self._kv_cache_config, groups, self.settings)
        session = self._session_for(self._world_size)
        former = self._epoch
        namespaces = Namespaces(
            session,
            self._spec_builder(planner, facts),
            self._world_size,
            LOGGER,
            lambda: secrets.token_hex(8),
            time.monotonic,
            weights_version=self.settings.weights_version,
            keep_across_sleep=self.settings.keep_across_sleep,
            weights_arrive=config.weight_transfer_config is not None,
            elements=elements_of(
                self._kv_cache_config, str(config.cache_config.cache_dtype), planner, self._group_ids, facts
            ),
            former=former,
        )
        assert self._salts is not None
        side = SchedulerSide(
            session,
            namespaces,
            planner,
            self.settings,
            self._salts,
            hash_block_tokens=compat.hash_block_tokens(self._kv_cache_config, config),
            group_ids=self._group_ids,
            world_size=self._world_size,
            clock=time.monotonic,
            event_kinds=compat.event_kinds(config, self._kv_cache_config),
            loads_on=self._loads_on,
            alone=config.parallel_config.data_parallel_size == config.parallel_config.pipeline_parallel_size == 1,
            counts_items=compat.counts_items(config),
            ranks=[found.digest for found in facts],
            after_another=self._stepped,
        )
        if self._reset_early:
            namespaces.reset()
        self._epoch, self._reset_early = namespaces, False
        if self._pool is not None:
            side.bind_pool(self._pool)
        self.scheduler_side = side
        namespaces.update()
        side.adopt(requests)

    def _session_for(self, world_size: int) -> DepotSession:
        """One for all sides, as long as it fits: another one would declare what ranks have in hand of a former side
        as given back (docs/adr/0047).
        """
        if self._session is None or self._session_ranks != world_size:
            self._session = DepotSession(self.settings.endpoint, self._engine_id, world_size, log=LOGGER)
            self._session_ranks = world_size
            self._session.start()
        return self._session

    def _end_side(self) -> list[Any]:
        """Close the scheduler side, if there is one, but for what the ranks have in hand. Returns its requests."""
        side, self.scheduler_side = self.scheduler_side, None
        if side is None:
            return []
        self._former.append(side)
        requests = side.retire()
        self._last_events += side.events.take()
        return requests

    def _forget_former(self) -> None:
        """Sides of which no rank has anything in hand any more; and those of a session that no rank is in any more."""
        for side in list(self._former):
            if not side.over and (side.session is self._session or side.pending()):
                continue
            self._former.remove(side)
            side.stats.add_to(self._last_stats)
            shared = any(other.session is side.session for other in self._former)
            if not shared and (side.session is not self._session or self.scheduler_side is None):
                side.session.end()  # not `close`: this thread waits for no daemon (I2)
                self._session = self._session if side.session is not self._session else None

    def _spec_builder(self, planner: Any, facts: tuple[RankFacts, ...]) -> Callable[[], Any]:
        """Builds the namespace as soon as the digest of the weights is known."""

        def build() -> Any:
            weights = self._weights.text
            if self._weights.folder is not None:
                assert self._digests is not None
                digest = self._digests.get(self._weights.folder)
                if digest is None:
                    problem = self._digests.problem(self._weights.folder)
                    if problem:
                        raise ConfigError("kvdepot", "weights", problem)
                    return None
                weights = f"files {digest}"
            return identity.namespace_spec(
                self._vllm_config, self._kv_cache_config, planner, facts, self.settings, weights
            )

        return build

    @guarded(nothing)
    def on_new_request(self, request: Any) -> None:
        if self.scheduler_side is not None:
            self.scheduler_side.new_request(request)

    @guarded(_no_match)
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self.scheduler_side is None:
            return 0, False
        return self.scheduler_side.matched(request, num_computed_tokens)

    @guarded(_report_load)
    def update_state_after_alloc(
        self,
        request: Any,
        blocks: Any,  # noqa: ARG002 - block ids are read in build_connector_meta only
        num_external_tokens: int,
    ) -> None:
        if self.scheduler_side is not None:
            self.scheduler_side.allocated(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMeta:
        """Two guarded halves that fill one message: an error in the second must not lose what the first sent."""
        self._stepped = True
        meta = StepMeta(number=next(NUMBERS))
        self._add_loads(meta, scheduler_output)
        self._add_stores(meta, scheduler_output)
        return meta

    @guarded(nothing)
    def fail_allocated(self, request: Any, num_external_tokens: int) -> None:
        """The engine has allocated blocks and the load could not begin: it must still hear of it."""
        if self.scheduler_side is not None:
            self.scheduler_side.allocation_failed(request, num_external_tokens)

    @guarded(nothing)
    def _add_loads(self, meta: StepMeta, scheduler_output: Any) -> None:
        for side in self._former:
            side.add_ends(meta)
        self._forget_former()
        if self.scheduler_side is not None:
            self.scheduler_side.add_loads(meta, scheduler_output)

    @guarded(nothing)
    def _add_stores(self, meta: StepMeta, scheduler_output: Any) -> None:
        if self.scheduler_side is not None:
            self.scheduler_side.add_stores(meta, scheduler_output)

    @guarded(nothing)
    def update_connector_output(self, connector_output: Any) -> None:
        said = connector_output.kv_connector_worker_meta
        if not isinstance(said, RankMeta):
            return
        for side in self._former:
            side.acknowledged(said)
        if self.scheduler_side is not None:
            self.scheduler_side.output(said)
        elif self._salts is not None:
            for read in said.adapters:  # said once: a later side has to know what the ranks compute with
                self._salts.read(read)

    @guarded(_free_now)
    def request_finished_all_groups(
        self,
        request: Any,
        block_ids: tuple[list[int], ...],  # noqa: ARG002 - blocks are held already
    ) -> tuple[bool, dict[str, Any] | None]:
        """Never delays the blocks: they are held weakly, and stay readable until reused."""
        return False, self.scheduler_side.finished(request) if self.scheduler_side is not None else None

    @guarded(lambda *_: False)
    def has_pending_push_work(self) -> bool:
        sides = [*self._former, self.scheduler_side]
        return any(side is not None and side.pending() for side in sides)

    @guarded(nothing)
    def reset_cache(self) -> bool | None:
        if self.scheduler_side is not None:
            self.scheduler_side.reset()
        elif self._epoch is not None:
            self._epoch.reset()
        else:
            self._reset_early = True
        return True

    @guarded(_no_events)
    def take_events(self) -> Iterable[Any]:
        events, self._last_events = self._last_events, []
        return events + (self.scheduler_side.events.take() if self.scheduler_side is not None else [])


compat.register(KVDepotConnector)
