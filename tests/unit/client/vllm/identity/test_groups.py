"""vLLM's own KV-cache specs as kvdepot understands them, and the planner against vLLM's own block managers."""

from __future__ import annotations

from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kvdepot.client.vllm.base import compat
from kvdepot.client.vllm.base.metadata import RankFacts
from kvdepot.client.vllm.base.operations import LayerFacts
from kvdepot.client.vllm.identity import identity
from kvdepot.core.calls import Kind
from kvdepot.core.planner import GroupSpec, Planner
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    HiddenStateCacheSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

try:
    from vllm.v1.core.kv_cache_planning import unify_hybrid_kv_cache_specs
except ImportError:  # before 0.33
    from vllm.v1.core.kv_cache_utils import unify_hybrid_kv_cache_specs

HEADS: dict[str, Any] = {"block_size": 16, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
FULL = FullAttentionSpec(**HEADS)
LATENT = MLAAttentionSpec(max_tp_shards=1, **HEADS)
WINDOW = SlidingWindowSpec(sliding_window=50, **HEADS)
LOCAL = ChunkedLocalAttentionSpec(attention_chunk_size=64, **HEADS)


def state(**changes: Any) -> MambaSpec:
    return MambaSpec(block_size=16, shapes=((3, 7),), dtypes=(torch.float32,), mamba_cache_mode="align", **changes)


def of_layers(*specs: Any) -> UniformTypeKVCacheSpecs:
    return UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={f"l{i}": spec for i, spec in enumerate(specs)})


@pytest.mark.requirement("P12")
@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        (FULL, Kind.ATTENTION),
        (LATENT, Kind.ATTENTION),
        (WINDOW, Kind.WINDOW),
        (of_layers(FULL, FullAttentionSpec(**HEADS | {"num_kv_heads": 2})), Kind.ATTENTION),
        (of_layers(FULL, LATENT), Kind.ATTENTION),
        (of_layers(WINDOW, SlidingWindowSpec(sliding_window=50, **HEADS | {"num_kv_heads": 2})), Kind.WINDOW),
        *((state(mamba_type=variant), Kind.STATE) for variant in MambaAttentionBackendEnum),
    ],
    ids=str,
)
def test_what_is_understood(spec: Any, kind: Kind) -> None:
    assert compat.group_kind(spec) is kind
    assert compat.group_window_tokens(spec) == (50 if kind is Kind.WINDOW else 0)


@pytest.mark.parametrize(
    "spec",
    [
        LOCAL,
        RSWASpec(rswa_window=32, **HEADS),
        SinkFullAttentionSpec(sink_len=4, **HEADS),
        HiddenStateCacheSpec(**HEADS),
        SlidingWindowMLASpec(sliding_window=50, **HEADS),
        SlidingWindowMLASpec(sliding_window=50, bounded_replay=True, **HEADS),
        CircularBufferSpec(**HEADS),
        of_layers(FULL, RSWASpec(rswa_window=32, **HEADS)),
        of_layers(FULL, WINDOW),
    ],
    ids=compat.spec_names,
)
def test_what_is_not_understood_has_no_kind(spec: Any) -> None:
    assert compat.group_kind(spec) is None


def test_chunked_local_layers_that_vllm_keeps_in_full_are_attention() -> None:
    """Its default: without VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE it switches the hybrid allocator off."""
    specs: dict[str, Any] = {"local": LOCAL, "full": FULL}
    unify_hybrid_kv_cache_specs(specs)
    assert specs["local"].attention_chunk_size == 64
    assert compat.group_kind(specs["local"]) is Kind.ATTENTION
    assert not compat.is_chunked_local(specs["local"])


def test_sliding_layers_that_an_operator_keeps_in_full_are_attention() -> None:
    specs: dict[str, Any] = {"sliding": WINDOW, "full": FULL}
    unify_hybrid_kv_cache_specs(specs)
    assert compat.group_kind(specs["sliding"]) is Kind.ATTENTION
    assert specs["sliding"].sliding_window == 50, "for the kernels alone"
    assert compat.group_window_tokens(specs["sliding"]) == 0


