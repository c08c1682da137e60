"""How vLLM's KV caches are made of layers and blocks. Known without vLLM, so that copies can be tried without it.

The scheduler side reads it too, so there is no torch here.
"""

from __future__ import annotations

from typing import Any


def layer_spec(spec: Any, layer_name: str) -> Any:
    """Return the spec of one layer of a group. A group may wrap one spec per layer."""
    per_layer = getattr(spec, "kv_cache_specs", None)
    return per_layer[layer_name] if per_layer is not None else spec


def engine_blocks(cache: Any, num_blocks: int) -> Any:
    """View a layer's tensor [num_blocks * n, ...] of n kernel blocks to an engine block as [num_blocks, n, ...]."""
    return cache if cache.shape[0] == num_blocks else cache.unflatten(0, (num_blocks, -1))
