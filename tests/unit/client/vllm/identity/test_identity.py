"""The namespace of real engine configurations: equal when they should share bytes, different when not."""

from __future__ import annotations

import dataclasses
import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kvdepot.client.endpoint import Endpoint
from kvdepot.client.vllm.base import compat, packages, versions
from kvdepot.client.vllm.base.metadata import RankFacts
from kvdepot.client.vllm.base.operations import LayerFacts
from kvdepot.client.vllm.base.settings import Settings
from kvdepot.client.vllm.identity import identity
from kvdepot.client.vllm.identity.identity import EXCLUDED
from kvdepot.client.vllm.identity.speculation import speculation
from kvdepot.core.calls import Kind
from kvdepot.core.errors import NamespaceError
from kvdepot.core.keys import NamespaceSpec
from vllm.config import MultiModalConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MLAAttentionSpec

from tests.fakes.scripted_engine import cache_layout, engine_config, model_folder

SETTINGS = Settings(Endpoint("/tmp/x.sock"), chunk_tokens=16)
LAYERS = tuple(LayerFacts(name, 0, "float32", (1, 16, 64), (1, 2), 4096, "full") for name in ("a0", "a1"))
FACTS = (RankFacts(0, "boot", LAYERS, (("instruction_set", "AVX2"), ("torch", "2"))),)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"))


def namespace(*what: Any, **other: Any) -> bytes:
    return spec_of(*what, **other).namespace_id()


def spec_of(
    config: Any, facts: tuple[RankFacts, ...] = FACTS, settings: Settings = SETTINGS, weights: str = "files 1"
) -> NamespaceSpec:
    layout = cache_layout(hybrid=False, blocks=8, retention=None)
    groups = identity.group_specs(layout, (0,), facts, config.parallel_config)
    planner = identity.engine_planner(config, layout, groups, settings)
    return identity.namespace_spec(config, layout, planner, facts, settings, {"weights": weights})


@pytest.mark.requirement("P3")
def test_two_builds_of_one_configuration_are_equal(folder: Path) -> None:
    first, second = engine_config(folder), engine_config(folder)
    assert first.kv_transfer_config is not None
    assert second.kv_transfer_config is not None
    assert first.kv_transfer_config.engine_id != second.kv_transfer_config.engine_id
    assert identity.engine_identity(first) == identity.engine_identity(second)
    assert namespace(first) == namespace(second)


@pytest.mark.requirement("P3")
def test_another_place_of_the_same_model_is_equal(folder: Path) -> None:
    moved = engine_config(folder)
    moved.model_config = _copy(moved.model_config)
    moved.model_config.model = moved.model_config.tokenizer = "/elsewhere"
    moved.model_config.served_model_name = "other"
    assert namespace(moved) == namespace(engine_config(folder))


@pytest.mark.requirement("P3")
def test_the_host_is_no_part_of_it(folder: Path) -> None:
    config = engine_config(folder)
    assert namespace(config, (replace(FACTS[0], boot_id="another"),)) == namespace(config)


def _copy(value: Any) -> Any:
    import copy

    return copy.copy(value)


def _set(path: str, value: Any) -> Callable[[Any], None]:
    def change(config: Any) -> None:
        *parents, name = path.split(".")
        at = config
        for parent in parents:
            part = _copy(getattr(at, parent))
            object.__setattr__(at, parent, part)
            at = part
        object.__setattr__(at, name, value)

    return change


@pytest.mark.requirement("P2")
@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("model_config.dtype", torch.float16),
        ("model_config.max_model_len", 2048),
        ("model_config.quantization", "fp8"),
        ("model_config.seed", 5),
        ("model_config.trust_remote_code", True),
        ("model_config.code_revision", "another"),
        ("parallel_config.worker_cls", "another.Worker"),
        ("model_config.hf_overrides", {"rope_theta": 7}),
        ("model_config.disable_sliding_window", True),
        ("cache_config.cache_dtype", "fp8"),
        ("cache_config.block_size", 32),
        ("cache_config.kv_cache_layout", "LBNHC"),
        ("cache_config.mamba_ssm_cache_dtype", "float16"),
        ("cache_config.prefix_caching_hash_algo", "sha256_cbor"),
        ("parallel_config.tensor_parallel_size", 2),
        ("parallel_config.pipeline_parallel_size", 2),
        ("parallel_config.enable_expert_parallel", True),
        ("attention_config.backend", "OTHER"),
        ("compilation_config.mode", 3),
        ("additional_config", {"x": 1}),
        ("load_config.load_format", "pt"),
        ("load_config.ignore_patterns", ["*.pt"]),
        ("load_config.model_loader_extra_config", {"x": 1}),
    ],
)
def test_a_setting_that_can_change_bytes_changes_the_namespace(folder: Path, path: str, value: Any) -> None:
    config = engine_config(folder)
    before = namespace(config)
    _set(path, value)(config)
    assert namespace(config) != before


