"""How tests start daemons and commands: copies that differ from fresh processes in nothing that a test is about."""

from __future__ import annotations

import os
from pathlib import Path

from tests.rigs import forked_program
from tests.rigs.daemon_process import DaemonProcess


def parent(daemon: DaemonProcess) -> int:
    return int(Path(f"/proc/{daemon.pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_two_daemons_and_two_runs_of_one_have_other_seeds_of_hashes() -> None:
    """A seed is that of the server whose copy a daemon is."""
    with DaemonProcess() as first, DaemonProcess() as second:
        run = parent(first)
        assert run != parent(second)
        first.stop()
        first.start()
        assert run != parent(first) == parent(second)


def test_a_variable_that_may_be_read_at_import_needs_a_fresh_process() -> None:
    with Path(os.devnull).open("r+") as nothing:
        streams = (nothing.fileno(),) * 3

        def start(**variables: str) -> int | None:
            environment = os.environ | variables
            process = forked_program.start("kvdepot.client.ctl.app", ["--version"], streams, environment)
            return None if process is None else process.wait()

        assert start() == start(KVDEPOT_ENDPOINT="unix:///nowhere", COLUMNS="20") == 0
        assert start(PYTHONHASHSEED="1") is None
        assert start(LD_PRELOAD="") is None


def test_an_exit_code_and_a_signal_pass_to_who_started_the_daemon() -> None:
    with DaemonProcess() as daemon:
        assert daemon.stop() == 0
        daemon.start()
        assert daemon.kill() == -9
