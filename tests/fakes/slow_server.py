"""A file server on which every request takes time, by a clock of the test's, and which pauses now and then.

Its clients are threads of which one runs at a time, so that they interleave between any two requests, and a run of one
seed is always the same. Files are real; their times are the server's. A request is done some time after it was sent,
and answered some time after that.
"""

from __future__ import annotations

import heapq
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any, Final

import pytest

_REQUESTS: Final = (
    "open", "read", "write", "stat", "lstat", "rename", "replace", "link", "unlink", "listdir", "scandir",
)  # fmt: skip
_WRITES: Final = frozenset({"write", "open"})
_NANOSECONDS: Final = 1_000_000_000


class _Over(BaseException):
    """The run ended: a client's thread does, too."""


class _Client:
    def __init__(self) -> None:
        self.wake = threading.Semaphore(0)
        self.stopped_until = 0.0
        self.thread: threading.Thread | None = None


class SlowServer:
    """`now`: seconds since the epoch, on the server and for whoever times the run."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, seed: int, *, latency: float,
        pause_every: float = 1e9, pause_seconds: float = 0.0,
    ) -> None:  # fmt: skip
        """`latency` of a request on average. It pauses after about `pause_every`, for about `pause_seconds`."""
        self.now = self.began = float(int(time.time()))
        self.requests = 0
        self._random = Random(seed)
        self._latency, self._pause_every, self._pause_seconds = latency, pause_every, pause_seconds
        self._paused_until = 0.0
        self._draw_pause()
        self._waiting: list[tuple[float, int, _Client]] = []
        self._numbers = 0
        self._main = _Client()
        self._clients: dict[int, _Client] = {}
        self._over = False
        self._failure: BaseException | None = None
        for name in _REQUESTS:
            monkeypatch.setattr(os, name, self._slowed(name, getattr(os, name)))

    def client(self, body: Callable[[], object]) -> _Client:
        """A thread that does `body` from now on. What it does waits for `run`."""
        client = _Client()
        client.thread = threading.Thread(target=self._live, args=(client, body), daemon=True)
        self._clients[id(client)] = client
        self._wait_for(client, self.now)
        client.thread.start()
        return client

    def stop(self, client: _Client, seconds: float) -> None:
        """As SIGSTOP does, and SIGCONT after that."""
        client.stopped_until = self.now + seconds

    def pause_no_more(self) -> None:
        self._pause_at = float("inf")

    def run(self, seconds: float) -> None:
        self._wait_for(self._main, self.now + seconds)
        self._next(self._main)
        if self._failure is not None:
            raise self._failure

    def run_until(self, condition: Callable[[], object], seconds: float, what: str) -> float:
        """How long it took. `seconds`: at most."""
        began = self.now
        while not condition():
            assert self.now < began + seconds, f"not within {seconds:.0f} s: {what}"
            self.run(1.0)
        return self.now - began

    def close(self) -> None:
        self._over = True
        for client in self._clients.values():
            client.wake.release()
            assert client.thread is not None
            client.thread.join()

    def sleep(self, seconds: float) -> None:
        """Of a client. It takes time, as any: who waits for less than the clock can show would else wait for ever."""
        client, until = self._running, max(self.now + seconds, math.nextafter(self.now, math.inf))
        while True:
            self._wait_for(client, until)
            self._next(client)
            until = client.stopped_until
            if until <= self.now:
                return

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """What is called in here takes no time."""
        thread = vars(threading.current_thread())
        before = {name: thread.pop(name) for name in ("client_id",) if name in thread}
        try:
            yield
        finally:
            thread.update(before)

    # --- one runs at a time

    @property
    def _running(self) -> _Client:
        return self._clients[threading.current_thread().client_id]  # type: ignore[attr-defined]

    def _live(self, client: _Client, body: Callable[[], object]) -> None:
        threading.current_thread().client_id = id(client)  # type: ignore[attr-defined]
        client.wake.acquire()
        try:
            if not self._over:
                body()
                self._let_next()
        except _Over:
            return
        except BaseException as failure:  # noqa: BLE001 - the test's thread raises it
            self._failure = failure
            self._main.wake.release()

    def _wait_for(self, client: _Client, until: float) -> None:
        self._numbers += 1
        heapq.heappush(self._waiting, (until, self._numbers, client))

    def _next(self, client: _Client) -> None:
        """Go on with whoever is due first, and return when that is `client`."""
        if self._let_next(client) is not client:
            client.wake.acquire()
            if self._over:
                raise _Over

    def _let_next(self, client: _Client | None = None) -> _Client:
        until, _, first = heapq.heappop(self._waiting)
        self.now = max(self.now, until)
        if first is not client:
            first.wake.release()
        return first

    # --- requests

    def _slowed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def slowed(*arguments: Any, **named: Any) -> Any:
            if not hasattr(threading.current_thread(), "client_id") or self._over:
                return call(*arguments, **named)
            if name == "open" and arguments[1] & os.O_PATH:  # the server is asked by what is done in the folder
                return call(*arguments, **named)
            self.requests += 1
            half = self._latency * self._random.uniform(0.25, 0.75)
            self.sleep(half)
            self._pause()
            try:
                answer = call(*arguments, **named)
                if name in _WRITES:
                    self._stamp(name, answer, arguments)
            except OSError as error:
                answer = error
            self.sleep(half)
            if isinstance(answer, OSError):
                raise answer
            return answer

        return slowed

    def _stamp(self, name: str, answer: Any, arguments: tuple[Any, ...]) -> None:
        fd = arguments[0] if name == "write" else answer
        if name == "write" or arguments[1] & os.O_CREAT:
            nanoseconds = int(self.now * _NANOSECONDS)
            os.utime(fd, ns=(nanoseconds, nanoseconds))

    def _draw_pause(self) -> None:
        self._pause_at = max(self.now, self._paused_until) + self._pause_every * self._random.uniform(0.5, 1.5)

    def _pause(self) -> None:
        if self.now >= self._pause_at:
            self._paused_until = self.now + self._pause_seconds * self._random.uniform(0.2, 1.8)
            self._draw_pause()
        if self.now < self._paused_until:
            self.sleep(self._paused_until - self.now)
