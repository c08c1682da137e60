"""An arena for which memory is short for a while: what is ready serves, and it grows when memory is back (I4)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvdepot.core.report import TierStatus

from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.patience import wait_until
from tests.rigs.raw_client import RawEngine, keys_of, payload_of, status_of

READY_BYTES = 64 << 20
NO_ROOM = re.compile(rf"no room for more than {READY_BYTES} of (\d+) bytes: Cannot allocate memory")


@pytest.fixture
def short(tmp_path: Path) -> Path:
    file = tmp_path / "short"
    file.touch()
    return file


@pytest.fixture(params=["sealed", "file"])
def daemon(request: pytest.FixtureRequest, short: Path) -> Iterator[DaemonProcess]:
    config = None if request.param == "sealed" else "[ram]\nsealed = false\n"
    daemon = DaemonProcess(config=config, under=("tests.fakes.scarce_memory", str(short), str(READY_BYTES)))
    try:
        yield daemon.start(ready=False)
    finally:
        daemon.close()


def ram(daemon: DaemonProcess) -> TierStatus:
    return status_of(daemon.socket).tiers[0]


@pytest.mark.requirement("I4", "T4")
def test_ram_grows_again_once_the_memory_that_it_lacked_is_back(daemon: DaemonProcess, short: Path) -> None:
    daemon.wait_for_log("ready to serve")
    daemon.wait_for_log("arena stopped growing")
    wait_until(lambda: ram(daemon).ready_bytes == READY_BYTES, "all that there is room for is ready")
    wait_until(lambda: NO_ROOM.fullmatch(ram(daemon).reason), lambda: f"the first piece without: {ram(daemon).reason}")
    squeezed = ram(daemon)
    found = NO_ROOM.fullmatch(squeezed.reason)
    assert squeezed.state == "degraded" and found is not None
    keys = keys_of("meanwhile", 8)
    with RawEngine(daemon.socket) as engine:
        engine.store(keys)
        short.unlink()
        wait_until(lambda: not ram(daemon).reason, "it grows again")
        daemon.wait_for_log("arena populated")
        whole = ram(daemon)
        assert (whole.state, whole.ready_bytes) == ("ready", int(found[1]))
        assert engine.load(keys) == [payload_of(key) for key in keys]
    assert daemon.log.count("arena stopped growing") == daemon.log.count("arena grows again") == 1
