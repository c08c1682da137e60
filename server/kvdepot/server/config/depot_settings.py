"""The settings of the depot, from the tables of the configuration and the quotas that operators have set."""

from __future__ import annotations

from kvdepot.server.config.config import Config
from kvdepot.server.config.set_quotas import SetQuotas
from kvdepot.server.depot.types import DepotConfig, TenantBudget


def depot_config(config: Config, quotas: SetQuotas) -> DepotConfig:
    """Return what the depot is given at its start, and at a reload."""
    tables = config.tables
    return DepotConfig(
        credit_bytes=config.credit_bytes,
        lease_deadline_seconds=tables.policy.lease_deadline,
        grace_seconds=tables.sessions.grace,
        high_watermark=tables.ram.high_watermark,
        low_watermark=tables.ram.low_watermark,
        loads_in_flight=tables.policy.loads_in_flight,
        prefetch_share=tables.policy.prefetch_share,
        pin_share=tables.policy.pin_share,
        lend_disks=tables.daemon.lend_disks,
        audit_sample=tables.policy.audit_sample,
        eviction=tables.policy.eviction,
        quotas=quotas.for_engine(tables),
        tenants={tenant.name: TenantBudget(tenant.credit, tenant.sessions or None) for tenant in tables.tenant},
    )
