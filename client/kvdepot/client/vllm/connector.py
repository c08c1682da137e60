"""`KVDepotConnector`: vLLM's connector interface, as a thin facade over the two sides (design.md#connector).

Refusals at start are raised, with the setting to change. After the start nothing is raised: every method is guarded,
and answers a miss if anything goes wrong (I3).

vLLM may repeat the calls of its start (0.33 does, at each wake-up). The same facts change nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from kvdepot.client.attachment import Attachment, EngineProcess
from kvdepot.client.vllm.base import compat
from kvdepot.client.vllm.base.engine_rules import FAILURE_POLICY
from kvdepot.client.vllm.base.guard import Failures, guarded, nothing
from kvdepot.client.vllm.base.metadata import NUMBERS, RankFacts, RankMeta, StepMeta
from kvdepot.client.vllm.base.settings import Settings, parse_settings
from kvdepot.client.vllm.base.stats import KVDepotPromMetrics, KVDepotStats
from kvdepot.client.vllm.identity import identity
from kvdepot.client.vllm.identity.adapter_reads import AdapterReads
from kvdepot.client.vllm.identity.refusals import cacheable_groups, check_engine
from kvdepot.client.vllm.scheduling.sides import SchedulerSides
from kvdepot.client.vllm.worker import weight_changes
from kvdepot.client.vllm.worker.rank import replace_caches, start_rank
from kvdepot.client.vllm.worker.worker import WorkerSide
from kvdepot.core.errors import KvDepotError

if TYPE_CHECKING:
    from kvdepot.client.vllm.scheduling.scheduler import SchedulerSide

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
    """The connector: one in the scheduler process, and one in each worker process."""

    _cache_hit_source = compat.CacheHitSource.HOST
    _shook_hands = False  # the first handshake has begun: it may raise, and no later one

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        """Raise ConfigError or PlannerError for an engine or settings that cannot work."""
        compat.check_version()
        compat.check_interface(KVDepotConnector)
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self.settings: Settings = parse_settings(transfer.kv_connector_extra_config)
        check_engine(vllm_config, kv_cache_config, self.settings)
        self.failures = Failures(LOGGER)
        self.sides: SchedulerSides | None = None  # in the scheduler process
        self.worker_side: WorkerSide | None = None  # in a worker process, once its KV caches are known
        self._facts: RankFacts | None = None  # this rank's
        self._group_ids = cacheable_groups(kv_cache_config)
        identity.check_geometry(vllm_config, kv_cache_config, self._group_ids, self.settings)
        self._engine_id = str(transfer.engine_id)
        self._adapter_reads: AdapterReads | None = None
        self._watches_weights = False
        if role == compat.KVConnectorRole.SCHEDULER:
            loads_on = transfer.kv_load_failure_policy == FAILURE_POLICY
            if not loads_on:
                LOGGER.warning(
                    "kvdepot: kv_load_failure_policy is %r: it stores and never loads, because a failed load would "
                    "fail the request; set it to %r",
                    transfer.kv_load_failure_policy,
                    FAILURE_POLICY,
                )
            self.sides = SchedulerSides(
                vllm_config, kv_cache_config, self.settings, tuple(self._group_ids), loads_on=loads_on
            )
            return
        # A user who names the weights, or keeps what is stored across sleep, answers for what is done to them.
        self._watches_weights = not self.settings.weights_version and not self.settings.keep_across_sleep
        if self._watches_weights:
            weight_changes.watch(vllm_config)
        if vllm_config.lora_config is not None:
            self._adapter_reads = AdapterReads(int(vllm_config.parallel_config.rank))

    # --- both sides

    @property
    def requires_kv_delivery(self) -> bool:
        """Return False: kvdepot is a cache, and a store that does not happen is a later miss."""
        return False

    @guarded(nothing)
    def get_kv_connector_stats(self) -> KVDepotStats | None:
        """Return what happened in this process since the last call, or None. vLLM calls it in every step."""
        stats = self.sides.take_stats() if self.sides is not None else KVDepotStats()
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
        """End threads and connections, in a bounded time."""
        worker, self.worker_side = self.worker_side, None
        if worker is not None:
            worker.close()
        if self._side is not None:
            counters = self._side.counters + self.failures.counts
            LOGGER.info("kvdepot: %s", dict(sorted(counters.items())))
        if self.sides is not None:
            self.sides.close()

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:  # noqa: ARG003 - vLLM's signature
        """Return True: copies end before KV memory goes, and stores belong to the weights that computed them."""
        return True

    @guarded(nothing)
    def unregister_kv_caches(self) -> None:
        """End the copies before KV memory goes, and wait for them for a bounded time. Then load and store nothing."""
        if self.worker_side is not None and not self.worker_side.suspend():
            LOGGER.error("kvdepot: a copy has not ended before the engine takes its KV memory away")
        if self._side is not None:
            self._side.suspend()

    @guarded(nothing)
    def restore_kv_caches(self) -> None:
        """Copy again: KV memory is back, at the same addresses."""
        if self.worker_side is not None:
            self.worker_side.resume()
        if self._side is not None:
            self._side.resume()

    # --- worker side

    @guarded(nothing)
    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Learn the layers, and begin to attach in the background. The same layers again change nothing.

        No graph is captured yet, so `pin = start` pins the arena here.
        """
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
        if self._watches_weights:
            weight_changes.tell(self.worker_side)
        attachment.start()
        if self.settings.pin == "start":
            self.worker_side.prepare_at_once()

    @guarded(nothing)
    def get_handshake_metadata(self) -> RankFacts | None:
        return self._facts

    @guarded(nothing)
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ARG002 - vLLM's signature
        if self.worker_side is not None and isinstance(self._connector_metadata, StepMeta):
            self.worker_side.start_loads(self._connector_metadata)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: loads are asynchronous, between steps."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: stores are block by block, after the forward pass."""

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

    @property
    def _side(self) -> SchedulerSide | None:
        """The present scheduler side; None in a worker, and while the ranks' facts are not known."""
        return self.sides.current if self.sides is not None else None

    @guarded(nothing)
    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        if self.sides is not None:
            self.sides.bind_pool(gpu_block_pool)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """Take every rank's facts: with them a scheduler side can be built.

        Raises:
            PlannerError: at the engine's start, if the geometry cannot work. vLLM 0.33 repeats the call at each
                wake-up, and then nothing is raised.
        """
        if self.sides is None:
            return
        if self._shook_hands:
            self._repeat_handshake(metadata)
        else:
            self._shook_hands = True
            try:
                self.sides.handshake(metadata)
            except KvDepotError:
                raise  # the operator's to correct
            except Exception as error:  # noqa: BLE001 - I3: no thread or socket to be had, for example
                self.failures.record("handshake", error)

    @guarded(nothing)
    def _repeat_handshake(self, metadata: dict[tuple[int, int], Any]) -> None:
        if self.sides is not None:
            self.sides.handshake(metadata)

    @guarded(nothing)
    def on_new_request(self, request: Any) -> None:
        if self._side is not None:
            self._side.new_request(request)

    @guarded(_no_match)
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._side is None:
            return 0, False
        return self._side.matched(request, num_computed_tokens)

    @guarded(_report_load)
    def update_state_after_alloc(
        self,
        request: Any,
        blocks: Any,  # noqa: ARG002 - block ids are read in build_connector_meta only
        num_external_tokens: int,
    ) -> None:
        if self._side is not None:
            self._side.allocated(request, num_external_tokens)

    @guarded(nothing)
    def sibling_loads(self, request: Any, tokens: int) -> None:
        """Trust a load of another kvdepot of this engine (`WeightedMultiConnector`): the request may be stored."""
        if self._side is not None:
            self._side.sibling_loads(request, tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMeta:
        """Fill one message in two guarded halves: an error in the second must not lose what the first sent."""
        if self.sides is not None:
            self.sides.stepped = True
        meta = StepMeta(number=next(NUMBERS))
        self._add_loads(meta, scheduler_output)
        self._add_stores(meta, scheduler_output)
        return meta

    @guarded(nothing)
    def fail_allocated(self, request: Any, num_external_tokens: int) -> None:
        """Report a load failed for which the engine has allocated blocks, and which could not begin."""
        if self._side is not None:
            self._side.allocation_failed(request, num_external_tokens)

    @guarded(nothing)
    def _add_loads(self, meta: StepMeta, scheduler_output: Any) -> None:
        if self.sides is not None:
            self.sides.add_ends(meta)
        if self._side is not None:
            self._side.add_loads(meta, scheduler_output)

    @guarded(nothing)
    def _add_stores(self, meta: StepMeta, scheduler_output: Any) -> None:
        if self._side is not None:
            self._side.add_stores(meta, scheduler_output)

    @guarded(nothing)
    def update_connector_output(self, connector_output: Any) -> None:
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, RankMeta) and self.sides is not None:
            self.sides.output(meta)

    @guarded(_free_now)
    def request_finished_all_groups(
        self,
        request: Any,
        block_ids: tuple[list[int], ...],
    ) -> tuple[bool, dict[str, Any] | None]:
        """Never delay the blocks: they are held weakly, and stay readable until their reuse."""
        return False, self._side.finished(request, block_ids) if self._side is not None else None

    @guarded(lambda *_: False)
    def has_pending_push_work(self) -> bool:
        return self.sides is not None and self.sides.pending()

    @guarded(nothing)
    def reset_cache(self) -> bool | None:
        if self.sides is not None:
            self.sides.reset()
        return True

    @guarded(_no_events)
    def take_events(self) -> Iterable[Any]:
        return self.sides.take_events() if self.sides is not None else ()


compat.register(KVDepotConnector)
