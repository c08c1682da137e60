"""Memory that is short while a file is there: `python -m tests.fakes.scarce_memory FILE BYTES MODULE ARGUMENTS`.

Runs MODULE in this process. The arena gets no page beyond its first BYTES while FILE exists, as at a limit for which
the kernel ends no process. Growth is tried again soon.
"""

from __future__ import annotations

import errno
import runpy
import sys
from pathlib import Path
from typing import Final

from kvdepot.server.arena.populate import Populator

RETRY_SECONDS: Final = 0.2


def make_scarce(file: Path, size_bytes: int) -> None:
    """For good."""
    touch = Populator._touch

    def touch_what_is_there(self: Populator, offset: int, length: int) -> int:
        if offset + length > size_bytes and file.exists():
            return errno.ENOMEM
        return touch(self, offset, length)

    Populator._touch = touch_what_is_there  # type: ignore[method-assign]
    defaults = Populator.__init__.__kwdefaults__
    assert defaults is not None
    defaults["retry_seconds"] = RETRY_SECONDS


if __name__ == "__main__":
    make_scarce(Path(sys.argv[1]), int(sys.argv[2]))
    sys.argv = sys.argv[3:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
