"""Mutation testing: `python -m tests.mutants --sample 60` changes the product a little, many times, and runs its tests.

Prints every change that no test noticed. Changes are drawn: `--seed` repeats a draw. Each runs in a copy of the tree,
with the tests of its room that execute its lines.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final

from tests.mutants.mutations import Mutation, mutations
from tests.mutants.rooms import files_of, modules, room_of
from tests.mutants.selection import chosen
from tests.mutants.watching import Noted, test_due

ROOT: Final = Path(__file__).parents[2]
_TREE: Final = ("core", "proto", "server", "client", "tests", "configs", "demo", "benchmarks", "docs", "pyproject.toml")
_PYTEST: Final = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not long")
_MORE_SECONDS: Final = 60.0
"""In addition to three times what a test needs, or all of them do: then a change has made it hang."""


@dataclass(frozen=True, slots=True)
class Result:
    mutation: Mutation
    outcome: str  # "caught", "hangs", "survived", "explained"
    seconds: float
    by: str  # which test


class Copy:
    """A copy of the tree, in which one change at a time is tried, by a process that forks for each."""

    def __init__(self, folder: Path, root: Path = ROOT) -> None:
        self._root = folder / "tree"
        self._report, self._output, self._due = folder / "report", folder / "output", folder / "due"
        for name in _TREE:
            source = root / name
            if source.is_dir():
                shutil.copytree(source, self._root / name, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
            elif source.exists():
                shutil.copy2(source, self._root / name)
        parts = [str(self._root / part) for part in ("core", "proto", "server", "client")]
        environment = {**os.environ, "CI": "true", "PYTHONPATH": os.pathsep.join([*parts, str(self._root)])}
        self._arguments = [*_PYTEST, f"--basetemp={folder / 'temp'}"]
        self._stamp_ns = time.time_ns()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.mutants.forks"], cwd=self._root, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    @property
    def pid(self) -> int:
        """Of the process that forks."""
        return self._process.pid

    def end(self) -> None:
        """And what is being run."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def note(self, files: Sequence[str]) -> Noted:
        """Runs all tests of these, without a change."""
        code = self._ask_to_run([*self._arguments, *files], None, None)
        if code not in (0, 1) or not self._report.exists():
            raise RuntimeError(f"pytest ends with {code}: {self._output.read_text()[-2000:]}")
        return Noted.read(self._report)

    def import_as(self, noted: Noted) -> None:
        """What takes long to import, as another copy has found."""
        self._ask({"imported": noted.imported})

    def try_one(self, mutation: Mutation, tests: Mapping[str, float], seconds: float) -> tuple[str, str]:
        """An outcome, and the test that fails or hangs. `tests`: how many seconds each may take; all: `seconds`."""
        path = self._root / mutation.path
        source = path.read_bytes()
        self._report.unlink(missing_ok=True)
        files = dict.fromkeys(test.partition("::")[0] for test in tests)
        try:
            self._write(path, mutation.apply(source))
            code = self._ask_to_run([*self._arguments, "-x", *files], tests, seconds)
        finally:
            self._write(path, source)
        if code is None:
            return "hangs", test_due(self._due)[1]
        by = self._report.read_text() if self._report.exists() else "no test can be run"
        return ("survived", "") if code in (0, 5) else ("caught", by)

    def _ask_to_run(
        self, arguments: Sequence[str], tests: Mapping[str, float] | None, seconds: float | None
    ) -> int | None:
        return self._ask(
            {
                "arguments": arguments, "tests": tests, "seconds": seconds, "report": str(self._report),
                "due": str(self._due), "output": str(self._output),
            }
        )  # fmt: skip

    def _ask(self, task: dict[str, Any]) -> int | None:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(task), file=self._process.stdin, flush=True)
        code: int | None = json.loads(self._process.stdout.readline())
        return code

    def _write(self, path: Path, source: bytes) -> None:
        """With a time of its own: compiled code is told by it, and two changes of a second may be equally long."""
        self._stamp_ns += 2_000_000_000
        path.write_bytes(source)
        os.utime(path, ns=(self._stamp_ns, self._stamp_ns))


