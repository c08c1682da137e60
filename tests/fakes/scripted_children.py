"""Connectors that say what a test has told them to, as children of a connector that combines several."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvdepot.client.vllm.base import compat
from kvdepot.client.vllm.base.metadata import RankMeta, StepMeta
from kvdepot.client.vllm.base.stats import KVDepotPromMetrics, KVDepotStats
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

Offer = tuple[int | None, bool]


class DenseChild(KVConnectorBase_V1):
    """Knows nothing of hybrid models."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.config = vllm_config.kv_transfer_config
        self.offers: dict[str, Offer] = {}  # by request id; else nothing
        self.asked: list[str] = []
        self.allocated: list[tuple[str, int]] = []
        self.handshakes: list[Mapping[Any, Any]] = []
        self.facts: Any = None
        self.stats: KVDepotStats | None = None

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Offer:
        self.asked.append(request.request_id)
        return self.offers.get(request.request_id, (0, False))

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.allocated.append((request.request_id, num_external_tokens))

    def build_connector_meta(self, scheduler_output: Any) -> StepMeta:
        return StepMeta()

    def get_handshake_metadata(self) -> Any:
        return self.facts

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Any) -> None:
        self.handshakes.append(metadata)

    def build_connector_worker_meta(self) -> RankMeta | None:
        return None

    def get_kv_connector_stats(self) -> KVDepotStats | None:
        stats, self.stats = self.stats, None
        return stats

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVDepotStats:
        return KVDepotStats(data or {})

    @classmethod
    def build_prom_metrics(cls, *given: Any) -> KVDepotPromMetrics:
        return KVDepotPromMetrics(*given)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...
    def wait_for_layer_load(self, layer_name: str) -> None: ...
    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...
    def wait_for_save(self) -> None: ...


class HybridChild(DenseChild, SupportsHMA):
    def request_finished_all_groups(
        self,
        request: Any,
        block_ids: tuple[list[int], ...],
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, None


class SleepyChild(HybridChild):
    """Knows of sleep, as all do from vLLM 0.33 on."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.heard: list[str] = []

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        return True

    def unregister_kv_caches(self) -> None:
        self.heard.append("unregister")

    def restore_kv_caches(self) -> None:
        self.heard.append("restore")


class SleeplessChild(SleepyChild):
    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        return False


for _kind in (DenseChild, HybridChild, SleepyChild, SleeplessChild):
    compat.register(_kind)
