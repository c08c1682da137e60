"""What ties a child process of the daemon to it; imported by the children, so it needs next to nothing."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from typing import Final

from kvdepot.proto.loaded_code import UNKNOWN, LoadedCode

PACKAGES: Final = ("kvdepot.core", "kvdepot.proto", "kvdepot.server")
"""What the daemon and its children are made of."""
CODE: Final = "KVDEPOT_CODE"
"""Environment variable of a child: the digest of the daemon's code."""
_PR_SET_PDEATHSIG = 1


class ProcessEndError(Exception):
    """What ends a child process as it is meant to. Its text is for the log; where it was raised says nothing more."""


def die_with(parent: int) -> None:
    """Have the kernel kill this process when the daemon ends. Exit at once if the parent has already ended."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(0)


def check_code() -> None:
    """Exit if what is on the disk is not the code of the daemon. Called after each import of more of it.

    What this process imported may read a job as another one. A daemon of version 0.3.0 does not say what it has.
    """
    if not LoadedCode(*PACKAGES).is_of(os.environ.get(CODE, UNKNOWN)):
        sys.exit(f"kvdepotd: process {os.getpid()} ends: kvdepot was replaced on the disk: restart the daemon")


def exit_code(main: Callable[[list[str]], int]) -> int:
    """Return the exit code of a child whose `main` gets the arguments.

    It is 0 also if the daemon was killed and had not read all answers.
    """
    check_code()
    try:
        return main(sys.argv[1:])
    except ConnectionError:
        return 0
