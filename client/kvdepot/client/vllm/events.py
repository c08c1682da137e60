"""KV events for routers: which blocks this engine can have from the daemon (`BlockStored`, `BlockRemoved`).

vLLM publishes them beside those of its own cache, by the same hashes. Announced is full
attention that the daemon has committed for this engine, told it that it has, or given it.
The daemon does not call engines, so that a chunk is gone is announced when a lookup says
so, when a store finds it missing, when the weights change, and when more is announced than is kept in mind: a
router that trusts an announcement too long loses one lookup.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from kvdepot.client.vllm import compat
from kvdepot.core.calls import Kind
from kvdepot.core.misses import MissReason

if TYPE_CHECKING:
    from kvdepot.client.vllm.requests import EngineRequest, RequestState
    from kvdepot.core.planner import Planner

CHUNKS_MAX: Final = 16_384
"""Announced chunks that are kept in mind: 4 million tokens at the default chunk, some 20 MiB."""
_GONE: Final = frozenset(
    {
        MissReason.UNKNOWN, MissReason.LOOKED_UP_ABSENT, MissReason.EVICTED, MissReason.LOST, MissReason.CORRUPT,
        MissReason.DRIFT, MissReason.PRUNED, MissReason.ABANDONED, MissReason.REMOVED, MissReason.STORES_OFF,
        MissReason.NO_GRANT, MissReason.OTHER_NAMESPACE, MissReason.EPOCH_BUMPED,
    }
)  # fmt: skip
"""With these the daemon says that it does not have the chunk. Not: that it may not be loaded now, or not whole, which
passes without a word (a tier comes back, an adopted object is verified); nor that nobody could say in time.
"""


class KvEvents:
    """Of one engine; used on the scheduler's thread only. Off: nothing is kept."""

    def __init__(
        self, planner: Planner, group_ids: Sequence[int], hash_block_tokens: int, kinds: Sequence[str] | None
    ) -> None:
        """`group_ids`: planner group -> engine group. `kinds`: vLLM's word for each engine group; None: off."""
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
        self._events: list[Any] = []

    @property
    def on(self) -> bool:
        return bool(self._groups)

    def stored(self, state: RequestState, chunk: int) -> None:
        """The daemon has the attention of this chunk of the request."""
        key = state.keys[chunk]
        if not self.on:
            return
        if key in self._announced:
            self._announced.move_to_end(key)
            return
        hashes = {}
        for group, block_tokens in self._groups:
            event = self._stored_event(state.request, chunk, group, block_tokens)
            hashes[group] = event.block_hashes
            self._events.append(event)
        self._announced[key] = hashes
        if len(self._announced) > CHUNKS_MAX:
            self._remove([next(iter(self._announced))])

    def located(self, state: RequestState, chunks: int, miss: MissReason | None) -> None:
        """A lookup: the daemon has attention of so many chunks, and not of the next one for this reason."""
        if self._announced and miss in _GONE:
            self._remove([key for key in state.keys[chunks:] if key in self._announced])

    def missing(self, key: bytes) -> None:
        """The daemon has just given room for it: it was not there."""
        if key in self._announced:
            self._remove([key])

    def reset(self) -> None:
        """Nothing of what was announced will be given to this engine again."""
        self._remove(list(self._announced))

    def take(self) -> list[Any]:
        events, self._events = self._events, []
        return events

    def _remove(self, keys: Sequence[bytes]) -> None:
        gone = [self._announced.pop(key) for key in keys]
        for group, _ in self._groups:
            hashes = [one for of_groups in gone for one in of_groups[group]]
            if hashes:
                self._events.append(compat.block_removed(hashes, group))

    def _stored_event(self, request: EngineRequest, chunk: int, group: int, block_tokens: int) -> Any:
        start, stop = chunk * self._chunk_tokens, (chunk + 1) * self._chunk_tokens
        ends = range(start + block_tokens, stop + 1, block_tokens)
        # The chain's hash at a block's end names its whole prefix.
        hashes = [request.block_hashes[end // self._hash_block_tokens - 1] for end in ends]
        parent = request.block_hashes[start // self._hash_block_tokens - 1] if start else None
        return compat.block_stored(request, hashes, parent, start, block_tokens, group, self._kinds[group])
