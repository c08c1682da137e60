"""The status of a daemon that is well."""

from __future__ import annotations

from kvdepot.core.report import DaemonStatus, TierStatus

RAM = TierStatus("ram", "ram", 1 << 30, state="ready")
NVME = TierStatus("nvme", "disk", 1 << 40, state="ready", breaker="closed")
STATUS = DaemonStatus("0.1.0", 7, 1.0, True, "", 1, 1, tiers=(RAM, NVME))
