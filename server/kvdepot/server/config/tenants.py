"""Tenants: which one a process belongs to, by the users and groups of [[tenant]], and which part of the data is whose.

Users and groups are resolved when the configuration is read. The kernel says who connects. What an engine says of its
tenant is compared with this, and gives no right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvdepot.core.arena import FILE_ALIGN_BYTES, SESSIONS_MAX
from kvdepot.core.errors import ConfigError, PermissionDenied
from kvdepot.server.config.memory_room import MIB
from kvdepot.server.config.operators import group_id, user_id
from kvdepot.server.config.schema import AUTO, Tables, TenantTable

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


def parts_of(tenants: Sequence[TenantTable], data_bytes: int) -> dict[str, int]:
    """Return the bytes of data of each tenant, in the order of their names; empty if all data is one file.

    Several tenants divide the data. A tenant with `ram` has so much, and the others have what is left, equally. If all
    have `ram`, what is left is divided equally too. Parts are rounded to huge pages.
    """
    if len(tenants) < 2:
        return {}
    pages = data_bytes // FILE_ALIGN_BYTES
    parts = {one.name: (one.ram or 0) // FILE_ALIGN_BYTES for one in sorted(tenants, key=lambda one: one.name)}
    sharing = [one.name for one in tenants if one.ram is None] or list(parts)
    each, rest = divmod(pages - sum(parts.values()), len(sharing))
    for number, name in enumerate(sorted(sharing)):
        parts[name] += each + (number < rest)
    return {name: pages * FILE_ALIGN_BYTES for name, pages in parts.items()}


def check_tenants(file: str, tables: Tables, data_bytes: int) -> None:
    """Refuse parts and credits that promise more than there is, and two entries about the RAM of a tenant."""
    of_host = tables.ram.capacity == AUTO
    parts = parts_of(tables.tenant, data_bytes)
    if parts and not tables.ram.sealed:
        raise ConfigError(
            file, "ram.sealed", "several tenants need sealed memory",
            advice="a tenant could cut its data short, which would end the daemon: set sealed = true",
        )  # fmt: skip
    limited = {(tenant.name, None, "ram") for tenant in tables.tenant if tenant.ram is not None and not parts}
    for number, quota in enumerate(tables.quota):
        if (quota.tenant, quota.namespace, quota.tier) in limited:
            raise ConfigError(file, f"quota[{number}]", f"is about the same as `ram` of tenant {quota.tenant!r}")
    promised_bytes = sum((tenant.ram or 0) // FILE_ALIGN_BYTES * FILE_ALIGN_BYTES for tenant in tables.tenant)
    if parts and (promised_bytes > data_bytes or min(parts.values()) < FILE_ALIGN_BYTES):
        raise ConfigError(
            file, "tenant.ram",
            f"expected at most the arena's data of {data_bytes // MIB} MiB for all tenants, and"
            f" {FILE_ALIGN_BYTES // MIB} MiB at least for each of them",
            advice="tenants without ram share what the others leave", of_host=of_host,
        )  # fmt: skip
    _check_credits(file, tables, data_bytes, parts)
    left = SESSIONS_MAX - sum(tenant.sessions for tenant in tables.tenant)
    if left < sum(not tenant.sessions for tenant in tables.tenant):
        raise ConfigError(
            file, "tenant.sessions", f"expected at most {SESSIONS_MAX} for all tenants, and one for each of them",
            advice="tenants without sessions share what the others leave",
        )  # fmt: skip


def _check_credits(file: str, tables: Tables, data_bytes: int, parts: Mapping[str, int]) -> None:
    """Refuse a credit that is more than the data of its tenant."""
    for tenant in tables.tenant:
        most = parts.get(tenant.name, data_bytes)
        if tenant.credit is not None and tenant.credit > most:
            raise ConfigError(
                file, "tenant.credit",
                f"expected at most the data of tenant {tenant.name!r}, {most // MIB} MiB, got"
                f" {-(-tenant.credit // MIB)} MiB",
                advice="without credit it may hold all of it", of_host=tables.ram.capacity == AUTO,
            )  # fmt: skip
