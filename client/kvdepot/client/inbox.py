"""A queue of events for one thread, and a socket of that thread: it waits for both at once."""

from __future__ import annotations

import os
import queue
import select
import weakref
from typing import Final, Generic, TypeVar

Item = TypeVar("Item")

_NONE: Final = -1


class Inbox(Generic[Item]):
    """A queue. `put` may be called on any thread, everything else on the one that owns it."""

    def __init__(self) -> None:
        """Open the descriptors. Raise OSError if there are none left."""
        self._items: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # Not closed before nobody can put any more: another descriptor would have its number.
        weakref.finalize(self, os.close, self._wake)
        self._poller = select.epoll()
        self._poller.register(self._wake, select.EPOLLIN | select.EPOLLET)  # by edges: it need not be read
        self._watched = _NONE
        self._events = 0
        self._asleep = False

    def put(self, item: Item) -> None:
        """Add an item. Never block; wake the owner by a system call if it sleeps."""
        self._items.put(item)
        if self._asleep:
            os.eventfd_write(self._wake, 1)

    def take(self) -> Item | None:
        try:
            return self._items.get_nowait()
        except queue.Empty:
            return None

    def __len__(self) -> int:
        """Return a number of items that are there at least."""
        return self._items.qsize()

    def watch(self, descriptor: int, *, writable: bool = False) -> None:
        """Let `wait` also wait for this descriptor to be readable, or writable. Call `unwatch` before it is closed."""
        events = select.EPOLLIN | (select.EPOLLOUT if writable else 0)
        if self._watched == _NONE:
            self._poller.register(descriptor, events)
        elif events != self._events:
            self._poller.modify(descriptor, events)
        self._watched, self._events = descriptor, events

    def unwatch(self) -> None:
        if self._watched != _NONE:
            self._poller.unregister(self._watched)
            self._watched = _NONE

    def wait(self, timeout_seconds: float) -> bool:
        """Wait until an item was put, or the watched descriptor is ready. Return whether the descriptor is."""
        self._asleep = True
        try:
            found = self._poller.poll(0 if len(self) else timeout_seconds)
        finally:
            self._asleep = False
        return any(descriptor == self._watched for descriptor, _ in found)
