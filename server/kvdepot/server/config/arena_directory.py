"""The default directory of the arena: /dev/shm/kvdepot-UID, which only this user may write to.

Every user may create names in /dev/shm. Another user who takes that name first does not prevent a start: the directory
then has a random suffix, and the next daemon finds it by its owner, which no other user can forge. A note of the name
in a file was rejected, because the default configuration has no other place that lives as long as the arena.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Final

from kvdepot.core import runtime
from kvdepot.core.errors import ConfigError
from kvdepot.server.platform.file_lock import LOCK_SUFFIX, FileLock

BASE: Final = Path("/dev/shm")  # noqa: S108 - the arena is memory


def choose(arena: str) -> Path:
    """Return the directory that has files of this arena, or any of this user, or the name of a new one.

    `arena` is the name of the arena's file. Nothing is created.
    """
    own = None
    for folder in own_directories():
        if (folder / f"{arena}{LOCK_SUFFIX}").exists():
            return folder
        own = own or folder
    return own or (_suffixed() if os.path.lexists(_usual()) else _usual())


def make(arena: str, config_file: str) -> Path:
    """Return the directory of `choose`, and create it if it is new. Raise ConfigError."""
    for folder in (choose(arena), _suffixed()):  # the second one if another user was faster
        try:
            with suppress(FileExistsError):
                folder.mkdir(mode=0o700)
        except OSError as error:
            reason = f"cannot create {folder}: {error.strerror}"
            raise ConfigError(
                config_file, "ram.path", reason, advice="name a directory of the daemon's user", of_host=True
            ) from error
        if _is_own(folder):
            return folder
    raise ConfigError(config_file, "ram.path", f"no directory in {BASE} stays this user's own", of_host=True)


def former(arena_path: Path) -> Path | None:
    """Return the arena that an earlier version left directly in /dev/shm; None if there is none."""
    return next((path for path in _former(arena_path) if path.name == arena_path.name), None)


def move_former(arena_path: Path) -> Iterator[str]:
    """Move files of an earlier version next to the arena, with what engines map. Yield what happened to each.

    The caller holds the arena's lock. Raise ArenaInUse if a daemon of that version runs, and OSError.
    """
    files = list(_former(arena_path))
    lock = BASE / f"{arena_path.name}{LOCK_SUFFIX}"
    with FileLock(lock, f"the arena {BASE / arena_path.name}") if lock in files else nullcontext():
        for path in files:
            new = arena_path.with_name(path.name)
            if path == lock:
                path.unlink()
            elif new.exists():
                yield f"{path} of an earlier version is not used any more: delete it"
            else:
                path.rename(new)
                yield f"moved from an earlier version's place: {path} to {new.parent}"


def _former(arena_path: Path) -> Iterator[Path]:
    """Yield this user's files of the arena in the place of earlier versions."""
    for name in sorted(os.listdir(BASE)):  # noqa: PTH208 - names
        if name.startswith(arena_path.name):
            with suppress(FileNotFoundError):
                status = (BASE / name).lstat()
                if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
                    yield BASE / name


def _usual() -> Path:
    return BASE / f"kvdepot-{os.geteuid()}"


def _suffixed() -> Path:
    return BASE / f"{_usual().name}-{secrets.token_hex(8)}"


def own_directories() -> Iterator[Path]:
    """Yield the directories for arenas of this user, the usual one first."""
    if _is_own(_usual()):
        yield _usual()
    for name in sorted(os.listdir(BASE)):  # noqa: PTH208 - names
        if name.startswith(f"{_usual().name}-") and _is_own(BASE / name):
            yield BASE / name


def _is_own(folder: Path) -> bool:
    """Return whether it is a directory, and no link, that only this user may write to."""
    try:
        status = folder.lstat()
    except FileNotFoundError:
        return False
    return runtime.only_writer(os.geteuid(), status.st_mode, status.st_uid)
