"""How pytest's workers start with `--preload`: as execnet starts them, but with all imports done."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest

from tests.rigs.forked import log_of
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


def ended(command: str, question: str = QUESTION) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*shlex.split(command), "-u", "-c", PROGRAM], input=f"{question!r}\n", capture_output=True, text=True,
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


def test_a_worker_has_the_modules_of_tests_with_their_assertions_and_no_tests_of_them() -> None:
    collected = "tests/unit/project/test_waits.py"
    name = collected.removesuffix(".py").replace("/", ".")
    question = f"import sys; print(sys.modules[{name!r}].__loader__)"
    command = command_of([PRELOADED], [collected])
    worker = ended(command, question)
    assert "AssertionRewritingHook" in worker.stdout, worker.stderr
    assert "no tests collected" in log_of(shlex.split(command)[-1]).read_text()


def test_a_module_of_tests_that_fails_is_left_to_the_workers(tmp_path: Path) -> None:
    broken = tmp_path / "test_broken.py"
    broken.write_text("raise RuntimeError('broken')\n")
    worker = ended(command_of([PRELOADED], [str(broken)]), "import sys; print('test_broken' in sys.modules)")
    assert (worker.stdout, worker.returncode) == ("False\n", 0)


def test_a_worker_that_cannot_be_forked_says_why() -> None:
    worker = ended(command_of([f"{PRELOADED}.nothing"]))
    assert worker.returncode == 1
    assert "no worker: " in worker.stderr and "No module named" in worker.stderr
