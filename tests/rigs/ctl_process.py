"""The real `kvdepotctl` command, as its users run it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, Any

import click
from click.testing import CliRunner
from kvdepot.client.ctl.app import cli

from tests.rigs import forked_program
from tests.rigs.daemon_process import DaemonProcess, Process
from tests.rigs.patience import patient


def kvdepotctl(daemon: DaemonProcess | str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """With the daemon's endpoint, or another one. The table is wide enough to break no line."""
    endpoint = daemon if isinstance(daemon, str) else daemon.endpoint
    given = ["--endpoint", endpoint, "--timeout", f"{patient(30):.0f}", *arguments]
    environment = os.environ | {"COLUMNS": "200"}
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors, Path(os.devnull).open() as nothing:
        process: Process | None = forked_program.start(
            forked_program.TOOL, given, (nothing.fileno(), out.fileno(), errors.fileno()), environment
        )
        if process is None:
            command = [sys.executable, "-m", forked_program.TOOL, *given]
            process = subprocess.Popen(command, stdin=nothing, stdout=out, stderr=errors, env=environment)
        try:
            code = process.wait(patient(90))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            raise
        return subprocess.CompletedProcess(given, code, _read(out), _read(errors))


def problems(printed: str) -> list[str]:
    """The codes of `health -o json`, but for late ticks of the daemon's loop: a busy machine has these."""
    return [one["code"] for one in json.loads(printed)["problems"] if one["code"] != "LOOP_LATE"]


def commands_of(group: click.Group) -> dict[str, click.Command]:
    """The verbs of a group, those included that it has not imported yet."""
    context = click.Context(group)
    found = {name: group.get_command(context, name) for name in group.list_commands(context)}
    return {name: command for name, command in found.items() if command is not None}


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode()


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
