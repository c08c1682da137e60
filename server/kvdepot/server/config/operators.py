"""Who is an operator: users and groups of [operators], resolved when the configuration is read.

A lookup of a name may ask a directory server, so the daemon's loop never makes one.
"""

from __future__ import annotations

import grp
import os
import pwd
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

GROUP_MARK: Final = "@"
"""Before the name of a group in [operators]."""


class Role(IntEnum):
    """What an operator may do. A higher role may do all that a lower one may."""

    READER = 1
    ADMIN = 2


@dataclass(frozen=True, slots=True)
class Operators:
    """User ids and group ids by role. `unknown`: the names that this host does not have; they give nobody a role.

    `names`: by role, the names in certificates of those who call over TLS.
    """

    users: dict[Role, frozenset[int]]
    groups: dict[Role, frozenset[int]]
    unknown: tuple[str, ...] = ()
    names: Mapping[Role, Collection[str]] = field(default_factory=dict)

    def role(self, uid: int, group_ids: Iterable[int]) -> Role | None:
        """Return the role of a process. Root and the daemon's own user are admins."""
        if uid in (0, os.geteuid()):
            return Role.ADMIN
        members = frozenset(group_ids)
        roles = [role for role in Role if uid in self.users[role] or members & self.groups[role]]
        return max(roles, default=None)

    def role_of_names(self, names: Collection[str]) -> Role | None:
        """Return the role of a certificate with these names."""
        return max((role for role, allowed in self.names.items() if set(names) & set(allowed)), default=None)


def resolve(admins: Iterable[str], readers: Iterable[str]) -> Operators:
    """Return the ids of names: "alice" is a user, "@ops" a group. Digits are an id."""
    users: dict[Role, set[int]] = {role: set() for role in Role}
    groups: dict[Role, set[int]] = {role: set() for role in Role}
    unknown: list[str] = []
    for role, names in ((Role.ADMIN, admins), (Role.READER, readers)):
        for name in names:
            is_group = name.startswith(GROUP_MARK)
            found = group_id(name.removeprefix(GROUP_MARK)) if is_group else user_id(name)
            if found is None:
                unknown.append(name)
            else:
                (groups if is_group else users)[role].add(found)
    return Operators(
        {role: frozenset(ids) for role, ids in users.items()},
        {role: frozenset(ids) for role, ids in groups.items()},
        tuple(unknown),
    )


def user_id(name: str) -> int | None:
    """Return the id of a user; None if this host has no such user. Digits are an id."""
    if _is_id(name):
        return int(name)
    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError:
        return None


def group_id(name: str) -> int | None:
    """Return the id of a group; None if this host has no such group. Digits are an id."""
    if _is_id(name):
        return int(name)
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        return None


def _is_id(name: str) -> bool:
    return name.isascii() and name.isdigit()
