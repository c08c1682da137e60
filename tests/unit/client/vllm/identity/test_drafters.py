"""The drafter's part of the namespace: what depends on it is shared by engines with the same drafter only (row C7)."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kvdepot.client.vllm.identity import identity
from kvdepot.client.vllm.identity.speculation import speculation
from kvdepot.client.vllm.identity.weights import weights_sources
from kvdepot.core.errors import ConfigError
from vllm.config import LoadConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.transformers_utils.configs.eagle import EAGLEConfig

from demo.toys import HYBRID
from tests.fakes.scripted_engine import CONTEXT, engine_config, model_folder
from tests.rigs.speculative_configs import drafting

DRAFT_MODEL = {"method": "draft_model", "num_speculative_tokens": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"))


def drafter(folder: Path, **values: Any) -> Path:
    """Return the folder of a draft model, whose configuration has these values in addition."""
    model_folder(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))
    return folder


def engine_identity(config: Any, *, states: bool = False) -> dict[str, str]:
    return identity.engine_identity(config, speculation(config), states=states)


def started(folder: Path, **options: Any) -> Any:
    """Return the configuration of an engine that is started with these options, as vLLM resolves it."""
    args = EngineArgs(str(folder), dtype="float32", skip_tokenizer_init=True, max_model_len=CONTEXT, **options)
    return args.create_engine_config()


@pytest.mark.requirement("C7", "P3")
def test_one_drafter_in_two_folders_is_equal_and_another_one_is_not(folder: Path, tmp_path: Path) -> None:
    def of(drafter: Path, **options: Any) -> dict[str, str]:
        return engine_identity(started(folder, speculative_config=DRAFT_MODEL | {"model": str(drafter)} | options))

    first, same = drafter(tmp_path / "a"), drafter(tmp_path / "b")
    assert of(first) == of(same)
    assert of(first) != of(drafter(tmp_path / "c", rope_theta=7.0))
    assert of(first) != of(first, num_speculative_tokens=3)
    assert of(first) != engine_identity(started(folder))


@pytest.mark.requirement("C7", "P3")
@pytest.mark.parametrize("method", ["ngram", "ngram_gpu"])
def test_drafts_of_tokens_share_everything_of_a_model_without_states(folder: Path, method: str) -> None:
    """vLLM switches asynchronous scheduling off for n-grams, and other settings with it."""
    speculating = started(folder, speculative_config={"method": method, "num_speculative_tokens": 3})
    found = engine_identity(started(folder))
    assert engine_identity(speculating) == found
    assert found["speculative_config"] == "null"  # as in namespaces of earlier versions, by which things are stored
    assert found["parallel_config.disable_nccl_for_dp_synchronization"] == "true"


@pytest.mark.requirement("C7")
def test_states_depend_on_the_number_of_draft_tokens(folder: Path) -> None:
    """Their convolutions keep a token more for each, and padding may hide it in the sizes."""
    config = engine_config(folder, hybrid=True)
    speculating = [drafting(config, "ngram", draft_tokens=count) for count in (1, 2)]
    found = [engine_identity(each, states=True) for each in (config, *speculating)]
    assert len({json.dumps(each, sort_keys=True) for each in found}) == 3


PLACES = {"model", "revision"}
ELSEWHERE = {
    "target_model_config", "target_parallel_config", "draft_model_config", "draft_parallel_config", "draft_load_config",
}  # fmt: skip


@pytest.mark.requirement("C7")
def test_every_setting_of_a_drafter_counts_except_places(folder: Path) -> None:
    config = drafting(engine_config(folder), "draft_model", folder)
    served = speculation(config)
    before = identity.engine_identity(config, served)
    unseen = set()
    for field in dataclasses.fields(config.speculative_config):
        changed = copy.copy(config)
        changed.speculative_config = copy.copy(config.speculative_config)
        object.__setattr__(changed.speculative_config, field.name, "changed")
        if field.name not in ELSEWHERE and identity.engine_identity(changed, served) == before:
            unseen.add(field.name)
    assert unseen == PLACES


def with_draft(config: Any, part: str, **values: Any) -> Any:
    """Return a copy of an engine's configuration, in which a part of its drafter's has other values."""
    config = copy.copy(config)
    config.speculative_config = copy.copy(config.speculative_config)
    changed = copy.copy(getattr(config.speculative_config, part))
    for name, value in values.items():
        object.__setattr__(changed, name, value)
    object.__setattr__(config.speculative_config, part, changed)
    return config


@pytest.mark.requirement("C7")
@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("draft_model_config", "dtype", torch.float16),
        ("draft_model_config", "max_model_len", 128),
        ("draft_model_config", "quantization", "fp8"),
        ("draft_model_config", "code_revision", "another"),
        ("draft_parallel_config", "tensor_parallel_size", 2),
        ("draft_parallel_config", "enable_expert_parallel", True),
        ("draft_load_config", "load_format", "pt"),
        ("draft_load_config", "model_loader_extra_config", {"x": 1}),
    ],
)
def test_the_drafter_s_own_configuration_counts(folder: Path, part: str, name: str, value: Any) -> None:
    config = drafting(engine_config(folder), "draft_model", folder, draft_load_config=LoadConfig())
    assert engine_identity(with_draft(config, part, **{name: value})) != engine_identity(config)


@pytest.mark.requirement("C7", "P3")
@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("draft_model_config", "model", "/elsewhere"),
        ("draft_model_config", "tokenizer", "/elsewhere"),
        ("draft_model_config", "revision", "another"),
        ("draft_model_config", "hf_overrides", SimpleNamespace()),
        ("draft_parallel_config", "data_parallel_rank", 1),
        ("draft_parallel_config", "_data_parallel_master_port_list", [1, 2]),
        ("draft_load_config", "download_dir", "/elsewhere"),
    ],
)
def test_the_drafter_s_places_and_processes_do_not_count(folder: Path, part: str, name: str, value: Any) -> None:
    config = drafting(engine_config(folder), "draft_model", folder, draft_load_config=LoadConfig())
    assert engine_identity(with_draft(config, part, **{name: value})) == engine_identity(config)


@pytest.mark.requirement("C7")
def test_every_value_of_the_drafter_s_own_file_counts(folder: Path) -> None:
    config = drafting(engine_config(folder), "draft_model", folder)
    before = engine_identity(config)
    values = config.speculative_config.draft_model_config.hf_config.to_dict()
    unseen = {
        key
        for key in values
        if engine_identity(with_draft(config, "draft_model_config", hf_config=_Hf(values | {key: "changed"}))) == before
    }
    assert unseen <= set(identity._PRIVATE_HF)


class _Hf:
    """A model's own configuration."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def to_dict(self) -> dict[str, Any]:
        return self._values


