"""Describe and check the KV-cache groups of an engine (design.md#chunk-size). Tokens unless named otherwise."""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import Annotated, Final

from kvdepot.core import limits
from kvdepot.core.bounds import AtMost, Count
from kvdepot.core.calls import Kind
from kvdepot.core.errors import PlannerError
from kvdepot.core.limits import check_limit

DEFAULT_CHUNK_TOKENS_MIN: Final = 256
BlockBytes = Annotated[int, AtMost(limits.OBJECT_BYTES_MAX)]


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """A KV-cache group of the engine, as far as kvdepot has to know it.

    `rank_block_bytes[r]` are the bytes of one block on rank `r`, all layers of the group
    together; one entry when the group is `replicated`. A rank without a layer of the group
    (pipeline parallel) has 0.
    """

    kind: Kind
    block_tokens: int
    window_tokens: int = 0  # WINDOW only: a token attends to itself and window_tokens - 1 before it
    rank_block_bytes: Annotated[tuple[BlockBytes, ...], Count(limits.RANKS_MAX)] = ()
    replicated: bool = False
    layers: Annotated[tuple[str, ...], Count(limits.LAYERS_PER_GROUP_MAX)] = ()


def tail_tokens(group: GroupSpec) -> int:
    """Return how far before a boundary a window group reaches, rounded up to its blocks; 0 for other kinds."""
    if group.kind is not Kind.WINDOW:
        return 0
    return -(-(group.window_tokens - 1) // group.block_tokens) * group.block_tokens


def default_chunk(scheduler_block: int, recurrent: bool) -> int:
    """Return the default `chunk_tokens` of an engine, with or without recurrent groups."""
    if recurrent:
        return scheduler_block
    return -(-DEFAULT_CHUNK_TOKENS_MIN // scheduler_block) * scheduler_block


def check_groups(groups: tuple[GroupSpec, ...], context_tokens: int | None) -> None:
    """Raise PlannerError or LimitExceeded for groups that cannot be stored. `context_tokens` None: unknown."""
    if not groups:
        raise PlannerError("the engine has no KV-cache groups: there is nothing to store")
    check_limit("KV-cache groups of an engine", len(groups), limits.GROUPS_MAX)
    ranks = {len(group.rank_block_bytes) for group in groups if not group.replicated}
    if len(ranks) > 1:
        raise PlannerError(f"groups disagree on the number of ranks: {', '.join(map(str, sorted(ranks)))}")
    for index, group in enumerate(groups):
        _check_group(index, group)
        if group.kind is Kind.STATE and context_tokens is not None and group.block_tokens >= context_tokens:
            raise PlannerError(
                f"group {index} is recurrent and its block of {group.block_tokens} tokens is the whole context of "
                f"{context_tokens}: no boundary has a state",
                advice='start the engine with enable_prefix_caching=True and mamba_cache_mode="align"',
            )


def _check_group(index: int, group: GroupSpec) -> None:
    if group.block_tokens <= 0:
        raise PlannerError(f"group {index}: a block of {group.block_tokens} tokens is not positive")
    check_limit(f"tokens of a block of group {index}", group.block_tokens, limits.CHUNK_TOKENS_MAX)
    if group.kind is Kind.WINDOW and group.window_tokens < 2:
        raise PlannerError(f"group {index}: a window of {group.window_tokens} tokens needs no stored token")
    if group.kind is not Kind.WINDOW and group.window_tokens:
        raise PlannerError(
            f"group {index}: kind {group.kind.name.lower()} has no window, but window_tokens is {group.window_tokens}"
        )
    sizes = group.rank_block_bytes
    check_limit(f"ranks of group {index}", len(sizes), limits.RANKS_MAX)
    check_limit(f"layers of group {index}", len(group.layers), limits.LAYERS_PER_GROUP_MAX)
    if not sizes or min(sizes) < 0 or not sum(sizes):
        raise PlannerError(f"group {index}: blocks of {list(sizes)} bytes per rank are not positive")
    if group.replicated and len(sizes) != 1:
        raise PlannerError(f"group {index} is replicated: it has one part, not {len(sizes)}")


def scheduler_block(groups: tuple[GroupSpec, ...], given: int | None) -> int:
    """Return the engine's scheduler block in tokens: `given`, or the LCM of the groups' blocks. Raise PlannerError."""
    blocks = sorted({group.block_tokens for group in groups})
    common = lcm(*blocks)
    if given is None:
        return common
    if given <= 0 or given % common:
        raise PlannerError(
            f"a scheduler block of {given} tokens is no multiple of {common}, the LCM of the groups' blocks {blocks}"
        )
    return given


def check_chunk(chunk_tokens: int, scheduler_block: int, retention_interval: int | None) -> None:
    """Raise PlannerError or LimitExceeded for a bad chunk size. `retention_interval` None: no recurrent groups."""
    if chunk_tokens <= 0:
        raise PlannerError(f"chunk_tokens {chunk_tokens} is not positive")
    if chunk_tokens % scheduler_block:
        nearest = max(round(chunk_tokens / scheduler_block), 1) * scheduler_block
        raise PlannerError(
            f"chunk_tokens {chunk_tokens} is no multiple of {scheduler_block}, the LCM of the groups' blocks",
            advice=f"the nearest multiple is {nearest}",
        )
    check_limit("chunk_tokens", chunk_tokens, limits.CHUNK_TOKENS_MAX)
    if retention_interval == 0 and chunk_tokens > scheduler_block:
        raise PlannerError(
            f"the engine keeps one checkpoint a prompt, at its last block of {scheduler_block} tokens "
            f"(prefix_cache_retention_interval 0), which is rarely a multiple of chunk_tokens {chunk_tokens}",
            advice=f"set chunk_tokens to {scheduler_block}, or prefix_cache_retention_interval to {chunk_tokens}",
        )
