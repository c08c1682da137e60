"""The configuration: read strictly, refused with file, key and reason (DESIGN 8).

`load` reads a file, `embedded` is what `kvdepotd serve` uses without one.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args

from kvdepot.core.errors import ConfigError
from kvdepot.core.objectfile import Codec
from kvdepot.server.config_schema import AUTO, Tables, TierTable
from kvdepot.server.embedded_disk import NoDiskError, default_directory, tier_table
from kvdepot.server.io.pool import worker_reserve_bytes
from kvdepot.server.memory_room import (
    CAPACITY_BYTES_MIN,
    HANDLE_RESERVE_BYTES,
    MIB,
    OPENER_RESERVE_BYTES,
    arena_bytes_of,
    cgroup_limits,
    directory_bytes,
    host_bytes,
)
from kvdepot.server.tiers.disk.config import DiskConfig
from kvdepot.server.tiers.disk.layout import DiskLayout
from pydantic import BaseModel, ValidationError

EMBEDDED = "embedded default"
DISK = "disk"
"""Among the overrides: `path` and `capacity` of the only tier below RAM."""
AUTO_CAPACITY_BYTES_MAX = 4 << 30
DEFAULT_ARENA_DIRECTORY = Path("/dev/shm")  # noqa: S108 - the arena is memory, its name carries the uid
_NOT_AVAILABLE = {
    "tls": "TLS is",
    "quota": "quotas are",
    "policy.prefetch_share": "prefetching is",
    "policy.negative_ttl": "the negative cache is",
    "policy.audit_sample": "the audit is",
}
_TIER_KINDS_NOT_AVAILABLE = ("shared", "s3")


@dataclass(frozen=True, slots=True)
class Config:
    """A checked configuration. `file` names its source in messages."""

    file: str
    tables: Tables
    capacity_bytes: int
    arena_path: Path
    note: str = ""  # what the log should say beside it

    @property
    def arena_bytes(self) -> int:
        return arena_bytes_of(self.capacity_bytes, tiers_reserve_bytes(self.tables, self.capacity_bytes))

    @property
    def credit_bytes(self) -> int:
        """The configured credit, or half of a smaller arena when none is configured."""
        credit = self.tables.sessions.credit
        return credit if "credit" in self.tables.sessions.model_fields_set else min(credit, self.arena_bytes // 2)


def load(path: Path, overrides: Mapping[str, Mapping[str, Any]] | None = None) -> Config:
    """Raises ConfigError for the first thing that is wrong."""
    try:
        text = path.read_bytes().decode()
    except OSError as error:
        raise ConfigError(str(path), "", f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(str(path), "", f"is not UTF-8: {error.reason} at byte {error.start}") from error
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(str(path), "", f"is no TOML: {error}") from error
    return check(str(path), document, overrides)


def embedded(overrides: Mapping[str, Mapping[str, Any]] | None = None) -> Config:
    """A quarter of the memory, a disk tier in the user's cache, sockets in the runtime directory, a free port."""
    document: dict[str, Any] = {"daemon": {"metrics": "127.0.0.1:0", "mode": "0600"}}
    if "listen" not in (overrides or {}).get("daemon", {}):
        document["daemon"]["listen"] = [f"unix://{runtime_directory() / 'kvdepot.sock'}"]
    config = check(EMBEDDED, document, overrides)
    return config if DISK in (overrides or {}) else _with_disk(config, document, overrides)


def _with_disk(config: Config, document: dict[str, Any], overrides: Mapping[str, Mapping[str, Any]] | None) -> Config:
    """Without one, and a note, where there is no room for it."""
    try:
        table = tier_table(default_directory(config.tables.daemon.sockets[0]), None)
        return check(EMBEDDED, {**document, "tier": [table]}, overrides)
    except (NoDiskError, ConfigError) as error:
        return replace(config, note=f"no disk tier: {error}")


