"""Who holds the arena while its daemon is away: a process that outlives every daemon, and lets go of deleted arenas."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from kvdepot.core.calls import AcquireOutcome
from kvdepot.server.arena.holding import Connection

from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.patience import patient, wait_until
from tests.rigs.raw_client import CHUNK_TOKENS, EXTENT, RawEngine, keys_of, payload_of, status_of
from tests.rigs.stopping import stop

KEYS = keys_of("held", 8)


def _store(daemon: DaemonProcess) -> None:
    with RawEngine(daemon.socket) as engine:
        engine.store(KEYS)
        wait_until(lambda: engine.counter("checksummed_objects") == len(KEYS), "the sums", 60)


def _loads(daemon: DaemonProcess) -> bool:
    """Return whether all that `_store` has stored is served, after a restart."""
    wait_until(lambda: not status_of(daemon.socket).tiers[0].unverified_objects, "verification", 60)
    with RawEngine(daemon.socket) as engine:
        found = engine.locate(KEYS)
        assert found in (0, len(KEYS) * CHUNK_TOKENS)
        return bool(found) and engine.load(KEYS) == [payload_of(key) for key in KEYS]


def _holder(arena: Path) -> int:
    connection = Connection(arena, patient(20))
    for descriptor in connection.held:
        os.close(descriptor)
    connection.close()
    return connection.pid


def _wait_held(daemon: DaemonProcess, former: int) -> None:
    """Wait until the daemon that runs has said who holds its arena, and it is another holder than the former one."""

    def is_held() -> bool:
        said = [line.rsplit(" ", 1)[1] for line in daemon.log.splitlines() if "arena held" in line]
        return said[-1] != str(former) and said[-1] == str(_holder(daemon.arena))

    wait_until(is_held, "another holder", 60)


def _has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.requirement("T6")
@pytest.mark.parametrize("end", ["stop", "kill"])
def test_one_holder_keeps_the_arena_of_one_daemon_after_the_other(new_daemon: DaemonProcess, end: str) -> None:
    _store(new_daemon)
    holder = _holder(new_daemon.arena)
    assert f"arena held for the next daemon by pid {holder}" in new_daemon.log
    for _ in range(2):
        getattr(new_daemon, end)()
        assert _holder(new_daemon.arena) == holder
        new_daemon.start()
        assert _loads(new_daemon)
        assert _holder(new_daemon.arena) == holder
    assert os.getsid(holder) != os.getsid(new_daemon.pid)


@pytest.mark.requirement("T1")
def test_a_deleted_arena_gives_its_memory_back_and_its_holder_ends(new_daemon: DaemonProcess) -> None:
    _store(new_daemon)
    arena, holder = new_daemon.arena, _holder(new_daemon.arena)
    new_daemon.stop()
    arena.unlink()
    wait_until(lambda: _has_ended(holder), "the end of the holder")
    new_daemon.start()
    assert "arena opened" in new_daemon.log and "adopted, " not in new_daemon.log
    assert not _loads(new_daemon)


@pytest.mark.requirement("I1", "T6")
def test_who_deletes_the_arena_and_starts_at_once_has_an_empty_one_and_no_engine_reads_zeros(
    new_daemon: DaemonProcess,
) -> None:
    """The holder has not noticed yet. An engine that was lent extents may be in a copy."""
    _store(new_daemon)
    with RawEngine(new_daemon.socket) as engine:
        _, outcome, extents = engine.acquire(KEYS)
        assert outcome is AcquireOutcome.GRANTED
        new_daemon.kill()
        new_daemon.arena.unlink()
        new_daemon.start()
        assert _read_right(engine, extents)
    assert not _loads(new_daemon)


@pytest.mark.requirement("I1", "I8")
def test_a_daemon_that_dies_with_its_holder_starts_again_while_engines_hold_loans(new_daemon: DaemonProcess) -> None:
    _store(new_daemon)
    with RawEngine(new_daemon.socket) as engine:
        _, outcome, extents = engine.acquire(KEYS)
        assert outcome is AcquireOutcome.GRANTED
        holder = _holder(new_daemon.arena)
        new_daemon.suspend()
        os.kill(holder, signal.SIGKILL)
        new_daemon.kill()
        new_daemon.start()
        assert "its data is missing" in new_daemon.log
        assert _read_right(engine, extents), "nobody can grant these extents again"
    _store(new_daemon)
    assert _loads(new_daemon)


def _read_right(engine: RawEngine, extents: bytes) -> bool:
    """Return whether all generations still hold. If so, the bytes must be right."""
    for index, row, offset, length, generation in EXTENT.iter_unpack(extents):
        if engine.generations[row] != generation:
            return False
        assert engine.arena[offset : offset + length] == payload_of(KEYS[index])[:length]
    return True


@pytest.mark.requirement("T6")
@pytest.mark.long(seconds=10)
def test_a_directory_may_have_a_path_that_is_too_long_for_sockets() -> None:
    daemon = DaemonProcess()
    daemon.arena_directory /= "x" * 120
    daemon.arena_directory.mkdir()
    try:
        daemon.start()
        _store(daemon)
        daemon.kill()
        daemon.start()
        assert _loads(daemon)
    finally:
        daemon.arena_directory = daemon.arena_directory.parent
        daemon.close()


@pytest.mark.requirement("T6")
def test_a_holder_that_dies_is_replaced(new_daemon: DaemonProcess) -> None:
    _store(new_daemon)
    first = _holder(new_daemon.arena)
    os.kill(first, signal.SIGKILL)
    _wait_held(new_daemon, first)
    new_daemon.kill()
    new_daemon.start()
    assert _loads(new_daemon)


@pytest.mark.requirement("I3")
def test_a_holder_that_hangs_stops_neither_the_daemon_nor_its_start(new_daemon: DaemonProcess) -> None:
    _store(new_daemon)
    holder = _holder(new_daemon.arena)
    stop(holder)
    try:
        assert _loads(new_daemon)
        new_daemon.kill()
        new_daemon.start()
        assert "its data is missing" in new_daemon.log
        assert "nobody holds the arena" in new_daemon.log
        with RawEngine(new_daemon.socket) as engine:
            assert engine.counter("holder_failures") > 0
        _store(new_daemon)
    finally:
        os.kill(holder, signal.SIGKILL)
    _wait_held(new_daemon, holder)
    new_daemon.kill()
    new_daemon.start()
    assert _loads(new_daemon)


@pytest.mark.requirement("S1", "S3")
def test_another_user_s_holder_gets_nothing(new_daemon: DaemonProcess) -> None:
    if os.geteuid():
        pytest.skip("acting as another user needs root")
    _store(new_daemon)
    arena = new_daemon.arena
    new_daemon.stop()
    former = _holder(arena)
    os.kill(former, signal.SIGKILL)
    wait_until(lambda: _has_ended(former), "its end")  # until then it has the lock
    arena.with_name(f"{arena.name}.hold").unlink()
    with _squatter(arena) as squatter:
        new_daemon.start()
        assert _holder(arena) != squatter.pid
        squatter.send_signal(signal.SIGTERM)
        answer, _ = squatter.communicate(timeout=patient(20))
        assert answer.splitlines() == ["listens"]


@contextmanager
def _squatter(arena: Path) -> Iterator[subprocess.Popen[str]]:
    """Another user's process at the holder's place, which prints what it is given."""
    program = (
        "import os, socket, sys\n"
        "s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
        "s.bind(sys.argv[1]); os.setuid(65534); s.listen(); print('listens', flush=True)\n"
        "while True:\n"
        "    c, _ = s.accept(); c.send(b'kvdepot holder 2')\n"
        "    m, f, _, _ = socket.recv_fds(c, 16, 4)\n"
        "    if f: print('was given', f, flush=True)\n"
    )
    command = (sys.executable, "-I", "-S", "-c", program, f"{arena}.hold")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            wait_until(lambda: arena.with_name(f"{arena.name}.hold").exists(), "the squatter")
            yield process
        finally:
            process.kill()


@contextmanager
def _hold(daemon: DaemonProcess) -> Iterator[subprocess.Popen[str]]:
    """`kvdepotd hold` for the arena of this daemon."""
    place = ("--socket", str(daemon.socket), "--arena-dir", str(daemon.arena_directory))
    command = (sys.executable, "-m", "kvdepot.server.daemon.app", "hold", *place)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("holding ")
            yield process
        finally:
            process.kill()


@pytest.mark.requirement("T6")
@pytest.mark.long(seconds=10)
@pytest.mark.parametrize("supervised", [False, True])
def test_the_verb_hold_stays_whatever_daemons_come_and_go(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, supervised: bool
) -> None:
    """As a service or a container of its own: also where a supervisor keeps nothing, or where an arena is deleted."""
    if supervised:
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "nobody"))
    daemon = DaemonProcess()
    try:
        with _hold(daemon) as hold:
            daemon.start()
            _store(daemon)
            daemon.kill()
            assert _holder(daemon.arena) == hold.pid
            daemon.start()
            assert _loads(daemon)
            daemon.stop()
            daemon.arena.unlink()
            daemon.start()
            assert not _loads(daemon)
            assert _holder(daemon.arena) == hold.pid
            daemon.stop()
            for path in daemon.arena_directory.iterdir():
                path.unlink()
            assert hold.wait(patient(20)) == 1, "no daemon finds it any more"
    finally:
        daemon.close()


@pytest.mark.requirement("T6")
def test_a_supervised_daemon_starts_no_holder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "nobody"))
    with DaemonProcess() as daemon, pytest.raises(OSError, match="No such file"):
        Connection(daemon.arena)


@pytest.mark.long(seconds=15)
def test_an_arena_that_is_a_file_has_no_holder() -> None:
    with DaemonProcess(config="[ram]\nsealed = false\n", options=("--disk", "")) as daemon:
        _store(daemon)
        assert daemon.arena_files == ("arena", "arena.data", "arena.generations", "arena.lock")
        daemon.kill()
        daemon.start()
        assert _loads(daemon)
        daemon.stop()
        daemon.start(options=("--ram", "400MiB"))
        assert not _loads(daemon)
