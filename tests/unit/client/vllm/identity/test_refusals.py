"""What is refused at start: by name, with the setting to change."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kvdepot.client.endpoint import Endpoint
from kvdepot.client.vllm.base import compat
from kvdepot.client.vllm.base.settings import Settings
from kvdepot.client.vllm.connector import KVDepotConnector
from kvdepot.client.vllm.identity.refusals import _check_groups, check_engine
from kvdepot.client.vllm.identity.speculation import speculation
from kvdepot.core.errors import ConfigError
from vllm.config import DiffusionConfig
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import SchedulerInterface
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    MambaSpec,
    RSWASpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from tests.fakes.scripted_engine import cache_layout, engine_config, model_folder
from tests.rigs.speculative_configs import drafting

SETTINGS = Settings(Endpoint("/tmp/x.sock"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"))


def refused(config: Any, layout: Any, settings: Settings = SETTINGS, environment: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        check_engine(config, layout, settings, environment or {})
    return str(caught.value)


def dense() -> Any:
    return cache_layout(hybrid=False, blocks=8, retention=None)


@pytest.mark.parametrize("hybrid", [False, True])
def test_what_works_is_not_refused(folder: Path, hybrid: bool) -> None:
    check_engine(engine_config(folder, hybrid=hybrid), cache_layout(hybrid=hybrid, blocks=8, retention=0), SETTINGS, {})


@pytest.mark.requirement("C3")
def test_a_recurrent_group_that_is_not_in_align_mode(folder: Path) -> None:
    layout = cache_layout(hybrid=True, blocks=8, retention=0)
    spec = layout.kv_cache_groups[0].kv_cache_spec
    assert isinstance(spec, MambaSpec)
    layout.kv_cache_groups[0] = KVCacheGroupSpec(["s0"], replace(spec, mamba_cache_mode="none"))
    assert 'mamba_cache_mode="align"' in refused(engine_config(folder), layout)


@pytest.mark.requirement("P3")
@pytest.mark.parametrize("algorithm", ["xxhash", "xxhash_cbor"])
def test_hashes_that_differ_in_every_process(folder: Path, algorithm: str) -> None:
    config = engine_config(folder)
    config.cache_config.prefix_caching_hash_algo = algorithm
    assert "PYTHONHASHSEED" in refused(config, dense())
    assert "PYTHONHASHSEED" in refused(config, dense(), environment={"PYTHONHASHSEED": "random"})
    check_engine(config, dense(), SETTINGS, {"PYTHONHASHSEED": "0"})


def test_a_model_of_recurrent_groups_alone(folder: Path) -> None:
    layout = cache_layout(hybrid=True, blocks=8, retention=0)
    layout.kv_cache_groups[:] = [g for g in layout.kv_cache_groups if isinstance(g.kv_cache_spec, MambaSpec)]
    assert "recurrent groups only" in refused(engine_config(folder), layout)


def hybrid() -> Any:
    return cache_layout(hybrid=True, blocks=8, retention=0)


@pytest.mark.parametrize("windows", [(), (32,)])
@pytest.mark.parametrize("method", ["ngram", "ngram_gpu", "suffix", "draft_model"])
def test_speculative_decoding_whose_kv_depends_on_no_later_token_is_served(
    folder: Path, method: str, windows: tuple[int, ...]
) -> None:
    config = drafting(engine_config(folder), method, folder if method == "draft_model" else None)
    check_engine(config, cache_layout(hybrid=False, blocks=8, retention=None, windows=windows), SETTINGS, {})
    served = speculation(config)
    assert served is not None
    assert (served.method, served.draft_tokens, served.lookahead_tokens) == (method, 2, 0)
    assert served.keeps_kv is (method == "draft_model")


@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp"])
def test_draft_layers_that_depend_on_the_next_token(folder: Path, method: str) -> None:
    served = speculation(drafting(engine_config(folder), method, folder))
    assert served is not None
    assert (served.lookahead_tokens, served.keeps_kv) == (1, True)


def test_an_engine_without_speculative_decoding(folder: Path) -> None:
    assert speculation(engine_config(folder)) is None


@pytest.mark.parametrize("method", ["ngram", "draft_model", "eagle", "eagle3", "mtp"])
def test_speculative_decoding_is_served_with_and_without_states(folder: Path, method: str) -> None:
    for layout, is_hybrid in ((dense(), False), (hybrid(), True)):
        config = engine_config(folder, hybrid=is_hybrid)
        check_engine(drafting(config, method, None if method == "ngram" else folder), layout, SETTINGS, {})


@pytest.mark.parametrize(
    "method", ["medusa", "mlp_speculator", "custom_class", "dflash", "dspark", "extract_hidden_states", "of_tomorrow"]
)
def test_methods_of_speculative_decoding_that_are_not_served(folder: Path, method: str) -> None:
    message = refused(drafting(engine_config(folder), method, folder), dense())
    assert f"{method}: " in message
    assert "switch speculative decoding off" in message


@pytest.mark.parametrize("name", ["n_predict", "num_nextn_predict_layers"])
def test_several_mtp_modules(folder: Path, name: str) -> None:
    config = drafting(engine_config(folder), "mtp", folder)
    config.speculative_config.draft_model_config = copy.copy(config.speculative_config.draft_model_config)
    draft = copy.deepcopy(config.speculative_config.draft_model_config.hf_config)
    config.speculative_config.draft_model_config.hf_config = draft
    setattr(draft, name, 2)
    assert "several MTP modules" in refused(config, dense())
    config.speculative_config.num_speculative_tokens = 1  # the second module is not used
    assert speculation(config) is not None


@pytest.mark.parametrize("option", ["parallel_drafting", "use_heterogeneous_vocab", "disable_eagle_block_drop"])
def test_options_of_speculative_decoding_that_are_not_served(folder: Path, option: str) -> None:
    message = refused(drafting(engine_config(folder), "draft_model", folder, **{option: True}), dense())
    assert f"set {option} to false" in message


@pytest.mark.parametrize(("method", "says"), [("draft_model", 1), ("mtp", 0), ("mtp", 2)])
def test_a_method_of_which_vllm_says_something_else_than_kvdepot_knows(
    folder: Path, monkeypatch: pytest.MonkeyPatch, method: str, says: int
) -> None:
    config = drafting(engine_config(folder), method, folder)
    monkeypatch.setattr(type(config), "num_prefill_lookahead_tokens", property(lambda _: says))
    assert f"reads {says} tokens ahead" in refused(config, dense())


def test_a_method_that_vllm_begins_to_draft_with_hidden_states(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = drafting(engine_config(folder), "draft_model", folder)
    monkeypatch.setattr(type(config.speculative_config), "use_eagle", lambda _: True)
    monkeypatch.setattr(type(config), "num_prefill_lookahead_tokens", 0)
    assert "draft_model" in refused(config, dense())


def test_speculative_decoding_in_a_pipeline(folder: Path) -> None:
    """vLLM's first runner leaves `wait_for_save` to the end of sampling then, which the first stages do not get to."""
    config = engine_config(folder, ranks=2, pipeline=True)
    check_engine(config, dense(), SETTINGS, {})
    assert "stages" in refused(drafting(config, "ngram"), dense())


