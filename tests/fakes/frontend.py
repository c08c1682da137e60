"""The process that serves vLLM's /metrics: its own classes, and each step's statistics as they arrive there."""

from __future__ import annotations

from typing import Any

import msgspec
from prometheus_client import REGISTRY
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging, KVConnectorProm
from vllm.v1.metrics.prometheus import unregister_vllm_metrics

from tests.fakes.scripted_engine import ScriptedEngine

Samples = dict[tuple[str, str], float]


class Frontend:
    """Of one engine. There is one at a time: the registry is the process's."""

    def __init__(self, engine: ScriptedEngine) -> None:
        unregister_vllm_metrics()
        self.prom = KVConnectorProm(engine.config, ["engine"], {0: ["0"]})
        self.logging = KVConnectorLogging(engine.config.kv_transfer_config)
        self.seen: list[Samples] = []
        engine.observe = self._observe

    def _observe(self, stats: Any) -> None:
        if stats.kv_connector_stats:
            crossed = msgspec.msgpack.decode(msgspec.msgpack.encode(stats.kv_connector_stats))
            self.prom.observe(crossed)
            self.logging.observe(crossed)
        self.seen.append(self.samples())

    def samples(self) -> Samples:
        """(name without vLLM's prefix, own label) -> value."""
        found = {}
        for family in REGISTRY.collect():
            for sample in family.samples:
                if sample.name.startswith("vllm:kvdepot_") and not sample.name.endswith(("_created", "_bucket")):
                    label = ",".join(value for name, value in sample.labels.items() if name != "engine")
                    found[sample.name.removeprefix("vllm:kvdepot_"), label] = sample.value
        return found
