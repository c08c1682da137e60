"""What a process makes of the daemon's answer to its attachment, and what it leaves open."""

from __future__ import annotations

import array
import contextlib
import gc
import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvdepot.client.transports.attach import AttachError, attach
from kvdepot.core.calls import AttachCall, AttachReply
from kvdepot.core.limits import SESSION_TOKEN_BYTES
from kvdepot.proto import codec

from tests.fakes.scarce_descriptors import no_descriptor_left
from tests.rigs.patience import patient

CALL = AttachCall(1, 1, "e", scheduler=True, rank=0, world_size=1)
ACCEPTED = AttachReply(1, session=bytes(range(SESSION_TOKEN_BYTES)), arena_id=1, arena_bytes=4096)
SECONDS = 10.0


class Daemon:
    """Answers one attachment, on a thread of its own, and goes on until the other side has closed its end."""

    def __init__(self) -> None:
        self.path = os.fspath(Path(tempfile.mkdtemp(prefix="kvd", dir="/tmp"), "a"))
        self.heard_the_end = False
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(self.path)
        self._listener.listen()
        self._thread: threading.Thread | None = None

    def answers(self, datagram: bytes, descriptors: int) -> None:
        """Nothing: it closes the connection instead."""
        self._thread = threading.Thread(target=self._answer, args=(datagram, descriptors))
        self._thread.start()

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        self.join()
        self._listener.close()

    def _answer(self, datagram: bytes, descriptors: int) -> None:
        connection, _ = self._listener.accept()
        with connection, Path(os.devnull).open() as null:
            connection.settimeout(patient(SECONDS))
            connection.recv(4096)
            if datagram:
                rights = array.array("i", [null.fileno()] * descriptors)
                connection.sendmsg([datagram], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
                with contextlib.suppress(TimeoutError):
                    self.heard_the_end = not connection.recv(1)


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with contextlib.closing(Daemon()) as daemon:
        yield daemon


def open_descriptors() -> int:
    gc.collect()  # what tests of before have dropped
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def test_an_accepted_process_gets_the_descriptors_and_stays_connected(daemon: Daemon) -> None:
    daemon.answers(codec.encode_attach_reply(ACCEPTED), 2)
    attached = attach(daemon.path, CALL, SECONDS)
    with attached.connection:
        assert attached.reply == ACCEPTED and attached.calls is None
        assert len(attached.descriptors) == 2
        for descriptor in attached.descriptors:
            assert os.fstat(descriptor).st_rdev == Path(os.devnull).stat().st_rdev
            assert not os.get_inheritable(descriptor)
            os.close(descriptor)
        assert attached.connection.gettimeout() is None


@pytest.mark.parametrize(
    ("datagram", "descriptors", "by_daemon", "why"),
    [
        (codec.encode_attach_reply(AttachReply(0, error="no room")), 1, True, "no room"),
        (codec.encode_attach_reply(AttachReply(0, daemon_version="1")), 0, True, "refused without a reason"),
        (codec.encode_attach_reply(ACCEPTED), 3, True, "the answer carries 3 descriptors"),
        (b"\xff" * 20, 1, True, "AttachResponse"),
        (b"", 0, False, "the daemon closed the connection"),
    ],
)
def test_what_is_refused_or_not_understood_leaves_nothing_open(
    daemon: Daemon, datagram: bytes, descriptors: int, by_daemon: bool, why: str
) -> None:
    before = open_descriptors()
    daemon.answers(datagram, descriptors)
    with pytest.raises(AttachError, match=why) as caught:
        attach(daemon.path, CALL, SECONDS)
    assert caught.value.by_daemon is by_daemon
    daemon.join()
    assert open_descriptors() == before
    assert daemon.heard_the_end or not datagram


def test_a_process_without_descriptors_is_told_so() -> None:
    with no_descriptor_left(), pytest.raises(AttachError, match="Too many open files") as caught:
        attach("/nowhere", CALL, SECONDS)
    assert not caught.value.by_daemon
