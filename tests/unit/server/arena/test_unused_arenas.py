"""Arenas that no daemon uses are found with what they take, and removed. All others are refused."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kvdepot.core.errors import ArenaInUse, NotFound
from kvdepot.server.arena import holder, holding
from kvdepot.server.arena.arena_file import ArenaFile, open_arena
from kvdepot.server.arena.arena_request import ArenaRequest, arena_paths
from kvdepot.server.arena.holding import Connection, hold_path, listen
from kvdepot.server.arena.unused_arenas import find_arenas, look_at, remove_arena
from kvdepot.server.config import arena_directory
from kvdepot.server.daemon.app import main
from kvdepot.server.depot.types import Liveness, ProcessIdentity
from kvdepot.server.platform.file_lock import LOCK_SUFFIX, FileLock, lock_holder

from tests.rigs.patience import patient, wait_until

MIB = 1 << 20
NAME = f"kvdepot-{os.geteuid()}-0123456789ab.arena"


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A place for arenas, and nothing of this machine's in the default ones."""
    with tempfile.TemporaryDirectory(prefix="kvd", dir="/dev/shm") as name:
        (Path(name) / "base").mkdir()
        monkeypatch.setattr(arena_directory, "BASE", Path(name) / "base")
        yield Path(name)


def make(path: Path, *, sealed: bool = False) -> ArenaFile:
    with FileLock(lock_of(path), "the arena"):
        return open_arena(
            ArenaRequest(path, 48 * MIB, 48 * MIB, "test.toml", sealed),
            boot_id=bytes(16), random_bytes=os.urandom, alive=lambda _: Liveness.DEAD,
        )  # fmt: skip


def lock_of(path: Path) -> Path:
    return path.with_name(f"{path.name}{LOCK_SUFFIX}")


def attach(arena: ArenaFile, pid: int) -> None:
    """Write down a process of an engine, without a loan."""
    arena.tables.attachments["pid"][5] = pid
    arena.tables.attachments["used"][5] = 1


def all_are(liveness: Liveness) -> Any:
    def alive(_: ProcessIdentity) -> Liveness:
        return liveness

    return alive


DEAD = all_are(Liveness.DEAD)


@pytest.mark.requirement("T1")
def test_a_lock_is_asked_without_being_taken(folder: Path) -> None:
    path = folder / "a.lock"
    assert lock_holder(path) is None
    lock = FileLock(path, "it")
    for _ in range(2):
        assert lock_holder(path) == os.getpid()
    lock.close()
    assert lock_holder(path) is None
    FileLock(path, "it").close()


