"""Step 0: what the figures depend on."""

from __future__ import annotations

import mmap
import platform
import re
import resource
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from kvdepot.client.copy.driver import load_driver

from benchmarks import report
from benchmarks.day_one.numa import numa
from benchmarks.day_one.steps import Context

_PACKAGES = ("torch", "triton", "numpy", "xxhash", "vllm", "grpcio", "pydantic", "numcodecs", "lz4")
_NONE = "none"


def facts(context: Context) -> None:
    """Note the machine, its memory, and the device with its link."""
    for key, value in report.machine().items():
        context.note(key, value)
    context.note("python", platform.python_version())
    context.note("packages", ", ".join(f"{name} {_version(name)}" for name in _PACKAGES))
    context.note("page", f"{mmap.PAGESIZE} bytes")
    context.note("memlock", resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])
    for name in ("enabled", "shmem_enabled"):
        context.note(f"transparent huge pages, {name}", _read(f"/sys/kernel/mm/transparent_hugepage/{name}"))
    context.note("hugetlbfs pages free", _read("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages"))
    context.note("numa nodes", _read("/sys/devices/system/node/online"))
    numa(context)
    context.note("compute-sanitizer", shutil.which("compute-sanitizer") or _NONE)
    context.note("device", context.machine.name)
    if context.machine.stands_in:
        context.note("a stand-in", "no figure of this run says anything about a GPU")
        return
    _device(context)


def _device(context: Context) -> None:
    properties = torch.cuda.get_device_properties(context.machine.device)
    context.note("devices", torch.cuda.device_count())
    context.note("capability", ".".join(map(str, torch.cuda.get_device_capability(context.machine.device))))
    context.note("device memory", f"{properties.total_memory / 2**30:.1f} GiB")
    context.note("torch's CUDA", torch.version.cuda)
    driver = re.search(r"\d+\.\d+(\.\d+)?", _read("/proc/driver/nvidia/version"))
    context.note("driver", driver[0] if driver else "unknown")
    context.note("batch call", load_driver(hip=torch.version.hip is not None).has_batches)
    numbers = [getattr(properties, name, None) for name in ("pci_domain_id", "pci_bus_id", "pci_device_id")]
    domain, bus, device = numbers
    if domain is None or bus is None or device is None:
        context.note("link", "unknown: this torch does not say where the device is")
        return
    place = Path("/sys/bus/pci/devices") / f"{domain:04x}:{bus:02x}:{device:02x}.0"
    context.note("link", f"{_read(place / 'current_link_speed')}, width {_read(place / 'current_link_width')}")
    context.note("numa node of the device", _read(place / "numa_node"))


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return _NONE


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return "unknown"
