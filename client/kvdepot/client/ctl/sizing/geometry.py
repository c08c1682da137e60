"""The KV-cache groups of an engine that serves a model, as vLLM makes them. Sizes come from kvdepot's planner."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Final

from kvdepot.client.ctl.sizing.architectures import AUTO, ELEMENT_BYTES, Attention, Model, States, divided
from kvdepot.core.calls import Kind
from kvdepot.core.errors import InvalidArgument
from kvdepot.core.groups import GroupSpec
from kvdepot.core.planner import Planner

BLOCK_TOKENS: Final = 16
"""vLLM's block on GPUs, and the least that its attention kernels need."""
CPU_BLOCK_TOKENS: Final = 128
CPU_STATE_DTYPE: Final = "float32"
"""On CPUs of some kinds vLLM replaces every other type of a state. So the flags name the one that it has on all."""


@dataclass(frozen=True, slots=True)
class Engine:
    """How an engine serves the model; the defaults are vLLM's.

    Args:
        ranks: Tensor parallel ranks.
        dtype: Of the model; `auto`: its own.
        kv_cache_dtype: Of keys and values; `auto`: that of the model.
        state_dtype: vLLM's `mamba_ssm_cache_dtype`.
        block_tokens: vLLM's `block_size`, which it enlarges for a hybrid model.
        chunk_tokens: kvdepot's setting; None: its default.
        retention_tokens: vLLM's `prefix_cache_retention_interval`.
    """

    ranks: int = 1
    dtype: str = AUTO
    kv_cache_dtype: str = AUTO
    state_dtype: str = AUTO
    block_tokens: int = BLOCK_TOKENS
    chunk_tokens: int | None = None
    retention_tokens: int = 0


def vllm_defaults(model: Model, *, on_gpus: bool) -> tuple[int, str]:
    """Return vLLM's block in tokens, and the type of states to ask for."""
    if on_gpus:
        return BLOCK_TOKENS, AUTO
    latent = any(one.latent for one in model.attention)  # its kernel has small blocks on CPUs, too
    return BLOCK_TOKENS if latent else CPU_BLOCK_TOKENS, CPU_STATE_DTYPE if model.is_hybrid else AUTO


def engine_groups(model: Model, engine: Engine) -> tuple[GroupSpec, ...]:
    """Return the planner's view of the groups. Raise InvalidArgument if vLLM cannot serve it so."""
    divided(model.query_heads, engine.ranks, "attention heads")
    element_bytes = _element_bytes(model, engine)
    block_tokens = hybrid_block(model, engine) if model.is_hybrid else engine.block_tokens
    sizes: dict[tuple[Kind, int, bool], int] = defaultdict(int)  # bytes of a rank's block
    for one in model.attention:
        kind = Kind.WINDOW if one.window_tokens else Kind.ATTENTION
        replicated = one.latent and engine.ranks > 1
        sizes[kind, one.window_tokens, replicated] += (
            one.layers * token_bytes(one, engine.ranks, element_bytes) * block_tokens
        )
    for states in model.states:
        sizes[Kind.STATE, 0, False] += states.layers * state_bytes(states, model, engine)
    return tuple(
        GroupSpec(
            kind, block_tokens, window, (size_bytes,) * (1 if replicated else engine.ranks), replicated=replicated
        )
        for (kind, window, replicated), size_bytes in sizes.items()
    )


def engine_planner(model: Model, engine: Engine) -> Planner:
    """Return the planner that the connector makes for the engine. Raise PlannerError or InvalidArgument."""
    return Planner(
        engine_groups(model, engine),
        engine.chunk_tokens,
        retention_interval=engine.retention_tokens,
        context_tokens=model.context_tokens,
    )


def token_bytes(attention: Attention, ranks: int, element_bytes: int) -> int:
    """Return the bytes of a token in one layer of a rank. Ranks beyond the KV heads have copies of them."""
    heads = attention.heads
    if not attention.latent:
        if ranks > heads and ranks % heads:
            raise InvalidArgument(f"{ranks} ranks cannot have copies of {heads} KV heads", advice="choose another --tp")
        heads = divided(heads, ranks, "KV heads") if ranks <= heads else 1
    return heads * attention.elements * element_bytes


def state_bytes(states: States, model: Model, engine: Engine) -> int:
    """Return the bytes of a rank's state of one layer: the convolution and the temporal state."""
    ranks = engine.ranks
    model_dtype = model.dtype if engine.dtype == AUTO else engine.dtype
    dtype = states.dtype if engine.state_dtype == AUTO else engine.state_dtype
    if unknown := {model_dtype, dtype} - {AUTO} - ELEMENT_BYTES.keys():
        raise InvalidArgument(f"the element type {min(unknown)!r} is not known here")
    temporal = divided(states.heads, ranks, "heads of a state") * states.head_elements
    groups = states.groups if states.groups % ranks == 0 else ranks
    channels = divided(states.conv_channels + groups * states.group_channels, ranks, "channels of a convolution")
    temporal_bytes = temporal * ELEMENT_BYTES[model_dtype if dtype == AUTO else dtype]
    return channels * states.conv_tokens * ELEMENT_BYTES[model_dtype] + temporal_bytes


def hybrid_block(model: Model, engine: Engine) -> int:
    """Return the block of a hybrid model: vLLM enlarges it until a block of attention is no smaller than a state."""
    element_bytes = _element_bytes(model, engine)
    state = max(state_bytes(one, model, engine) for one in model.states)
    token = max(token_bytes(one, engine.ranks, element_bytes) for one in model.attention)
    step = max(BLOCK_TOKENS, engine.block_tokens)
    return max(engine.block_tokens, -(-state // (step * token)) * step)


def check_retention(model: Model, engine: Engine) -> None:
    """Raise InvalidArgument for a retention interval that vLLM refuses.

    It has to be whole blocks, of a model that has states or sliding windows.
    """
    retention = engine.retention_tokens
    if not retention:
        return
    if not (model.is_hybrid or any(one.window_tokens for one in model.attention)):
        raise InvalidArgument(
            f"{model.architecture} has no states and no sliding windows: vLLM refuses a retention interval",
            advice="leave it out",
        )
    block = hybrid_block(model, engine) if model.is_hybrid else engine.block_tokens
    if retention % block:
        near = max(round(retention / block), 1) * block
        raise InvalidArgument(
            f"a retention of {retention} tokens is no multiple of the model's blocks of {block}", advice=f"take {near}"
        )


def _element_bytes(model: Model, engine: Engine) -> int:
    """Return the bytes of an element of keys and values."""
    for name in (engine.kv_cache_dtype, model.kv_cache_dtype, engine.dtype, model.dtype):
        if name != AUTO:
            if name not in ELEMENT_BYTES:
                raise InvalidArgument(f"the element type {name!r} is not known here")
            return ELEMENT_BYTES[name]
    raise AssertionError("a model has a type")
