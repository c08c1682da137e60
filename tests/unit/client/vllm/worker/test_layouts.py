"""Layouts of KV caches, made by vLLM's own code: in memory order a block is as few runs of bytes as it can be."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from kvdepot.client.copy.indexed import as_numbers
from kvdepot.client.copy.table import LayerTable
from kvdepot.client.vllm.base.cache_views import engine_blocks
from kvdepot.client.vllm.worker.layers import rank_layers
from vllm.v1.kv_cache_interface import group_kernel_blocks
from vllm.v1.kv_cache_layout import KVCacheLayout

from benchmarks.day_one.golden import case_name, golden_cases, layers_in, storages_of
from tests.rigs.vllm_layouts import FAMILIES, allocated, described

REFUSED_BY_VLLM = 11
CASES = golden_cases()
HEADS_APART = re.compile("H[LB]+.*N")
"""The letters of a layout: its dimensions from the outermost one on; layers, blocks, heads, tokens, channels."""


def runs_of_blocks(layers: Sequence[torch.Tensor]) -> list[int]:
    table, block, other = LayerTable(layers), np.array([0]), np.array([1])
    return [len(table.moves([number], block, other)) for number in range(len(layers))]


@pytest.mark.parametrize("layout", KVCacheLayout, ids=lambda layout: layout.name)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_golden_layouts_are_those_of_the_installed_vllm(family: str, layout: KVCacheLayout) -> None:
    """Where this fails, vLLM has moved: look at what that changes, then write the file again."""
    now = described(family, layout)
    then = [case for case in CASES if (case["family"], case["layout"]) == (family, layout.name)]
    assert then == ([] if "refused" in now else [now])


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_a_block_is_one_run_unless_its_heads_lie_apart(case: dict[str, Any]) -> None:
    layers = layers_in(case, storages_of(case, torch.device("cpu")))
    apart = bool(HEADS_APART.search(case["layout"]))
    for runs, facts in zip(runs_of_blocks(layers.views), layers.facts, strict=True):
        assert runs == (facts.block_shape[0] if apart else 1), facts
    assert [as_numbers(view).element_size() for view in layers.views] == [8] * len(layers.views)


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_the_golden_caches_are_seen_as_the_real_ones_are(case: dict[str, Any]) -> None:
    made = allocated(case["family"], KVCacheLayout[case["layout"]])
    assert not isinstance(made, str)
    caches, config = made
    real = rank_layers(caches, config, range(len(config.kv_cache_groups)))
    golden = layers_in(case, storages_of(case, torch.device("cpu")))
    assert [replace(facts, spec="") for facts in real.facts] == [replace(facts, spec="") for facts in golden.facts]
    assert [view.stride() for view in real.views] == [view.stride() for view in golden.views]
    assert [view.storage_offset() for view in real.views] == [view.storage_offset() for view in golden.views]


def test_kernel_blocks_are_grouped_as_vllm_groups_them() -> None:
    cache = torch.arange(24 * 5).view(24, 5)
    for blocks in (24, 6):
        ours, theirs = engine_blocks(cache, blocks), group_kernel_blocks(cache, blocks)
        assert (ours.shape, ours.stride()) == (theirs.shape, theirs.stride())


def test_most_layouts_of_every_family_are_there() -> None:
    taken = Counter(case["family"] for case in CASES)
    assert sum(taken.values()) >= len(FAMILIES) * len(KVCacheLayout) - REFUSED_BY_VLLM
    assert min(taken[family] for family in FAMILIES) >= 2, taken
