"""The tool that changes the product to see whether tests notice."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest

from tests.mutants.mutations import mutations
from tests.mutants.rooms import ROOMS, files_of, modules, room

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
    return {str(one).partition(": ")[2] for one in mutations(Path("lease.py"), source)}


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


@pytest.mark.parametrize("pattern", ROOMS)
def test_every_change_of_a_module_is_python_and_differs_from_it(pattern: str) -> None:
    path = modules(ROOT, [pattern])[0]
    source = (ROOT / path).read_text()
    before = ast.dump(ast.parse(source))
    for mutation in mutations(path, source)[:100]:
        assert ast.dump(ast.parse(mutation.apply(source.encode()))) != before, str(mutation)


def test_every_module_of_a_room_has_tests() -> None:
    for path in modules(ROOT, []):
        assert files_of(ROOT, path), path
    assert room(Path("server/kvdepot/server/engine/store.py")) is not None
    assert room(Path("core/kvdepot/core/limits.py")) is None


def test_every_explained_survivor_is_still_a_change_of_its_module() -> None:
    table = tomllib.loads((ROOT / "tests/mutants/explained.toml").read_text())
    for module, entries in table.items():
        made = {str(one).partition(": ")[2] for one in mutations(Path(module), (ROOT / module).read_text())}
        for entry in entries["survivors"]:
            assert entry["change"] in made, f"{module}: {entry['change']}"
            assert entry["reason"]
