"""What a host must allow for a start. `check-config` and `kvdepotd serve` use the same functions.

They create and change nothing. Conditions that may end without a change of the host are not checked: another running
daemon, a port in use, loans of extents (docs/adr/0053).
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from kvdepot.core.errors import ConfigError, KvDepotError
from kvdepot.server.arena.arena_file import check_arena
from kvdepot.server.arena.arena_request import ArenaRequest, Outlook
from kvdepot.server.arena.holding import held_files
from kvdepot.server.config import arena_directory
from kvdepot.server.config.config import Config
from kvdepot.server.config.key_files import read_keys
from kvdepot.server.config.tls import load_tls
from kvdepot.server.daemon.state_file import StateFile
from kvdepot.server.observe import tracing
from kvdepot.server.platform.addresses import ATTACH_SUFFIX, host_and_port, url_address
from kvdepot.server.platform.file_lock import LOCK_SUFFIX, FileLock
from kvdepot.server.platform.listening import bind_all
from kvdepot.server.platform.own_files import open_own

_NO_DIRECTORY: Final = (
    "create the directory for the daemon's user (docs/install.md), or start without a configuration file"
)
_NO_LOCK: Final = (
    "run the daemon as the owner of this file and its directory (docs/install.md); if another user owns the file, "
    "delete it while no daemon runs"
)


def check_host(config: Config) -> None:
    """Raise ConfigError for what would refuse a start. `arena_outlook` checks the arena."""
    for check in _checks(config):
        check()


def host_problems(config: Config) -> Iterator[KvDepotError]:
    """Yield everything that `check_host` would raise."""
    for check in _checks(config):
        try:
            check()
        except KvDepotError as error:
            yield error


def _checks(config: Config) -> Iterator[Callable[[], object]]:
    for key, path, what in locked_files(config):
        yield partial(lock_file, config, key, path, what, take=False)
    daemon = config.tables.daemon
    for path in daemon.sockets:
        for one in (path, path.with_name(f"{path.name}{ATTACH_SUFFIX}")):
            yield partial(_check_socket, config, "daemon.listen", one)
    for path in (*daemon.admin_sockets, daemon.rpc_socket):
        yield partial(_check_socket, config, "daemon.admin" if daemon.admin else "daemon.listen", path)
    yield partial(_check_group, config, "daemon.group", daemon.group, daemon.group_id)
    yield partial(_check_group, config, "daemon.admin_group", daemon.admin_group, daemon.admin_group_id)
    yield partial(check_operators, config)
    yield partial(_check_tenants, config)
    yield partial(read_keys, config)
    if config.tables.audit.path:
        yield partial(_check_audit, config)
    yield StateFile(config.state_path).read
    if config.tables.daemon.metrics:
        yield partial(_check_metrics, config)
    if config.tables.tls.on:
        yield partial(load_tls, config.file, config.tables.tls.files)
    for address in config.tables.daemon.tcp_addresses:
        yield partial(_check_tcp, config, "daemon.listen", *address)
    if config.tables.trace.endpoint:
        yield partial(tracing.require, config.file)


def arena_request(config: Config) -> ArenaRequest:
    sealed = config.tables.ram.sealed
    return ArenaRequest(
        config.arena_path, config.arena_bytes, config.capacity_bytes, config.file, sealed, config.arena_purpose,
        config.parts,
    )  # fmt: skip


def arena_outlook(config: Config, boot_id: bytes) -> Outlook:
    """Return what a start would do with an arena of another size that the host has.

    Raise ConfigError if the host has no room for the arena, and no arena of its size.
    """
    request = arena_request(config)
    left = None if config.tables.ram.path else arena_directory.former(request.path)
    return check_arena(request if left is None else replace(request, path=left), boot_id, held_files(request.path))


def locked_files(config: Config) -> Iterator[tuple[str, Path, str]]:
    """Yield (key, path, what it is) of each file that only one daemon may use."""
    yield "ram.path", config.arena_path, "the arena"
    for path in config.tables.daemon.sockets:
        yield "daemon.listen", path, "the socket"
    if config.tables.daemon.admin:  # another one is next to the engines' socket, and under its lock
        yield "daemon.admin", config.tables.daemon.admin_sockets[0], "the operators' socket"
    # One next to the arena is under the arena's lock. Where nothing can be written `Control.restore` says so.
    if config.tables.daemon.state and StateFile(config.state_path).writable:
        yield "daemon.state", config.state_path, "the state file"


def lock_file(config: Config, key: str, path: Path, what: str, *, take: bool = True) -> FileLock | None:
    """Take the lock that allows its holder to use the arena or to unlink the socket file. Raise ConfigError.

    With `take` False, only check whether the lock could be taken. With True, raise ArenaInUse if another process
    has it.
    """
    lock = path.with_name(f"{path.name}{LOCK_SUFFIX}")
    try:
        if take:
            return FileLock(lock, f"{what} {path}")
        is_created = path == config.arena_path and not config.tables.ram.path and not path.parent.exists()
        _look_at_own_file(lock, os.O_RDWR, arena_directory.BASE if is_created else path.parent)
    except FileNotFoundError as error:
        reason = f"cannot use {path.parent}: {error.strerror}"
        raise ConfigError(config.file, key, reason, advice=_NO_DIRECTORY) from error
    except OSError as error:
        raise ConfigError(config.file, key, f"cannot use {lock}: {error.strerror}", advice=_NO_LOCK) from error
    return None


def _look_at_own_file(path: Path, flags: int, folder: Path) -> None:
    """Raise OSError if the file could not be opened, or created: it, or its directory, would be created in `folder`."""
    try:
        os.close(open_own(path, flags))
    except FileNotFoundError:
        if not stat.S_ISDIR(folder.stat().st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from None
        if _forbids_files(folder):
            raise PermissionError(errno.EACCES, f"{folder} cannot be written to") from None


def _forbids_files(folder: Path) -> bool:
    """Return whether no file can be created there. A process with other effective ids finds out at its start.

    `effective_ids` was rejected: seccomp filters that do not know faccessat2(2) refuse it (Docker before 20.10.6,
    systemd before 247), and os.access takes every error for a missing permission.
    """
    own = (os.getuid(), os.getgid()) == (os.geteuid(), os.getegid())
    return own and not os.access(folder, os.W_OK | os.X_OK)


def _check_socket(config: Config, key: str, path: Path) -> None:
    """Raise ConfigError for a file at a socket's path that is no socket: a start removes only sockets."""
    try:
        found = path.lstat()
        folder = path.parent.stat()
    except OSError:  # not there; the lock next to it has said the rest
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise ConfigError(
            config.file,
            key,
            f"{path} exists and is not a socket",
            advice="move it away, or choose another path",
        )
    user = os.geteuid()
    if folder.st_mode & stat.S_ISVTX and user not in (0, found.st_uid, folder.st_uid):
        denied = PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        reason = f"{path} is a socket of uid {found.st_uid}, which uid {user} cannot delete"
        raise ConfigError(config.file, key, reason, advice="delete it") from denied


