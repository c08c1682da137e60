"""Holds on the engine's KV blocks while they wait to be copied (design.md#store).

A weak hold leaves the block free, and ends with its reuse. A pin is strong: the block cannot be reused. Blocks are
pinned only from the dispatch of a copy to the acknowledgement of every rank.

vLLM's block pool keeps one reuse callback per block id, and a second one replaces the first. So only this class sets
callbacks: one watcher per block, for all holds. The pool cannot take a callback back, so a call for a block without
holds is normal, and is ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Final
from weakref import WeakValueDictionary

from kvdepot.client.vllm.base.engine_types import Block, BlockPool

PINNED_PART: Final = 4
"""Copies in progress pin a quarter of a small pool at most. With more, vLLM would preempt requests for them."""


class WeakHold:
    """A set of blocks whose bytes are wanted. `alive` turns False at the first reuse, and stays so."""

    __slots__ = ("alive", "block_ids", "hashes")

    def __init__(self, block_ids: tuple[int, ...], hashes: tuple[Any, ...]) -> None:
        self.block_ids = block_ids
        self.hashes = hashes
        self.alive = True


class BlockHolds:
    """All holds on one engine's block pool. Used on the scheduler's thread only."""

    _of_pool: ClassVar[WeakValueDictionary[int, BlockHolds]] = WeakValueDictionary()  # by the id of a living pool

    @classmethod
    def of(cls, pool: BlockPool) -> BlockHolds:
        """Return the holds of this pool. Two connectors in one engine share them, because a pool has one callback."""
        return cls._of_pool.setdefault(id(pool), cls(pool))

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._watchers: dict[int, list[WeakHold]] = {}
        self._registered: set[int] = set()  # ids whose callback is with the pool
        self._pinned = 0

    @property
    def pool_blocks(self) -> int:
        """Blocks of the engine's pool, including the null block."""
        return len(self._pool.blocks)

    def pinned_max(self, wanted: int) -> int:
        """Return how many blocks copies in progress may pin if a user allows `wanted`."""
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
        """Return whether every block is a real one that is referenced now, so that its bytes are defined."""
        blocks = self._pool.blocks
        return all(
            0 < block_id < len(blocks) and not blocks[block_id].is_null and blocks[block_id].ref_cnt > 0
            for block_id in block_ids
        )

    def block_hash(self, block_id: int) -> Any:
        """Return the engine's hash of the block's contents, or None if it is not cached."""
        return self._pool.blocks[block_id].block_hash

    def named(self, block_id: int, name: Any) -> bool:
        """Return whether the engine knows the contents of a block by this name, so that its bytes are or get defined.

        A named block can be held even if it is free: the cache keeps it until its reuse, which takes the name away.
        """
        blocks = self._pool.blocks
        return name is not None and 0 < block_id < len(blocks) and blocks[block_id].block_hash == name

    def cached(self, block_hash: Any, group_id: int) -> int | None:
        """Return the block in which the engine's cache has these contents for one of its groups, or None."""
        blocks = self._pool.get_cached_block(block_hash, [group_id])
        return blocks[0].block_id if blocks and not blocks[0].is_null else None

    def hold(self, block_ids: tuple[int, ...]) -> WeakHold:
        """Watch these blocks. They must be `holdable` or `named` at this moment."""
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

    def join(self, holds: Sequence[WeakHold]) -> WeakHold:
        """Replace holds by one on all their blocks. It is readable exactly if all of them are."""
        joined = WeakHold(
            tuple(block_id for hold in holds for block_id in hold.block_ids),
            tuple(block_hash for hold in holds for block_hash in hold.hashes),
        )
        joined.alive = all(hold.alive for hold in holds)
        for block_id in joined.block_ids if joined.alive else ():
            self._watchers.setdefault(block_id, []).append(joined)
        for hold in holds:
            self.drop(hold)
        return joined

    def drop(self, hold: WeakHold) -> None:
        """End a hold. Safe to call twice."""
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
        """Return whether the bytes are still those that were held.

        If a hash is gone or changed under a hold, the engine writes into the block without handing it out again. In
        align mode it moves the hash of a state that it will overwrite to a copy. The block then has wrong bytes.
        """
        blocks = self._pool.blocks
        return hold.alive and all(
            before is None or blocks[block_id].block_hash == before
            for block_id, before in zip(hold.block_ids, hold.hashes, strict=True)
        )

    def pin(self, hold: WeakHold) -> tuple[int, ...]:
        """Turn a readable weak hold into a pin. Return the blocks, which have to be unpinned."""
        self.pin_now(hold.block_ids)
        self.drop(hold)
        return hold.block_ids

    def pin_now(self, block_ids: Sequence[int]) -> None:
        """Pin blocks whose bytes are defined now. They have to be unpinned."""
        self._pool.touch([self._pool.blocks[block_id] for block_id in block_ids])
        self._pinned += len(block_ids)

    def unpin(self, block_ids: Sequence[int]) -> None:
        """Unpin blocks that every rank has finished with."""
        self._pinned -= len(block_ids)
        # Reversed, as vLLM frees a request: the end of a chain should be evicted first.
        self._pool.free_blocks([self._pool.blocks[block_id] for block_id in reversed(block_ids)])

    def _reused(self, block: Block) -> None:
        self._registered.discard(block.block_id)
        for hold in self._watchers.pop(block.block_id, ()):
            hold.alive = False
