"""A hybrid engine whose own cache lets go of blocks."""

from __future__ import annotations

from vllm.v1.core.kv_cache_utils import get_group_id
from vllm.v1.kv_cache_interface import FullAttentionSpec

from tests.fakes.scripted_engine import BLOCK, ScriptedEngine

CHUNKS = 10


def evict(engine: ScriptedEngine, attention_from: int = CHUNKS) -> None:
    """What a full pool may do to a prompt of `CHUNKS` chunks: states and windows go, then the attention of its end."""
    full = [isinstance(group.kv_cache_spec, FullAttentionSpec) for group in engine.layout.kv_cache_groups]
    cached = [block for block in engine.pool.blocks if block.block_hash is not None]
    gone = [block for block in cached if not full[get_group_id(block.block_hash)]]
    attention = (block for block in cached if full[get_group_id(block.block_hash)])
    gone += [block for block in attention if block.block_hash_num_tokens > attention_from * BLOCK]
    engine.pool.evict_blocks({block.block_id for block in gone})
