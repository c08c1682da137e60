"""The one boundary where a callback is called: its exceptions are counted and logged, and go no further.

An exception in a callback is a defect of the daemon. It may cost its caller the answer, and nothing else: no queue
blocks, no task is lost, no loan leaks. Two rules make that hold wherever a guard is used:

- State changes come after what can raise. Where that is impossible, the caller undoes them if the guard says "raised".
- A caller that waits for an answer gets exactly one (`Once`). Without the right answer, it gets "failed".
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final, Generic, TypeVar, TypeVarTuple

from kvdepot.core.errors import KvDepotError
from kvdepot.server.platform.logs import REPEAT_SECONDS, LogThrottle

PLACES: Final = (
    "tick",
    "write_queue",
    "tier",
    "promotion",
    "prefetch",
    "lookup",
    "answer",
    "checksums",
    "task",
    "what_if",
    "peers",
)
"""Where the daemon calls what may raise, apart from its tiers: labels of `kvdepot_internal_errors_total`."""

_A = TypeVar("_A")
_R = TypeVar("_R")
_Args = TypeVarTuple("_Args")


class Guard:
    """`count(place)` is told of each exception. The log has one traceback a minute for each place and type."""

    def __init__(
        self, count: Callable[[str], None], log: logging.Logger, *, subject: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """Create a guard. `subject` begins its log lines."""
        self._count = count
        self._log = log
        self._subject = f"{subject}: " if subject else ""
        self._throttle = LogThrottle(clock)

    def call(self, place: str, callback: Callable[[*_Args], object], *arguments: *_Args) -> bool:
        """Call the callback. Return False when it raised."""
        try:
            callback(*arguments)
        except Exception as error:  # noqa: BLE001 - whatever it is
            self.caught(place, error)
            return False
        return True

    def each(self, place: str, *callbacks: Callable[[], object]) -> None:
        """Call one after the other, also those after one that raised."""
        for callback in callbacks:
            self.call(place, callback)

    def value(self, place: str, otherwise: _R, callback: Callable[[*_Args], _R], *arguments: *_Args) -> _R:
        """Return what the callback returns, or `otherwise` when it raised."""
        try:
            return callback(*arguments)
        except Exception as error:  # noqa: BLE001 - whatever it is
            self.caught(place, error)
            return otherwise

    def safe(self, place: str, callback: Callable[[*_Args], object]) -> Callable[[*_Args], None]:
        """Return the callback as one that never raises."""

        def called(*arguments: *_Args) -> None:
            self.call(place, callback, *arguments)

        return called

    def task(
        self, place: str, coroutine: Coroutine[Any, Any, _R], loop: asyncio.AbstractEventLoop
    ) -> asyncio.Task[_R]:  # fmt: skip
        """Make a task whose exception is noticed even if nobody awaits it. The caller keeps the task while it runs.

        A refusal (KvDepotError) is an answer to its caller, and no defect.
        """

        def done(task: asyncio.Task[_R]) -> None:
            error = None if task.cancelled() else task.exception()
            if isinstance(error, Exception) and not isinstance(error, KvDepotError):
                self.caught(place, error)

        task = loop.create_task(coroutine)
        task.add_done_callback(done)
        return task

    def caught(self, place: str, error: Exception) -> None:
        """Note what a callback raised. Never raises."""
        for note in (self._count, lambda place: self._say(place, error)):
            with contextlib.suppress(Exception):  # nobody is left who could be told
                note(place)

    def _say(self, place: str, error: Exception) -> None:
        if self._throttle.due(f"{place} {type(error).__name__}"):
            self._log.error(
                "%sinternal error in %s (further ones are only counted for %d s)", self._subject, place, REPEAT_SECONDS,
                exc_info=error,
            )  # fmt: skip


class Once(Generic[_A]):
    """An answer that is owed once. What comes after the first one goes to `late`."""

    def __init__(self, answer: Callable[[_A], None], late: Callable[[_A], None] = lambda _: None) -> None:
        self._answer: Callable[[_A], None] | None = answer
        self._late = late

    def __call__(self, reply: _A) -> None:
        answer, self._answer = self._answer, None
        (answer or self._late)(reply)


def engine_guard(count: Callable[[str], None]) -> Guard:
    """Make the guard of what belongs to no tier. `count` adds 1 to the counter of this name."""
    return Guard(lambda place: count(f"internal_errors.{place}"), logging.getLogger("kvdepotd"))


def tier_guard(
    subject: str, count: Callable[[str, float], None], log: logging.Logger, clock: Callable[[], float]
) -> Guard:  # fmt: skip
    """Make the guard of a tier, or of the I/O workers of one of its directories. Both have one counter."""
    return Guard(lambda _: count("io_failed_callbacks", 1), log, subject=subject, clock=clock)
