"""The daemon's end of a connection to a holder, also to one of an earlier release."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kvdepot.server.arena import holder, holding
from kvdepot.server.arena.holding import Connection, Holding, held_files

from tests.fakes.thread_room import no_room_for_threads
from tests.rigs.patience import patient, until


@contextmanager
def _holder(
    arena: Path, greeting: bytes, files: list[int], *, late_s: float = 0.0
) -> Iterator[list[tuple[bytes, int]]]:
    """Greet a connection at the holder's place. Yield what is said there, with the number of files."""
    heard: list[tuple[bytes, int]] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(os.fspath(arena.with_name(f"{arena.name}.hold")))
        listener.listen()

        def serve() -> None:
            peer, _ = listener.accept()
            with peer:
                threading.Event().wait(late_s)
                socket.send_fds(peer, [greeting], files)
                message, given, _, _ = socket.recv_fds(peer, 16, holder.FILES_MAX)
                heard.append((message, len(given)))
                for fd in given:
                    os.close(fd)
                if message == holder.HOLD:
                    peer.send(holder.HOLD)

        serving = threading.Thread(target=serve)
        serving.start()
        yield heard
        serving.join(patient(20))


@pytest.fixture
def files() -> Iterator[list[int]]:
    made = [os.memfd_create(name) for name in ("tables", "generations", "data", "data")]
    yield made
    for fd in made:
        os.close(fd)


@pytest.mark.requirement("T6")
def test_any_number_of_files_is_held_and_the_tables_count_by_their_name_alone(tmp_path: Path, files: list[int]) -> None:
    arena: Any = SimpleNamespace(files=tuple(files))
    with _holder(tmp_path / "a", holder.GREETING, files) as heard:
        connection = Connection(tmp_path / "a")
        assert not connection.former
        assert [os.path.sameopenfile(*pair) for pair in zip(connection.held, files[1:], strict=True)] == [True] * 3
        connection.hold(arena)
        connection.close()
    for fd in connection.held:
        os.close(fd)
    assert heard == [(holder.HOLD, 4)]


@pytest.mark.requirement("T6", "I8")
def test_a_holder_of_an_earlier_release_gives_what_it_has_and_gets_nothing(tmp_path: Path, files: list[int]) -> None:
    """It would take the first two of the files, and say that it holds the arena."""
    arena: Any = SimpleNamespace(files=tuple(files))
    with _holder(tmp_path / "a", b"kvdepot holder 1", [files[0], files[2]]) as heard:
        connection = Connection(tmp_path / "a")
        assert connection.former
        assert [os.path.sameopenfile(*pair) for pair in zip(connection.held, [files[2]], strict=True)] == [True]
        with pytest.raises(OSError, match="is of an earlier release: restart it"):
            connection.hold(arena)
        connection.close()
    os.close(connection.held[0])
    assert heard == [(b"", 0)]


@pytest.mark.requirement("I8")
def test_what_says_something_else_is_no_holder(tmp_path: Path, files: list[int]) -> None:
    with _holder(tmp_path / "a", b"kvdepot holder 3", files):
        assert not held_files(tmp_path / "a").others


@pytest.mark.requirement("I8", "T6")
def test_a_start_waits_for_a_holder_that_gets_little_processor_time(tmp_path: Path, files: list[int]) -> None:
    with _holder(tmp_path / "a", holder.GREETING, files, late_s=4.0):
        held = held_files(tmp_path / "a").others
    assert len(held) == 3
    for fd in held:
        os.close(fd)


_LATE = """
import os, select, sys
select.select([int(sys.argv[1])], [], [])
os.execv(sys.executable, [sys.executable, "-I", "-S", *sys.argv[2:]])
"""
"""A holder that begins when something may be read from a descriptor: as slowly as the machine lets it."""


@pytest.mark.requirement("I8", "T6")
def test_a_holder_that_starts_late_has_the_arena_of_a_daemon_that_is_gone(
    tmp_path: Path, files: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    may_start, start = os.pipe()
    os.set_inheritable(may_start, True)
    monkeypatch.setattr(holding, "_PROGRAM", (sys.executable, "-c", _LATE, str(may_start), holder.__file__))
    monkeypatch.setattr(holding, "_LATE_SECONDS", 0.1)
    monkeypatch.setattr(holding, "_ANSWER_SECONDS", 0.1)
    popen = subprocess.Popen

    def inherits(*arguments: Any, pass_fds: tuple[int, ...], **options: Any) -> Any:
        return popen(*arguments, pass_fds=(*pass_fds, may_start), **options)

    monkeypatch.setattr(subprocess, "Popen", inherits)
    tables = tmp_path / "a"
    tables.touch()
    arena: Any = SimpleNamespace(path=tables, files=tuple(files))
    loop, counted = asyncio.new_event_loop(), list[str]()
    daemon = Holding(arena, may_start=True, count=counted.append, loop=loop, log=logging.getLogger("test"))
    daemon.start()
    daemon.close()
    loop.close()
    assert counted == ["holder_failures"]  # nobody has answered, and nobody has taken the arena
    monkeypatch.undo()
    os.write(start, b"now")
    held = held_files(tables).others
    assert [os.path.sameopenfile(*pair) for pair in zip(held, files[1:], strict=True)] == [True] * 3
    for fd in (*held, may_start, start):
        os.close(fd)


def test_a_holder_is_looked_for_again_after_the_host_had_no_room_for_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holding, "AGAIN_SECONDS", 0.01)
    tried: list[int] = []

    def fail(_: Holding) -> Exception:
        tried.append(threading.get_ident())
        return ConnectionRefusedError()

    monkeypatch.setattr(Holding, "_try", fail)

    async def test() -> None:
        counted: list[str] = []
        arena: Any = SimpleNamespace(path=tmp_path / "a.arena")
        one = Holding(
            arena, may_start=True, count=counted.append, loop=asyncio.get_running_loop(), log=logging.getLogger("held")
        )
        with no_room_for_threads(monkeypatch):
            one._look_again()
            await until(lambda: counted, "the failure is counted")
        await until(lambda: tried, "it is tried again")
        one.close()

    asyncio.run(test())
