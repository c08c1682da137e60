"""Programs that are asked something and get a limited time for it."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Ended:
    """The exit code and output of a program."""

    code: int
    output: str
    errors: str

    def parsed(self) -> Any:
        """Return the JSON that it has printed; None where it has printed anything else."""
        try:
            return json.loads(self.output)
        except (ValueError, RecursionError):
            return None


class Program:
    """A program, started at once, so that several run at the same time. One that hangs in the kernel is left alone."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        """Start a program. Raise OSError."""
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=os.environ if environment is None else environment, start_new_session=True,
        )  # fmt: skip

    def wait(self, until: float) -> Ended | None:
        """None when it is not over at `until` (time.monotonic). It is killed then, but not waited for."""
        try:
            output, errors = self._process.communicate(timeout=max(until - time.monotonic(), 0.05))
        except subprocess.TimeoutExpired:
            self._process.kill()
            return None
        return Ended(self._process.returncode, output, errors)
