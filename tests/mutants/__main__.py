"""Mutation testing: `python -m tests.mutants --sample 60` changes the product a little, many times, and runs its tests.

Prints every change that no test noticed. Changes are drawn: `--seed` repeats a draw. Each runs in a copy of the tree.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Final

from tests.mutants.mutations import Mutation, mutations
from tests.mutants.rooms import files_of, modules

ROOT: Final = Path(__file__).parents[2]
_TREE: Final = ("core", "proto", "server", "client", "tests", "configs", "demo", "benchmarks", "docs", "pyproject.toml")
_MORE_SECONDS: Final = 60.0
"""In addition to four times what the tests of a room need: then a change has made them hang."""


@dataclass(frozen=True, slots=True)
class Result:
    mutation: Mutation
    outcome: str  # "caught", "hangs", "survived", "explained"
    seconds: float


class Copy:
    """A copy of the tree, in which one change at a time is tried."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in _TREE:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, root / name, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
            else:
                shutil.copy2(source, root / name)
        parts = [str(root / part) for part in ("core", "proto", "server", "client")]
        self._environment = {**os.environ, "CI": "true", "PYTHONPATH": os.pathsep.join([*parts, str(root)])}
        self._stamp_ns = time.time_ns()
        self._process: subprocess.Popen[bytes] | None = None

    def end(self) -> None:
        """What is being run ends at once, and whatever it has started."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)

    def run(self, files: Sequence[str], timeout_seconds: float | None) -> str:
        """ "caught" when a test fails, "survived" when all pass, "hangs" when they do not end in time."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not long", *files]
        process = self._process = subprocess.Popen(
            command, cwd=self.root, env=self._environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            return "hangs"
        finally:
            self.end()
            process.wait()
        return "caught" if code else "survived"

    def try_one(self, mutation: Mutation, files: Sequence[str], timeout_seconds: float) -> str:
        path = self.root / mutation.path
        source = path.read_bytes()
        try:
            self._write(path, mutation.apply(source))
            return self.run(files, timeout_seconds)
        finally:
            self._write(path, source)

    def _write(self, path: Path, source: bytes) -> None:
        """With a time of its own: compiled code is told by it, and two changes of a second may be equally long."""
        self._stamp_ns += 2_000_000_000
        path.write_bytes(source)
        os.utime(path, ns=(self._stamp_ns, self._stamp_ns))


def explained() -> set[tuple[str, str]]:
    """(module, change) of those that are listed with a reason."""
    table = tomllib.loads((ROOT / "tests/mutants/explained.toml").read_text())
    return {(module, entry["change"]) for module, entries in table.items() for entry in entries["survivors"]}


def _change(mutation: Mutation) -> str:
    return str(mutation).partition(": ")[2]


def draw(patterns: Sequence[str], sample: int, seed: int) -> list[Mutation]:
    every = [mutation for path in modules(ROOT, patterns) for mutation in mutations(path, (ROOT / path).read_text())]
    print(f"{len(every)} changes of {len({one.path for one in every})} modules; seed {seed}", flush=True)
    return random.Random(seed).sample(every, min(sample, len(every))) if sample else every


class Run:
    """All changes, some at once."""

    def __init__(self, chosen: Sequence[Mutation]) -> None:
        self.results: list[Result] = []
        self._waiting: SimpleQueue[Mutation] = SimpleQueue()
        for mutation in chosen:
            self._waiting.put(mutation)
        self._known = explained()
        self._seconds: dict[tuple[str, ...], float] = {}  # that tests need without a change
        self._lock = threading.Lock()
        self._copies: list[Copy] = []

    def work(self, jobs: int) -> None:
        """Returns when all are done; a signal ends them, and the process."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        threads = [threading.Thread(target=self._work, daemon=True) for _ in range(jobs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _stop(self, number: int, _: object) -> None:
        for copy in self._copies:
            copy.end()
        sys.exit(128 + number)

    def _work(self) -> None:
        with tempfile.TemporaryDirectory(prefix="mutants") as folder:
            copy = Copy(Path(folder) / "tree")
            self._copies.append(copy)
            while not self._waiting.empty():
                try:
                    mutation = self._waiting.get_nowait()
                except Empty:  # another took the last one
                    return
                self._try(copy, mutation)

    def _try(self, copy: Copy, mutation: Mutation) -> None:
        files = files_of(ROOT, mutation.path)
        timeout = 4 * self._baseline(copy, tuple(sorted(files))) + _MORE_SECONDS
        began = time.monotonic()
        outcome = copy.try_one(mutation, files, timeout)
        if outcome == "survived" and (str(mutation.path), _change(mutation)) in self._known:
            outcome = "explained"
        self.results.append(Result(mutation, outcome, time.monotonic() - began))
        print(f"{outcome:<10}{self.results[-1].seconds:6.0f} s  {mutation}", flush=True)

    def _baseline(self, copy: Copy, files: tuple[str, ...]) -> float:
        with self._lock:
            if files not in self._seconds:
                began = time.monotonic()
                if copy.run(files, None) != "survived":
                    raise RuntimeError(f"these fail without any change: {' '.join(files)}")
                self._seconds[files] = time.monotonic() - began
            return self._seconds[files]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("modules", nargs="*", help="patterns of paths, e.g. 'server/kvdepot/server/io/*'; none: all")
    parser.add_argument("--sample", type=int, default=60, help="how many changes are drawn (default: 60; 0: all)")
    parser.add_argument("--seed", type=int, default=None, help="of the draw; without it one is drawn, and printed")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="copies at work (default: cores)")
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1 << 31)
    chosen = draw(options.modules, options.sample, seed)
    run = Run(chosen)
    run.work(options.jobs)
    counts: dict[str, Counter[str]] = {}
    for result in run.results:
        counts.setdefault(str(result.mutation.path.parent), Counter())[result.outcome] += 1
    print(f"\n{'room':<44}{'changes':>8}{'caught':>8}{'explained':>11}{'survived':>10}{'score':>8}")
    for name, count in [*sorted(counts.items()), ("all", sum(counts.values(), Counter()))]:
        caught, total = count["caught"] + count["hangs"], count.total()
        score = (caught + count["explained"]) / total if total else 1.0
        print(f"{name:<44}{total:>8}{caught:>8}{count['explained']:>11}{count['survived']:>10}{score:>8.1%}")
    whole = len(run.results) == len(chosen)  # else tests failed without a change
    return 0 if whole and all(result.outcome != "survived" for result in run.results) else 1


if __name__ == "__main__":
    sys.exit(main())
