"""Each of two tenants has data of its own: neither reaches, evicts or outlives that of the other one (S2, I1, I8)."""

from __future__ import annotations

import contextlib
import errno
import itertools
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest
from kvdepot.core.arena import PAGE_BYTES
from kvdepot.core.calls import AttachCall
from kvdepot.proto import codec
from kvdepot.server.arena.holding import Connection

from tests.rigs.child_processes import children
from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.other_uids import HONEST, HOSTILE, Attached, Comparing, OtherUser, needs_root, open_to_group
from tests.rigs.patience import wait_until
from tests.rigs.raw_client import OBJECT_BYTES, attach_socket, exchange, keys_of, payload_of, spec_of, status_of

pytestmark = needs_root
PART_BYTES: Final = 8 << 20
CONFIG: Final = f"""
[[tenant]]
name = "honest"
users = ["{HONEST}"]
[[tenant]]
name = "hostile"
users = ["{HOSTILE}"]
ram = "{PART_BYTES >> 20}MiB"
"""
NAMES: Final = {HONEST: "honest", HOSTILE: "hostile"}
REFUSED: Final = {errno.EACCES, errno.EPERM, errno.ENOENT, errno.ESRCH}
_engines: list[Comparing] = []
_streams: list[Attached] = []
_prompts = itertools.count()


# --- what the processes of the users do


def begin(socket: str) -> int:
    """Attach to the daemon that runs now, as an engine of the user's tenant. Return the size of the data."""
    tenant = NAMES[os.getuid()]
    _engines.append(Comparing(Path(socket), tenant, spec=spec_of(tenant)))
    return _engines[-1].reply.arena_bytes


def store(chunks: int) -> list[bytes]:
    """Store a prompt, and return its keys."""
    keys = keys_of(f"{os.getuid()}-{next(_prompts)}", chunks)
    _engines[-1].store(keys)
    return keys


def served(keys: list[bytes]) -> str:
    """Load a prompt, and return what is wrong with it."""
    loaded = _engines[-1].load(keys)
    if loaded is None:
        return "it is not served"
    return "" if loaded == [payload_of(key) for key in keys] else "its bytes are wrong"


def find(socket: str, searched: list[bytes]) -> list[bytes]:
    """Attach, and return which of these are anywhere in what is given."""
    connection = attach_socket(Path(f"{socket}.attach"))
    call = AttachCall(1, 1, "curious", scheduler=True, rank=0, world_size=1, parts=True)
    _, given = exchange(connection, codec.encode_attach_call(call))
    files = [os.pread(one, os.fstat(one).st_size, 0) for one in given]
    return [one for one in searched if any(one in file for file in files)]


def reach(socket: str, processes: list[int]) -> dict[str, int]:
    """Try each way to the other tenant's data. Return the error numbers, 0: it worked."""
    connection = attach_socket(Path(f"{socket}.attach"))
    call = AttachCall(1, 1, "curious", scheduler=True, rank=0, world_size=1, parts=True)
    reply, (data, _) = exchange(connection, codec.encode_attach_call(call))
    assert os.fstat(data).st_size == reply.arena_bytes
    ways: dict[str, Callable[[], object]] = {
        "beyond the end": lambda: mmap.mmap(data, reply.arena_bytes + PAGE_BYTES),
        "after the end": lambda: mmap.mmap(data, PAGE_BYTES, offset=reply.arena_bytes),
        "write after the end": lambda: os.pwrite(data, b"x", reply.arena_bytes),
        "grow": lambda: os.ftruncate(data, 2 * reply.arena_bytes),
        **{f"descriptors of {pid}": lambda pid=pid: list(Path(f"/proc/{pid}/fd").iterdir()) for pid in processes},  # type: ignore[misc]
        **{f"memory of {pid}": lambda pid=pid: os.open(f"/proc/{pid}/mem", os.O_RDWR) for pid in processes},  # type: ignore[misc]
        **{f"maps of {pid}": lambda pid=pid: list(Path(f"/proc/{pid}/map_files").iterdir()) for pid in processes},  # type: ignore[misc]
    }
    return {name: _error_of(way) for name, way in ways.items()}


def stream(socket: str) -> str:
    """Attach as a process that cannot map the arena, and stay attached. Return why it is refused."""
    _streams.append(Attached(socket, "streaming", scheduler=False, stream=True))
    return _streams[-1].reply.error


def _error_of(way: Callable[[], object]) -> int:
    try:
        way()
    except ValueError:  # mmap looks at the size itself
        return errno.EPERM
    except OSError as error:
        return error.errno or -1
    return 0


# --- the tests


@pytest.fixture
def tenants() -> Iterator[DaemonProcess]:
    with DaemonProcess(config=CONFIG) as daemon:
        open_to_group(daemon)
        yield daemon


def payload(keys: list[bytes]) -> list[bytes]:
    return [payload_of(key)[:64] for key in keys]


def summed(daemon: DaemonProcess) -> None:
    wait_until(lambda: not status_of(daemon.socket).tiers[0].pending_checksums, "checksums")


def holder_of(daemon: DaemonProcess) -> int:
    connection = Connection(daemon.arena)
    connection.close()
    for held in connection.held:
        os.close(held)
    return connection.pid


