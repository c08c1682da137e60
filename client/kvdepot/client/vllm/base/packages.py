"""The installed packages that may compute KV, in addition to vLLM and torch, and their versions.

vLLM imports these where they are installed. The tables name the modules that it imports, and the distributions that
bring them. A test compares them with the imports of the installed vLLM.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, entry_points, version
from itertools import chain
from typing import Final

from kvdepot.client.vllm.base import plugin

ON_ANY_DEVICE: Final[Mapping[str, tuple[str, ...]]] = {
    "auto_round_kernel": ("auto-round-kernel", "auto-round-lib"),
    "kaldi_native_fbank": ("kaldi-native-fbank",),
    "timm": ("timm",),
    "torchao": ("torchao",),
    "zentorch": ("zentorch",),
}  # fmt: skip
ON_GPUS: Final[Mapping[str, tuple[str, ...]]] = {
    "PyNvVideoCodec": ("pynvvideocodec",),
    "aiter": ("aiter", "amd-aiter"),
    "b12x": ("b12x",),
    "conch": ("conch-triton-kernels",),
    "cudnn": ("nvidia-cudnn-frontend",),
    "cutlass": ("nvidia-cutlass-dsl",),
    "deep_ep": ("deep-ep",),
    "deep_gemm": ("deep-gemm",),
    "fbgemm_gpu": ("fbgemm-gpu", "fbgemm-gpu-genai"),
    "flag_gems": ("flag-gems",),
    "flash_attn": ("flash-attn", "flash-attn-3", "flash-attn-4", "flashattn-hopper"),
    "flashinfer": ("flashinfer-python", "flashinfer-jit-cache"),
    "flashinfer_cubin": ("flashinfer-cubin",),
    "flydsl": ("flydsl",),
    "gguf": ("gguf",),
    "helion": ("helion",),
    "hpc": ("hpc-ops",),
    "humming": ("humming-kernels",),
    "moonep": ("moonep",),
    "mori": ("amd-mori",),
    "nixl_ep": ("nixl-cu12", "nixl-cu13"),
    "nvidia": ("nvidia-deepstream-videodecode-cu13",),
    "nvidia_cutlass_dsl": ("nvidia-cutlass-dsl",),
    "quack": ("quack-kernels",),
    "quark": ("amd-quark",),
    "tilelang": ("tilelang",),
    "tokenspeed_mla": ("tokenspeed-mla",),
    "transformer_engine": ("transformer-engine",),
    "triton": ("pytorch-triton", "pytorch-triton-rocm", "triton", "triton-rocm"),
    "triton_kernels": ("triton-kernels",),
    "tvm_ffi": ("apache-tvm-ffi",),
    "xielu": ("xielu",),
}  # fmt: skip
_GPU_LIBRARIES: Final = (
    "flash-mla", "nvidia-cublas", "nvidia-cublas-cu12", "nvidia-cudnn", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13",
    "nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia-nvshmem-cu12", "nvidia-nvshmem-cu13",
)  # fmt: skip
"""Distributions that vLLM does not import: torch and the others load their libraries."""
_OF_PICTURES: Final = ("opencv-python", "opencv-python-headless", "pillow", "torchcodec", "torchvision")


def computing_packages() -> dict[str, str]:
    """Return the versions of packages that may compute on any device, in addition to vLLM and torch.

    transformers has models' code and the processors of pictures; plugins may replace whatever they like. kvdepot's own
    plugin replaces nothing.
    """
    plugins = {
        f"{group} {point.name}": f"{point.value} {point.dist.version if point.dist else ''}"
        for group in ("vllm.general_plugins", "vllm.platform_plugins")
        for point in entry_points(group=group)
        if point.value != plugin.ENTRY_POINT
    }
    return {"transformers": version("transformers")} | _installed(chain.from_iterable(ON_ANY_DEVICE.values())) | plugins


def gpu_packages() -> dict[str, str]:
    """Return the versions of the installed packages that compute on a GPU.

    Their kernels compute KV, reduce it over ranks, or make what a model computes with: weights and frames of videos.
    """
    return _installed(chain(*ON_GPUS.values(), _GPU_LIBRARIES))


def picture_packages() -> dict[str, str]:
    """Return the versions of the installed packages that decode and resize pictures and videos.

    vLLM names a picture by its bytes as they came, so its KV depends on them. Of sounds it names the samples.
    """
    return _installed(_OF_PICTURES)


def _installed(names: Iterable[str]) -> dict[str, str]:
    """Return distribution -> version. What is not installed adds nothing, so that it changes no namespace."""
    found: dict[str, str] = {}
    for name in names:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
