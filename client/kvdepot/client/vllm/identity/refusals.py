"""What the connector refuses at start, by name and with the setting to change (design.md#connector).

All of it is the operator's to correct, so it is raised. Nothing here runs after start.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvdepot.client.vllm.base import compat
from kvdepot.client.vllm.base.engine_rules import (
    STATE_MODE,
    WHERE,
    check_hash_algorithm,
    check_parallel,
    check_role,
    state_mode_refused,
)
from kvdepot.client.vllm.identity.speculation import Speculation, refused, speculation
from kvdepot.core.calls import Kind
from kvdepot.core.errors import ConfigError

if TYPE_CHECKING:
    from kvdepot.client.vllm.base.settings import Settings

ROLLED_BACK = frozenset({"GDN_ATTN", "MAMBA2", "SHORT_CONV"})
"""Kinds of recurrent layers that vLLM tells how many draft tokens were accepted.

Of v1/worker/gpu_model_runner.py and v1/worker/gpu/model_states/mamba_hybrid.py, 0.32 and 0.33. The state of another
kind keeps rejected drafts, and its blocks at boundaries get scratch that nobody wrote.
"""


def check_engine(
    vllm_config: Any, kv_cache_config: Any, settings: Settings, environment: Mapping[str, str] = os.environ
) -> None:
    """Raise ConfigError for the first setting that cannot work."""
    transfer = vllm_config.kv_transfer_config
    check_role(transfer.kv_role, settings.load_weight)
    check_parallel(vllm_config.parallel_config)
    _check_hashes(vllm_config, environment)
    if getattr(kv_cache_config, "hisparse_host_num_blocks", None) is not None:
        raise ConfigError(WHERE, "hisparse", "HiSparse uses the same block watchers", advice="switch HiSparse off")
    if compat.has_auxiliary_outputs(vllm_config):
        raise ConfigError(
            WHERE,
            "aux_output_config",
            "auxiliary outputs of tokens that are loaded exist nowhere, and vLLM withdraws offers for them",
            advice="switch enable_return_routed_experts off, or serve this model without kvdepot",
        )
    if replaced := compat.replaced_scheduling(vllm_config):
        raise ConfigError(
            WHERE,
            "scheduler_cls",
            f"it replaces {', '.join(replaced)}, and kvdepot stores what vLLM's own scheduler has computed",
            advice="leave scheduler_cls unset, or serve this model without kvdepot",
        )
    if compat.is_diffusion(vllm_config):
        raise ConfigError(
            WHERE,
            "diffusion_config",
            "a token's KV depends on the later ones of its canvas, which no hash of a prefix covers",
            advice="serve this model without kvdepot",
        )
    drafting = speculation(vllm_config)
    kinds = _check_groups(kv_cache_config, drafting)
    if drafting is not None:
        _check_speculation(vllm_config, kv_cache_config, kinds)


def _check_speculation(vllm_config: Any, kv_cache_config: Any, kinds: set[Kind]) -> None:
    stages = vllm_config.parallel_config.pipeline_parallel_size
    if stages > 1:
        raise refused(
            "pipeline_parallel_size",
            f"all stages but the last of {stages} are never told to save (vLLM defers that to its drafter)",
        )
    if Kind.STATE in kinds:
        _check_states(vllm_config, kv_cache_config)


def _check_states(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raise ConfigError for recurrent models whose states under speculative decoding are wrong, or were not tried."""
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        if compat.group_kind(spec) is Kind.STATE and (kept := compat.mamba_types(spec) - ROLLED_BACK):
            raise refused(
                f"layers of kind {', '.join(sorted(kept))}",
                "vLLM does not take rejected draft tokens out of their states",
            )
    if vllm_config.cache_config.use_replayssm:
        raise ConfigError(
            WHERE,
            "use_replayssm",
            "states of ReplaySSM under speculative decoding have not been tried",
            advice="set use_replayssm to false, or switch speculative decoding off",
        )
    if vllm_config.scheduler_config.async_scheduling and not vllm_config.use_v2_model_runner:
        raise ConfigError(
            WHERE,
            "async_scheduling",
            "vLLM's V1 runner may keep the state after a draft token that was rejected (vLLM issue 51571)",
            advice="set async_scheduling to false, VLLM_USE_V2_MODEL_RUNNER to 1, or switch speculative decoding off",
        )


