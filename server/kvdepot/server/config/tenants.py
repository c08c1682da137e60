"""Which tenant a process belongs to: the users and groups of [[tenant]], resolved when the configuration is read.

The kernel says who connects. What an engine says of its tenant is compared with this, and gives no right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvdepot.core.errors import ConfigError, PermissionDenied
from kvdepot.server.config.operators import group_id, user_id
from kvdepot.server.config.schema import TenantTable

_ADVICE: Final = "name the user in `users` of one [[tenant]] in the daemon's configuration, and restart the daemon"


@dataclass(frozen=True, slots=True)
class Tenants:
    """The tenant of each user id and group id. `unknown`: names that this host does not have; they are in no tenant."""

    users: Mapping[int, str] = field(default_factory=dict)
    groups: Mapping[int, str] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()
    configured: bool = False

    def of(self, uid: int, group_ids: Iterable[int]) -> str | None:
        """Return the tenant of a process; None if no tenants are configured.

        A user that is named belongs to its tenant, whatever its groups are. Raise PermissionDenied for a process in no
        tenant, or in groups of several: nobody is put into a tenant by default, not even root.
        """
        if not self.configured:
            return None
        if uid in self.users:
            return self.users[uid]
        found = sorted({self.groups[one] for one in group_ids if one in self.groups})
        if len(found) != 1:
            which = f"in groups of several tenants: {', '.join(found)}" if found else "in no tenant"
            raise PermissionDenied(f"uid {uid} is {which}", advice=_ADVICE)
        return found[0]


NO_TENANTS: Final = Tenants()


def resolve_tenants(file: str, tables: Sequence[TenantTable]) -> Tenants:
    """Return the tenants by id. Raise ConfigError for a name that two have, and for a user or group in two."""
    names: set[str] = set()
    users: dict[int, str] = {}
    groups: dict[int, str] = {}
    unknown: list[str] = []
    for number, table in enumerate(tables):
        if table.name in names:
            raise ConfigError(file, f"tenant[{number}].name", f"two tenants have the name {table.name!r}")
        names.add(table.name)
        for key, members, ids, look_up in (
            ("users", table.users, users, user_id), ("groups", table.groups, groups, group_id),
        ):  # fmt: skip
            unknown += _enter(ids, table.name, members, look_up, (file, f"tenant[{number}].{key}"))
    return Tenants(users, groups, tuple(unknown), bool(tables))


def _enter(
    ids: dict[int, str], tenant: str, members: Iterable[str], look_up: Callable[[str], int | None],
    place: tuple[str, str],
) -> list[str]:  # fmt: skip
    """Enter the ids of these names. Return the names that this host does not have."""
    unknown = []
    for member in members:
        found = look_up(member)
        if found is None:
            unknown.append(member)
        elif ids.setdefault(found, tenant) != tenant:
            raise ConfigError(
                *place, f"{member!r} is in tenant {ids[found]!r} already", advice="name it in one of them", of_host=True
            )
    return unknown
