"""The command `kvdepotctl`: every installation of the package has it, what it imports only one with the extra."""

from __future__ import annotations

import sys
from typing import Final

from kvdepot.core.extras import missing_extra

EXTRA: Final = ("click", "rich")
"""Modules of the extra `ctl` without which it cannot be imported."""


def main() -> None:
    try:
        from kvdepot.client.ctl import app
    except ModuleNotFoundError as error:
        sys.stderr.write(missing_extra(error, "kvdepotctl", "ctl", EXTRA))
        sys.exit(2)
    app.main()


if __name__ == "__main__":
    main()
