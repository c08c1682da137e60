"""`kvdepotd` in a network namespace: `python -m tests.rigs.daemon_in_namespace NAMESPACE CPUS ARGUMENTS`.

NAMESPACE: a path. CPUS: numbers of the processors that it and its children may use, with commas; `-` for all.
"""

from __future__ import annotations

import os
import sys

from kvdepot.server.daemon import app

from tests.rigs.namespaces import enter, see_interfaces

prepare = app.prepare


def main() -> int:
    namespace, cpus = sys.argv[1:3]
    enter(namespace)  # before there is another thread
    see_interfaces()
    if cpus != "-":
        os.sched_setaffinity(0, map(int, cpus.split(",")))
    del sys.argv[1:3]
    return app.main()


if __name__ == "__main__":
    sys.exit(main())
