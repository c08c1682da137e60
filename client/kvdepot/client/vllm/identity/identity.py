"""The namespace of an engine: everything that can change a byte of its KV, denied by default (design.md#identity).

The whole resolved `VllmConfig` goes in, minus the paths of `EXCLUDED`, each with the
reason why it cannot change bytes. A field of a later vLLM is in until somebody decides
otherwise: too narrow a namespace is a miss, too wide a one would be wrong bytes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvdepot.client.vllm.base import compat, packages
from kvdepot.client.vllm.base.metadata import CODE, RankFacts
from kvdepot.client.vllm.identity.speculation import Speculation, speculation
from kvdepot.core.calls import Kind
from kvdepot.core.errors import ConfigError, NamespaceError
from kvdepot.core.keys import NamespaceSpec, canonical_identity
from kvdepot.core.planner import GroupSpec, Planner

if TYPE_CHECKING:
    from kvdepot.client.vllm.base.settings import Settings

_PLACE = "where files lie; their contents are in the weights digest"
_READING = "how files are read, not which"
_SEPARATE = "taken separately, in full"
_TARGET = "the engine's own, which is taken without it"
_DRAFTER = "the drafter's, which is taken where its KV or states depend on it"
_REPORTING = "logging, metrics and profiling only"
_NETWORK = "addresses and ports of this process"
_REPLICA = "which replica this is; each computes the same"
_CAPACITY = "how much cache there is, not what is in it"
_BATCH = "how steps are cut; one engine cuts the same prompt in many ways too"
_SAMPLING = "what happens after the logits"
_RUNTIME = "filled in while the engine runs"
_MULTIMODAL = "loading of inputs; their content is in the block hashes"

EXCLUDED: Final[Mapping[str, str]] = {
    "instance_id": _REPLICA,
    "observability_config": _REPORTING,
    "logging_config": _REPORTING,
    "profiler_config": _REPORTING,
    "watchdog_config": _REPORTING,
    "shutdown_timeout": "how the process ends",
    "kv_transfer_config": "this connector's own settings; chunk_tokens and tenant are fields of the namespace",
    "kv_events_config": "publishing of events",
    "ec_transfer_config": "requests with pictures are excluded where it is set",
    "ec_manager_config": _MULTIMODAL,
    "structured_outputs_config": _SAMPLING,
    "reasoning_config": _SAMPLING,
    "watermark_config": _SAMPLING,
    "aux_output_config": "further outputs of the same computation",
    "quant_config": "made from quantization, quantization_config, hf_config and files of the digested folder",
    "speculative_config.model": _PLACE,
    "speculative_config.revision": "a name of the weights, whose contents are digested",
    "speculative_config.target_model_config": _TARGET,
    "speculative_config.target_parallel_config": _TARGET,
    "speculative_config.draft_model_config": _DRAFTER,
    "speculative_config.draft_parallel_config": _DRAFTER,
    "speculative_config.draft_load_config": _DRAFTER,
    "weight_transfer_config": "how weights arrive; such an engine's epoch is random, or its user's",
    "scheduler_config": _BATCH,
    "model_config.model": _PLACE,
    "model_config.model_weights": _PLACE,
    "model_config.tokenizer": "hashes and KV are of token ids",
    "model_config.tokenizer_mode": "hashes and KV are of token ids",
    "model_config.tokenizer_revision": "hashes and KV are of token ids",
    "model_config.skip_tokenizer_init": "hashes and KV are of token ids",
    "model_config.served_model_name": "a name for clients",
    "model_config.hf_config": _SEPARATE,
    "model_config.hf_text_config": _SEPARATE,
    "model_config.hf_config_path": _PLACE,
    "model_config.hf_image_processor_config": _MULTIMODAL,
    "model_config.hf_token": "a credential",
    "model_config.encoder_config": _SEPARATE,
    "model_config.revision": "a name of the weights, whose contents are digested",
    "model_config.allowed_local_media_path": _MULTIMODAL,
    "model_config.allowed_media_domains": _MULTIMODAL,
    "model_config.max_logprobs": _SAMPLING,
    "model_config.logprobs_mode": _SAMPLING,
    "model_config.logits_processors": _SAMPLING,
    "model_config.return_sampling_mask": _SAMPLING,
    "model_config.use_fp64_gumbel": _SAMPLING,
    "model_config.generation_config": _SAMPLING,
    "model_config.override_generation_config": _SAMPLING,
    "model_config.renderer_num_workers": "threads of the front end",
    "model_config.io_processor_plugin": "inputs become tokens before they are hashed",
    "model_config.enable_sleep_mode": "where memory goes in pauses",
    "model_config.sleep_mode_backend": "where memory goes in pauses",
    "model_config.sleep_preserve_parameter_names": "where memory goes in pauses",
    "model_config.sleep_mode_offload_cudagraph": "where memory goes in pauses",
    "cache_config.gpu_memory_utilization": _CAPACITY,
    "cache_config.num_gpu_blocks": _CAPACITY,
    "cache_config.num_gpu_blocks_override": _CAPACITY,
    "cache_config.num_cpu_blocks": _CAPACITY,
    "cache_config.kv_cache_size_tokens": _CAPACITY,
    "cache_config.kv_cache_max_concurrency": _CAPACITY,
    "cache_config.kv_cache_memory_bytes": _CAPACITY,
    "cache_config.simple_cpu_offload_num_blocks": _CAPACITY,
    "cache_config.kv_offloading_size": _CAPACITY,
    "cache_config.kv_offloading_backend": _CAPACITY,
    "cache_config.enable_prefix_caching": "whether the engine keeps what it has computed",
    "cache_config.prefix_cache_retention_interval": "which checkpoints are kept, not what is in one",
    "cache_config.enable_mamba_shared_prefix_checkpoint": "which checkpoints are kept, not what is in one",
    "cache_config.user_specified_block_size": "who chose the block size",
    "parallel_config.data_parallel_rank": _REPLICA,
    "parallel_config.data_parallel_rank_local": _REPLICA,
    "parallel_config.data_parallel_index": _REPLICA,
    "parallel_config.data_parallel_size_local": _REPLICA,
    "parallel_config.data_parallel_master_ip": _NETWORK,
    "parallel_config.data_parallel_rpc_port": _NETWORK,
    "parallel_config.data_parallel_master_port": _NETWORK,
    "parallel_config.data_parallel_backend": _NETWORK,
    "parallel_config.data_parallel_external_lb": _NETWORK,
    "parallel_config.data_parallel_hybrid_lb": _NETWORK,
    "parallel_config.master_addr": _NETWORK,
    "parallel_config.master_port": _NETWORK,
    "parallel_config.placement_group": _NETWORK,
    "parallel_config.ray_runtime_env": _NETWORK,
    "parallel_config.ray_workers_use_nsight": _REPORTING,
    "parallel_config.rank": "this process's; parts of every rank have their own place",
    "parallel_config.distributed_executor_backend": "how processes are started",
    "parallel_config.max_parallel_loading_workers": "how weights are read",
    "parallel_config.disable_nccl_for_dp_synchronization": "how replicas agree on the length of a step",
    "parallel_config.distributed_timeout_seconds": _NETWORK,
    "parallel_config.cpu_distributed_timeout_seconds": _NETWORK,
    "parallel_config.numa_bind": "where threads run",
    "parallel_config.numa_bind_nodes": "where threads run",
    "parallel_config.numa_bind_cpus": "where threads run",
    "parallel_config.assigned_physical_gpu_ids": "which of equal devices; its model is in the worker's facts",
    "parallel_config.fault_tolerance_config": "of enable_fault_tolerance, which is refused",
    "parallel_config.enable_fault_tolerance": "refused where it is on",
    "device_config.device": "the worker's facts say what it computes with",
    "load_config.download_dir": _PLACE,
    "load_config.safetensors_load_strategy": _READING,
    "load_config.safetensors_prefetch_num_threads": _READING,
    "load_config.safetensors_prefetch_block_size": _READING,
    "load_config.device": _READING,
    "load_config.use_tqdm_on_load": _REPORTING,
    "load_config.pt_load_map_location": _READING,
    "offload_config": "where weights lie",
    "compilation_config.debug_dump_path": _REPORTING,
    "compilation_config.cache_dir": "where compiled code is kept",
    "compilation_config.local_cache_dir": "where compiled code is kept",
    "compilation_config.compile_cache_save_format": "where compiled code is kept",
    "compilation_config.compile_ranges_endpoints": _BATCH,
    "compilation_config.cudagraph_capture_sizes": _BATCH,
    "compilation_config.max_cudagraph_capture_size": _BATCH,
    "compilation_config.enabled_custom_ops": _RUNTIME,
    "compilation_config.disabled_custom_ops": _RUNTIME,
    "compilation_config.traced_files": _RUNTIME,
    "compilation_config.compilation_time": _RUNTIME,
    "compilation_config.encoder_compilation_time": _RUNTIME,
    "compilation_config.static_forward_context": _RUNTIME,
    "compilation_config.static_all_moe_layers": _RUNTIME,
    "compilation_config.bs_to_padded_graph_size": _RUNTIME,
    "compilation_config.inductor_passes": "code by name, which the vLLM version covers",
}

_AS_BEFORE: Final[Mapping[str, str]] = {
    "parallel_config.disable_nccl_for_dp_synchronization": "true",
    "speculative_config": "null",
}
"""Of what is left out: the texts that most engines had before it was. So they find what they have stored."""

STORED_FAULTS: Final = (
    "blocks of a preempted step, which vLLM has named and nobody has computed",
    "KV of packages that the namespace did not name, for engines that do not have them",
    "KV of weights that were reloaded in place, under the digest of the former ones",
    "KV of weights that were zeroed, or loaded by a worker extension, under the same digest",
)
"""Wrong bytes that connectors stored under right keys, until they were taught not to. Only append (docs/adr/0096).