@pytest.mark.requirement("C7", "P3")
def test_an_eagle_head_s_file_holds_a_model_whose_place_does_not_count(folder: Path, tmp_path: Path) -> None:
    config = drafting(engine_config(folder), "draft_model", folder)

    def of(place: str, **values: Any) -> dict[str, str]:
        inner = copy.deepcopy(config.speculative_config.draft_model_config.hf_config)
        inner.update({"name_or_path": place} | values)
        return engine_identity(
            with_draft(config, "draft_model_config", hf_config=EAGLEConfig(inner, method="eagle3", model_type="eagle"))
        )

    assert of("/here") == of("/there")
    assert of("/here") != of("/here", rope_theta=7.0)


@pytest.mark.requirement("C7")
def test_lookahead_tokens_count(folder: Path) -> None:
    config = drafting(engine_config(folder), "mtp", folder)
    served = speculation(config)
    assert served is not None
    other = dataclasses.replace(served, lookahead_tokens=2)
    assert identity.engine_identity(config, other) != identity.engine_identity(config, served)


@pytest.mark.requirement("C7")
def test_weights_of_another_folder_are_digested_too(folder: Path, tmp_path: Path) -> None:
    other = drafter(tmp_path / "other")
    config = drafting(engine_config(folder), "draft_model", other)
    for revision in ("", "abc"):
        assert weights_sources(config, revision)["draft_weights"].folder == other
    assert set(weights_sources(drafting(engine_config(folder), "mtp", folder), "")) == {"weights"}
    assert set(weights_sources(drafting(engine_config(folder), "mtp", folder), "abc")) == {"weights"}
    assert set(weights_sources(drafting(engine_config(folder), "ngram"), "")) == {"weights"}


