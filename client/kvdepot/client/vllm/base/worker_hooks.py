"""What kvdepot wraps in vLLM's workers: vLLM tells connectors nothing of what these methods do."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, Final

from kvdepot.client.vllm.base import compat, contract, versions
from kvdepot.core.errors import ConfigError

CHANGE_WEIGHTS: Final = (
    "reload_weights", "reset_weights", "start_weight_update", "update_weights", "finish_weight_update",
)  # fmt: skip
"""Methods of a worker."""
_READS_ADAPTER: Final = "_load_adapter"


def wrap_once(kind: type, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a method by what `wrap` makes of it, unless a connector of this process has done so."""
    method = getattr(kind, name)
    if not hasattr(method, "kvdepot_wraps"):
        wrapped = functools.wraps(method)(wrap(method))
        wrapped.kvdepot_wraps = True  # type: ignore[attr-defined]  # any function may have more attributes
        setattr(kind, name, wrapped)


def worker_class() -> type | None:
    """Return the class of this process's workers, None if it has none. Raise ConfigError."""
    worker: type | None = getattr(sys.modules.get("vllm.v1.worker.gpu_worker"), "Worker", None)
    missing = [name for name in CHANGE_WEIGHTS if worker is not None and not hasattr(worker, name)]
    if missing:
        raise ConfigError(
            "vllm", "version", f"the workers of {compat.VLLM_VERSION} have no {', '.join(missing)}",
            advice=f"use vLLM {versions.RANGE}",
        )  # fmt: skip
    return worker


def adapter_loader() -> tuple[type, str]:
    """Return the class and its method that reads a LoRA adapter's files in a worker. Raise ConfigError."""
    try:
        loader = compat.adapter_manager()
        if contract.arguments(getattr(loader, _READS_ADAPTER)) == ["self", "lora_request"]:
            return loader, _READS_ADAPTER
    except (ImportError, AttributeError):
        pass
    raise ConfigError(
        "vllm", "enable_lora", f"{compat.VLLM_VERSION} does not read adapters in WorkerLoRAManager.{_READS_ADAPTER}",
        advice=f"use vLLM {versions.RANGE}, or serve no LoRA adapters with this kvdepot",
    )  # fmt: skip