Nothing tells such an object from a sound one. So each entry begins other namespaces: what older connectors have stored,
and store still on other nodes, is a miss.
"""

_PRIVATE_HF: Final = ("_name_or_path", "transformers_version", "_attn_implementation_autoset", "_commit_hash")
"""Keys of a model's own config that say where it came from, not what it is."""


def engine_identity(vllm_config: Any, drafting: Speculation | None = None, *, states: bool = False) -> dict[str, str]:
    """Return the resolved configuration as {path: canonical text}.

    Args:
        vllm_config: The engine's.
        drafting: Its speculative decoding.
        states: Whether the model has recurrent states: their layout depends on the number of draft tokens.

    Raises:
        NamespaceError: for values without a canonical text.
    """
    if "quantization_config_file" in _overrides(vllm_config):
        raise NamespaceError(
            "hf_overrides.quantization_config_file", "what it says is not known here",
            advice="put its contents into the model's config.json",
        )  # fmt: skip
    excluded = {*EXCLUDED, *_unset_and_private(vllm_config)}
    identity = dict(_AS_BEFORE)
    if drafting is not None and (drafting.keeps_kv or states):
        del identity["speculative_config"]
    else:
        excluded.add("speculative_config")  # drafts of tokens change no byte, whatever they guess
    identity |= canonical_identity(vllm_config, exclude=excluded, convert=_plain) | _model_identity(
        vllm_config.model_config
    )
    if drafting is not None and drafting.keeps_kv:
        identity |= _draft_identity(vllm_config.speculative_config)
        identity["lookahead_tokens"] = str(drafting.lookahead_tokens)
    return identity


