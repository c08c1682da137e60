"""The files of a release: the same wheel from tree and sdist, whole, and a service without the source tree."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from tests.dist.installed import Installed, check_service
from tests.dist.packing import LAYERS, ROOT, files_of, make, problems, project, unpack
from tests.rigs.systemd import NEEDS_SYSTEMD


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(tmp_path_factory.mktemp("venv"), wheel)


def test_the_wheel_has_all_packages_and_configurations_and_nothing_else(wheel: Path) -> None:
    assert problems(wheel) == []


def test_what_a_wheel_lacks_or_has_too_much_is_found(wheel: Path, tmp_path: Path) -> None:
    changed = tmp_path / wheel.name
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(changed, "w") as archive:
        for name in whole.namelist():
            if name != "kvdepot/core/py.typed":
                archive.writestr(name, whole.read(name))
        archive.writestr("tests/__init__.py", "")
    assert problems(changed) == [
        "kvdepot/core/py.typed is missing", "tests/__init__.py should not be there", "core has no py.typed",
    ]  # fmt: skip


def test_the_sdist_builds_the_same_wheel_and_has_tests_and_documents(wheel: Path, tmp_path: Path) -> None:
    for name in ("sdist", "tree", "wheel"):
        (tmp_path / name).mkdir()
    tree = unpack(make("sdist", ROOT, tmp_path / "sdist"), tmp_path / "tree")
    assert make("wheel", tree, tmp_path / "wheel").read_bytes() == wheel.read_bytes()
    assert {"CHANGELOG.md", "Makefile", "docs/install.md", "tests/conftest.py", ".ci/run"} <= files_of(tree)


def test_the_commands_say_the_version_of_pyproject(installed: Installed) -> None:
    version = project()["version"]
    assert installed.printed("kvdepotd", "--version") == f"kvdepotd {version}"
    assert installed.printed("kvdepotctl", "--version").split()[-1] == version


def test_modules_come_from_the_wheel_and_not_from_the_source_tree(installed: Installed) -> None:
    modules = [f"kvdepot.{name}" for name in ("core.keys", "proto.codec", "server.daemon.app", "client.ctl.app")]
    places = installed.places_of(*modules)
    assert len(places) == len(LAYERS)
    assert all(Path(place).is_relative_to(installed.packages) for place in places)


def test_the_packaged_configuration_is_checked_by_the_packaged_daemon(installed: Installed) -> None:
    for name in ("kvdepot.toml", "gpu-node.toml"):
        installed.printed("kvdepotd", "check-config", "--any-host", str(installed.assets / name))
    assert (installed.assets / "systemd/kvdepotd.service").is_file()


def test_a_daemon_of_the_wheel_stores_and_loads_and_says_its_version(installed: Installed) -> None:
    status = check_service(installed)
    assert status["daemon_version"] == project()["version"]
    assert [tier["name"] for tier in status["tiers"]] == ["ram", "nvme"]


def test_the_packaged_tool_has_the_files_of_configs(installed: Installed, tmp_path: Path) -> None:
    for name, path in (("unit", "systemd/kvdepotd.service"), ("dashboard", "grafana/kvdepot.json")):
        assert installed.printed("kvdepotctl", "assets", "show", name) == (ROOT / "configs" / path).read_text().strip()


@NEEDS_SYSTEMD
def test_the_packaged_daemon_installs_itself(installed: Installed, tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    said = installed.printed("kvdepotd", "install", "--systemd", "--root", str(tmp_path)).splitlines()
    assert "wrote: /etc/systemd/system/kvdepotd.service" in said
    unit = (tmp_path / "etc/systemd/system/kvdepotd.service").read_text()
    assert f"ExecStart={installed.folder}/bin/kvdepotd serve /etc/kvdepot/kvdepot.toml\n" in unit
    assert (tmp_path / "usr/local/bin/kvdepotd").readlink().is_file()
