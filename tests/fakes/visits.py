"""What one step reads and writes of one request in the memory of a rank of the scripted engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.kv_cache_interface import MambaSpec

from tests.fakes.rank_memory import RankMemory

BLOCK = 16
Prefix = Callable[[int], Sequence[Any]]
"""What tells a request's first tokens, so many of them, from any others."""


@dataclass(frozen=True)
class Visit:
    """A step computes tokens `before` to `after` on what its request's blocks hold of the tokens before."""

    request_id: str
    tables: Sequence[Sequence[int]]  # of blocks, one a group
    prefix: Prefix
    before: int
    after: int

    def misread(self, memory: RankMemory, readable: Sequence[bytes]) -> str:
        """Say which block has other bytes than its tokens with one of these adapters' contents. Empty if none has."""
        before = self.before

        def holds(kind: str, name: str, block_id: int, tokens: int) -> bool:
            return any(memory.holds(kind, name, block_id, self.prefix(tokens), content) for content in readable)

        for name, spec, table in self._layers(memory):
            if isinstance(spec, MambaSpec):
                if before and not holds("state", name, table[(before - 1) // spec.block_size], before):
                    return f"{self.request_id}: rank {memory.rank} resumes at {before} without the state of {name}"
                continue
            window = getattr(spec, "sliding_window", None) or before + 1
            for index in range(max(before - window + 1, 0) // BLOCK, before // BLOCK):
                if not holds("kv", name, table[index], (index + 1) * BLOCK):
                    return f"{self.request_id}: rank {memory.rank} reads wrong bytes in block {index} of {name}"
        return ""

    def write(self, memory: RankMemory, adapter: bytes) -> None:
        """Compute its tokens with an adapter of this content."""
        for name, spec, table in self._layers(memory):
            if isinstance(spec, MambaSpec):
                block_id = table[(self.after - 1) // spec.block_size]
                memory.write("state", name, block_id, self.prefix(self.after), adapter)
                continue
            for index in range(self.before // BLOCK, self.after // BLOCK):
                memory.write("kv", name, table[index], self.prefix((index + 1) * BLOCK), adapter)

    def _layers(self, memory: RankMemory) -> Iterator[tuple[str, Any, Sequence[int]]]:
        for group, table in zip(memory.layout.kv_cache_groups, self.tables, strict=True):
            for name in group.layer_names:
                yield name, group.kv_cache_spec, table
