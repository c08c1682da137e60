"""No test fails because its machine is busy: each limit of a wait grows with the load (`tests/rigs/patience.py`)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.rigs.syntax import parsed

ROOT = Path(__file__).resolve().parents[3]
WAITS = {"communicate", "join", "result", "wait"}
SHORT_SECONDS = 2.0
"""A wait of at most so long is for something that is not to come."""
MEANT = {"tests/process/daemon/test_hung_files.py"}
"""Where a thread has to hang for longer than the daemon may."""


def fixed_limits(tree: ast.Module) -> Iterator[ast.Call]:
    """Yield the waits whose limit is a number, or the name of one."""
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr != "timeout":
            limits = [keyword.value for keyword in call.keywords if keyword.arg == "timeout"]
            limits += call.args[:1] if call.func.attr in WAITS else []
            if any(_is_fixed(limit) for limit in limits):
                yield call


def _is_fixed(limit: ast.expr) -> bool:
    if isinstance(limit, ast.Name):
        return limit.id.isupper() and limit.id.strip("_").endswith("SECONDS") and "SAMPLE" not in limit.id
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


def _is_measured(seconds: ast.expr) -> bool:
    clocks = ("monotonic", "perf_counter")
    return isinstance(seconds, ast.BinOp) and any(
        isinstance(part, ast.Attribute) and part.attr in clocks for part in ast.walk(seconds.left)
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


def test_no_duration_is_measured_that_does_not_grow_with_the_load() -> None:
    found = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        name = str(path.relative_to(ROOT))
        found += [f"{name}:{each.lineno}: {ast.unparse(each)}" for each in fixed_durations(parsed(path))]
    assert not found, "use a Deadline: " + "; ".join(found)


def test_a_fixed_limit_is_found() -> None:
    lines = ["process.wait(30)", "stub.Check(request, timeout=CALL_SECONDS)", "thread.join(timeout=5.0)"]
    for line in lines:
        assert len(list(fixed_limits(ast.parse(line)))) == 1, line
    for line in ("process.wait(patient(30))", "go_on.wait(0.05)", "', '.join(NAMES)", "pytest.mark.timeout(900)"):
        assert not list(fixed_limits(ast.parse(line))), line


def test_every_limit_of_a_wait_grows_with_the_load() -> None:
    found = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        name = str(path.relative_to(ROOT))
        if name not in MEANT:
            found += [f"{name}:{call.lineno}: {ast.unparse(call)}" for call in fixed_limits(parsed(path))]
    assert not found, found
