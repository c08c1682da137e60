"""What ties a child process of the daemon to it; imported by the children, so it needs next to nothing."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


class ProcessEndError(Exception):
    """What ends a child process as it is meant to. Its text is for the log; where it was raised says nothing more."""


def die_with(parent: int) -> None:
    """Have the kernel kill this process when the daemon ends. Exit at once if the parent has already ended."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(0)


def exit_code(main: Callable[[list[str]], int]) -> int:
    """Return the exit code of a child whose `main` gets the arguments.

    It is 0 also if the daemon was killed and had not read all answers.
    """
    try:
        return main(sys.argv[1:])
    except ConnectionError:
        return 0
