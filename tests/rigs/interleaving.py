"""Threads of which one runs at a time: at each point where it matters, a random choice says which one continues.

The product's modules get `Interleaving.threading` in the place of Python's. So a seed repeats a history, and a wait
takes no time. A wait with a time limit may end without its reason, as it may on any machine.
"""

from __future__ import annotations

import _thread
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace, TracebackType
from typing import Any, Final

Ready = Callable[[], bool]
_ENDS_EARLY: Final = 0.1
"""How often a wait with a time limit ends before its time when its thread could be chosen."""


class StuckError(AssertionError):
    """Every thread waits for another one."""


def _shut() -> _thread.LockType:
    lock = _thread.allocate_lock()
    lock.acquire()
    return lock


@dataclass(eq=False)
class Participant:
    """A thread. It runs while it is the current one, and sleeps in `baton` otherwise."""

    name: str
    baton: _thread.LockType = field(default_factory=_shut)
    waits_for: Ready | None = None
    patient: bool = True  # waits without a time limit
    over: bool = False
    known: Any = None  # what the thread that started it knew then


class Interleaving:
    """Of the calling thread, and of those that product code starts by `threading`."""

    def __init__(self, random: Random, chance: float = 0.3) -> None:
        """`chance`: of a change at a point."""
        self._random = random
        self._chance = chance
        self.current = Participant("main")
        self._all = [self.current]
        self.sent: Callable[[], Any] = lambda: None  # what a thread knows when it sets an event or releases a lock,
        self.received: Callable[[Any], None] = lambda _: None  # for the thread that gets it
        self.threading = SimpleNamespace(
            Lock=lambda: _Lock(self), Condition=lambda: _Condition(self), Event=lambda: _Event(self),
            Thread=lambda target, name="", daemon=None: _Thread(self, target, name),
        )  # fmt: skip

    def point(self) -> None:
        """Let another thread continue, or not."""
        if self._random.random() < self._chance:
            self.switch()

    def switch(self) -> bool:
        """Let another thread continue. Return False if none can."""
        others = self._others()
        if others:
            self._hand_to(self._random.choice(others))
        return bool(others)

    def until(self, ready: Ready, *, patient: bool) -> bool:
        """Return when `ready` says True, or earlier where the caller is not patient. Return what it says."""
        me = self.current
        while not ready():
            me.waits_for, me.patient = ready, patient
            moved = self.switch()
            me.waits_for = None
            if not patient:
                break
            if not moved:
                raise StuckError(f"{me.name} waits, and nobody else can continue")
        return ready()

    def start(self, target: Callable[[], None], name: str) -> Participant:
        """Add a thread, which runs when it is chosen."""
        made = Participant(name, known=self.sent())
        self._all.append(made)

        def run() -> None:
            made.baton.acquire()
            try:
                target()
            finally:
                made.over = True
                self._all.remove(made)
                self.current = self._random.choice(self._others() or self._all[:1])
                self.current.baton.release()

        _thread.start_new_thread(run, ())
        return made

    def finish(self) -> None:
        """Return when every other thread is over. Called on the first one."""
        self.until(lambda: len(self._all) == 1, patient=True)

    def _others(self) -> list[Participant]:
        return [one for one in self._all if one is not self.current and self._can_continue(one)]

    def _can_continue(self, one: Participant) -> bool:
        if one.waits_for is None or one.waits_for():
            return True
        return not one.patient and self._random.random() < _ENDS_EARLY

    def _hand_to(self, other: Participant) -> None:
        me, self.current = self.current, other
        other.baton.release()
        me.baton.acquire()


class _Mutex:
    def __init__(self, interleaving: Interleaving) -> None:
        self._interleaving = interleaving
        self._held = False

    def acquire(self, timeout: float = -1) -> bool:
        self._interleaving.point()
        if not self._interleaving.until(lambda: not self._held, patient=timeout < 0):
            return False
        self._held = True
        return True

    def release(self) -> None:
        self._held = False

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self.release()


class _Lock(_Mutex):
    """What its last holder knew, the next one knows."""

    def __init__(self, interleaving: Interleaving) -> None:
        super().__init__(interleaving)
        self._known: Any = None

    def acquire(self, timeout: float = -1) -> bool:
        acquired = super().acquire(timeout)
        if acquired and self._known is not None:
            self._interleaving.received(self._known)
        return acquired

    def release(self) -> None:
        self._known = self._interleaving.sent()
        super().release()


class _Condition(_Mutex):
    """Tells nothing: it would order by chance what nothing else orders."""

    def __init__(self, interleaving: Interleaving) -> None:
        super().__init__(interleaving)
        self._notified = 0

    def notify(self) -> None:
        self._notified += 1

    notify_all = notify

    def wait(self, timeout: float | None = None) -> bool:
        before = self._notified
        return self.wait_for(lambda: self._notified > before, timeout)

    def wait_for(self, ready: Ready, timeout: float | None = None) -> bool:
        self.release()
        found = self._interleaving.until(ready, patient=timeout is None)
        self.acquire()
        return found


class _Event:
    def __init__(self, interleaving: Interleaving) -> None:
        self._interleaving = interleaving
        self._set = False
        self._known: Any = None

    def set(self) -> None:
        self._known = self._interleaving.sent()
        self._set = True

    def is_set(self) -> bool:
        if self._set:
            self._interleaving.received(self._known)
        return self._set

    def wait(self, timeout: float | None = None) -> bool:
        self._interleaving.until(lambda: self._set, patient=timeout is None)
        return self.is_set()


class _Thread:
    def __init__(self, interleaving: Interleaving, target: Callable[[], None], name: str) -> None:
        self._interleaving = interleaving
        self._target = target
        self._name = name
        self._started: Participant | None = None

    def start(self) -> None:
        self._started = self._interleaving.start(self._target, self._name)

    def is_alive(self) -> bool:
        return self._started is not None and not self._started.over
