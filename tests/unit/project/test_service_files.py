"""The files under configs/systemd: systemd's own checks, and that they agree with the daemon and with one another."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner
from kvdepot.client.ctl.app import cli
from kvdepot.server.attach import attach
from kvdepot.server.config import arena_directory
from kvdepot.server.config import schema as config_schema
from kvdepot.server.daemon.node import CLOSE_SECONDS, DRAIN_SECONDS, GRACE_SECONDS

from tests.fakes.confined import settings
from tests.rigs.systemd import NEEDS_SYSTEMD

FOLDER = Path(__file__).resolve().parents[3] / "configs" / "systemd"
UNIT = FOLDER / "kvdepotd.service"
HOLD = FOLDER / "kvdepot-hold.service"
UNITS = pytest.mark.parametrize("unit", [UNIT, HOLD], ids=lambda path: path.stem, indirect=True)
EXPOSURE_MAX = 3.0
PROGRAMS = ("/opt/kvdepot/bin/kvdepotd", "/opt/kvdepot/bin/kvdepotctl")


@pytest.fixture
def unit(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A unit as it is shipped, but with programs that this machine has."""
    shipped: Path = request.param
    copy = tmp_path / shipped.name
    text = shipped.read_text()
    for program in PROGRAMS:
        text = text.replace(f"{program} ", "/bin/true ")
    copy.write_text(text)
    return copy


def _seconds(key: str) -> float:
    (value,) = settings(UNIT, key)
    return float(value.removesuffix("s"))


@UNITS
@NEEDS_SYSTEMD
def test_systemd_has_nothing_to_say_about_the_unit(unit: Path) -> None:
    found = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True, check=False
    )
    assert (found.returncode, found.stdout + found.stderr) == (0, "")


@UNITS
@NEEDS_SYSTEMD
def test_its_exposure_is_low_and_what_is_left_open_has_a_reason(unit: Path) -> None:
    found = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--json=short", "--no-pager",
         f"--threshold={EXPOSURE_MAX * 10:.0f}", str(unit)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stdout
    left_open = {entry["name"].partition("=")[0] for entry in json.loads(found.stdout) if entry["exposure"]}
    told = unit.read_text()
    unexplained = [name for name in left_open if not re.search(rf"^# .*{re.escape(name)}", told, re.M)]
    assert unexplained == []


@NEEDS_SYSTEMD
def test_the_user_is_made(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    subprocess.run(
        ["systemd-sysusers", f"--root={tmp_path}", str(FOLDER / "kvdepot.sysusers.conf")],
        check=True, capture_output=True,
    )  # fmt: skip
    name, _, _, _, _, home, shell = (tmp_path / "etc" / "passwd").read_text().strip().split(":")
    assert [name, "/" + home.lstrip("/"), shell] == [*settings(UNIT, "User"), "/var/lib/kvdepot", "/usr/sbin/nologin"]


def test_directories_are_the_same_everywhere() -> None:
    lines = [line.split() for line in (FOLDER / "kvdepot.tmpfiles.conf").read_text().splitlines() if line[0] != "#"]
    (runtime,), (states,) = settings(UNIT, "RuntimeDirectory"), settings(UNIT, "StateDirectory")
    (user,), (group,) = settings(UNIT, "User"), settings(UNIT, "Group")
    assert lines == [
        ["d", f"/run/{runtime}", *settings(UNIT, "RuntimeDirectoryMode"), user, group, "-"],
        *(
            ["d", f"/var/lib/{state}", *settings(UNIT, "StateDirectoryMode"), user, group, "-"]
            for state in states.split()
        ),
        ["x", f"{arena_directory.BASE}/kvdepot-*"],
    ]
    assert config_schema.DEFAULT_SOCKET.startswith(f"unix:///run/{runtime}/")
    assert settings(UNIT, "RuntimeDirectoryPreserve") == ["yes"]  # what containers have bound


def test_the_state_of_operators_has_a_directory_that_no_tier_has() -> None:
    example = (FOLDER.parent / "gpu-node.toml").read_text()
    (named,) = re.findall(r'^state = "(.*)"', example, re.M)
    assert str(Path(named).parent) in {f"/var/lib/{one}" for one in settings(UNIT, "StateDirectory")[0].split()}
    assert f'"{named}"' in (FOLDER.parent / "kvdepot.toml").read_text()
    assert str(Path(named).parent) in (FOLDER.parents[1] / "Dockerfile").read_text()


def test_reloading_waits_for_what_comes_of_it() -> None:
    """By the tool: SIGHUP, also as Type=notify-reload (systemd 253) sends it, cannot say that a file is refused."""
    (command,) = settings(UNIT, "ExecReload")
    program, *arguments = command.split()
    assert program in PROGRAMS
    assert settings(UNIT, "Type") == ["notify"]
    assert arguments[-1] == "reload"
    assert CliRunner().invoke(cli, [*arguments, "--help"]).exit_code == 0
    assert float(arguments[arguments.index("--timeout") + 1]) < _seconds("TimeoutStartSec")  # of a reload too


def test_limits_fit_the_daemon() -> None:
    assert _seconds("TimeoutStopSec") > CLOSE_SECONDS + DRAIN_SECONDS + GRACE_SECONDS
    assert int(settings(UNIT, "LimitNOFILE")[0]) > 3 * attach.CONNECTIONS_MAX
    assert settings(UNIT, "KillMode") == ["mixed"]  # workers do not drain
    assert settings(UNIT, "RemoveIPC") == ["no"]
    assert int(settings(UNIT, "FileDescriptorStoreMax")[0]) >= 1


def test_installing_is_documented_for_each_file() -> None:
    text = (FOLDER.parents[1] / "docs" / "install.md").read_text()
    assert [path.name for path in FOLDER.iterdir() if path.name not in text] == []


def test_the_holder_is_of_the_same_user_and_configuration_and_starts_first() -> None:
    (command,), (serve,) = settings(HOLD, "ExecStart"), settings(UNIT, "ExecStart")
    assert command.replace(" hold ", " serve ") == serve
    for key in ("User", "Group", "UMask", "OOMScoreAdjust"):
        assert settings(HOLD, key) == settings(UNIT, key)
    assert settings(HOLD, "Before") == settings(HOLD, "WantedBy") == [UNIT.name]
