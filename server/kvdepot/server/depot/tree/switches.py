"""Switches: operators switch loads and stores off at run time, for all or for single namespaces (row I1e).

They are kept by id, not by slot. A namespace that leaves the table and comes back is still switched off.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kvdepot.core.control import Switch, switch_states
from kvdepot.core.limits import check_limit
from kvdepot.core.misses import MissReason
from kvdepot.core.report import SwitchesStatus

NAMESPACES_OFF_MAX: Final = 1024
"""Of each switch."""
Refusal = Callable[[bytes], MissReason | None]
"""By namespace id: why nothing new is granted there."""
REFUSALS: Final = {
    MissReason.LOADS_OFF: "the operator has switched loads off",
    MissReason.STORES_OFF: "the operator has switched stores off",
    MissReason.DRAINING: "the operator drains the daemon",
    MissReason.EPOCH_BUMPED: "the operator has bumped the epoch",
}
"""What engines are told."""
_OFF: Final = {Switch.LOADS: MissReason.LOADS_OFF, Switch.STORES: MissReason.STORES_OFF}


class Switches:
    """The switches. A switch is off for a namespace when it is off for all, or for that namespace individually."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.draining = False  # nothing is granted to anybody; what was granted ends as ever
        self._all = dict.fromkeys(Switch, False)
        self._single: dict[Switch, dict[bytes, None]] = {switch: {} for switch in Switch}
        self._off_at: dict[Switch, float] = {}  # those that are off anywhere; nothing: not known

    def refusal(self, switch: Switch, namespace_id: bytes) -> MissReason | None:
        """Return why nothing new is granted, or None if leases are granted."""
        if self.off(switch, namespace_id):
            return _OFF[switch]
        return MissReason.DRAINING if self.draining else None

    def off(self, switch: Switch, namespace_id: bytes) -> bool:
        return self._all[switch] or namespace_id in self._single[switch]

    def set(self, switch: Switch, namespace_id: bytes, *, on: bool) -> None:
        """Set a switch of a namespace. An empty id means the switch for all namespaces.

        Raise LimitExceeded where too many namespaces are off individually.
        """
        single = self._single[switch]
        first = not self._all[switch] and not single
        if not namespace_id:
            self._all[switch] = not on
        elif on:
            single.pop(namespace_id, None)
        else:
            check_limit(f"namespaces with {switch} off", len({*single, namespace_id}), NAMESPACES_OFF_MAX)
            single[namespace_id] = None
        if not self._all[switch] and not single:
            self._off_at.pop(switch, None)
        elif first:
            self._off_at[switch] = self._clock()

    @property
    def by_name(self) -> bool:
        """Return whether a switch is off for a single namespace."""
        return any(self._single.values())

    def inherit(self, namespace_id: bytes, heir_id: bytes) -> bool:
        """Move the switches that are off for a namespace to the one that follows it. Return whether there were any."""
        found = [single for single in self._single.values() if namespace_id in single]
        for single in found:
            del single[namespace_id]
            single[heir_id] = None
        return bool(found)

    def status(self) -> SwitchesStatus:
        loads, stores = Switch.LOADS, Switch.STORES
        return SwitchesStatus(
            self._all[loads], tuple(self._single[loads]), self._all[stores], tuple(self._single[stores]),
            self.draining, self._off_seconds(loads), self._off_seconds(stores),
        )  # fmt: skip

    def _off_seconds(self, switch: Switch) -> float:
        return self._clock() - self._off_at[switch] if switch in self._off_at else 0.0

    def restore(self, status: SwitchesStatus) -> None:
        """Set the switches as an earlier run left them."""
        for switch, state in switch_states(status).items():
            self._all[switch] = state.off
            self._single[switch] = dict.fromkeys(state.off_namespaces)
            if state.anywhere_off and state.off_seconds:
                self._off_at[switch] = self._clock() - state.off_seconds
