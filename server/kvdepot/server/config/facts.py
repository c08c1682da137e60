"""What follows from a configuration, for programs: `kvdepotd check-config --json`, which `kvdepotctl doctor` reads.

Keys are added, never renamed. Sizes are bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvdepot.server.config import arena_directory
from kvdepot.server.config.capacity_check import capacity_warnings
from kvdepot.server.config.peers import nixl_keys
from kvdepot.server.platform.addresses import host_and_port, url_address

if TYPE_CHECKING:
    from kvdepot.core.errors import KvDepotError
    from kvdepot.server.config.config import Config


def facts(config: Config, refused: KvDepotError | None = None) -> dict[str, Any]:
    """Return what follows from a configuration.

    `refused` is why this host refuses a start. A refusal by permissions may not hold for another user.
    """
    daemon = config.tables.daemon
    return {
        "file": config.file,
        "note": config.note,
        "refused": "" if refused is None else str(refused),
        "refused_by_permissions": refused is not None and isinstance(refused.__cause__, PermissionError),
        "warnings": list(capacity_warnings(config)),
        "uses_nixl": bool(nixl_keys(config.tables)),
        "daemon": {
            "listen": list(daemon.listen),
            "mode": daemon.mode_bits,
            "group_id": daemon.group_id,
            "metrics": url_address(*host_and_port(daemon.metrics)) if daemon.metrics else "",
        },
        "ram": {
            "capacity_bytes": config.capacity_bytes,
            "arena_bytes": config.arena_bytes,
            "arena_file_bytes": config.arena_file_bytes,
            "arena_path": str(config.arena_path),
            "created_in": "" if config.tables.ram.path else str(arena_directory.BASE),
            "sealed": config.tables.ram.sealed,
        },
        "tiers": [
            {
                "name": tier.name,
                "kind": tier.kind,
                "path": tier.place,
                "capacity_bytes": tier.capacity,
                "on_root_filesystem": tier.on_root_filesystem,
                "keyed": bool(tier.key_file),
            }
            for tier in config.tables.tier
        ],
    }
