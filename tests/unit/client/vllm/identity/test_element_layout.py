"""What a connector says of the types of its bytes, from vLLM's own specs (design.md#audit)."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kvdepot.client.vllm.base.metadata import RankFacts
from kvdepot.client.vllm.base.operations import LayerFacts
from kvdepot.client.vllm.identity import identity
from kvdepot.client.vllm.identity.element_layout import element_layout
from kvdepot.client.vllm.identity.speculation import Speculation
from kvdepot.core import limits
from kvdepot.core.calls import Kind
from kvdepot.core.elements import OPAQUE, ElementRun, check_elements
from kvdepot.core.planner import Planner
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
)

HEADS: dict[str, Any] = {"block_size": 16, "num_kv_heads": 1, "head_size": 8, "dtype": torch.bfloat16}
LAYER = LayerFacts("a0", 0, "bfloat16", (1, 16, 16), (1, 2), 512, "")


def facts_of(*layers: LayerFacts, ranks: int = 1, one_shard_groups: tuple[int, ...] = ()) -> list[RankFacts]:
    return [RankFacts(rank, "boot", layers, (), "", one_shard_groups) for rank in reversed(range(ranks))]


def said(
    config: KVCacheConfig,
    facts: list[RankFacts],
    cache_dtype: str = "auto",
    tensor: int = 1,
    drafting: Speculation | None = None,
) -> Any:
    groups = tuple(range(len(config.kv_cache_groups)))
    parallel = SimpleNamespace(tensor_parallel_size=tensor, pipeline_parallel_size=1)
    planner = Planner(identity.group_specs(config, groups, facts, parallel), 64)
    elements = element_layout(config, cache_dtype, planner, groups, facts, drafting)
    check_elements(elements, {kind: planner.object_bytes(kind) for kind in planner.kinds})
    return elements


def attention(layers: int = 1, **heads: Any) -> KVCacheConfig:
    spec = FullAttentionSpec(**HEADS | heads)
    return KVCacheConfig(8, [], [KVCacheGroupSpec([f"a{at}" for at in range(layers)], spec)])


def test_a_layer_of_a_rank_is_a_part() -> None:
    layers = [replace(LAYER, name=f"a{at}") for at in range(3)]
    found = said(attention(3), facts_of(*layers, ranks=2), tensor=2)
    assert found == {Kind.ATTENTION: (ElementRun("bfloat16", 4 * 512, 6),)}


def test_a_replicated_part_is_said_once_and_layers_of_other_sizes_by_themselves() -> None:
    spec = MLAAttentionSpec(max_tp_shards=1, **HEADS)
    config = KVCacheConfig(8, [], [KVCacheGroupSpec(["a0", "a1"], spec)])
    layers = (LAYER, replace(LAYER, name="a1", block_bytes=256, dtype="float16"))
    found = said(config, facts_of(*layers, ranks=4, one_shard_groups=(0,)), tensor=4)
    assert found == {Kind.ATTENTION: (ElementRun("bfloat16", 2048), ElementRun("float16", 1024))}


@pytest.mark.parametrize(
    ("tensor", "cache_dtype", "dtype"),
    [
        ("uint8", "fp8", "float8_e4m3fn"),
        ("uint8", "fp8_e4m3", "float8_e4m3fn"),
        ("uint8", "fp8_e5m2", "float8_e5m2"),
        ("float8_e4m3fn", "fp8_inc", "float8_e4m3fn"),
        ("int8", "int8", "int8"),
        ("uint8", "fp8_ds_mla", OPAQUE),
        ("uint8", "nvfp4", OPAQUE),
        ("int8", "int8_per_token_head", OPAQUE),
        ("uint8", "auto", OPAQUE),
    ],
)
def test_types_of_8_bits_are_told_by_the_setting_and_packed_ones_are_opaque(
    tensor: str, cache_dtype: str, dtype: str
) -> None:
    found = said(attention(), facts_of(replace(LAYER, dtype=tensor)), cache_dtype)
    assert found == {Kind.ATTENTION: (ElementRun(dtype, 2048),)}


def test_a_recurrent_state_is_of_its_specs_types_whatever_the_tensor_is() -> None:
    spec = MambaSpec(
        block_size=64, shapes=((3, 32), (4, 8, 16)), dtypes=(torch.bfloat16, torch.float32), mamba_cache_mode="align",
    )  # fmt: skip
    config = attention()
    config.kv_cache_groups.append(KVCacheGroupSpec(["s0", "s1"], spec))
    state = LayerFacts("s0", 1, "int8", (1, 1, 2240), (2,), 2240, "")
    found = said(config, facts_of(LAYER, state, replace(state, name="s1")))
    parts = (ElementRun("bfloat16", 192), ElementRun("float32", 2048))
    assert found[Kind.STATE] == parts * 2
    odd = replace(state, name="s1", block_bytes=2304)  # as this version does not know it
    assert said(config, facts_of(LAYER, state, odd), "int8")[Kind.STATE] == (*parts, ElementRun(OPAQUE, 2304))


def test_inputs_of_draft_tokens_in_a_state_are_not_compared() -> None:
    """Rejected ones stay there, and the next computation leaves others."""
    spec = MambaSpec(
        block_size=64, shapes=((5, 32), (4, 8, 16)), dtypes=(torch.bfloat16, torch.float32), mamba_cache_mode="align",
    )  # fmt: skip
    config = attention()
    config.kv_cache_groups.append(KVCacheGroupSpec(["s0"], spec))
    facts = facts_of(LAYER, LayerFacts("s0", 1, "int8", (1, 1, 2368), (2,), 2368, ""))
    found = said(config, facts, drafting=Speculation("ngram", 2, 0))
    assert found[Kind.STATE] == (ElementRun(OPAQUE, 320), ElementRun("float32", 2048))
    assert found[Kind.ATTENTION] == said(config, facts)[Kind.ATTENTION]


@pytest.mark.parametrize("drafting", [Speculation("draft_model", 2, 0), Speculation("mtp", 2, 1)])
def test_an_engine_with_draft_layers_is_not_audited(drafting: Speculation) -> None:
    assert said(attention(), facts_of(LAYER), drafting=drafting) == {}
    assert said(attention(), facts_of(LAYER), drafting=Speculation("ngram", 2, 0)) != {}


def test_an_engine_of_more_runs_than_may_be_says_nothing() -> None:
    count = limits.LAYERS_PER_GROUP_MAX
    layers = [replace(LAYER, name=f"a{at}", block_bytes=512 * (1 + at % 2)) for at in range(count)]
    ranks = limits.ELEMENT_RUNS_MAX // count + 1
    assert said(attention(count), facts_of(*layers, ranks=ranks), tensor=ranks) == {}
