"""The daemon stops, is killed and comes back: what it serves afterwards, and what it may not touch."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvdepot.core.arena import PAGE_BYTES
from kvdepot.core.calls import ReserveOutcome

from tests.rigs.child_processes import children
from tests.rigs.daemon_process import ARENA_FILES, DaemonProcess
from tests.rigs.engine_process import EngineProcess
from tests.rigs.patience import WAIT_SECONDS, Deadline, patient, wait_until
from tests.rigs.raw_client import CHUNK_TOKENS, OBJECT_BYTES, RawEngine, keys_of, payload_of, status_of
from tests.rigs.stopping import stop

SHORT_DEADLINE = '[policy]\nlease_deadline = "500ms"\n'


@pytest.fixture
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess() as running:
        yield running


def _worker_pid(daemon: DaemonProcess) -> int:
    wait_until(lambda: children(daemon.pid), "the checksum worker")
    (pid,) = children(daemon.pid)
    return pid


def _wait_summed(engine: RawEngine, count: int) -> None:
    wait_until(lambda: engine.counter("checksummed_objects") >= count, f"{count} sums")


def _wait_verified(daemon: DaemonProcess) -> None:
    wait_until(lambda: not status_of(daemon.socket).tiers[0].unverified_objects, "verification")


def _stops_with_all_sums(daemon: DaemonProcess, keys: list[bytes]) -> bool:
    """Store, and stop the daemon at once. Return whether it says nothing of objects that will be dropped."""
    before = len(daemon.log)
    engine = RawEngine(daemon.socket)
    engine.store(keys_of("started", 1))
    _wait_summed(engine, 1)
    engine.store(keys)
    assert daemon.stop() == 0
    engine.close()
    return "objects without a checksum will be dropped" not in daemon.log[before:]


@pytest.mark.requirement("T6")
def test_an_orderly_stop_loses_nothing_committed(daemon: DaemonProcess) -> None:
    """Sums that are outstanding when SIGTERM comes are finished first, by a worker that has started."""
    keys, limit = keys_of("orderly", 200), Deadline(WAIT_SECONDS)
    while not _stops_with_all_sums(daemon, keys):  # a busy machine may not sum them in the time of a stop
        assert not limit.is_over(), daemon.log
        daemon.arena.unlink()
        daemon.start()
    assert not daemon.socket.exists()
    assert not daemon.attach_socket.exists()
    daemon.start()
    assert status_of(daemon.socket).counters.get("adopted_objects.adopted") == 201
    _wait_verified(daemon)
    with RawEngine(daemon.socket) as again:
        assert again.locate(keys) == 200 * CHUNK_TOKENS
        assert again.load(keys) == [payload_of(key) for key in keys]
        assert again.counter("verified_objects") == 201


@pytest.mark.requirement("T6", "I1c")
def test_after_a_sigkill_what_has_a_checksum_is_served_once_verified(daemon: DaemonProcess) -> None:
    keys = keys_of("killed", 50)
    with RawEngine(daemon.socket) as engine:
        engine.store(keys)
        _wait_summed(engine, 50)
        daemon.kill()
    daemon.start()
    _wait_verified(daemon)
    with RawEngine(daemon.socket) as again:
        assert again.load(keys) == [payload_of(key) for key in keys]
        assert again.counter("verified_objects") == 50
        assert again.counter("adopted_objects.no_checksum") == 0


@pytest.mark.requirement("I1c")
def test_after_a_sigkill_what_has_no_checksum_is_dropped(daemon: DaemonProcess) -> None:
    summed, unsummed = keys_of("with sum", 3), keys_of("without sum", 4)
    with RawEngine(daemon.socket) as engine:
        engine.store(summed)
        _wait_summed(engine, 3)
        worker = _worker_pid(daemon)
        stop(worker)
        engine.store(unsummed)
        assert engine.locate(unsummed) == 4 * CHUNK_TOKENS
        daemon.kill()
    wait_until(lambda: not Path(f"/proc/{worker}").exists(), "the stopped worker ends with its daemon")
    daemon.start()
    _wait_verified(daemon)
    with RawEngine(daemon.socket) as again:
        assert again.locate(summed) == 3 * CHUNK_TOKENS
        assert again.locate(unsummed) == 0
        assert again.load(unsummed) is None
        assert again.counter("adopted_objects.no_checksum") == 4
        wait_until(lambda: again.status().tiers[0].used_bytes == 3 * OBJECT_BYTES, "the dropped extents come back")


@pytest.mark.requirement("I1c")
@pytest.mark.parametrize("chunk", [0, 2, 4])
def test_a_bit_flipped_while_no_daemon_ran_is_a_miss_and_counted(daemon: DaemonProcess, chunk: int) -> None:
    keys = keys_of("flipped", 5)
    with RawEngine(daemon.socket) as engine:
        engine.store(keys)
        _wait_summed(engine, 5)
    assert daemon.stop() == 0
    _flip_a_bit_of(daemon.data, payload_of(keys[chunk])[:4096])
    daemon.start()
    _wait_verified(daemon)
    with RawEngine(daemon.socket) as again:
        assert again.locate(keys) == chunk * CHUNK_TOKENS
        assert again.load([keys[chunk]]) is None
        if chunk:
            assert again.load(keys[:chunk]) == [payload_of(key) for key in keys[:chunk]]
        assert again.counter("corrupt_objects") >= 1


def _flip_a_bit_of(data: Path, page: bytes) -> None:
    """In the last byte of the first page of the object that starts with these bytes."""
    with data.open("r+b") as file:
        while (found := file.read(PAGE_BYTES)) != page:
            assert found, "the object is not in the arena"
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([found[-1] ^ 0x10]))


def test_a_second_daemon_on_the_arena_is_refused_by_name(daemon: DaemonProcess) -> None:
    second = subprocess.run(daemon.command(), capture_output=True, text=True, check=False, timeout=patient(30))
    assert second.returncode == 1
    assert f"held by the daemon with pid {daemon.pid}" in second.stderr
    assert status_of(daemon.socket).ready


@pytest.mark.requirement("I1")
def test_a_second_daemon_on_the_arena_is_refused_although_somebody_has_deleted_the_locks(daemon: DaemonProcess) -> None:
    open_files = [path.readlink() for path in Path(f"/proc/{daemon.pid}/fd").iterdir() if path.is_symlink()]
    locks = [file for file in open_files if file.suffix == ".lock" and file.exists()]
    assert len(locks) >= 2
    for file in locks:
        file.unlink()
    second = subprocess.run(daemon.command(), capture_output=True, text=True, check=False, timeout=patient(30))
    assert (second.returncode, "whose lock file was deleted" in second.stderr) == (1, True)
    daemon.kill()
    daemon.start()
    assert status_of(daemon.socket).run == 2, "what died holds nothing"


def test_a_second_daemon_on_the_socket_is_refused_and_unlinks_nothing(daemon: DaemonProcess, tmp_path: Path) -> None:
    command = daemon.command("--arena-dir", str(tmp_path))
    second = subprocess.run(command, capture_output=True, text=True, check=False, timeout=patient(30))
    assert second.returncode == 1
    assert f"the socket {daemon.socket} is held by the daemon with pid {daemon.pid}" in second.stderr
    assert not list(tmp_path.glob("*.arena"))
    with RawEngine(daemon.socket) as engine:
        assert engine.ranks_attached == 1


@pytest.mark.requirement("I1d")
def test_a_second_daemon_on_the_state_file_is_refused_by_name(tmp_path: Path) -> None:
    """Each would write over what the other was told: an epoch bump would be undone."""
    config = f'[daemon]\nstate = "{tmp_path / "state.json"}"\n'
    with DaemonProcess(config=config) as first:
        other = DaemonProcess(config=config)
        try:
            second = subprocess.run(other.command(), capture_output=True, text=True, check=False, timeout=patient(30))
            assert second.returncode == 1
            refusal = f"the state file {tmp_path / 'state.json'} is held by the daemon with pid {first.pid}"
            assert refusal in second.stderr
            assert not list(other.arena_directory.glob("*.arena"))
            assert first.stop() == 0
            other.start()
        finally:
            other.close()


@pytest.mark.requirement("I1a")
@pytest.mark.parametrize("orderly", [True, False])
def test_extents_a_living_process_writes_survive_the_daemon(daemon: DaemonProcess, orderly: bool) -> None:
    with EngineProcess(daemon.socket, "writer", "reserve", "being written", 8) as writer:
        assert (daemon.stop if orderly else daemon.kill)() == (0 if orderly else -signal.SIGKILL)
        daemon.start()
        assert status_of(daemon.socket).tiers[0].lent_bytes == 8 * OBJECT_BYTES
        _fill_and_check_untouched(daemon, writer)
        writer.kill()
        _wait_nothing_lent(daemon)


@pytest.mark.requirement("I1a")
@pytest.mark.parametrize("orderly", [True, False])
def test_extents_a_living_process_reads_survive_the_daemon(daemon: DaemonProcess, orderly: bool) -> None:
    keys = keys_of("being read", 8)
    with RawEngine(daemon.socket, "storer") as storer:
        storer.store(keys)
        _wait_summed(storer, 8)
    with EngineProcess(daemon.socket, "reader", "acquire", "being read", 8) as reader:
        assert (daemon.stop if orderly else daemon.kill)() == (0 if orderly else -signal.SIGKILL)
        daemon.start()
        assert status_of(daemon.socket).tiers[0].lent_bytes >= 8 * OBJECT_BYTES
        _fill_and_check_untouched(daemon, reader)
        reader.kill()
        _wait_nothing_lent(daemon)


@pytest.mark.requirement("I1a")
def test_a_stopped_process_keeps_its_extents_beyond_every_deadline() -> None:
    with (
        DaemonProcess(config=SHORT_DEADLINE) as daemon,
        EngineProcess(daemon.socket, "stopped", "reserve", "stopped", 8) as writer,
    ):
        writer.suspend()
        wait_until(lambda: any("expired" in name for name in status_of(daemon.socket).counters), "the deadline")
        _fill_and_check_untouched(daemon, writer, ask=False)
        os.kill(writer.process.pid, signal.SIGCONT)
        assert writer.ask("check") == "same"


def _fill_and_check_untouched(daemon: DaemonProcess, holder: EngineProcess, *, ask: bool = True) -> None:
    """Store far more than the arena holds; no grant may touch what the other process was lent."""
    arena_bytes = daemon.data.stat().st_size
    granted = 0
    with RawEngine(daemon.socket, "filler") as filler:
        for number in range(2 * arena_bytes // (64 * OBJECT_BYTES)):
            keys = keys_of(f"fill{number}", 64)
            lease_id, outcomes, packed = filler.reserve(keys)
            count = outcomes.count(ReserveOutcome.GRANTED)
            granted += count
            for _, _, offset, length, _ in struct.iter_unpack("<5Q", packed):
                for start, size in holder.extents:
                    assert offset + length <= start or start + size <= offset, "a lent extent was granted again"
                filler.arena[offset : offset + length] = b"\xee" * length
            filler.commit(lease_id, count)
    assert granted * OBJECT_BYTES > arena_bytes, "the arena was not filled"
    assert not ask or holder.ask("check") == "same"


def _wait_nothing_lent(daemon: DaemonProcess) -> None:
    """The test's own process may still have sessions."""

    def over() -> bool:
        status = status_of(daemon.socket)
        return not status.tiers[0].lent_bytes and all(set(one.pids) == {os.getpid()} for one in status.sessions)

    wait_until(over, "every extent and session of the dead process comes back")


