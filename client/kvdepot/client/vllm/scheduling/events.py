"""KV events for routers: the blocks that this engine can load from the daemon (`BlockStored`, `BlockRemoved`).

vLLM publishes them next to those of its own cache, by the same hashes. Full attention is announced when the daemon has
committed it for this engine, found it in a store, or loaded it. `TierChecks` asks the daemon every 0.8 s where the
announced chunks are. A lost chunk gets a removal. A moved chunk is stored in its new tier, then removed from the old
one. A lookup or a store that finds a chunk missing removes it at once. Everything is removed when the weights change,
and the chunk longest unused when too many are announced.

Routers follow a prompt through the engine's cache, then through RAM, then through the tiers below, and never back. So a
chunk in RAM is announced as below RAM where a chunk before it is. And they forget everything of an engine that resets
its own cache. So everything is announced again then.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from kvdepot.client.vllm.base import compat
from kvdepot.core.calls import Kind, Nearest
from kvdepot.core.misses import MissReason

if TYPE_CHECKING:
    from kvdepot.client.vllm.base.engine_types import BlockPool, EngineRequest
    from kvdepot.client.vllm.scheduling.requests import RequestState
    from kvdepot.core.planner import Planner

CHUNKS_MAX: Final = 16_384
"""Announced chunks that are remembered: 4 million tokens at the default chunk, some 50 MiB."""
AGAIN_PER_STEP: Final = 1024
"""Chunks announced again in one step: 13 ms."""
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


class Blocks:
    """The blocks of a chunk, or of several chunks whose keys differ by later tokens or an adapter's content."""

    __slots__ = ("chunks", "end", "number", "parent", "published", "stored")

    def __init__(self, number: int, parent: bytes, end: bytes, stored: dict[int, Any]) -> None:
        self.number = number  # of the chunk, in each prompt that has it
        self.parent = parent  # the hash at the end of the chunk before, empty if there is none
        self.end = end  # the hash at their end
        self.stored = stored  # by engine group: the event
        self.chunks: dict[bytes, Chunk] = {}  # by key
        self.published = Nearest.ABSENT  # where routers believe them


class Chunk:
    """An announced chunk since it was stored last. So an answer to a question from before that is recognized."""

    __slots__ = ("blocks", "tier")

    def __init__(self, blocks: Blocks, tier: Nearest) -> None:
        self.blocks = blocks
        self.tier = tier


