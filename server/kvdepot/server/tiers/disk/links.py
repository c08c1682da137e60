"""What the disk tier needs of its opening process; `opener_process` has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvdepot.server.tiers.disk.messages import Message, Request


class OpenerLink(Protocol):
    """The opening process of one directory."""

    @property
    def running(self) -> bool: ...

    def start(self, on_message: Callable[[Message], None]) -> None:
        """Make the process. Raise OSError. `on_message` gets what it sends, on the loop's thread, `Ended` last."""

    def send(self, request: Request) -> None: ...

    def wait(self, seconds: float) -> Message | None:
        """Return the first message if it comes in time; `on_message` does not get it then.

        This blocks: only for the daemon's start.
        """

    def end(self) -> None:
        """End the process without waiting for it. `on_message` gets nothing more."""
