"""No test fails because its machine is busy: each limit of a wait grows with the load (`tests/rigs/patience.py`)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from tests.rigs.syntax import parsed

ROOT = Path(__file__).resolve().parents[3]
LIMITS = {"communicate": 0, "join": 0, "result": 0, "select": 3, "settimeout": 0, "wait": 0}
"""Waits, and which of their arguments is the limit."""
CLOCKS = ("monotonic", "perf_counter")
SHORT_SECONDS = 2.0
"""A wait of at most so long is for something that is not to come."""
MEANT = {"tests/process/daemon/test_hung_files.py"}
"""Where a thread has to hang for longer than the daemon may."""


def fixed_limits(tree: ast.Module) -> Iterator[ast.Call]:
    """Yield the waits whose limit is a number, the name of one, or a parameter that is one unless it is given."""
    for call in ast.walk(tree):
        if any(_is_fixed(limit) for limit in _limits(call)):
            yield cast("ast.Call", call)
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            fixed = set(_fixed_parameters(function.args))
            for call in ast.walk(function):
                if any(isinstance(limit, ast.Name) and limit.id in fixed for limit in _limits(call)):
                    yield cast("ast.Call", call)


def _limits(call: ast.AST) -> list[ast.expr]:
    """Return how long a call may wait at most. Empty if it is no call, or does not wait."""
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or call.func.attr == "timeout":
        return []
    at = LIMITS.get(call.func.attr, len(call.args))
    return [*call.args[at : at + 1], *(keyword.value for keyword in call.keywords if keyword.arg == "timeout")]


def _fixed_parameters(arguments: ast.arguments) -> Iterator[str]:
    named = [*arguments.posonlyargs, *arguments.args]
    pairs = [*zip(named[::-1], arguments.defaults[::-1], strict=False)]
    pairs += [(name, value) for name, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if value]
    yield from (name.arg for name, value in pairs if _is_fixed(value))


def _is_fixed(limit: ast.expr) -> bool:
    if isinstance(limit, ast.Name):
        again = "POLL" in limit.id or "SAMPLE" in limit.id  # who waits so long looks again and again
        return limit.id.isupper() and limit.id.strip("_").endswith("SECONDS") and not again
    value = limit.value if isinstance(limit, ast.Constant) else None
    return isinstance(value, int | float) and value > SHORT_SECONDS


def fixed_durations(tree: ast.Module) -> Iterator[ast.Compare]:
    """Yield the comparisons of seconds on the wall clock with at most a number, or the names of some."""
    for compared in ast.walk(tree):
        if isinstance(compared, ast.Compare):
            sides = [compared.left, *compared.comparators]
            for comparison, shorter, longer in zip(compared.ops, sides, sides[1:], strict=False):
                if isinstance(comparison, ast.Lt | ast.LtE) and _is_measured(shorter) and _is_known(longer):
                    yield compared


def fixed_ends(tree: ast.Module) -> Iterator[ast.Assert]:
    """Yield the assertions that it is not later by the wall clock than at a moment that was chosen before."""
    for asserted in ast.walk(tree):
        if isinstance(asserted, ast.Assert) and isinstance(asserted.test, ast.Compare):
            clock = asserted.test.left
            earlier = isinstance(asserted.test.ops[0], ast.Lt | ast.LtE)
            if earlier and isinstance(clock, ast.Call) and _reads_a_clock(clock.func):
                yield asserted


def _reads_a_clock(function: ast.expr) -> bool:
    return isinstance(function, ast.Attribute) and function.attr in CLOCKS


def _is_measured(seconds: ast.expr) -> bool:
    return isinstance(seconds, ast.BinOp) and any(
        isinstance(part, ast.Attribute) and part.attr in CLOCKS for part in ast.walk(seconds.left)
    )


def _is_known(seconds: ast.expr) -> bool:
    """Whether it is a number, made of constants alone."""
    parts = list(ast.walk(seconds))
    names = [part.id for part in parts if isinstance(part, ast.Name)]
    return all(map(str.isupper, names)) and not any(isinstance(part, ast.Call) for part in parts)


def test_a_fixed_duration_is_found() -> None:
    for line in ("assert time.monotonic() - began < 10", "assert 0.1 <= time.perf_counter() - began <= 2 * LONG"):
        assert len(list(fixed_durations(ast.parse(line)))) == 1, line
    for line in ("assert time.monotonic() - began < patient(10)", "assert time.thread_time() - began < 1"):
        assert not list(fixed_durations(ast.parse(line))), line
    assert not list(fixed_durations(ast.parse("assert time.monotonic() - began > 10")))
    assert list(fixed_ends(ast.parse("assert time.monotonic() < until, left")))
    assert not list(fixed_ends(ast.parse("assert time.monotonic() >= began + 1")))


def test_no_duration_is_measured_that_does_not_grow_with_the_load() -> None:
    found = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        name = str(path.relative_to(ROOT))
        fixed: list[ast.Compare | ast.Assert] = [*fixed_durations(parsed(path)), *fixed_ends(parsed(path))]
        found += [f"{name}:{each.lineno}: {ast.unparse(each)}" for each in fixed]
    assert not found, "use a Deadline: " + "; ".join(found)


def test_a_fixed_limit_is_found() -> None:
    lines = ["process.wait(30)", "stub.Check(request, timeout=CALL_SECONDS)", "thread.join(timeout=5.0)"]
    lines += ["ours.settimeout(CALL_SECONDS)", "select.select([ours], [], [], 30)"]
    lines += [
        "def get(self, seconds=5): got.wait(seconds)",
        "def get(*, seconds=SECONDS): stub.Get(1, timeout=seconds)",
    ]
    for line in lines:
        assert len(list(fixed_limits(ast.parse(line)))) == 1, line
    quiet = ["process.wait(patient(30))", "go_on.wait(0.05)", "', '.join(NAMES)", "pytest.mark.timeout(900)"]
    quiet += ["def get(self, seconds=5): got.wait(patient(seconds))", "def get(self, seconds): got.wait(seconds)"]
    for line in [*quiet, "select.select([ours], [], [], 0.05)", "def get(self, seconds=0.5): got.wait(seconds)"]:
        assert not list(fixed_limits(ast.parse(line))), line


def test_every_limit_of_a_wait_grows_with_the_load() -> None:
    found = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        name = str(path.relative_to(ROOT))
        if name not in MEANT:
            found += [f"{name}:{call.lineno}: {ast.unparse(call)}" for call in fixed_limits(parsed(path))]
    assert not found, found
