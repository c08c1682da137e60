"""Checks of who shares the KV of this node: users who may attach trust each other (docs/security.md)."""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING, Final

from kvdepot.client.ctl.doctor.findings import DAEMON, ENGINES, Check

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvdepot.client.ctl.doctor.daemon import Daemon
    from kvdepot.client.ctl.doctor.findings import Finding
    from kvdepot.client.ctl.doctor.host import Host
    from kvdepot.core.report import SessionStatus

_NAMES_MAX: Final = 8
_EFFECT: Final = "each can read and change the KV of the others"


def check_group(daemon: Daemon, host: Host) -> Finding:
    """Users of the sockets' group, as /etc/passwd and /etc/group name them, other than root and the daemon's."""
    check = Check("group", DAEMON)
    try:
        socket = host.path(daemon.endpoint.path).stat()
    except OSError as error:
        return check.skipped(f"{daemon.endpoint.path}: {error.strerror}")
    if not socket.st_mode & stat.S_IWGRP:
        return check.ok("the sockets are closed to their group")
    names = _members(host, socket.st_gid, {0, socket.st_uid, daemon.uid})
    if len(names) > 1:
        more = len(names) - _NAMES_MAX
        shown = ", ".join(names[:_NAMES_MAX]) + (f" and {more} more" if more > 0 else "")
        return check.warn(
            f"{len(names)} users are in the sockets' group {socket.st_gid} ({shown}): {_EFFECT}",
            "a group of one engine user for each daemon",
        )
    return check.ok(f"group {socket.st_gid} has {names[0] if names else 'no user'} in addition to the daemon's")


def _members(host: Host, group_id: int, without: set[int | None]) -> list[str]:
    """Return the names of a group's users."""
    ids: dict[str, int] = {}
    found: set[str] = set()
    for line in (host.text("/etc/passwd") or "").splitlines():
        name, _, user, primary, *_ = [*line.split(":"), "", "", "", ""]
        if user.isdecimal():
            ids[name] = int(user)
            if primary == str(group_id):
                found.add(name)
    for line in (host.text("/etc/group") or "").splitlines():
        _, _, number, names, *_ = [*line.split(":"), "", "", "", ""]
        if number == str(group_id):
            found.update(filter(None, names.split(",")))
    return sorted(name for name in found if ids.get(name, -1) not in without)


def check_engine_users(host: Host, sessions: Iterable[SessionStatus]) -> Finding:
    """Users of the attached engines' processes that can be looked into."""
    check = Check("users", ENGINES)
    users = {user for session in sessions for pid in session.pids if (user := host.user_of(pid)) is not None}
    if len(users) > 1:
        return check.warn(
            f"engines of users {', '.join(map(str, sorted(users)))} are attached: {_EFFECT}",
            "run them as one user, or a daemon for each user",
        )
    return check.ok(f"all engines are of user {users.pop()}" if users else "no engine is attached")
