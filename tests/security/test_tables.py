"""The arena in the hands of another user: no tables, and the kernel refuses to change generations or sizes (S1, I1)."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest
from kvdepot.core.arena import PAGE_BYTES
from kvdepot.core.calls import AttachCall
from kvdepot.proto import codec

from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.other_uids import HONEST, HOSTILE, Comparing, OtherUser, needs_root, open_to_group
from tests.rigs.patience import wait_until
from tests.rigs.raw_client import attach_socket, dense_spec, exchange, status_of

pytestmark = needs_root
REFUSED: Final = {errno.EACCES, errno.EPERM, errno.EBADF, errno.EINVAL}
_FALLOC_FL_KEEP_SIZE_PUNCH_HOLE: Final = 0x01 | 0x02
_PROT_READ_WRITE: Final = mmap.PROT_READ | mmap.PROT_WRITE


@pytest.fixture
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess() as process:
        open_to_group(process)
        yield process


# --- what the processes of the users do

_engine: list[Comparing] = []


def check(socket: str) -> int:
    """Store and load as the honest engine, and return how many objects were right."""
    if not _engine:
        _engine.append(Comparing(Path(socket), "honest"))
    return _engine[0].check()


def keys(chunks: int) -> list[bytes]:
    return _engine[0].keys(1, chunks)


def attack(socket: str, daemon_pid: int, arena: str) -> dict[str, int]:
    """Attach, and try each way to reach tables, or to change what is given. Return the error numbers, 0: it worked."""
    connection = attach_socket(Path(f"{socket}.attach"))
    call = AttachCall(1, 1, "hostile", scheduler=True, rank=0, world_size=1)
    reply, (data, column) = exchange(connection, codec.encode_attach_call(call))
    file_bytes = os.fstat(column).st_size
    mapped_data = mmap.mmap(data, reply.arena_bytes)  # as an engine must be able to
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    mapped = libc.mmap(None, ctypes.c_size_t(PAGE_BYTES), mmap.PROT_READ, mmap.MAP_SHARED, column, ctypes.c_long(0))
    own = f"/proc/self/fd/{column}"
    ways: dict[str, Callable[[], object]] = {
        "map": lambda: mmap.mmap(column, file_bytes),
        "protect": lambda: _checked(libc.mprotect(mapped, PAGE_BYTES, _PROT_READ_WRITE)),
        "cut": lambda: os.ftruncate(column, 0),
        "grow": lambda: os.ftruncate(column, 2 * file_bytes),
        "punch": lambda: _checked(
            libc.fallocate(column, _FALLOC_FL_KEEP_SIZE_PUNCH_HOLE, ctypes.c_long(0), ctypes.c_long(file_bytes))
        ),
        "reopen": lambda: os.open(own, os.O_RDWR),
        "reopen to write": lambda: os.open(own, os.O_WRONLY | os.O_TRUNC),
        "cut by path": lambda: os.truncate(own, 0),
        "mode": lambda: os.fchmod(column, 0o666),
        "owner": lambda: os.fchown(column, os.getuid(), -1),
        "seal": lambda: fcntl.fcntl(column, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
        **{f"write at {at}": _writer(column, at) for at in (0, PAGE_BYTES, file_bytes - 8)},
        "cut the data": lambda: os.ftruncate(data, 0),
        "cut the data by a page": lambda: os.ftruncate(data, reply.arena_bytes - PAGE_BYTES),
        "cut the data by path": lambda: os.truncate(f"/proc/self/fd/{data}", 0),
        "empty the data": lambda: os.open(f"/proc/self/fd/{data}", os.O_WRONLY | os.O_TRUNC),
        "grow the data": lambda: os.ftruncate(data, 2 * reply.arena_bytes),
        "seal the data": lambda: fcntl.fcntl(data, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
        "the tables": lambda: os.open(arena, os.O_RDONLY),
        "the tables for writing": lambda: os.open(arena, os.O_RDWR),
        "the daemon's own": lambda: os.listdir(f"/proc/{daemon_pid}/fd"),  # noqa: PTH208
        "the daemon's memory": lambda: os.open(f"/proc/{daemon_pid}/mem", os.O_RDWR),
    }
    flags = fcntl.fcntl(column, fcntl.F_GETFL)
    fcntl.fcntl(column, fcntl.F_SETFL, flags | os.O_RDWR)  # changes no access mode, and says nothing
    outcomes = {name: _error_of(way) for name, way in ways.items()}
    assert len(mapped_data[:]) == reply.arena_bytes  # no SIGBUS
    return outcomes


def find(socket: str, searched: list[bytes]) -> tuple[int, list[bytes]]:
    """Attach, and search all that is given besides the data. Return its size, and which of these it contains."""
    connection = attach_socket(Path(f"{socket}.attach"))
    call = AttachCall(1, 1, "curious", scheduler=True, rank=0, world_size=1)
    _, (data, *others) = exchange(connection, codec.encode_attach_call(call))
    os.close(data)
    given = b"".join(os.pread(other, os.fstat(other).st_size, 0) for other in others)
    return len(given), [one for one in searched if one in given]


def _writer(column: int, at: int) -> Callable[[], object]:
    return lambda: os.pwrite(column, bytes(8), at)


def _checked(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), "refused")


def _error_of(way: Callable[[], object]) -> int:
    try:
        way()
    except OSError as error:
        return error.errno or -1
    return 0


# --- the tests


@pytest.mark.requirement("S1", "I1", "I4")
def test_another_user_reaches_no_tables_changes_no_size_and_a_healthy_engine_goes_on(daemon: DaemonProcess) -> None:
    socket = str(daemon.socket)
    with OtherUser(HONEST, __name__) as honest, OtherUser(HOSTILE, __name__) as hostile:
        assert honest.run("check", socket) == 4
        before = daemon.arena.stat().st_size, daemon.arena.stat().st_blocks
        outcomes = hostile.run("attack", socket, daemon.pid, str(daemon.arena))
        assert {name: number for name, number in outcomes.items() if number not in REFUSED} == {}
        assert (daemon.arena.stat().st_size, daemon.arena.stat().st_blocks) == before
        assert daemon.arena.stat().st_mode & 0o777 == 0o600
        assert honest.run("check", socket) == 8
        assert status_of(daemon.socket).pid == daemon.pid
        wait_until(lambda: not status_of(daemon.socket).tiers[0].pending_checksums, "checksums")
    daemon.kill()
    daemon.start()
    assert status_of(daemon.socket).counters.get("adopted_objects.adopted", 0) > 0


@pytest.mark.requirement("S1", "S2")
def test_an_engine_is_given_no_key_and_no_label_of_others(daemon: DaemonProcess) -> None:
    """The tables have them, which is the control."""
    socket = str(daemon.socket)
    with OtherUser(HONEST, __name__) as honest, OtherUser(HOSTILE, __name__) as hostile:
        assert honest.run("check", socket) == 4
        searched = [*honest.run("keys", 4), dense_spec().label.encode()]
        assert all(one in daemon.arena.read_bytes() for one in searched)
        size_bytes, found = hostile.run("find", socket, searched)
        assert size_bytes >= PAGE_BYTES
        assert found == []
