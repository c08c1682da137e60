"""The one place where the connector catches everything: nothing it does may end a request (DESIGN I3)."""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Failures:
    """Counts what went wrong and logs each kind once, with its traceback."""

    def __init__(self, logger: logging.Logger) -> None:
        self.logger = logger
        self.counts: Counter[str] = Counter()
        self._taken = 0

    def record(self, where: str, error: BaseException) -> None:
        name = f"{where}:{type(error).__name__}"
        self.counts[name] += 1
        if self.counts[name] == 1:
            self.logger.error(
                "kvdepot: %s failed; the engine goes on without it. This is a bug of kvdepot, reported once.",
                where,
                exc_info=error,
            )

    def take(self) -> int:
        """How many since it was last asked."""
        count = self.counts.total()
        new, self._taken = count - self._taken, count
        return new


def guarded(answer: Callable[..., Any]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Run a method of the engine's connector interface; on any exception count it and give `answer(self, *args)`.

    `answer` is the safe one: a miss, an empty set, nothing to do. It must not raise. The
    method's class has `failures`.
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
    """The safe answer of a method that answers nothing."""
