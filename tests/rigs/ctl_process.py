"""The real `kvdepotctl` command, as its users run it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from click.testing import CliRunner
from kvdepot.client.ctl.app import cli

from tests.rigs.daemon_process import DaemonProcess


def kvdepotctl(daemon: DaemonProcess | str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """With the daemon's endpoint, or another one. The table is wide enough to break no line."""
    endpoint = daemon if isinstance(daemon, str) else daemon.endpoint
    command = [sys.executable, "-m", "kvdepot.client.ctl.app", "--endpoint", endpoint, "--timeout", "30", *arguments]
    environment = os.environ | {"COLUMNS": "200"}
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=90, check=False, env=environment
    )


def answered(daemon: DaemonProcess, *arguments: str) -> str:
    """What the command prints, run in this process: where many are, and it is the daemon that is tested."""
    done = CliRunner().invoke(
        cli, ["--endpoint", daemon.endpoint, "--timeout", "60", *arguments], standalone_mode=False
    )
    if done.exception is not None:
        raise done.exception
    return done.output


def record(daemon: DaemonProcess, *arguments: str) -> Any:
    """What it prints with `--json`."""
    return json.loads(text(daemon, *arguments, "--json"))


def text(daemon: DaemonProcess | str, *arguments: str) -> str:
    printed = kvdepotctl(daemon, *arguments)
    assert printed.returncode == 0, printed.stderr
    return printed.stdout
