"""A /proc that was mounted with hidepid: `python -m tests.fakes.hidden_processes LEVEL MODULE ARGUMENTS`.

Runs MODULE in this process, from which /proc hides all but itself and its children, as it does other users' (proc(5)).
"""

from __future__ import annotations

import errno
import os
import re
import runpy
import sys
from pathlib import Path

_STAT = re.compile(r"/proc/(\d+)/stat")
_ERRORS = {"1": errno.EPERM, "2": errno.ENOENT}


def hide(level: str) -> None:
    """For good."""
    read_bytes = Path.read_bytes

    def read(path: Path) -> bytes:
        found = read_bytes(path)
        asked = _STAT.fullmatch(str(path))
        if asked is not None and int(asked[1]) != os.getpid():
            parent = int(found.rpartition(b")")[2].split()[1])
            if parent != os.getpid():
                raise OSError(_ERRORS[level], os.strerror(_ERRORS[level]), str(path))
        return found

    Path.read_bytes = read  # type: ignore[assignment, method-assign]


if __name__ == "__main__":
    hide(sys.argv[1])
    sys.argv = sys.argv[2:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
