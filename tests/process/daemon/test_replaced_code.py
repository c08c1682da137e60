"""A new version is installed under a daemon that runs: its children are never of another version than the daemon."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from kvdepot.core.data_mapping import pack_parts
from kvdepot.server.io import checksum_wire, child
from kvdepot.server.io.lifeline import CODE, PACKAGES

from tests.rigs.child_processes import children
from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.forked import ROOT
from tests.rigs.patience import patient, wait_until

SUMS = b"kvdepot.server.io.checksum_worker"
REPLACED = "kvdepot was replaced on the disk"


@pytest.mark.requirement("I8", "I1")
def test_a_child_with_other_code_than_the_daemon_does_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have imported some modules of the new version: what is a length for it may be an offset of the daemon."""
    monkeypatch.setattr(child._LOADED, "digest", "f" * 32)
    process, ours, pidfd = child.spawn(SUMS.decode(), lambda fd: (pack_parts(()), fd, os.getpid()))
    os.close(pidfd)
    with ours:
        ours.setblocking(True)
        ours.settimeout(patient(30))
        ours.sendall(checksum_wire.JOBS.pack(checksum_wire.Sum(2, ()), 1))
        with contextlib.suppress(ConnectionResetError):  # it has not read the job
            assert ours.recv(1) == b""
    assert process.wait(patient(30)) == 1


@pytest.mark.parametrize("code", [{CODE: "f" * 32}, {}], ids=["another one", "version 0.3.0, which says nothing"])
def test_a_child_with_other_code_says_so(code: dict[str, str]) -> None:
    command = [sys.executable, "-Pm", SUMS.decode()]
    environment = {name: value for name, value in os.environ.items() if name != CODE} | code
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and REPLACED in done.stderr and "Traceback" not in done.stderr


@pytest.mark.requirement("I8")
def test_a_daemon_whose_code_was_replaced_starts_no_child_and_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in PACKAGES:
        part = package.partition(".")[2]
        shutil.copytree(ROOT / part / "kvdepot" / part, tmp_path / "kvdepot" / part)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    module = tmp_path / "kvdepot" / "server" / "io" / "checksum_wire.py"
    former = module.read_bytes()
    with DaemonProcess() as daemon:
        (worker,) = children(daemon.pid, SUMS)
        upgrade(module, former + b"\nraise SystemExit('a module of another version')\n")
        os.kill(worker, signal.SIGKILL)
        daemon.wait_for_log(f"cannot start: {REPLACED} since this daemon has started: restart it")
        assert not children(daemon.pid, SUMS) and "a module of another version" not in daemon.log
        upgrade(module, former)  # as after a downgrade
        wait_until(lambda: children(daemon.pid, SUMS), "the daemon has a worker again")


def upgrade(module: Path, text: bytes) -> None:
    new = module.with_suffix(".new")
    new.write_bytes(text)
    new.rename(module)