def held_inodes(daemon: DaemonProcess) -> list[int]:
    """Return the inodes of the generations and of each part, in the order of the tenants' names."""
    connection = Connection(daemon.arena)
    connection.close()
    found = [os.fstat(held).st_ino for held in connection.held]
    for held in connection.held:
        os.close(held)
    return found


def files_of(pid: int) -> set[int]:
    """Return the inodes that a process has open. It may open and close others meanwhile."""
    found = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.add(descriptor.stat().st_ino)
    return found


@pytest.mark.requirement("S2")
def test_an_engine_is_given_the_data_of_its_tenant_alone(
    tenants: DaemonProcess, honest: OtherUser, hostile: OtherUser
) -> None:
    socket = str(tenants.socket)
    sizes = honest.run("begin", socket), hostile.run("begin", socket)
    assert sizes[1] == PART_BYTES < sizes[0]
    searched = payload(honest.run("store", 8))
    assert honest.run("find", socket, searched) == searched, "the control"
    assert hostile.run("find", socket, searched) == []
    assert len(held_inodes(tenants)) == 3
    processes = [tenants.pid, holder_of(tenants), *children(tenants.pid)]
    outcomes = hostile.run("reach", socket, processes)
    outcomes = {name: number for name, number in outcomes.items() if number not in REFUSED}
    assert outcomes.keys() <= {"after the end", "write after the end"}, outcomes
    assert set(outcomes.values()) <= {errno.EINVAL, errno.EFBIG}
    assert honest.run("served", honest.run("store", 4)) == ""


@pytest.mark.requirement("S2")
def test_a_proxy_has_the_data_of_its_client_alone(
    tenants: DaemonProcess, honest: OtherUser, hostile: OtherUser
) -> None:
    parts = held_inodes(tenants)[1:]
    for part, user in enumerate((honest, hostile)):
        before = set(children(tenants.pid, b"stream_proxy"))
        assert user.run("stream", str(tenants.socket)) == ""
        (proxy,) = set(children(tenants.pid, b"stream_proxy")) - before
        assert files_of(proxy) & set(parts) == {parts[part]}


@pytest.mark.requirement("S2", "S4")
def test_a_full_part_takes_nothing_from_the_other_tenant(
    tenants: DaemonProcess, honest: OtherUser, hostile: OtherUser
) -> None:
    socket = str(tenants.socket)
    for user in (honest, hostile):
        user.run("begin", socket)
    keys = honest.run("store", 16)
    evicted = status_of(tenants.socket).counters.get("evicted_bytes", 0)
    for _ in range(3 * PART_BYTES // (16 * OBJECT_BYTES)):
        last = hostile.run("store", 16)
        summed(tenants)  # what has no checksum yet is being read, and cannot go
    assert status_of(tenants.socket).counters["evicted_bytes"] - evicted >= PART_BYTES, "its own objects went"
    assert honest.run("served", keys) == ""
    assert hostile.run("served", last) in ("", "it is not served"), "its own policy decides"
    used = {one.name: one.used_bytes for one in status_of(tenants.socket).tenants}
    assert used["honest"] == 16 * OBJECT_BYTES and used["hostile"] <= PART_BYTES


@pytest.mark.requirement("I8", "I1", "S2")
@pytest.mark.parametrize("first", ["honest", "hostile"])
@pytest.mark.parametrize("end", ["stop", "kill"])
def test_both_tenants_find_their_objects_after_a_restart(
    tenants: DaemonProcess, honest: OtherUser, hostile: OtherUser, end: str, first: str
) -> None:
    """Whoever comes first, and however the daemon ended. The holder has kept both parts."""
    socket = str(tenants.socket)
    users = {"honest": honest, "hostile": hostile}
    stored = {}
    for name, user in users.items():
        user.run("begin", socket)
        stored[name] = user.run("store", 16)
    summed(tenants)
    assert (tenants.stop if end == "stop" else tenants.kill)() == (0 if end == "stop" else -9)
    tenants.start()
    open_to_group(tenants)
    assert "32 committed" in tenants.log and "format 4" in tenants.log
    order = [first, *(name for name in users if name != first)]
    for name in order:
        users[name].run("begin", socket)
    wait_until(lambda: not status_of(tenants.socket).tiers[0].unverified_objects, "verification")
    assert {name: users[name].run("served", stored[name]) for name in order} == dict.fromkeys(order, ""), tenants.log
    for name in order:
        assert users[name].run("served", users[name].run("store", 8)) == ""
    assert {name: users[name].run("served", stored[name]) for name in order} == dict.fromkeys(order, "")


@pytest.mark.requirement("I8", "S2")
def test_other_tenants_begin_with_an_arena_of_their_own(
    tenants: DaemonProcess, honest: OtherUser, hostile: OtherUser
) -> None:
    socket = str(tenants.socket)
    honest.run("begin", socket)
    keys = honest.run("store", 8)
    tenants.stop()
    tenants.config = CONFIG.replace('"hostile"', '"other"')
    tenants.start()
    open_to_group(tenants)
    assert "recreated (its tenants, or the sizes of their parts, change)" in tenants.log
    honest.run("begin", socket)
    assert honest.run("served", keys) == "it is not served"
    with OtherUser(HOSTILE, __name__) as other, pytest.raises(RuntimeError, match="is in tenant 'other'"):
        other.run("begin", socket)
