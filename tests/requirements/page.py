"""The rows of docs/requirements.md, the markers of the tests, and the page of both.

Markers are read from the source of the tests, so that the page needs no vLLM.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from tests.rigs.syntax import parsed

ROOT: Final = Path(__file__).resolve().parents[2]
PAGE: Final = ROOT / "docs" / "requirements.md"
_ROW: Final = re.compile(r"^- \*\*([A-Z]\d+[a-z]?)\*\*: (.*(?:\n  .*)*)", re.MULTILINE)
_UNTESTED: Final = "No test yet: "
_MARKER: Final = "pytest.mark.requirement"
_HEAD: Final = """\
# Requirements and tests

`make docs` generates this page from the markers of the tests. [Requirements](requirements.md) explains each id.
"""


@dataclass(frozen=True)
class Row:
    sentence: str
    untested: str
    """Why no test shows it, or nothing."""


@dataclass(frozen=True, order=True)
class Shown:
    file: str
    test: str


def rows() -> dict[str, Row]:
    """Return the requirements by id, in the order of their page."""
    found = [(row, " ".join(text.split()).partition(_UNTESTED)) for row, text in _ROW.findall(PAGE.read_text())]
    assert len(dict(found)) == len(found), "an id is there twice"
    return {row: Row(sentence.strip(), reason) for row, (sentence, _, reason) in found}


@cache
def marked() -> dict[str, list[Shown]]:
    """Return the tests by the ids of their markers, in the order of files and lines."""
    tests: dict[str, list[Shown]] = defaultdict(list)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        if _MARKER in path.read_text():
            for test, ids in _marks(parsed(path), path):
                for row in ids:
                    tests[row].append(Shown(str(path.relative_to(ROOT)), test))
    return tests


def _marks(tree: ast.Module, path: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield each marker's test and ids. Raise ValueError for a marker at another place than a test's decorators."""
    known: set[int] = set()
    for node, name in _places(tree):
        for call in _calls(node):
            known.add(call.lineno)
            yield name, [ast.literal_eval(argument) for argument in call.args]
    for call in _calls(*ast.walk(tree)):
        if call.lineno not in known:
            raise ValueError(f"{path}:{call.lineno}: a marker that is no decorator of a test")


def _places(tree: ast.Module) -> Iterator[tuple[ast.AST, str]]:
    """Yield the expressions that may be markers, with the name of what they mark."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            yield node.value.func, ast.unparse(node.targets[0])
        elif isinstance(node, ast.ClassDef):
            yield from ((decorator, node.name) for decorator in node.decorator_list)
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield from ((decorator, f"{node.name}.{inner.name}") for decorator in inner.decorator_list)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from ((decorator, node.name) for decorator in node.decorator_list)


def _calls(*nodes: ast.AST) -> list[ast.Call]:
    return [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == _MARKER]


def markdown() -> str:
    tests = marked()
    lines = [_HEAD]
    for row, requirement in rows().items():
        lines += [f"## {row}", "", requirement.sentence, ""]
        if not tests[row]:
            lines += [f"No test: {requirement.untested}", ""]
        by_file: dict[str, list[str]] = defaultdict(list)
        for shown in tests[row]:
            by_file[shown.file].append(shown.test)
        for file, names in by_file.items():
            lines += [f"- `{file}`", *(f"    - `{name}`" for name in names)]
        lines += [""] if by_file else []
    return "\n".join(lines).rstrip()