class KvEvents:
    """The events of one engine. Used on the scheduler's thread only. If they are off, nothing is remembered."""

    def __init__(
        self,
        planner: Planner,
        pool: BlockPool,
        group_ids: Sequence[int],
        hash_block_tokens: int,
        kinds: Sequence[str] | None,
    ) -> None:
        """Take `group_ids`, planner group -> engine group, and `kinds`, vLLM's word for each group (None: off)."""
        self._pool = pool
        self._cached = pool.cached_block_hash_to_block
        self._kinds = kinds or ()
        self._chunk_tokens = planner.chunk_tokens
        self._hash_block_tokens = hash_block_tokens
        # Hashes coarser than a block do not name it.
        self._groups = [
            (group_ids[group], planner.groups[group].block_tokens)
            for group in planner.groups_of(Kind.ATTENTION)
            if kinds is not None and planner.groups[group].block_tokens % hash_block_tokens == 0
        ]
        self.announced: OrderedDict[bytes, Chunk] = OrderedDict()  # by key, the longest unused first
        self._blocks: dict[bytes, Blocks] = {}  # by the hash at their end
        self._following: defaultdict[bytes, set[bytes]] = defaultdict(set)  # by that hash: those of what follows
        self._again: deque[Blocks] = deque()  # to be announced again, parents first
        self._events: list[Any] = []

    @property
    def on(self) -> bool:
        return bool(self._groups)

    def stored(self, state: RequestState, chunk: int) -> None:
        """Announce that the daemon has attention of this chunk of the request. A new one counts as in RAM at first."""
        key = state.keys[chunk]
        if not self.on:
            return
        known = self.announced.pop(key, None)
        if known is not None:
            known.blocks.chunks[key] = self.announced[key] = Chunk(known.blocks, known.tier)
            return
        blocks = self._blocks_of(state.request, chunk)
        blocks.chunks[key] = self.announced[key] = Chunk(blocks, Nearest.RAM)
        self._publish([blocks])
        if len(self.announced) > CHUNKS_MAX:
            self._remove([next(iter(self.announced))])

    def located(self, state: RequestState, chunks: int, miss: MissReason | None) -> None:
        """Note a lookup: the daemon has attention of so many chunks, and lacks the next one for this reason."""
        if self.announced and miss in _GONE:
            self._remove([key for key in state.keys[chunks:] if key in self.announced])

    def missing(self, key: bytes) -> None:
        """Note that the daemon lacked a chunk: it has just granted room for it."""
        if key in self.announced:
            self._remove([key])

    def found(self, chunks: Sequence[tuple[bytes, Chunk]], tiers: bytes) -> None:
        """Note where these chunks were, a `Nearest` each. They were announced when the daemon was asked."""
        changed: dict[Blocks, None] = {}
        for (key, chunk), tier in zip(chunks, tiers, strict=True):
            if tier in (Nearest.UNKNOWN, chunk.tier) or self.announced.get(key) is not chunk:
                continue
            if tier == Nearest.ABSENT:
                self._forget(key)
            chunk.tier = Nearest(tier)
            changed[chunk.blocks] = None
        self._publish(changed)

    def reset(self) -> None:
        """Announce the removal of everything: this engine will get none of it again."""
        self._remove(list(self.announced))

    def take(self) -> list[Any]:
        """Return what is to be published now, after the events of the engine's own cache."""
        if self._pool.cached_block_hash_to_block is not self._cached:
            self._cached = self._pool.cached_block_hash_to_block
            self._forgotten()
        if self._again:
            self._publish([self._again.popleft() for _ in range(min(len(self._again), AGAIN_PER_STEP))])
        events, self._events = self._events, []
        return events

    def _forgotten(self) -> None:
        """Note that routers know nothing any more. Removals stay, for those that do not forget at a reset."""
        self._events = [event for event in self._events if compat.is_removal(event)]
        for blocks in self._blocks.values():
            blocks.published = Nearest.ABSENT
        self._again = deque(sorted(self._blocks.values(), key=_number))

    def _remove(self, keys: Sequence[bytes]) -> None:
        self._publish([self._forget(key) for key in keys])

    def _forget(self, key: bytes) -> Blocks:
        """Forget an announced chunk. The caller publishes what this changes."""
        blocks = self.announced.pop(key).blocks
        del blocks.chunks[key]
        if not blocks.chunks:
            del self._blocks[blocks.end]
            self._following[blocks.parent].discard(blocks.end)
            if not self._following[blocks.parent]:
                del self._following[blocks.parent]
        return blocks

    def _publish(self, changed: Iterable[Blocks]) -> None:
        """Publish where these blocks are now, and those that follow them.

        A new tier is published before the old one is removed, as by vLLM's own connectors.
        """
        removed: defaultdict[tuple[int, Nearest], list[Any]] = defaultdict(list)
        waiting = deque(sorted(changed, key=_number))
        while waiting:
            blocks = waiting.popleft()
            former, blocks.published = blocks.published, self._nearest(blocks)
            if blocks.published == former:
                continue
            for group, event in blocks.stored.items():
                if blocks.published:
                    self._events.append(compat.in_tier(event, blocks.published))
                if former:
                    removed[group, former] += event.block_hashes
            following = (self._blocks[end] for end in self._following.get(blocks.end, ()))
            waiting.extend(one for one in following if one.published)  # the others have their turn later
        self._events += [compat.block_removed(hashes, group, tier) for (group, tier), hashes in removed.items()]

    def _nearest(self, blocks: Blocks) -> Nearest:
        """Return where a router is to believe these blocks: no nearer than those before them."""
        nearest = min((chunk.tier for chunk in blocks.chunks.values()), default=Nearest.ABSENT)
        before = self._blocks.get(blocks.parent)
        return max(nearest, before.published) if nearest and before is not None else nearest

    def _blocks_of(self, request: EngineRequest, chunk: int) -> Blocks:
        """Return the blocks of this chunk, as they are known or made."""
        start, stop = chunk * self._chunk_tokens, (chunk + 1) * self._chunk_tokens
        parent, end = self._hash_at(request, start) if start else b"", self._hash_at(request, stop)
        if end not in self._blocks:
            events = {group: self._event(request, chunk, group, tokens) for group, tokens in self._groups}
            self._blocks[end] = Blocks(chunk, parent, end, events)
            self._following[parent].add(end)
        return self._blocks[end]

    def _event(self, request: EngineRequest, chunk: int, group: int, block_tokens: int) -> Any:
        start, stop = chunk * self._chunk_tokens, (chunk + 1) * self._chunk_tokens
        # The chain's hash at a block's end names its whole prefix.
        hashes = [self._hash_at(request, end) for end in range(start + block_tokens, stop + 1, block_tokens)]
        parent = self._hash_at(request, start) if start else None
        return compat.block_stored(request, hashes, parent, start, block_tokens, group, self._kinds[group])

    def _hash_at(self, request: EngineRequest, tokens: int) -> bytes:
        return request.block_hashes[tokens // self._hash_block_tokens - 1]


def _number(blocks: Blocks) -> int:
    return blocks.number
