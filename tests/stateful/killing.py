"""The end of a daemon at a line of its code."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from kvdepot.server.depot import adoption
from kvdepot.server.depot.sessions import sessions, workers
from kvdepot.server.depot.tree import lent, namespaces, rows

WRITERS = {module.__file__ for module in (rows, lent, sessions, namespaces, adoption, workers)}
"""The modules that store into the tables: between two lines of any other nothing changes that outlives a kill."""


class Killed(BaseException):
    """The daemon is gone."""


@contextmanager
def killed_after(lines: int) -> Iterator[None]:
    left = lines

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in WRITERS:
            return None
        if event == "line":
            left -= 1
            if left < 0:
                raise Killed
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