def _model_identity(model: Any) -> dict[str, str]:
    identity = _prefixed("hf_config", canonical_identity(_hf(model.hf_config), convert=_plain))
    if model.hf_text_config is not model.hf_config:
        identity |= _prefixed("hf_text_config", canonical_identity(_hf(model.hf_text_config), convert=_plain))
    if model.multimodal_config is not None:
        identity |= _prefixed("package", packages.picture_packages())
    return identity


def _draft_identity(speculative: Any) -> dict[str, str]:
    """Return what the drafter is, with the exclusions of the engine's own model."""
    # By the names that the parts have in a VllmConfig, so that the same paths are excluded.
    drafter = _Drafter(speculative.draft_model_config, speculative.draft_parallel_config, speculative.draft_load_config)
    excluded = {*EXCLUDED, *_unset_and_private(drafter), "model_config.hf_overrides"}
    identity = canonical_identity(drafter, exclude=excluded, convert=_plain)
    model = _model_identity(drafter.model_config)
    # EAGLE's configuration holds that of a model, with private keys of its own.
    identity |= {path: text for path, text in model.items() if path.rpartition(".")[2] not in _PRIVATE_HF}
    return _prefixed("drafter", identity)


@dataclass
class _Drafter:
    model_config: Any  # vLLM makes its hf_overrides from the engine's own
    parallel_config: Any
    load_config: Any  # None: the engine's own


