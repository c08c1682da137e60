"""KV memory that can be taken away from the copies: before sleep, or when the engine has other tensors.

All copies reach the engine's memory through a copier, whatever the device and the transport. Here another thread
closes that way permanently: what was begun is waited for, and every later use raises `Revoked` before a byte has moved.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvdepot.client.copy.base import Arena, BlockCopier, Column, CopyBatch, CopyMemory, Direction


class Revoked(Exception):  # noqa: N818 - a state, not an error
    """The engine has taken its KV memory away."""


class RevocableCopier:
    """A copier in front of `copier`. `revoke` may be called on any thread."""

    def __init__(self, copier: BlockCopier) -> None:
        self._copier = copier
        self._using = threading.Lock()
        self.revoked = False

    def revoke(self, seconds: float) -> bool:
        """Nothing touches KV memory any more once this has returned True. False: a copy did not end in time."""
        self.revoked = True
        if not self._using.acquire(timeout=seconds):
            return False
        try:
            self._copier.wait()  # for what a device was given
        finally:
            self._using.release()
        return True

    @contextmanager
    def use(self) -> Iterator[None]:
        """Let the caller read or write KV memory without the copier. Raise Revoked."""
        with self._using:
            if self.revoked:
                raise Revoked
            yield

    def enter(self) -> None:
        """See BlockCopier."""
        self._copier.enter()

    def prove(self, mark: object) -> None:
        """See BlockCopier."""
        self._copier.prove(mark)

    def verify(self, arena: CopyMemory, batch: CopyBatch) -> bool:
        """See BlockCopier. Raise Revoked."""
        with self.use():
            return self._copier.verify(arena, batch)

    def leave(self) -> None:
        """See BlockCopier."""
        self._copier.leave()

    def mark(self) -> object:
        """See BlockCopier."""
        return self._copier.mark()

    def after(self, mark: object) -> None:
        """See BlockCopier."""
        self._copier.after(mark)

    def copy(self, arena: CopyMemory, batch: CopyBatch, direction: Direction) -> None:
        """See BlockCopier. Raises Revoked."""
        with self.use():
            self._copier.copy(arena, batch, direction)

    def move(self, layers: Sequence[int], sources: Column, targets: Column) -> None:
        """See BlockCopier. Raises Revoked."""
        with self.use():
            self._copier.move(layers, sources, targets)

    def wait(self, direction: Direction | None = None) -> None:
        """See BlockCopier."""
        with self._using:
            self._copier.wait(direction)

    def prepare(self, arena: Arena | None, *, at_once: bool = False) -> float | None:
        """See BlockCopier: it concerns the arena alone."""
        return self._copier.prepare(arena, at_once=at_once)
