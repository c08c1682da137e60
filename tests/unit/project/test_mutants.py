"""The tool that changes the product to see whether tests notice."""

from __future__ import annotations

import ast
import os
import re
import select
import shutil
import signal
import threading
import tomllib
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.mutants.__main__ import Copy, explained
from tests.mutants.mutations import Mutation, mutations
from tests.mutants.rooms import ROOMS, files_of, modules, room_of
from tests.mutants.selection import chosen
from tests.mutants.watching import Noted
from tests.rigs.patience import patient, wait_until
from tests.rigs.seeds import one_in

ROOT = Path(__file__).resolve().parents[3]
SOURCE = '''"""A module."""

LIMIT = 5


class Lease:
    """One of them."""

    def due(self, now: float, left: int = 3) -> bool:
        """Whether its time is over."""
        self.log.info("%s", now + 1)
        if left <= 0 or self.deadline <= now and not self.ended:
            self.count += left + 2
            self.note(now)
            return True
        assert left > 0
        return f"{left + 1}" in self.names
'''


def changes(source: str) -> set[str]:
    return {one.change for one in mutations(Path("lease.py"), source)}


def test_operators_operands_constants_and_statements_are_changed() -> None:
    assert changes(SOURCE) >= {
        "left <= 0  ->  left < 0",
        "left <= 0 or self.deadline <= now and not self.ended  ->  (self.deadline <= now and (not self.ended))",
        "not self.ended  ->  (self.ended)",
        "self.count += left + 2  ->  pass",
        "self.count += left + 2  ->  self.count -= left + 2",
        "left + 2  ->  (left)",
        "2  ->  3",
        "self.note(now)  ->  pass",
        "return True  ->  return False",
        "f\"{left + 1}\" in self.names  ->  f'{left + 1}' not in self.names",
    }


def test_what_no_test_has_to_notice_stays() -> None:
    said = "\n".join(changes(SOURCE))
    for text in ("A module", "LIMIT", "log.info", "assert", "float", "5", "int = 3"):
        assert text not in said


@pytest.mark.parametrize("room", one_in(3, ROOMS, 1))
def test_every_change_of_a_module_is_python_and_differs_from_it(room: str) -> None:
    path = modules(ROOT, [room])[0]
    source = (ROOT / path).read_text()
    before = ast.dump(ast.parse(source))
    for mutation in mutations(path, source)[:100]:
        assert ast.dump(ast.parse(mutation.apply(source.encode()))) != before, str(mutation)


def test_modules_in_no_room_are_the_ones_that_the_page_names() -> None:
    """Below the parts of the server and the client: folders that have such a module."""
    every = [path.relative_to(ROOT) for top in ("server", "client") for path in (ROOT / top).rglob("*.py")]
    left = {path.parts[3] for path in every if room_of(path) is None}
    text = " ".join(
        (ROOT / "docs/testing.md").read_text().partition("**In no room:**")[2].split("Their tests")[0].split()
    )
    named = set(re.findall("`([a-z]+)`", text)) - {"core", "proto"}
    whole = {"tiers", "copy"}  # the line before names these modules
    assert left - whole == named


def test_the_scores_count_what_is_explained() -> None:
    rows = [line.split("|")[1:-1] for line in (ROOT / "docs/testing.md").read_text().splitlines() if "100 % |" in line]
    scores = {cells[0].strip().strip("`"): [int(cell) for cell in cells[1:6]] for cells in rows}
    counted = Counter(room_of(Path(module)) for module, _, _ in explained())
    assert {room: columns[3] for room, columns in scores.items() if columns[3]} == counted
    for room, (tried, *outcomes) in scores.items():
        assert tried == sum(outcomes), room


def test_every_room_has_modules_and_tests() -> None:
    for name, room in ROOMS.items():
        assert modules(ROOT, [name])
        for pattern in room.tests:
            assert list(ROOT.glob(pattern)), pattern
        assert files_of(ROOT, name)
    assert room_of(Path("server/kvdepot/server/depot/stores/store.py")) == "depot"
    assert room_of(Path("server/kvdepot/server/depot/sessions/sessions.py")) == "processes"
    assert room_of(Path("client/kvdepot/client/ctl/printer.py")) is None
    assert modules(ROOT, ["server/kvdepot/server/depot/stores/st*.py"]) == [
        Path("server/kvdepot/server/depot/stores/store.py")
    ]


def test_every_explained_survivor_is_still_a_change_of_its_module() -> None:
    table = tomllib.loads((ROOT / "tests/mutants/explained.toml").read_text())
    for module, entries in table.items():
        made = {(one.text, one.change) for one in mutations(Path(module), (ROOT / module).read_text())}
        for entry in entries["survivors"]:
            assert (entry["line"], entry["change"]) in made, f"{module}: {entry}"
            assert entry["reason"]


def change_of(line: int, *more: int) -> Mutation:
    return Mutation(Path("m.py"), line, 0, 1, "a", "b", frozenset({line, *more}), "a")


def test_a_change_has_the_lines_of_its_statement_or_of_its_head() -> None:
    source = "def f(a):\n    if (\n        a > 1\n    ):\n        g(\n            2\n        )\n"
    lines = {one.change: one.lines for one in mutations(Path("m.py"), source)}
    assert lines["a > 1  ->  a >= 1"] == {2, 3, 4}
    assert lines["2  ->  3"] == {5, 6, 7}


