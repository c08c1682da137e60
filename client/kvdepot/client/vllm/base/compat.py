"""Everything that differs between versions of vLLM, and every import from it that may move.

`versions` has the supported range. It is checked when the connector is made, and so is every name that kvdepot relies
on: with a message then, rather than later in a method that nobody calls any more.
"""

from __future__ import annotations

import contextlib
import os
import re
from array import array
from collections.abc import Mapping
from math import prod
from typing import Any, Final

import msgspec
from kvdepot.client.vllm.base import contract, engine_types, versions
from kvdepot.core.calls import Kind, Nearest
from vllm import __version__ as vllm_version

with contract.by_name(str(vllm_version), __file__):
    from vllm.config import (
        CacheConfig,
        KVTransferConfig,
        ModelConfig,
        MultiModalConfig,
        ParallelConfig,
        SchedulerConfig,
        SpeculativeConfig,
        VllmConfig,
    )
    from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_STORAGE, BlockRemoved, BlockStored
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorHandshakeMetadata,
        KVConnectorMetadata,
        KVConnectorRole,
        KVConnectorTransferResults,
        KVConnectorWorkerMetadata,
        SupportsHMA,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics,
        KVConnectorStats,
        PromMetric,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector, MultiKVConnectorStats
    from vllm.envs import compile_factors
    from vllm.lora.request import LoRARequest
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import (
        DEFAULT_NONE_HASH_SEED,
        KVCacheBlock,
        generate_block_hash_extra_keys,
        make_block_hash_with_group_id,
        maybe_convert_block_hash,
        resolve_kv_cache_block_sizes,
        to_event_extra_keys,
    )
    from vllm.v1.core.sched.output import KVConnectorBlockState, NewRequestData, SchedulerOutput
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        MambaSpec,
        MLAAttentionSpec,
        SlidingWindowSpec,
        UniformTypeKVCacheSpecs,
        get_kv_cache_spec_kind,
        get_kv_cache_spec_sliding_window,
        iter_layer_specs,
    )
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

VLLM_VERSION: Final = str(vllm_version)
_KINDS: Final[dict[type, Kind]] = {
    FullAttentionSpec: Kind.ATTENTION,
    MLAAttentionSpec: Kind.ATTENTION,
    SlidingWindowSpec: Kind.WINDOW,
    MambaSpec: Kind.STATE,
}
"""By the class itself: vLLM calls subclasses the same kind, but some drop blocks, or fill them, in their own way."""
_SINCE: Final[Mapping[str, tuple[int, int]]] = dict.fromkeys(
    ("supports_sleep_mode", "unregister_kv_caches", "restore_kv_caches", "num_hash_lookahead_tokens", "is_draft"),
    (0, 33),
)
"""The version that brought a name of `_USED`, or a method of the interface, if not every supported one has it."""
_MEDIA: Final = {Nearest.RAM: MEDIUM_CPU, Nearest.BELOW_RAM: MEDIUM_STORAGE}
"""vLLM's words for tiers. Routers drop events that have other ones."""
_NOT_HOOKS: Final = frozenset({"fail_allocated", "sibling_loads"})
"""Public methods of the connectors that vLLM never calls."""
_NOT_SCHEDULING: Final = frozenset({"add_request", "make_spec_decoding_stats", "make_stats", "shutdown"})
"""Methods of a scheduler that users may replace."""
_USED: Final[tuple[tuple[type, contract.Names], ...]] = (
    (Request, engine_types.EngineRequest),
    (BlockPool, engine_types.BlockPool),
    (KVCacheBlock, engine_types.Block),
    (LoRARequest, ("lora_name", "lora_path", "lora_int_id", "load_inplace")),
    (MultiModalFeatureSpec, ("identifier", "mm_position")),
    (PlaceholderRange, ("length", "offset")),
    (
        SchedulerOutput,
        ("kv_connector_block_state", "num_scheduled_tokens", "preempted_req_ids", "scheduled_new_reqs",
         "scheduled_spec_decode_tokens"),
    ),
    (NewRequestData, ("req_id", "num_computed_tokens")),
    (KVConnectorBlockState, ("boundary_state_offloads", "resolve_block_ids")),
    (KVConnectorOutput, ("kv_connector_worker_meta",)),
    (
        VllmConfig,
        ("aux_output_config", "diffusion_config", "ec_transfer_config", "kv_events_config", "kv_transfer_config",
         "num_hash_lookahead_tokens", "num_prefill_lookahead_tokens", "speculative_config", "use_v2_model_runner",
         "weight_transfer_config"),
    ),
    (
        SpeculativeConfig,
        ("disable_eagle_block_drop", "draft_load_config", "draft_model_config", "draft_parallel_config", "method",
         "num_speculative_tokens", "parallel_drafting", "use_eagle", "use_heterogeneous_vocab"),
    ),
    (ModelConfig, ("is_hybrid", "is_mm_prefix_lm", "multimodal_config", "uses_mrope")),
    (MultiModalConfig, ("is_multimodal_pruning_enabled", "mm_processor_cache_gb")),
    (SchedulerConfig, ("async_scheduling", "get_scheduler_cls", "scheduler_cls")),
    (
        ParallelConfig,
        ("data_parallel_size", "decode_context_parallel_size", "enable_elastic_ep", "enable_fault_tolerance", "nnodes",
         "pipeline_parallel_size", "prefill_context_parallel_size", "rank", "tensor_parallel_size", "world_size"),
    ),
    (CacheConfig, ("cache_dtype", "enable_prefix_caching", "prefix_caching_hash_algo", "use_replayssm")),
    (
        KVCacheConfig,
        ("hash_block_size", "hisparse_host_num_blocks", "kv_cache_groups", "num_blocks",
         "prefix_cache_retention_interval", "prefix_cacheable_group_ids"),
    ),
    (KVCacheGroupSpec, ("is_eagle_group", "kv_cache_spec", "layer_names")),
    (FullAttentionSpec, ("is_draft", "max_tp_shards", "non_causal", "prefix_replay_tokens")),
    (SlidingWindowSpec, ("extra_retained_tokens", "is_draft", "prefix_replay_tokens")),
    (MambaSpec, ("dtypes", "mamba_cache_mode", "mamba_type", "shapes")),
    (UniformTypeKVCacheSpecs, ("kv_cache_specs",)),
    (KVConnectorBase_V1, ("_connector_metadata", "_kv_cache_config", "_vllm_config")),
    (MultiConnector, ("_connectors", "_get_connector_classes_and_configs", "_requests_to_connector")),
)  # fmt: skip
"""What kvdepot reads and calls, in addition to what it imports and overrides.

A refusal that reads a name which is gone would refuse nothing.
"""

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
_ENVIRONMENT_KERNELS: Final = ("VLLM_TUNED_CONFIG_FOLDER", "VLLM_ZENTORCH_WEIGHT_PREPACK")
"""They choose kernels, and vLLM leaves them out of the factors of its compilation cache."""


