"""How pytest's workers start with `--preload`: as execnet starts them, but with the imports done."""

from __future__ import annotations

import shlex
import subprocess

import pytest

from tests.rigs.forked_workers import command_of
from tests.rigs.patience import patient

PRELOADED = "wave"
"""Which nothing else imports."""
PROGRAM = "import sys;exec(eval(sys.stdin.readline()))"
"""execnet's own."""
QUESTION = f"""
import os
print({PRELOADED!r} in sys.modules, sys.argv, os.environ.get("OPENBLAS_NUM_THREADS"), os.environ["GIVEN"])
print("told", file=sys.stderr)
sys.exit(7)
"""


def ended(command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*shlex.split(command), "-u", "-c", PROGRAM], input=f"{QUESTION!r}\n", capture_output=True, text=True,
        timeout=patient(60), check=False,
    )  # fmt: skip


@pytest.mark.parametrize("threads", [None, "3"])
def test_a_worker_is_a_copy_with_streams_arguments_environment_and_an_exit_code_of_its_own(
    monkeypatch: pytest.MonkeyPatch, threads: str | None
) -> None:
    monkeypatch.setenv("GIVEN", "yes")
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    if threads:
        monkeypatch.setenv("OPENBLAS_NUM_THREADS", threads)
    command = command_of([PRELOADED])
    for _ in range(2):
        worker = ended(command)
        assert worker.stdout.splitlines() == [f"True ['-c'] {threads} yes"]
        assert (worker.stderr, worker.returncode) == ("told\n", 7)


def test_a_worker_that_cannot_be_forked_says_why() -> None:
    worker = ended(command_of([f"{PRELOADED}.nothing"]))
    assert worker.returncode == 1
    assert "no worker: " in worker.stderr and "No module named" in worker.stderr
