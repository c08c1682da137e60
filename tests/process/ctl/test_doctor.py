"""`kvdepotctl doctor`, the real command: a daemon that is well, one that is not, and mounts that fail and hang."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kvdepot.client.ctl.doctor.probe import TEMPORARY

from tests.fakes.fuse_directory import FuseDirectory, why_no_fuse
from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.patience import Deadline, patient, wait_until
from tests.rigs.raw_client import RawEngine, dense_spec, status_of
from tests.rigs.stopping import stop

NEEDS_FUSE = pytest.mark.skipif("CI" not in os.environ and bool(why_no_fuse()), reason=why_no_fuse())
ENDED_SECONDS = 60


@pytest.fixture(scope="module")
def tier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tier")


@pytest.fixture(scope="module")
def daemon(tier: Path) -> Iterator[DaemonProcess]:
    with DaemonProcess(ram="512MiB", config=tiers(nvme=tier)) as running:
        wait_until(lambda: status_of(running.socket).tiers[1].state == "ready", "the tier is open", 60)
        yield running


@pytest.fixture(scope="module")
def file(daemon: DaemonProcess, tier: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As the daemon was started, command line and all."""
    path = tmp_path_factory.mktemp("config") / "kvdepot.toml"
    metrics = daemon.metrics.removeprefix("http://")
    path.write_text(
        f'[daemon]\nlisten = ["{daemon.endpoint}"]\nmetrics = "{metrics}"\n[ram]\ncapacity = "512MiB"\n'
        f'path = "{daemon.arena_directory}"\n{tiers(nvme=tier)}'
    )
    return path


PATIENT = ("--timeout", "20")
"""Of a busy machine."""


def tiers(kind: str = "disk", **paths: Path) -> str:
    return "\n".join(
        f'[[tier]]\nname = "{name}"\nkind = "{kind}"\npath = "{path}"\ncapacity = "64MiB"\n'
        for name, path in paths.items()
    )


