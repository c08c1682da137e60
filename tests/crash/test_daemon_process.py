"""The daemon as a process: signals, memory, its worker, its supervisor, its refusals at start."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvdepot.core.calls import ReserveOutcome
from kvdepot.server.daemon.app import EXIT_CONFIG

from tests.rigs.child_processes import children
from tests.rigs.daemon_process import STOP_SECONDS, DaemonProcess
from tests.rigs.patience import patient, wait_until
from tests.rigs.process_memory import used_bytes
from tests.rigs.raw_client import CHUNK_TOKENS, OBJECT_BYTES, RawEngine, keys_of, payload_of, status_of
from tests.rigs.stopping import stop

CAPACITY_BYTES = 384 << 20


@pytest.fixture
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess(ram="384MiB", touched=True) as running:
        yield running


@pytest.mark.requirement("T1")
def test_arena_and_processes_stay_within_the_capacity() -> None:
    """Filled beyond its room, evicting; then across a crash and an adoption."""
    with DaemonProcess(ram="384MiB", fresh=True) as daemon:
        _fill_and_adopt(daemon)


def _fill_and_adopt(daemon: DaemonProcess) -> None:
    stored = 0
    with RawEngine(daemon.socket) as engine:
        for number in range(2 * CAPACITY_BYTES // (64 * OBJECT_BYTES)):
            keys = keys_of(f"prompt{number}", 64)
            lease_id, outcomes, _ = engine.reserve(keys)
            stored += outcomes.count(ReserveOutcome.GRANTED)
            engine.commit(lease_id, len(keys))
            assert used_bytes(daemon) <= CAPACITY_BYTES
        assert stored * OBJECT_BYTES > CAPACITY_BYTES
        assert engine.status().tiers[0].used_bytes > CAPACITY_BYTES // 3
        daemon.kill()
    before = len(daemon.log)
    daemon.start(ready=False)
    samples: list[int] = []

    def over() -> bool:
        """Of the start and a while longer."""
        wait_until(lambda: children(daemon.pid), "the worker")
        samples.append(used_bytes(daemon))
        assert samples[-1] <= CAPACITY_BYTES
        return len(samples) >= 20 and "metrics on http://" in daemon.log[before:]

    wait_until(over, lambda: daemon.log[before:])
    assert len(list(daemon.arena_directory.glob("*.arena"))) == 1


@pytest.mark.requirement("T1")
def test_the_arena_is_populated_and_counted(daemon: DaemonProcess) -> None:
    for path in (daemon.arena, daemon.data):
        found = path.stat()
        assert found.st_blocks * 512 == found.st_size < CAPACITY_BYTES
    assert status_of(daemon.socket).tiers[0].capacity_bytes == CAPACITY_BYTES


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_orderly_stop_in_the_middle_of_work_exits_with_0(daemon: DaemonProcess, number: signal.Signals) -> None:
    with RawEngine(daemon.socket) as engine:
        engine.reserve(keys_of("held", 8))
        engine.store(keys_of("stored", 8))
        process = daemon.process
        assert process is not None
        process.send_signal(number)
        assert process.wait(patient(STOP_SECONDS)) == 0
    assert "stopped: the arena" in daemon.log


def test_an_orderly_stop_before_it_is_ready_exits_with_0() -> None:
    daemon = DaemonProcess()
    try:
        daemon.start(ready=False)
        daemon.wait_for_log("listening on")
        assert daemon.stop() == 0
    finally:
        daemon.close()


def test_an_orderly_stop_does_not_wait_for_a_stuck_worker(daemon: DaemonProcess) -> None:
    (worker,) = children(daemon.pid)
    stop(worker)
    with RawEngine(daemon.socket) as engine:
        engine.store(keys_of("unsummed", 2))
        assert daemon.stop() == 0
    assert "without a checksum will be dropped" in daemon.log
    assert not Path(f"/proc/{worker}").exists()


@pytest.mark.requirement("T9")
def test_sighup_without_a_file_says_so_and_harms_nothing(daemon: DaemonProcess) -> None:
    os.kill(daemon.pid, signal.SIGHUP)
    daemon.wait_for_log("the daemon runs without a configuration file")
    assert status_of(daemon.socket).ready


@pytest.mark.requirement("I6")
def test_a_dead_checksum_worker_is_replaced_and_the_sums_go_on(daemon: DaemonProcess) -> None:
    (worker,) = children(daemon.pid)
    stop(worker)
    keys = keys_of("two workers", 4)
    with RawEngine(daemon.socket) as engine:
        engine.store(keys)
        wait_until(lambda: engine.status().tiers[0].lent_bytes, "objects lent to the worker")
        os.kill(worker, signal.SIGKILL)
        wait_until(lambda: engine.counter("checksummed_objects") == 4, "the sums of the next worker")
        wait_until(lambda: not engine.status().tiers[0].lent_bytes, "nothing lent")
        assert children(daemon.pid) != [worker]
        assert engine.locate(keys) == 4 * CHUNK_TOKENS
        assert engine.load(keys) == [payload_of(key) for key in keys]


def test_a_signal_to_the_whole_group_ends_no_child_before_the_daemon(tmp_path: Path) -> None:
    """With a worker of each kind; a signal may come before a child has run an instruction."""
    tier = f'[[tier]]\nname = "d"\nkind = "disk"\npath = "{tmp_path}"\ncapacity = "64MiB"\nwrite = "commit"\n'
    with DaemonProcess(ram="512MiB", config=tier) as daemon:
        with RawEngine(daemon.socket) as engine:
            wait_until(lambda: engine.status().tiers[1].state == "ready", "the tier is open")
            workers = children(daemon.pid)
            for pid in workers:
                blocked = Path(f"/proc/{pid}/status").read_text().partition("SigBlk:")[2].split()[0]
                for number in (signal.SIGTERM, signal.SIGINT):
                    assert int(blocked, 16) >> (number - 1) & 1
                    os.kill(pid, number)
            engine.store(keys_of("prompt", 4))
            # By the checksum worker, or by the write to the tier, whichever is first.
            wait_until(lambda: not engine.status().tiers[0].pending_checksums, "the sums")
            assert children(daemon.pid) == workers
        assert daemon.stop() == 0
        assert " warning " not in daemon.log


def test_an_unknown_key_is_refused_with_the_nearest(tmp_path: Path) -> None:
    path = tmp_path / "kvdepot.toml"
    path.write_text('[ram]\ncapasity = "1GiB"\n')
    for verb in ("serve", "check-config"):
        found = _run(verb, str(path))
        assert found.returncode == EXIT_CONFIG
        assert found.stderr == f"kvdepotd: {path}: ram.capasity: unknown key; did you mean 'capacity'?\n"


def test_an_address_in_use_is_refused_by_key(daemon: DaemonProcess) -> None:
    other = DaemonProcess()
    try:
        address = daemon.metrics.removeprefix("http://")
        found = subprocess.run(
            other.command("--metrics", address), capture_output=True, text=True, check=False, timeout=patient(30)
        )
        assert found.returncode == 1
        assert f"daemon.metrics: cannot listen on {address}" in found.stderr
        assert "Traceback" not in found.stderr
        assert not other.socket.exists()
    finally:
        other.close()


def test_without_a_file_it_says_where_everything_is(tmp_path: Path) -> None:
    daemon = DaemonProcess()
    caches = {"XDG_CACHE_HOME": str(daemon.directory / "cache")}
    environment = os.environ | {"XDG_RUNTIME_DIR": str(daemon.directory)} | caches
    command = [sys.executable, "-m", "kvdepot.server.daemon.app", "serve", "--arena-dir", str(daemon.arena_directory)]
    try:
        with daemon.log_path.open("wb") as log:
            daemon.process = subprocess.Popen([*command, "--ram", "512MiB"], stderr=log, env=environment)
        daemon.wait_for_log("metrics on http://127.0.0.1:")
        assert f"listening on unix://{daemon.directory}/kvdepot/kvdepot.sock" in daemon.log
        assert f"arena opened: {daemon.arena}" in daemon.log
        daemon.wait_for_log("tier disk: ready")
        assert list((daemon.directory / "cache" / "kvdepot").glob("*/store.json"))
        assert status_of(daemon.directory / "kvdepot" / "kvdepot.sock").pid == daemon.pid
    finally:
        daemon.close()


def test_json_logs_are_one_event_a_line() -> None:
    daemon = DaemonProcess(options=("--log-format", "json"))
    try:
        daemon.start()
        daemon.stop()
        events = [json.loads(line) for line in daemon.log.splitlines()]
        assert {"time", "level", "event"} <= set(events[0])
        assert any(event["event"] == "stopping" for event in events)
    finally:
        daemon.close()


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvdepot.server.daemon.app", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=patient(30))
