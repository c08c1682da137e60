"""Which facts make an identity: of weights, adapters, ranks, and of the software and machine under them."""

from __future__ import annotations

import time
from importlib.metadata import EntryPoint, PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kvdepot.client.vllm.base import packages, plugin
from kvdepot.client.vllm.base.compat import environment_facts
from kvdepot.client.vllm.identity.weights import Digests, LoraSalts, weights_source
from kvdepot.client.vllm.worker.layers import RankLayers, rank_layers
from kvdepot.client.vllm.worker.rank import software_facts
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from tests.rigs.patience import Deadline


def salt_of(salts: LoraSalts, path: Path, load: int) -> bytes:
    until = Deadline(10)
    while not until.is_over():
        found = salts.salt(SimpleNamespace(lora_path=str(path), lora_int_id=load, load_inplace=False))
        if found is not None:
            return found
        time.sleep(0.005)
    raise AssertionError("no digest")


@pytest.mark.requirement("P2")
def test_an_adapter_replaced_on_disk_and_loaded_anew_has_another_salt(tmp_path: Path) -> None:
    """Unloaded, overwritten, loaded again under the same name and path: the engine gives it a new id."""
    digests = Digests(None)
    salts = LoraSalts(digests)
    (tmp_path / "adapter").write_bytes(b"x" * 64)
    first = salt_of(salts, tmp_path, 1)
    (tmp_path / "adapter").write_bytes(b"y" * 64)
    second = salt_of(salts, tmp_path, 2)
    digests.close()
    assert first != second


@pytest.mark.requirement("P2")
def test_one_declared_revision_of_two_models_is_not_one_identity() -> None:
    load = SimpleNamespace(load_format="auto", download_dir=None)
    names = ("org/base-tuned-for-code", "org/base-tuned-for-law")
    models = [SimpleNamespace(model=name, revision=None, model_weights="", seed=0) for name in names]
    first, second = (weights_source(model, load, "v1").text for model in models)
    assert first != second


@pytest.mark.requirement("P2")
@pytest.mark.parametrize("name", ["VLLM_CPU_INT4_W4A8", "VLLM_FLOAT32_MATMUL_PRECISION", "ONEDNN_DEFAULT_FPMATH_MODE"])
def test_a_variable_that_chooses_arithmetic_is_part_of_the_ranks_facts(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.delenv(name, raising=False)
    before = software_facts(RankLayers((), ()))
    monkeypatch.setenv(name, "medium" if name.endswith("PRECISION") else "1")
    assert software_facts(RankLayers((), ())) != before


@pytest.mark.requirement("P2")
@pytest.mark.parametrize("name", ["_is_amx_tile_supported", "_is_avx512_supported"])
def test_what_a_processor_can_do_is_part_of_the_ranks_facts(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """With AMX, vLLM orders keys and values within a block otherwise; get_cpu_capability does not tell of it."""
    before = software_facts(RankLayers((), ()))
    has = getattr(torch.cpu, name)()
    monkeypatch.setattr(torch.cpu, name, lambda: not has)
    assert software_facts(RankLayers((), ())) != before


@pytest.mark.requirement("P2")
def test_transformers_and_plugins_are_part_of_the_ranks_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    before = software_facts(RankLayers((), ()))
    assert software_facts(RankLayers((), ())) == before
    with monkeypatch.context() as patched:
        patched.setattr(packages, "version", lambda name: "0.0.1")
        assert software_facts(RankLayers((), ())) != before
    points: list[EntryPoint] = []
    monkeypatch.setattr(packages, "entry_points", lambda group: [one for one in points if one.group == group])
    before = software_facts(RankLayers((), ()))
    points.append(EntryPoint("kvdepot", plugin.ENTRY_POINT, "vllm.general_plugins"))
    assert software_facts(RankLayers((), ())) == before, "kvdepot's own says nothing about KV"
    points.append(EntryPoint("models", "package:register", "vllm.general_plugins"))
    assert software_facts(RankLayers((), ())) != before


@pytest.mark.requirement("P2")
@pytest.mark.parametrize(
    "change",
    [
        {"flashinfer-python": "0.5.1"},
        {"nvidia-nccl-cu12": "2.28"},
        {"capability": (9, 0)},
        {"name": "NVIDIA H200"},
        {"hip": "7.1"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_computes_on_a_gpu_is_part_of_the_ranks_facts(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    """Two engines with different kernels share no bytes."""
    layers: Any = SimpleNamespace(views=[SimpleNamespace(device=torch.device("cuda", 0))])
    here = {"flashinfer-python": "0.5.0", "transformers": "5", "capability": (8, 0), "name": "NVIDIA A100", "hip": None}

    def facts(machine: dict[str, Any]) -> Any:
        def version(name: str) -> str:
            if name not in machine:
                raise PackageNotFoundError(name)
            return str(machine[name])

        monkeypatch.setattr(packages, "version", version)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: machine["name"])
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: machine["capability"])
        monkeypatch.setattr(torch.version, "hip", machine["hip"])
        return software_facts(layers)

    assert facts(here) == facts(here) != facts(here | change)


@pytest.mark.requirement("P2")
def test_the_precision_of_float32_products_is_part_of_the_ranks_facts() -> None:
    before = software_facts(RankLayers((), ()))
    precision = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium" if precision != "medium" else "highest")
        assert software_facts(RankLayers((), ())) != before
    finally:
        torch.set_float32_matmul_precision(precision)


@pytest.mark.requirement("P3")
def test_where_an_engine_runs_is_no_part_of_its_environment() -> None:
    here = {"VLLM_CPU_OMP_THREADS_BIND": "0-15", "VLLM_DP_RANK": "1", "VLLM_PORT": "1", "VLLM_LOGGING_LEVEL": "DEBUG"}
    assert environment_facts(here) == {}


@pytest.mark.requirement("P2")
@pytest.mark.parametrize("name", ["VLLM_TUNED_CONFIG_FOLDER", "VLLM_ZENTORCH_WEIGHT_PREPACK", "ONEDNN_MAX_CPU_ISA"])
def test_what_chooses_kernels_is_part_of_an_engines_environment(name: str) -> None:
    assert environment_facts({name: "1"}) == {name: "1"}


def _facts(blocks: int, cache: torch.Tensor) -> Any:
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float32)
    layout = KVCacheConfig(blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["a"], spec)])
    return rank_layers({"a": cache}, layout, (0,)).facts


@pytest.mark.requirement("P4")
def test_how_many_blocks_an_engine_has_is_no_part_of_its_layers_facts() -> None:
    """Two engines with other amounts of memory share bytes, also where keys and values lie outside the blocks."""

    def outside(blocks: int) -> torch.Tensor:
        return torch.zeros(2, blocks, 16, 2, 8).transpose(0, 1)

    assert _facts(4, outside(4)) == _facts(7, outside(7))
    assert _facts(4, outside(4)) != _facts(4, torch.zeros(4, 16, 2, 2, 8).permute(0, 2, 1, 3, 4)), "another order"
