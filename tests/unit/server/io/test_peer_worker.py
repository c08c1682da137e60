"""What a worker of a peer tier gives its threads."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

from kvdepot.core.objectfile import PAGE_BYTES
from kvdepot.server.io import worker
from kvdepot.server.io.arena_pages import ArenaPages
from kvdepot.server.io.peer_wire import PeerSettings

OBJECT_BYTES = 8 << 20
SETTINGS = PeerSettings("node-a", 1, "cert", "key", "ca", ("DNS:peer",), timeout_seconds=1.0)


def test_pages_of_an_extent_are_there_before_bytes_arrive_so_that_none_costs_a_fault() -> None:
    fd = os.memfd_create("arena")
    os.posix_fallocate(fd, 0, 2 * OBJECT_BYTES)
    context = worker._peers(SETTINGS.pack(), ArenaPages(((fd, 2 * OBJECT_BYTES),)))("")
    os.close(fd)
    (view,) = context.views(((OBJECT_BYTES, OBJECT_BYTES),), OBJECT_BYTES)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for at in range(0, OBJECT_BYTES, PAGE_BYTES):
        view[at] = 1
    faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
    assert faults < OBJECT_BYTES // PAGE_BYTES // 10


def test_a_worker_of_a_peer_has_imported_all_before_its_first_job() -> None:
    script = f"""if True:
        import sys
        from kvdepot.server.io import perform, worker
        from kvdepot.server.io.jobs import Probe
        context = worker._peers({SETTINGS.pack()!r}, None)("")
        before = set(sys.modules)
        perform._actions(context)[Probe]
        print(sorted(set(sys.modules) - before))
        """
    assert subprocess.check_output([sys.executable, "-c", script], text=True) == "[]\n"
