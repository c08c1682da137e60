"""Which blocks of the engine's own prefix cache may be stored after an operator's bump of the epoch (docs/adr/0036).

The engine keeps what it loaded before. A request that finds it there is computed on it, and would bring it back into
the depot under the new epoch. So from the first bump on a block counts only if a request that began since has
computed or loaded it, on nothing but such blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvdepot.client.vllm.pins import BlockHolds
    from kvdepot.core.planner import Planner


class Provenance:
    """Used on the scheduler's thread only. Costs nothing before the first bump.

    `group_ids`: planner group -> engine group.
    """

    def __init__(self, holds: BlockHolds, planner: Planner, group_ids: Sequence[int], hash_block_tokens: int) -> None:
        self._holds = holds
        self._groups = [(group_ids[at], group.block_tokens) for at, group in enumerate(planner.groups)]
        self._hash_block_tokens = hash_block_tokens
        self._known: dict[int, Any] = {}  # block id -> the engine's hash of what was computed into it
        self.on = False

    def begin(self) -> None:
        """An epoch: nothing that is cached now counts."""
        self.on = True
        self._known.clear()

    def counts(self, block_id: int) -> bool:
        """Whether what the block holds was computed or loaded in this epoch."""
        return not self.on or self._known.get(block_id, self) == self._holds.block_hash(block_id)

    def counts_up_to(self, hashes: Sequence[bytes], local_tokens: int) -> bool:
        """Likewise of all that the engine's cache has of a request's first tokens; `hashes` are the request's."""
        return not self.on or all(map(self.counts, self._cached(hashes, local_tokens)))

    def _cached(self, hashes: Sequence[bytes], local_tokens: int) -> Iterable[int]:
        """What of a window or a state is not cached was not used either. An unnamed block is one that never counts."""
        for engine_group, block_tokens in self._groups:
            if block_tokens % self._hash_block_tokens and local_tokens:
                yield 0
            for end in range(block_tokens, local_tokens + 1, block_tokens):
                block_id = self._holds.cached(hashes[end // self._hash_block_tokens - 1], engine_group)
                if block_id is not None:
                    yield block_id

    def computed(
        self, tables: Sequence[Sequence[int]], begin_tokens: int, end_tokens: int, states: Iterable[int], *, sound: bool
    ) -> None:
        """A request has computed these of its tokens, and handed out these blocks of states.

        `sound`: it began in this epoch, and its own local hit counts.
        """
        blocks = [
            block_id
            for engine_group, block_tokens in self._groups
            for block_id in tables[engine_group][begin_tokens // block_tokens : end_tokens // block_tokens]
        ]
        for block_id in (*blocks, *states):
            block_hash = self._holds.block_hash(block_id)
            if sound and block_hash is not None:
                self._known[block_id] = block_hash
            else:
                self._known.pop(block_id, None)