@pytest.mark.requirement("T1")
def test_arenas_are_found_in_the_default_places_and_in_given_ones(folder: Path) -> None:
    assert list(find_arenas([folder, folder / "none"], DEAD)) == []
    own = arena_directory.BASE / f"kvdepot-{os.geteuid()}"
    own.mkdir(mode=0o700)
    paths = [own / NAME, arena_directory.BASE / NAME, folder / NAME]
    for path in paths:
        make(path)
    (folder / "notes.arena").write_text("no arena")
    found = list(find_arenas([folder, own], DEAD))
    assert [one.path for one in found] == [str(path) for path in paths]
    assert all(one.unused and one.memory_bytes > MIB // 4 for one in found)


@pytest.mark.requirement("T1")
def test_what_is_removed_is_gone_but_for_its_lock(folder: Path) -> None:
    path = folder / NAME
    make(path)
    found = remove_arena(path, DEAD)
    assert found.memory_bytes > MIB // 4
    assert list(folder.glob("*.arena*")) == [lock_of(path)]
    with pytest.raises(NotFound, match="no arena"):
        remove_arena(path, DEAD)
    assert make(path).origin.value == "created"


@pytest.mark.requirement("I3", "T1")
def test_the_arena_of_a_daemon_is_not_removed(folder: Path) -> None:
    path = folder / NAME
    make(path)
    with FileLock(lock_of(path), "it"):
        assert look_at(path, DEAD).daemon_pid == os.getpid()
        assert not look_at(path, DEAD).unused
        with pytest.raises(ArenaInUse, match=f"the daemon with pid {os.getpid()}"):
            remove_arena(path, DEAD)
    assert all(one.exists() for one in arena_paths(path))


@pytest.mark.requirement("I3", "T1")
@pytest.mark.parametrize(
    ("liveness", "pid", "named"), [(Liveness.ALIVE, 4711, "4711"), (Liveness.UNKNOWN, 0, "unknown")]
)
def test_the_arena_of_engines_that_may_live_is_not_removed(
    folder: Path, liveness: Liveness, pid: int, named: str
) -> None:
    path = folder / NAME
    attach(make(path), pid)
    assert look_at(path, all_are(liveness)).engine_pids == (pid,)
    with pytest.raises(ArenaInUse, match=f"pid {named}"):
        remove_arena(path, all_are(liveness))
    assert all(one.exists() for one in arena_paths(path))
    remove_arena(path, DEAD)
    assert not path.exists()


@pytest.mark.requirement("T1")
def test_a_file_that_is_no_arena_can_be_removed_and_another_name_cannot(folder: Path) -> None:
    path = folder / NAME
    path.write_bytes(b"torn")
    assert remove_arena(path, DEAD).engine_pids == ()
    other = folder / "kvdepot.toml"
    other.write_text("mine")
    with pytest.raises(NotFound, match="not the name of an arena"):
        remove_arena(other, DEAD)
    assert other.exists()


@pytest.mark.requirement("T1")
def test_a_link_and_another_user_s_file_are_not_followed(folder: Path) -> None:
    mine = folder / "mine"
    mine.write_text("mine")
    (folder / NAME).symlink_to(mine)
    assert list(find_arenas([folder], DEAD)) == []
    with pytest.raises(NotFound):
        remove_arena(folder / NAME, DEAD)
    assert mine.exists()


@pytest.mark.requirement("T1")
def test_a_holder_s_memory_counts_and_goes_with_the_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holding, "_ANSWER_SECONDS", patient(20))
    path = folder / NAME
    arena = make(path, sealed=True)
    arena.data[: 2 * MIB] = bytes(range(256)) * (2 * MIB // 256)
    listener, lock = listen(path)
    listener.listen()
    program = [sys.executable, "-I", "-S", holder.__file__, str(listener.fileno()), str(hold_path(path)), "stay"]
    with subprocess.Popen(program, pass_fds=(listener.fileno(), lock.descriptor)) as process:
        try:
            listener.close()
            lock.close()
            connection = Connection(path)
            connection.hold(arena)
            connection.close()
            found = look_at(path, DEAD)
            assert (found.holder_pid, found.unused) == (process.pid, True)
            assert found.memory_bytes > 2 * MIB
            assert memory_of(process.pid)
            remove_arena(path, DEAD)
            wait_until(lambda: not memory_of(process.pid), "the holder has let go", 20)
        finally:
            process.kill()


def memory_of(pid: int) -> list[str]:
    """Return what a process has of memory without a name. A connection to the holder would keep it busy."""
    links = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            links.append(str(descriptor.readlink()))
    return [link for link in links if "memfd:" in link]


@pytest.mark.requirement("T1")
def test_the_verb_lists_and_removes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    free, busy = folder / NAME, folder / NAME.replace("0123", "4567")
    make(free)
    make(busy)
    where = ["--arena-dir", str(folder)]
    with FileLock(lock_of(busy), "it"):
        assert main(["arena", "list", "--json", *where]) == 0
        rows = json.loads(capsys.readouterr().out)
        assert [(one["path"], one["unused"]) for one in rows] == [(str(free), True), (str(busy), False)]
        assert main(["arena", "list", *where]) == 0
        text = capsys.readouterr().out
        assert f"daemon {os.getpid()}" in text and "1 unused" in text and "remove --unused" in text
        assert main(["arena", "remove", str(busy), *where]) == 1
        assert "is held by the daemon" in capsys.readouterr().err
        assert main(["arena", "remove", "--unused", *where]) == 0
        assert f"removed {free}" in capsys.readouterr().out
    assert (free.exists(), busy.exists()) == (False, True)
    assert main(["arena", "remove", *where]) == 2
    assert busy.exists(), "nothing was named"
    assert main(["arena", "remove", str(busy)]) == 0
    capsys.readouterr()
    assert main(["arena", "list", *where]) == 0
    assert capsys.readouterr().out == "this user has no arena\n"
