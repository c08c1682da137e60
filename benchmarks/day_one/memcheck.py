"""Step 3: order, then copies of steps 1 to 3 under NVIDIA's compute-sanitizer, where there is one.

As a program these copies. A stand-in has no kernels: there the program runs by itself, so that it is rehearsed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from benchmarks import paths
from benchmarks.day_one import child
from benchmarks.day_one.byte_steps import copy_golden, copy_layers
from benchmarks.day_one.machine import Machine, machine_of
from benchmarks.day_one.order import order
from benchmarks.day_one.steps import Context, WrongByteError

_FOUND_CODE, _FOUND_LINE = 99, "========= Invalid"
PARTS: Final[Mapping[str, tuple[Callable[[Context], None], int]]] = {
    "order": (order, 3), "layers": (copy_layers, 24), "layouts": (copy_golden, 4),
}  # fmt: skip
"""Part -> a step, and how many of its cases: the sanitizer slows kernels down by a factor of 10 or more (estimate)."""


def order_and_memory(context: Context) -> None:
    """Run step 3."""
    order(context)
    memcheck(context)


def memcheck(context: Context) -> None:
    """Run this module as a program under the sanitizer, for as long as the step may still take."""
    options: list[str] = []
    if not context.machine.stands_in:
        sanitizer = shutil.which("compute-sanitizer")
        if sanitizer is None:
            context.note("compute-sanitizer, not run", "there is none")
            return
        options = [sanitizer, "--tool", "memcheck", "--error-exitcode", str(_FOUND_CODE)]
    program = child.command("memcheck", "--seed", str(context.seed), stand_in=context.machine.stands_in)
    log = context.out / "memcheck.log"
    code = _run([*options, *program], log, max(context.left(), 1.0))
    said = log.read_text()
    done = ", ".join(f"{part} ({cases} cases)" for part, cases in (child.last(said.splitlines()) or {}).items())
    if code == _FOUND_CODE or _FOUND_LINE in said:
        raise WrongByteError("compute-sanitizer found an access out of bounds: see memcheck.log")
    if code is None:
        context.note("compute-sanitizer, not to its end", f"the time was over after: {done or 'nothing'}")
    elif code:
        raise RuntimeError(f"the copies under compute-sanitizer ended with {code}: see memcheck.log")
    else:
        context.note("compute-sanitizer" if options else "without compute-sanitizer", f"nothing was found in: {done}")


def _run(command: list[str], log: Path, seconds: float) -> int | None:
    """Return the exit code; None if the time was over. The sanitizer's child ends with it, and lets the device go."""
    with log.open("w") as out:
        process = subprocess.Popen(
            command, env=paths.environment(), cwd=paths.ROOT, stdout=out, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return None


def check(machine: Machine, seed: int) -> None:
    """Run the parts, and say after each how many cases are done: the time may end before the last one."""
    done: dict[str, object] = {}
    for part, (step, cases) in PARTS.items():
        context = Context(machine, Path(), seed, until=float("inf"), cases=1 if machine.stands_in else cases)
        step(context)
        done[part] = int(str(context.report.record()["cases"]).partition(".")[0])
        child.say(**done)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--stand-in", action="store_true")
    options = parser.parse_args()
    machine = machine_of(stand_in=options.stand_in)
    check(machine, options.seed)
    machine.close()


if __name__ == "__main__":
    main()
