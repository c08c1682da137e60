"""The command `kvdepotd`. Every installation has it; what it imports needs the extra `server`."""

from __future__ import annotations

import signal
import sys
from typing import Final

from kvdepot.core.extras import missing_extra

EXTRA: Final = ("grpc_health", "grpc_reflection", "prometheus_client", "pydantic")
"""Modules of the extra `server` without which it cannot be imported."""


def main() -> int:
    if sys.argv[1:2] == ["serve"]:
        # To import all of the daemon takes a second, in which SIGHUP would end it. `app` lets the signal in.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        from kvdepot.server.daemon import app

        app.prepare()
    except ModuleNotFoundError as error:
        sys.stderr.write(missing_extra(error, "kvdepotd", "server", EXTRA))
        return 2
    return app.main()


if __name__ == "__main__":
    sys.exit(main())
