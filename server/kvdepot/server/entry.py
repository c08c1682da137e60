"""The command `kvdepotd`: every installation of the package has it, what it imports only one with the extra."""

from __future__ import annotations

import sys
from typing import Final

EXTRA: Final = ("grpc_health", "grpc_reflection", "prometheus_client", "pydantic")
"""Modules of the extra `server` without which it cannot be imported."""


def main() -> int:
    try:
        from kvdepot.server import app
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in EXTRA:
            raise
        print(  # noqa: T201 - there is nothing else to say it with
            f"kvdepotd needs the extra `server`: pip install '.[server]' in a clone of kvdepot ({error})",
            file=sys.stderr,
        )
        return 2
    return app.main()


if __name__ == "__main__":
    sys.exit(main())
