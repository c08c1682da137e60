"""Where the files and directories of a configuration lie: none is two things at once, whatever path leads to it.

Links are followed and mounts are looked through. A mount whose server may hang is asked nothing: a start must not wait
for one. What lies below such a mount is compared by its path in it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvdepot.core.errors import ConfigError
from kvdepot.core.proc_text import Mount, is_below, mount_of, place_on_device
from kvdepot.server.config_schema import ATTACH_SUFFIX, STREAM_SUFFIX, Tables
from kvdepot.server.durable_files import TEMPORARY
from kvdepot.server.file_lock import LOCK_SUFFIX
from kvdepot.server.memory_room import read_mounts

_LINKS_MAX: Final = 40
"""As many as the kernel follows (path_resolution(7))."""
_OWN_DIRECTORY: Final = "name another directory: a tier has its own to itself"


@dataclass(frozen=True, slots=True)
class _Place:
    """`shown`: the path as it is configured; `path`: without links. `identity` is the same for every way to it."""

    key: str
    what: str
    shown: str
    path: str
    device: str
    on_device: str

    @property
    def identity(self) -> tuple[str, str]:
        return self.device, self.on_device

    def lies_in(self, other: _Place) -> bool:
        """A mount in the other's directory counts as well: where it is missing, files are made in that directory."""
        return is_below(self.path, other.path) or (
            self.device == other.device and is_below(self.on_device, other.on_device)
        )


def check_places(file: str, tables: Tables, arena_path: Path, state_path: Path) -> None:
    """Raises ConfigError."""
    mounts = read_mounts()
    tiers: list[_Place] = []
    for tier in tables.tier:
        key = f"tier.{tier.name}.path"
        place = _place(key, f"tier {tier.name!r}", tier.path, mounts)
        for other in tiers:
            if place.lies_in(other) or other.lies_in(place):
                raise ConfigError(file, key, f"{place.shown} and {other.shown} of {other.what} overlap")
        tiers.append(place)
    files = [_place(key, what, str(path), mounts) for key, what, path in _files(tables, arena_path, state_path)]
    for directory in tiers:
        _check_own(file, directory, files)
    _check_files(file, files)


def _check_own(file: str, tier: _Place, files: Sequence[_Place]) -> None:
    arena, *others = files
    if arena.lies_in(tier):
        folder = os.path.dirname(arena.shown)  # noqa: PTH120 - a text
        raise ConfigError(
            file, tier.key, f"{tier.shown} is the directory of the arena, [ram].path, or above it: {folder}"
        )
    for other in others:
        if other.lies_in(tier):
            raise ConfigError(
                file, other.key, f"{other.shown} lies in the directory of {tier.what}", advice=_OWN_DIRECTORY
            )


def _check_files(file: str, files: Sequence[_Place]) -> None:
    """Two that are one would undo each other: a lock is held once, a socket's old file is removed."""
    seen: dict[object, _Place] = {}
    for one in files:
        for name in (identity for identity in (_inode(one), one.identity) if identity):
            other = seen.setdefault(name, one)
            if other is not one:
                raise ConfigError(file, one.key, f"{one.shown}, {one.what}, is also {other.what}, {other.shown}")
    for one in files:
        for socket in (other for other in files if other.what == _SOCKET and other is not one):
            if one.device == socket.device and one.path.startswith(f"{socket.path}{STREAM_SUFFIX}"):
                raise ConfigError(
                    file, one.key, f"{one.shown} has a name that the streams of {socket.shown} take for theirs"
                )


_SOCKET: Final = "the socket"


def _files(tables: Tables, arena_path: Path, state_path: Path) -> Iterator[tuple[str, str, Path]]:
    """(key, what it is, path) of each that the daemon makes; the arena first."""

    def beside(path: Path, suffix: str) -> Path:
        return path.with_name(f"{path.name}{suffix}")

    yield "ram.path", "the arena", arena_path
    yield "ram.path", "the arena's lock", beside(arena_path, LOCK_SUFFIX)
    yield "daemon.state", "the state file", state_path
    yield "daemon.state", "the state file before it is published", beside(state_path, TEMPORARY)
    if tables.daemon.state:
        yield "daemon.state", "the state file's lock", beside(state_path, LOCK_SUFFIX)
    for path in tables.daemon.sockets:
        yield "daemon.listen", _SOCKET, path
        yield "daemon.listen", "the socket's lock", beside(path, LOCK_SUFFIX)
        yield "daemon.listen", "the attachment socket", beside(path, ATTACH_SUFFIX)


def _place(key: str, what: str, path: str, mounts: Sequence[Mount]) -> _Place:
    shown = os.path.normpath(path)
    found = resolved(path, mounts)
    mount = mount_of(found, mounts)
    if mount is None:
        return _Place(key, what, shown, found, "", found)
    # Two exports of one file system have one device; which of its directories each has at its root only NFS knows.
    device = mount.device if mount.place_is_told else f"{mount.device} {mount.number}"
    return _Place(key, what, shown, found, device, place_on_device(found, mount))


def resolved(path: str, mounts: Sequence[Mount]) -> str:
    """As os.path.realpath, of an absolute path; what may hang is not asked whether it is a link."""
    done, rest, links = "/", path.split("/")[::-1], 0
    while rest:
        part = rest.pop()
        if part in ("", "."):
            continue
        if part == "..":
            done = os.path.dirname(done)  # noqa: PTH120 - a text
            continue
        here = f"{done.rstrip('/')}/{part}"
        mount = mount_of(here, mounts)
        target = "" if mount is not None and mount.may_hang else _target(here)
        links += bool(target)
        if not target or links > _LINKS_MAX:
            done = here
            continue
        done = "/" if target.startswith("/") else done
        rest += target.split("/")[::-1]
    return done


def _target(path: str) -> str:
    """Empty where it is no link, or not there."""
    try:
        return os.readlink(path)  # noqa: PTH115 - a text
    except OSError:
        return ""


def _inode(place: _Place) -> tuple[int, int] | None:
    """Of a file with several names (hard links), all of which it may be found by."""
    try:
        found = os.lstat(place.shown)
    except OSError:
        return None
    return (found.st_dev, found.st_ino) if stat.S_ISREG(found.st_mode) and found.st_nlink > 1 else None
