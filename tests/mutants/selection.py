"""Which tests of a room can notice a change, and in which order they are tried."""

from __future__ import annotations

from collections import defaultdict

from tests.mutants.mutations import Mutation
from tests.mutants.watching import Noted


def chosen(mutation: Mutation, noted: Noted) -> list[str]:
    """Those that execute its lines, quick modules first.

    Where none is seen to, those that start processes, which may. All of the room, where importing does, or none may.
    """
    lines = noted.lines.get(str(mutation.path), {})
    names = {test for line in mutation.lines for test in lines.get(line, ())}
    children = {test for test in noted.tests if _file(test) in noted.children}
    tests = (names & set(noted.tests) if names else children) if "" not in names else set()
    return _quick_first(tests or set(noted.tests), noted)


def _quick_first(tests: set[str], noted: Noted) -> list[str]:
    seconds: defaultdict[str, float] = defaultdict(float)
    for test in tests:
        seconds[_file(test)] += noted.seconds[test]
    return sorted(tests, key=lambda test: (seconds[_file(test)], _file(test), noted.seconds[test], test))


def _file(test: str) -> str:
    return test.partition("::")[0]
