"""The blocks of the engine's own prefix cache that may be stored after an epoch has begun (docs/adr/0036).

After an operator's bump the engine keeps what it loaded before. After a change of weights it keeps everything if its
own reset fails, because requests run or blocks are held. A request that finds such blocks is computed on them, and
would bring them back into the depot under the new epoch. So from the first epoch on, a block counts only if a request
that began later has computed or loaded it, on nothing but such blocks. The same holds for a LoRA adapter, from its
replacement on.

Blocks that another connector has loaded, and what is computed on them, are *foreign*: they never count, until a sound
request computes into them. Nor do blocks that nobody has computed, although the engine's cache has them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from kvdepot.core.calls import Kind

if TYPE_CHECKING:
    from kvdepot.client.vllm.identity.adapters import Adapter
    from kvdepot.client.vllm.scheduling.pins import BlockHolds
    from kvdepot.core.planner import Planner


class Provenance:
    """The sound blocks of one engine. Used on the scheduler's thread only.

    Free before the first epoch, replacement or foreign block.

    `group_ids`: planner group -> engine group.
    """

    def __init__(self, holds: BlockHolds, planner: Planner, group_ids: Sequence[int], hash_block_tokens: int) -> None:
        self._holds = holds
        self._groups = [(group_ids[at], group.block_tokens) for at, group in enumerate(planner.groups)]
        self._hash_block_tokens = hash_block_tokens
        self._in_a_row = Kind.ATTENTION in planner.kinds  # of which vLLM names every block
        self.longest_tokens = max(block_tokens for _, block_tokens in self._groups)
        # By block id: with which adapter it was computed, and the engine's hash of it.
        self._known: dict[int, tuple[Adapter | None, Any]] = {}
        self._epochs = False
        self._replaced: set[Adapter] = set()
        self._foreign: set[int] = set()  # block ids

    @property
    def any_foreign(self) -> bool:
        """Whether the engine has blocks of another connector."""
        return bool(self._foreign)

    def foreign(self, tables: Sequence[Sequence[int]], begin_tokens: int, end_tokens: int) -> None:
        """Note blocks that another connector has loaded, or that are computed on such blocks."""
        self._foreign.update(self._blocks(tables, begin_tokens, end_tokens))
        self._foreign.discard(0)

    def named_beyond(self, hashes: Sequence[bytes], tokens: int) -> bool:
        """Note that the cached blocks of a request beyond its first tokens are foreign. Return whether there are any.

        Such blocks are of one step. With attention they lie in a row, so the search ends with a gap of more than the
        longest block: a long prompt has thousands of hashes. Of windows alone vLLM names only those before a prompt's
        end (`prefix_cache_retention_interval`), and all hashes are looked up.
        """
        step, found, end = self._hash_block_tokens, False, tokens
        for at in range(tokens // step, len(hashes)):
            cached = [self._holds.cached(hashes[at], group) for group, _ in self._groups]
            named = {block_id for block_id in cached if block_id is not None}
            if named:
                self._foreign |= named
                found, end = True, (at + 1) * step
            elif self._in_a_row and (at + 1) * step - end >= self.longest_tokens + step:
                break
        return found

    def hits_foreign(self, tables: Sequence[Sequence[int]], hashes: Sequence[bytes], tokens: int) -> bool:
        """Return whether one of the blocks with a request's first tokens is foreign. `tokens` are whole blocks.

        A state may lie in another block than the request's: it is looked up too.
        """
        return self.any_foreign_of((*self._blocks(tables, 0, tokens), *self._cached(hashes, tokens)))

    def any_foreign_of(self, block_ids: Iterable[int]) -> bool:
        """Return whether one of these blocks is foreign."""
        return not self._foreign.isdisjoint(block_ids)

    def begin(self) -> None:
        """Begin an epoch: no block that is cached now counts."""
        self._epochs = True
        self._known.clear()

    def replaced(self, adapter: Adapter) -> None:
        """Let no block count that is cached now for requests with this adapter."""
        self._replaced.add(adapter)
        self._known = {block_id: known for block_id, known in self._known.items() if known[0] != adapter}

    def watches(self, adapter: Adapter | None) -> bool:
        """Return whether blocks of requests with this adapter (None: no adapter) have to be noted."""
        return bool(self._foreign) or self._strict(adapter)

    def _strict(self, adapter: Adapter | None) -> bool:
        """Return whether blocks of requests with this adapter have to be known to count."""
        return self._epochs or adapter in self._replaced

    def counts(self, block_id: int, adapter: Adapter | None) -> bool:
        """Return whether a block of a request with this adapter is of this epoch and of its present content."""
        if block_id in self._foreign:
            return False
        return not self._strict(adapter) or self._known.get(block_id) == (adapter, self._holds.block_hash(block_id))

    def counts_up_to(self, hashes: Sequence[bytes], local_tokens: int, adapter: Adapter | None) -> bool:
        """Return whether all blocks are of this epoch that the engine's cache has of a request's first tokens.

        Foreign blocks are looked for later, in the request's block table: they may come in the same step.

        `hashes` are the request's. `local_tokens` are whole blocks, as vLLM tells connectors. vLLM may resume within a
        block, so the tail of a block has to count too.
        """
        if not self._strict(adapter):
            return True
        tail = self.tail_tokens(hashes, local_tokens)
        return all(self.counts(block_id, adapter) for block_id in self._cached(hashes, local_tokens + tail))

    def tail_tokens(self, hashes: Sequence[bytes], local_tokens: int) -> int:
        """Return how far beyond whole blocks the engine may resume: to the last hash that all groups have."""
        step = self._hash_block_tokens
        last = min(local_tokens + self.longest_tokens - 1, len(hashes) * step) // step * step
        for end in range(last, local_tokens, -step):
            if all(self._holds.cached(hashes[end // step - 1], group) is not None for group, _ in self._groups):
                return end - local_tokens
        return 0

    def _cached(self, hashes: Sequence[bytes], tokens: int) -> Iterable[int]:
        """Yield the cached blocks. Uncached ones of a window or a state were not used. Block 0 never counts."""
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
        """Note the blocks that a request has computed.

        A last block that is not whole counts too: the engine may have named it by the tokens that are in it.

        Args:
            tables: the request's block table per engine group.
            begin_tokens: the first computed token.
            end_tokens: the token after the last computed one.
            states: blocks of recurrent states that the request handed out.
            adapter: the request's adapter.
            sound: whether it began in this epoch, with its adapter's present content, and its local hit counts.
        """
        for block_id in (*self._blocks(tables, begin_tokens, end_tokens), *states):
            block_hash = self._holds.block_hash(block_id)
            if sound:
                self._foreign.discard(block_id)
            if sound and block_hash is not None:
                self._known[block_id] = adapter, block_hash
            else:
                self._known.pop(block_id, None)

    def _blocks(self, tables: Sequence[Sequence[int]], begin_tokens: int, end_tokens: int) -> list[int]:
        """Return the blocks of a table with these tokens, also those that are not whole."""
        return [
            block_id
            for engine_group, block_tokens in self._groups
            for block_id in tables[engine_group][begin_tokens // block_tokens : -(-end_tokens // block_tokens)]
        ]
