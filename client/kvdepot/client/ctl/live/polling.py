"""Asks a daemon at an interval, on a thread of its own: a daemon that hangs does not hold up the keys."""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

import grpc
from kvdepot.client.ctl.live.history import Look

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from kvdepot.client.ctl.calls import Operator

RECORDS: Final = 64
"""Requests of a look: as many as a high screen has lines for."""


def look(operator: Operator) -> Look:
    """Ask the daemon: two calls. Raise grpc.RpcError if it does not answer."""
    return Look(operator.status(), operator.requests(RECORDS, misses=False))


@dataclass(frozen=True, slots=True)
class NoAnswer:
    """The daemon did not answer. `since`: by `time.monotonic`, when that began."""

    since: float
    code: str


class Poller:
    """Looks at the daemon between `__enter__` and `__exit__`, and calls `wake` after each time."""

    def __init__(self, operator: Operator, interval_seconds: float, wake: Callable[[], None]) -> None:
        self._operator = operator
        self._wake = wake
        self._answers: queue.SimpleQueue[Look | NoAnswer | BaseException] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._interval_seconds = interval_seconds
        self._paused = False
        self._over = False
        self._thread = threading.Thread(target=self._run, name="poller", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Do not wait for a call that is under way: the end of its channel ends it."""
        with self._changed:
            self._over = True
            self._changed.notify()

    def set(self, interval_seconds: float, *, paused: bool) -> None:
        with self._changed:
            self._interval_seconds, self._paused = interval_seconds, paused
            self._changed.notify()

    def answers(self) -> list[Look | NoAnswer]:
        """Return what has come since the last call. Raise what no daemon is the reason of."""
        found: list[Look | NoAnswer] = []
        for _ in range(self._answers.qsize()):
            answer = self._answers.get_nowait()
            if isinstance(answer, BaseException):
                raise answer
            found.append(answer)
        return found

    def _run(self) -> None:
        asked_at, silent_since = time.monotonic(), None  # the caller has just asked
        while self._is_due(asked_at):
            asked_at = time.monotonic()
            try:
                self._answers.put(look(self._operator))
                silent_since = None
            except grpc.RpcError as error:
                silent_since = asked_at if silent_since is None else silent_since
                self._answers.put(NoAnswer(silent_since, error.code().name))
            except BaseException as error:  # noqa: BLE001 - the other thread raises it
                self._answers.put(error)
                return
            finally:
                self._wake()

    def _is_due(self, asked_at: float) -> bool:
        """Wait until it is time to ask again. Return whether it ever is."""
        with self._changed:
            while not self._over:
                left = asked_at + self._interval_seconds - time.monotonic()
                if left <= 0 and not self._paused:
                    return True
                self._changed.wait(None if self._paused else left)
        return False
