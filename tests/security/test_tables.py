"""The arena in the hands of another user: the kernel refuses to change its tables, or the size of its data (S1, I1)."""

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
from kvdepot.core.arena import EXTENT_COLUMNS, LENT_COLUMNS, PAGE_BYTES, ArenaLayout, Superblock
from kvdepot.core.calls import AttachCall
from kvdepot.proto import codec

from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.other_uids import HONEST, HOSTILE, Comparing, OtherUser, needs_root, open_to_group
from tests.rigs.raw_client import attach_socket, exchange, status_of

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


def attack(socket: str, daemon_pid: int) -> dict[str, int]:
    """Attach, and try each way to change each place of the tables. Return the error number of each, 0: it worked."""
    connection = attach_socket(Path(f"{socket}.attach"))
    call = AttachCall(1, 1, "hostile", scheduler=True, rank=0, world_size=1)
    reply, (data, tables) = exchange(connection, codec.encode_attach_call(call))
    layout = Superblock.unpack(os.pread(tables, PAGE_BYTES, 0)).layout
    mapped_data = mmap.mmap(data, reply.arena_bytes)  # as an engine must be able to
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    mapped = libc.mmap(None, ctypes.c_size_t(PAGE_BYTES), mmap.PROT_READ, mmap.MAP_SHARED, tables, ctypes.c_long(0))
    own = f"/proc/self/fd/{tables}"
    ways: dict[str, Callable[[], object]] = {
        "map": lambda: mmap.mmap(tables, layout.tables_bytes),
        "protect": lambda: _checked(libc.mprotect(mapped, PAGE_BYTES, _PROT_READ_WRITE)),
        "cut": lambda: os.ftruncate(tables, 0),
        "grow": lambda: os.ftruncate(tables, 2 * layout.tables_bytes),
        "punch": lambda: _checked(
            libc.fallocate(
                tables, _FALLOC_FL_KEEP_SIZE_PUNCH_HOLE, ctypes.c_long(0), ctypes.c_long(layout.tables_bytes)
            )
        ),
        "reopen": lambda: os.open(own, os.O_RDWR),
        "reopen to write": lambda: os.open(own, os.O_WRONLY | os.O_TRUNC),
        "cut by path": lambda: os.truncate(own, 0),
        "mode": lambda: os.fchmod(tables, 0o666),
        "owner": lambda: os.fchown(tables, os.getuid(), -1),
        "cut the data": lambda: os.ftruncate(data, 0),
        "cut the data by a page": lambda: os.ftruncate(data, reply.arena_bytes - PAGE_BYTES),
        "cut the data by path": lambda: os.truncate(f"/proc/self/fd/{data}", 0),
        "empty the data": lambda: os.open(f"/proc/self/fd/{data}", os.O_WRONLY | os.O_TRUNC),
        "grow the data": lambda: os.ftruncate(data, 2 * reply.arena_bytes),
        "seal the data": lambda: fcntl.fcntl(data, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
        "the daemon's own": lambda: os.listdir(f"/proc/{daemon_pid}/fd"),  # noqa: PTH208
        "the daemon's memory": lambda: os.open(f"/proc/{daemon_pid}/mem", os.O_RDWR),
        **{f"write {place}": _writer(tables, at) for place, at in _places(layout).items()},
    }
    flags = fcntl.fcntl(tables, fcntl.F_GETFL)
    fcntl.fcntl(tables, fcntl.F_SETFL, flags | os.O_RDWR)  # changes no access mode, and says nothing
    outcomes = {name: _error_of(way) for name, way in ways.items()}
    assert len(mapped_data[:]) == reply.arena_bytes  # no SIGBUS
    return outcomes


def _places(layout: ArenaLayout) -> dict[str, int]:
    """Return an offset in each part, and in each column that an attack has used."""
    extents = dict(_columns(layout.extents_offset, EXTENT_COLUMNS, layout.rows))
    lent = dict(_columns(layout.lent_offset, LENT_COLUMNS, layout.lent_rows))
    return {
        "superblock": 0, "generation": extents["generation"], "offset (swap)": extents["offset"],
        "next (loop)": extents["next"], "state": extents["state"], "lent mode": lent["mode"], "lent row": lent["row"],
        "sessions": layout.sessions_offset, "attachments": layout.attachments_offset,
        "namespaces": layout.namespaces_offset, "end": layout.tables_bytes - 8,
    }  # fmt: skip


def _columns(at: int, columns: tuple[tuple[str, str], ...], rows: int) -> Iterator[tuple[str, int]]:
    for name, dtype in columns:
        yield name, at
        at += -(-int(dtype[2:] if dtype[0] == "<" else dtype[1:]) * rows // 64) * 64


def _writer(tables: int, at: int) -> Callable[[], object]:
    return lambda: os.pwrite(tables, bytes(8), at)


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
def test_another_user_changes_neither_tables_nor_sizes_and_a_healthy_engine_goes_on(daemon: DaemonProcess) -> None:
    socket = str(daemon.socket)
    with OtherUser(HONEST, __name__) as honest, OtherUser(HOSTILE, __name__) as hostile:
        assert honest.run("check", socket) == 4
        before = daemon.arena.stat().st_size, daemon.arena.stat().st_blocks
        outcomes = hostile.run("attack", socket, daemon.pid)
        assert {name: number for name, number in outcomes.items() if number not in REFUSED} == {}
        assert (daemon.arena.stat().st_size, daemon.arena.stat().st_blocks) == before
        assert daemon.arena.stat().st_mode & 0o777 == 0o600
        assert honest.run("check", socket) == 8
        assert status_of(daemon.socket).pid == daemon.pid
    daemon.kill()
    daemon.start()
    assert "adopted" in daemon.log