def test_speculative_decoding_whose_states_may_be_wrong(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = drafting(engine_config(folder, hybrid=True), "draft_model", folder)
    check_engine(config, hybrid(), SETTINGS, {})
    config.scheduler_config.async_scheduling = True
    assert "set async_scheduling to false" in refused(config, hybrid())
    check_engine(config, dense(), SETTINGS, {})
    monkeypatch.setattr(type(config), "use_v2_model_runner", True)
    check_engine(config, hybrid(), SETTINGS, {})
    config.cache_config.use_replayssm = True
    assert "set use_replayssm to false" in refused(config, hybrid())
    check_engine(config, dense(), SETTINGS, {})


@pytest.mark.requirement("C7")
@pytest.mark.parametrize("kind", MambaAttentionBackendEnum)
def test_states_out_of_which_vllm_does_not_take_rejected_drafts(folder: Path, kind: MambaAttentionBackendEnum) -> None:
    layout = hybrid()
    spec = layout.kv_cache_groups[0].kv_cache_spec
    layout.kv_cache_groups[0] = KVCacheGroupSpec(["s0"], replace(spec, mamba_type=kind))
    config = engine_config(folder, hybrid=True)
    check_engine(config, layout, SETTINGS, {})
    speculating = drafting(config, "ngram")
    if kind.name in ("MAMBA2", "GDN_ATTN", "SHORT_CONV"):
        check_engine(speculating, layout, SETTINGS, {})
    else:
        assert f"kind {kind.name}" in refused(speculating, layout)


@pytest.mark.requirement("C7")
def test_a_recurrent_draft_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = drafting(engine_config(folder, hybrid=True), "draft_model", folder)
    check_engine(config, hybrid(), SETTINGS, {})
    monkeypatch.setattr(type(config.model_config), "is_hybrid", True)
    assert "recurrent draft model" in refused(config, hybrid())
    check_engine(drafting(engine_config(folder, hybrid=True), "ngram"), hybrid(), SETTINGS, {})


MARKED = ["eagle group", "draft layers", "draft layers with the model's own"]


@pytest.mark.parametrize("marked", MARKED)
@pytest.mark.parametrize("method", [None, "ngram", "draft_model", "mtp"])
def test_draft_layers_of_a_drafter_that_has_none(folder: Path, method: str | None, marked: str) -> None:
    """vLLM 0.33 marks draft layers, in a group of their own or with the model's own; all mark some of EAGLE or MTP."""
    config, layout = engine_config(folder), dense()
    if method is not None:
        config = drafting(config, method, None if method == "ngram" else folder)
    own = layout.kv_cache_groups[0].kv_cache_spec
    draft = copy.copy(own)
    object.__setattr__(draft, "is_draft", True)
    both = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a0": own, "d0": draft})
    spec = dict(zip(MARKED, (own, draft, both), strict=True))[marked]
    layout.kv_cache_groups.append(KVCacheGroupSpec(["d0"], spec, is_eagle_group=marked == "eagle group"))
    if method == "mtp" or (method == "draft_model" and marked != "eagle group"):
        _check_groups(layout, speculation(config))
    else:
        message = refused(config, layout)
        assert "marks draft layers" in message
        assert "group 1" in message


@pytest.mark.parametrize("by_a_property", [False, True], ids=["field", "property"])
def test_block_hashes_that_cover_later_tokens(
    folder: Path, monkeypatch: pytest.MonkeyPatch, by_a_property: bool
) -> None:
    """From vLLM 0.33 on they may, with a drafter; with a connector they do not today."""
    config = engine_config(folder)
    assert compat.hash_lookahead_tokens(config) == 0
    if by_a_property:
        monkeypatch.setattr(type(config), "num_hash_lookahead_tokens", property(lambda _: 2), raising=False)
    else:
        config = SimpleNamespace(**vars(config), num_hash_lookahead_tokens=1)
    assert "num_hash_lookahead_tokens" in refused(config, dense())


def test_auxiliary_outputs(folder: Path) -> None:
    """vLLM withdraws what was offered where it has none for the tokens."""
    config = engine_config(folder)
    config.aux_output_config.enable_return_routed_experts = True
    assert "enable_return_routed_experts" in refused(config, dense())


class Counting(AsyncScheduler):
    """A user's scheduler that sees requests come, and schedules as vLLM's own."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.seen = 0

    def add_request(self, request: Any) -> None:
        self.seen += 1
        super().add_request(request)

    def seen_of(self) -> int:
        return self.seen


class Dropping(Scheduler):
    """It takes requests out of a step that the connector has been told of."""

    def schedule(self, throttle_prefills: bool = False) -> Any:
        step = super().schedule(throttle_prefills)
        step.num_scheduled_tokens.clear()
        return step


class Inherited(Dropping):
    pass


def with_scheduler(folder: Path, kind: Any) -> Any:
    config = copy.copy(engine_config(folder, hybrid=False))
    config.scheduler_config = copy.copy(config.scheduler_config)
    config.scheduler_config.scheduler_cls = kind
    return config


@pytest.mark.requirement("I1")
@pytest.mark.parametrize("kind", [Dropping, Inherited, f"{__name__}.Dropping"])
def test_a_scheduler_that_decides_itself_what_is_computed(folder: Path, kind: Any) -> None:
    assert "replaces schedule," in refused(with_scheduler(folder, kind), dense())


def test_a_scheduler_that_is_none_of_vllm_s(folder: Path) -> None:
    assert "replaces Own," in refused(with_scheduler(folder, type("Own", (SchedulerInterface,), {})), dense())


@pytest.mark.parametrize("kind", [Counting, AsyncScheduler, "vllm.v1.core.sched.scheduler.Scheduler"])
def test_a_scheduler_that_schedules_as_vllm_s_own(folder: Path, kind: Any) -> None:
    check_engine(with_scheduler(folder, kind), dense(), SETTINGS, {})


def test_models_that_denoise_blocks_of_tokens(folder: Path) -> None:
    config = SimpleNamespace(**vars(engine_config(folder)) | {"diffusion_config": DiffusionConfig(canvas_length=32)})
    assert "diffusion_config" in refused(config, dense())


def test_what_a_vllm_does_not_have_is_not_refused(folder: Path) -> None:
    config = SimpleNamespace(**vars(engine_config(folder)))
    del config.aux_output_config, config.diffusion_config
    check_engine(config, dense(), SETTINGS, {})


def test_caches_whose_last_window_is_computed_again_after_a_hit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM shortens what was offered for it."""
    monkeypatch.setattr(FullAttentionSpec, "prefix_replay_tokens", property(lambda _: 32))
    message = refused(engine_config(folder), dense())
    assert "shortens" in message and "group 0" in message


def test_hisparse(folder: Path) -> None:
    layout = dense()
    layout.hisparse_host_num_blocks = 8
    assert "HiSparse" in refused(engine_config(folder), layout)


HEADS: dict[str, Any] = {"block_size": 16, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (
            ChunkedLocalAttentionSpec(attention_chunk_size=64, **HEADS),
            "unset VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE",
        ),
        (RSWASpec(rswa_window=32, **HEADS), "RSWASpec"),
        (SlidingWindowMLASpec(sliding_window=32, **HEADS), "SlidingWindowMLASpec"),
        (SlidingWindowMLASpec(sliding_window=32, bounded_replay=True, **HEADS), "SlidingWindowMLASpec"),
        (CircularBufferSpec(**HEADS), "CircularBufferSpec"),
        (FullAttentionSpec(non_causal=True, **HEADS), "not causal"),
        (SlidingWindowSpec(sliding_window=32, extra_retained_tokens=1, **HEADS), "switch speculative decoding off"),
    ],
)
def test_caches_that_a_prefix_does_not_determine_or_nobody_has_tested(folder: Path, spec: Any, why: str) -> None:
    layout = dense()
    layout.kv_cache_groups.append(KVCacheGroupSpec(["c"], spec))
    message = refused(engine_config(folder), layout)
    assert why in message
    assert "group 1" in message


