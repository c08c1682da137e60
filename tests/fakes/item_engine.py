"""The scripted engine with a model that takes pictures, and whose KV depends on the steps that compute it.

- `BOTH_WAYS`: tokens of a picture attend to later ones of it (Gemma 3). Tokens that a step computes see no further than
  its end. vLLM ends no step within a picture, unless the request resumed there.
- `PRUNED`: positions after a video are known to requests that ran the encoder for it (efficient video sampling).

It has attention alone. `wrong` counts blocks that are computed, or read, with other KV than a cold prompt's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

from tests.fakes.rank_memory import RankMemory
from tests.fakes.scripted_engine import BLOCK, ScriptedEngine

BOTH_WAYS, PRUNED = "both ways", "pruned"
EMBEDS_MAX = 1024


def picture(offset: int, length: int, name: str = "a") -> MultiModalFeatureSpec:
    """A picture in its place, by the digest of its content."""
    return MultiModalFeatureSpec(None, "image", name * 64, PlaceholderRange(offset, length))


class ItemEngine(ScriptedEngine):
    """Its requests may have `mm_features`."""

    def __init__(self, *arguments: Any, model: str, **options: Any) -> None:
        self._model = model
        self.wrong = 0
        self._seen: dict[str, dict[int, Any]] = {}  # request -> token -> what its KV depends on besides the prefix
        super().__init__(*arguments, **options)
        self.scheduler.max_num_encoder_input_tokens = EMBEDS_MAX
        self.scheduler.encoder_cache_manager = EncoderCacheManager(EMBEDS_MAX)
        self.scheduler.scheduler_config.disable_chunked_mm_input = True  # as platforms/cuda.py

    def _context(self, request_id: str, token: int, begin: int | None = None, end: int | None = None) -> Any:
        """Return what a token's KV depends on: of a cold prompt, or in a step from `begin` to `end`."""
        for item in self.requests[request_id].mm_features:
            first, after = item.mm_position.offset, item.mm_position.offset + item.mm_position.length
            if self._model == BOTH_WAYS and first <= token < after:
                return item.identifier, after if end is None else min(after, end)
            if self._model == PRUNED and token >= after:
                seen = self._seen[request_id].keys()
                return item.identifier, begin is None or begin < after or not seen.isdisjoint(range(first, after))
        return None

    def _content(self, request_id: str, index: int, *, cold: bool) -> list[Any]:
        """Return what the KV of a block is made of."""
        tokens, seen = self.tokens[request_id], self._seen[request_id]
        contexts = [self._context(request_id, token) for token in range((index + 1) * BLOCK)]
        if not cold:
            contexts = [seen.get(token, context) for token, context in enumerate(contexts)]
        return [(tokens[token], context) for token, context in enumerate(contexts)]

    def _visit(self, rank: int, request_id: str, before: int, after: int) -> Callable[[RankMemory], None]:
        (table,) = (list(table) for table in self.scheduler.kv_cache_manager.get_block_ids(request_id))
        seen = self._seen.setdefault(request_id, {})
        if rank == 0:
            for token in [token for token in seen if token >= before]:  # after a preemption
                del seen[token]
            seen.update({token: self._context(request_id, token, before, after) for token in range(before, after)})

        def visit(memory: RankMemory) -> None:
            for index in range(after // BLOCK):
                right = self._content(request_id, index, cold=True)
                for name in memory.caches:
                    if index >= before // BLOCK:
                        memory.write("kv", name, table[index], self._content(request_id, index, cold=False))
                    self.wrong += not memory.holds("kv", name, table[index], right)

        return visit
