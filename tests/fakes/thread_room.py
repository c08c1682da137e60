"""A host that has no room for another thread, by a limit of processes, say."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def no_room_for_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Refuse the threads of `in_own_thread` for as long as this lasts."""
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name == "kvdepot-file":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        yield
