"""What a model takes: the same layers as vLLM's own specs, and capacities into which everything fits."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
from kvdepot.client.ctl.sizing.architectures import Model, describe_model
from kvdepot.client.ctl.sizing.flags import engine_flags
from kvdepot.client.ctl.sizing.geometry import Engine, engine_groups, hybrid_block, state_bytes, token_bytes
from kvdepot.client.ctl.sizing.sizes import Load, sizes
from kvdepot.core.arena import ArenaLayout
from kvdepot.core.calls import Kind
from kvdepot.core.errors import ConfigError, InvalidArgument, PlannerError
from kvdepot.core.ram_size import arena_bytes_of, capacity_for
from kvdepot.server.tiers.disk.layout import DiskLayout

from tests.rigs.kv_cache_specs import BLOCK_TOKENS, CONFIGS, SPECS, config_of
from tests.rigs.model_sizes import published

VLLM: Final[dict[str, Any]] = json.loads(SPECS.read_text())
NAMES: Final = sorted(path.stem for path in CONFIGS.glob("*.json"))
GIB: Final = 1 << 30


def model(name: str) -> Model:
    return describe_model(config_of(name))


def layers(found: Model, engine: Engine) -> Counter[tuple[str, int, int, int]]:
    """Return the layers as `specs_of` describes them."""
    block = hybrid_block(found, engine) if found.is_hybrid else engine.block_tokens
    counted: Counter[tuple[str, int, int, int]] = Counter()
    for one in found.attention:
        name = "SlidingWindowSpec" if one.window_tokens else "MLAAttentionSpec" if one.latent else "FullAttentionSpec"
        counted[name, block, block * token_bytes(one, engine.ranks, 2), one.window_tokens] += one.layers
    for states in found.states:
        counted["MambaSpec", block, state_bytes(states, found, engine), 0] += states.layers
    return counted


@pytest.mark.requirement("P1")
@pytest.mark.parametrize("key", VLLM)
def test_the_layers_are_those_of_vllm_s_own_specs(key: str) -> None:
    name, _, ranks = key.rpartition(" ")
    # MLA on CPUs has blocks of its own, and vLLM enlarges those of hybrid models.
    block = BLOCK_TOKENS if model(name).is_hybrid else VLLM[key]["layers"][0][1]
    engine = Engine(int(ranks), state_dtype=VLLM[key]["state_dtype"], block_tokens=block)
    expected = {tuple(line[:-1]): line[-1] for line in VLLM[key]["layers"]}
    assert dict(layers(model(name), engine)) == expected


def test_every_configuration_is_compared_with_vllm_and_ten_of_them_are_published() -> None:
    assert {key.rpartition(" ")[0] for key in VLLM} == set(NAMES)
    assert len(published()) == 10


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_sessions_fit_into_the_capacities(name: str, ranks: int) -> None:
    found = sizes(model(name), Engine(ranks), Load(tokens=8000, sessions=50))
    arena = ArenaLayout.plan(arena_bytes_of(found.ram_capacity_bytes))
    assert found.all_bytes <= arena.data_bytes
    disk = DiskLayout.plan(found.tier_capacity_bytes, 10 * GIB)
    assert found.all_bytes <= disk.data_bytes


@pytest.mark.parametrize("data_bytes", [0, 1, GIB, 100 * GIB, 5 << 40])
def test_a_capacity_is_the_least_number_of_gib(data_bytes: int) -> None:
    capacity = capacity_for(data_bytes)
    assert capacity % GIB == 0
    assert ArenaLayout.plan(arena_bytes_of(capacity)).data_bytes >= data_bytes
    if capacity > GIB:
        assert ArenaLayout.plan(arena_bytes_of(capacity - GIB)).data_bytes < data_bytes


def test_an_fp8_cache_halves_attention_and_leaves_states_as_they_are() -> None:
    hybrid = model("Qwen--Qwen3-Next-80B-A3B-Thinking")
    full, half = (sizes(hybrid, Engine(kv_cache_dtype=name), Load(32768)) for name in ("auto", "fp8"))
    assert half.state_bytes == full.state_bytes
    assert half.attention_bytes / half.chunk_tokens == full.attention_bytes / full.chunk_tokens / 2
    assert half.chunk_tokens > full.chunk_tokens, "vLLM makes a block of attention no smaller than a state"


def test_a_latent_is_stored_once_for_all_ranks_and_copies_of_a_head_by_each() -> None:
    latent = sizes(model("deepseek-ai--DeepSeek-V3"), Engine(8), Load(4096))
    assert latent.attention_bytes == sizes(model("deepseek-ai--DeepSeek-V3"), Engine(), Load(4096)).attention_bytes
    (group,) = engine_groups(model("deepseek-ai--DeepSeek-V3"), Engine(8))
    assert group.replicated and len(group.rank_block_bytes) == 1
    four_heads = model("Qwen--Qwen3-235B-A22B")
    (one, eight) = (sizes(four_heads, Engine(ranks), Load(4096)).attention_bytes for ranks in (1, 8))
    assert eight == 2 * one


def test_a_session_counts_checkpoints_by_prompts_or_by_the_retention_interval() -> None:
    hybrid = model("Qwen--Qwen3-Next-80B-A3B-Thinking")
    counted = [
        sizes(hybrid, Engine(retention_tokens=retention), Load(5440, turns=turns)).session_checkpoints
        for retention, turns in ((0, 1), (0, 4), (0, 99), (544, 1), (1088, 4))
    ]
    assert counted == [1, 4, 10, 10, 5]
    found = sizes(hybrid, Engine(), Load(5440))
    assert found.session_bytes == found.load_bytes == 10 * found.attention_bytes + found.state_bytes


def test_the_retention_of_windows_is_printed_and_refused_where_vllm_refuses_it() -> None:
    windows, dense = model("openai--gpt-oss-120b"), model("Qwen--Qwen3-8B")
    assert "--prefix-cache-retention-interval 512" in map(str, engine_flags(windows, Engine(retention_tokens=512)))
    with pytest.raises(InvalidArgument, match="no multiple of the model's blocks of 16"):
        engine_flags(windows, Engine(retention_tokens=500))
    with pytest.raises(InvalidArgument, match="no states and no sliding windows"):
        engine_flags(dense, Engine(retention_tokens=512))


def test_a_load_needs_less_of_the_windows_than_is_stored() -> None:
    found = sizes(model("openai--gpt-oss-120b"), Engine(), Load(2560))
    assert found.session_bytes == 10 * (found.attention_bytes + found.window_bytes)
    assert found.load_bytes == 10 * found.attention_bytes + found.window_bytes


def test_a_session_shorter_than_a_chunk_takes_nothing() -> None:
    found = sizes(model("Qwen--Qwen3-8B"), Engine(), Load(255, sessions=1000))
    assert (found.session_chunks, found.session_bytes, found.ram_capacity_bytes) == (0, 0, GIB)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"architectures": ["Gemma4ForCausalLM"]}, "not known"),
        ({"architectures": None}, "not known"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_hidden_layers": "36"}, "num_hidden_layers"),
        ({"torch_dtype": "float8"}, "dtype"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["chunked_attention"] * 36}, "chunked_attention"),
        ({"quantization_config": {"kv_cache_quant_algo": "NVFP4"}}, "NVFP4"),
    ],
)
def test_what_is_not_known_is_refused(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        describe_model(config_of("Qwen--Qwen3-8B") | changes)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", {"hybrid_override_pattern": "MX*"}),
        ("small--granite", {"layer_types": None}),
        ("small--gemma3", {"use_bidirectional_attention": True}),
        ("small--mistral", {"layer_types": ["full_attention"] * 8}),
    ],
)
def test_a_layer_of_another_kind_is_refused(name: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        describe_model(config_of(name) | changes)


@pytest.mark.parametrize(("name", "ranks"), [("Qwen--Qwen3-8B", 3), ("small--granite", 3), ("Qwen--Qwen3-32B", 5)])
def test_ranks_that_vllm_cannot_have_are_refused(name: str, ranks: int) -> None:
    with pytest.raises(InvalidArgument):
        sizes(model(name), Engine(ranks), Load(4096))


def test_a_chunk_that_the_planner_refuses_is_refused() -> None:
    with pytest.raises(PlannerError, match="nearest multiple"):
        sizes(model("Qwen--Qwen3-8B"), Engine(chunk_tokens=100), Load(4096))


def test_a_checkpoint_with_scales_for_its_cache_is_served_with_fp8() -> None:
    plain = model("Qwen--Qwen3-8B")
    for quantization in ({"kv_cache_quant_algo": "FP8"}, {"kv_cache_scheme": {"type": "float", "num_bits": 8}}):
        found = describe_model(config_of("Qwen--Qwen3-8B") | {"quantization_config": quantization})
        assert found == replace(plain, kv_cache_dtype="fp8")


def test_float32_checkpoints_are_served_as_bfloat16() -> None:
    config = config_of("Qwen--Qwen3-8B")
    assert describe_model(config | {"torch_dtype": "float32"}) == describe_model(config)
    found = sizes(describe_model(config), Engine(dtype="float32"), Load(4096))
    assert found.attention_bytes == 2 * sizes(describe_model(config), Engine(), Load(4096)).attention_bytes


def test_defaults_of_gemma_3_are_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Gemma3TextConfig()
    found = describe_model({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {}})
    sliding = sum(kind == "sliding_attention" for kind in config.layer_types)
    assert [(one.layers, one.window_tokens) for one in found.attention] == [
        (config.num_hidden_layers - sliding, 0), (sliding, config.sliding_window),
    ]  # fmt: skip
    assert {(one.heads, one.elements) for one in found.attention} == {(config.num_key_value_heads, 2 * config.head_dim)}
    assert (found.query_heads, found.context_tokens) == (config.num_attention_heads, config.max_position_embeddings)


def test_kinds_are_those_of_the_planner() -> None:
    kinds = {name: [group.kind for group in engine_groups(model(name), Engine())] for name in NAMES}
    assert kinds["openai--gpt-oss-120b"] == [Kind.ATTENTION, Kind.WINDOW]
    assert kinds["small--mistral"] == [Kind.WINDOW]
    assert kinds["small--jamba"] == [Kind.ATTENTION, Kind.STATE]


def test_the_golden_files_are_small() -> None:
    assert sum(path.stat().st_size for path in Path(CONFIGS).iterdir()) < 32768
