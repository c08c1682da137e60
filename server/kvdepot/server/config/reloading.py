"""The keys that a running daemon can change, and the keys that need a restart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from kvdepot.core.control import ConfigChange
from kvdepot.core.errors import ConfigError
from kvdepot.core.object_keys import NO_KEYS, KeyRing
from kvdepot.core.ram_size import kept_parts
from kvdepot.core.secrets import mask_secrets
from kvdepot.server.config.config import Config
from kvdepot.server.config.schema import DISK_KIND, Tables, TenantTable, TierTable

ABSENT: Final = "(absent)"
_LIVE: Final = frozenset(
    {
        "daemon.lend_disks", "operators.admins", "operators.readers", "log.level", "log.format",
        "tls.allow_admins", "tls.allow_readers", "tls.allow_peers",
        "ram.high_watermark", "ram.low_watermark", "sessions.credit", "sessions.grace",
        "sessions.streams", "policy.prefetch_share", "policy.pin_share", "policy.loads_in_flight",
        "policy.lease_deadline", "policy.audit_sample",
    }
)  # fmt: skip
_LIVE_OF_TENANTS: Final = frozenset({"ram", "credit", "sessions", "peers"})
_LIVE_OF_TIERS: Final = frozenset({"write", "load_weight"})
_LIVE_OF_DISKS: Final = frozenset({"high_watermark", "low_watermark", "drive_writes_per_day"})
"""The watermarks of a shared tier are its janitor's, who may be another node."""
_KEY_FILE: Final = "key_file"


def values(config: Config) -> dict[str, str]:
    """Return each key with its value as text, sizes in bytes and times in seconds. Tiers and quotas are by subject.

    Secrets are masked. Of the keys in a key file, the ids are shown.
    """
    return {key: mask_secrets(text) for key, text, _ in _flat(config.tables, config.keys)}


def changes(before: Config, after: Config) -> tuple[ConfigChange, ...]:
    """Return the keys whose values differ. Secrets are compared, and masked."""
    old = {key: (text, live) for key, text, live in _flat(before.tables, before.keys)}
    new = {key: (text, live) for key, text, live in _flat(after.tables, after.keys)}
    absent = (ABSENT, True)
    return tuple(
        ConfigChange(
            key,
            mask_secrets(old.get(key, absent)[0]),
            mask_secrets(new.get(key, absent)[0]),
            old.get(key, absent)[1] and new.get(key, absent)[1],
        )
        for key in sorted(old.keys() | new.keys())
        if old.get(key, absent)[0] != new.get(key, absent)[0]
    )


def refuse_what_needs_a_restart(before: Config, after: Config, found: tuple[ConfigChange, ...]) -> None:
    """Raise ConfigError, which names each key that needs a restart, and what the restart costs."""
    keys = [change.key for change in found if not change.live]
    if not keys:
        return
    advice = "nothing was changed; undo the change in the file, or restart kvdepotd"
    if replaces_arena(before, after):
        advice += ", which then starts with an empty RAM tier, because the arena is another one"
    disks = [tier.name for tier in after.tables.tier if tier.kind == DISK_KIND]
    if {"ram.capacity", *(f"tier.{name}.capacity" for name in disks)} & set(keys):
        advice += "; to use less without a restart, lower high_watermark or set a [[quota]]"
    raise ConfigError(after.file, ", ".join(keys), "cannot change while the daemon runs", advice=advice)


def replaces_arena(before: Config, after: Config) -> bool:
    """Return whether a restart with the other configuration makes another arena, so that RAM begins empty."""
    return not _kept(before, after)


def lost_bytes(before: Config, after: Config) -> int:
    """Return how many bytes of RAM's data a restart with the other configuration loses."""
    return before.arena_layout.data_bytes - sum(_kept(before, after))


def _kept(before: Config, after: Config) -> tuple[int, ...]:
    """Return the bytes of each part that a restart keeps; empty if it makes another arena."""
    if _arena_of(before) != _arena_of(after):
        return ()
    return kept_parts(before.arena_layout, after.arena_layout)


def _arena_of(config: Config) -> tuple[Path, bool, bytes]:
    return config.arena_path, config.tables.ram.sealed, config.arena_purpose


def _flat(tables: Tables, keys: Mapping[str, KeyRing]) -> Iterator[tuple[str, str, bool]]:
    """Yield (key, text, whether it may change)."""
    for table, model in tables:
        if table == "tier":
            yield "tier", ", ".join(tier.name for tier in model) or "none", False
            for tier in model:
                yield from _flat_tier(tier, keys.get(tier.name, NO_KEYS))
        elif table == "tenant":
            yield "tenant", ", ".join(tenant.name for tenant in model) or "none", False
            for tenant in model:
                yield from _flat_tenant(tenant, several=len(model) > 1)
        elif table == "quota":
            for quota in model:
                about = f"tenant={quota.tenant},namespace={quota.namespace or '(total)'},tier={quota.tier}"
                yield f"quota[{about}].capacity", _text(quota.capacity), True
        else:
            for name, value in model:
                key = f"{table}.{name}"
                yield key, _text(value), key in _LIVE


def _flat_tier(tier: TierTable, keys: KeyRing) -> Iterator[tuple[str, str, bool]]:
    live = _LIVE_OF_TIERS | (_LIVE_OF_DISKS if tier.kind == DISK_KIND else frozenset({_KEY_FILE}))
    for name, value in tier:
        text = f"{value} (keys {keys.shown})" if name == _KEY_FILE and keys else _text(value)
        yield f"tier.{tier.name}.{name}", text, name in live


def _flat_tenant(tenant: TenantTable, *, several: bool) -> Iterator[tuple[str, str, bool]]:
    live = _LIVE_OF_TENANTS - {"ram"} if several else _LIVE_OF_TENANTS  # the size of a part of the arena
    for name, value in tenant:
        yield f"tenant.{tenant.name}.{name}", _text(value), name in live


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return "none" if value is None else str(value)
