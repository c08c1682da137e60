"""What pytest itself is made to do: note what each test executes, or try chosen tests beside a change."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import coverage
import hypothesis
import pytest
from _pytest.runner import runtestprotocol


@dataclass
class Noted:
    """Of the tests of a room without a change. Tests are told by their place in `tests`."""

    tests: list[str] = field(default_factory=list)
    """Those that pass."""
    failed: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    children: list[str] = field(default_factory=list)
    """The files of those that start a process of Python: what that executes is not seen."""
    lines: dict[str, dict[int, list[str]]] = field(default_factory=dict)
    """By module and line: the tests that execute it; an empty name is what imports."""
    imported: list[str] = field(default_factory=list)
    """Modules of others, in the order in which they were imported."""

    @classmethod
    def read(cls, path: Path) -> Noted:
        noted = cls(**json.loads(path.read_text()))
        noted.lines = {
            module: {int(line): names for line, names in lines.items()} for module, lines in noted.lines.items()
        }
        return noted


def test_due(path: Path) -> tuple[float, str]:
    """When the test under way is to be over, of the monotonic clock, and which one it is."""
    seconds, _, test = path.read_text().partition(" ") if path.exists() else ("", "", "")
    return float(seconds or math.inf), test


class _Quick:
    """The first example that fails is enough: nothing is made smaller."""

    def pytest_collection(self) -> None:
        ours = hypothesis.settings.get_profile("kvdepot")
        phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
        hypothesis.settings.register_profile("mutants", ours, phases=phases, database=None)
        hypothesis.settings.load_profile("mutants")


class Noting(_Quick):
    """Runs all tests, each in a context of its own, and writes `Noted` to a file."""

    def __init__(self, root: Path, report: Path) -> None:
        self._root, self._report = root, report
        self._noted = Noted()
        self._test = ""
        self._files: set[str] = set()
        self._before = frozenset(sys.modules)
        self._coverage = coverage.Coverage(data_file=None, include=[f"{root}/server/*", f"{root}/client/*"])
        sys.addaudithook(self._hear)
        self._coverage.start()

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        popen = (
            event == "subprocess.Popen" and isinstance(arguments[1], list | tuple) and sys.executable in arguments[1]
        )
        if self._test and (popen or event == "os.fork"):
            self._files.add(self._test.partition("::")[0])

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._test = item.nodeid
        self._coverage.switch_context(item.nodeid)
        began = time.monotonic()
        result = yield
        self._noted.seconds[item.nodeid] = time.monotonic() - began
        self._coverage.switch_context("")
        self._test = ""
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._noted.failed.append(report.nodeid)
        elif report.passed and report.when == "call":
            self._noted.tests.append(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        self._coverage.stop()
        noted, data = self._noted, self._coverage.get_data()
        for file in data.measured_files():
            module = str(Path(file).relative_to(self._root))
            noted.lines[module] = dict(data.contexts_by_lineno(file))
        noted.tests = [test for test in noted.tests if test not in noted.failed]
        noted.children = sorted(self._files)
        noted.imported = [
            name
            for name, module in sys.modules.items()
            if name not in self._before and "site-packages" in (getattr(module, "__file__", None) or "")
        ]
        self._report.write_text(json.dumps(asdict(noted)))


class Trying(_Quick):
    """Runs chosen tests in the order given. One that fails has a second try: it may have been the machine.

    `tests`: how many seconds a try of each may take. `due` tells others when the test under way is to be over: what
    hangs in a test cannot be relied on to end it.
    """

    def __init__(self, tests: Mapping[str, float], report: Path, due: Path) -> None:
        self._tests = tests
        self._places = {test: place for place, test in enumerate(tests)}
        self._report, self._due = report, due

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted(
            (item for item in items if item.nodeid in self._places), key=lambda item: self._places[item.nodeid]
        )

    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        for _ in range(2):
            self._due.write_text(f"{time.monotonic() + self._tests[item.nodeid]} {item.nodeid}")
            reports = runtestprotocol(item, log=False, nextitem=nextitem)
            if not any(report.failed for report in reports):
                return True
            item._initrequest()  # type: ignore[attr-defined]
        self._report.write_text(item.nodeid)
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        return True