def check_operators(config: Config) -> None:
    """Raise ConfigError for a name in `[operators]` that this host does not have. A reload is refused as a start is."""
    if unknown := config.operators.unknown:
        reason = f"this host has no such user or group: {', '.join(unknown)}"
        raise ConfigError(config.file, "operators", reason, advice='write users as "alice", and groups as "@ops"')


def _check_tenants(config: Config) -> None:
    if unknown := config.tenants.unknown:
        reason = f"this host has no such user or group: {', '.join(unknown)}"
        raise ConfigError(config.file, "tenant", reason, advice="create it, or delete it from the file")


def _check_audit(config: Config) -> None:
    path = Path(config.tables.audit.path)
    try:
        _look_at_own_file(path, os.O_WRONLY | os.O_APPEND, path.parent)
    except OSError as error:
        raise ConfigError(config.file, "audit.path", f"cannot use {path}: {error.strerror}") from error


def _check_group(config: Config, key: str, name: str, group: int) -> None:
    if name and group == -1:
        raise ConfigError(config.file, key, f"group {name!r} does not exist on this host")
    if os.geteuid() and group not in (-1, os.getegid(), *os.getgroups()):
        denied = PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        reason = f"uid {os.geteuid()} is not a member of {name!r}, and cannot give its sockets to it"
        advice = "add the daemon's user to the group (SupplementaryGroups= in the unit)"
        raise ConfigError(config.file, key, reason, advice=advice) from denied


def _check_metrics(config: Config) -> None:
    _check_tcp(config, "daemon.metrics", *host_and_port(config.tables.daemon.metrics))


def _check_tcp(config: Config, key: str, host: str, port: int) -> None:
    """Raise ConfigError if the address cannot be bound. One that is in use may be this daemon's own."""
    try:
        for bound in bind_all(host, port):
            bound.close()
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise _cannot_listen(config, key, host, port, error) from error


def cannot_listen(config: Config, error: OSError) -> ConfigError:
    """Return why the daemon has no HTTP port."""
    return _cannot_listen(config, "daemon.metrics", *host_and_port(config.tables.daemon.metrics), error)


def _cannot_listen(config: Config, key: str, host: str, port: int, error: OSError) -> ConfigError:
    return ConfigError(config.file, key, f"cannot listen on {url_address(host, port)}: {error.strerror or error}")
