"""Shares of the tables that all engines use, so that no user and no tenant fills one alone (ADR 65, ADR 67)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kvdepot.core.arena import ATTACHMENTS_MAX, NAMESPACES_MAX, SESSIONS_MAX
from kvdepot.server.depot.tree.namespaces import SPECS_BYTES_MAX
from kvdepot.server.depot.types import Owner, TenantBudget


@dataclass(frozen=True, slots=True)
class Share:
    """What one party may have: a tenant or, without tenants, a user."""

    sessions: int
    attachments: int
    namespaces: int  # whose specs its engines have defined
    spec_bytes: int  # of these


USER: Final = Share(SESSIONS_MAX // 4, ATTACHMENTS_MAX // 4, NAMESPACES_MAX // 2, SPECS_BYTES_MAX // 2)
"""Of one uid: 256 engines, 2,048 processes and 512 namespaces."""


def share_of(owner: Owner, tenants: Mapping[str, TenantBudget]) -> Share:
    """Return the share of a user, or of a tenant: an equal part."""
    if owner.tenant is None:
        return USER
    parts = max(len(tenants), 1)
    sessions = sessions_part(tenants, owner.tenant)
    return Share(sessions, ATTACHMENTS_MAX // parts, NAMESPACES_MAX // parts, SPECS_BYTES_MAX // parts)


def sessions_part(tenants: Mapping[str, TenantBudget], name: str) -> int:
    """Return how many sessions a tenant may have."""
    return part(SESSIONS_MAX, {name: one.sessions for name, one in tenants.items()}, name)


def part(total: int, given: Mapping[str, int | None], name: str) -> int:
    """Return what a tenant has of a total: what it is given, else an equal part of what the others leave."""
    own = given.get(name)
    return _equal_part(total, given) if own is None else own


def parts(total: int, given: Mapping[str, int | None]) -> dict[str, int]:
    """Return what each tenant has of a total, in one pass."""
    equal = _equal_part(total, given)
    return {name: equal if own is None else own for name, own in given.items()}


def _equal_part(total: int, given: Mapping[str, int | None]) -> int:
    left = max(total - sum(filter(None, given.values())), 0)
    return left // max(list(given.values()).count(None), 1)