@pytest.mark.requirement("P3")
@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("instance_id", "7"),
        ("load_config.download_dir", "/elsewhere"),
        ("cache_config.num_gpu_blocks", 77),
        ("cache_config.prefix_cache_retention_interval", 16),
        ("parallel_config.master_port", 1),
        ("scheduler_config.max_num_seqs", 1),
        ("kv_transfer_config.engine_id", "other"),
    ],
)
def test_a_setting_that_cannot_change_bytes_does_not(folder: Path, path: str, value: Any) -> None:
    config = engine_config(folder)
    before = namespace(config)
    _set(path, value)(config)
    assert namespace(config) == before


@pytest.mark.requirement("P2")
def test_rope_and_every_other_value_of_the_models_own_configuration_counts(folder: Path) -> None:
    config = engine_config(folder)
    config.model_config = _copy(config.model_config)
    original = config.model_config.hf_config.to_dict()
    before = identity.engine_identity(config)
    changed = []
    for key, value in original.items():
        if key in identity._PRIVATE_HF:
            continue
        config.model_config.hf_config = _Hf(original | {key: "changed" if value != "changed" else "other"})
        if identity.engine_identity(config) == before:
            changed.append(key)
    assert not changed, "a change of these goes unseen"


@pytest.mark.requirement("P2")
@pytest.mark.parametrize("name", ["pillow", "opencv-python-headless", "torchvision"])
def test_what_decodes_pictures_counts_where_a_model_takes_any(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def with_version(version: str) -> tuple[dict[str, str], dict[str, str]]:
        monkeypatch.setattr(packages, "version", lambda asked: version if asked == name else "1")
        text, pictures = engine_config(folder), engine_config(folder)
        pictures.model_config = _copy(pictures.model_config)
        pictures.model_config.multimodal_config = MultiModalConfig()
        return identity.engine_identity(text), identity.engine_identity(pictures)

    (text, pictures), (other_text, other_pictures) = with_version("1"), with_version("2")
    assert text == other_text
    assert {key for key in pictures if pictures[key] != other_pictures[key]} == {f"package.{name}"}


class _Hf:
    """A model configuration with one value changed."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values
        self.architectures = ["Qwen3ForCausalLM"]

    def to_dict(self) -> dict[str, Any]:
        return self._values


@pytest.mark.requirement("P2")
def test_what_the_ranks_and_the_operator_say_counts(folder: Path) -> None:
    config = engine_config(folder)
    before = namespace(config)
    layer = LAYERS[0]
    others = [
        replace(FACTS[0], software=(("instruction_set", "AVX512"), ("torch", "2"))),
        replace(FACTS[0], layers=(replace(layer, dtype="bfloat16"), LAYERS[1])),
        replace(FACTS[0], layers=(replace(layer, block_shape=(2, 16, 32)), LAYERS[1])),
        replace(FACTS[0], layers=(replace(layer, block_order=(2, 1)), LAYERS[1])),
        replace(FACTS[0], layers=(replace(layer, spec="window"), LAYERS[1])),
        replace(FACTS[0], layers=LAYERS[::-1]),
        replace(FACTS[0], layers=LAYERS[:1]),
    ]
    found = [namespace(config, (facts,)) for facts in others]
    found += [namespace(config, weights="files 2"), namespace(config, settings=replace(SETTINGS, tenant="b"))]
    found += [namespace(config, settings=replace(SETTINGS, chunk_tokens=32))]
    assert len({before, *found}) == len(found) + 1


@pytest.mark.requirement("P2")
def test_it_says_that_the_bytes_of_a_block_are_in_memory_order(folder: Path) -> None:
    """Before that they were in the order of the dimensions. Neither reads the other's."""
    spec = spec_of(engine_config(folder))
    assert spec.identity["block_bytes"] == "in memory order"
    before = {name: value for name, value in spec.identity.items() if name != "block_bytes"}
    assert replace(spec, identity=before).namespace_id() != spec.namespace_id()


@pytest.mark.requirement("I1")
def test_what_connectors_stored_before_a_fault_was_found_is_never_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such objects lie in tiers for months, and an older engine of the same model still makes them."""
    now = spec_of(engine_config(folder))
    of_0_3_0 = {name: value for name, value in now.identity.items() if name != "stored_faults"}
    assert replace(now, identity=of_0_3_0).namespace_id() != now.namespace_id()
    monkeypatch.setattr(identity, "STORED_FAULTS", (*identity.STORED_FAULTS, "another one"))
    assert namespace(engine_config(folder)) not in (now.namespace_id(), replace(now, identity=of_0_3_0).namespace_id())


QUANTIZED: dict[str, dict[str, Any]] = {
    "fp8": {"activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    "compressed-tensors": {
        "format": "int-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True, "dynamic": False},
                "input_activations": {
                    "num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True,
                },
            }
        },
    },
}  # fmt: skip


@pytest.mark.requirement("P2", "P3")
@pytest.mark.parametrize("method", QUANTIZED)
def test_a_quantized_model_has_a_namespace_of_its_own_and_one_for_all_engines(
    tmp_path: Path, folder: Path, method: str
) -> None:
    """vLLM's object for it has no canonical form; what it is made from has."""

    def built(name: str, **changed: Any) -> dict[str, str]:
        quantized = model_folder(tmp_path / name)
        values = json.loads((quantized / "config.json").read_text())
        values["quantization_config"] = {"quant_method": method} | QUANTIZED[method] | changed
        (quantized / "config.json").write_text(json.dumps(values))
        config = EngineArgs(
            str(quantized), dtype="bfloat16", skip_tokenizer_init=True, max_model_len=1024
        ).create_engine_config()
        assert config.quant_config is not None
        return identity.engine_identity(config)

    assert built("a") == built("b")
    assert built("c") != built("d", ignore=["lm_head"])


@pytest.mark.requirement("P2")
def test_a_quantization_file_that_only_a_path_names_is_refused(folder: Path) -> None:
    config = engine_config(folder)
    _set("model_config.hf_overrides", {"quantization_config_file": "/some/where"})(config)
    with pytest.raises(NamespaceError, match="quantization_config_file"):
        namespace(config)


@pytest.mark.requirement("P3")
@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("model_config.served_model_name", "another"),
        ("parallel_config.data_parallel_rank", 1),
        ("parallel_config.data_parallel_master_port", 1),
        ("parallel_config._data_parallel_master_port_list", [1, 2]),
        ("cache_config.num_gpu_blocks", 77),
    ],
)
def test_n_gram_drafts_bring_nothing_of_this_process_into_it(folder: Path, path: str, value: Any) -> None:
    """Their configuration names the engine's own models and ranks as target and draft."""
    config = engine_config(folder, drafts=2, hybrid=True)
    drafting = speculation(config)
    before = identity.engine_identity(config, drafting, states=True)
    part, _, name = path.partition(".")
    object.__setattr__(getattr(config, part), name, value)
    assert identity.engine_identity(config, drafting, states=True) == before
    _set("speculative_config.num_speculative_tokens", 3)(config)
    assert identity.engine_identity(config, drafting, states=True) != before


