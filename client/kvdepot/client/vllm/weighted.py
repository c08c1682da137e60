"""`WeightedMultiConnector`: several connectors in one engine, of which the best one loads (row P9).

vLLM's own MultiConnector loads from the first child that has anything, and waits for all of
them. Here a child's offer is worth its tokens by its weight (`load_weight` in the child's own
`kv_connector_extra_config`, 1 without it; 0: it only stores), and one that is not ready holds
up nobody as long as another one has something. What is computed or loaded is stored by all.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, Final

from kvdepot.client.endpoint import endpoint_url
from kvdepot.client.vllm.base import compat
from kvdepot.client.vllm.base.stats import PREFIX, KVDepotStats
from kvdepot.client.vllm.connector import KVDepotConnector
from kvdepot.core.errors import ConfigError

WHERE: Final = "WeightedMultiConnector"
OWN: Final = "weighted"
"""In addition to the children's, the name of what the choice itself counts."""
DEPOT: Final = "KVDepotConnector"
CHILD: Final = "child"
COUNTERS: Final[Mapping[str, str]] = {
    "child_loads": "Requests for which blocks were allocated to load from the child.",
    "child_load_tokens": "Tokens that these were to load.",
    "child_not_ready": "Choices made without the child, which had not answered yet.",
}
"""Family -> its meaning; each by child."""


@dataclass(frozen=True, slots=True)
class RankHandshakes(compat.KVConnectorHandshakeMetadata):
    """What the children of one rank say, in their order; None: nothing."""

    of_children: tuple[Any, ...]


class WeightedMultiConnector(compat.MultiConnector):
    """`kv_connector_extra_config`: `connectors`, the children's KV transfer configs, as for MultiConnector."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        """Make the children. Raise ConfigError for children that cannot be combined, by name."""
        compat.check_version()
        compat.check_interface(WeightedMultiConnector)
        self._weights = check_children(vllm_config)
        super().__init__(vllm_config, role, kv_cache_config)
        self._labels = child_labels(vllm_config)
        self._counted = KVDepotStats()

    @classmethod
    def _get_connector_classes_and_configs(cls, vllm_config: Any) -> list[tuple[type[Any], Any]]:
        """Let the children follow the outer failure policy, which is the one that vLLM reads."""
        outer = vllm_config.kv_transfer_config
        children = []
        for child in children_of(outer):
            config = copy.copy(vllm_config)
            config.kv_transfer_config = compat.KVTransferConfig(
                **{"engine_id": outer.engine_id, "kv_load_failure_policy": outer.kv_load_failure_policy} | child
            )
            connector = compat.KVConnectorFactory.get_connector_class(config.kv_transfer_config)
            if connector.__name__ == DEPOT:  # of several lookups one at most is followed by a load
                config.kv_transfer_config.kv_connector_extra_config = {"speculative_acquire": False} | child.get(
                    "kv_connector_extra_config", {}
                )
            compat.register(connector)
            children.append((connector, config))
        return children

    # --- the ranks' facts, each child's its own

    def get_handshake_metadata(self) -> RankHandshakes | None:
        handshakes = tuple(child.get_handshake_metadata() for child in self._connectors)
        return RankHandshakes(handshakes) if any(handshake is not None for handshake in handshakes) else None

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        handshakes = {
            place: handshake.of_children
            for place, handshake in metadata.items()
            if isinstance(handshake, RankHandshakes)
        }
        for number, child in enumerate(self._connectors):
            of_child = {
                place: parts[number]
                for place, parts in handshakes.items()
                if parts[number : number + 1] not in ((), (None,))
            }
            if of_child:
                child.set_xfer_handshake_metadata_pp_aware(of_child)

    # --- sleep (vLLM 0.33): 0.32's children may not know of it, and are not asked

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """All children do."""
        for child in children_of(kv_transfer_config):
            config = compat.KVTransferConfig(**{"engine_id": kv_transfer_config.engine_id} | child)
            supports = getattr(compat.KVConnectorFactory.get_connector_class(config), "supports_sleep_mode", None)
            if supports is not None and not supports(config):
                return False
        return True

    def unregister_kv_caches(self) -> None:
        for child in self._connectors:
            getattr(child, "unregister_kv_caches", lambda: None)()

    def restore_kv_caches(self) -> None:
        for child in self._connectors:
            getattr(child, "restore_kv_caches", lambda: None)()

    # --- the choice

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return the offer that is worth the most, or the first of equals; None while one may still come."""
        best, offer, chosen, unready = 0.0, (0, False), None, []
        for number, (child, weight) in enumerate(zip(self._connectors, self._weights, strict=True)):
            tokens, load_async = (
                child.get_num_new_matched_tokens(request, num_computed_tokens) if weight else (0, False)
            )
            if tokens is None:
                unready.append(number)
            elif tokens * weight > best:
                best, offer, chosen = tokens * weight, (tokens, load_async), number
        if chosen is None:
            self._requests_to_connector.pop(request.request_id, None)  # what was chosen before is no more
            return (None if unready else 0), False
        self._requests_to_connector[request.request_id] = chosen
        for number in unready:
            self._counted.add("child_not_ready", self._labels[number], 1)
        return offer

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        chosen = self._requests_to_connector.get(request.request_id)
        if chosen is not None and num_external_tokens > 0:
            self._counted.add("child_loads", self._labels[chosen], 1)
            self._counted.add("child_load_tokens", self._labels[chosen], num_external_tokens)
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if chosen is not None and num_external_tokens > 0:
            self._vouch(self._connectors[chosen], request, num_external_tokens)

    def _vouch(self, chosen: Any, request: Any, tokens: int) -> None:
        """Tell the other kvdepots of a kvdepot's load. What any other child loads they do not store."""
        if isinstance(chosen, KVDepotConnector):
            for child in self._connectors:
                if child is not chosen and isinstance(child, KVDepotConnector):
                    child.sibling_loads(request, tokens)

    # --- statistics, each child's its own

    def get_kv_connector_stats(self) -> Any:
        collected = dict(zip(self._labels, (child.get_kv_connector_stats() for child in self._connectors), strict=True))
        collected = {label: stats for label, stats in collected.items() if stats is not None}
        if not self._counted.is_empty():
            collected[OWN], self._counted = self._counted, KVDepotStats()
        return compat.MultiKVConnectorStats(data=collected) if collected else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        """Of children whose class this process does not know, nothing."""
        built = {label: _child_stats(label, child_data) for label, child_data in (data or {}).items()}
        return compat.MultiKVConnectorStats(data={label: stats for label, stats in built.items() if stats is not None})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> ChildrenPromMetrics:
        children = cls._get_connector_classes_and_configs(vllm_config)
        return ChildrenPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues, children)


