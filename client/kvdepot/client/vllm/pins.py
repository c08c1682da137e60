"""Holding the engine's KV blocks while they wait to be copied (DESIGN 4).

Weakly: the block counts as free, and its reuse ends the hold. Strongly: it cannot be
reused; only from the dispatch of a copy to the acknowledgement of every rank.

vLLM's block pool keeps one reuse callback per block id, and a second one replaces the
first. So this class is the only one that sets them: one watcher per block, fanned out
to everyone interested. The pool offers no way to take a callback back, so a call for a
block nobody holds any more is normal and ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Final, Protocol
from weakref import WeakValueDictionary

PINNED_PART: Final = 4
"""A quarter of a small pool at most is pinned by copies in progress, or its requests would be preempted for them."""


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

    def get_cached_block(self, block_hash: Any, kv_cache_group_ids: list[int]) -> list[Any] | None: ...
    def touch(self, blocks: Sequence[Any]) -> None: ...
    def unpin_blocks(self, blocks: Iterable[Any], on_reuse: Callable[[Any], None]) -> None: ...
    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None: ...


class WeakHold:
    """A set of blocks whose bytes are wanted. `alive` turns False, for good, at the first reuse."""

    __slots__ = ("alive", "block_ids", "hashes")

    def __init__(self, block_ids: tuple[int, ...], hashes: tuple[Any, ...]) -> None:
        self.block_ids = block_ids
        self.hashes = hashes
        self.alive = True


class BlockHolds:
    """All holds on one engine's block pool. Used on the scheduler's thread only."""

    _of_pool: ClassVar[WeakValueDictionary[int, BlockHolds]] = WeakValueDictionary()  # by the pool's id: it lives on

    @classmethod
    def of(cls, pool: BlockPool) -> BlockHolds:
        """The one of this pool: two connectors in one engine must not take each other's callbacks."""
        return cls._of_pool.setdefault(id(pool), cls(pool))

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._watchers: dict[int, list[WeakHold]] = {}
        self._registered: set[int] = set()  # ids whose callback is with the pool
        self._pinned = 0

    @property
    def pool_blocks(self) -> int:
        """Blocks of the engine's pool, the null block with them."""
        return len(self._pool.blocks)

    def pinned_max(self, wanted: int) -> int:
        """How many blocks copies in progress may pin at once where a user allows `wanted`."""
        return max(1, min(wanted, self.pool_blocks // PINNED_PART))

    @property
    def pinned_blocks(self) -> int:
        """Strong pins, counted with multiplicity."""
        return self._pinned

    @property
    def held_blocks(self) -> int:
        """Block ids with at least one weak hold."""
        return len(self._watchers)

    def holdable(self, block_ids: Iterable[int]) -> bool:
        """Whether every block is a real one that somebody references now (so that its bytes are defined)."""
        blocks = self._pool.blocks
        return all(
            0 < block_id < len(blocks) and not blocks[block_id].is_null and blocks[block_id].ref_cnt > 0
            for block_id in block_ids
        )

    def block_hash(self, block_id: int) -> Any:
        """The engine's hash of the block's contents, None if it is not (or no longer) cached."""
        return self._pool.blocks[block_id].block_hash

    def cached(self, block_hash: Any, group_id: int) -> int | None:
        """The block in which the engine's cache has these contents for one of its groups; None without one."""
        found = self._pool.get_cached_block(block_hash, [group_id])
        return found[0].block_id if found and not found[0].is_null else None

    def hold(self, block_ids: tuple[int, ...]) -> WeakHold:
        """Watch these blocks. They must be `holdable` at this moment."""
        blocks = [self._pool.blocks[block_id] for block_id in block_ids]
        hold = WeakHold(block_ids, tuple(block.block_hash for block in blocks))
        fresh = [block for block in blocks if block.block_id not in self._registered]
        if fresh:
            self._pool.touch(fresh)
            self._pool.unpin_blocks(fresh, self._reused)
            self._registered.update(block.block_id for block in fresh)
        for block_id in block_ids:
            self._watchers.setdefault(block_id, []).append(hold)
        return hold

    def drop(self, hold: WeakHold) -> None:
        """Nobody wants these bytes any more. Safe to call twice."""
        hold.alive = False
        for block_id in hold.block_ids:
            holds = self._watchers.get(block_id)
            if holds is None:
                continue
            if hold in holds:
                holds.remove(hold)
            if not holds:
                del self._watchers[block_id]

    def readable(self, hold: WeakHold) -> bool:
        """Whether the bytes are still the ones that were held.

        A hash that went away or changed under a hold means that the engine writes into the
        block without handing it out anew (align mode moves the hash of a state it is about
        to overwrite to a copy), and what is there now would be wrong bytes.
        """
        blocks = self._pool.blocks
        return hold.alive and all(
            before is None or blocks[block_id].block_hash == before
            for block_id, before in zip(hold.block_ids, hold.hashes, strict=True)
        )

    def pin(self, hold: WeakHold) -> tuple[int, ...]:
        """Turn a readable weak hold into a strong pin; what it returns is due to `unpin`."""
        self.pin_now(hold.block_ids)
        self.drop(hold)
        return hold.block_ids

    def pin_now(self, block_ids: Sequence[int]) -> None:
        """Pin blocks whose bytes are defined now: they are due to `unpin`."""
        self._pool.touch([self._pool.blocks[block_id] for block_id in block_ids])
        self._pinned += len(block_ids)

    def unpin(self, block_ids: Sequence[int]) -> None:
        """Every rank has finished with these blocks."""
        self._pinned -= len(block_ids)
        # Reversed as vLLM frees a request: the end of a chain is to be evicted first.
        self._pool.free_blocks([self._pool.blocks[block_id] for block_id in reversed(block_ids)])

    def _reused(self, block: Block) -> None:
        self._registered.discard(block.block_id)
        for hold in self._watchers.pop(block.block_id, ()):
            hold.alive = False
