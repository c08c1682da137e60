"""Count the structure of the product at a commit, HEAD by default: `python -m tests.house [COMMIT]`.

These are the counted rows of docs/architecture.md#the-house-before-and-after. Generated code does not count.
"""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tarfile
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Final

PRODUCT: Final = ("core", "proto", "server", "client")
LINES_MAX: Final = 450


def files(commit: str) -> dict[PurePath, str]:
    """Return path -> text of the product's modules, and of pyproject.toml."""
    command = ["git", "archive", commit, "pyproject.toml", *PRODUCT]
    packed = subprocess.run(command, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        found = {PurePath(member.name): archive.extractfile(member) for member in archive if member.isfile()}
    wanted = {path: file for path, file in found.items() if path.suffix in (".py", ".toml") and "_pb2" not in path.stem}
    return {path: file.read().decode() for path, file in wanted.items() if file is not None}


def imports(modules: Mapping[PurePath, str]) -> dict[str, set[str]]:
    """Return module -> modules of the product that it may import, for types alone too."""
    names = {".".join(path.with_suffix("").parts[1:]): text for path, text in modules.items()}
    graph = {}
    for name, text in names.items():
        imported = set[str]()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                imported |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        graph[name] = (imported & names.keys()) - {name}
    return graph


def circles(graph: Mapping[str, set[str]]) -> list[set[str]]:
    """Return the sets of modules that reach each other."""
    reached = {name: _reached(graph, name) for name in graph}
    found = {frozenset(other for other in reached[name] if name in reached[other]) for name in graph}
    return [set(circle) for circle in found if circle]


def _reached(graph: Mapping[str, set[str]], start: str) -> set[str]:
    seen, todo = set[str](), [start]
    while todo:
        new = graph[todo.pop()] - seen
        seen |= new
        todo += new
    return seen


def layers(project: str) -> int:
    """Return how many layers import-linter knows below the four parts of the product."""
    contracts = tomllib.loads(project)["tool"]["importlinter"]["contracts"]
    return sum(len(contract["layers"]) for contract in contracts if "containers" in contract)


def figures(commit: str) -> Iterator[tuple[str, str]]:
    modules = files(commit)
    project = modules.pop(PurePath("pyproject.toml"))
    lines = {path: text.count("\n") for path, text in modules.items()}
    folder, largest = Counter(path.parent for path in modules).most_common(1)[0]
    found = circles(imports(modules))
    yield "modules in the largest flat package", f"{largest} ({folder})"
    yield f"modules above {LINES_MAX} lines", str(sum(count > LINES_MAX for count in lines.values()))
    yield "circles of imports, those of types included", f"{len(found)}, of {sum(map(len, found))} modules"
    yield "modules at the root of the server", str(sum(path.parts[:-1] == _SERVER for path in modules))
    yield "layers that import-linter knows in server and connector", str(layers(project))
    yield "lines of proto/", f"{sum(count for path, count in lines.items() if path.parts[0] == 'proto'):,}"
    yield "lines of the product", f"{sum(lines.values()):,}"


_SERVER: Final = ("server", "kvdepot", "server")

if __name__ == "__main__":
    for name, value in figures(*(sys.argv[1:] or ["HEAD"])):
        print(f"{name}: {value}")