def environment_facts(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables that are set and may choose other kernels or arithmetic: vLLM's, minus those that cannot."""
    known = [name for name in compile_factors() if not _ENVIRONMENT_EXCLUDED.match(name)]
    names = (*known, *_ENVIRONMENT_BELOW, *_ENVIRONMENT_KERNELS)
    return {name: environment[name] for name in names if name in environment}


def check_version(installed: str = VLLM_VERSION) -> None:
    """Raise ConfigError if this vLLM is outside the supported range."""
    versions.check_version(installed)


def register(connector: type) -> None:
    """Make the connector known by its name: vLLM's MultiConnector looks up by it who can read a child's stats."""
    with contextlib.suppress(ValueError):  # it is known
        KVConnectorFactory.register_connector(connector.__name__, connector.__module__, connector.__name__)


def check_interface(connector: type) -> None:
    """Raise ConfigError with each name that the connector relies on, and that this vLLM has changed.

    Development builds, which have no version to check, and backports are found out here.
    """
    if problems := changes(connector):
        raise contract.refusal(VLLM_VERSION, problems)


def changes(connector: type) -> list[str]:
    """Return one sentence per change."""
    absent = {name for name, since in _SINCE.items() if versions.before(VLLM_VERSION, since)}
    problems = contract.changed_overrides(connector, _NOT_HOOKS, absent)
    for kind, names in _USED:
        if not issubclass(kind, KVConnectorBase_V1) or issubclass(connector, kind):
            problems += contract.missing_names(kind, names, absent)
    return problems


def group_kind(spec: Any) -> Kind | None:
    """Return the kind of a KV-cache group's spec, or None for an unknown one."""
    kinds = {_KINDS.get(type(layer)) for layer in iter_layer_specs(spec)}
    return kinds.pop() if len(kinds) == 1 else None


def spec_names(spec: Any) -> str:
    """Return the classes of a group's specs, for messages."""
    return ", ".join(sorted({type(layer).__name__ for layer in iter_layer_specs(spec)}))


def is_chunked_local(spec: Any) -> bool:
    return any(isinstance(layer, ChunkedLocalAttentionSpec) for layer in iter_layer_specs(spec))


def looks_ahead(spec: Any) -> bool:
    """Whether a token's KV depends on later tokens (prefix LM), so that no hash of a prefix covers it."""
    return any(getattr(layer, "non_causal", False) for layer in iter_layer_specs(spec))


def retained_below_window(spec: Any) -> int:
    """Tokens that the engine keeps before a window, and takes for loaded after a load."""
    return max(int(getattr(layer, "extra_retained_tokens", 0)) for layer in iter_layer_specs(spec))


def group_window_tokens(spec: Any) -> int:
    return int(get_kv_cache_spec_sliding_window(spec) or 0)


def in_one_shard(spec: Any) -> bool:
    """Whether tensor parallel ranks hold the same bytes, by vLLM's word of each layer: MLA's latent is in one shard.

    Of KV heads that are fewer than ranks vLLM says nothing, which it takes for not replicated itself (docs/adr/0033).
    Asked on a rank: vLLM's scheduler has the spec of one layer for a group of several.
    """
    return all(getattr(layer, "max_tp_shards", None) == 1 for layer in iter_layer_specs(spec))


def state_parts(spec: Any) -> list[tuple[str, int, bool]]:
    """Return (type, bytes, whether it is a convolution) of a recurrent state's parts, in order; empty for other layers.

    Of all parts, convolutions alone have two dimensions where vLLM allows speculative decoding.
    """
    if not isinstance(spec, MambaSpec):
        return []
    parts = zip(spec.shapes, spec.dtypes, strict=True)
    return [
        (str(dtype).removeprefix("torch."), prod(shape) * dtype.itemsize, len(shape) == 2) for shape, dtype in parts
    ]


def looks_past_blocks(group: Any) -> bool:
    """Whether vLLM marks the group as one of draft layers whose KV depends on the token after a block."""
    return bool(getattr(group, "is_eagle_group", False))


def has_drafts(group: Any) -> bool:
    """Whether vLLM marks draft layers in the group. From 0.33 on they may lie in a group with the model's own.

    Not all such groups are marked: where vLLM merges the specs of a group into one, the mark is lost. What depends on
    the drafter goes by the method of speculative decoding (`identity.speculation`).
    """
    layers = iter_layer_specs(group.kv_cache_spec)
    return looks_past_blocks(group) or any(getattr(layer, "is_draft", False) for layer in layers)


def hash_lookahead_tokens(vllm_config: Any) -> int:
    """Tokens after a block that its hash covers too. Before 0.33 there are none."""
    return int(getattr(vllm_config, "num_hash_lookahead_tokens", 0))


def has_auxiliary_outputs(vllm_config: Any) -> bool:
    """Whether it returns more of each token than the token (routed experts)."""
    return bool(getattr(getattr(vllm_config, "aux_output_config", None), "enabled", False))


def is_diffusion(vllm_config: Any) -> bool:
    """Whether the model generates by denoising blocks of tokens in which each attends to all."""
    return getattr(vllm_config, "diffusion_config", None) is not None


def replaced_scheduling(vllm_config: Any) -> list[str]:
    """Return the methods of vLLM's scheduler that the user's `scheduler_cls` replaces, or its name if it is none."""
    if vllm_config.scheduler_config.scheduler_cls is None:
        return []
    from vllm.v1.core.sched.scheduler import Scheduler

    if not issubclass(kind := vllm_config.scheduler_config.get_scheduler_cls(), Scheduler):
        return [kind.__name__]
    foreign = (base for base in kind.__mro__ if base.__module__.split(".")[0] != contract.ENGINE)
    replaced = {name for base in foreign for name in vars(base) if callable(getattr(Scheduler, name, None))}
    return sorted(name for name in replaced if not name.startswith("__") and name not in _NOT_SCHEDULING)


def replayed_tokens(spec: Any) -> int:
    """Tokens before a hit that vLLM computes again, for which it shortens what was offered."""
    return int(getattr(spec, "prefix_replay_tokens", 0))


def mamba_modes(spec: Any) -> set[str]:
    """Return the cache modes of a recurrent group's layers."""
    return {str(getattr(layer, "mamba_cache_mode", "none")) for layer in iter_layer_specs(spec)}


def mamba_types(spec: Any) -> set[str]:
    """Return vLLM's names of the kinds of a recurrent group's layers."""
    return {layer.mamba_type.name for layer in iter_layer_specs(spec)}


def hash_block_tokens(kv_cache_config: Any, vllm_config: Any) -> int:
    """Tokens per entry of `request.block_hashes`."""
    resolved = getattr(kv_cache_config, "hash_block_size", None)
    if resolved:
        return int(resolved)
    return int(resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)[1])