class Run:
    """All changes, room by room, some at once."""

    def __init__(self, folder: Path, jobs: int) -> None:
        self.results: list[Result] = []
        self._known = explained()
        self._copies = []
        self._free: SimpleQueue[Copy] = SimpleQueue()
        for job in range(jobs):
            self._copies.append(Copy(folder / str(job)))
            self._free.put(self._copies[-1])

    def end(self) -> None:
        for copy in self._copies:
            copy.end()

    def work(self, room: str, changes: Sequence[Mutation]) -> None:
        began = time.monotonic()
        noted = self._copies[0].note(files_of(ROOT, room))
        for copy in self._copies[1:]:
            copy.import_as(noted)
        print(f"{room}: {len(noted.tests)} tests pass without a change, {time.monotonic() - began:.0f} s", flush=True)
        for test in noted.failed:
            print(f"not counted, fails without a change: {test}", flush=True)

        def work(mutation: Mutation) -> None:
            copy = self._free.get()
            self._try(copy, mutation, noted)
            self._free.put(copy)

        threads = ThreadPoolExecutor(len(self._copies))
        try:
            list(threads.map(work, changes))
        finally:
            threads.shutdown(wait=False, cancel_futures=True)

    def _try(self, copy: Copy, mutation: Mutation, noted: Noted) -> None:
        tests = {test: _MORE_SECONDS + 3 * noted.seconds[test] for test in chosen(mutation, noted)}
        began = time.monotonic()
        seconds = _MORE_SECONDS + 3 * sum(noted.seconds[test] for test in tests)
        outcome, by = copy.try_one(mutation, tests, seconds)
        if outcome == "survived" and (str(mutation.path), mutation.text, mutation.change) in self._known:
            outcome = "explained"
        self.results.append(Result(mutation, outcome, time.monotonic() - began, by))
        by = by or f"{len(tests)} tests: {mutation.text}"
        print(f"{outcome:<10}{self.results[-1].seconds:6.0f} s  {mutation}  [{by}]", flush=True)


def explained() -> set[tuple[str, str, str]]:
    """(module, line, change) of those that are listed with a reason."""
    modules = tomllib.loads((ROOT / "tests/mutants/explained.toml").read_text())
    return {
        (module, entry["line"], entry["change"])
        for module, entries in modules.items()
        for entry in entries["survivors"]
    }


def draw(patterns: Sequence[str], sample: int, seed: int) -> list[Mutation]:
    every = [mutation for path in modules(ROOT, patterns) for mutation in mutations(path, (ROOT / path).read_text())]
    print(f"{len(every)} changes of {len({one.path for one in every})} modules; seed {seed}", flush=True)
    return random.Random(seed).sample(every, min(sample, len(every))) if sample else every


def table(results: Sequence[Result]) -> str:
    counts: dict[str, Counter[str]] = {}
    for result in results:
        counts.setdefault(room_of(result.mutation.path) or "", Counter())[result.outcome] += 1
    rows = [f"{'room':<12}{'changes':>8}{'caught':>8}{'explained':>11}{'survived':>10}{'score':>8}"]
    for name, count in [*sorted(counts.items()), ("all", sum(counts.values(), Counter()))]:
        caught, total = count["caught"] + count["hangs"], count.total()
        score = (caught + count["explained"]) / total if total else 1.0
        rows.append(f"{name:<12}{total:>8}{caught:>8}{count['explained']:>11}{count['survived']:>10}{score:>8.1%}")
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("modules", nargs="*", help="rooms (tests/mutants/rooms.py), or patterns of paths; none: all")
    parser.add_argument("--sample", type=int, default=60, help="how many changes are drawn (default: 60; 0: all)")
    parser.add_argument("--seed", type=int, default=None, help="of the draw; without it one is drawn, and printed")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="copies at work (default: cores)")
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1 << 31)
    by_room: dict[str, list[Mutation]] = {}
    for mutation in draw(options.modules, options.sample, seed):
        by_room.setdefault(room_of(mutation.path) or "", []).append(mutation)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="mutants") as folder:
        run = Run(Path(folder), options.jobs)
        try:
            for room, changes in by_room.items():
                run.work(room, changes)
        finally:
            run.end()
    print(f"\n{table(run.results)}")
    return 0 if all(result.outcome != "survived" for result in run.results) else 1


if __name__ == "__main__":
    sys.exit(main())
