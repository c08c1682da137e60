"""What is used of vLLM's own types. `compat` compares each with the installed vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol


class EngineRequest(Protocol):
    """What is used of vLLM's Request (v1/request.py). Read only."""

    request_id: str
    num_computed_tokens: int
    num_in_flight_tokens: int
    num_prompt_tokens: int
    num_preemptions: int
    block_hashes: Sequence[bytes]
    all_token_ids: Sequence[int]
    skip_reading_prefix_cache: bool
    lora_request: Any
    prompt_embeds: Any
    prompt_is_token_ids: Any
    mm_features: Any
    resumable: bool
    kv_transfer_params: Any

    @property
    def num_tokens(self) -> int: ...


class Block(Protocol):
    """What is used of vLLM's KVCacheBlock."""

    block_id: int
    ref_cnt: int
    is_null: bool

    @property
    def block_hash(self) -> Any: ...


class BlockPool(Protocol):
    """What is used of vLLM's BlockPool (v1/core/block_pool.py)."""

    blocks: Sequence[Any]
    cached_block_hash_to_block: Any  # another one after each reset

    def get_cached_block(self, block_hash: Any, kv_cache_group_ids: list[int]) -> list[Any] | None: ...
    def touch(self, blocks: Sequence[Any]) -> None: ...
    def unpin_blocks(self, blocks: Iterable[Any], on_reuse: Callable[[Any], None]) -> None: ...
    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None: ...
