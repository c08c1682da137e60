"""What the attachment socket answers, to the good, the bad and the ugly."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from kvdepot.core import limits
from kvdepot.core.calls import AttachCall
from kvdepot.core.report import SessionStatus
from kvdepot.proto import codec
from kvdepot.server.attach.attach import PENDING_CONNECTIONS_MAX

from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.engine_process import EngineProcess
from tests.rigs.patience import wait_until
from tests.rigs.raw_client import RawEngine, attach_socket, exchange, keys_of, status_of


def _call(engine_id: str, *, scheduler: bool = True, rank: int = 0, world_size: int = 1) -> AttachCall:
    return AttachCall(1, 1, engine_id, scheduler=scheduler, rank=rank, world_size=world_size)


def test_an_attachment_gets_the_arena(daemon: DaemonProcess) -> None:
    with attach_socket(daemon.attach_socket) as connection:
        reply, descriptors = exchange(connection, codec.encode_attach_call(_call("gets-arena")))
        assert reply.protocol == 1
        assert len(reply.session) == limits.SESSION_TOKEN_BYTES
        data, generations = descriptors
        assert os.fstat(data).st_size == reply.arena_bytes == daemon.data.stat().st_size
        assert os.fstat(data).st_ino == daemon.data.stat().st_ino
        assert daemon.arena.stat().st_ino not in [os.fstat(one).st_ino for one in descriptors]
        assert fcntl.fcntl(generations, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        os.close(data)
        os.close(generations)


def test_the_status_knows_who_attached(daemon: DaemonProcess) -> None:
    with RawEngine(daemon.socket, "known"):
        (session,) = [one for one in status_of(daemon.socket).sessions if one.engine_id == "known"]
        assert list(session.pids) == [os.getpid()]
        assert session.ranks_attached == session.world_size == 1
        assert session.scheduler_attached


@pytest.mark.parametrize(
    ("datagram", "error"),
    [
        (b"\xff" * 100, "no AttachRequest"),
        (b"GET / HTTP/1.1\r\n\r\n", "no AttachRequest"),
        (b"\x00" * 4096, "no AttachRequest"),
        (b"x" * (limits.ATTACH_DATAGRAM_BYTES_MAX + 1), "longer than 4096"),
        (codec.encode_attach_call(_call("")), "engine_id"),
        (codec.encode_attach_call(_call("e" * (limits.ENGINE_ID_BYTES_MAX + 1))), "engine_id"),
        (codec.encode_attach_call(_call("e", rank=1)), "rank"),
        (codec.encode_attach_call(_call("e", rank=-2)), "rank"),
        (codec.encode_attach_call(_call("e", world_size=0)), "world_size"),
        (codec.encode_attach_call(_call("e", world_size=limits.RANKS_MAX + 1)), "world_size"),
        (codec.encode_attach_call(_call("e", scheduler=False, rank=-1)), "neither scheduler nor worker"),
    ],
)
def test_garbage_gets_an_error_and_an_end(daemon: DaemonProcess, datagram: bytes, error: str) -> None:
    with attach_socket(daemon.attach_socket) as connection:
        reply, descriptors = exchange(connection, datagram)
        assert reply.protocol == 0
        assert error in reply.error
        assert not descriptors
        assert connection.recv(1) == b""
    assert status_of(daemon.socket).ready


@pytest.mark.parametrize(("low", "high"), [(2, 9), (0, 0)])
def test_another_protocol_version_is_told_both_ranges(daemon: DaemonProcess, low: int, high: int) -> None:
    call = AttachCall(low, high, "versions", scheduler=True, rank=0, world_size=1)
    with attach_socket(daemon.attach_socket) as connection:
        reply, _ = exchange(connection, codec.encode_attach_call(call))
    assert reply.protocol == 0
    assert "protocols 1 to 1" in reply.error
    assert f"{low} to {high}" in reply.error


def test_a_newer_client_that_still_speaks_ours_is_served(daemon: DaemonProcess) -> None:
    call = AttachCall(1, 7, "newer", scheduler=True, rank=0, world_size=1)
    with attach_socket(daemon.attach_socket) as connection:
        reply, descriptors = exchange(connection, codec.encode_attach_call(call))
    assert reply.protocol == 1
    for descriptor in descriptors:
        os.close(descriptor)


def test_a_second_datagram_ends_the_connection(daemon: DaemonProcess) -> None:
    with attach_socket(daemon.attach_socket) as connection:
        _, descriptors = exchange(connection, codec.encode_attach_call(_call("twice")))
        for descriptor in descriptors:
            os.close(descriptor)
        reply, _ = exchange(connection, codec.encode_attach_call(_call("twice")))
        assert "attached already" in reply.error
        assert connection.recv(1) == b""


def test_descriptors_sent_to_the_daemon_are_not_kept(daemon: DaemonProcess) -> None:
    descriptors = Path(f"/proc/{daemon.pid}/fd")
    before = len(list(descriptors.iterdir()))
    with attach_socket(daemon.attach_socket) as connection:
        socket.send_fds(connection, [b"\xff"], [0, 1, 2])
        assert b"no AttachRequest" in connection.recv(8192)
        assert connection.recv(1) == b""
    assert len(list(descriptors.iterdir())) <= before


@pytest.mark.requirement("I4")
def test_silent_connections_are_bounded(daemon: DaemonProcess) -> None:
    pending = [attach_socket(daemon.attach_socket) for _ in range(PENDING_CONNECTIONS_MAX + 1)]
    assert pending[0].recv(1) == b""  # the oldest made room
    with RawEngine(daemon.socket, "after-pending") as engine:
        assert engine.ranks_attached == 1
    for connection in pending:
        connection.close()


def test_a_live_engine_keeps_its_id(daemon: DaemonProcess) -> None:
    """Another process with the same engine id is refused by name."""
    another = (
        "import sys\n"
        "from pathlib import Path\n"
        "from kvdepot.core.calls import AttachCall\n"
        "from kvdepot.proto import codec\n"
        "from tests.rigs.raw_client import attach_socket, exchange\n"
        "call = AttachCall(1, 1, 'taken', scheduler=True, rank=0, world_size=1)\n"
        "reply, _ = exchange(attach_socket(Path(sys.argv[1])), codec.encode_attach_call(call))\n"
        "print(reply.error)\n"
    )
    with RawEngine(daemon.socket, "taken"):
        command = [sys.executable, "-c", another, str(daemon.attach_socket)]
        error = subprocess.run(
            command, cwd=Path(__file__).parents[3], capture_output=True, text=True, check=True
        ).stdout
        assert f"process {os.getpid()} is already" in error


@pytest.mark.requirement("T7")
def test_an_engine_that_disconnects_and_lives_keeps_its_session(daemon: DaemonProcess) -> None:
    first = RawEngine(daemon.socket, "comes-back")
    first.close()
    wait_until(lambda: not _session(daemon, "comes-back").ranks_attached, "disconnection")
    with RawEngine(daemon.socket, "comes-back") as second:
        assert second.session == first.session


@pytest.mark.requirement("I6")
@pytest.mark.parametrize("level", [pytest.param("1", marks=pytest.mark.long(seconds=6)), "2"])
def test_an_engine_that_proc_hides_is_served_and_known_by_its_pidfd(level: str) -> None:
    """/proc mounted with hidepid, and the engine another user's: hidepid=1 denies, hidepid=2 shows nothing."""
    with DaemonProcess() as daemon:
        assert daemon.stop() == 0
        daemon.under = ("tests.fakes.hidden_processes", level)
        daemon.start()
        with EngineProcess(daemon.socket, "hidden", "reserve", "being written", 8) as engine:
            assert _session(daemon, "hidden").ranks_attached == 1
            assert list(_session(daemon, "hidden").pids) == [0]
            daemon.kill()
            daemon.start()
            kept = status_of(daemon.socket).tiers[0].lent_bytes
            assert kept > 0, "whether it lives is not known"
            assert engine.ask("check") == "same"
        with EngineProcess(daemon.socket, "dies", "reserve", "written beside it", 8) as other:
            assert status_of(daemon.socket).tiers[0].lent_bytes > kept
            other.kill()
            wait_until(lambda: status_of(daemon.socket).tiers[0].lent_bytes == kept, "its pidfd proves its death")


