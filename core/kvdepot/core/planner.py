"""Which objects and blocks a boundary needs (design.md#planner). Pure: counts and sets in, plans out.

Client and daemon use the same code, so that what one stores is what the other offers.

Geometry, for chunk `c`, which covers the tokens from `c * chunk` to `(c + 1) * chunk`:

* `attention` object: every block of every attention group in the chunk. Needed for each chunk
  up to the boundary.
* `window` object: of each window group the last `min(chunk, window - 1 rounded up to blocks)`
  tokens of the chunk. A token attends to the `window - 1` tokens before it, so a group needs
  that many before the boundary, which may reach over several chunks.
* `state` object: one block of each state group, the one that ends at the chunk's end. Exactly
  one is needed, at the boundary.

Within an object: group by group in the order of the engine's groups, within a group rank by
rank (once when replicated), within a rank's part layer by layer, then block by block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from kvdepot.core import limits
from kvdepot.core.calls import Kind
from kvdepot.core.errors import PlannerError
from kvdepot.core.groups import GroupSpec, check_chunk, check_groups, default_chunk, scheduler_block, tail_tokens
from kvdepot.core.limits import check_limit

__all__ = ["GroupSpec", "Planner", "PlannerError", "BlockSpan", "PlannedObject", "LoadPlan", "StorePlan"]

Presence = Mapping[Kind, bytes | bytearray]
"""Per kind one byte a chunk, from chunk 0 on: 1 when the object is there, 0 when not.

A missing kind or a chunk beyond the end is absent. Bytes, because their searches run in C.
"""
LocalTokens = int | Mapping[Kind, int]
"""What the engine has in its own cache, in tokens: one count, or one a kind (missing: 0)."""
Stored = AbstractSet[tuple[int, Kind]]
Offers = Mapping[int, Mapping[int, int]]
"""Boundary offers: boundary in tokens -> group index -> the engine's block id."""


class BlockSpan(NamedTuple):
    """`blocks` consecutive blocks of one group, in an object and in the request's block table."""

    group: int  # index into the planner's groups
    object_block: int  # first block within the group's part of the object
    table_block: int  # first index into the request's block table of that group
    blocks: int


