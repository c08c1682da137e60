"""What the parts of a shared tier have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvdepot.core.object_keys import NO_KEYS, KeyRing
from kvdepot.server.platform.guard import Guard
from kvdepot.server.tiers.budget import DailyBudget
from kvdepot.server.tiers.shared.absent import AbsentNames
from kvdepot.server.tiers.shared.config import SharedConfig
from kvdepot.server.tiers.shared.holdings import Holdings
from kvdepot.server.tiers.shared.quota_grant import QuotaGrant
from kvdepot.server.tiers.workers import Workers


@dataclass(slots=True)
class Directory:
    """The parts of one shared tier."""

    config: SharedConfig
    data: Workers
    holdings: Holdings
    absent: AbsentNames
    grant: QuotaGrant
    budget: DailyBudget
    clock: Callable[[], float]
    wall_clock: Callable[[], float]
    count: Callable[[str, float], None]
    guard: Guard
    node: str = ""  # as the coordinator registered it
    device: int = 0
    keys: KeyRing = NO_KEYS
