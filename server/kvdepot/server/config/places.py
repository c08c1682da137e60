"""The places of files and directories of a configuration: no two may be one, whatever path leads to them.

Links and mounts are resolved. A mount whose server may hang is never accessed, because a start must not wait for it;
paths below such a mount are compared by their path within it.
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
from kvdepot.server.config.memory_room import read_mounts
from kvdepot.server.config.schema import (
    DATA_SUFFIX,
    GENERATIONS_SUFFIX,
    HOLD_SUFFIX,
    STREAM_SUFFIX,
    Tables,
)
from kvdepot.server.platform.addresses import ATTACH_SUFFIX
from kvdepot.server.platform.durable_files import TEMPORARY
from kvdepot.server.platform.file_lock import LOCK_SUFFIX

_LINKS_MAX: Final = 40
"""As many as the kernel follows (path_resolution(7))."""
_OWN_DIRECTORY: Final = "name another directory: a tier needs a directory of its own"


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
        """Return whether the place is in the other's directory, also through a mount.

        Without the mount, the files would be created in that directory.
        """
        return is_below(self.path, other.path) or (
            self.device == other.device and is_below(self.on_device, other.on_device)
        )


def check_places(file: str, tables: Tables, arena_path: Path, state_path: Path) -> None:
    """Raise ConfigError for places that overlap or collide."""
    mounts = read_mounts()
    tiers: list[_Place] = []
    for tier in (tier for tier in tables.tier if tier.path):
        key = f"tier.{tier.name}.path"
        place = _place(key, f"tier {tier.name!r}", tier.path, mounts)
        for other in tiers:
            if place.lies_in(other) or other.lies_in(place):
                raise _refusal(file, key, f"{place.shown} and {other.shown} of {other.what} overlap")
        tiers.append(place)
    files = [_place(key, what, str(path), mounts) for key, what, path in _files(tables, arena_path, state_path)]
    for directory in tiers:
        _check_own(file, directory, files)
    _check_files(file, files)


def _refusal(file: str, key: str, reason: str, *, advice: str | None = None) -> ConfigError:
    """Return an error that another mount, or another link, may end."""
    return ConfigError(file, key, reason, advice=advice, of_host=True)


def _check_own(file: str, tier: _Place, files: Sequence[_Place]) -> None:
    arena, *others = files
    if arena.lies_in(tier):
        folder = os.path.dirname(arena.shown)  # noqa: PTH120 - a text
        raise _refusal(file, tier.key, f"{tier.shown} contains the arena, [ram].path: {folder}", advice=_OWN_DIRECTORY)
    for other in others:
        if other.lies_in(tier):
            raise _refusal(
                file, other.key, f"{other.shown} lies in the directory of {tier.what}", advice=_OWN_DIRECTORY
            )


def _check_files(file: str, files: Sequence[_Place]) -> None:
    """Raise ConfigError for two files that are one: a lock is held once, and a socket's old file is deleted."""
    seen: dict[object, _Place] = {}
    for one in files:
        for name in (identity for identity in (_inode(one), one.identity) if identity):
            other = seen.setdefault(name, one)
            if other is not one:
                raise _refusal(file, one.key, f"{one.shown}, {one.what}, is also {other.what}, {other.shown}")
    for one in files:
        for socket in (other for other in files if other.what == _SOCKET and other is not one):
            if one.device == socket.device and one.path.startswith(f"{socket.path}{STREAM_SUFFIX}"):
                raise _refusal(
                    file, one.key, f"{one.shown} has a name that is reserved for the streams of {socket.shown}"
                )


_SOCKET: Final = "the socket"


def _files(tables: Tables, arena_path: Path, state_path: Path) -> Iterator[tuple[str, str, Path]]:
    """Yield (key, what it is, path) of each file that the daemon creates, the arena first."""

    def beside(path: Path, suffix: str) -> Path:
        return path.with_name(f"{path.name}{suffix}")

    yield "ram.path", "the arena", arena_path
    yield "ram.path", "the arena's data", beside(arena_path, DATA_SUFFIX)
    yield "ram.path", "the arena's generations", beside(arena_path, GENERATIONS_SUFFIX)
    yield "ram.path", "the socket of the arena's holder", beside(arena_path, HOLD_SUFFIX)
    yield "ram.path", "the lock of the arena's holder", beside(arena_path, f"{HOLD_SUFFIX}{LOCK_SUFFIX}")
    yield "ram.path", "the arena's lock", beside(arena_path, LOCK_SUFFIX)
    yield "daemon.state", "the state file", state_path
    yield "daemon.state", "the state file before it is published", beside(state_path, TEMPORARY)
    if tables.daemon.state:
        yield "daemon.state", "the state file's lock", beside(state_path, LOCK_SUFFIX)
    if tables.audit.path:
        yield "audit.path", "the audit log", Path(tables.audit.path)
    for path in tables.daemon.sockets:
        yield "daemon.listen", _SOCKET, path
        yield "daemon.listen", "the socket's lock", beside(path, LOCK_SUFFIX)
        yield "daemon.listen", "the attachment socket", beside(path, ATTACH_SUFFIX)
    for path in tables.daemon.admin_sockets:
        yield "daemon.admin", "the operators' socket", path
        if tables.daemon.admin:
            yield "daemon.admin", "the lock of the operators' socket", beside(path, LOCK_SUFFIX)
    yield "daemon.listen", "the socket behind the operators'", tables.daemon.rpc_socket


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
    """Return an absolute path without links, as os.path.realpath does, without access to mounts that may hang."""
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
    """Return the target of a link; empty if it is none."""
    try:
        return os.readlink(path)  # noqa: PTH115 - a text
    except OSError:
        return ""


def _inode(place: _Place) -> tuple[int, int] | None:
    """Return device and inode of a file with several names (hard links); None for any other."""
    try:
        found = os.lstat(place.shown)
    except OSError:
        return None
    return (found.st_dev, found.st_ino) if stat.S_ISREG(found.st_mode) and found.st_nlink > 1 else None