def check(file: str, document: dict[str, Any], overrides: Mapping[str, Mapping[str, Any]] | None = None) -> Config:
    """A parsed file, with single keys of the command line over it; DISK's stand for a whole `[[tier]]`, or none."""
    for table, keys in (overrides or {}).items():
        if table == DISK:
            document = {**document, "tier": _disk_given(file, keys)}
            continue
        document = {**document, table: {**document.get(table, {}), **keys}}
    _refuse_unavailable(file, document)
    try:
        tables = Tables.model_validate(document)
    except ValidationError as error:
        raise _config_error(file, error) from error
    arena_path = _arena_path(file, tables)
    capacity_bytes = tables.ram.capacity
    if capacity_bytes == AUTO:
        capacity_bytes = _auto_capacity_bytes(arena_path.parent)
    assert isinstance(capacity_bytes, int)
    _check_combinations(file, tables, capacity_bytes)
    return Config(file, tables, capacity_bytes, arena_path)


def _disk_given(file: str, keys: Mapping[str, Any]) -> list[dict[str, Any]]:
    """From `--disk DIR` (empty: no tier) and `--disk-capacity`."""
    if not keys.get("path"):
        return []
    try:
        return [tier_table(Path(keys["path"]), keys.get("capacity"))]
    except NoDiskError as error:
        raise ConfigError(file, "--disk", str(error)) from error


def disk_config(tables: Tables, tier: TierTable) -> DiskConfig:
    """All that one disk tier is configured with, from three tables."""
    return DiskConfig(
        name=tier.name,
        path=Path(tier.path),
        capacity_bytes=tier.capacity,
        codec=tier.codec_number,
        io_workers=tier.io_workers,
        deadline_seconds=tier.deadline,
        fsync=tier.fsync,
        write_budget_bytes=tier.write_budget,
        quarantine_keep_seconds=tables.scrub.quarantine_keep,
        quarantine_bytes=tables.scrub.quarantine_capacity,
        scrub_bytes_per_second=tables.scrub.rate,
        failures=tables.breaker.failures,
        probe_seconds=tables.breaker.probe_every,
    )


def tiers_reserve_bytes(tables: Tables, capacity_bytes: int) -> int:
    """Memory that the tiers below RAM take of its capacity: their processes, and what is known of their objects."""
    return sum(_reserve_bytes(tier, capacity_bytes, _layout(tables, tier).handles) for tier in tables.tier)


def _reserve_bytes(tier: TierTable, arena_bytes_max: int, handles: int) -> int:
    workers_bytes = tier.io_workers * worker_reserve_bytes(arena_bytes_max, codec=tier.codec_number is not Codec.NONE)
    journal_bytes = worker_reserve_bytes(0, codec=False)
    return workers_bytes + journal_bytes + OPENER_RESERVE_BYTES + handles * HANDLE_RESERVE_BYTES


def _layout(tables: Tables, tier: TierTable) -> DiskLayout:
    return DiskLayout.plan(tier.capacity, tables.scrub.quarantine_capacity)


