"""What a real daemon does whose log nobody reads."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress

import grpc
import pytest

from tests.rigs.daemon_process import STOP_SECONDS, DaemonProcess
from tests.rigs.patience import patient, wait_until
from tests.rigs.raw_client import RawEngine, keys_of, status_of


@pytest.fixture
def full_pipe() -> Iterator[tuple[int, int]]:
    """(read end, write end); it takes no further byte."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writer, b"\n" * 4096)
    os.set_blocking(writer, True)
    yield reader, writer
    for fd in (reader, writer):
        os.close(fd)


def _ready(daemon: DaemonProcess) -> bool:
    try:
        return bool(status_of(daemon.socket).ready)
    except grpc.RpcError:
        return False


def _told(reader: int) -> str:
    os.set_blocking(reader, False)
    text = b""
    with suppress(BlockingIOError):
        while part := os.read(reader, 1 << 20):
            text += part
    return text.decode()


@pytest.mark.requirement("I2")
def test_a_daemon_whose_log_nobody_reads_serves_and_stops(full_pipe: tuple[int, int]) -> None:
    reader, writer = full_pipe
    daemon = DaemonProcess()
    daemon.process = subprocess.Popen(daemon.command(), stdin=subprocess.DEVNULL, stderr=writer)
    try:
        wait_until(lambda: _ready(daemon), "it serves", 30)
        with RawEngine(daemon.socket) as engine:
            engine.store(keys_of("prompt", 3))
            assert engine.locate(keys_of("prompt", 3)) > 0
        os.kill(daemon.pid, signal.SIGHUP)
        told = ""

        def reads() -> bool:
            nonlocal told
            told += _told(reader)
            return "attached engine=" in told

        wait_until(reads, "what waited is written once it is read", 10)
        assert "listening on" in told, "in order, and nothing is lost"
        with suppress(BlockingIOError):
            os.set_blocking(writer, False)
            while True:
                os.write(writer, b"\n" * 4096)
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.process.wait(patient(STOP_SECONDS)) == 0
    finally:
        daemon.close()