@pytest.mark.requirement("C7")
def test_a_drafter_whose_weights_cannot_be_identified_needs_a_name_for_them(folder: Path) -> None:
    config = drafting(engine_config(folder), "eagle", folder, draft_load_config=LoadConfig("tensorizer"))
    with pytest.raises(ConfigError, match="model_revision"):
        weights_sources(config, "")
    names = {
        weights_sources(
            with_draft(config, "draft_model_config", model="org/drafter", revision=revision), "abc"
        )["draft_weights"].text
        for revision in (None, "r1", "r2")
    }  # fmt: skip
    assert names == {f"revision abc with {revision} of org/drafter" for revision in (None, "r1", "r2")}


@pytest.mark.requirement("C7")
def test_a_drafter_of_another_revision_of_the_target_s_repository_has_weights_of_its_own(folder: Path) -> None:
    """vLLM gives an MTP head no revision if the user gives none, and then reads the main branch."""
    config = drafting(engine_config(folder), "mtp", folder)
    assert set(weights_sources(config, "abc")) == {"weights"}
    other = with_draft(config, "draft_model_config", revision="r1")
    assert weights_sources(other, "abc")["draft_weights"].folder == folder
    read = drafting(engine_config(folder), "mtp", folder, draft_load_config=LoadConfig("safetensors"))
    read.load_config = LoadConfig("dummy")
    assert weights_sources(read, "abc")["draft_weights"].folder == folder


@pytest.mark.requirement("C7")
def test_a_draft_model_is_digested_as_vllm_loads_it(folder: Path, tmp_path: Path) -> None:
    """By the target's `load_config`: vLLM does not read `draft_load_config` for this method."""
    other = drafter(tmp_path / "other")
    config = drafting(engine_config(folder), "draft_model", other, draft_load_config=LoadConfig("dummy"))
    assert weights_sources(config, "")["draft_weights"].folder == other


QWEN3_NEXT = {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "num_nextn_predict_layers": 1,
}  # fmt: skip
HEADS = {"eagle": "LlamaForCausalLM", "eagle3": "LlamaForCausalLMEagle3", "mtp": ""}


@pytest.mark.long
@pytest.mark.requirement("C7", "P3")
@pytest.mark.parametrize("method", HEADS)
def test_real_heads_in_two_folders_are_equal(tmp_path: Path, method: str) -> None:
    """vLLM rewrites the head's configuration, and derives settings of the engine from it."""
    head = {"architectures": [HEADS[method]], "model_type": "llama", "num_hidden_layers": 1}

    def of(name: str, **values: Any) -> dict[str, str]:
        if method == "mtp":  # in the model's own folder
            target = drafter(tmp_path / name, **QWEN3_NEXT | HYBRID.config | values)
            config = started(target, speculative_config={"method": method, "num_speculative_tokens": 2})
        else:
            model = str(drafter(tmp_path / name, **head | values))
            speculative = {"method": method, "model": model, "num_speculative_tokens": 2}
            config = started(model_folder(tmp_path / "target"), speculative_config=speculative)
        served = speculation(config)
        assert served is not None
        assert (served.method, served.lookahead_tokens) == (method, 1)
        return engine_identity(config)

    assert of("a") == of("b")
    assert of("a") != of("c", rope_theta=7.0)
