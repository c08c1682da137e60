"""Programs of the kit that run in processes of their own: `python -m benchmarks.day_one.NAME`, one line of JSON out."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks import paths
from benchmarks.day_one.steps import Context


def command(name: str, *options: str, stand_in: bool) -> list[str]:
    """Return the command of a child program."""
    given = [*options, *(["--stand-in"] if stand_in else [])]
    return [sys.executable, "-m", f"benchmarks.day_one.{name}", *given]


def spawn(name: str, *options: str, stand_in: bool) -> subprocess.Popen[str]:
    """Start one whose streams the caller reads."""
    return subprocess.Popen(
        command(name, *options, stand_in=stand_in), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True, env=paths.environment(), cwd=paths.ROOT,
    )  # fmt: skip


def answer(context: Context, name: str, *options: str) -> Any:
    """Run one, and return the last line of JSON that it printed; None if it ended without. Raise TimeoutExpired."""
    ended = subprocess.run(
        command(name, *options, stand_in=context.machine.stands_in), env=paths.environment(), cwd=paths.ROOT,
        stdout=subprocess.PIPE, text=True, check=False, timeout=max(context.left(), 0) + 60,
    )  # fmt: skip
    return last(ended.stdout.splitlines())


def last(lines: Sequence[str]) -> Any:
    """Return the last line that is a JSON object."""
    said = [line for line in lines if line.startswith("{")]
    return json.loads(said[-1]) if said else None


def say(**values: object) -> None:
    """Print one line of JSON."""
    print(json.dumps(values), flush=True)
