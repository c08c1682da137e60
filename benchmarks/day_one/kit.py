"""Runs the steps within a budget of seconds, and says what came out: `report.json`, and one page, `report.md`.

Both are written after each step: what was found is there, whatever ends the run. The first wrong byte ends it.
Exit codes: 0 all aims met; 1 an aim was missed, or a step failed; 3 a wrong byte.
"""

from __future__ import annotations

import faulthandler
import json
import secrets
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import report
from benchmarks.day_one.byte_steps import copy_golden, copy_layers, soak
from benchmarks.day_one.capture import capture
from benchmarks.day_one.decode import step_time
from benchmarks.day_one.facts import facts
from benchmarks.day_one.machine import Machine, machine_of
from benchmarks.day_one.memcheck import order_and_memory
from benchmarks.day_one.pinning import pinning
from benchmarks.day_one.processes import processes
from benchmarks.day_one.ratios import ratios
from benchmarks.day_one.steps import Context, NotRunError, Result, Status, Step, WrongByteError
from benchmarks.day_one.thread import copying_thread

STEPS = (
    Step(0, "facts", 10, facts),
    Step(1, "layers of every shape", 30, copy_layers),
    Step(2, "vLLM's layouts", 40, copy_golden),
    Step(3, "order with the engine, and memory", 60, order_and_memory),
    Step(4, "the copying thread", 20, copying_thread),
    Step(5, "captures of graphs", 25, capture),
    Step(6, "pinning", 70, pinning),
    Step(7, "ratios", 150, ratios),
    Step(8, "step time of an engine", 30, step_time),
    Step(9, "two processes and a daemon", 60, processes),
    Step(10, "soak", 25, soak),
)
_HANGS_AFTER_SECONDS = 120.0
"""After the budget: a device that hangs holds the process in the kernel, and every thread's stack says where."""
_EXIT_CODES = {Status.WRONG: 3, Status.FAILED: 1, Status.MISSED: 1}


def run(
    out: Path, seconds: float, *, stand_in: bool = False, steps: Sequence[int] | None = None, seed: int | None = None,
    cases: int | None = None,
) -> int:  # fmt: skip
    """Run the kit. Return the exit code."""
    out.mkdir(parents=True, exist_ok=True)
    faulthandler.dump_traceback_later(seconds + _HANGS_AFTER_SECONDS, exit=True)
    seed = secrets.randbits(32) if seed is None else seed
    machine = machine_of(stand_in=stand_in)
    chosen = [step for step in STEPS if steps is None or step.number in steps]
    results: list[Result] = []
    until = time.monotonic() + seconds
    for number, step in enumerate(chosen):
        result = run_step(step, machine, out, seed, until, sum(each.share for each in chosen[number:]), cases)
        results.append(result)
        print("\n".join(lines_of(result)), flush=True)
        write(out, results, machine, seed)
        if result.status is Status.WRONG:
            break
    machine.close()
    faulthandler.cancel_dump_traceback_later()
    print(verdict(results, stands_in=stand_in))
    return exit_code(results)


def run_step(
    step: Step, machine: Machine, out: Path, seed: int, until: float, shares: float, cases: int | None = None
) -> Result:
    """Run one within its share of what is left."""
    began = time.monotonic()
    ends = began + max(until - began, 0.0) * step.share / shares
    context = Context(machine, out, seed, until=ends, cases=cases)
    status, reason = Status.PASSED, ""
    try:
        step.run(context)
        if missed := context.report.missed():
            status, reason = Status.MISSED, "; ".join(missed)
    except NotRunError as error:
        missed = context.report.missed()
        status = Status.MISSED if missed else Status.NOT_RUN
        reason = "; ".join([*missed, str(error)])
    except WrongByteError as error:
        status, reason = Status.WRONG, str(error)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the steps that follow may still tell something
        status, reason = Status.FAILED, f"{type(error).__name__}: {error}"[:500]
    return Result(step, status, time.monotonic() - began, reason, context.report)


def exit_code(results: Sequence[Result]) -> int:
    """Return 0 if nothing was wrong and no aim was missed."""
    return max((_EXIT_CODES.get(result.status, 0) for result in results), default=0)


def verdict(results: Sequence[Result], *, stands_in: bool) -> str:
    """Say in one sentence what the run showed, and name the steps that showed less."""
    if stands_in:
        return f"a rehearsal without a GPU, which proves nothing about one: {_verdict(results)}"
    return _verdict(results)


def _verdict(results: Sequence[Result]) -> str:
    for status, text in (
        (Status.WRONG, "WRONG BYTES: do not use these copies on this machine"),
        (Status.FAILED, "no wrong byte was seen, but steps failed"),
        (Status.MISSED, "every byte was right; aims were missed"),
        (Status.NOT_RUN, "every byte was right and every aim that was tried is met; steps were not run"),
    ):
        if found := [result for result in results if result.status is status]:
            return f"{text}: " + "; ".join(f"step {each.step.number} ({each.reason})" for each in found)
    return "every byte was right and every aim is met"


def lines_of(result: Result) -> list[str]:
    """Return a result as text."""
    reason = f": {result.reason}" if result.reason else ""
    head = f"step {result.step.number}, {result.step.title}: {result.status} in {result.seconds:.1f} s{reason}"
    return [head, *(f"  {line}" for line in result.report.lines())]


def write(out: Path, results: Sequence[Result], machine: Machine, seed: int) -> None:
    """Write both files."""
    date, said = report.now(), verdict(results, stands_in=machine.stands_in)
    record = {
        "device": machine.name, "stand_in": machine.stands_in, "date": date, "seed": seed,
        "machine": report.machine(), "verdict": said, "exit_code": exit_code(results),
        "steps": [
            {
                "number": result.step.number, "title": result.step.title, "status": result.status,
                "seconds": round(result.seconds, 2), "reason": result.reason, "figures": result.report.record(),
            }
            for result in results
        ],
    }  # fmt: skip
    (out / "report.json").write_text(json.dumps(record, indent=2, default=str) + "\n")
    page = [
        f"# The first day on {machine.name}",
        "",
        f"{date}, seed {seed}. **Verdict:** {said}.",
        "",
    ]
    page += ["| step | | result | seconds |", "|---|---|---|---|"]
    page += [
        f"| {result.step.number} | {result.step.title} | {result.status} | {result.seconds:.1f} |" for result in results
    ]
    for result in results:
        page += ["", f"## {result.step.number}. {result.step.title}", ""]
        page += [f"{result.status}: {result.reason}", ""] if result.reason else []
        page += ["```text", *result.report.lines(), "```"]
    (out / "report.md").write_text("\n".join(page) + "\n")
