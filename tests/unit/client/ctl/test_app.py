"""What `kvdepotctl` decides before it asks a daemon."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

import pytest
from click.testing import CliRunner
from kvdepot.client.ctl.app import cli
from kvdepot.client.ctl.commands import trace
from kvdepot.client.ctl.doctor import arenas, settings
from kvdepot.client.endpoint import default_endpoint

PACKAGED = "unix:///run/kvdepot/kvdepot.sock"
NOBODY = 65534


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This user's directory in a temporary one, with what looks like a socket."""
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / f"kvdepot-{os.geteuid()}"
    folder.mkdir(mode=0o700)
    (folder / "kvdepot.sock").touch()
    return folder


def test_the_endpoint_is_this_user_s_own_where_there_is_one(own: Path) -> None:
    assert default_endpoint() == f"unix://{own}/kvdepot.sock"
    (own / "kvdepot.sock").unlink()
    assert default_endpoint() == PACKAGED
    own.rmdir()
    assert default_endpoint() == PACKAGED


def test_a_directory_that_others_can_write_to_is_passed_over(own: Path) -> None:
    for mode in (0o770, 0o702, 0o1777):
        own.chmod(mode)
        assert default_endpoint() == PACKAGED


def test_so_is_a_link(own: Path) -> None:
    own.rename(own.with_name("elsewhere"))
    own.symlink_to("elsewhere")
    assert default_endpoint() == PACKAGED


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a directory away needs root")
def test_so_is_another_user_s(own: Path) -> None:
    os.chown(own, NOBODY, NOBODY)
    assert default_endpoint() == PACKAGED


def test_wrong_usage_of_health_prints_no_verdict_because_its_code_is_that_of_an_error() -> None:
    wrong = CliRunner().invoke(cli, ["health", "--no-such-option"])
    assert (wrong.exit_code, wrong.stdout) == (2, "")
    assert "no-such-option" in wrong.stderr


@pytest.mark.parametrize("seconds", ["nan", "inf", "1e300"])
@pytest.mark.parametrize(
    "verb", ["--timeout {} status", "top --interval {}", "drain --wait {}", "trace record - --seconds {}"]
)
def test_seconds_that_no_clock_has_are_wrong_usage(verb: str, seconds: str) -> None:
    done = CliRunner().invoke(cli, ["--endpoint", "unix:///nowhere/d.sock", *verb.format(seconds).split()])
    assert done.exit_code == 2 and "is not at most" in done.output, done.output


@pytest.mark.parametrize("rate", ["nan", "inf", "-inf", "0"])
def test_a_prefill_rate_that_nothing_can_be_divided_by_is_wrong_usage(rate: str) -> None:
    done = CliRunner().invoke(cli, ["--endpoint", "unix:///nowhere/d.sock", "bench", "--prefill", rate])
    assert done.exit_code == 2 and "--prefill" in done.output, done.output


def test_without_a_daemon_a_former_recording_stays(tmp_path: Path) -> None:
    (tmp_path / "trace").write_text("of a whole day")
    done = CliRunner().invoke(
        cli, ["--endpoint", f"unix://{tmp_path}/d.sock", "trace", "record", str(tmp_path / "trace")]
    )
    assert done.exit_code != 0
    assert (tmp_path / "trace").read_text() == "of a whole day"


@pytest.mark.parametrize("command", [trace.REPLAY, settings.COMMAND, arenas.COMMAND], ids=lambda command: command[-2])
def test_what_it_runs_imports_nothing_from_the_current_directory(command: tuple[str, ...], tmp_path: Path) -> None:
    """Root may be in /tmp, where every user can place a module."""
    for name in ("argparse.py", "kvdepot.py"):
        (tmp_path / name).write_text('print("planted")\nraise SystemExit(9)\n')
    done = subprocess.run([*command, "--help"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, "planted" in done.stdout) == (0, False), done.stderr
