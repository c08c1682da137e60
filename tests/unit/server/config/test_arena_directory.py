"""Where the arena lies by default: a directory that only this user may write to, whoever took its usual name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from kvdepot.core.errors import ArenaInUse, ConfigError
from kvdepot.server.config import arena_directory
from kvdepot.server.config.arena_directory import choose, former, make, move_former
from kvdepot.server.platform.file_lock import FileLock

USUAL = f"kvdepot-{os.geteuid()}"
ARENA = f"{USUAL}-0123456789ab.arena"
NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="giving a file away needs root")


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(arena_directory, "BASE", tmp_path)
    return tmp_path


def test_it_is_chosen_without_being_created(base: Path) -> None:
    assert choose(ARENA) == base / USUAL
    assert list(base.iterdir()) == []


def test_it_is_created_for_this_user_alone_and_used_again(base: Path) -> None:
    assert make(ARENA, "file") == make(ARENA, "file") == choose(ARENA) == base / USUAL
    assert (base / USUAL).stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("kind", ["file", "link", "0777", "0770", "another user's"])
def test_a_taken_name_is_not_used_and_the_next_daemon_finds_the_same_directory(base: Path, kind: str) -> None:
    usual = base / USUAL
    if kind == "file":
        usual.touch()
    elif kind == "link":
        (base / "elsewhere").mkdir()
        usual.symlink_to("elsewhere")
    else:
        usual.mkdir()
        if kind == "another user's":
            if os.geteuid():
                pytest.skip("giving a directory away needs root")
            os.chown(usual, NOBODY, NOBODY)
        else:
            usual.chmod(int(kind, 8))
    folder = make(ARENA, "file")
    assert folder.name.startswith(f"{USUAL}-") and folder.stat().st_mode & 0o777 == 0o700
    assert make(ARENA, "file") == choose(ARENA) == folder


def test_of_several_directories_the_one_with_the_arena_is_used(base: Path) -> None:
    for name in (USUAL, f"{USUAL}-aa", f"{USUAL}-bb"):
        (base / name).mkdir(mode=0o700)
    assert make(ARENA, "file") == base / USUAL
    (base / f"{USUAL}-bb" / f"{ARENA}.lock").touch()
    assert make(ARENA, "file") == base / f"{USUAL}-bb"


def test_a_name_that_is_taken_between_choice_and_creation_is_not_used(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def choose_too_early(arena: str) -> Path:
        (base / USUAL).symlink_to("elsewhere")
        return base / USUAL

    monkeypatch.setattr(arena_directory, "choose", choose_too_early)
    assert make(ARENA, "file").name.startswith(f"{USUAL}-")


def test_a_directory_that_cannot_be_created_is_said(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_directory, "choose", lambda _: base / "gone" / USUAL)
    with pytest.raises(ConfigError, match=r"ram\.path: cannot create .*gone.*: No such file"):
        make(ARENA, "kvdepot.toml")


def test_files_of_an_earlier_version_are_moved_but_for_its_lock(base: Path) -> None:
    for suffix in ("", ".data", ".state", ".lock"):
        (base / f"{ARENA}{suffix}").write_text(suffix)
    (base / f"{USUAL}-other.arena").touch()
    path = make(ARENA, "file") / ARENA
    assert former(path) == base / ARENA
    assert len(list(move_former(path))) == 3
    assert {one.name: one.read_text() for one in path.parent.iterdir()} == {
        f"{ARENA}{suffix}": suffix for suffix in ("", ".data", ".state")
    }
    assert {one.name for one in base.iterdir()} == {USUAL, f"{USUAL}-other.arena"}
    assert former(path) is None and list(move_former(path)) == []


def test_a_file_of_an_earlier_version_replaces_none_and_is_named(base: Path) -> None:
    path = make(ARENA, "file") / ARENA
    path.write_text("new")
    (base / ARENA).write_text("old")
    (event,) = move_former(path)
    assert str(base / ARENA) in event and "delete it" in event
    assert (path.read_text(), (base / ARENA).read_text()) == ("new", "old")


def test_nothing_is_moved_from_a_running_daemon_of_an_earlier_version(base: Path) -> None:
    path = make(ARENA, "file") / ARENA
    (base / ARENA).touch()
    with FileLock(base / f"{ARENA}.lock", "the arena"), pytest.raises(ArenaInUse, match=str(os.getpid())):
        list(move_former(path))
    assert (base / ARENA).exists()


@needs_root
def test_files_of_other_users_and_links_are_left_alone(base: Path) -> None:
    path = make(ARENA, "file") / ARENA
    (base / ARENA).touch()
    os.chown(base / ARENA, NOBODY, NOBODY)
    (base / f"{ARENA}.lock").mkdir()
    (base / f"{ARENA}.state").symlink_to("elsewhere")
    assert former(path) is None and list(move_former(path)) == []
    assert len(list(base.iterdir())) == 4
