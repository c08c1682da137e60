"""KV events for routers: the blocks that this engine can load from the daemon (`BlockStored`, `BlockRemoved`).

vLLM publishes them next to those of its own cache, by the same hashes. Full attention is announced when the daemon has
committed it for this engine, found it in a lookup, or loaded it. The daemon does not call engines. So a removal is
announced when a lookup or a store finds the chunk missing, when the weights change, or when too many chunks are
announced. A router that trusts an announcement too long loses one lookup.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from kvdepot.client.vllm.base import compat
from kvdepot.core.calls import Kind
from kvdepot.core.misses import MissReason

if TYPE_CHECKING:
    from kvdepot.client.vllm.base.engine_types import EngineRequest
    from kvdepot.client.vllm.scheduling.requests import RequestState
    from kvdepot.core.planner import Planner

CHUNKS_MAX: Final = 16_384
"""Announced chunks that are remembered: 4 million tokens at the default chunk, some 20 MiB."""
_GONE: Final = frozenset(
    {
        MissReason.UNKNOWN, MissReason.PROBE_ABSENT, MissReason.EVICTED, MissReason.LOST, MissReason.CORRUPT,
        MissReason.DRIFT, MissReason.PRUNED, MissReason.ABANDONED, MissReason.DELETED, MissReason.STORES_OFF,
        MissReason.NO_GRANT, MissReason.OTHER_NAMESPACE, MissReason.EPOCH_BUMPED,
    }
)  # fmt: skip
"""Reasons that mean that the daemon does not have the chunk.

Not among them: the chunk cannot be loaded now, or not as a whole, which may pass without notice; or no answer in time.
"""


class KvEvents:
    """The events of one engine. Used on the scheduler's thread only. If they are off, nothing is remembered."""

    def __init__(
        self, planner: Planner, group_ids: Sequence[int], hash_block_tokens: int, kinds: Sequence[str] | None
    ) -> None:
        """Take `group_ids`, planner group -> engine group, and `kinds`, vLLM's word for each group (None: off)."""
        self._kinds = kinds or ()
        self._chunk_tokens = planner.chunk_tokens
        self._hash_block_tokens = hash_block_tokens
        # Hashes coarser than a block do not name it.
        self._groups = [
            (group_ids[group], planner.groups[group].block_tokens)
            for group in planner.groups_of(Kind.ATTENTION)
            if kinds is not None and planner.groups[group].block_tokens % hash_block_tokens == 0
        ]
        self._announced: OrderedDict[bytes, dict[int, list[Any]]] = OrderedDict()  # hashes by engine group
        # Chunks with the same blocks, and other tokens or another adapter's content in their keys.
        self._sharing: Counter[Any] = Counter()  # by the hash of their last block
        self._events: list[Any] = []

    @property
    def on(self) -> bool:
        return bool(self._groups)

    def stored(self, state: RequestState, chunk: int) -> None:
        """Announce that the daemon has the attention of this chunk of the request."""
        key = state.keys[chunk]
        if not self.on:
            return
        if key in self._announced:
            self._announced.move_to_end(key)
            return
        events = {
            group: self._stored_event(state.request, chunk, group, block_tokens) for group, block_tokens in self._groups
        }
        hashes = {group: event.block_hashes for group, event in events.items()}
        if not self._sharing[self._last(hashes)]:
            self._events += events.values()
        self._sharing[self._last(hashes)] += 1
        self._announced[key] = hashes
        if len(self._announced) > CHUNKS_MAX:
            self._remove([next(iter(self._announced))])

    def located(self, state: RequestState, chunks: int, miss: MissReason | None) -> None:
        """Note a lookup: the daemon has attention of so many chunks, and lacks the next one for this reason."""
        if self._announced and miss in _GONE:
            self._remove([key for key in state.keys[chunks:] if key in self._announced])

    def missing(self, key: bytes) -> None:
        """Note that the daemon lacked a chunk: it has just granted room for it."""
        if key in self._announced:
            self._remove([key])

    def reset(self) -> None:
        """Announce the removal of everything: this engine will get none of it again."""
        self._remove(list(self._announced))

    def take(self) -> list[Any]:
        events, self._events = self._events, []
        return events

    def _remove(self, keys: Sequence[bytes]) -> None:
        gone = []
        for key in keys:
            hashes_by_group = self._announced.pop(key)
            last = self._last(hashes_by_group)
            self._sharing[last] -= 1
            if not self._sharing[last]:
                del self._sharing[last]
                gone.append(hashes_by_group)
        for group, _ in self._groups:
            hashes = [block_hash for of_groups in gone for block_hash in of_groups[group]]
            if hashes:
                self._events.append(compat.block_removed(hashes, group))

    @staticmethod
    def _last(hashes: dict[int, list[Any]]) -> Any:
        """Return the hash of a chunk's last block: it names the chunk's blocks of all groups."""
        return next(iter(hashes.values()))[-1]

    def _stored_event(self, request: EngineRequest, chunk: int, group: int, block_tokens: int) -> Any:
        start, stop = chunk * self._chunk_tokens, (chunk + 1) * self._chunk_tokens
        ends = range(start + block_tokens, stop + 1, block_tokens)
        # The chain's hash at a block's end names its whole prefix.
        hashes = [request.block_hashes[end // self._hash_block_tokens - 1] for end in ends]
        parent = request.block_hashes[start // self._hash_block_tokens - 1] if start else None
        return compat.block_stored(request, hashes, parent, start, block_tokens, group, self._kinds[group])
