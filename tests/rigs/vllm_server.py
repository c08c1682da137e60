"""A server of vLLM that a test has started: whether it serves, or has ended."""

from __future__ import annotations

import subprocess
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Final

from tests.rigs.patience import patient, wait_until

START_SECONDS: Final = 300.0


def wait_serving(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Return when it serves. Raise AssertionError with the end of its log if it has ended, or takes too long."""
    wait_until(lambda: _serves(url, process, log), lambda: f"the server serves: {_end(log)}", START_SECONDS)


def _serves(url: str, process: subprocess.Popen[bytes], log: Path) -> bool:
    assert process.poll() is None, _end(log)
    with suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=patient(5)):
        return True
    return False


def _end(log: Path) -> str:
    return log.read_text(errors="replace")[-5000:]