def block_name(block_hash: Any, group: int) -> Any:
    """Return the hash by which the block pool knows a block of one of its groups."""
    return make_block_hash_with_group_id(block_hash, group)


def event_kinds(vllm_config: Any, kv_cache_config: Any) -> list[str] | None:
    """Return vLLM's word for the kind of each group, or None if the engine publishes no KV events."""
    if not (vllm_config.kv_events_config and vllm_config.kv_events_config.enable_kv_cache_events):
        return None
    return [str(get_kv_cache_spec_kind(group.kv_cache_spec).value) for group in kv_cache_config.kv_cache_groups]


def block_stored(
    request: Any, hashes: list[Any], parent: Any, start: int, block_tokens: int, group: int, kind: str
) -> BlockStored:
    """Return the event for consecutive blocks of a request, from token `start` on, that lie in the daemon's RAM.

    Its tokens are packed: `in_tier` unpacks them.
    """
    extra_keys: list[tuple[Any, ...] | None] = []
    feature = 0
    for at in range(start, start + len(hashes) * block_tokens, block_tokens):
        keys, feature = generate_block_hash_extra_keys(request, at, at + block_tokens, feature)
        extra_keys.append(keys)
    lora = request.lora_request
    return BlockStored(
        block_hashes=[maybe_convert_block_hash(block_hash) for block_hash in hashes],
        parent_block_hash=maybe_convert_block_hash(parent) if parent is not None else None,
        token_ids=array("I", request.all_token_ids[start : start + len(hashes) * block_tokens]),
        block_size=block_tokens,
        lora_id=lora.adapter_id if lora else None,
        medium=MEDIUM_CPU,
        lora_name=lora.name if lora else None,
        extra_keys=to_event_extra_keys(extra_keys),
        group_idx=group,
        kv_cache_spec_kind=kind,
        locality="LOCAL",
    )