def runtime_directory() -> Path:
    """A directory of this user alone. Raises ConfigError when somebody else could put things there."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(base, "kvdepot") if base else Path(tempfile.gettempdir(), f"kvdepot-{os.geteuid()}")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(EMBEDDED, "daemon.listen", f"cannot make {folder}: {error.strerror}") from error
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise ConfigError(
            EMBEDDED, "daemon.listen", f"{folder} is no directory that only uid {os.geteuid()} can write to",
            advice="remove it or set XDG_RUNTIME_DIR",
        )  # fmt: skip
    return folder


def _auto_capacity_bytes(directory: Path) -> int:
    """A quarter of what host, cgroup and file system have in all, at most 4 GiB.

    Totals, not what is free now: the size has to be the same at the next start, or the arena could not be adopted.
    """
    totals = [host_bytes(), directory_bytes(directory), *(limit for _, limit, _ in cgroup_limits())]
    return max(min(min(totals) // 4, AUTO_CAPACITY_BYTES_MAX) // MIB * MIB, CAPACITY_BYTES_MIN)


def _arena_path(file: str, tables: Tables) -> Path:
    directory = Path(tables.ram.path) if tables.ram.path else DEFAULT_ARENA_DIRECTORY
    if not directory.is_dir():
        raise ConfigError(file, "ram.path", f"{directory} is no directory")
    digest = hashlib.blake2b(os.fsencode(tables.daemon.sockets[0]), digest_size=6).hexdigest()
    return directory / f"kvdepot-{os.geteuid()}-{digest}.arena"


def _check_combinations(file: str, tables: Tables, capacity_bytes: int) -> None:
    _check_tiers(file, tables)
    reserve_bytes = tiers_reserve_bytes(tables, capacity_bytes)
    if capacity_bytes < CAPACITY_BYTES_MIN + reserve_bytes:
        beside = f", and {reserve_bytes // MIB} MiB of the {len(tables.tier)} tiers below" if tables.tier else ""
        raise ConfigError(
            file, "ram.capacity",
            f"{capacity_bytes // MIB} MiB are less than {(CAPACITY_BYTES_MIN + reserve_bytes) // MIB} MiB: the capacity"
            f" covers the private memory of daemon and checksum worker too{beside}",
        )  # fmt: skip
    credit_bytes = tables.sessions.credit
    arena_bytes = arena_bytes_of(capacity_bytes, reserve_bytes)
    if "credit" in tables.sessions.model_fields_set and credit_bytes > arena_bytes:
        raise ConfigError(
            file, "sessions.credit",
            f"{credit_bytes // MIB} MiB are more than the whole arena of {arena_bytes // MIB} MiB",
        )  # fmt: skip


def _check_tiers(file: str, tables: Tables) -> None:
    seen: dict[Path, str] = {}
    names: set[str] = set()
    for tier in tables.tier:
        path = Path(os.path.normpath(tier.path))
        if tier.name in names:
            raise ConfigError(file, "tier.name", f"two tiers are called {tier.name!r}")
        for other, name in seen.items():
            if path.is_relative_to(other) or other.is_relative_to(path):
                raise ConfigError(file, f"tier.{tier.name}.path", f"{path} and {other} of tier {name!r} overlap")
        if tables.ram.path and path == Path(os.path.normpath(tables.ram.path)):
            raise ConfigError(file, f"tier.{tier.name}.path", f"{path} is the directory of the arena, [ram].path")
        try:
            _layout(tables, tier)
        except ConfigError as error:
            raise ConfigError(file, f"tier.{tier.name}.capacity", error.reason) from error
        names.add(tier.name)
        seen[path] = tier.name


def _refuse_unavailable(file: str, document: Mapping[str, Any]) -> None:
    for key, what in _NOT_AVAILABLE.items():
        if _lookup(document, key) is not None:
            raise ConfigError(file, key, f"{what} not available in this version", advice="remove it")
    for tier in document.get("tier") or () if isinstance(document.get("tier"), list) else ():
        kind = tier.get("kind") if isinstance(tier, Mapping) else None
        if kind in _TIER_KINDS_NOT_AVAILABLE:
            raise ConfigError(file, "tier.kind", f"tiers of kind {kind!r} are not available in this version",
                              advice='use "disk"')  # fmt: skip


def _lookup(document: Mapping[str, Any], key: str) -> object:
    found: object = document
    for part in key.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def _config_error(file: str, error: ValidationError) -> ConfigError:
    first = error.errors()[0]
    location = [str(part) for part in first["loc"] if isinstance(part, str)]
    key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])[1:]
    if first["type"] == "extra_forbidden":
        near = get_close_matches(location[-1], _keys_beside(location), n=1, cutoff=0.0)
        return ConfigError(file, key, "is no known key", advice=f"did you mean {near[0]!r}?" if near else "remove it")
    return ConfigError(file, key, first["msg"].removeprefix("Value error, "))


def _keys_beside(location: list[str]) -> list[str]:
    model: type[BaseModel] = Tables
    for part in location[:-1]:
        table = model.model_fields[part].annotation
        table = next(iter(get_args(table)), table)  # a list of tables
        assert isinstance(table, type) and issubclass(table, BaseModel)
        model = table
    return list(model.model_fields)