def test_every_exclusion_names_a_field_that_exists_and_gives_a_reason(folder: Path) -> None:
    config = engine_config(folder, drafts=2)
    late = {
        "model_config.encoder_config",
        "model_config.hf_image_processor_config",
        "compilation_config.bs_to_padded_graph_size",
    }
    new = {"watchdog_config", "cache_config.simple_cpu_offload_num_blocks"}  # in 0.33
    for path, reason in EXCLUDED.items():
        assert reason
        if path in new and versions.before(compat.VLLM_VERSION, (0, 33)):
            continue
        at: Any = config
        for name in path.split("."):
            assert path in late or name in type(at).__dataclass_fields__, path
            at = getattr(at, name, None)


def test_ranks_that_cannot_be_served_together_are_named() -> None:
    two = (FACTS[0], replace(FACTS[0], rank=1))
    assert identity.check_ranks(two, 2) == ""
    assert "several hosts" in identity.check_ranks((FACTS[0], replace(two[1], boot_id="b")), 2)
    assert "expected" in identity.check_ranks(FACTS, 2)
    assert "no room" in identity.check_ranks((replace(FACTS[0], problem="no room"),), 1)


@pytest.mark.requirement("I8", "I1")
def test_a_rank_with_other_code_than_the_scheduler_side_is_refused_whatever_its_pickle_has() -> None:
    """Ranks import kvdepot minutes before the scheduler side does, while the engine loads its model."""
    former = tuple(field for field in dataclasses.fields(RankFacts) if field.name not in ("code", "one_shard_groups"))
    of_0_3_0 = RankFacts.__new__(RankFacts)
    of_0_3_0.__setstate__([getattr(FACTS[0], field.name) for field in former])
    for facts in (replace(FACTS[0], code="another"), of_0_3_0):
        assert "replaced on the disk while the engine started" in identity.check_ranks((facts,), 1)
    assert pickle.loads(pickle.dumps(FACTS[0])) == FACTS[0]


