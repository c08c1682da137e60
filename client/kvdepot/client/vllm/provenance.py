"""Which blocks of the engine's own prefix cache may be stored once an epoch has begun (docs/adr/0036).

After an operator's bump the engine keeps what it loaded before; where weights changed it keeps all that it has while
its own reset fails, because requests run or blocks are held. A request that finds it there is computed on it, and
would bring it back into the depot under the new epoch. So from the first epoch on a block counts only if a request that
began since has computed or loaded it, on nothing but such blocks. Likewise for a LoRA adapter, from its replacement on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvdepot.client.vllm.adapters import Adapter
    from kvdepot.client.vllm.pins import BlockHolds
    from kvdepot.core.planner import Planner


class Provenance:
    """Used on the scheduler's thread only. Costs nothing before an epoch begins, or an adapter is replaced, meanwhile.

    `group_ids`: planner group -> engine group.
    """

    def __init__(self, holds: BlockHolds, planner: Planner, group_ids: Sequence[int], hash_block_tokens: int) -> None:
        self._holds = holds
        self._groups = [(group_ids[at], group.block_tokens) for at, group in enumerate(planner.groups)]
        self._hash_block_tokens = hash_block_tokens
        self._longest_tokens = max(block_tokens for _, block_tokens in self._groups)
        # By block id: with which adapter it was computed, and the engine's hash of it.
        self._known: dict[int, tuple[Adapter | None, Any]] = {}
        self._epochs = False
        self._replaced: set[Adapter] = set()

    @property
    def on(self) -> bool:
        return self._epochs or bool(self._replaced)

    def begin(self) -> None:
        """An epoch: nothing that is cached now counts."""
        self._epochs = True
        self._known.clear()

    def replaced(self, adapter: Adapter) -> None:
        """Nothing counts that is cached now of requests with this adapter."""
        self._replaced.add(adapter)
        self._known = {block_id: known for block_id, known in self._known.items() if known[0] != adapter}

    def watches(self, adapter: Adapter | None) -> bool:
        """Whether blocks of requests with this adapter (None: without one) count only where that is known."""
        return self._epochs or adapter in self._replaced

    def counts(self, block_id: int, adapter: Adapter | None) -> bool:
        """Whether what the block holds of a request with this adapter is of this epoch, and of this content of it."""
        return not self.watches(adapter) or self._known.get(block_id) == (adapter, self._holds.block_hash(block_id))

    def counts_up_to(self, hashes: Sequence[bytes], local_tokens: int, adapter: Adapter | None) -> bool:
        """Likewise of all that the engine's cache has of a request's first tokens; `hashes` are the request's.

        `local_tokens` are whole blocks, as vLLM tells connectors. It goes on within a block where it can: a tail that
        may be there has to count, too.
        """
        if not self.watches(adapter):
            return True
        tail = self._tail_tokens(hashes, local_tokens)
        return all(self.counts(block_id, adapter) for block_id in self._cached(hashes, local_tokens + tail))

    def _tail_tokens(self, hashes: Sequence[bytes], local_tokens: int) -> int:
        """How far beyond whole blocks the engine may resume: to the last hash at which all groups have something."""
        step = self._hash_block_tokens
        last = min(local_tokens + self._longest_tokens - 1, len(hashes) * step) // step * step
        for end in range(last, local_tokens, -step):
            if all(self._holds.cached(hashes[end // step - 1], group) is not None for group, _ in self._groups):
                return end - local_tokens
        return 0

    def _cached(self, hashes: Sequence[bytes], tokens: int) -> Iterable[int]:
        """What of a window or a state is not cached was not used either. An unnamed block is one that never counts."""
        step = self._hash_block_tokens
        for engine_group, block_tokens in self._groups:
            if block_tokens % step and tokens:
                yield 0
            for end in {*range(block_tokens, tokens + 1, block_tokens), tokens // step * step} - {0}:
                block_id = self._holds.cached(hashes[end // step - 1], engine_group)
                if block_id is not None:
                    yield block_id

    def computed(
        self,
        tables: Sequence[Sequence[int]],
        begin_tokens: int,
        end_tokens: int,
        states: Iterable[int],
        adapter: Adapter | None,
        *,
        sound: bool,
    ) -> None:
        """A request with this adapter has computed these of its tokens, and handed out these blocks of states.

        `sound`: it began in this epoch, with its adapter as it is now, and its own local hit counts. A last block that
        is not whole counts, too: the engine may have named it by the tokens that are in it.
        """
        blocks = [
            block_id
            for engine_group, block_tokens in self._groups
            for block_id in tables[engine_group][begin_tokens // block_tokens : -(-end_tokens // block_tokens)]
        ]
        for block_id in (*blocks, *states):
            block_hash = self._holds.block_hash(block_id)
            if sound and block_hash is not None:
                self._known[block_id] = adapter, block_hash
            else:
                self._known.pop(block_id, None)
