"""What engines have reserved and not committed, and what else they may reserve (design.md#credit)."""

from __future__ import annotations

from dataclasses import dataclass

from kvdepot.core import limits
from kvdepot.core.calls import Kind, ReserveOutcome
from kvdepot.server.depot.sessions.budgets import OVER_BUDGET, Budgets, Reservable
from kvdepot.server.depot.sessions.session import Session, WriteLease
from kvdepot.server.depot.tree.namespaces import Namespace
from kvdepot.server.depot.tree.ram import RamTier
from kvdepot.server.depot.types import DepotConfig


@dataclass(frozen=True, slots=True)
class Refusal:
    """Of one object. `reason` is empty where the outcome says enough."""

    outcome: ReserveOutcome
    reason: str = ""


_LATER = Refusal(ReserveOutcome.LATER)
_NO_ROOM = Refusal(ReserveOutcome.NO_ROOM)


class Credit:
    """The credit of all sessions. Bytes count from the reservation until the loan ends, as the allocator rounds them.

    What the budget of a session leaves is read once a call: `begin_call` comes before the `refusal` of its objects.
    """

    def __init__(self, ram: RamTier, budgets: Budgets, config: DepotConfig) -> None:
        self._ram = ram
        self._budgets = budgets
        self._config = config
        self._reservable = Reservable(0, 0, 0)  # in the call at hand
        self._used_bytes_max = 0  # that its session may have reserved
        self._objects_left = 0  # that it may reserve

    def configure(self, config: DepotConfig) -> None:
        self._config = config

    def begin_call(self, session: Session, objects: int) -> None:
        """Note what the budget of the session leaves for a call with so many objects."""
        self._reservable = self._budgets.reservable(session, objects * session.object_bytes_max)
        self._used_bytes_max = session.credit_used_bytes + self._reservable.size_bytes
        self._objects_left = self._reservable.objects

    def refusal(self, session: Session, namespace: Namespace, kind: int) -> Refusal | None:
        """Return the refusal of an object for which there is no credit, or None.

        Attention never takes the share that is kept back for what makes it usable.
        """
        config = self._config
        size_bytes = self._ram.rounded(namespace.object_bytes[kind])
        share = 1.0 - (config.kept_back_share if len(namespace.object_bytes) > 1 else 0.0)
        attention = kind == Kind.ATTENTION
        credit_bytes = int(config.credit_bytes * share) if attention else config.credit_bytes
        if size_bytes > credit_bytes:
            reason = f"an object of {size_bytes} bytes is more than the credit for its kind, {credit_bytes} bytes"
            return Refusal(ReserveOutcome.REFUSED, reason)
        if session.left_bytes + session.credit_used_bytes + size_bytes > config.credit_bytes:
            return _LATER
        if session.credit_used_bytes + size_bytes > self._used_bytes_max or self._objects_left <= 0:
            self._budgets.refused(session, "stores")
            fits = size_bytes <= self._reservable.bound_bytes
            return Refusal(ReserveOutcome.LATER if fits else ReserveOutcome.NO_ROOM, OVER_BUDGET)
        if attention and session.attention_used_bytes + size_bytes > credit_bytes:
            return _LATER
        room = self._ram.rooms.of(namespace.slot)
        if room is None:
            return _NO_ROOM
        ready_bytes = room.allocator.ready_bytes
        if attention and room.attention_bytes + size_bytes > ready_bytes * share:
            return _LATER if room.growing or ready_bytes * share >= size_bytes else _NO_ROOM
        if not self._ram.lent.free_count or len(session.leases) >= limits.LEASES_PER_SESSION_MAX:
            return _LATER
        return None

    def charge(self, lease: WriteLease, index: int, kind: int, row: int) -> None:
        """Count an object of the lease whose loan has begun."""
        size_bytes = self._ram.rounded_bytes(row)
        lease.open += 1
        self._objects_left -= 1
        lease.session.credit_used_bytes += size_bytes
        if kind == Kind.ATTENTION:
            lease.session.attention_used_bytes += size_bytes
            self._ram.rooms.at(self._ram.rows.offset[row]).attention_bytes += size_bytes
        lease.credits[index] = -size_bytes if kind == Kind.ATTENTION else size_bytes

    def refund(self, lease: WriteLease, index: int) -> None:
        """Count an object of the lease no more, because its loan ends. The scratch object of an audit has no credit."""
        size_bytes = abs(lease.credits[index])
        lease.session.credit_used_bytes -= size_bytes
        if lease.credits[index] < 0:
            lease.session.attention_used_bytes -= size_bytes
            row = self._ram.lent.row_of(lease.entries[index])
            self._ram.rooms.at(self._ram.rows.offset[row]).attention_bytes -= size_bytes