@pytest.mark.requirement("P12")
def test_sizes_of_a_group_come_from_the_ranks_layers(folder: Path) -> None:
    second = replace(FACTS[0], rank=1, layers=LAYERS[:1])
    layout = cache_layout(hybrid=False, blocks=8, retention=None)
    (group,) = identity.group_specs(layout, (0,), (second, FACTS[0]), engine_config(folder).parallel_config)
    assert group.kind is Kind.ATTENTION
    assert group.rank_block_bytes == (8192, 4096)
    assert group.layers == ("a0", "a1")


@pytest.mark.requirement("P2")
def test_every_parallel_shape_has_a_namespace_of_its_own(folder: Path) -> None:
    """Also two pipelines that are cut at different layers."""
    three = (*LAYERS, replace(LAYERS[0], name="a2"))

    def stages(first: int) -> tuple[RankFacts, ...]:
        parts = (three[:first], three[first:])
        return tuple(replace(FACTS[0], rank=rank, layers=layers) for rank, layers in enumerate(parts))

    whole = (replace(FACTS[0], layers=three),)
    split = tuple(replace(whole[0], rank=rank) for rank in range(2))
    pipeline = engine_config(folder, ranks=2, pipeline=True)
    found = [
        namespace(engine_config(folder), whole),
        namespace(engine_config(folder, ranks=2), split),
        namespace(pipeline, stages(1)),
        namespace(pipeline, stages(2)),
    ]
    assert len(set(found)) == len(found)


@pytest.mark.requirement("P12")
def test_a_stage_without_layers_of_a_group_has_no_bytes_of_it(folder: Path) -> None:
    layout = cache_layout(hybrid=True, blocks=8, retention=0)
    state = LayerFacts("s0", 0, "float32", (1, 1, 84), (2,), 84, "state")
    own = ((state, replace(state, name="s1", group=1), replace(LAYERS[0], group=2)), (replace(LAYERS[1], group=2),))
    facts = tuple(replace(FACTS[0], rank=rank, layers=layers) for rank, layers in enumerate(own))
    config = engine_config(folder, hybrid=True, ranks=2, pipeline=True)
    groups = identity.group_specs(layout, (0, 1, 2), facts, config.parallel_config)
    assert [group.rank_block_bytes for group in groups] == [(84, 0), (84, 0), (4096, 4096)]
    planner = identity.engine_planner(config, layout, groups, SETTINGS)
    assert [planner.part_range(Kind.STATE, group, 1) for group in (0, 1)] == [(84, 84), (168, 168)]


@pytest.mark.requirement("P12")
def test_a_latent_that_ranks_replicate_is_stored_once_but_by_each_stage_of_a_pipeline(folder: Path) -> None:
    spec = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=64, dtype=torch.float32, max_tp_shards=1)
    layout = KVCacheConfig(8, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["a0", "a1"], spec)])
    latent = replace(FACTS[0], one_shard_groups=(0,))
    split = tuple(replace(latent, rank=rank) for rank in range(2))
    (group,) = identity.group_specs(layout, (0,), split, engine_config(folder, ranks=2).parallel_config)
    assert (group.replicated, group.rank_block_bytes) == (True, (8192,))
    (group,) = identity.group_specs(layout, (0,), (latent,), engine_config(folder).parallel_config)
    assert not group.replicated
    stages = tuple(replace(latent, rank=rank, layers=LAYERS[rank // 2 :][:1]) for rank in range(4))
    both = engine_config(folder, ranks=4, pipeline=True).parallel_config
    both.pipeline_parallel_size = both.tensor_parallel_size = 2
    (group,) = identity.group_specs(layout, (0,), stages, both)
    assert (group.replicated, group.rank_block_bytes) == (False, (4096,) * 4)
