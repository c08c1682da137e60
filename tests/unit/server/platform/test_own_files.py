"""Files with names that anybody can guess, in directories where anybody may make files (as /dev/shm)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from kvdepot.core.errors import ConfigError, KvDepotError
from kvdepot.server.arena.arena_file import open_arena
from kvdepot.server.arena.arena_request import ArenaRequest
from kvdepot.server.config.config import Config
from kvdepot.server.config.schema import Tables
from kvdepot.server.daemon.start_checks import lock_file
from kvdepot.server.daemon.state_file import OperatorState, StateFile
from kvdepot.server.depot.types import Liveness
from kvdepot.server.platform.file_lock import FileLock
from kvdepot.server.platform.own_files import open_own, refuse_world_writable

NOBODY = 65534
STATE = (
    b'{"format": 1, "loads_off": false, "loads_off_namespaces": [], "stores_off": false, "stores_off_namespaces": []}'
)


def _file(path: Path, mode: int = 0o600) -> None:
    path.write_bytes(STATE)
    path.chmod(mode)


def _link(path: Path) -> None:
    _file(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def _another_user(path: Path) -> None:
    _file(path)
    os.chown(path, NOBODY, NOBODY)


def _read_state(path: Path) -> None:
    StateFile(path).read()


def _lock(path: Path) -> None:
    FileLock(path, "the arena").close()


def _open_arena(path: Path) -> None:
    request = ArenaRequest(path, 48 << 20, 48 << 20, "test.toml")
    open_arena(request, boot_id=bytes(16), random_bytes=os.urandom, alive=lambda _: Liveness.DEAD)


planted = pytest.mark.parametrize(
    "plant",
    [
        pytest.param(os.mkfifo, id="fifo"),
        pytest.param(_link, id="link"),
        pytest.param(lambda path: _file(path, 0o666), id="0666"),
        pytest.param(lambda path: _file(path, 0o620), id="0620"),
        pytest.param(
            _another_user,
            id="another-user",
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="giving a file away needs root"),
        ),
    ],
)


@planted
@pytest.mark.timeout(20)
@pytest.mark.parametrize("use", [_read_state, _lock, _open_arena])
def test_what_another_user_may_have_planted_is_refused_at_once(
    tmp_path: Path, plant: Callable[[Path], None], use: Callable[[Path], None]
) -> None:
    path = tmp_path / "planted"
    plant(path)
    before = path.lstat()
    with pytest.raises((KvDepotError, OSError)) as refused:
        use(path)
    assert str(path) in str(refused.value)
    assert "to which nobody else may write" in str(refused.value) or plant is _link
    assert path.lstat() == before


def test_only_this_user_may_read_or_write_a_file_that_is_made(tmp_path: Path) -> None:
    os.close(open_own(tmp_path / "made", os.O_RDWR | os.O_CREAT))
    assert (tmp_path / "made").stat().st_mode & 0o777 == 0o600


def test_a_planted_state_says_what_to_do_and_this_user_s_own_is_read(tmp_path: Path) -> None:
    _file(tmp_path / "state", 0o640)
    assert StateFile(tmp_path / "state").read() == OperatorState()
    (tmp_path / "state").chmod(0o666)
    with pytest.raises(ConfigError, match=r"no regular file of uid \d+ .*its owner and mode"):
        StateFile(tmp_path / "state").read()


@pytest.mark.timeout(20)
@pytest.mark.parametrize("plant", [os.mkfifo, lambda path: _file(path, 0o666), _link], ids=["fifo", "0666", "link"])
def test_a_state_is_never_written_into_what_lies_in_the_place_of_the_unpublished_one(
    tmp_path: Path, plant: Callable[[Path], None]
) -> None:
    file = StateFile(tmp_path / "state")
    plant(tmp_path / "state.tmp")
    assert asyncio.run(file.write(OperatorState())) == ""
    assert file.read() == OperatorState()
    assert (tmp_path / "state").lstat().st_mode & 0o777 == 0o600
    assert not (tmp_path / "elsewhere").exists() or (tmp_path / "elsewhere").read_bytes() == STATE


def test_the_default_socket_s_directory_is_not_there_yet(tmp_path: Path) -> None:
    """What `kvdepotd serve` of an installed configuration says before the directory was made."""

    config = Config("kvdepot.toml", Tables(), 1 << 30, tmp_path / "gone" / "a.arena")
    with pytest.raises(ConfigError, match=r"cannot use .*gone: No such file.*; create the directory for"):
        lock_file(config, "daemon.listen", tmp_path / "gone" / "d.sock", "the socket")
    (tmp_path / "d.sock.lock").symlink_to("elsewhere")
    with pytest.raises(ConfigError, match=r"cannot use .*d\.sock\.lock: .*delete it while no daemon runs"):
        lock_file(config, "daemon.listen", tmp_path / "d.sock", "the socket")


@pytest.mark.parametrize("mode", [0o777, 0o702, 0o2777, 0o1777])
def test_a_folder_that_every_user_may_write_to_is_refused_with_advice(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(PermissionError, match="run `chmod o-w`") as raised:
        refuse_world_writable(tmp_path, tmp_path.stat())
    assert raised.value.filename == str(tmp_path)


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o770, 0o2775])
def test_a_folder_to_which_only_some_users_may_write_is_accepted(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    refuse_world_writable(tmp_path, tmp_path.stat())