def in_tier(stored: BlockStored, tier: Nearest) -> BlockStored:
    """Return a `block_stored` event as it is published, for blocks in this tier."""
    return msgspec.structs.replace(stored, token_ids=list(stored.token_ids), medium=_MEDIA[tier])


def block_removed(hashes: list[Any], group: int, tier: Nearest) -> BlockRemoved:
    """Of hashes as they are in a `block_stored`."""
    return BlockRemoved(block_hashes=hashes, medium=_MEDIA[tier], group_idx=group, locality="LOCAL")


def is_removal(event: Any) -> bool:
    return isinstance(event, BlockRemoved)


def model_class(vllm_config: Any) -> type:
    """Return the class of the engine's model, which this process has loaded."""
    from vllm.model_executor.model_loader.utils import get_model_cls

    model: type = get_model_cls(vllm_config.model_config)
    return model


def adapter_manager() -> type:
    """Return the class that reads LoRA adapters in workers."""
    from vllm.lora.worker_manager import WorkerLoRAManager

    manager: type = WorkerLoRAManager
    return manager


def default_hash_seed() -> str:
    """Return the fixed seed of the sha256 hash chains if PYTHONHASHSEED is not set."""
    return str(DEFAULT_NONE_HASH_SEED)


__all__ = [
    "VLLM_VERSION",
    "CacheHitSource",
    "KVConnectorBase_V1",
    "KVConnectorFactory",
    "KVConnectorHandshakeMetadata",
    "KVConnectorMetadata",
    "KVConnectorPromMetrics",
    "KVConnectorRole",
    "KVConnectorStats",
    "KVConnectorTransferResults",
    "KVConnectorWorkerMetadata",
    "KVTransferConfig",
    "MultiConnector",
    "MultiKVConnectorStats",
    "PromMetric",
    "SupportsHMA",
    "block_name",
    "block_removed",
    "block_stored",
    "changes",
    "check_interface",
    "check_version",
    "default_hash_seed",
    "environment_facts",
    "event_kinds",
    "group_kind",
    "group_window_tokens",
    "has_auxiliary_outputs",
    "has_drafts",
    "hash_lookahead_tokens",
    "hash_block_tokens",
    "in_one_shard",
    "is_chunked_local",
    "is_diffusion",
    "looks_ahead",
    "looks_past_blocks",
    "mamba_modes",
    "mamba_types",
    "register",
    "replayed_tokens",
    "retained_below_window",
    "spec_names",
    "state_parts",
]
