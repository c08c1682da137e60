"""What the disk tier needs of I/O workers and of its opening process; `kvdepot.server.io` has both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvdepot.server.io.breaker import Breaker
from kvdepot.server.io.jobs import Answer, Job, Priority
from kvdepot.server.tiers.base import Loan
from kvdepot.server.tiers.disk.messages import Message, Request


class Workers(Protocol):
    """A pool of I/O workers (`kvdepot.server.io.pool.IoPool`)."""

    breaker: Breaker

    @property
    def usable(self) -> bool: ...

    @property
    def why_unusable(self) -> str: ...

    def submit(self, job: Job, *, priority: Priority, done: Callable[[Answer], None], loan: Loan | None = None) -> None:
        """`done` is called once, never from in here. Its loan has ended by then; after TIMEOUT it ends later."""

    def renew(self, guard: str) -> None:
        """From now on by workers that open their files anew and were admitted with this token."""

    async def close(self, seconds: float = ...) -> int: ...


class OpenerLink(Protocol):
    """The opening process of one directory."""

    @property
    def running(self) -> bool: ...

    def start(self, hear: Callable[[Message], None]) -> None:
        """Make the process; what it says is heard on the loop's thread, `Ended` last. Raises OSError."""

    def send(self, request: Request) -> None: ...

    def wait(self, seconds: float) -> Message | None:
        """Its first message, if it comes so soon; it is not heard then. Blocks: for the daemon's start."""

    def end(self) -> None:
        """End the process without waiting for it. Nothing is heard any more."""


class Hold:
    """A loan around another one (or none) that says when a worker cannot touch the place any more.

    Another may, while there is no answer: what a worker died of is tried again, under a loan that begins anew.
    """

    def __init__(self, loan: Loan | None, ended: Callable[[], None]) -> None:
        self._loan = loan
        self._ended = ended

    def begin(self, worker: int) -> bool:
        return self._loan is None or self._loan.begin(worker)

    def end(self) -> None:
        if self._loan is not None:
            self._loan.end()
        self._ended()