def test_a_change_of_a_compiled_function_may_be_seen_by_whatever_imports_it() -> None:
    compiled = "from numba import njit\n\n@njit('int64(int64)')\ndef f(a):\n    if a > 1:\n        return 2\n"
    lines = {one.change: one.lines for one in mutations(Path("m.py"), compiled)}
    assert lines["a > 1  ->  a >= 1"] == {3, 5}
    assert lines["2  ->  3"] == {3, 6}


def test_a_change_is_tried_with_tests_that_execute_its_lines_or_may() -> None:
    seconds = {"a.py::slow": 3.0, "b.py::quick": 0.1, "b.py::other": 0.2, "c.py::child": 0.1, "d.py::more": 0.3}
    lines = {1: [""], 2: ["a.py::slow", "b.py::quick", "d.py::fails"], 3: ["b.py::other"]}
    noted = Noted(list(seconds), ["d.py::fails"], {**seconds, "d.py::fails": 1.0}, ["c.py"], {"m.py": lines})
    assert chosen(change_of(2), noted) == ["b.py::quick", "a.py::slow"]
    assert chosen(change_of(3, 2), noted) == ["b.py::quick", "b.py::other", "a.py::slow"]
    assert set(chosen(change_of(1), noted)) == set(seconds), "executed by whatever imports it"
    assert chosen(change_of(4), noted) == ["c.py::child"], "executed nowhere here, maybe in a process"
    noted.children.clear()
    assert set(chosen(change_of(4), noted)) == set(seconds), "executed where it cannot be seen"


# In parts: texts name no file that this tree does not have.
MODULE, TESTS = (f"{folder}/{name}.py" for folder, name in (("server", "small"), ("tests", "test_small")))
SMALL = """
def larger(a, b):
    return a if a > b else b

def wait(seconds):
    while seconds > 0:
        seconds -= 1
    return True
"""
SMALL_TESTS = """
import subprocess, sys
import small

TRIES = []

def test_larger():
    assert small.larger(1, 2) == 2
    assert subprocess.run([sys.executable, "-c", ""]).returncode == 0

def test_wait():
    assert small.wait(1)

def test_whose_first_try_fails():
    TRIES.append(small.larger(1, 2))
    assert sys.gettrace() or len(TRIES) > 1

def test_that_always_fails():
    assert small.larger(1, 1) == 0
"""


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Copy]:
    """Of a tree with a module, its tests, and this tool."""
    root = tmp_path / "root"
    shutil.copytree(ROOT / "tests/mutants", root / "tests/mutants")
    (root / "server").mkdir()
    (root / MODULE).write_text(SMALL)
    (root / "tests/__init__.py").touch()
    (root / "tests/conftest.py").write_text("import hypothesis\nhypothesis.settings.register_profile('kvdepot')\n")
    (root / TESTS).write_text(SMALL_TESTS)
    (root / "pyproject.toml").write_text("[tool.pytest.ini_options]\nmarkers = ['long: takes long']\n")
    copy = Copy(tmp_path, root)
    yield copy
    copy.end()


@pytest.mark.long(seconds=15)
def test_a_change_is_tried_with_the_tests_that_execute_it(small: Copy) -> None:
    noted = small.note([TESTS])
    assert [test.partition("::")[2] for test in noted.tests] == [
        "test_larger", "test_wait", "test_whose_first_try_fails",
    ]  # fmt: skip
    assert [test.partition("::")[2] for test in noted.failed] == ["test_that_always_fails"]
    assert noted.children == [TESTS]
    wait = f"{TESTS}::test_wait"
    assert noted.lines[MODULE][7] == [wait]
    changes = {one.change: one for one in mutations(Path(MODULE), SMALL)}

    def tried(change: str, each: float = 60, seconds: float = 60) -> tuple[str, str]:
        return small.try_one(changes[change], dict.fromkeys(chosen(changes[change], noted), each), seconds)

    assert tried("a > b  ->  a >= b") == ("survived", "")
    assert tried("seconds -= 1  ->  pass", each=5, seconds=600) == ("hangs", wait)
    assert tried("seconds -= 1  ->  pass", each=600, seconds=5)[0] == "hangs"
    assert tried("return True  ->  return False") == ("caught", wait)
    broken = Mutation(Path(MODULE), 3, 0, 0, "", "import nothing_there\n", frozenset({3}), "")
    assert small.try_one(broken, dict.fromkeys(noted.tests, 60), 60) == ("caught", "no test can be run")


def test_a_change_that_hangs_ends_with_the_process_that_forked_it(small: Copy) -> None:
    noted = small.note([TESTS])
    (change,) = (one for one in mutations(Path(MODULE), SMALL) if one.change == "seconds -= 1  ->  pass")

    def try_it() -> None:
        with suppress(ValueError):  # there is no answer
            small.try_one(change, dict.fromkeys(chosen(change, noted), 600), 600)

    trying = threading.Thread(target=try_it)
    trying.start()
    children = Path(f"/proc/{small.pid}/task/{small.pid}/children")
    wait_until(lambda: children.read_text().split() != [], "it is tried")
    pidfd = os.pidfd_open(int(children.read_text().split()[0]))
    os.kill(small.pid, signal.SIGKILL)
    wait_until(lambda: select.select([pidfd], [], [], 0)[0] != [], "it has ended")
    os.close(pidfd)
    trying.join(patient(60))
