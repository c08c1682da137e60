"""KV memory of a rank of the scripted engine: what each block must hold follows from the tokens before it."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import shake_128
from typing import Any

import numpy as np
import torch
from kvdepot.client.vllm.base.cache_views import layer_spec
from vllm.v1.kv_cache_interface import KVCacheConfig, MambaSpec, MLAAttentionSpec


def pattern(
    kind: str, layer: str, rank: int, tokens: Sequence[int], size_bytes: int, adapter: bytes = b""
) -> np.ndarray[Any, Any]:
    """The bytes that a layer holds of a prefix, computed with an adapter of this content."""
    computed = shake_128(repr((kind, layer, rank, list(tokens))).encode() + adapter).digest(size_bytes)
    return np.frombuffer(computed, np.uint8)


class RankMemory:
    """The KV tensors of one rank. Layers of different groups overlay each other, as in vLLM."""

    def __init__(self, layout: KVCacheConfig, rank: int) -> None:
        self.rank = rank
        self.layout = layout
        self.weights = 0  # which ones compute what is written here
        self._alike = {
            name
            for group in layout.kv_cache_groups
            for name in group.layer_names
            if isinstance(layer_spec(group.kv_cache_spec, name), MLAAttentionSpec)
        }
        page = 2048
        places = max(2, *(len(group.layer_names) for group in layout.kv_cache_groups))
        self.raw = torch.zeros(places * layout.num_blocks * page, dtype=torch.int8)
        self.caches: dict[str, torch.Tensor] = {}
        for group in layout.kv_cache_groups:
            for place, name in enumerate(group.layer_names):
                if isinstance(group.kv_cache_spec, MambaSpec):
                    size = group.kv_cache_spec.state_content_size_bytes
                    shape = (layout.num_blocks, 1, 1, size)
                else:
                    size, shape = 1024, (layout.num_blocks, 1, group.kv_cache_spec.block_size, 64)
                self.caches[name] = torch.as_strided(
                    self.raw, shape, (page, size, shape[3], 1), place * layout.num_blocks * page
                )

    def block(self, layer: str, block_id: int) -> torch.Tensor:
        return self.caches[layer][block_id].view(-1)

    def _pattern(
        self, kind: str, layer: str, tokens: Sequence[int], size_bytes: int, adapter: bytes
    ) -> np.ndarray[Any, Any]:
        weights = f"{self.weights}:" if self.weights else ""
        return pattern(weights + kind, layer, 0 if layer in self._alike else self.rank, tokens, size_bytes, adapter)

    def write(self, kind: str, layer: str, block_id: int, tokens: Sequence[int], adapter: bytes = b"") -> None:
        block = self.block(layer, block_id)
        block.numpy()[:] = self._pattern(kind, layer, tokens, block.numel(), adapter).view(np.int8)

    def holds(self, kind: str, layer: str, block_id: int, tokens: Sequence[int], adapter: bytes = b"") -> bool:
        block = self.block(layer, block_id)
        return bool((block.numpy().view(np.uint8) == self._pattern(kind, layer, tokens, block.numel(), adapter)).all())

    def fill(self, value: int) -> torch.Tensor:
        """Every byte but the null block's; returns a copy of it all."""
        self.raw.fill_(value)
        for name in self.caches:
            self.block(name, 0).zero_()
        return self.raw.clone()

    def null_block_untouched(self) -> bool:
        return not any(self.block(name, 0).any() for name in self.caches)
