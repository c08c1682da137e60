"""What this host has to allow for a start: `check-config` and `kvdepotd serve` judge it by the same functions.

Nothing is made or changed here. What passes by itself is not judged: another daemon that runs, a port that is in use,
extents that are lent (docs/adr/0053).
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

from kvdepot.core.errors import ConfigError, KvDepotError
from kvdepot.server import tracing
from kvdepot.server.arena_file import ArenaRequest, check_arena
from kvdepot.server.config import Config
from kvdepot.server.config_schema import ATTACH_SUFFIX, host_and_port, url_address
from kvdepot.server.file_lock import LOCK_SUFFIX, FileLock
from kvdepot.server.own_files import open_own
from kvdepot.server.state_file import StateFile

_NO_DIRECTORY: Final = (
    "make the directory and give it to the daemon's user (docs/install.md), or leave the configuration file out"
)
_NO_LOCK: Final = (
    "run the daemon as the user to whom this file and its directory belong (docs/install.md); a file that another user "
    "has left there can be removed while no daemon runs"
)

_ABSENT: Final = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def check_host(config: Config) -> None:
    """Raises ConfigError for what a start would be refused for. The arena is `check_arena_of`'s."""
    for check in _checks(config):
        check()


def host_problems(config: Config, boot_id: bytes) -> Iterator[KvDepotError]:
    """Everything that `check_host` and `check_arena_of` would raise."""
    checks: list[Callable[[], object]] = [*_checks(config), partial(check_arena_of, config, boot_id)]
    for check in checks:
        try:
            check()
        except KvDepotError as error:
            yield error


def _checks(config: Config) -> Iterator[Callable[[], object]]:
    for key, path, what in locked_files(config):
        yield partial(lock_file, config, key, path, what, take=False)
    for path in config.tables.daemon.sockets:
        for one in (path, path.with_name(f"{path.name}{ATTACH_SUFFIX}")):
            yield partial(_check_socket, config, one)
    yield partial(_check_group, config)
    yield StateFile(config.state_path).read
    if config.tables.daemon.metrics:
        yield partial(_check_metrics, config)
    if config.tables.trace.endpoint:
        yield partial(tracing.require, config.file)


def arena_request(config: Config) -> ArenaRequest:
    return ArenaRequest(config.arena_path, config.arena_bytes, config.capacity_bytes, config.file)


def check_arena_of(config: Config, boot_id: bytes) -> None:
    """Whether there is room for the arena, or one of its size. Raises ConfigError."""
    check_arena(arena_request(config), boot_id)


def locked_files(config: Config) -> Iterator[tuple[str, Path, str]]:
    """(key, path, what it is) of each file that one daemon has to itself."""
    yield "ram.path", config.arena_path, "the arena"
    for path in config.tables.daemon.sockets:
        yield "daemon.listen", path, "the socket"
    # One beside the arena is behind the arena's lock. Where nothing can be written `Control.restore` says so.
    if config.tables.daemon.state and StateFile(config.state_path).writable:
        yield "daemon.state", config.state_path, "the state file"


def lock_file(config: Config, key: str, path: Path, what: str, *, take: bool = True) -> FileLock | None:
    """Only its holder may use the arena, or unlink the socket file. Raises ConfigError where there can be none.

    `take` False: only look whether it could be had. Raises ArenaInUse, if it is to be taken, while another has it.
    """
    lock = path.with_name(f"{path.name}{LOCK_SUFFIX}")
    try:
        if take:
            return FileLock(lock, f"{what} {path}")
        _look_at_lock(lock)
    except FileNotFoundError as error:
        reason = f"cannot use {path.parent}: {error.strerror}"
        raise ConfigError(config.file, key, reason, advice=_NO_DIRECTORY) from error
    except OSError as error:
        raise ConfigError(config.file, key, f"cannot use {lock}: {error.strerror}", advice=_NO_LOCK) from error
    return None


def _look_at_lock(lock: Path) -> None:
    """Raises OSError where none could be made, or the one that is there could not be opened."""
    try:
        os.close(open_own(lock, os.O_RDWR))
    except FileNotFoundError:
        if not stat.S_ISDIR(lock.parent.stat().st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from None
        if _forbids_files(lock.parent):
            raise PermissionError(errno.EACCES, f"{lock.parent} cannot be written to") from None


def _forbids_files(folder: Path) -> bool:
    """Whether no file can be made there. A process whose effective ids are others finds out at its start.

    Not by `effective_ids`: faccessat2(2) is refused by seccomp filters that do not know it (Docker before 20.10.6,
    systemd before 247), and os.access takes every error for a missing permission.
    """
    own = (os.getuid(), os.getgid()) == (os.geteuid(), os.getegid())
    return own and not os.access(folder, os.W_OK | os.X_OK)


def _check_socket(config: Config, path: Path) -> None:
    """What lies there is removed at a start, if it is a socket: anything else is somebody's."""
    try:
        found = path.lstat()
        folder = path.parent.stat()
    except OSError:  # not there; the lock beside it has said the rest
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise ConfigError(config.file, "daemon.listen", f"{path} is there and is no socket", advice="move it away")
    user = os.geteuid()
    if folder.st_mode & stat.S_ISVTX and user not in (0, found.st_uid, folder.st_uid):
        denied = PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        reason = f"{path} is a socket of uid {found.st_uid}, which uid {user} cannot remove"
        raise ConfigError(config.file, "daemon.listen", reason, advice="remove it") from denied


def _check_group(config: Config) -> None:
    name, group = config.tables.daemon.group, config.tables.daemon.group_id
    if name and group == -1:
        raise ConfigError(config.file, "daemon.group", f"there is no group {name!r}")
    if os.geteuid() and group not in (-1, os.getegid(), *os.getgroups()):
        denied = PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        reason = f"uid {os.geteuid()} is no member of it, so it cannot give its sockets to it"
        advice = "add the daemon's user to the group (SupplementaryGroups= in the unit)"
        raise ConfigError(config.file, "daemon.group", reason, advice=advice) from denied


def _check_metrics(config: Config) -> None:
    """An address that is in use may be this daemon's own."""
    address = config.tables.daemon.metrics
    try:
        for bound in bind_all(*host_and_port(address)):
            bound.close()
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise cannot_listen(config, error) from error


def cannot_listen(config: Config, error: OSError) -> ConfigError:
    address = url_address(*host_and_port(config.tables.daemon.metrics))
    return ConfigError(config.file, "daemon.metrics", f"cannot listen on {address}: {error.strerror or error}")


def bind_all(host: str, port: int) -> list[socket.socket]:
    """Sockets on every address of the host; the caller's to close. Raises OSError.

    A host may have names for addresses that it does not have, such as ::1 where IPv6 is off.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except UnicodeError as error:
        raise OSError(errno.EINVAL, f"{host!r} is no name of a host") from error
    with contextlib.ExitStack() as undo:
        bound: list[socket.socket] = []
        absent: OSError | None = None
        for family, _, _, _, address in dict.fromkeys(found):
            try:
                bound.append(undo.enter_context(_bind(family, address)))
            except OSError as error:
                if error.errno not in _ABSENT:
                    raise
                absent = error
        if absent is not None and not bound:
            raise absent
        undo.pop_all()
    return bound


def _bind(family: int, address: Any) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    return listener
