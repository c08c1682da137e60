"""A process that forks has its connections twice: the child's copies keep nothing of the engine's alive."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.engine_client import EngineClient
from tests.rigs.raw_client import status_of, wait_until


@contextmanager
def _forked_child() -> Iterator[None]:
    """As a data loader: it has all descriptors of its parent, and lives on."""
    child = os.fork()
    if not child:
        signal.pause()
        os._exit(0)
    try:
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.requirement("I5")
def test_an_engine_that_forked_is_gone_for_the_daemon_when_it_closes() -> None:
    with DaemonProcess() as daemon:
        assert daemon.stop() == 0
        daemon.config = '[sessions]\ngrace = "1s"\n'
        daemon.start()
        engine = EngineClient(daemon.endpoint, "forks").start()
        with _forked_child():
            assert [one.engine_id for one in status_of(daemon.socket).sessions] == ["forks"]
            engine.close()
            wait_until(lambda: not status_of(daemon.socket).sessions, "its session ends while the child lives")