def _overrides(vllm_config: Any) -> Mapping[str, Any]:
    overrides = vllm_config.model_config.hf_overrides
    return overrides if isinstance(overrides, Mapping) else {}


def _prefixed(prefix: str, identity: Mapping[str, str]) -> dict[str, str]:
    return {f"{prefix}.{path}": text for path, text in identity.items()}


def _hf(config: Any) -> dict[str, Any]:
    return {key: value for key, value in config.to_dict().items() if key not in _PRIVATE_HF}


def _unset_and_private(vllm_config: Any) -> list[str]:
    """Paths of the parts' private fields: bookkeeping of their classes, as ports already drawn."""
    missing = []
    for name, part in vars(vllm_config).items():
        fields = getattr(type(part), "__dataclass_fields__", {})
        missing += [f"{name}.{field}" for field in fields if field.startswith("_") or not hasattr(part, field)]
    return missing


def _plain(value: object) -> object:
    """Foreign values as text that says the same in every process."""
    module = type(value).__module__
    if module == "torch" and type(value).__name__ in ("dtype", "device"):
        return str(value)
    to_dict = getattr(value, "to_dict", None)
    if callable(to_dict) and module.startswith(("transformers.", "vllm.transformers_utils.")):
        return _hf(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    return value


def rank_identity(facts: Sequence[RankFacts]) -> dict[str, str]:
    """Return what the ranks know, without the name of this host."""
    plain = [{"rank": rank.rank, "layers": rank.layers, "software": dict(rank.software)} for rank in facts]
    return _prefixed("ranks", canonical_identity(plain))


def check_ranks(facts: Sequence[RankFacts], world_size: int) -> str:
    """Why these ranks cannot be served together; empty if they can."""
    if any(rank.code != CODE for rank in facts):
        return "kvdepot was replaced on the disk while the engine started: restart the engine"
    problems = [f"rank {rank.rank}: {rank.problem}" for rank in facts if rank.problem]
    if problems:
        return "; ".join(problems)
    if sorted(rank.rank for rank in facts) != list(range(world_size)):
        return f"ranks {sorted(rank.rank for rank in facts)} have reported, {world_size} were expected"
    if len({rank.boot_id for rank in facts}) > 1:
        return "ranks run on several hosts: keep an engine on one node"
    return ""


def group_specs(
    kv_cache_config: Any, group_ids: Sequence[int], facts: Sequence[RankFacts], parallel_config: Any
) -> tuple[GroupSpec, ...]:
    """Return the planner's view of the engine's groups, with the sizes that the ranks measured.

    Only the ranks know all layers of a group (docs/adr/0033). Stages of a pipeline have other layers each.
    """
    specs = []
    ordered = sorted(facts, key=lambda rank: rank.rank)
    alike = parallel_config.tensor_parallel_size > 1 and parallel_config.pipeline_parallel_size == 1
    for group, engine_group in enumerate(group_ids):
        spec = kv_cache_config.kv_cache_groups[engine_group].kv_cache_spec
        kind = compat.group_kind(spec)
        assert kind is not None  # refused at start
        replicated = alike and all(group in rank.one_shard_groups for rank in ordered)
        sizes = tuple(sum(layer.block_bytes for layer in rank.layers if layer.group == group) for rank in ordered)
        layers = {layer.name: None for rank in ordered for layer in rank.layers if layer.group == group}
        specs.append(
            GroupSpec(
                kind=kind,
                block_tokens=int(spec.block_size),
                window_tokens=compat.group_window_tokens(spec) if kind is Kind.WINDOW else 0,
                rank_block_bytes=sizes[:1] if replicated else sizes,
                replicated=replicated,
                layers=tuple(layers),
            )
        )
    return tuple(specs)


def check_geometry(vllm_config: Any, kv_cache_config: Any, group_ids: Sequence[int], settings: Settings) -> None:
    """Raise what `engine_planner` will raise, before any rank has measured its layers."""
    specs = [kv_cache_config.kv_cache_groups[engine_group].kv_cache_spec for engine_group in group_ids]
    groups = []
    for spec in specs:
        kind = compat.group_kind(spec)
        assert kind is not None  # refused before
        window = compat.group_window_tokens(spec) if kind is Kind.WINDOW else 0
        groups.append(GroupSpec(kind, int(spec.block_size), window, (int(spec.page_size_bytes),)))
    engine_planner(vllm_config, kv_cache_config, groups, settings)


def engine_planner(vllm_config: Any, kv_cache_config: Any, groups: Sequence[GroupSpec], settings: Settings) -> Planner:
    """Return the engine's planner. Raise PlannerError for a bad geometry, ConfigError for too coarse hashes.

    vLLM pads a request with one token left to a row of drafts, and computes a wrong state from it (docs/adr/0061).
    """
    padded = speculation(vllm_config) is not None and any(group.kind is Kind.STATE for group in groups)
    planner = Planner(
        groups,
        settings.chunk_tokens,
        retention_interval=kv_cache_config.prefix_cache_retention_interval,
        context_tokens=vllm_config.model_config.max_model_len,
        computed_tokens_min=2 if padded else 1,
    )
    hash_block = compat.hash_block_tokens(kv_cache_config, vllm_config)
    if planner.chunk_tokens % hash_block:
        raise ConfigError(
            "kv_connector_extra_config",
            "chunk_tokens",
            f"{planner.chunk_tokens} is no multiple of {hash_block}, the engine's hash block",
        )
    return planner


def namespace_spec(
    vllm_config: Any,
    kv_cache_config: Any,
    planner: Planner,
    facts: Sequence[RankFacts],
    settings: Settings,
    weights: dict[str, str],
) -> NamespaceSpec:
    """Return everything together; the epoch is added by its owner. Raise ConfigError or NamespaceError.

    `weights`: the digest or the name of the engine's weights, and of its drafter's if these are others.
    """
    drafting = speculation(vllm_config)
    states = any(compat.group_kind(group.kv_cache_spec) is Kind.STATE for group in kv_cache_config.kv_cache_groups)
    hashes = {
        "algorithm": str(vllm_config.cache_config.prefix_caching_hash_algo),
        "block_tokens": compat.hash_block_tokens(kv_cache_config, vllm_config),
        "seed": _hash_seed(),
    }
    identity = (
        _prefixed("engine", engine_identity(vllm_config, drafting, states=states))
        | rank_identity(facts)
        | _prefixed("hashes", canonical_identity(hashes))
        | weights
        | {"vllm": compat.VLLM_VERSION, "block_bytes": "in memory order", "stored_faults": str(len(STORED_FAULTS))}
    )
    architectures = getattr(vllm_config.model_config.hf_config, "architectures", None) or ["unknown"]
    label = f"{architectures[0]} {str(vllm_config.model_config.dtype).removeprefix('torch.')}"
    return NamespaceSpec(
        identity=identity,
        chunk_tokens=planner.chunk_tokens,
        groups=planner.groups,
        object_bytes={kind: planner.object_bytes(kind) for kind in planner.kinds},
        label=label[:96],
        tenant=settings.tenant,
    )


def _hash_seed() -> str:
    """Return the seed of the engine's hash chain: fixed, or PYTHONHASHSEED."""
    return os.environ.get("PYTHONHASHSEED", compat.default_hash_seed())
