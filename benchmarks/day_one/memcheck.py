"""Small copies under NVIDIA's compute-sanitizer, where there is one. A part of step 3; as a program what it checks."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from benchmarks import paths
from benchmarks.day_one import child
from benchmarks.day_one.byte_steps import copy_layers
from benchmarks.day_one.machine import machine_of
from benchmarks.day_one.steps import Context, WrongByteError

_FOUND = 99


def memcheck(context: Context) -> None:
    """Run this module as a program under the sanitizer."""
    sanitizer = shutil.which("compute-sanitizer")
    if context.machine.stands_in or sanitizer is None:
        context.note("compute-sanitizer, not run", "a stand-in has no kernels" if sanitizer else "there is none")
        return
    options = [sanitizer, "--tool", "memcheck", "--error-exitcode", str(_FOUND)]
    try:
        ended = subprocess.run(
            [*options, *child.command("memcheck", stand_in=False)], env=paths.environment(), cwd=paths.ROOT,
            check=False, timeout=max(context.left(), 1.0), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        context.note("compute-sanitizer, not run", "it was not ready in time")
        return
    (context.out / "memcheck.log").write_text(ended.stdout)
    if ended.returncode == _FOUND:
        raise WrongByteError("compute-sanitizer found an access out of bounds: see memcheck.log")
    context.note("compute-sanitizer", "found nothing" if not ended.returncode else f"exit code {ended.returncode}")


def main() -> None:
    copy_layers(Context(machine_of(stand_in=False), Path(), seed=0, until=float("inf")))


if __name__ == "__main__":
    main()
