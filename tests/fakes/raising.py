"""Callbacks that raise when a test says so: at one call of all that go through here, before or after its effect.

A scenario is run once to learn which callbacks it makes, and then once for each of them. `points` chooses the first,
the middle and the last call of each name, and those twice: raising before the callback had its effect, and after.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple, ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Injected(Exception):  # noqa: N818 - says what it is
    """What no code of ours raises."""


class Point(NamedTuple):
    name: str
    call: int  # of this name, from 1 on
    after: bool


class Faults:
    """Counts calls by name, and raises at some of them, once `armed`."""

    def __init__(self, *points: Point) -> None:
        self._points = points
        self.calls: Counter[str] = Counter()
        self.raised = 0
        self.armed = False

    def of(self, name: str, callback: Callable[_P, _R]) -> Callable[_P, _R]:
        """The callback, as one of these."""

        def called(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            return self.through(name, callback, *args, **kwargs)

        return called

    def through(self, name: str, callback: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
        if not self.armed:
            return callback(*args, **kwargs)
        self.calls[name] += 1
        point = next((point for point in self._points if point[:2] == (name, self.calls[name])), None)
        if point is None:
            return callback(*args, **kwargs)
        if point.after:
            callback(*args, **kwargs)
        self.raised += 1
        raise Injected(name)

    def swallowed(self, name: str) -> int:
        """How many calls of this name have had no effect."""
        return sum(point.name == name and not point.after for point in self._points)


def points(calls: Counter[str], *, after: Callable[[str], bool] = lambda _: True) -> list[Point]:
    """`after`: whether raising after the effect makes sense for this name."""
    chosen = []
    for name, count in sorted(calls.items()):
        for call in sorted({1, (count + 1) // 2, count}):
            chosen.append(Point(name, call, after=False))
            if after(name):
                chosen.append(Point(name, call, after=True))
    return chosen
