"""Starting a rank's worker side, and giving it other KV caches: its layers, its facts, its copying thread."""

from __future__ import annotations

import logging
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from kvdepot.client.copy.base import CopyError
from kvdepot.client.copy.device import DeviceCopier
from kvdepot.client.vllm import compat
from kvdepot.client.vllm.audit import Audit
from kvdepot.client.vllm.layers import LayoutError, RankLayers, rank_layers
from kvdepot.client.vllm.metadata import RankFacts
from kvdepot.client.vllm.worker import Attached, CopyThread, WorkerSide

if TYPE_CHECKING:
    from kvdepot.client.copy.base import BlockCopier
    from kvdepot.client.vllm.guard import Failures
    from kvdepot.client.vllm.settings import Settings

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
    """A rank whose memory cannot be copied is started too: it says why, and the engine goes on without kvdepot."""
    layers, copies, audit, problem = _memory(
        rank, kv_caches, kv_cache_config, group_ids, attachment, settings, failures
    )
    facts = _facts(rank, layers, problem)
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
    """The engine names its KV caches again: nothing happens where they are the same. Returns what is true now."""
    try:
        if side.has(rank_layers(kv_caches, kv_cache_config, group_ids)):
            return facts
    except LayoutError:
        pass  # said below
    layers, copies, audit, problem = _memory(
        facts.rank, kv_caches, kv_cache_config, group_ids, side.attachment, settings, failures
    )
    facts = _facts(facts.rank, layers, problem)
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
    """What copies these caches, and the problem where nothing can."""
    layers = RankLayers((), ())
    try:
        layers = rank_layers(kv_caches, kv_cache_config, group_ids)
        copier = _copier(layers.views, settings, failures.logger)
        audit = Audit(settings.audit_path, rank, layers) if settings.audit_path else None
    except (LayoutError, CopyError, OSError) as error:
        return layers, None, None, str(error)
    return layers, CopyThread(attachment, copier, failures, audit=audit), audit, ""


def _facts(rank: int, layers: RankLayers, problem: str) -> RankFacts:
    return RankFacts(rank, _BOOT_ID.read_text().strip(), layers.facts, software_facts(layers), problem)


def _copier(views: Sequence[torch.Tensor], settings: Settings, log: logging.Logger) -> BlockCopier:
    """Raises CopyError where this rank's memory cannot be copied."""
    devices = {view.device for view in views}
    if len(devices) != 1 or next(iter(devices)).type != "cuda":
        return _cpu_copier(views)
    if not settings.experimental_cuda:
        raise CopyError(
            "copies on GPUs have been tested on stand-ins only, not yet on one; experimental_cuda = true uses them"
        )
    from kvdepot.client.copy.cuda import CudaDevice

    return DeviceCopier(views, CudaDevice(devices.pop()), log)


def _cpu_copier(views: Sequence[torch.Tensor]) -> BlockCopier:
    """Imported here: it takes a second to compile, which ranks on GPUs need not wait for. Raises CopyError."""
    try:
        from kvdepot.client.copy.cpu import CpuCopier
    except ImportError as error:  # also of a numba that does not go with this numpy
        raise CopyError(f"copies on CPUs need numba, as vLLM does: {error}") from error
    return CpuCopier(views)


def software_facts(layers: RankLayers) -> tuple[tuple[str, str], ...]:
    """What computes the bytes: kernels are chosen by library, device and instruction set."""
    device = layers.views[0].device if layers.views else torch.device("cpu")
    facts = {"torch": str(torch.__version__), "device": device.type, "machine": platform.machine()}
    facts |= {f"environment.{name}": value for name, value in compat.environment_facts().items()}
    facts |= {f"package.{name}": version for name, version in compat.computing_packages().items()}
    facts["float32_matmul"] = torch.get_float32_matmul_precision()
    if device.type == "cpu":
        facts["instruction_set"] = torch.backends.cpu.get_cpu_capability()
        # vLLM chooses the layout of its blocks by these: with AMX another one, of the same shape.
        names = (name for name in dir(torch.cpu) if name.startswith("_is_") and name.endswith("_supported"))
        facts |= {f"instructions.{name}": str(getattr(torch.cpu, name)()) for name in names}
    elif device.type == "cuda":
        facts["device_name"] = torch.cuda.get_device_name(device)
        facts["cuda"] = str(torch.version.cuda)
    return tuple(sorted(facts.items()))
