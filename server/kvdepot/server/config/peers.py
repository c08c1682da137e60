"""Who is a peer: names of certificates in `[tls] allow_peers`, and the tenant of each, by `[[tenant]] peers`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from kvdepot.core.errors import ConfigError
from kvdepot.core.nixl_packages import INSTALL
from kvdepot.server.config.schema import PEER_KIND, Tables
from kvdepot.server.io.nixl_agent import installed
from kvdepot.server.io.peer_wire import Lane


@dataclass(frozen=True, slots=True)
class Peers:
    """The tenant of each name that is allowed; None where no tenants are configured."""

    tenants: Mapping[str, str | None] = field(default_factory=dict)

    def tenant_of(self, names: Iterable[str]) -> tuple[bool, str | None]:
        """Return whether a certificate with these names is a peer's, and its tenant.

        One whose names are of several tenants is of none, and no peer.
        """
        found = {self.tenants[name] for name in names if name in self.tenants}
        return (True, found.pop()) if len(found) == 1 else (False, None)

    def name_of(self, names: Iterable[str]) -> str:
        """Return the first of these names that is allowed; empty if none is."""
        return next((name for name in names if name in self.tenants), "")

    def names_of(self, tenant: str | None) -> tuple[str, ...]:
        """Return the names that a peer of this tenant may have."""
        return tuple(sorted(name for name, its in self.tenants.items() if its == tenant))


NO_PEERS: Final = Peers()
_NAMES_BYTES_MAX: Final = 96 << 10
"""Of all peers, as JSON. A worker gets those of its peer in one argument, which Linux limits to 128 KiB."""


def resolve_peers(file: str, tables: Tables) -> Peers:
    """Return the peers. Raise ConfigError for a name in two tenants, or in one and not allowed."""
    allowed = dict.fromkeys(tables.tls.allow_peers)
    if not tables.tenant:
        return Peers(allowed)
    tenants: dict[str, str] = {}
    for number, tenant in enumerate(tables.tenant):
        for name in tenant.peers:
            key = f"tenant[{number}].peers"
            if name not in allowed:
                raise ConfigError(file, key, f"{name!r} is not in [tls] allow_peers")
            if tenants.setdefault(name, tenant.name) != tenant.name:
                raise ConfigError(file, key, f"{name!r} is in tenant {tenants[name]!r} already")
    if missing := [name for name in allowed if name not in tenants]:
        raise ConfigError(
            file, "tls.allow_peers", f"{missing[0]!r} is in no tenant", advice="name it in `peers` of one [[tenant]]"
        )
    return Peers(tenants)


def peers_key(tables: Tables) -> str:
    """Return the key that says that peers call or are called; empty if there are none."""
    if tables.daemon.listen_peers:
        return "daemon.listen_peers"
    return next((f"tier.{tier.name}.kind" for tier in tables.tier if tier.kind == PEER_KIND), "")


def nixl_keys(tables: Tables) -> list[str]:
    """Return the keys that say that NIXL is used."""
    of_tiers = [f"tier.{tier.name}.lane" for tier in tables.tier if tier.lane is Lane.NIXL]
    return ["daemon.lend_nixl", *of_tiers] if tables.daemon.lend_nixl else of_tiers


def _check_nixl(file: str, tables: Tables) -> None:
    """Raise ConfigError where NIXL is wanted and cannot be used, or where it would show RAM to other tenants."""
    keys = nixl_keys(tables)
    if tables.daemon.lend_nixl and not tables.daemon.listen_peers:
        raise ConfigError(file, keys[0], "nobody could borrow", advice="set daemon.listen_peers, or delete it")
    if keys and tables.tenant:
        raise ConfigError(
            file, keys[0], "NIXL shows all of RAM to a peer, so it cannot be used with [[tenant]]",
            advice=f'delete it: the lane "{Lane.STREAM}" shows a peer its tenant\'s objects alone',
        )  # fmt: skip
    if keys and not installed():
        raise ConfigError(
            file, keys[0], "needs the package nixl-cu12, which is not installed",
            advice=INSTALL, of_host=True,
        )  # fmt: skip


def check_peers(file: str, tables: Tables) -> None:
    """Raise ConfigError for a peer tier, or an address for peers, that nobody can use."""
    _check_nixl(file, tables)
    tenants = {tenant.name for tenant in tables.tenant}
    if (names_bytes := len(json.dumps(tables.tls.allow_peers))) > _NAMES_BYTES_MAX:
        raise ConfigError(
            file, "tls.allow_peers", f"has {names_bytes} bytes; expected at most {_NAMES_BYTES_MAX}",
            advice="give the daemons of one fleet, or of one tenant, one name",
        )  # fmt: skip
    for tier in tables.tier:
        if tier.kind != PEER_KIND:
            continue
        key = f"tier.{tier.name}.tenant"
        if tenants and tier.tenant not in tenants:
            raise ConfigError(
                file, key, "with [[tenant]], a peer tier needs the name of a tenant, whose objects it may load",
                advice=f"choose one of: {', '.join(sorted(tenants))}",
            )  # fmt: skip
        if not tenants and tier.tenant:
            raise ConfigError(file, key, f"there is no tenant {tier.tenant!r}")
