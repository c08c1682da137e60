"""Starting a rank's worker side, and giving it other KV caches: its layers, its facts, its copying thread."""

from __future__ import annotations

import logging
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from kvdepot.client.copy.backend import Way
from kvdepot.client.copy.base import CopyError
from kvdepot.client.copy.device import DeviceCopier
from kvdepot.client.vllm.base import compat, packages
from kvdepot.client.vllm.base.metadata import RankFacts
from kvdepot.client.vllm.worker.audit import Audit
from kvdepot.client.vllm.worker.copy_thread import Attached, CopyThread
from kvdepot.client.vllm.worker.layers import LayoutError, RankLayers, rank_layers
from kvdepot.client.vllm.worker.worker import WorkerSide

if TYPE_CHECKING:
    from kvdepot.client.copy.base import BlockCopier
    from kvdepot.client.vllm.base.guard import Failures
    from kvdepot.client.vllm.base.settings import Settings

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def start_rank(
    rank: int,
    kv_caches: dict[str, Any],
    kv_cache_config: Any,
    group_ids: Sequence[int],
    attachment: Attached,
    settings: Settings,
    failures: Failures,
) -> tuple[WorkerSide, RankFacts]:
    """Start a rank's worker side. If its memory cannot be copied, its facts say why, and nothing is stored."""
    layers, copies, audit, problem = _memory(
        rank, kv_caches, kv_cache_config, group_ids, attachment, settings, failures
    )
    facts = _facts(rank, layers, problem, _one_shard_groups(kv_cache_config, group_ids))
    return WorkerSide(rank, attachment, copies, layers, audit, facts.digest), facts


def replace_caches(
    side: WorkerSide,
    facts: RankFacts,
    kv_caches: dict[str, Any],
    kv_cache_config: Any,
    group_ids: Sequence[int],
    settings: Settings,
    failures: Failures,
) -> RankFacts:
    """Take the KV caches that the engine names again. The same ones change nothing. Return the present facts."""
    try:
        if side.has(rank_layers(kv_caches, kv_cache_config, group_ids)):
            return facts
    except LayoutError:
        pass  # `_memory` reports it
    if side.copies_on_device:
        # The former copies still have the arena pinned, and the self-test takes blocks that hold nothing.
        problem = "the engine has other KV caches than at its start: copies on GPUs do not follow that"
        facts = _facts(facts.rank, RankLayers((), ()), problem)
        side.replace(None, RankLayers((), ()), None, facts.digest)
        return facts
    layers, copies, audit, problem = _memory(
        facts.rank, kv_caches, kv_cache_config, group_ids, side.attachment, settings, failures
    )
    facts = _facts(facts.rank, layers, problem, _one_shard_groups(kv_cache_config, group_ids))
    side.replace(copies, layers, audit, facts.digest)
    return facts


def _memory(
    rank: int,
    kv_caches: dict[str, Any],
    kv_cache_config: Any,
    group_ids: Sequence[int],
    attachment: Attached,
    settings: Settings,
    failures: Failures,
) -> tuple[RankLayers, CopyThread | None, Audit | None, str]:
    """Return what copies these caches, or the problem if nothing can."""
    layers = RankLayers((), ())
    try:
        layers = rank_layers(kv_caches, kv_cache_config, group_ids)
        copier = _copier(layers.views, settings, failures.logger)
        audit = Audit(settings.audit_path, rank, layers) if settings.audit_path else None
    except (LayoutError, CopyError, OSError) as error:
        return layers, None, None, str(error)
    device = isinstance(copier, DeviceCopier)
    read_back = settings.verify_first_loads if device else 0
    copies = CopyThread(
        attachment, copier, failures, audit=audit, read_back=read_back, verify_loads=settings.verify_loads
    )
    problem = copies.prove() if device else ""
    if problem:
        copies.close()
        return layers, None, audit, problem
    return layers, copies, audit, ""


def _facts(rank: int, layers: RankLayers, problem: str, one_shard_groups: tuple[int, ...] = ()) -> RankFacts:
    boot_id = _BOOT_ID.read_text().strip()
    return RankFacts(rank, boot_id, layers.facts, software_facts(layers), problem, one_shard_groups)


def _one_shard_groups(kv_cache_config: Any, group_ids: Sequence[int]) -> tuple[int, ...]:
    specs = (kv_cache_config.kv_cache_groups[engine_group].kv_cache_spec for engine_group in group_ids)
    return tuple(group for group, spec in enumerate(specs) if compat.in_one_shard(spec))


def _copier(views: Sequence[torch.Tensor], settings: Settings, log: logging.Logger) -> BlockCopier:
    """Return the copier for these layers. Raise CopyError if this rank's memory cannot be copied."""
    devices = {view.device for view in views}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise CopyError(f"the KV caches of one rank lie on several devices ({names}): expected one")
    kind = next(iter(devices)).type if devices else "cpu"
    if kind == "cpu":
        return _cpu_copier(views)
    if kind != "cuda":  # AMD's GPUs have this name too
        raise CopyError(f"copies to and from {kind} devices are not supported: only CPUs, and GPUs by CUDA or ROCm")
    from kvdepot.client.copy.cuda import CudaDevice

    way = None if settings.cuda_copies == "auto" else Way(settings.cuda_copies)
    in_background = settings.pin != "off"
    return DeviceCopier(views, CudaDevice(devices.pop()), log, way=way, pin_in_background=in_background)


def _cpu_copier(views: Sequence[torch.Tensor]) -> BlockCopier:
    """Return the copier for CPUs. Raise CopyError.

    It is imported here, because it takes a second to compile, and ranks on GPUs do not need it.
    """
    try:
        from kvdepot.client.copy.cpu import CpuCopier
    except ImportError as error:  # also of a numba that does not go with this numpy
        raise CopyError(f"copies on CPUs need numba, as vLLM does: {error}") from error
    return CpuCopier(views)


def software_facts(layers: RankLayers) -> tuple[tuple[str, str], ...]:
    """Return what computes the bytes: library, device and instruction set choose the kernels."""
    device = layers.views[0].device if layers.views else torch.device("cpu")
    facts = {"torch": str(torch.__version__), "device": device.type, "machine": platform.machine()}
    facts |= {f"environment.{name}": value for name, value in compat.environment_facts().items()}
    facts |= {f"package.{name}": version for name, version in packages.computing_packages().items()}
    facts["float32_matmul"] = torch.get_float32_matmul_precision()
    if device.type == "cpu":
        facts["instruction_set"] = torch.backends.cpu.get_cpu_capability()
        # vLLM chooses the layout of its blocks by these: with AMX another one, of the same shape.
        names = (name for name in dir(torch.cpu) if name.startswith("_is_") and name.endswith("_supported"))
        facts |= {f"instructions.{name}": str(getattr(torch.cpu, name)()) for name in names}
    elif device.type == "cuda":
        facts["device_name"] = torch.cuda.get_device_name(device)
        facts["capability"] = ".".join(map(str, torch.cuda.get_device_capability(device)))
        facts["cuda"] = str(torch.version.cuda)
        facts["hip"] = str(torch.version.hip)
        facts |= {f"package.{name}": version for name, version in packages.gpu_packages().items()}
    return tuple(sorted(facts.items()))
