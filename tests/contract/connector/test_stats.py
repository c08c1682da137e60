"""What the connector counts, through vLLM's own pipeline into its /metrics (row P10)."""

from __future__ import annotations

import logging
from itertools import pairwise
from typing import Any

import pytest
from kvdepot.client.vllm.base.stats import (
    COUNTERS,
    GAUGES,
    SOURCES_MAX,
    KVDepotStats,
    Sources,
)
from kvdepot.core.calls import AcquireCall
from kvdepot.core.hit_rate import LOAD_SECONDS, OTHER_SOURCE
from kvdepot.core.misses import MissReason
from prometheus_client import REGISTRY, Gauge, Histogram
from prometheus_client import Counter as CounterMetric
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.metrics.prometheus import unregister_vllm_metrics

from tests.fakes.frontend import Frontend
from tests.fakes.scripted_engine import BLOCK
from tests.rigs.connector_rig import Gate, Make, cold, prompt

pytestmark = pytest.mark.usefixtures("own_registry")


@pytest.mark.requirement("P10")
@pytest.mark.parametrize(("hybrid", "ranks"), [(False, 1), (True, 2)], ids=["dense", "hybrid of two ranks"])
def test_queries_hits_tokens_bytes_and_seconds_reach_vllms_metrics(
    make: Make, gate: Gate, hybrid: bool, ranks: int
) -> None:
    engine = make(hybrid=hybrid, ranks=ranks)
    frontend, tokens = Frontend(engine), prompt(10.5)
    engine.generate(tokens)
    engine.reset()
    gate.close()
    request_id = engine.add(tokens)
    while not gate.reached(0):
        engine.step()
    engine.step()  # which sees a load under way
    gate.open()
    engine.run()
    assert engine.outputs[request_id] == cold(tokens)
    found, side = frontend.samples(), engine.side
    assert found["queries_total", ""] == 2
    assert found["hits_total", "ram"] == 1
    assert found["hit_tokens_total", "ram"] == 10 * BLOCK == side.counters["loaded_tokens"]
    assert found["misses_total", MissReason.UNKNOWN] == 1
    kinds = [call for call in engine.depot.calls if isinstance(call, AcquireCall)][-1].kinds
    assert found["loaded_bytes_total", "ram"] == sum(side.planner.object_bytes(kind) for kind in kinds)
    assert found["copied_bytes_total", "load"] == found["loaded_bytes_total", "ram"], "of all ranks together"
    assert found["copy_seconds_total", "load"] > 0
    assert found["load_seconds_count", "ram"] == 1
    assert found["load_seconds_sum", "ram"] > 0
    assert found["stored_objects_total", ""] == side.counters["stored_objects"]
    assert (found["pending_loads", ""], found["pending_stores", ""]) == (0, 0)
    assert max(seen.get(("pending_loads", ""), 0) for seen in frontend.seen) == 1
    for before, after in pairwise(frontend.seen):
        fallen = [name for name in before if name[0] not in GAUGES and after[name] < before[name]]
        assert not fallen, "no counter decreases"
    lines: list[Any] = []
    frontend.logging.log(lambda *line: lines.append(line))
    assert "hits.ram=1" in lines[0][1]
    engine.assert_clean()


@pytest.mark.requirement("P10")
def test_a_request_that_the_engine_serves_itself_is_no_miss(make: Make) -> None:
    engine = make()
    frontend, tokens = Frontend(engine), prompt(6.5)
    engine.generate(tokens)
    engine.depot.present = False
    engine.generate(tokens)
    assert sum(value for (name, _), value in frontend.samples().items() if name == "misses_total") == 1


@pytest.mark.requirement("P10")
def test_as_a_child_of_vllms_multi_connector_its_statistics_are_understood(make: Make) -> None:
    engine = make()
    child = engine.config.kv_transfer_config
    outer = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_connector_extra_config={
            "connectors": [
                {
                    "kv_connector": child.kv_connector,
                    "kv_connector_module_path": child.kv_connector_module_path,
                    "kv_role": "kv_both",
                    "kv_connector_extra_config": child.kv_connector_extra_config,
                }
            ]
        },
    )
    stats = KVDepotStats()
    stats.add("hits", "ram", 1)
    logged = KVConnectorLogging(outer)
    logged.observe({"KVDepotConnector": stats.to_dict()})
    lines: list[Any] = []
    logged.log(lambda *line: lines.append(line))
    assert "hits.ram" in lines[0][1]
    engine.config.kv_transfer_config = outer
    unregister_vllm_metrics()
    prom = MultiConnector.build_prom_metrics(engine.config, _metric_types(), ["engine"], {0: ["0"]})
    prom.observe({"KVDepotConnector": stats.to_dict()})
    assert REGISTRY.get_sample_value("vllm:kvdepot_hits_total", {"engine": "0", "source": "ram"}) == 1


def _metric_types() -> dict[Any, Any]:
    return {kind: kind for kind in (Gauge, CounterMetric, Histogram)}


@pytest.mark.requirement("P10")
def test_a_message_of_another_version_ends_nothing_and_is_reported_once(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    frontend = Frontend(make())
    with caplog.at_level(logging.ERROR, "vllm.kvdepot"):
        for _ in range(2):
            frontend.prom.observe({"counters": {"hits": {"ram": 1}, "not_known": {"": 1}}, "gauges": {"new": 1}})
            frontend.prom.observe({"counters": {"hits": 7}})
            frontend.prom.observe({"counters": {"hits": {"ram": -1}}})
    assert frontend.samples()["hits_total", "ram"] == 2
    assert sum("metrics are not complete" in record.message for record in caplog.records) <= 1


@pytest.mark.requirement("P10")
def test_labels_are_bounded_and_every_family_says_what_it_is(make: Make) -> None:
    sources = Sources()
    labels = {sources.label(f"tier-{number}") for number in range(1000)}
    assert len(labels) == SOURCES_MAX + 1
    assert OTHER_SOURCE in labels
    Frontend(make())
    found = {family.name.removeprefix("vllm:kvdepot_"): family for family in REGISTRY.collect()}
    for name in (*COUNTERS, *GAUGES, LOAD_SECONDS):
        assert found[name].documentation
