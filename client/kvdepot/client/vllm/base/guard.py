"""The one place where the connector catches everything: nothing it does may end a request (I3)."""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Final, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


TEXT_CHARS: Final = 80
TEXTS_MAX: Final = 8


class Failures:
    """Counts exceptions by place and type, and logs each kind once with its traceback."""

    def __init__(self, logger: logging.Logger) -> None:
        self.logger = logger
        self.counts: Counter[str] = Counter()
        self._taken = 0
        self._logged: dict[str, set[str]] = {}  # kind -> texts

    def record(self, where: str, error: BaseException, *, by_text: bool = False) -> None:
        """Count an exception.

        `by_text`: log each text of a kind, up to `TEXTS_MAX`. All errors of a device have one type, and a later one
        may be another.
        """
        name, text = f"{where}:{type(error).__name__}", str(error).partition("\n")[0][:TEXT_CHARS]
        self.counts[name] += 1
        logged = self._logged.setdefault(name, set())
        if logged and not (by_text and text not in logged and len(logged) < TEXTS_MAX):
            return
        logged.add(text)
        self.logger.error(
            "kvdepot: %s failed (%s: %s), and the engine continues without it; this is a bug of kvdepot, reported once",
            where,
            type(error).__name__,
            text,
            exc_info=error,
        )

    def take(self) -> int:
        """Return the number of exceptions since the last call."""
        count = self.counts.total()
        new, self._taken = count - self._taken, count
        return new


def make_all(calls: Iterable[Callable[[], object]]) -> None:
    """Make every call, whatever one of them raises. Then raise the first exception."""
    errors = []
    for call in calls:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - raised below
            errors.append(error)
    if errors:
        raise errors[0]


def guarded(answer: Callable[..., Any]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Run a method of the connector interface. Count any exception, and return `answer(self, *args)` instead.

    `answer` is safe: a miss, an empty set, nothing to do. It must not raise. The method's class has `failures`.
    """

    def decorate(method: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(method)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return method(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 - I3: whatever it is, the engine must not see it
                connector: Any = args[0]
                connector.failures.record(method.__name__, error)
                safe: R = answer(*args, **kwargs)
                return safe

        return call

    return decorate


def nothing(*_args: Any, **_kwargs: Any) -> None:
    """Return None: the safe answer of a method that answers nothing."""
