"""What is refused at start: by name, with the setting to change."""

from __future__ import annotations

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
from kvdepot.client.vllm.identity.refusals import check_engine
from kvdepot.core.errors import ConfigError
from vllm.config import DiffusionConfig
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


def test_speculative_decoding_with_checkpoints(folder: Path) -> None:
    config = SimpleNamespace(**vars(engine_config(folder)))
    config.speculative_config = SimpleNamespace(method="ngram")
    assert "speculative" in refused(config, cache_layout(hybrid=True, blocks=8, retention=0))
    check_engine(config, dense(), SETTINGS, {})


@pytest.mark.parametrize("method", ["draft_model", "medusa", "mlp_speculator", "custom_class"])
def test_speculative_decoding_with_another_drafter_than_its_own_tokens(folder: Path, method: str) -> None:
    config = SimpleNamespace(**vars(engine_config(folder)))
    config.speculative_config = SimpleNamespace(method=method)
    assert method in refused(config, dense())


def test_speculative_decoding_in_a_pipeline(folder: Path) -> None:
    """vLLM's first runner leaves `wait_for_save` to the end of sampling then, which the first stages do not get to."""
    config = SimpleNamespace(**vars(engine_config(folder)))
    config.speculative_config = SimpleNamespace(method="ngram")
    config.parallel_config = SimpleNamespace(**vars(config.parallel_config) | {"pipeline_parallel_size": 2})
    assert "stages" in refused(config, dense())
    config.speculative_config = None
    check_engine(config, dense(), SETTINGS, {})


def test_draft_layers_whose_kv_depends_on_the_next_token(folder: Path) -> None:
    layout = dense()
    layout.kv_cache_groups[0].is_eagle_group = True
    assert "draft" in refused(engine_config(folder), layout)


def drafting(spec: Any) -> Any:
    """As vLLM 0.33 marks the layers of a drafter."""
    spec = replace(spec)
    object.__setattr__(spec, "is_draft", True)
    return spec


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside the model's own"])
def test_draft_layers_in_a_group_that_is_not_marked_for_drafts(folder: Path, beside: bool) -> None:
    layout = dense()
    own = layout.kv_cache_groups[0].kv_cache_spec
    layers = {"a0": own, "d0": drafting(own)}
    spec = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=layers) if beside else drafting(own)
    layout.kv_cache_groups.append(KVCacheGroupSpec(["a0", "d0"] if beside else ["d0"], spec))
    message = refused(engine_config(folder), layout)
    assert "draft" in message and "group 1" in message


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
