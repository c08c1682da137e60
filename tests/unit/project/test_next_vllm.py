"""The sources of another vLLM, for `make test-next`: made once, of what runs without its kernels."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.next_vllm import sources
from tests.next_vllm.__main__ import main

METADATA = "Metadata-Version: 2.4\nName: vllm\nVersion: {}\nSummary: Version: 0\n"


@pytest.fixture
def downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The versions that were fetched, from an index that has all of them."""
    fetched: list[str] = []
    installed = tmp_path / "installed"
    (installed / "sub").mkdir(parents=True)
    (installed / "_C.abi3.so").write_bytes(b"kernels")
    (installed / "sub" / "more.so").write_bytes(b"kernels")

    def download(version: str, folder: Path) -> Path:
        fetched.append(version)
        folder.mkdir()
        wheel = folder / f"vllm-{version}-cp38-abi3-manylinux_2_28_x86_64.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("vllm/__init__.py", f"__version__ = {version!r}\n")
            archive.writestr("vllm/v1/request.py", "")
            archive.writestr("vllm/_C.abi3.so", b"other kernels")
            archive.writestr("vllm/kernels/config.json", "{}")
            archive.writestr("other/module.py", "")
            archive.writestr("../outside.py", "")
            archive.writestr(f"vllm-{version}.dist-info/METADATA", METADATA.format(version))
        return wheel

    monkeypatch.setattr(sources, "FOLDERS", tmp_path / "folders")
    monkeypatch.setattr(sources, "_installed", lambda: installed)
    monkeypatch.setattr(sources, "_download", download)
    return fetched


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


def test_python_files_and_metadata_are_kept_with_the_installed_kernels(tmp_path: Path, downloads: list[str]) -> None:
    folder = sources.ready("0.33.0")
    assert files(folder) == {
        "vllm/__init__.py", "vllm/v1/request.py", "vllm/_C.abi3.so", "vllm/sub/more.so",
        "vllm-0.33.0+cpu.dist-info/METADATA", "stamp.json",
    }  # fmt: skip
    assert (folder / "vllm" / "_C.abi3.so").read_bytes() == b"kernels"
    assert not [*tmp_path.rglob("*.whl")], "the wheel is not kept"
    assert not [*tmp_path.rglob("outside.py")]


def test_the_version_makes_it_a_build_for_cpus(downloads: list[str]) -> None:
    metadata = sources.ready("0.33.0") / "vllm-0.33.0+cpu.dist-info" / "METADATA"
    assert metadata.read_text() == METADATA.format("0.33.0+cpu")


def test_a_folder_is_made_once_and_again_when_what_it_depends_on_changes(
    downloads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sources.ready("0.33.0") == sources.ready("0.33.0")
    assert downloads == ["0.33.0"]
    monkeypatch.setattr(sources, "RECIPE", -1)
    sources.ready("0.33.0")
    sources.ready("0.34.0")
    assert downloads == ["0.33.0", "0.33.0", "0.34.0"]


def test_a_folder_that_was_left_half_made_is_made_again(downloads: list[str]) -> None:
    folder = sources.ready("0.33.0")
    (folder / sources.STAMP).write_text("{")
    (folder / "vllm" / "left_over.py").touch()
    assert "vllm/left_over.py" not in files(sources.ready("0.33.0"))


@pytest.mark.parametrize(("version", "widened"), [("0.33.2", False), ("0.34.0", True), ("0.31.0", True)])
def test_tests_run_on_versions_that_kvdepot_refuses(downloads: list[str], version: str, widened: bool) -> None:
    folder = sources.ready(version)
    assert (folder / "sitecustomize.py").exists() is widened
    check = f"from kvdepot.client.vllm.base import versions; versions.check_version({version!r})"
    subprocess.run([sys.executable, "-c", check], env=sources.environment(folder), check=True)


def test_a_version_without_a_wheel_is_said_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def pip(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        said = "ERROR: Could not find a version\nERROR: No matching distribution found for vllm==0.99.0\n"
        return subprocess.CompletedProcess(command, 1, "", said)

    monkeypatch.setattr(sources, "FOLDERS", tmp_path)
    monkeypatch.setattr(subprocess, "run", pip)
    assert main("0.99.0", "never", "run") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("test-next: no wheel of vLLM 0.99.0") and "No matching distribution" in line
    assert not [*tmp_path.iterdir()]
