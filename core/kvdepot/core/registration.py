"""The call with which an engine registers its namespace, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Final

from kvdepot.core.bounds import Count, NamespaceIdOrNone, Reason, SessionToken, bad
from kvdepot.core.elements import Elements, KindElements
from kvdepot.core.keys import SpecField
from kvdepot.core.kinds import Kind

TIERS_MAX: Final = 64
"""Tiers that a reply names. An engine knows the others by their loads."""


@dataclass(frozen=True, slots=True)
class RegisterCall:
    """Registers an engine's namespace."""

    session: SessionToken
    spec: SpecField
    elements: Annotated[tuple[KindElements, ...], Count(len(Kind))] = ()  # not part of the identity; none: no audit
    follows_bumps: bool = False  # it registers again, with the counter that the answer says

    def check_fields(self) -> None:
        if len(self.elements_by_kind()) != len(self.elements):
            raise bad("elements", "a kind comes twice")

    def elements_by_kind(self) -> Elements:
        return {of_kind.kind: of_kind.runs for of_kind in self.elements}


@dataclass(frozen=True, slots=True)
class RegisterReply:
    """The namespace's id, or the bump counter to register with."""

    namespace_id: NamespaceIdOrNone  # empty: an operator has invalidated it, and it is to be registered with ...
    ranks_attached: int = 0
    bumps: int = 0  # ... this counter
    tier_bytes: Annotated[Mapping[Reason, int], Count(TIERS_MAX)] = field(default_factory=dict)
    """Capacity by tier, for the engine's log."""