@pytest.mark.requirement("P12")
@pytest.mark.parametrize(
    ("spec", "one_shard"),
    [
        (LATENT, True),
        (of_layers(LATENT, MLAAttentionSpec(max_tp_shards=1, **HEADS | {"head_size": 16})), True),
        (of_layers(FULL, LATENT), False),
        (of_layers(LATENT, FULL), False),
        (MLAAttentionSpec(**HEADS), False),
        (FULL, False),
        (FullAttentionSpec(max_tp_shards=1, **HEADS), True),
        (FullAttentionSpec(max_tp_shards=2, **HEADS), False),
        (WINDOW, False),
        (state(), False),
    ],
    ids=str,
)
def test_a_group_is_the_same_on_every_rank_where_vllm_says_so_of_each_layer(spec: Any, one_shard: bool) -> None:
    """Of one KV head for two ranks it does not say it (0.32); of a latent it does."""
    assert compat.in_one_shard(spec) is one_shard


@pytest.mark.requirement("P12")
def test_a_latent_group_has_one_part_however_many_ranks() -> None:
    config = KVCacheConfig(8, [], [KVCacheGroupSpec(["m0", "m1"], LATENT), KVCacheGroupSpec(["w"], WINDOW)])
    layers = [LayerFacts(name, group, "float32", (1, 16, 8), (1, 2), 512, "") for name, group in
              (("m0", 0), ("m1", 0), ("w", 1))]  # fmt: skip
    facts = [RankFacts(rank, "boot", tuple(layers), (), one_shard_groups=(0,)) for rank in range(4)]
    parallel = SimpleNamespace(tensor_parallel_size=4, pipeline_parallel_size=1)
    planner = Planner(identity.group_specs(config, (0, 1), facts, parallel), 64)
    assert planner.object_bytes(Kind.ATTENTION) == 4 * 2 * 512  # blocks, layers
    assert planner.object_bytes(Kind.WINDOW) == 4 * 4 * 512  # blocks, ranks
    assert {planner.part_range(Kind.ATTENTION, 0, rank) for rank in range(4)} == {(0, 4096)}
    assert [planner.part_range(Kind.WINDOW, 1, rank)[0] for rank in range(4)] == [0, 2048, 4096, 6144]


@pytest.mark.requirement("D2")
@pytest.mark.parametrize("block", [16, 48])
@pytest.mark.parametrize("window", [2, 15, 16, 17, 18, 33, 49, 50, 96, 97, 98, 500])
def test_a_load_fills_exactly_what_vllm_allocates_inside_the_window(window: int, block: int) -> None:
    """For every boundary, and for every local hit that vLLM's own cache could have before it."""
    chunk = 96
    planner = Planner((GroupSpec(Kind.WINDOW, block, window, (10,)),), chunk)
    spec = SlidingWindowSpec(sliding_window=window, **HEADS | {"block_size": block})
    for boundary in range(chunk, 8 * chunk, chunk):
        for local in range(0, boundary, block):
            manager = SlidingWindowManager(
                spec,
                block_pool=BlockPool(64, enable_caching=True, hash_block_size=block),
                enable_caching=True,
                kv_cache_group_id=0,
                scheduler_block_size=block,
            )
            own = manager.block_pool.get_new_blocks(local // block)
            reach = SlidingWindowManager._contiguous_blocks_for_hit(window, block, use_eagle=False)
            hit = [manager.block_pool.null_block] * max(len(own) - reach, 0) + own[max(len(own) - reach, 0) :]
            manager.add_local_computed_blocks("r", hit, local, boundary - local)
            manager.allocate_external_computed_blocks("r", local, boundary - local)
            table = manager.req_to_blocks["r"]
            missing = {index for index, found in enumerate(table) if not found.is_null and found not in own}
            planned = {
                index
                for found in planner.load_plan(local, boundary).objects
                for span in found.spans
                for index in range(span.table_block, span.table_block + span.blocks)
            }
            assert planned == missing, (boundary, local)


def test_compressed_latents_are_measured_not_computed() -> None:
    """A block's bytes come from the tensors: several tokens to a state change nothing of the plan."""
    spec = MLAAttentionSpec(tokens_per_state=4, **HEADS)
    assert compat.group_kind(spec) is Kind.ATTENTION
    assert compat.group_kind(MLAAttentionSpec(tokens_per_state=Fraction(1, 2), **HEADS)) is Kind.ATTENTION