# Attaches, leaves at the first line, ends at the second.
_LEAVES = """
import sys
from pathlib import Path
from tests.rigs.raw_client import RawEngine
engine = RawEngine(Path(sys.argv[1]), "leaves")
print("attached", flush=True)
sys.stdin.readline()
engine.close()
print("left", flush=True)
sys.stdin.readline()
"""


@pytest.mark.requirement("I6")
def test_the_end_of_a_hidden_process_ends_nobody_elses_session() -> None:
    """Its session has ended before, and another engine has its slots: what that one writes stays its own."""
    with DaemonProcess() as daemon:
        assert daemon.stop() == 0
        daemon.under = ("tests.fakes.hidden_processes", "2")
        daemon.config = '[sessions]\ngrace = "1s"\n'
        daemon.start()
        command = [sys.executable, "-c", _LEAVES, str(daemon.socket)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as leaver:
            assert leaver.stdin and leaver.stdout
            assert leaver.stdout.readline() == "attached\n"
            leaver.stdin.write("\n")
            assert leaver.stdout.readline() == "left\n"
            wait_until(lambda: not status_of(daemon.socket).sessions, "its session has ended, and it lives")
            with EngineProcess(daemon.socket, "writes", "reserve", "being written", 8) as writer:
                leaver.kill()
                leaver.wait()
                with EngineProcess(daemon.socket, "later", "reserve", "other bytes", 8) as later:
                    assert not set(writer.extents) & set(later.extents)
                    assert writer.ask("check") == "same"
                    assert _session(daemon, "writes").lent_objects == 8


@pytest.mark.requirement("T7")
def test_a_hidden_engine_comes_back_to_its_session_at_once() -> None:
    """It is known by the number that the kernel gives each process, from Linux 6.9."""
    own, other = os.pidfd_open(os.getpid()), os.pidfd_open(os.getppid())
    numbered = os.fstat(own).st_ino != os.fstat(other).st_ino
    os.close(own)
    os.close(other)
    if not numbered:
        pytest.skip("this kernel does not number processes")
    with DaemonProcess() as daemon:
        assert daemon.stop() == 0
        daemon.under = ("tests.fakes.hidden_processes", "2")
        daemon.start()
        first = RawEngine(daemon.socket, "comes-back")
        first.store(keys_of("stored", 1))
        lease, *_ = first.reserve(keys_of("being written", 1))
        first.close()
        wait_until(lambda: not _session(daemon, "comes-back").ranks_attached, "disconnection")
        second = RawEngine(daemon.socket, "comes-back")
        assert second.session == first.session
        daemon.kill()
        daemon.start()
        with RawEngine(daemon.socket, "comes-back") as third:
            assert _session(daemon, "comes-back").lent_objects == 1
            third.abandon(lease)
            assert _session(daemon, "comes-back").lent_objects == 0
        second.close()


@pytest.mark.requirement("I4")
def test_one_that_is_refused_again_and_again_is_said_once_a_minute(daemon: DaemonProcess) -> None:
    before = daemon.log.count("attach refused: no AttachRequest")
    for _ in range(20):
        with attach_socket(daemon.attach_socket) as connection:
            connection.send(b"the same garbage")
            assert b"no AttachRequest" in connection.recv(8192)
    assert daemon.log.count("attach refused: no AttachRequest") - before <= 1


def test_the_sockets_have_the_configured_mode(daemon: DaemonProcess) -> None:
    for path in (daemon.socket, daemon.attach_socket):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600  # the embedded default's


def _session(daemon: DaemonProcess, engine_id: str) -> SessionStatus:
    (session,) = [one for one in status_of(daemon.socket).sessions if one.engine_id == engine_id]
    return session
