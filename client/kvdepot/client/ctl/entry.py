"""The command `kvdepotctl`: every installation of the package has it, what it imports only one with the extra."""

from __future__ import annotations

import sys
from typing import Final

EXTRA: Final = ("click", "rich")
"""Modules of the extra `ctl` without which it cannot be imported."""


def main() -> None:
    try:
        from kvdepot.client.ctl import app
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in EXTRA:
            raise
        print(  # noqa: T201 - there is nothing else to say it with
            f"kvdepotctl needs the extra `ctl`: pip install '.[ctl]' in a clone of kvdepot ({error})",
            file=sys.stderr,
        )
        sys.exit(2)
    app.main()


if __name__ == "__main__":
    main()
