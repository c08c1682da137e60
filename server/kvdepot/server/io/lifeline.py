"""What ties a child process of the daemon to it; imported by the children, so it needs next to nothing."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """The kernel kills this process when the daemon ends; a parent already gone ends it here."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(0)


def exit_code(main: Callable[[list[str]], int]) -> int:
    """Of a child whose `main` gets the arguments: 0 also where the daemon was killed over answers it had not read."""
    try:
        return main(sys.argv[1:])
    except ConnectionError:
        return 0