class ChildrenPromMetrics(compat.KVConnectorPromMetrics):
    """The children's own metrics with the label `child`, and `COUNTERS`.

    Children of one class share its metrics: to it they are further engines, by numbers of their own.
    """

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
        children: list[tuple[type[Any], Any]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        labels = child_labels(vllm_config)
        self._numbers = {label: number for number, label in enumerate(labels)}
        self._of_child: dict[str, Any] = {}
        names = [*labelnames, CHILD]
        for kind in dict.fromkeys(connector for connector, _ in children):
            numbers = [number for number, (connector, _) in enumerate(children) if connector is kind]
            values = {
                self._engine(engine, number): [*given, labels[number]]
                for engine, given in per_engine_labelvalues.items()
                for number in numbers
            }
            metrics = kind.build_prom_metrics(children[numbers[0]][1], metric_types, names, values)
            self._of_child |= {labels[number]: metrics for number in numbers if metrics is not None}
        self._counters = {
            family: self._counter_cls(name=PREFIX + family, documentation=text, labelnames=names)
            for family, text in COUNTERS.items()
        }

    def _engine(self, engine: int, child: int) -> int:
        return engine * len(self._numbers) + child

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Give each child its part, and leave out what cannot be placed."""
        for label, data in transfer_stats_data.items():
            if label in self._of_child:
                self._of_child[label].observe(data, self._engine(engine_idx, self._numbers[label]))
        chosen = KVDepotStats(transfer_stats_data.get(OWN, {})).data["counters"]
        for family in chosen.keys() & self._counters.keys():
            for label, amount in chosen[family].items():
                self._counters[family].labels(*self.per_engine_labelvalues[engine_idx], label).inc(amount)


def children_of(transfer: Any) -> list[dict[str, Any]]:
    """Return the children's KV transfer configs. Raise ConfigError if there are none."""
    children = transfer.kv_connector_extra_config.get("connectors")
    if not isinstance(children, list) or not children or not all(isinstance(child, dict) for child in children):
        raise ConfigError(WHERE, "connectors", "no list of KV transfer configs", advice="name at least one connector")
    return children


def child_labels(vllm_config: Any) -> list[str]:
    """`0-KVDepotConnector` and so on: for metrics and messages."""
    children = children_of(vllm_config.kv_transfer_config)
    return [f"{number}-{child.get('kv_connector')}" for number, child in enumerate(children)]


def check_children(vllm_config: Any) -> list[float]:
    """Return the children's weights. Raise ConfigError for the first child that cannot be combined, by name."""
    outer = vllm_config.kv_transfer_config
    hybrid_allocator = not vllm_config.scheduler_config.disable_hybrid_kv_cache_manager
    weights, endpoints = [], set()
    for label, child in zip(child_labels(vllm_config), children_of(outer), strict=True):
        extra = child.get("kv_connector_extra_config") or {}
        config = compat.KVTransferConfig(**{"engine_id": outer.engine_id} | child)
        if hybrid_allocator and not compat.KVConnectorFactory.supports_hma_config(config):
            raise ConfigError(
                WHERE, label, "it does not support vLLM's hybrid KV cache manager (SupportsHMA)",
                advice="leave it out, or set disable_hybrid_kv_cache_manager for a model with full attention alone",
            )  # fmt: skip
        if child.get("kv_load_failure_policy", outer.kv_load_failure_policy) != outer.kv_load_failure_policy:
            raise ConfigError(
                WHERE, f"{label}.kv_load_failure_policy", "vLLM follows the outer one alone",
                advice=f"leave it out, or set both to {outer.kv_load_failure_policy!r}",
            )  # fmt: skip
        endpoint = endpoint_url(extra) if child.get("kv_connector") == DEPOT else extra.get("endpoint")
        if endpoint is not None and endpoint in endpoints:
            raise ConfigError(
                WHERE, f"{label}.endpoint", f"{endpoint} is another child's", advice="name each daemon once"
            )
        endpoints.add(endpoint)
        weights.append(_weight(label, extra.get("load_weight", 1.0)))
    return weights


def _weight(label: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value) or value < 0:
        raise ConfigError(WHERE, f"{label}.load_weight", f"{value!r} is no number from 0 up")
    return float(value)


def _child_stats(label: str, stats: Any) -> Any:
    """As an object, where it came from another process as plain data; None where its class is not known here."""
    if isinstance(stats, compat.KVConnectorStats):
        return stats
    if label == OWN:
        return KVDepotStats(stats)
    try:
        connector = compat.KVConnectorFactory.get_connector_class_by_name(label.partition("-")[2])
    except ValueError:
        return None
    return connector.build_kv_connector_stats(data=stats)


compat.register(WeightedMultiConnector)
