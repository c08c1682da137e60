"""The types of the numbers in an engine's objects, for the daemon's audit (docs/adr/0037).

They come from vLLM's specs and settings, because tensors do not show them: caches of 8 bits are uint8 or int8, and
recurrent states are raw bytes. Numbers that are packed with their scales, or not known, are opaque.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from kvdepot.client.vllm.base import compat
from kvdepot.client.vllm.base.cache_views import layer_spec
from kvdepot.core import limits
from kvdepot.core.elements import OPAQUE, Elements, runs_of

if TYPE_CHECKING:
    from kvdepot.client.vllm.base.metadata import RankFacts
    from kvdepot.client.vllm.base.operations import LayerFacts
    from kvdepot.client.vllm.identity.speculation import Speculation
    from kvdepot.core.planner import Planner

_FLOATS: Final = frozenset({"bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"})
_STORED_AS: Final[Mapping[tuple[str, str], str]] = {
    ("uint8", "fp8"): "float8_e4m3fn",
    ("uint8", "fp8_e4m3"): "float8_e4m3fn",
    ("uint8", "fp8_e5m2"): "float8_e5m2",
    ("int8", "int8"): "int8",
}
"""By the tensor's type and `cache_dtype`. All other settings of 8 bits and fewer keep scales next to the numbers."""


def element_layout(
    kv_cache_config: Any,
    cache_dtype: str,
    planner: Planner,
    group_ids: Sequence[int],
    facts: Sequence[RankFacts],
    drafting: Speculation | None = None,
) -> Elements:
    """Return the layout of all kinds, in the order of the ranks' parts. Empty if it takes too many runs.

    Empty for engines with draft layers too: vLLM may skip a drafter for a step, and leaves in these layers what no
    computation repeats. The target verifies every draft, so tokens are right all the same.
    """
    if drafting is not None and drafting.keeps_kv:
        return {}
    ranks = sorted(facts, key=lambda rank: rank.rank)
    elements = {}
    for kind in planner.kinds:
        parts: list[tuple[str, int]] = []
        for group in planner.groups_of(kind):
            spec = kv_cache_config.kv_cache_groups[group_ids[group]].kv_cache_spec
            blocks = planner.blocks_in_object(group)
            for rank in ranks[:1] if planner.groups[group].replicated else ranks:
                for layer in rank.layers:
                    if layer.group == group:
                        parts += _layer_parts(spec, layer, cache_dtype, blocks, drafting)
        elements[kind] = runs_of(parts)
    if sum(map(len, elements.values())) > limits.ELEMENT_RUNS_MAX:
        return {}
    return elements


def _layer_parts(
    spec: Any, layer: LayerFacts, cache_dtype: str, blocks: int, drafting: Speculation | None
) -> Iterator[tuple[str, int]]:
    state = compat.state_parts(layer_spec(spec, layer.name))
    if sum(size for _, size, _ in state) == layer.block_bytes:
        # A convolution keeps the inputs of draft tokens too, also of those that were rejected.
        yield from [(OPAQUE if drafting is not None and conv else dtype, size) for dtype, size, conv in state] * blocks
        return
    dtype = layer.dtype if layer.dtype in _FLOATS else _STORED_AS.get((layer.dtype, cache_dtype), OPAQUE)
    yield OPAQUE if state else dtype, layer.block_bytes * blocks