def test_a_producer_that_loads(folder: Path) -> None:
    config = engine_config(folder)
    assert config.kv_transfer_config is not None
    config.kv_transfer_config.kv_role = "kv_producer"
    assert "kv_both" in refused(config, dense())
    check_engine(config, dense(), replace(SETTINGS, load_weight=0.0), {})


@pytest.mark.parametrize("key", ["nnodes", "decode_context_parallel_size", "prefill_context_parallel_size"])
def test_ranks_that_share_no_memory_or_split_a_context(folder: Path, key: str) -> None:
    config = engine_config(folder)
    object.__setattr__(config.parallel_config, key, 2)
    assert key in refused(config, dense())


@pytest.mark.parametrize("key", ["enable_elastic_ep", "enable_fault_tolerance"])
def test_ranks_that_come_and_go_and_steps_that_may_be_lost(folder: Path, key: str) -> None:
    config = engine_config(folder)
    object.__setattr__(config.parallel_config, key, True)
    assert key in refused(config, dense())


@pytest.mark.parametrize(
    ("version", "good"), [("0.32.0", True), ("0.33.1", True), ("0.31.9", False), ("1.0", False), ("dev", True)]
)
def test_versions_of_vllm(version: str, good: bool) -> None:
    if good:
        compat.check_version(version)
    else:
        with pytest.raises(ConfigError, match=r"0\.32 to 0\.33"):
            compat.check_version(version)


