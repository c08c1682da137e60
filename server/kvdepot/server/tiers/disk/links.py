"""What the disk tier needs of its opening process; `opener_process` has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvdepot.server.tiers.disk.messages import Message, Request


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
