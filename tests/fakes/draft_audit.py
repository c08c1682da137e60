"""Where the KV of draft layers may be stale, and where it must not be.

With MTP or EAGLE, the KV at the end of a block depends on the token after it, which no hash of a block covers. vLLM
matches a block more, and drops it. But it may have two blocks of the same tokens, computed before different ones, and
take either. That costs accepted drafts, also without a connector, and the connector may copy and store such blocks of
an engine's own cache. What a request has computed itself is never stale, and so never loaded so either.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from kvdepot.core.keys import chunk_key

from tests.fakes.direct_session import DirectDepot
from tests.fakes.drafting_memory import BLOCK, DraftingMemory, after, chain_of, chunk_end


def key_of(request: Any, boundary: int, lookahead_tokens: int) -> bytes | None:
    """The key of the chunk that ends at a boundary of a request, or None while its tokens are not known."""
    ahead = request.all_token_ids[boundary : boundary + lookahead_tokens]
    last = boundary // BLOCK - 1
    if len(request.block_hashes) <= last or len(ahead) < lookahead_tokens:
        return None
    return chunk_key(request.block_hashes[last], b"".join(token.to_bytes(4, "little") for token in ahead))


class _Ledger:
    """Of all engines on one depot."""

    def __init__(self) -> None:
        self.prefixes: dict[bytes, bytes] = {}  # content of a slot -> digest of the tokens up to it
        self.stale: set[bytes] = set()  # keys of chunks that were stored from an engine's own hit, and are stale


_LEDGERS: WeakKeyDictionary[DirectDepot, _Ledger] = WeakKeyDictionary()


class DraftAudit:
    """Follows what the connector of one engine loads and stores of a draft layer."""

    def __init__(self, depot: DirectDepot, layer: str, lookahead_tokens: int) -> None:
        self._layer = layer
        self._lookahead_tokens = lookahead_tokens
        self._ledger = _LEDGERS.setdefault(depot, _Ledger())
        self._loaded: defaultdict[str, dict[int, bytes]] = defaultdict(dict)  # request -> block -> key of its chunk
        self._begins: dict[str, int] = {}  # request -> tokens that it had when it was admitted
        self._requests: Mapping[str, Any] = {}

    def follow(self, worker: Any, memory: DraftingMemory, requests: Mapping[str, Any]) -> None:
        """See each load and each store of a rank before it begins."""
        self._requests = requests
        groups = [group for group, _ in enumerate(memory.layout.kv_cache_groups) if self._drafts(memory, group)]
        bind = worker.bind_connector_metadata

        def bound(meta: Any) -> None:
            for op in meta.loads:
                for copied in op.objects:
                    blocks = (block_id for span in copied.spans for block_id in span.block_ids)
                    self._loaded[op.request_id].update(dict.fromkeys(blocks, copied.key))
            for op in meta.stores:
                for copied in op.objects:
                    for span in copied.spans:
                        if span.group in groups:
                            self._check_stored(memory, copied, span.block_ids)
            bind(meta)

        worker.bind_connector_metadata = bound

    def _drafts(self, memory: DraftingMemory, group: int) -> bool:
        return bool(self._lookahead_tokens) and self._layer in memory.layout.kv_cache_groups[group].layer_names

    def admitted(self, request_id: str, tokens: int) -> None:
        """A request begins with so many tokens, which it has not computed."""
        self._begins[request_id] = max(self._begins.get(request_id, 0), tokens)

    def left(self, request_id: str) -> None:
        """A request has no blocks any more."""
        self._loaded.pop(request_id, None)

    def computed(self, memory: DraftingMemory, table: Sequence[int], position: int, digest: bytes) -> None:
        """A drafter has computed a slot, of the tokens that this is a digest of and the next one."""
        self._ledger.prefixes[memory.slot_bytes(self._layer, table, position)] = digest

    def is_own(
        self, memory: DraftingMemory, request_id: str, table: Sequence[int], position: int, digest: bytes
    ) -> bool:
        """Whether a stale slot may be where a request has it: in a block of its engine's own cache, or stored so."""
        key = self._loaded[request_id].get(table[position // BLOCK])
        of_prefix = self._ledger.prefixes.get(memory.slot_bytes(self._layer, table, position)) == digest
        return of_prefix and position < self._begins[request_id] and (key is None or key in self._ledger.stale)

    def _check_stored(self, memory: DraftingMemory, copied: Any, block_ids: Sequence[int]) -> None:
        """Check the last slot of each block of a chunk: the others depend on no later token than a hash covers."""
        boundary = copied.boundary_tokens
        first = boundary // BLOCK - len(block_ids)
        names = [
            name
            for name, request in self._requests.items()
            if key_of(request, boundary, self._lookahead_tokens) == copied.key
        ]
        assert names, f"a chunk of nobody is stored at {boundary}"
        tokens = self._requests[names[0]].all_token_ids
        chain = chain_of(tokens[:boundary])
        table = [*[0] * first, *block_ids]
        for index in range(first, len(table)):
            position = (index + 1) * BLOCK - 1
            right = (after(chain[position], tokens[position + 1]), chunk_end(chain[position]))
            if any(memory.slot_holds(self._layer, table, position, one) for one in right):
                continue
            assert any(self.is_own(memory, name, table, position, chain[position]) for name in names), (
                f"{names}: stale draft KV of token {position} is stored"
            )
            self._ledger.stale.add(copied.key)
