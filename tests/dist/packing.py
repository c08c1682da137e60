"""Make wheel and sdist with the build backend, and compare what is in a wheel with the source tree."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tomllib
import zipfile
from configparser import ConfigParser
from pathlib import Path
from typing import Any, Final, Literal

ROOT: Final = Path(__file__).resolve().parents[2]
LAYERS: Final = ("core", "proto", "server", "client")
ASSETS: Final = "kvdepot/assets/"
"""Where files of `configs` are in a wheel."""
NOT_ASSETS: Final = ("mkdocs.yml", "deb/")
"""What makes the documents and the Debian package."""


def project(root: Path = ROOT) -> dict[str, Any]:
    """Return the table `project` of pyproject.toml."""
    table: dict[str, Any] = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    return table


def make(kind: Literal["sdist", "wheel"], root: Path, folder: Path) -> Path:
    """Build one file from the tree at `root`. Raise CalledProcessError."""
    before = set(folder.glob("*"))
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(folder)]
    subprocess.run(command, cwd=root, check=True, capture_output=True, text=True)
    (made,) = set(folder.glob("*")) - before
    return made


def unpack(sdist: Path, folder: Path) -> Path:
    """Return the only folder that is in an sdist, unpacked below `folder`."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (root,) = folder.iterdir()
    return root


def files_of(folder: Path) -> set[str]:
    """Return paths of all files below `folder`, without what Python compiled."""
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {str(path) for path in paths if "__pycache__" not in path.parts}


def problems(wheel: Path, root: Path = ROOT) -> list[str]:
    """Return what is missing in a wheel, and what should not be there."""
    name, version = project(root)["name"], project(root)["version"]
    metadata = f"{name}-{version}.dist-info/"
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if not name.endswith("/")}
        entry_points = ConfigParser()
        entry_points.read_string(archive.read(f"{metadata}entry_points.txt").decode())
    expected = {path for layer in LAYERS for path in files_of(root / layer) if path.startswith("kvdepot/")}
    expected |= {f"{ASSETS}{path}" for path in files_of(root / "configs") if not path.startswith(NOT_ASSETS)}
    expected |= {f"{metadata}{file}" for file in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")}
    found = [f"{path} is missing" for path in sorted(expected - inside)]
    found += [f"{path} should not be there" for path in sorted(inside - expected)]
    found += [f"{layer} has no py.typed" for layer in LAYERS if f"kvdepot/{layer}/py.typed" not in inside]
    if wheel.name != f"{name}-{version}-py3-none-any.whl":
        found.append(f"its name is {wheel.name}, the version is {version}")
    if dict(entry_points["console_scripts"]) != project(root)["scripts"]:
        found.append("its commands are not those of pyproject.toml")
    return found
