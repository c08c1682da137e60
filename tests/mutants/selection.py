"""Which tests of a room can notice a change, and in which order they are tried."""

from __future__ import annotations

from collections import defaultdict

from tests.mutants.mutations import Mutation
from tests.mutants.watching import Noted


def chosen(mutation: Mutation, noted: Noted) -> list[str]:
    """Those that execute its lines, quick modules first; then those that start processes, in which it may be executed.

    All of the room, where none executes it, or its import does.
    """
    lines = noted.lines.get(str(mutation.path), {})
    names = {test for line in mutation.lines for test in lines.get(line, ())}
    executing = names & set(noted.tests) if names and "" not in names else set(noted.tests)
    children = {test for test in noted.tests if _file(test) in noted.children} - executing
    return _quick_first(executing, noted) + _quick_first(children, noted)


def _quick_first(tests: set[str], noted: Noted) -> list[str]:
    seconds: defaultdict[str, float] = defaultdict(float)
    for test in tests:
        seconds[_file(test)] += noted.seconds[test]
    return sorted(tests, key=lambda test: (seconds[_file(test)], _file(test), noted.seconds[test], test))


def _file(test: str) -> str:
    return test.partition("::")[0]