def doctor(*arguments: str, before: tuple[str, ...] = ()) -> tuple[int, dict[tuple[str, str], dict[str, str]], Any]:
    """Exit code, findings by subject and check, and all of it."""
    command = [sys.executable, "-m", "kvdepot.client.ctl.app", *PATIENT, *before, "doctor", "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patient(ENDED_SECONDS), check=False)
    assert done.stdout, done.stderr
    record = json.loads(done.stdout)
    return done.returncode, {(one["subject"], one["check"]): one for one in record["findings"]}, record


def engines(daemon: DaemonProcess) -> set[str]:
    return {one.engine_id for one in status_of(daemon.socket).sessions}


def test_a_daemon_that_is_well_passes_and_nothing_is_left(daemon: DaemonProcess, file: Path, tier: Path) -> None:
    with RawEngine(daemon.socket, "engine-0", spec=dense_spec("a", 16 << 10)):
        code, found, record = doctor("--config", str(file))
    failed = [one for one in record["findings"] if one["outcome"] == "fail"]
    assert (code, failed) == (0, [])
    assert record["endpoint"] == daemon.endpoint  # the file's: nobody has named another
    assert record["configuration"] == str(file)
    assert sum(record["outcomes"].values()) == len(record["findings"])
    for of, check in (
        ("host", "configuration"), ("daemon", "answers"), ("daemon", "configuration in use"), ("daemon", "metrics"),
        ("daemon", "sockets"), ("daemon", "descriptor passing"), ("daemon", "peer identity"), ("ram", "state"),
        ("ram", "room"), ("nvme", "state"), ("nvme", "room"), ("nvme", "permissions"), ("nvme", "write"),
        ("nvme", "rename"), ("engines", "hash determinism"),
    ):  # fmt: skip
        assert found[of, check]["outcome"] == "ok", found[of, check]
    assert f"pid {daemon.pid}" in found["daemon", "peer identity"]["message"]
    assert "1 engine processes" in found["engines", "hash determinism"]["message"]
    assert "are held" in found["ram", "room"]["message"] and " 0 B are held" not in found["ram", "room"]["message"]
    assert "attached engine=kvdepotctl-doctor" in daemon.log
    wait_until(lambda: engines(daemon) <= {"engine-0"}, "its session has ended")
    assert not list(tier.glob(f"{TEMPORARY}*"))


def test_for_people_every_failure_has_its_fix(daemon: DaemonProcess, file: Path) -> None:
    command = [sys.executable, "-m", "kvdepot.client.ctl.app", "--endpoint", "unix:///run/none.sock", "doctor"]
    done = subprocess.run(
        [*command, "--config", str(file)], capture_output=True, text=True, timeout=patient(ENDED_SECONDS), check=False,
        env=os.environ | {"COLUMNS": "200"},
    )  # fmt: skip
    assert done.returncode == 1
    assert "1 fail" in done.stdout and "fix: start it" in done.stdout and "unix:///run/none.sock" in done.stdout


def test_read_only_touches_nothing(daemon: DaemonProcess, file: Path) -> None:
    before = daemon.log.count("attached engine=kvdepotctl-doctor")
    code, found, _ = doctor("--config", str(file), "--read-only")
    assert code == 0
    assert daemon.log.count("attached engine=kvdepotctl-doctor") == before
    for of, check in (("daemon", "descriptor passing"), ("nvme", "write"), ("nvme", "direct I/O")):
        assert found[of, check]["outcome"] == "skipped"


def test_a_daemon_that_hangs_is_a_failure_in_time(daemon: DaemonProcess, file: Path) -> None:
    daemon.suspend()
    try:
        limit = Deadline(ENDED_SECONDS / 2)
        code, found, _ = doctor("--config", str(file), before=("--timeout", "4"))
        assert not limit.is_over()
    finally:
        daemon.resume()
    assert code == 1
    assert found["daemon", "answers"]["outcome"] == "fail"
    assert found["daemon", "descriptor passing"]["message"] == "the daemon does not answer"
    assert found["daemon", "metrics"]["outcome"] == "fail"
    assert found["nvme", "write"]["outcome"] == "ok"


def test_a_configuration_that_is_refused_leaves_the_checks_of_the_daemon(daemon: DaemonProcess, tmp_path: Path) -> None:
    bad = tmp_path / "bad.toml"
    bad.write_text("[ram]\ncapacity = 5\n")
    code, found, record = doctor("--config", str(bad), before=("--endpoint", daemon.endpoint))
    assert code == 1 and record["configuration"] is None
    assert "ram.capacity" in found["host", "configuration"]["message"]
    assert found["daemon", "descriptor passing"]["outcome"] == "ok"
    assert ("ram", "room") not in found


@NEEDS_FUSE
def test_mounts_that_fail_and_hang_are_found_by_name(tmp_path: Path) -> None:
    mount = FuseDirectory()
    hung = FuseDirectory()
    try:
        (tmp_path / "arena").mkdir()
        config = tmp_path / "kvdepot.toml"
        config.write_text(
            f'[daemon]\nlisten = ["unix://{tmp_path}/d"]\nmetrics = ""\n[ram]\ncapacity = "1GiB"\n'
            f'path = "{tmp_path}/arena"\n{tiers(bad=mount.path, hung=hung.path)}'
            f"{tiers('shared', late=tmp_path / 'late')}"
        )
        mount.fault(write=errno.EIO)
        stop(hung.process.pid)
        limit = Deadline(ENDED_SECONDS / 2)
        code, found, _ = doctor(
            "--config", str(config), before=("--endpoint", f"unix://{tmp_path}/d", "--timeout", "8")
        )
        assert not limit.is_over()
    finally:
        os.kill(hung.process.pid, signal.SIGCONT)
        mount.close()
        hung.close()
    assert code == 1
    assert found["host", "configuration"]["outcome"] == "ok"
    assert found["bad", "write"]["message"] == "no file can be made: Input/output error"
    assert found["hung", "answers"]["outcome"] == "fail"
    assert f"{hung.path} does not answer within 8 s" in found["hung", "answers"]["message"]
    assert ("hung", "room") not in found
    assert found["late", "directory"]["outcome"] == "fail"
    assert found["ram", "file system"]["outcome"] == "fail"  # a disk, under this test
