"""A rank's KV tensors as kvdepot copies them: per layer a view [blocks, ...] of whole blocks, in memory order.

In vLLM's order of dimensions a block of a GPU's usual layout is hundreds of short runs of bytes. In the order in which
it lies in memory it is one, which a device can copy as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from kvdepot.client.vllm.base.cache_views import engine_blocks, layer_spec
from kvdepot.client.vllm.base.operations import LayerFacts


class LayoutError(ValueError):
    """A layer's cache is not made of blocks that can be copied. The message says which and why."""


@dataclass(frozen=True, slots=True)
class RankLayers:
    """Views and facts, in step: layer `i` of all belongs to planner group `groups[i]`."""

    views: tuple[torch.Tensor, ...]
    facts: tuple[LayerFacts, ...]

    def of_group(self, group: int) -> list[int]:
        """Return the indices of the group's layers on this rank, in the engine's order."""
        return [index for index, facts in enumerate(self.facts) if facts.group == group]

    def same_memory(self, other: RankLayers) -> bool:
        """Return whether the same layers lie in the same places."""
        return self.facts == other.facts and list(map(_place, self.views)) == list(map(_place, other.views))


def rank_layers(kv_caches: Mapping[str, Any], kv_cache_config: Any, group_ids: Sequence[int]) -> RankLayers:
    """Return views of every layer of the stored groups. Raise LayoutError.

    A layer's tensor may be split into kernel blocks, several to an engine block. Layers of different groups may share
    one storage. So views never own memory.
    """
    views: list[torch.Tensor] = []
    facts: list[LayerFacts] = []
    for group, engine_group in enumerate(group_ids):
        spec = kv_cache_config.kv_cache_groups[engine_group].kv_cache_spec
        seen: set[Any] = set()
        for name in kv_cache_config.kv_cache_groups[engine_group].layer_names:
            if name not in kv_caches:
                continue  # a layer of another pipeline rank
            view = _block_view(name, kv_caches[name], kv_cache_config.num_blocks)
            place = _place(view)
            if place in seen:
                continue  # a layer that shares the cache of another one in its group
            seen.add(place)
            views.append(_in_memory_order(view))
            facts.append(
                LayerFacts(
                    name=name,
                    group=group,
                    dtype=str(view.dtype).removeprefix("torch."),
                    block_shape=tuple(view.shape[1:]),
                    block_order=_order(view[0]),
                    block_bytes=view[0].numel() * view.element_size(),
                    spec=repr(layer_spec(spec, name)),
                )
            )
    return RankLayers(tuple(views), tuple(facts))


def _block_view(name: str, cache: Any, num_blocks: int) -> torch.Tensor:
    if not isinstance(cache, torch.Tensor):
        raise LayoutError(f"layer {name}: its cache is a {type(cache).__name__}, not one tensor")
    if cache.dim() < 2 or cache.shape[0] % num_blocks:
        raise LayoutError(f"layer {name}: a cache of shape {tuple(cache.shape)} is not made of {num_blocks} blocks")
    view: torch.Tensor = engine_blocks(cache, num_blocks)
    return view


def _place(view: torch.Tensor) -> tuple[torch.device, int, tuple[int, ...], tuple[int, ...], torch.dtype]:
    return view.device, view.data_ptr(), tuple(view.shape), tuple(view.stride()), view.dtype


def _in_memory_order(view: torch.Tensor) -> torch.Tensor:
    """Order the dimensions of each block as `_order` tells the namespace. Those of one element come first."""
    order = _order(view[0])
    alone = [number for number in range(view.dim() - 1) if number not in order]
    return view.permute(0, *(number + 1 for number in (*alone, *order)))


def _order(block: torch.Tensor) -> tuple[int, ...]:
    """How the dimensions lie in memory. Not the strides: where blocks are not outermost, they tell how many there are.

    Dimensions of one element lie nowhere: their strides mean nothing, and they are left out.
    """
    dimensions = [number for number, size in enumerate(block.shape) if size > 1]
    return tuple(sorted(dimensions, key=lambda number: (-block.stride(number), number)))