class PlannedObject(NamedTuple):
    """One object to load or to store.

    `block_ids` is set for stored states only, one a span: the block the engine offered, which
    is to be used instead of the block table (align mode relocates states).
    """

    chunk: int
    kind: Kind
    spans: tuple[BlockSpan, ...]
    block_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What the engine lacks to resume at `boundary_tokens`; parents before children."""

    boundary_tokens: int
    objects: tuple[PlannedObject, ...]


@dataclass(frozen=True, slots=True)
class StorePlan:
    """What can be stored now; parents before children, attention before what depends on it.

    `unused_offers` are the boundaries, in tokens, of offers that cannot make a checkpoint: between
    two boundaries, beyond the computed tokens, or without one of the state groups.
    """

    objects: tuple[PlannedObject, ...]
    unused_offers: tuple[int, ...] = ()


def per_boundary(kind: Kind, amounts: npt.NDArray[np.float64], window_chunks: int) -> npt.NDArray[np.float64]:
    """Return, for the boundary at the end of each chunk, the amount that it needs of objects of one kind.

    `window_chunks` is at least 1 for windows.
    """
    if kind is Kind.STATE:
        return amounts
    together: npt.NDArray[np.float64] = np.cumsum(amounts)
    if kind is Kind.WINDOW:
        together[window_chunks:] -= together[:-window_chunks].copy()
    return together


class Planner:
    """The geometry of one engine's groups. Immutable; all counts are tokens unless named otherwise.

    `chunk_tokens` None takes the default of design.md#chunk-size. `scheduler_block_tokens` is the engine's
    (the LCM of the groups' blocks when None). `retention_interval` is the engine's
    `prefix_cache_retention_interval` and `context_tokens` its longest request; None where they
    are not known, as in the daemon, which plans what a client has already checked.
    `computed_tokens_min` is how many tokens of a prompt every load leaves to compute.

    `kinds` are those the engine has; `path_kind` is the one whose objects mark the path to a
    boundary (attention where there is any); `ranks` is 0 when every group is replicated;
    `window_chunks` is how many chunks the windows that end at a boundary reach into.

    Raises PlannerError, with the numbers, for what design.md#chunk-size refuses, and LimitExceeded.
    """

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        chunk_tokens: int | None = None,
        *,
        scheduler_block_tokens: int | None = None,
        retention_interval: int | None = None,
        context_tokens: int | None = None,
        computed_tokens_min: int = 1,
    ) -> None:
        self.groups = tuple(groups)
        self._computed_tokens_min = computed_tokens_min
        check_groups(self.groups, context_tokens)
        self.scheduler_block_tokens = scheduler_block(self.groups, scheduler_block_tokens)
        self.ranks = max((len(group.rank_block_bytes) for group in self.groups if not group.replicated), default=0)
        self._members = {kind: tuple(i for i, g in enumerate(self.groups) if g.kind is kind) for kind in Kind}
        self.kinds = tuple(kind for kind in Kind if self._members[kind])
        self.path_kind = self.kinds[0]  # Kind is ordered by how well a kind marks a path
        recurrent = Kind.STATE in self.kinds
        if chunk_tokens is None:
            chunk_tokens = default_chunk(self.scheduler_block_tokens, recurrent)
        check_chunk(chunk_tokens, self.scheduler_block_tokens, retention_interval if recurrent else None)
        self.chunk_tokens = chunk_tokens
        self._tails = tuple(tail_tokens(group) for group in self.groups)
        self._tail_max = max(self._tails)
        self.window_chunks = -(-self._tail_max // chunk_tokens)
        self._blocks = tuple(map(self._count_blocks, range(len(self.groups))))
        self._parts, self._object_bytes = self._lay_out()

    def _count_blocks(self, group: int) -> int:
        spec = self.groups[group]
        if spec.kind is Kind.STATE:
            return 1
        tokens = self.chunk_tokens if spec.kind is Kind.ATTENTION else min(self.chunk_tokens, self._tails[group])
        return tokens // spec.block_tokens

    def _lay_out(self) -> tuple[tuple[tuple[tuple[int, int], ...], ...], dict[Kind, int]]:
        """Return the byte range of each rank's part for each group, and the bytes of an object of each kind."""
        at = dict.fromkeys(self.kinds, 0)
        parts = []
        for spec, blocks in zip(self.groups, self._blocks, strict=True):
            ranges = []
            for block_bytes in spec.rank_block_bytes:
                start = at[spec.kind]
                at[spec.kind] = start + blocks * block_bytes
                ranges.append((start, at[spec.kind]))
            parts.append(tuple(ranges))
        for kind, size_bytes in at.items():
            check_limit(f"bytes of one {kind.name.lower()} object", size_bytes, limits.OBJECT_BYTES_MAX)
        return tuple(parts), at

    def groups_of(self, kind: Kind) -> tuple[int, ...]:
        """Return the indices of the groups of `kind`, in object order."""
        return self._members[kind]

    def object_bytes(self, kind: Kind) -> int:
        """Return the bytes of one object of `kind`; 0 if the engine has no group of it."""
        return self._object_bytes.get(kind, 0)

    def blocks_in_object(self, group: int) -> int:
        """Return the blocks of the group in one object of its kind."""
        return self._blocks[group]

    def part_range(self, kind: Kind, group: int, rank: int) -> tuple[int, int]:
        """Return the byte range of a rank's part of a group, within an object of `kind`.

        All ranks share a replicated part.

        Raise PlannerError for a group of another kind, or for a rank that the group does not have.
        """
        spec = self.groups[group]
        if spec.kind is not kind:
            raise PlannerError(f"group {group} is of kind {spec.kind.name.lower()}, not {kind.name.lower()}")
        parts = self._parts[group]
        if spec.replicated:
            return parts[0]
        if not 0 <= rank < len(parts):
            raise PlannerError(f"group {group} has ranks 0 to {len(parts) - 1}, not rank {rank}")
        return parts[rank]

    def high_boundary(self, num_tokens: int) -> int:
        """Return the deepest boundary that may be offered for a prompt: its last tokens are always computed."""
        return max(num_tokens - self._computed_tokens_min, 0) // self.chunk_tokens * self.chunk_tokens

    def objects(self, boundary_tokens: int) -> list[tuple[int, Kind]]:
        """Return (chunk, kind) of each object that is needed to resume at the boundary from nothing.

        Raise PlannerError if it is not a boundary.
        """
        chunks = self._chunks(boundary_tokens)
        if not chunks:
            return []
        needed = []
        if self._members[Kind.ATTENTION]:
            needed += [(chunk, Kind.ATTENTION) for chunk in range(chunks)]
        needed += [(chunk, Kind.WINDOW) for chunk in range(max(chunks - self.window_chunks, 0), chunks)]
        if self._members[Kind.STATE]:
            needed.append((chunks - 1, Kind.STATE))
        return needed

    def longest_boundary(self, presence: Presence, low_tokens: LocalTokens, high_tokens: int) -> int:
        """Return the deepest boundary up to `high_tokens` whose load plan is all present; 0 if there is none.

        `low_tokens` is what the engine has already. The answer is deeper than the least of it, and only objects
        that the engine lacks must be present. Linear in the chunks.
        """
        local = self._local(low_tokens)
        end = self._attention_end(presence, local, max(high_tokens, 0) // self.chunk_tokens)
        states = bytearray(presence.get(Kind.STATE, b"")[:end].ljust(end, b"\0"))
        windows = presence.get(Kind.WINDOW, b"")[:end].ljust(end, b"\0")
        lowest = self._lowest_chunk(local)
        own = local.get(Kind.STATE, 0)
        if own and own % self.chunk_tokens == 0 and own // self.chunk_tokens <= end:
            states[own // self.chunk_tokens - 1] = 1  # the engine's own checkpoint serves its boundary
        chunk = end - 1
        while True:
            if Kind.STATE in local:
                chunk = states.rfind(1, lowest, max(chunk, -1) + 1)
            if chunk < lowest:
                return 0
            gap = self._window_gap(windows, local, chunk)
            if gap < 0:
                return (chunk + 1) * self.chunk_tokens
            chunk = gap - 1  # the windows of every boundary from the gap to here have the gap in them

    def legal_boundaries(self, presence: Presence, chunks: int) -> npt.NDArray[np.bool_]:
        """Return for the end of each chunk whether all `objects` of it are present. Nothing counts as local."""
        legal = np.ones(chunks, np.bool_)
        for kind in self.kinds:
            if kind is not Kind.WINDOW or self.window_chunks:
                flags = np.frombuffer(presence.get(kind, b"")[:chunks].ljust(chunks, b"\0"), np.uint8)
                legal &= per_boundary(kind, (flags == 0).astype(np.float64), self.window_chunks) == 0
        return legal

    def _attention_end(self, presence: Presence, local: Mapping[Kind, int], end: int) -> int:
        """Return the number of chunks, at most `end`, up to which no attention is missing."""
        if Kind.ATTENTION not in local:
            return end
        start = local[Kind.ATTENTION] // self.chunk_tokens
        if start >= end:
            return end
        flags = presence.get(Kind.ATTENTION, b"")
        missing = flags.find(0, start, end)
        return missing if missing >= 0 else min(end, max(len(flags), start))

    def _lowest_chunk(self, local: Mapping[Kind, int]) -> int:
        """Return the first chunk whose end lies beyond what the engine can resume at alone.

        Windows and states that are local at a depth say nothing about a shallower one.
        """
        least = min(local.values()) // self.chunk_tokens
        deepest = max((tokens for kind, tokens in local.items() if kind is not Kind.ATTENTION), default=0)
        return max(least, -(-deepest // self.chunk_tokens) - 1)

    def _window_gap(self, windows: bytes | bytearray, local: Mapping[Kind, int], chunk: int) -> int:
        """Return the last chunk whose window is needed at the end of `chunk` and is missing; -1 if there is none."""
        if Kind.WINDOW not in local:
            return -1
        first = max(local[Kind.WINDOW], (chunk + 1) * self.chunk_tokens - self._tail_max) // self.chunk_tokens
        return windows.rfind(0, max(first, 0), chunk + 1)

    def load_plan(self, local_tokens: LocalTokens, boundary_tokens: int) -> LoadPlan:
        """Return the objects to fetch so that an engine with `local_tokens` in its own cache resumes at the boundary.

        The plan names only missing blocks: the first attention object may be used from its middle on, and of
        windows only the last `window - 1` tokens before the boundary. A local hit at or beyond the boundary
        plans nothing.

        Raise PlannerError if it is not a boundary, if local tokens are no multiple of a group's block, or if
        windows or states alone are local beyond the boundary, because they would not serve it.
        """
        chunks = self._chunks(boundary_tokens)
        if isinstance(local_tokens, int) and local_tokens >= boundary_tokens:
            return LoadPlan(boundary_tokens, ())
        local = self._local(local_tokens)
        for kind, tokens in local.items():
            if kind is not Kind.ATTENTION and tokens > boundary_tokens:
                raise PlannerError(
                    f"{kind.name.lower()}: {tokens} local tokens do not serve the boundary at {boundary_tokens}"
                )
        planned: list[PlannedObject] = []
        if Kind.ATTENTION in local:
            start = local[Kind.ATTENTION]
            planned += [self._planned(c, Kind.ATTENTION, start) for c in range(start // self.chunk_tokens, chunks)]
        if Kind.WINDOW in local:
            planned += self._plan_windows(local[Kind.WINDOW], chunks)
        if Kind.STATE in local and local[Kind.STATE] != boundary_tokens:
            planned.append(self._planned(chunks - 1, Kind.STATE, 0))
        return LoadPlan(boundary_tokens, tuple(planned))

    def _plan_windows(self, local: int, chunks: int) -> list[PlannedObject]:
        boundary = chunks * self.chunk_tokens
        planned = []
        for chunk in range(max(local, boundary - self._tail_max) // self.chunk_tokens, chunks):
            spans = []
            for group in self._members[Kind.WINDOW]:
                span = self._span(group, chunk, max(local, boundary - self._tails[group]))
                if span.blocks > 0:
                    spans.append(span)
            planned.append(PlannedObject(chunk, Kind.WINDOW, tuple(spans)))
        return planned

    def object_spans(self, chunk: int, kind: Kind) -> tuple[BlockSpan, ...]:
        """Return each block of the object, group by group: what a store of the object reads."""
        return self._planned(chunk, kind, 0).spans

    def _planned(self, chunk: int, kind: Kind, from_tokens: int) -> PlannedObject:
        spans = tuple([self._span(group, chunk, from_tokens) for group in self._members[kind]])
        return PlannedObject(chunk, kind, spans)

    def _span(self, group: int, chunk: int, from_tokens: int) -> BlockSpan:
        """Return the group's blocks in the object of `chunk` that begin at `from_tokens` or later."""
        block_tokens = self.groups[group].block_tokens
        end = (chunk + 1) * self.chunk_tokens // block_tokens
        start = end - self._blocks[group]
        first = max(start, from_tokens // block_tokens)
        return BlockSpan(group, first - start, first, end - first)

    def store_plan(
        self,
        stored: Stored,
        computed_tokens: int,
        offers: Offers,
        *,
        alive_from: Mapping[int, int] | None = None,
        first_chunk: int = 0,
    ) -> StorePlan:
        """Return what can be stored of a request whose first `computed_tokens` tokens are computed.

        `stored` needs no copy (stored, pending or abandoned), and nothing before `first_chunk` is considered.
        `alive_from` has, for each window group, the first index of its block table from which on all computed
        blocks are alive. A window group without an entry has none. A state is stored exactly where every state
        group was offered; interior chunks have none.
        """
        chunks = max(computed_tokens, 0) // self.chunk_tokens
        checkpoints, unused = self._checkpoints(offers, chunks)
        alive = self._alive_chunk(alive_from or {})
        planned: list[PlannedObject] = []
        for chunk in range(first_chunk, chunks):
            if self._members[Kind.ATTENTION] and (chunk, Kind.ATTENTION) not in stored:
                planned.append(self._planned(chunk, Kind.ATTENTION, 0))
            if alive is not None and chunk >= alive and (chunk, Kind.WINDOW) not in stored:
                planned.append(self._planned(chunk, Kind.WINDOW, 0))
            if chunk in checkpoints and (chunk, Kind.STATE) not in stored:
                planned.append(self._planned(chunk, Kind.STATE, 0)._replace(block_ids=checkpoints[chunk]))
        return StorePlan(tuple(planned), unused)

    def _checkpoints(self, offers: Offers, chunks: int) -> tuple[dict[int, tuple[int, ...]], tuple[int, ...]]:
        """Return offered block ids by chunk, in the order of the state groups, and boundaries of useless offers."""
        members = self._members[Kind.STATE]
        usable: dict[int, tuple[int, ...]] = {}
        unused = []
        for boundary, blocks in sorted(offers.items()):
            chunk, rest = divmod(boundary, self.chunk_tokens)
            if members and not rest and 1 <= chunk <= chunks and all(group in blocks for group in members):
                usable[chunk - 1] = tuple([blocks[group] for group in members])
            else:
                unused.append(boundary)
        return usable, tuple(unused)

    def _alive_chunk(self, alive_from: Mapping[int, int]) -> int | None:
        """Return the first chunk whose window object is wholly alive; None if there is none."""
        members = self._members[Kind.WINDOW]
        if not members or any(group not in alive_from for group in members):
            return None
        first = 0
        for group in members:
            per_chunk = self.chunk_tokens // self.groups[group].block_tokens
            # Chunk c's object starts at block (c + 1) * per_chunk - blocks of the table.
            first = max(first, -(-(alive_from[group] + self._blocks[group]) // per_chunk) - 1)
        return first

    def _chunks(self, boundary_tokens: int) -> int:
        chunks, rest = divmod(boundary_tokens, self.chunk_tokens)
        if rest or not 0 <= boundary_tokens <= limits.BOUNDARY_TOKENS_MAX:
            raise PlannerError(f"{boundary_tokens} tokens are no boundary: chunks have {self.chunk_tokens} tokens")
        return chunks

    def _local(self, local_tokens: LocalTokens) -> dict[Kind, int]:
        """Return the local tokens of every kind that the engine has."""
        if isinstance(local_tokens, int):
            local = dict.fromkeys(self.kinds, local_tokens)
        else:
            local = {kind: local_tokens.get(kind, 0) for kind in self.kinds}
        for spec in self.groups:
            tokens = local[spec.kind]
            if tokens < 0 or tokens % spec.block_tokens:
                raise PlannerError(f"{tokens} local tokens are no multiple of a block of {spec.block_tokens} tokens")
        return local
