"""Several connectors in one engine: which one loads, and what is known of each (row P9)."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from kvdepot.client.endpoint import ENDPOINT_VARIABLE
from kvdepot.client.vllm.base.stats import KVDepotStats
from kvdepot.client.vllm.connector import KVDepotConnector
from kvdepot.client.vllm.weighted import OWN, RankHandshakes, WeightedMultiConnector, check_children
from kvdepot.core.errors import ConfigError
from prometheus_client import REGISTRY
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging, KVConnectorProm
from vllm.v1.metrics.prometheus import unregister_vllm_metrics

from tests.fakes.scripted_children import HybridChild
from tests.fakes.scripted_engine import cache_layout, engine_config

Combine = Callable[..., "Combined"]


def child(weight: Any = None, kind: str = "HybridChild", **config: Any) -> dict[str, Any]:
    extra = {} if weight is None else {"load_weight": weight}
    return {
        "kv_connector": kind,
        "kv_connector_module_path": "tests.fakes.scripted_children",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra | config.pop("extra", {}),
    } | config


def configured(folder: Path, children: Any, *, hybrid: bool = False, policy: str = "recompute") -> VllmConfig:
    config = engine_config(folder, hybrid=hybrid)
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="WeightedMultiConnector",
        kv_connector_module_path="kvdepot.client.vllm.weighted",
        kv_role="kv_both",
        kv_load_failure_policy=policy,
        kv_connector_extra_config={"connectors": children},
    )
    config.scheduler_config.disable_hybrid_kv_cache_manager = False
    return config


class Combined:
    """The connector of a scheduler, made as vLLM makes it, and its scripted children."""

    def __init__(self, config: VllmConfig, layout: Any) -> None:
        self.config = config
        self.connector: Any = KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, layout)
        assert type(self.connector) is WeightedMultiConnector
        self.children: list[HybridChild] = self.connector.sub_connectors

    def offer(self, *offers: int | None, load_async: bool = True, request: str = "r") -> tuple[int | None, bool]:
        """What vLLM hears where the children have so much."""
        for one, tokens in zip(self.children, offers, strict=True):
            one.offers[request] = (tokens, bool(tokens) and load_async)
        asked: Any = SimpleNamespace(request_id=request)
        answer: tuple[int | None, bool] = self.connector.get_num_new_matched_tokens(asked, 0)
        return answer

    def allocate(self, tokens: int, request: str = "r") -> list[int]:
        """What each child hears of the blocks that vLLM has allocated."""
        self.connector.update_state_after_alloc(SimpleNamespace(request_id=request), None, tokens)
        return [one.allocated[-1][1] for one in self.children]

    def finish(self, request: str = "r") -> None:
        self.connector.request_finished_all_groups(SimpleNamespace(request_id=request), ([],))


@pytest.fixture
def combine(folder: Path) -> Iterator[Combine]:
    def make(*children: dict[str, Any], hybrid: bool = False, **config: Any) -> Combined:
        layout = cache_layout(hybrid=hybrid, blocks=16, retention=None)
        return Combined(configured(folder, list(children), hybrid=hybrid, **config), layout)

    yield make
    unregister_vllm_metrics()


@pytest.mark.requirement("P9")
def test_of_children_that_are_all_asked_none_leases_ahead(folder: Path) -> None:
    """Each would lease, and its daemon count, what another one loads (docs/adr/0041)."""
    own = {"kv_connector_module_path": "kvdepot.client.vllm.connector", "kind": "KVDepotConnector"}
    children = [child(**own, extra=extra) for extra in ({"endpoint": "unix:///a"}, {"speculative_acquire": True})]
    config = configured(folder, [*children, child()])
    found = WeightedMultiConnector._get_connector_classes_and_configs(config)
    extras = [own.kv_transfer_config.kv_connector_extra_config for _, own in found]
    assert [extra.get("speculative_acquire") for extra in extras] == [False, True, None]
    assert extras[0]["endpoint"] == "unix:///a"


@pytest.mark.requirement("P9")
@pytest.mark.parametrize("chosen", [0, 1])
def test_a_kvdepot_vouches_for_its_load_to_the_other_ones(
    combine: Combine, monkeypatch: pytest.MonkeyPatch, chosen: int
) -> None:
    """What any other child loads is foreign to them: they store nothing of it."""
    heard: list[tuple[Any, str, int]] = []
    monkeypatch.setattr(
        KVDepotConnector, "sibling_loads", lambda own, asked, tokens: heard.append((own, asked.request_id, tokens))
    )
    own = {"kv_connector_module_path": "kvdepot.client.vllm.connector", "kind": "KVDepotConnector"}
    combined = combine(*(child(**own, extra={"endpoint": f"unix:///{name}"}) for name in "ab"), child())
    first, second, other = combined.children
    asked: Any = SimpleNamespace(request_id="r")
    monkeypatch.setattr(first, "get_num_new_matched_tokens", lambda *_: (0 if chosen else 64, not chosen))
    monkeypatch.setattr(second, "get_num_new_matched_tokens", lambda *_: (64 if chosen else 0, bool(chosen)))
    other.offers["r"] = (0, False)
    assert combined.connector.get_num_new_matched_tokens(asked, 0) == (64, True)
    combined.connector.update_state_after_alloc(asked, None, 64)
    combined.connector.update_state_after_alloc(asked, None, 0)
    assert heard == [((second, first)[chosen], "r", 64)]
    monkeypatch.setattr((first, second)[chosen], "get_num_new_matched_tokens", lambda *_: (0, False))
    other.offers["r"] = (128, True)
    assert combined.connector.get_num_new_matched_tokens(asked, 0) == (128, True)
    combined.connector.update_state_after_alloc(asked, None, 128)
    assert len(heard) == 1
    combined.connector.shutdown()


@pytest.mark.requirement("P9")
@pytest.mark.parametrize(
    ("weights", "offers", "expected"),
    [
        ((None, None), (64, 128), [0, 128]),
        ((None, None), (128, 64), [128, 0]),
        ((None, None), (64, 64), [64, 0]),  # the first one of equals
        ((3.0, 1.0), (64, 128), [64, 0]),
        ((1, 2.5), (128, 64), [0, 64]),
        ((0, 0.01), (1024, 16), [0, 16]),
        ((None, None, None), (16, 0, 48), [0, 0, 48]),
    ],
)
def test_the_child_with_the_most_tokens_by_weight_loads(
    combine: Combine, weights: tuple[Any, ...], offers: tuple[int, ...], expected: list[int]
) -> None:
    combined = combine(*map(child, weights), hybrid=True)
    assert combined.offer(*offers) == (max(expected), True)
    assert combined.allocate(max(expected)) == expected


@pytest.mark.requirement("P9")
def test_a_child_that_weighs_nothing_is_not_asked(combine: Combine) -> None:
    combined = combine(child(0), child())
    assert combined.offer(None, 0) == (0, False)
    assert combined.children[0].asked == []


@pytest.mark.requirement("P9")
def test_a_child_that_is_not_ready_does_not_block_the_others(combine: Combine) -> None:
    combined = combine(child(9.0), child())
    assert combined.offer(None, 64) == (64, True)
    assert combined.allocate(64) == [0, 64]


@pytest.mark.requirement("P9")
def test_while_nobody_has_anything_vllm_asks_again_only_if_something_may_come(combine: Combine) -> None:
    combined = combine(child(), child())
    assert combined.offer(None, 0) == (None, False)
    assert combined.offer(0, 0) == (0, False)
    assert combined.allocate(0) == [0, 0]


@pytest.mark.requirement("P9")
def test_the_chosen_childs_way_of_loading_is_what_vllm_hears(combine: Combine) -> None:
    combined = combine(child(), child())
    assert combined.offer(64, 0, load_async=False) == (64, False)


@pytest.mark.requirement("P9")
def test_asked_again_after_a_preemption_or_a_failed_load_it_chooses_anew(combine: Combine) -> None:
    combined = combine(child(), child())
    combined.offer(64, 32)
    assert combined.allocate(64) == [64, 0]
    assert combined.allocate(0) == [0, 0], "vLLM tells of the blocks again when the load is over"
    assert combined.offer(0, 32) == (32, True), "its load has failed"
    assert combined.allocate(32) == [0, 32]
    assert combined.offer(0, 0) == (0, False)
    assert combined.connector._requests_to_connector == {}, "nobody is taken for the one that loads"
    assert combined.allocate(0) == [0, 0]


@pytest.mark.requirement("P9")
def test_a_request_that_is_over_leaves_nothing(combine: Combine) -> None:
    combined = combine(child(), child())
    combined.offer(64, 0)
    combined.offer(0, 64, request="s")
    combined.finish()
    assert list(combined.connector._requests_to_connector) == ["s"]


@pytest.mark.requirement("P9")
def test_each_child_hears_its_own_ranks(combine: Combine) -> None:
    combined = combine(child(), child(), child())
    first, second, _ = combined.children
    assert combined.connector.get_handshake_metadata() is None
    first.facts, second.facts = "of the first", "of the second"
    said = pickle.loads(pickle.dumps(combined.connector.get_handshake_metadata()))
    combined.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): said, (0, 1): said})
    assert [one.handshakes for one in combined.children] == [
        [{(0, 0): "of the first", (0, 1): "of the first"}],
        [{(0, 0): "of the second", (0, 1): "of the second"}],
        [],
    ]


@pytest.mark.requirement("P9")
def test_a_child_without_hybrid_support_is_refused_by_name(combine: Combine) -> None:
    with pytest.raises(ConfigError, match=r"1-DenseChild.*SupportsHMA"):
        combine(child(), child(kind="DenseChild"), hybrid=True)


@pytest.mark.requirement("P9")
@pytest.mark.parametrize(
    ("children", "problem"),
    [
        ([], "connectors"),
        ("KVDepotConnector", "connectors"),
        ([child(-1)], r"0-HybridChild.load_weight"),
        ([child("2")], r"0-HybridChild.load_weight"),
        ([child(float("inf"))], r"0-HybridChild.load_weight"),
        ([child(), child(kv_load_failure_policy="fail")], r"1-HybridChild.kv_load_failure_policy"),
        ([child(extra={"endpoint": "unix:///a"}), child(extra={"endpoint": "unix:///a"})], r"1-HybridChild.endpoint"),
        ([{"kv_connector": "KVDepotConnector", "kv_role": "kv_both"}] * 2, r"1-KVDepotConnector.endpoint"),
    ],
)
def test_what_cannot_be_combined_is_refused_by_name(folder: Path, children: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        Combined(configured(folder, children), cache_layout(hybrid=False, blocks=16, retention=None))


@pytest.mark.requirement("P9")
def test_a_child_without_an_endpoint_has_that_of_the_environment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENDPOINT_VARIABLE, "unix:///a")
    children = [{"kv_connector": "KVDepotConnector", "kv_role": "kv_both"}, child(extra={"endpoint": "unix:///a"})]
    with pytest.raises(ConfigError, match="unix:///a is another child's"):
        check_children(configured(folder, children))


@pytest.mark.requirement("P8")
def test_children_follow_the_outer_failure_policy(combine: Combine) -> None:
    for policy in ("recompute", "fail"):
        combined = combine(child(), child(kv_load_failure_policy=policy), policy=policy)
        assert [one.config.kv_load_failure_policy for one in combined.children] == [policy] * 2
        assert {one.config.engine_id for one in combined.children} == {combined.config.kv_transfer_config.engine_id}


@pytest.mark.requirement("P10")
def test_metrics_are_each_childs_own_also_of_one_class(combine: Combine) -> None:
    combined = combine(child(), child(), child(kind="HybridChild"))
    frontend = KVConnectorProm(combined.config, ["engine"], {0: ["0"], 1: ["1"]})
    logged = KVConnectorLogging(combined.config.kv_transfer_config)

    def step(engine: int) -> None:
        crossed = msgspec.msgpack.decode(msgspec.msgpack.encode(combined.connector.get_kv_connector_stats().to_dict()))
        frontend.observe(crossed, engine)
        logged.observe(crossed)

    def value(name: str, number: int, **labels: str) -> float | None:
        labels = {"engine": "0", "child": f"{number}-HybridChild"} | labels
        return REGISTRY.get_sample_value(f"vllm:kvdepot_{name}_total", labels)

    for number, one in enumerate(combined.children[:2]):
        one.stats = KVDepotStats()
        one.stats.add("hits", "ram", number + 1)
    combined.offer(64, 32, None)
    combined.allocate(64)
    combined.allocate(0)
    step(0)
    combined.offer(0, 32, 16)
    combined.allocate(32)
    step(0)
    combined.children[0].stats = KVDepotStats()
    combined.children[0].stats.add("hits", "ram", 7)
    step(1)
    assert [value("hits", number, source="ram") for number in range(3)] == [1, 2, None]
    assert value("hits", 0, source="ram", engine="1") == 7
    assert [value("child_loads", number) for number in range(3)] == [1, 1, None]
    assert [value("child_load_tokens", number) for number in range(3)] == [64, 32, None]
    assert [value("child_not_ready", number) for number in range(3)] == [None, None, 1]
    assert combined.connector.get_kv_connector_stats() is None, "nothing has happened since"
    lines: list[Any] = []
    logged.log(lambda *line: lines.append(line))
    assert "0-HybridChild={'hits.ram': 8}" in lines[0][1] and OWN in lines[0][1]


@pytest.mark.requirement("P10")
def test_statistics_of_a_child_that_is_not_known_here_are_left_out(combine: Combine) -> None:
    combined = combine(child())
    built = WeightedMultiConnector.build_kv_connector_stats({"0-Stranger": {}, OWN: {}})
    assert list(built.data) == [OWN]
    KVConnectorProm(combined.config, ["engine"], {0: ["0"]}).observe({"7-Stranger": {"counters": {}}})


def test_each_child_hears_that_kv_memory_goes_and_is_there_again(combine: Combine) -> None:
    combined = combine(child(), child(kind="SleepyChild"))
    for _ in range(2):
        combined.connector.unregister_kv_caches()
        combined.connector.restore_kv_caches()
    assert combined.children[1].heard == ["unregister", "restore"] * 2


@pytest.mark.parametrize(("kinds", "supported"), [((), False), (("SleepyChild",), True), (("SleeplessChild",), False)])
def test_sleep_mode_is_supported_where_every_child_supports_it(
    folder: Path, kinds: tuple[str, ...], supported: bool
) -> None:
    own = {"kv_connector_module_path": "kvdepot.client.vllm.connector", "kind": "KVDepotConnector"}
    children = [child(**own, extra={"endpoint": "unix:///a"}), *(child(kind=kind) for kind in kinds)]
    config = configured(folder, children if kinds else [child(kind="SleeplessChild")]).kv_transfer_config
    assert WeightedMultiConnector.supports_sleep_mode(config) is supported


@pytest.mark.parametrize("said", [None, object(), RankHandshakes(())])
def test_an_answer_that_is_not_of_these_children_raises_nothing(combine: Combine, said: Any) -> None:
    combined = combine(child(), child())
    combined.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): said})
    assert [one.handshakes for one in combined.children] == [[], []]
