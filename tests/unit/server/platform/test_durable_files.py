"""Files are published whole and synced, also where the file system lacks a call; an error names call and file."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from stat import S_ISDIR
from typing import Any

import pytest
from kvdepot.server.io.context import Context
from kvdepot.server.io.directory_guard import enter, hold_for_daemon, renew_token
from kvdepot.server.io.jobs import Append, Probe
from kvdepot.server.io.perform import perform
from kvdepot.server.platform.durable_files import LACKED, naming, publish, sync_folder
from kvdepot.server.storage.base import IoOutcome

from tests.rigs.io_rig import MIB, IoRig

lacked = pytest.mark.parametrize("number", sorted(LACKED), ids=lambda number: errno.errorcode[number])


def refuse(number: int) -> Callable[..., Any]:
    def refused(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    return refused


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[IoRig]:
    rig = IoRig(tmp_path)
    yield rig
    rig.close()


@lacked
def test_a_file_is_published_where_nothing_can_be_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(os, "fsync", refuse(number))
    publish(tmp_path / "store.json", [b"one", b"two"])
    assert (tmp_path / "store.json").read_bytes() == b"onetwo"
    assert [path.name for path in tmp_path.iterdir()] == ["store.json"]


def test_a_sync_that_fails_for_another_reason_is_an_error_that_names_call_and_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", refuse(errno.EIO))
    with pytest.raises(OSError, match=r"fsync: .*store\.json"):
        publish(tmp_path / "store.json", [b"one"])
    assert not list(tmp_path.iterdir())
    with pytest.raises(OSError, match=f"fsync: .*{tmp_path}"):
        sync_folder(tmp_path)


@pytest.mark.parametrize("call", ["open", "rename", "write"])
def test_whatever_keeps_a_file_from_being_published_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    if call == "write":
        with pytest.raises(OSError, match=r"write: .*full\.tmp"):
            (tmp_path / "full.tmp").symlink_to("/dev/full")
            monkeypatch.setattr(Path, "unlink", lambda path, missing_ok=False: None)
            real = os.open
            monkeypatch.setattr(os, "open", lambda path, flags, mode: real(path, flags & ~(os.O_EXCL), mode))
            publish(tmp_path / "full", [b"x" * 10])
        return
    monkeypatch.setattr(Path if call == "rename" else os, call, refuse(errno.EACCES))
    with pytest.raises(PermissionError, match=f"{call}: .*store"):
        publish(tmp_path / "store.json", [b"one"])


def test_the_innermost_call_is_named_and_the_class_stays(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught, naming("write", "/outer"), naming("open", tmp_path / "none"):
        os.open(tmp_path / "none", os.O_RDONLY)
    assert str(caught.value) == f"[Errno 2] open: No such file or directory: '{tmp_path}/none'"


@lacked
def test_what_a_file_system_lacks_keeps_no_job_from_its_end(
    rig: IoRig, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """fsync of files and folders, fdatasync, posix_fadvise, O_DIRECT, posix_fallocate."""
    real_open = os.open

    def without_direct(path: str, flags: int, *rest: Any, **named: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(number, os.strerror(number), path)
        return real_open(path, flags, *rest, **named)

    for call in ("fsync", "fdatasync", "posix_fadvise", "posix_fallocate"):
        monkeypatch.setattr(os, call, refuse(number))
    monkeypatch.setattr(os, "open", without_direct)
    context = Context(os.fspath(rig.directory), rig.arena)
    write = replace(rig.write(1, MIB + 5), sync=True)
    assert perform(write, context).outcome is IoOutcome.OK
    assert perform(rig.read_of(write), context).outcome is IoOutcome.OK
    assert perform(Append("journal/1.log", 0, b"first", sync=True), context).outcome is IoOutcome.OK
    assert perform(Probe(".probe"), context).outcome is IoOutcome.OK
    context.close()


def test_a_folder_whose_descriptor_cannot_be_synced_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fsync

    def only_files(fd: int) -> None:
        if S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EBADF, "as some servers say")
        real(fd)

    monkeypatch.setattr(os, "fsync", only_files)
    publish(tmp_path / "store.json", [b"one"])


# O_DIRECT


@pytest.mark.parametrize("number", [errno.EPERM, errno.EACCES, errno.ENOSYS])
def test_o_direct_that_is_not_permitted_is_given_up_and_the_file_is_used(
    rig: IoRig, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    real = os.open

    def without_direct(path: str, flags: int, *rest: Any, **named: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(number, os.strerror(number), path)
        return real(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", without_direct)
    context = Context(os.fspath(rig.directory), rig.arena)
    write = rig.write(1, MIB)
    written = perform(write, context)
    assert (written.outcome, written.direct) == (IoOutcome.OK, False)
    assert perform(rig.read_of(write), context).outcome is IoOutcome.OK
    context.close()


@pytest.mark.parametrize("call", ["open", "preadv"])
def test_a_file_that_is_refused_without_o_direct_as_well_leaves_it_on_for_others(
    rig: IoRig, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    context = Context(os.fspath(rig.directory), rig.arena)
    write = rig.write(1, MIB)
    assert perform(write, context).outcome is IoOutcome.OK
    context.close()
    with monkeypatch.context() as patch:
        patch.setattr(os, call, refuse(errno.EPERM))
        answer = perform(rig.read_of(write), context)
    assert (answer.outcome, answer.direct) == (IoOutcome.UNREADABLE, True)
    assert {"open": "open: ", "preadv": "read: "}[call] in answer.detail and os.fspath(rig.segment) in answer.detail
    again = perform(rig.read_of(write), context)
    assert (again.outcome, again.direct) == (IoOutcome.OK, True)
    context.close()


def test_every_error_of_a_job_names_call_and_file(rig: IoRig, monkeypatch: pytest.MonkeyPatch) -> None:
    context = Context(os.fspath(rig.directory), rig.arena)
    write = replace(rig.write(1, MIB), sync=True)
    append = Append("journal/1.log", 0, b"first", sync=True)
    for call, job, said in (
        ("pwritev", write, "write: "), ("fdatasync", write, "fdatasync: "), ("mkdir", append, "mkdir: "),
        ("pwrite", append, "write: "), ("fdatasync", append, "fdatasync: "),
    ):  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setattr(os, call, refuse(errno.EIO))
            answer = perform(job, context)
        assert answer.outcome is IoOutcome.IO_ERROR
        assert said in answer.detail and os.fspath(rig.directory) in answer.detail, answer.detail
    context.close()


# Locks


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM, errno.ENOLCK])
def test_a_file_system_without_locks_is_named_and_nobody_is_blamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """It is not done without: nobody could tell then which daemon and which workers write there."""
    lock = tmp_path / "daemon.lock"
    hold_for_daemon(lock, os.getpid())
    real, before = fcntl.fcntl, len(list(Path("/proc/self/fd").iterdir()))

    def lacks(fd: int, command: int, argument: Any = 0) -> Any:
        if command == fcntl.F_OFD_SETLK:
            raise OSError(number, os.strerror(number))
        return real(fd, command, argument)

    monkeypatch.setattr(fcntl, "fcntl", lacks)
    for take in (lambda: hold_for_daemon(lock, os.getpid()), lambda: enter(lock, ""), lambda: renew_token(lock, "x")):
        with pytest.raises(OSError, match=rf"fcntl \(lock\): .*'{lock}'"):
            take()
    assert len(list(Path("/proc/self/fd").iterdir())) <= before
