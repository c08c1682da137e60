"""Who is a peer: names of certificates in `[tls] allow_peers`, and the tenant of each, by `[[tenant]] peers`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from kvdepot.core.errors import ConfigError
from kvdepot.server.config.schema import PEER_KIND, Tables


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


def check_peers(file: str, tables: Tables) -> None:
    """Raise ConfigError for a peer tier, or an address for peers, that nobody can use."""
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
