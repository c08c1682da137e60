"""The installed packages that may compute KV, in addition to vLLM and torch, and their versions."""

from __future__ import annotations

import contextlib
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Final

from kvdepot.client.vllm.base import plugin

_GPU_PACKAGES: Final = (
    "aiter", "amd-aiter", "apache-tvm-ffi", "deep-gemm", "flash-attn", "flash-attn-3", "flash-attn-4",
    "flashattn-hopper", "flashinfer-cubin", "flashinfer-jit-cache", "flashinfer-python", "flash-mla",
    "nvidia-cublas", "nvidia-cublas-cu12", "nvidia-cudnn", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13",
    "nvidia-cudnn-frontend", "nvidia-cutlass-dsl", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia-nvshmem-cu12",
    "nvidia-nvshmem-cu13", "pytorch-triton", "pytorch-triton-rocm", "quack-kernels", "tilelang", "triton",
    "triton-rocm",
)  # fmt: skip


def computing_packages() -> dict[str, str]:
    """Return the versions of packages that may compute, in addition to vLLM and torch.

    transformers has models' code and the processors of pictures; plugins may replace whatever they like. kvdepot's own
    plugin replaces nothing.
    """
    plugins = {
        f"{group} {point.name}": f"{point.value} {point.dist.version if point.dist else ''}"
        for group in ("vllm.general_plugins", "vllm.platform_plugins")
        for point in entry_points(group=group)
        if point.value != plugin.ENTRY_POINT
    }
    return {"transformers": version("transformers")} | plugins


def gpu_packages() -> dict[str, str]:
    """Return the versions of the installed packages whose kernels compute KV, or reduce it over ranks, on a GPU."""
    found: dict[str, str] = {}
    for name in _GPU_PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
