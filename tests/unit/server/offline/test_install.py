"""`kvdepotd install --systemd`: what it writes, that it may be repeated, and what it leaves alone."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
from kvdepot.core.assets import ASSETS, BY_NAME
from kvdepot.server.daemon.app import main
from kvdepot.server.offline import install_verb
from kvdepot.server.offline.install_verb import PACKAGED_PROGRAMS, PROGRAMS, Installation, InstallError

from tests.rigs.systemd import NEEDS_SYSTEMD

CONFIGS = Path(__file__).resolve().parents[4] / "configs"
UNIT = BY_NAME["unit"].place
CONFIG = BY_NAME["config"].place


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    folder = tmp_path / "venv" / "bin"
    folder.mkdir(parents=True)
    for name in PROGRAMS:
        (folder / name).touch()
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "root"
    (folder / "etc").mkdir(parents=True)
    return folder


def steps(root: Path, programs: Path, *, dry_run: bool = False) -> list[str]:
    return list(Installation(root, programs, dry_run=dry_run).steps(now=False))


def files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@NEEDS_SYSTEMD
def test_each_file_is_in_its_place_and_the_units_start_these_programs(root: Path, programs: Path) -> None:
    said = steps(root, programs)
    for asset in ASSETS:
        if asset.place:
            written = (root / asset.place[1:]).read_text()
            assert written == (CONFIGS / asset.path).read_text().replace(PACKAGED_PROGRAMS, f"{programs}/")
            assert f"wrote: {asset.place}" in said
    assert f"ExecStart={programs}/kvdepotd serve {CONFIG}" in (root / UNIT[1:]).read_text()
    assert (root / "usr/local/bin/kvdepotctl").readlink() == programs / "kvdepotctl"


@NEEDS_SYSTEMD
def test_user_group_and_directories_are_made(root: Path, programs: Path) -> None:
    said = steps(root, programs)
    assert (root / "etc/passwd").read_text().startswith("kvdepot:")
    assert (root / "etc/group").read_text().startswith("kvdepot:")
    assert [line.split(":")[0] for line in said[-2:]] == ["ran", "ran"]
    if os.geteuid() == 0:
        assert (root / "var/lib/kvdepotd").stat().st_mode & 0o777 == 0o700


@NEEDS_SYSTEMD
def test_a_second_run_changes_nothing(root: Path, programs: Path) -> None:
    steps(root, programs)
    before = files(root)
    said = steps(root, programs)
    assert files(root) == before
    assert {line.split(":")[0] for line in said} == {"unchanged", "kept", "ran"}
    assert f"kept: {CONFIG}" in said


@NEEDS_SYSTEMD
def test_what_a_site_has_changed_is_not_lost(root: Path, programs: Path) -> None:
    for place, content in ((CONFIG, "# ours\n"), (UNIT, "# edited\n"), ("/usr/local/bin/kvdepotd", "#!/bin/sh\n")):
        (root / place[1:]).parent.mkdir(parents=True, exist_ok=True)
        (root / place[1:]).write_text(content)
    said = steps(root, programs)
    assert (root / CONFIG[1:]).read_text() == "# ours\n"
    assert (root / f"{UNIT[1:]}.old").read_text() == "# edited\n"
    assert (root / "usr/local/bin/kvdepotd").read_text() == "#!/bin/sh\n"
    assert f"replaced: {UNIT}; the former content is in {UNIT}.old" in said
    assert "kept: /usr/local/bin/kvdepotd, which is not ours" in said


@NEEDS_SYSTEMD
def test_every_content_that_a_site_had_is_kept_whatever_was_kept_before(root: Path, programs: Path) -> None:
    steps(root, programs)
    unit = root / UNIT[1:]
    for content in ("# first\n", "# second\n", "# first\n", "# third\n"):
        unit.write_text(content)
        said = steps(root, programs)
    kept = {path.name: path.read_text() for path in unit.parent.glob("*.old*")}
    assert kept == {
        "kvdepotd.service.old": "# first\n", "kvdepotd.service.old.2": "# second\n",
        "kvdepotd.service.old.3": "# third\n",
    }  # fmt: skip
    assert f"replaced: {UNIT}; the former content is in {UNIT}.old.3" in said


@NEEDS_SYSTEMD
def test_links_of_a_site_stay_what_they_are(root: Path, programs: Path) -> None:
    """A masked unit, and a configuration on a file system that is not mounted yet."""
    for place, target in ((UNIT, "/dev/null"), (CONFIG, "/not/mounted/kvdepot.toml")):
        (root / place[1:]).parent.mkdir(parents=True, exist_ok=True)
        (root / place[1:]).symlink_to(target)
    said = steps(root, programs)
    assert f"kept: {UNIT}, a link to /dev/null" in said and f"kept: {CONFIG}" in said
    assert (root / UNIT[1:]).readlink() == Path("/dev/null")
    assert (root / CONFIG[1:]).readlink() == Path("/not/mounted/kvdepot.toml")
    assert not (root / f"{UNIT[1:]}.old").exists()


@pytest.mark.parametrize("place", ["etc/systemd/system", "etc/kvdepot", "usr/local/bin", "usr/lib"])
def test_no_link_in_an_image_leads_out_of_it(root: Path, programs: Path, tmp_path: Path, place: str) -> None:
    outside = tmp_path / "host"
    outside.mkdir()
    (root / place).parent.mkdir(parents=True, exist_ok=True)
    (root / place).symlink_to(outside)
    with pytest.raises(InstallError, match=f"leads to {outside}"):
        steps(root, programs, dry_run=True)
    with pytest.raises(InstallError, match=f"leads to {outside}"):
        steps(root, programs)
    assert list(outside.iterdir()) == []


def test_no_file_of_the_host_is_copied_into_an_image(root: Path, programs: Path, tmp_path: Path) -> None:
    secret = tmp_path / "shadow"
    secret.write_text("secret")
    (root / UNIT[1:]).parent.mkdir(parents=True)
    (root / UNIT[1:]).symlink_to(secret)
    list(itertools.islice(Installation(root, programs).steps(now=False), 4))
    assert b"secret" not in [path.read_bytes() for path in root.rglob("*") if not path.is_symlink() and path.is_file()]


@NEEDS_SYSTEMD
def test_links_within_an_image_are_followed(root: Path, programs: Path) -> None:
    (root / "usr/lib").mkdir(parents=True)
    (root / "lib").symlink_to("usr/lib")
    (root / "var/local/bin").mkdir(parents=True)
    (root / "usr/local").mkdir()
    (root / "usr/local/bin").symlink_to("../../var/local/bin")
    steps(root, programs)
    assert (root / "var/local/bin/kvdepotd").is_symlink()


@pytest.mark.parametrize("folder", ["a b", "50%", "$HOME", 'a"b', "a\nExecStartPre=b"])
def test_a_path_that_a_unit_would_read_otherwise_is_refused(root: Path, tmp_path: Path, folder: str) -> None:
    programs = tmp_path / folder / "bin"
    programs.mkdir(parents=True)
    for name in PROGRAMS:
        (programs / name).touch()
    with pytest.raises(InstallError, match="a unit cannot name"):
        steps(root, programs, dry_run=True)


def test_programs_behind_a_link_and_a_python_in_a_home_are_refused(
    tmp_path: Path, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install_verb, "_HIDDEN", (str(programs.parent),))
    (tmp_path / "link").symlink_to(programs)
    with pytest.raises(InstallError, match=f"the service cannot see {programs}"):
        steps(Path("/"), tmp_path / "link", dry_run=True)
    monkeypatch.setattr(install_verb, "_HIDDEN", (str(tmp_path / "home"),))
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path / "home" / "python"))
    with pytest.raises(InstallError, match="with a Python that is elsewhere"):
        steps(Path("/"), programs, dry_run=True)


def test_programs_that_others_can_change_are_said(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install_verb, "_HIDDEN", ())
    (programs / "kvdepotctl").chmod(0o777)
    first = next(Installation(Path("/"), programs, dry_run=True).steps(now=False))
    assert first.startswith("caution: ") and str(programs) in first


def test_a_dry_run_says_the_steps_and_does_none(root: Path, programs: Path) -> None:
    said = steps(root, programs, dry_run=True)
    assert files(root) == {}
    assert all(line.startswith("would ") for line in said)
    assert f"would write: {UNIT}" in said


def test_programs_that_are_not_there_or_not_visible_are_refused(root: Path, tmp_path: Path, programs: Path) -> None:
    (programs / "kvdepotctl").unlink()
    with pytest.raises(InstallError, match=r"has no kvdepotctl: pip install 'kvdepot\[node\]'"):
        steps(root, programs)
    (programs / "kvdepotctl").touch()
    with pytest.raises(InstallError, match="the service cannot see"):  # pytest's folder is below /tmp
        steps(Path("/"), programs, dry_run=True)


def test_a_step_that_fails_says_what_the_command_said(
    root: Path, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = root.parent / "systemd-sysusers"
    failing.write_text("#!/bin/sh\necho no room >&2\nexit 7\n")
    failing.chmod(0o755)
    monkeypatch.setenv("PATH", f"{root.parent}:{os.environ['PATH']}")
    with pytest.raises(InstallError, match=r"systemd-sysusers .* failed with 7: no room"):
        steps(root, programs)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(InstallError, match="there is no systemd-sysusers here"):
        steps(root, programs)


def test_the_verb_needs_root_and_a_host(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert main(["install", "--systemd"]) == 1
    assert "needs root" in capsys.readouterr().err
    assert main(["install", "--systemd", "--root", "/nowhere", "--now"]) == 2


@NEEDS_SYSTEMD
def test_systemd_accepts_the_installed_unit(root: Path, programs: Path) -> None:
    for name in PROGRAMS:
        (programs / name).chmod(0o755)
    steps(root, programs)
    command = ["systemd-analyze", "verify", "--man=no", str(root / UNIT[1:])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
