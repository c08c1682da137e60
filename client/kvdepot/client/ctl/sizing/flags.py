"""The flags of `vllm serve` for a model: what the connector demands and recommends (docs/vllm.md)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvdepot.client.ctl.sizing.architectures import AUTO
from kvdepot.client.ctl.sizing.geometry import BLOCK_TOKENS, check_retention, hybrid_block
from kvdepot.client.vllm.base.engine_rules import STATE_MODE, transfer_config

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvdepot.client.ctl.sizing.architectures import Model
    from kvdepot.client.ctl.sizing.geometry import Engine

TRANSFER: Final = "kv-transfer-config"
CACHING: Final = "enable-prefix-caching"
RETENTION: Final = "prefix-cache-retention-interval"
BATCHED_TOKENS: Final = "max-num-batched-tokens"
"""A recommendation: more checkpoints are usable with it."""


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag of `vllm serve`, without its dashes. `value` is empty for a switch.

    `why` is for people, and empty if somebody asked for the value.
    """

    name: str
    value: str
    why: str

    def __str__(self) -> str:
        return f"--{self.name}{f' {self.value}' if self.value else ''}"


def engine_flags(model: Model, engine: Engine) -> list[Flag]:
    """Return the flags, those that name what was asked for first. Raise InvalidArgument."""
    found = [*_asked(engine)]
    check_retention(model, engine)
    if model.is_hybrid:
        found += _hybrid(model, engine)
    else:
        found += _asked_of_blocks(engine)
    return [*found, transfer_flag(engine.chunk_tokens)]


def transfer_flag(chunk_tokens: int | None = None) -> Flag:
    """Return the flag that attaches an engine to kvdepot."""
    value = json.dumps(transfer_config(chunk_tokens), separators=(",", ":"))
    return Flag(TRANSFER, f"'{value}'", "the connector; with another failure policy it never loads")


def _asked(engine: Engine) -> Iterator[Flag]:
    for name, value, default in (
        ("tensor-parallel-size", engine.ranks, 1),
        ("dtype", engine.dtype, AUTO),
        ("kv-cache-dtype", engine.kv_cache_dtype, AUTO),
        ("mamba-ssm-cache-dtype", engine.state_dtype, AUTO),
    ):
        if value != default:
            yield Flag(name, str(value), "")


def _asked_of_blocks(engine: Engine) -> Iterator[Flag]:
    if engine.block_tokens != BLOCK_TOKENS:
        yield Flag("block-size", str(engine.block_tokens), "")
    if engine.retention_tokens:
        yield Flag(RETENTION, str(engine.retention_tokens), "")


def _hybrid(model: Model, engine: Engine) -> Iterator[Flag]:
    block = hybrid_block(model, engine)
    yield Flag(CACHING, "", "without it no boundary has a state")
    yield Flag("mamba-cache-mode", STATE_MODE, "without it no boundary has a state")
    yield Flag("block-size", str(block), "scheduler and ranks may disagree without it, and then nothing hits")
    if engine.retention_tokens:
        yield Flag(RETENTION, str(engine.retention_tokens), "a checkpoint at each boundary")
        yield Flag(BATCHED_TOKENS, str(engine.retention_tokens), "steps of prompts end at boundaries")