def cacheable_groups(kv_cache_config: Any) -> tuple[int, ...]:
    """Return the engine's groups that are stored, in its order."""
    return tuple(kv_cache_config.prefix_cacheable_group_ids)


def _check_hashes(vllm_config: Any, environment: Mapping[str, str]) -> None:
    """Raise ConfigError for hashes of other tokens than their block's, or that differ between processes (P3)."""
    lookahead = compat.hash_lookahead_tokens(vllm_config)
    if lookahead:
        raise ConfigError(
            WHERE,
            "num_hash_lookahead_tokens",
            f"hashes cover {lookahead} tokens after their block: a chunk would have other keys by what follows it",
            advice="set disable_lookahead_block_hashes in speculative_config, or switch speculative decoding off",
        )
    check_hash_algorithm(str(vllm_config.cache_config.prefix_caching_hash_algo), environment.get("PYTHONHASHSEED", ""))


def _check_groups(kv_cache_config: Any, drafting: Speculation | None) -> set[Kind]:
    """Of all groups, not only those that are stored: what vLLM rebuilds after a hit nobody has tried after a load."""
    keeps_kv, lookahead = (drafting.keeps_kv, drafting.lookahead_tokens) if drafting is not None else (False, 0)
    kinds = set()
    for group_id, group in enumerate(kv_cache_config.kv_cache_groups):
        _check_spec(f"group {group_id}", group.kv_cache_spec)
        kind = compat.group_kind(group.kv_cache_spec)
        assert kind is not None  # refused by _check_spec
        if (compat.looks_past_blocks(group) and not lookahead) or (compat.has_drafts(group) and not keeps_kv):
            raise ConfigError(
                WHERE,
                f"group {group_id}",
                "vLLM marks draft layers in it, whose KV may depend on later tokens, and its method has none",
                advice="switch speculative decoding off",
            )
        modes = compat.mamba_modes(group.kv_cache_spec) if kind is Kind.STATE else {STATE_MODE}
        if modes != {STATE_MODE}:
            raise state_mode_refused(
                "mamba_cache_mode", f"group {group_id} is recurrent and in mode {', '.join(sorted(modes))}"
            )
        kinds.add(kind)
    if kinds == {Kind.STATE}:
        raise ConfigError(
            WHERE,
            "model",
            "it has recurrent groups only, and between two checkpoints nothing to store that would lead to the second",
            advice="serve this model without kvdepot",
        )
    return kinds


def _check_spec(where: str, spec: Any) -> None:
    """Raise ConfigError for a cache whose blocks depend on more than the prefix, or that nobody has tried."""
    if compat.is_chunked_local(spec):
        raise ConfigError(
            WHERE,
            where,
            "chunked-local attention with blocks of its own is not supported",
            advice="unset VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE: vLLM then keeps it as full attention",
        )
    if compat.group_kind(spec) is None:
        raise ConfigError(
            WHERE,
            where,
            f"caches of kind {compat.spec_names(spec)} are not supported",
            advice="serve this model without kvdepot",
        )
    if compat.looks_ahead(spec):
        raise ConfigError(
            WHERE,
            where,
            "its attention is not causal: the KV of a prefix depends on what follows",
            advice="serve this model without kvdepot",
        )
    if compat.replayed_tokens(spec):
        raise ConfigError(
            WHERE,
            where,
            "vLLM computes its last window again after a hit, and shortens what is offered for it",
            advice="serve this model without kvdepot",
        )
    if compat.retained_below_window(spec):
        raise ConfigError(
            WHERE,
            where,
            "it keeps tokens before its window for speculative decoding",
            advice="switch speculative decoding off",
        )
