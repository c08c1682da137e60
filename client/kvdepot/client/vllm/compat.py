"""Everything that differs between versions of vLLM, and every import from it that may move.

Written against 0.32.0 (0.33.0 only adds methods to the connector interface). The range
is checked when the connector is made, with a message, rather than failing later in a
method nobody expected to be called.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, Final

from kvdepot.core.calls import Kind
from kvdepot.core.errors import ConfigError
from vllm import __version__ as vllm_version
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.kv_cache_interface import (
    KVCacheSpecKind,
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
    group_kernel_blocks,
    iter_layer_specs,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

VERSION_MIN: Final = (0, 32)
VERSION_MAX: Final = (0, 33)

VLLM_VERSION: Final = str(vllm_version)
_KINDS: Final[dict[Any, Kind]] = {
    KVCacheSpecKind.FULL_ATTENTION: Kind.ATTENTION,
    KVCacheSpecKind.MLA_ATTENTION: Kind.ATTENTION,
    KVCacheSpecKind.SLIDING_WINDOW: Kind.WINDOW,
    KVCacheSpecKind.MAMBA: Kind.STATE,
}


# Set in an engine's environment, and without influence on a byte of KV: where it runs, talks, logs and is built.
_ENVIRONMENT_EXCLUDED: Final = re.compile(
    r"RAY_|MOONCAKE_|VLLM_(RAY|DP|EC|P2P|NIXL|MOONCAKE|BUILD|LOG|DEBUG|USAGE|LORA_RESOLVER|MAX_N|MAX_NUM|MAX_BAD|GC|NIC|GPU_NIC"
    r"|MQ|MSGPACK|REGEX|TOOL|ENGINE_READY|ELASTIC|XGRAMMAR|PROCESS_NAME|CONFIGURE_LOGGING|ALLOW)_"
    r"|.*_(HOST|PORT|IP|TIMEOUT|TIMEOUT_S|SO_PATH|INCLUDE_PATH|FOR_PROFILING)$"
    r"|(CMAKE_BUILD_TYPE|CUDA_HOME|NVCC_THREADS|VERBOSE|VLLM_CPU_OMP_THREADS_BIND|VLLM_CPU_NUM_OF_RESERVED_CPU"
    r"|VLLM_CPU_CI_ENV|VLLM_DISABLE_REQUEST_ID_RANDOMIZATION|VLLM_DISABLE_COMPILE_CACHE|VLLM_DISABLE_LOG_LOGO"
    r"|VLLM_DOCKER_BUILD_CONTEXT|VLLM_IMAGE_TAG|VLLM_SYSTEM_START_DATE|VLLM_LOOPBACK_IP)$"
)
_ENVIRONMENT_BELOW: Final = (
    "ATEN_CPU_CAPABILITY",
    "DNNL_DEFAULT_FPMATH_MODE",
    "NVIDIA_TF32_OVERRIDE",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ONEDNN_MAX_CPU_ISA",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)
"""Of the libraries below vLLM: they choose arithmetic."""


def environment_facts(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables that are set and may choose other kernels or arithmetic: vLLM's, minus those that cannot."""
    from vllm.envs import compile_factors

    known = [name for name in compile_factors() if not _ENVIRONMENT_EXCLUDED.match(name)]
    return {name: environment[name] for name in (*known, *_ENVIRONMENT_BELOW) if name in environment}


def check_version(version: str = VLLM_VERSION) -> None:
    """Raises ConfigError naming the supported range. Development builds without a number pass."""
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        return
    found = (int(match[1]), int(match[2]))
    if found[0] == 0 and found[1] == 0:
        return
    if not VERSION_MIN <= found <= VERSION_MAX:
        low, high = (".".join(map(str, bound)) for bound in (VERSION_MIN, VERSION_MAX))
        raise ConfigError(
            "vllm", "version", f"{version} is not supported", advice=f"use vLLM {low} to {high}, or another kvdepot"
        )


def group_kind(spec: Any) -> Kind | None:
    """The kind of a KV-cache group's spec; None for one kvdepot does not know."""
    return _KINDS.get(get_kv_cache_spec_kind(spec))


def group_kind_name(spec: Any) -> str:
    return str(get_kv_cache_spec_kind(spec).value)


def group_window_tokens(spec: Any) -> int:
    return int(get_kv_cache_spec_sliding_window(spec) or 0)


def group_is_replicated(spec: Any, tensor_parallel_size: int, pipeline_parallel_size: int) -> bool:
    """Whether every rank holds the same bytes: MLA's latent is not split over tensor-parallel ranks."""
    if tensor_parallel_size < 2 or pipeline_parallel_size > 1:
        return False
    return bool(get_kv_cache_spec_kind(spec) is KVCacheSpecKind.MLA_ATTENTION)


def layer_spec(spec: Any, layer_name: str) -> Any:
    """The spec of one layer of a group (a group may wrap one spec per layer)."""
    per_layer = getattr(spec, "kv_cache_specs", None)
    return per_layer[layer_name] if per_layer is not None else spec


def is_eagle(group: Any) -> bool:
    """Whether the group holds draft layers, whose KV at a position depends on the token after it."""
    return bool(getattr(group, "is_eagle_group", False))


def mamba_modes(spec: Any) -> set[str]:
    """The cache modes of a recurrent group's layers."""
    return {str(getattr(layer, "mamba_cache_mode", "none")) for layer in iter_layer_specs(spec)}


def hash_block_tokens(kv_cache_config: Any, vllm_config: Any) -> int:
    """Tokens per entry of `request.block_hashes`."""
    resolved = getattr(kv_cache_config, "hash_block_size", None)
    if resolved:
        return int(resolved)
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

    return int(resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)[1])


def default_hash_seed() -> str:
    """The fixed seed of the sha256 hash chains where PYTHONHASHSEED is not set."""
    from vllm.v1.core.kv_cache_utils import DEFAULT_NONE_HASH_SEED

    return str(DEFAULT_NONE_HASH_SEED)


__all__ = [
    "VLLM_VERSION",
    "CacheHitSource",
    "KVConnectorBase_V1",
    "KVConnectorHandshakeMetadata",
    "KVConnectorMetadata",
    "KVConnectorRole",
    "KVConnectorTransferResults",
    "KVConnectorWorkerMetadata",
    "SupportsHMA",
    "check_version",
    "default_hash_seed",
    "environment_facts",
    "group_is_replicated",
    "group_kernel_blocks",
    "group_kind",
    "group_kind_name",
    "group_window_tokens",
    "hash_block_tokens",
    "is_eagle",
    "layer_spec",
    "mamba_modes",
]
