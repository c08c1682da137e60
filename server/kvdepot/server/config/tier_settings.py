"""The settings of one tier below RAM, from the tables of the configuration, by kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvdepot.core.errors import ConfigError
from kvdepot.core.object_keys import NO_KEYS, KeyRing
from kvdepot.core.objectfile import Codec
from kvdepot.core.units import format_size
from kvdepot.server.config.memory_room import (
    COORDINATOR_RESERVE_BYTES,
    FILE_RESERVE_BYTES,
    HANDLE_RESERVE_BYTES,
    NIXL_RESERVE_BYTES,
    OPENER_RESERVE_BYTES,
    OWNERS_RESERVE_BYTES,
    PEER_RESERVE_BYTES,
    PEER_SERVER_RESERVE_BYTES,
    SCOUT_RESERVE_BYTES,
    SUMMARY_SHARE,
)
from kvdepot.server.config.peers import Peers
from kvdepot.server.config.schema import DISK_KIND, PEER_KIND, SHARED_KIND, Tables, TierTable
from kvdepot.server.depot.types import TierConfig, WritePolicy
from kvdepot.server.io.bucket import BucketSettings
from kvdepot.server.io.peer_wire import Lane, PeerSettings
from kvdepot.server.io.pool import worker_reserve_bytes
from kvdepot.server.tiers.config import CAPACITY_BYTES_MIN
from kvdepot.server.tiers.disk.config import DiskConfig
from kvdepot.server.tiers.disk.layout import DiskLayout
from kvdepot.server.tiers.object.config import ObjectConfig
from kvdepot.server.tiers.peer.config import PeerConfig
from kvdepot.server.tiers.peer.scout import summaries_bytes
from kvdepot.server.tiers.shared.config import SharedConfig


def disk_config(tables: Tables, tier: TierTable) -> DiskConfig:
    """Return the settings of one disk tier."""
    return DiskConfig(**_common(tables, tier), scrub_bytes_per_second=tables.scrub.rate)


def shared_config(tables: Tables, tier: TierTable, keys: KeyRing = NO_KEYS) -> SharedConfig:
    """Return the settings of one shared tier."""
    return SharedConfig(
        **_common(tables, tier),
        negative_ttl_seconds=tables.policy.negative_ttl,
        on_root_filesystem=tier.on_root_filesystem,
        keys=keys,
        high_watermark=tier.high_watermark,
        low_watermark=tier.low_watermark,
    )


def object_config(tables: Tables, tier: TierTable, keys: KeyRing = NO_KEYS) -> ObjectConfig:
    """Return the settings of one object tier."""
    bucket = BucketSettings(
        tier.place, tier.endpoint, tier.region, tier.allow_http, tier.credentials_file, tier.unconditional,
        tier.sign_payload,
        # The daemon's deadline comes first: it ends the worker, and with it whatever reads the arena.
        timeout_seconds=2 * tier.deadline,
    )  # fmt: skip
    return ObjectConfig(
        **_common(tables, tier),
        negative_ttl_seconds=tables.policy.negative_ttl,
        keys=keys,
        bucket=bucket,
        request_budget=tier.request_budget,
        read_budget_bytes=tier.read_budget,
    )


def peer_config(tables: Tables, tier: TierTable, peers: Peers) -> PeerConfig:
    """Return the settings of one peer tier."""
    host, port = ("", 0) if tier.peer_places else tier.peer_address
    settings = PeerSettings(
        host, port, tables.tls.cert, tables.tls.key, tables.tls.client_ca, peers.names_of(tier.tenant or None),
        # The daemon's deadline comes first: it ends the worker, and with it whatever writes to the arena.
        timeout_seconds=2 * tier.deadline, lane=tier.lane,
    )  # fmt: skip
    return PeerConfig(
        **_common(tables, tier), negative_ttl_seconds=tables.policy.negative_ttl, peer=settings,
        places=tier.peer_places, peers_max=tier.peers_at_most,
    )  # fmt: skip


def _common(tables: Tables, tier: TierTable) -> dict[str, Any]:
    """Return the fields of a `LowerTierConfig`, from three tables."""
    return {
        "name": tier.name,
        "path": Path(tier.place),
        "capacity_bytes": tier.capacity,
        "codec": tier.codec_number,
        "io_workers": tier.io_workers,
        "deadline_seconds": tier.deadline,
        "fsync": tier.fsync,
        "write_budget_bytes": tier.write_budget,
        "quarantine_keep_seconds": tables.scrub.quarantine_retention,
        "quarantine_bytes": tables.scrub.quarantine_capacity,
        "failures": tables.breaker.failures,
        "probe_seconds": tables.breaker.probe_every,
    }


def depot_tier_config(tier: TierTable) -> TierConfig:
    """Return what the depot does with the tier."""
    return TierConfig(
        write=WritePolicy(tier.write), write_bytes_per_day=tier.drive_writes_per_day * tier.capacity,
        load_weight=tier.load_weight,
        high_watermark=tier.high_watermark, low_watermark=tier.low_watermark, tenant=tier.tenant or None,
    )  # fmt: skip


def check_capacity(tables: Tables, tier: TierTable) -> None:
    """Raise ConfigError if no tier of this kind fits into the capacity."""
    if tier.kind != DISK_KIND:
        if tier.capacity < CAPACITY_BYTES_MIN:
            raise ConfigError("", "", f"expected at least {format_size(CAPACITY_BYTES_MIN)}, got {tier.capacity} bytes")
    else:
        _disk_layout(tables, tier)


def tiers_reserve_bytes(tables: Tables, capacity_bytes: int) -> int:
    """Return the memory of tiers below RAM: their processes, and their entries in the index."""
    source_bytes = PEER_SERVER_RESERVE_BYTES + worker_reserve_bytes(capacity_bytes, codec=False)
    source_bytes += capacity_bytes // SUMMARY_SHARE
    if tables.daemon.lend_nixl:
        source_bytes += NIXL_RESERVE_BYTES + worker_reserve_bytes(capacity_bytes, codec=False)
    return sum(_reserve_bytes(tables, tier, capacity_bytes) for tier in tables.tier) + (
        source_bytes if tables.daemon.listen_peers else 0
    )


def _reserve_bytes(tables: Tables, tier: TierTable, arena_bytes_max: int) -> int:
    worker_bytes = worker_reserve_bytes(arena_bytes_max, codec=tier.codec_number is not Codec.NONE)
    workers_bytes = tier.io_workers * worker_bytes
    if tier.kind != DISK_KIND:
        handles_bytes = shared_config(tables, tier).handles_max * (HANDLE_RESERVE_BYTES + FILE_RESERVE_BYTES)
        if tier.kind == PEER_KIND:
            return _peers_bytes(tier, worker_bytes, arena_bytes_max) + handles_bytes
        return workers_bytes + (COORDINATOR_RESERVE_BYTES if tier.kind == SHARED_KIND else 0) + handles_bytes
    journal_bytes = worker_reserve_bytes(0, codec=False)
    handles = _disk_layout(tables, tier).handles
    return workers_bytes + journal_bytes + OPENER_RESERVE_BYTES + handles * HANDLE_RESERVE_BYTES


def _peers_bytes(tier: TierTable, worker_bytes: int, arena_bytes_max: int) -> int:
    """Return the memory of all workers of a peer tier, and of what it and its scout know of several peers."""
    of_worker = worker_bytes + PEER_RESERVE_BYTES + (NIXL_RESERVE_BYTES if tier.lane is Lane.NIXL else 0)
    known_bytes, peers = 0, tier.peers_at_most
    if tier.peer_places:
        peers += 1  # a guest, or spare workers for one
        known_bytes = OWNERS_RESERVE_BYTES + SCOUT_RESERVE_BYTES + summaries_bytes(arena_bytes_max)
    return peers * tier.io_workers * of_worker + known_bytes


def _disk_layout(tables: Tables, tier: TierTable) -> DiskLayout:
    return DiskLayout.plan(tier.capacity, tables.scrub.quarantine_capacity)