@pytest.mark.requirement("T7")
def test_an_engine_killed_in_a_store_leaves_nothing(daemon: DaemonProcess) -> None:
    with EngineProcess(daemon.socket, "victim", "reserve", "never stored", 8) as victim:
        assert status_of(daemon.socket).tiers[0].lent_bytes == 8 * OBJECT_BYTES
        victim.kill()
        _wait_nothing_lent(daemon)
    status = status_of(daemon.socket)
    assert not status.sessions
    assert not status.tiers[0].used_bytes
    assert daemon.arena_files == ARENA_FILES
    with RawEngine(daemon.socket, "next") as engine:
        assert engine.locate(keys_of("never stored", 8)) == 0
        engine.store(keys_of("never stored", 8))


@pytest.mark.requirement("T7", "I1a")
def test_an_engine_that_died_while_no_daemon_ran_leaves_nothing(daemon: DaemonProcess) -> None:
    with EngineProcess(daemon.socket, "victim", "reserve", "never stored", 8) as victim:
        daemon.kill()
        victim.kill()
    daemon.start()
    status = status_of(daemon.socket)
    assert not status.sessions
    assert not status.tiers[0].lent_bytes
    assert not status.tiers[0].used_bytes


@pytest.mark.requirement("I1a")
def test_another_capacity_waits_for_the_living(daemon: DaemonProcess) -> None:
    with EngineProcess(daemon.socket, "writer", "reserve", "being written", 8) as writer:
        daemon.stop()
        larger = daemon.command("--ram", "512MiB")
        refused = subprocess.run(larger, capture_output=True, text=True, check=False, timeout=patient(30))
        assert refused.returncode == 1
        assert "ram.capacity" in refused.stderr
        assert f"pid {writer.process.pid}" in refused.stderr
        assert writer.ask("check") == "same"
    size_before = daemon.data.stat().st_size
    daemon.start(options=("--ram", "512MiB"))
    assert daemon.data.stat().st_size > size_before
    assert "recreated (its size changes" in daemon.log
