"""What the connector demands of vLLM's settings, as far as plain values say it. Nothing of vLLM is imported.

The connector's refusals, `kvdepotctl doctor --engine` and the flags of `kvdepotctl size` follow these rules.
"""

from __future__ import annotations

from typing import Any, Final

from kvdepot.core.errors import ConfigError

WHERE: Final = "kvdepot"
CONNECTOR: Final = "KVDepotConnector"
FAILURE_POLICY: Final = "recompute"
"""The only `kv_load_failure_policy` with which the connector loads: with `fail`, a failed load fails the request."""
STATE_MODE: Final = "align"
"""The only `mamba_cache_mode` in which boundaries have states."""


def check_role(role: str, load_weight: float) -> None:
    """Raise ConfigError for a role that contradicts kvdepot's settings."""
    if role == "kv_producer" and load_weight > 0:
        raise ConfigError(
            WHERE, "kv_role", "kv_producer engines do not load", advice="use kv_both, or set load_weight to 0"
        )


def check_parallel(parallel: Any) -> None:
    """Raise ConfigError for a shape of ranks that is not served. A missing attribute has vLLM's default."""
    nodes = getattr(parallel, "nnodes", 1)
    if nodes > 1:
        raise ConfigError(
            WHERE, "nnodes", f"ranks on {nodes} nodes share no memory", advice="keep an engine on one node"
        )
    if getattr(parallel, "enable_elastic_ep", False):
        raise ConfigError(
            WHERE,
            "enable_elastic_ep",
            "ranks come and go, and graphs are captured, while copies run",
            advice="switch enable_elastic_ep off, or serve this model without kvdepot",
        )
    if getattr(parallel, "enable_fault_tolerance", False):
        raise ConfigError(
            WHERE,
            "enable_fault_tolerance",
            "vLLM continues after a step that failed, and tells no connector that nothing was computed in it",
            advice="switch enable_fault_tolerance off, or serve this model without kvdepot",
        )
    for key in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(parallel, key, 1)
        if size > 1:
            raise ConfigError(WHERE, key, f"{size} is not tested", advice=f"set {key} to 1")


def check_hash_algorithm(algorithm: str, seed: str) -> None:
    """Raise ConfigError if a chain of hashes would name other bytes in every process (P3).

    `seed`: PYTHONHASHSEED; empty if it is not set.
    """
    if algorithm.startswith("xxhash") and seed in ("", "random"):
        raise ConfigError(
            WHERE,
            "prefix_caching_hash_algo",
            f"{algorithm} without PYTHONHASHSEED gives every process other hashes, so nothing stored could be found",
            advice="set PYTHONHASHSEED to the same number for every engine, or prefix_caching_hash_algo to sha256",
        )


def state_mode_refused(where: str, problem: str) -> ConfigError:
    """Return the error for recurrent layers that are not in the mode `align`."""
    return ConfigError(
        WHERE, where, f"{problem}: no boundary has a state",
        advice=f'set enable_prefix_caching=True and mamba_cache_mode="{STATE_MODE}"',
    )  # fmt: skip


def transfer_config(chunk_tokens: int | None = None) -> dict[str, Any]:
    """Return the shortest `kv_transfer_config` with which an engine stores and loads."""
    extra = {} if chunk_tokens is None else {"kv_connector_extra_config": {"chunk_tokens": chunk_tokens}}
    return {"kv_connector": CONNECTOR, "kv_role": "kv_both", "kv_load_failure_policy": FAILURE_POLICY, **extra}
