"""KV caches of eight families in six layouts, as vLLM's own code makes them. `python -m tests.rigs.vllm_layouts` writes
them to `tests/golden`, for machines without vLLM (`benchmarks/day_one`).
"""

from __future__ import annotations

import dataclasses
import json
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from kvdepot.client.vllm.base import compat
from kvdepot.client.vllm.base.compat import VLLM_VERSION
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from benchmarks.day_one.golden import GOLDEN

_PLANNING = import_module(
    "vllm.v1.core.kv_cache_utils" if VLLM_VERSION.startswith("0.32.") else "vllm.v1.core.kv_cache_planning"
)
LAYERS = 2
HEADS = 8


def names(prefix: str) -> list[str]:
    return [f"{prefix}.{number}" for number in range(LAYERS)]


def full(**options: Any) -> FullAttentionSpec:
    return FullAttentionSpec(
        **{"block_size": 16, "num_kv_heads": HEADS, "head_size": 128, "dtype": torch.bfloat16} | options
    )


def group(prefix: str, spec: Any) -> KVCacheGroupSpec:
    return KVCacheGroupSpec(names(prefix), spec)


def hybrid() -> list[KVCacheGroupSpec]:
    state = MambaSpec(
        block_size=784,
        shapes=((3, 8192), (32, 128, 128)),
        dtypes=(torch.bfloat16, torch.float32),
        mamba_cache_mode="align",
    )
    attention = full(block_size=784, num_kv_heads=2, head_size=256)
    page = max(attention.page_size_bytes, state.real_page_size_bytes)
    padded = [
        dataclasses.replace(spec, page_size_padded=page) if spec.page_size_bytes < page else spec
        for spec in (attention, state)
    ]
    return [group("a", padded[0]), group("m", padded[1]), group("n", padded[1])]


def mixed() -> list[KVCacheGroupSpec]:
    specs = {name: full() for name in names("a")} | {name: full(head_size=256) for name in names("b")}
    return [KVCacheGroupSpec(list(specs), UniformTypeKVCacheSpecs.from_specs(specs))]


FAMILIES: dict[str, tuple[list[KVCacheGroupSpec], list[int] | None]] = {
    "dense": ([group("a", full())], None),
    "kernel blocks of a quarter": ([group("a", full(block_size=64))], [16]),
    "fp8": ([group("a", full(dtype=torch.float8_e4m3fn))], None),
    "bytes": ([group("a", full(dtype=torch.uint8))], None),
    "latent": (
        [group("a", MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=576, dtype=torch.bfloat16))],
        None,
    ),
    "windows": (
        [
            group("f", full()),
            group(
                "w",
                SlidingWindowSpec(
                    block_size=16, num_kv_heads=HEADS, head_size=128, dtype=torch.bfloat16, sliding_window=1024
                ),
            ),
        ],
        None,
    ),
    "hybrid": (hybrid(), None),
    "two sizes of heads": (mixed(), None),
}
_REFUSALS = (ValueError, NotImplementedError, AssertionError, RuntimeError)
MEMORY_BYTES = 24 << 20


def allocated(family: str, layout: KVCacheLayout) -> tuple[dict[str, torch.Tensor], Any] | str:
    """Return each layer's cache, and vLLM's configuration of them; or why vLLM refuses."""
    groups, kernel_blocks = FAMILIES[family]
    config = SimpleNamespace(
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: layout, prefix_cache_retention_interval=0, num_gpu_blocks_override=None
        ),
        attention_config=SimpleNamespace(hisparse_config=None),
    )
    try:
        planned = _PLANNING.get_kv_cache_config_from_groups(config, groups, MEMORY_BYTES)
        return allocate_kv_cache(planned, torch.device("cpu"), layout, kernel_blocks), planned
    except _REFUSALS as error:
        return f"{type(error).__name__}: {error}"[:200]


def described(family: str, layout: KVCacheLayout) -> dict[str, Any]:
    """Return one case of the golden file."""
    made = allocated(family, layout)
    case: dict[str, Any] = {"family": family, "layout": layout.name}
    if isinstance(made, str):
        return case | {"refused": made}
    caches, config = made
    storages: dict[int, int] = {}
    case |= {"blocks": config.num_blocks, "caches": {}}
    for name, cache in caches.items():
        storage = cache.untyped_storage()
        storages.setdefault(storage.data_ptr(), storage.nbytes())
        case["caches"][name] = {
            "shape": list(cache.shape), "strides": list(cache.stride()), "offset": cache.storage_offset(),
            "dtype": str(cache.dtype).removeprefix("torch."), "storage": list(storages).index(storage.data_ptr()),
            "kernel_blocks": cache.shape[0] // config.num_blocks,
        }  # fmt: skip
    case["storages"] = list(storages.values())
    case["groups"] = [
        {"kind": compat.group_kind(group.kv_cache_spec).name.lower(), "layers": list(group.layer_names)}  # type: ignore[union-attr]
        for group in config.kv_cache_groups
    ]
    return case


def all_described() -> list[dict[str, Any]]:
    """Return every case: what the golden file holds."""
    return [described(family, layout) for family in FAMILIES for layout in KVCacheLayout]


if __name__ == "__main__":
    rows = ",\n".join(json.dumps(case) for case in all_described())
    Path(GOLDEN).write_text(f'{{"vllm": "{VLLM_VERSION}", "cases": [\n{rows}\n]}}\n')