def test_another_version_of_vllm_is_refused_when_the_connector_is_made(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat.check_version, "__defaults__", ("0.99.1",))
    with pytest.raises(ConfigError, match=r"0\.99\.1 is not supported.*use vLLM 0\.32 to 0\.33"):
        KVDepotConnector(engine_config(folder), compat.KVConnectorRole.WORKER, dense())


def _changed(self: object, request: object, num_computed_tokens: int, cache_salt: str) -> None: ...


def test_an_interface_that_passes_other_arguments_is_refused_by_the_method_s_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a development build may, which has no version to check."""
    compat.check_interface(KVDepotConnector)
    monkeypatch.setattr(compat.KVConnectorBase_V1, "get_num_new_matched_tokens", _changed)
    with pytest.raises(ConfigError, match=r"get_num_new_matched_tokens.*cache_salt.*use vLLM 0\.32 to 0\.33"):
        KVDepotConnector(engine_config(folder), compat.KVConnectorRole.WORKER, dense())


@pytest.mark.requirement("P1")
def test_a_chunk_that_is_no_multiple_of_the_blocks_is_refused_at_start(folder: Path) -> None:
    config = engine_config(folder, settings={"chunk_tokens": 24})
    with pytest.raises(Exception, match="24 is no multiple of 16"):
        KVDepotConnector(config, compat.KVConnectorRole.WORKER, dense())
