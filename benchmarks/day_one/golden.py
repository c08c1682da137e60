"""Layouts of vLLM's KV caches, from `tests/golden/vllm_layouts.json`: on a machine without vLLM too.

`python -m tests.rigs.vllm_layouts` writes the file from the installed vLLM, and a test compares both.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from kvdepot.client.vllm.worker.layers import RankLayers, rank_layers

GOLDEN = Path(__file__).resolve().parents[2] / "tests/golden/vllm_layouts.json"
Case = dict[str, Any]


def golden_cases(path: Path = GOLDEN) -> list[Case]:
    """Every family in every layout that vLLM does not refuse."""
    return [case for case in json.loads(path.read_text())["cases"] if "refused" not in case]


def case_name(case: Case) -> str:
    """For messages."""
    return f"{case['family']}, {case['layout']}"


def storages_of(case: Case, device: torch.device) -> list[torch.Tensor]:
    """Memory of the case's caches, uint8, undefined."""
    return [torch.empty(size_bytes, dtype=torch.uint8, device=device) for size_bytes in case["storages"]]


def layers_in(case: Case, storages: Sequence[torch.Tensor]) -> RankLayers:
    """The product's own view of these caches, laid over `storages`."""
    caches = {}
    for name, cache in case["caches"].items():
        storage = storages[cache["storage"]]
        made = torch.empty(0, dtype=getattr(torch, cache["dtype"]), device=storage.device)
        caches[name] = made.set_(
            storage.untyped_storage(), cache["offset"], tuple(cache["shape"]), tuple(cache["strides"])
        )
    groups = [SimpleNamespace(layer_names=group["layers"], kv_cache_spec=None) for group in case["groups"]]
    config = SimpleNamespace(num_blocks=case["blocks"], kv_cache_groups=groups)
    return rank_layers(caches, config, range(len(groups)))
