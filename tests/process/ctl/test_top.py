"""`kvdepotctl top` beside a real daemon that engines use: lines of JSON, a terminal, a daemon that goes and comes."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from tests.rigs.ctl_process import kvdepotctl
from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.patience import Deadline, patient
from tests.rigs.raw_client import CHUNK_TOKENS, RawEngine, dense_spec, keys_of

OBJECT_BYTES = 16 << 10
LOADED_CHUNKS = 2
COMMAND = [sys.executable, "-m", "kvdepot.client.ctl.app", "--timeout", "30", "--endpoint"]


@contextlib.contextmanager
def busy(daemon: DaemonProcess) -> Iterator[None]:
    """An engine that stores, looks up, loads and misses all the time."""
    stop, begun = threading.Event(), threading.Event()
    failed: list[BaseException] = []

    def work() -> None:
        try:
            with RawEngine(daemon.socket, "busy", spec=dense_spec("a-model", OBJECT_BYTES)) as engine:
                number = 0
                while not stop.wait(0.01):
                    keys = keys_of(f"p{number}", LOADED_CHUNKS)
                    engine.store(keys)
                    engine.locate(keys)
                    engine.load(keys)
                    engine.locate(keys_of(f"none{number}", 2))
                    number += 1
                    begun.set()
        except BaseException as error:  # noqa: BLE001 - raised below
            failed.append(error)
            begun.set()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert begun.wait(patient(60))
        yield
    finally:
        stop.set()
        thread.join()
    assert not failed, failed


@pytest.mark.requirement("P10")
def test_a_line_of_json_for_each_look_says_what_was_done_a_second(new_daemon: DaemonProcess) -> None:
    with busy(new_daemon):
        done = kvdepotctl(new_daemon, "top", "--json", "--interval", "1", "--count", "4")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == 4
    last = lines[-1]
    busiest = max(lines, key=lambda line: line["per_second"]["locates"])  # a machine may stand still in any second
    flow = busiest["per_second"]
    assert 0 < flow["locate_hits"] < flow["locates"]
    # A hit is counted at the end of its load, which may be in the next interval.
    one_load = LOADED_CHUNKS * CHUNK_TOKENS
    assert flow["hit_tokens"] == pytest.approx(flow["acquired_objects"] * CHUNK_TOKENS, abs=one_load)
    assert flow["hit_tokens"] > one_load
    assert flow["granted_read_bytes"] == pytest.approx(flow["acquired_objects"] * OBJECT_BYTES)
    assert flow["committed_objects"] > 0
    assert flow["misses"]["unknown"] > 0
    assert [engine["engine_id"] for engine in last["engines"]] == ["busy"]
    (ram,) = last["tiers"]
    assert (ram["name"], ram["state"]) == ("ram", "ready")
    assert ram["per_second"]["read_bytes"] == last["per_second"]["granted_read_bytes"]
    assert ram["objects"] > lines[0]["tiers"][0]["objects"] > 0
    assert [one["seconds"] >= 1 for one in lines] == [True] * 4


def test_without_a_terminal_tables_follow_each_other(new_daemon: DaemonProcess) -> None:
    done = kvdepotctl(new_daemon, "top", "--interval", "0.1", "--count", "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("a second") == 2
    assert "no engine is attached" in done.stdout


def test_a_terminal_is_written_over_until_ctrl_c_and_a_daemon_that_is_gone_is_waited_for(
    new_daemon: DaemonProcess,
) -> None:
    ours, theirs = pty.openpty()
    command = [*COMMAND, new_daemon.endpoint, "top", "--interval", "0.2"]
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "150", "LINES": "50"}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    screen = bytearray()
    try:
        _read_until(ours, screen, b"tiers")
        new_daemon.kill()
        _read_until(ours, screen, b"trying again")
        screen.clear()
        new_daemon.start()
        _read_until(ours, screen, b"tiers")
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):
            _read_until(ours, screen, b"\x1b[?1049l")  # back to the screen of before
        assert process.wait(patient(20)) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_a_daemon_that_hangs_or_has_ended_is_waited_for_alike(new_daemon: DaemonProcess) -> None:
    command = [*COMMAND[:3], "--timeout", "3", "--endpoint", new_daemon.endpoint, "top", "--json", "--interval", "0.1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        try:
            assert process.stdout.readline()
            for go, come in ((new_daemon.suspend, new_daemon.resume), (new_daemon.kill, new_daemon.start)):
                go()
                assert "trying again" in process.stderr.readline()
                with pytest.raises(subprocess.TimeoutExpired):
                    process.wait(timeout=1)
                come()
                for _ in range(10):  # more than were under way before
                    assert json.loads(process.stdout.readline())["ready"] in (True, False)
            process.send_signal(signal.SIGINT)
            assert process.wait(patient(20)) == 0
        finally:
            process.kill()


def _read_until(terminal: int, screen: bytearray, wanted: bytes) -> None:
    until = Deadline(60)
    while wanted not in screen:
        assert not until.is_over(), bytes(screen[-2000:])
        screen += os.read(terminal, 4096)


def test_no_daemon_at_the_first_look_is_an_error() -> None:
    done = kvdepotctl("unix:///nonexistent/kvdepot.sock", "top", "--count", "1")
    assert done.returncode == 3
    assert "no daemon at" in done.stderr
