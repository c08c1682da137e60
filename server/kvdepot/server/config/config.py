"""The configuration: read strictly, refused with file, key and reason (design.md#configuration).

`load` reads a file, and `embedded` is the configuration of `kvdepotd serve` without a file. Environment variables
override both, and options of the command line override the variables.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from kvdepot.core import runtime
from kvdepot.core.arena import SIZE_BYTES_MAX, ArenaLayout
from kvdepot.core.errors import ConfigError, together
from kvdepot.core.object_keys import KeyRing
from kvdepot.core.proc_text import HUGETLBFS
from kvdepot.core.ram_size import arena_bytes_of
from kvdepot.server.config import arena_directory, environment
from kvdepot.server.config.bucket_keys import NO_LIBRARY, has_library
from kvdepot.server.config.embedded_disk import NoDiskError, default_directory, tier_table
from kvdepot.server.config.environment import Variable
from kvdepot.server.config.memory_room import (
    CAPACITY_BYTES_MIN,
    MIB,
    cgroup_limits,
    directory_bytes,
    file_system,
    host_bytes,
    in_memory_alone,
)
from kvdepot.server.config.operators import Operators, Role, resolve
from kvdepot.server.config.peers import NO_PEERS, Peers, check_peers, peers_key, resolve_peers
from kvdepot.server.config.places import check_places
from kvdepot.server.config.schema import AUTO, DISK_KIND, OBJECT_KIND, PEER_KIND, SHARED_KIND, Tables
from kvdepot.server.config.tenants import Tenants, check_tenants, parts_of, resolve_tenants
from kvdepot.server.config.tier_settings import check_capacity, tiers_reserve_bytes
from kvdepot.server.config.tls import check_tls
from kvdepot.server.config.validation import validated
from kvdepot.server.depot.types import EVERY
from kvdepot.server.platform.addresses import TCP

EMBEDDED = "embedded default"
DISK = "disk"
"""Among the overrides: `path` and `capacity` of the only tier below RAM."""
AUTO_CAPACITY_BYTES_MAX = 4 << 30
_TIER_KINDS_NOT_AVAILABLE = ("s3",)


@dataclass(frozen=True, slots=True)
class Config:
    """A checked configuration. `file` names its source in messages."""

    file: str
    tables: Tables
    capacity_bytes: int
    arena_path: Path
    note: str = ""  # what the log should say in addition
    sources: Mapping[str, tuple[object, str]] = field(default_factory=dict)
    """By key ("ram.capacity", "tier.nvme.write") that has no default, or another value: as it was given, and where."""
    operators: Operators = field(default_factory=lambda: resolve((), ()))
    tenants: Tenants = field(default_factory=Tenants)
    peers: Peers = NO_PEERS
    keys: Mapping[str, KeyRing] = field(default_factory=dict)
    """By tier, of those with a `key_file`; empty before `key_files.with_keys` has read them."""

    @property
    def state_path(self) -> Path:
        """Return the path of the state file for operator settings."""
        state = self.tables.daemon.state
        return Path(state) if state else self.arena_path.with_name(f"{self.arena_path.name}.state")

    def placed(self) -> Config:
        """Return this configuration with an arena directory that is there: make the default one. Raise ConfigError."""
        if self.tables.ram.path:
            return self
        name = self.arena_path.name
        return replace(self, arena_path=arena_directory.make(name, self.file) / name)

    @property
    def arena_bytes(self) -> int:
        return arena_bytes_of(self.capacity_bytes, tiers_reserve_bytes(self.tables, self.capacity_bytes))

    @property
    def arena_purpose(self) -> bytes:
        """Return a digest of what an arena is made for. With the same purpose, only the tiers below RAM differ.

        The size is a part of it where a mount reserves memory in huge pages: what is not used could not be freed.
        """
        tenants = sorted((one.name, one.ram or 0) for one in self.tables.tenant)
        huge = self.arena_bytes if file_system(self.arena_path.parent) == HUGETLBFS else 0
        purpose = repr((self.capacity_bytes, tenants if len(tenants) > 1 else [], huge))
        return hashlib.blake2b(purpose.encode(), digest_size=16).digest()

    @property
    def arena_layout(self) -> ArenaLayout:
        return ArenaLayout.plan(self.arena_bytes, divided=tuple(self.parts.values()))

    @property
    def parts(self) -> dict[str, int]:
        """Return the bytes of data of each tenant, in the order of their names; empty: all data is one file."""
        return parts_of(self.tables.tenant, _layout(self.arena_bytes).data_bytes)

    @property
    def arena_file_bytes(self) -> int:
        """Return what the arena takes of the file system of `[ram] path`."""
        alone = in_memory_alone(self.arena_path.parent, sealed=self.tables.ram.sealed)
        return _layout(self.arena_bytes).tables_bytes if alone else self.arena_bytes

    @property
    def credit_bytes(self) -> int:
        """Return the configured credit; without one, at most half of the arena."""
        credit = self.tables.sessions.credit
        return credit if "credit" in self.tables.sessions.model_fields_set else min(credit, self.arena_bytes // 2)


def load(
    path: Path, overrides: Mapping[str, Mapping[str, Any]] | None = None, variables: Sequence[Variable] = (),
    running_bytes: int | None = None,
) -> Config:  # fmt: skip
    """Return the configuration of a file. Raise ConfigError.

    `running_bytes`: the capacity that "auto" has been in a daemon that runs, where its file is read again.
    """
    file = str(path).encode("utf-8", "backslashreplace").decode()  # it is told to others, who read UTF-8
    try:
        text = path.read_bytes().decode()
    except OSError as error:
        raise ConfigError(file, "", f"cannot be read: {error.strerror}", of_host=True) from error
    except UnicodeDecodeError as error:
        raise ConfigError(file, "", f"is not UTF-8: {error.reason} at byte {error.start}") from error
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also of numbers and nesting beyond Python's limits
        raise ConfigError(file, "", f"is no TOML: {error}") from error
    return check(file, document, overrides, variables, running_bytes)


def embedded(overrides: Mapping[str, Mapping[str, Any]] | None = None, variables: Sequence[Variable] = ()) -> Config:
    """Return the default configuration: a quarter of the memory, a disk tier in the user's cache, and a free port."""
    document: dict[str, Any] = {"daemon": {"metrics": "127.0.0.1:0", "mode": "0600"}}
    elsewhere = any((one.table, one.key) == ("daemon", "listen") for one in variables)
    if not elsewhere and "listen" not in (overrides or {}).get("daemon", {}):
        document["daemon"]["listen"] = [f"unix://{runtime_directory() / 'kvdepot.sock'}"]
    if DISK in (overrides or {}):
        return check(EMBEDDED, document, overrides, variables)
    config = check(EMBEDDED, document, overrides, [one for one in variables if not one.tier])
    return _with_disk(config, document, overrides, variables)


def _with_disk(
    config: Config, document: dict[str, Any], overrides: Mapping[str, Mapping[str, Any]] | None,
    variables: Sequence[Variable],
) -> Config:  # fmt: skip
    """Return the configuration with the default disk tier, or without it and with a note."""
    try:
        table = tier_table(default_directory(config.tables.daemon.sockets[0]), None)
        return check(EMBEDDED, {**document, "tier": [table]}, overrides, variables)
    except (NoDiskError, ConfigError) as error:
        if isinstance(error, ConfigError) and error.file == environment.SOURCE:
            raise
        return replace(config, note=f"no disk tier: {error}")


def check(
    file: str, document: dict[str, Any], overrides: Mapping[str, Mapping[str, Any]] | None = None,
    variables: Sequence[Variable] = (), running_bytes: int | None = None,
) -> Config:  # fmt: skip
    """Return the configuration of a parsed file, with the environment over it, and the command line over both.

    The keys of DISK replace all of `[[tier]]`. An error that a variable caused names the variable. `running_bytes`: as
    of `load`.
    """
    merged, names = _merged(file, document, overrides, variables)
    try:
        config = _checked(file, merged, running_bytes)
    except ConfigError as error:
        told = together([_blaming_variables(one, names) for one in error.all])
        raise told from (error.__cause__ if told is error else error)
    return replace(config, sources=_sources(merged, names, overrides or {}))


def _blaming_variables(error: ConfigError, names: Mapping[str, str]) -> ConfigError:
    blamed = {name for key, name in names.items() if f"{key}.".startswith(f"{error.key}.")}
    if not blamed:
        return error
    variable = ", ".join(sorted(blamed))
    return ConfigError(environment.SOURCE, variable, error.reason, advice=error.advice, of_host=error.of_host)


def _merged(
    file: str, document: dict[str, Any], overrides: Mapping[str, Mapping[str, Any]] | None,
    variables: Sequence[Variable],
) -> tuple[dict[str, Any], dict[str, str]]:  # fmt: skip
    """Return the document, and the variables that have set keys, by key."""
    _refuse_unavailable(file, document)
    names: dict[str, str] = {}
    if variables or overrides:
        validated(file, document)  # what is no table, or no list of tables, could not be looked through
    if variables:
        document, names = environment.applied(document, variables)
    for table, keys in (overrides or {}).items():
        if table == DISK:
            document = {**document, "tier": _disk_given(file, keys)}
            names = {key: name for key, name in names.items() if not key.startswith("tier")}
            continue
        merged = {**document.get(table, {}), **keys}
        if table == "daemon" and "listen" in keys:  # sockets are replaced: addresses for other hosts stay
            former = document.get(table, {}).get("listen", [])
            merged["listen"] = [*keys["listen"], *(url for url in former if str(url).startswith(TCP))]
        document = {**document, table: merged}
        names = {key: name for key, name in names.items() if key not in {f"{table}.{one}" for one in keys}}
    return document, names


def _sources(
    document: Mapping[str, Any], names: Mapping[str, str], overrides: Mapping[str, Mapping[str, Any]]
) -> dict[str, tuple[object, str]]:
    found: dict[str, tuple[object, str]] = {}

    def note(prefix: str, keys: Mapping[str, Any], given: Iterable[str]) -> None:
        for key, value in keys.items():
            source = "command line" if key in given else names.get(f"{prefix}.{key}", "file")
            found[f"{prefix}.{key}"] = (value, source)

    for table, keys in document.items():
        if table in ("tier", "tenant"):
            for one in keys:
                note(f"{table}.{one['name']}", one, one if table == "tier" and DISK in overrides else ())
        elif table == "quota":
            for number, quota in enumerate(keys):
                note(f"quota[{number}]", quota, ())
        else:
            note(table, keys, overrides.get(table, ()))
    return found


def _checked(file: str, document: Mapping[str, Any], running_bytes: int | None) -> Config:
    tables = validated(file, document)
    arena_path = _arena_path(file, tables)
    capacity_bytes, note = _capacity(file, tables, arena_path.parent, running_bytes)
    named = {Role.ADMIN: tables.tls.allow_admins, Role.READER: tables.tls.allow_readers}
    operators = replace(resolve(tables.operators.admins, tables.operators.readers), names=named)
    config = Config(file, tables, capacity_bytes, arena_path, note, operators=operators)
    errors: list[ConfigError] = []
    for check in (
        partial(_check_tiers, file, tables),
        partial(check_quotas, file, tables),
        partial(_check_sizes, file, tables, capacity_bytes),
        partial(check_tls, file, tables.tls, listening=bool(tables.daemon.tcp_addresses), peers=peers_key(tables)),
        partial(check_peers, file, tables),
        partial(check_places, file, tables, arena_path, config.state_path),
        partial(_check_library, file, tables),
    ):
        try:
            check()
        except ConfigError as error:
            errors.append(error)
    try:
        tenants, peers = resolve_tenants(file, tables.tenant), resolve_peers(file, tables)
    except ConfigError as error:
        errors.append(error)
    if errors:
        raise together(errors)
    return replace(config, tenants=tenants, peers=peers)


def _disk_given(file: str, keys: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the tiers of `--disk DIR` (empty: none) and `--disk-capacity`."""
    if not keys.get("path"):
        return []
    try:
        return [tier_table(Path(keys["path"]), keys.get("capacity"))]
    except NoDiskError as error:
        raise ConfigError(file, "--disk", str(error), of_host=True) from error


def runtime_directory() -> Path:
    """Create and return a directory of this user alone. Raise ConfigError if another user may write to it."""
    try:
        folder = Path(runtime.runtime_directory(os.environ, tempfile.gettempdir, os.geteuid()))
    except OSError as error:
        raise ConfigError(
            EMBEDDED, "daemon.listen", "there is neither XDG_RUNTIME_DIR nor a writable temporary directory",
            advice="set XDG_RUNTIME_DIR to a directory of this user, or use --socket", of_host=True,
        ) from error  # fmt: skip
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            EMBEDDED, "daemon.listen", f"cannot create {folder}: {error.strerror}", of_host=True
        ) from error
    found = folder.lstat()
    if not runtime.only_writer(os.geteuid(), found.st_mode, found.st_uid):
        raise ConfigError(
            EMBEDDED, "daemon.listen", f"{folder} is not a directory that only uid {os.geteuid()} can write to",
            advice="delete it, or set XDG_RUNTIME_DIR", of_host=True,
        )  # fmt: skip
    return folder


def _layout(arena_bytes: int) -> ArenaLayout:
    """Return the layout of an arena of this size. No host has room for one above the limit, and a start says so."""
    return ArenaLayout.plan(min(arena_bytes, SIZE_BYTES_MAX))


def _capacity(file: str, tables: Tables, directory: Path, running_bytes: int | None) -> tuple[int, str]:
    """Return the capacity of RAM, and what the log should say of it.

    "auto" may have become too little for the file while a daemon runs, because a memory limit was lowered. That is
    refused at the next start, and says nothing against other changes of the file.
    """
    capacity_bytes = tables.ram.capacity
    if capacity_bytes != AUTO:
        assert isinstance(capacity_bytes, int)
        return capacity_bytes, ""
    auto_bytes = _auto_capacity_bytes(directory, sealed=tables.ram.sealed)
    if running_bytes is None:
        return auto_bytes, ""
    try:
        _check_sizes(file, tables, auto_bytes)
    except ConfigError as error:
        return running_bytes, f"the next start of the daemon will be refused: {error.key}: {error.reason}"
    return auto_bytes, ""


def _auto_capacity_bytes(directory: Path, *, sealed: bool) -> int:
    """Return a quarter of the memory of host, cgroup and, for a file, its file system, at most 4 GiB.

    Totals count, not free memory: the size must be the same at the next start, or the arena could not be adopted.
    """
    totals = [host_bytes(), *(limit for _, limit, _ in cgroup_limits())]
    if not in_memory_alone(directory, sealed=sealed):
        totals.append(directory_bytes(directory))
    return max(min(min(totals) // 4, AUTO_CAPACITY_BYTES_MAX) // MIB * MIB, CAPACITY_BYTES_MIN)


def _arena_path(file: str, tables: Tables) -> Path:
    """Return the path of the arena. The default directory may not be there yet."""
    directory = Path(tables.ram.path) if tables.ram.path else arena_directory.BASE
    if not os.path.isdir(directory):  # noqa: PTH112 - Path's raises where it may not look
        raise ConfigError(file, "ram.path", f"{directory} is not a directory", of_host=True)
    digest = hashlib.blake2b(os.fsencode(tables.daemon.sockets[0]), digest_size=6).hexdigest()
    name = f"kvdepot-{os.geteuid()}-{digest}.arena"
    return (directory if tables.ram.path else arena_directory.choose(name)) / name


def _check_sizes(file: str, tables: Tables, capacity_bytes: int) -> None:
    """Refuse sizes that do not fit together. With `capacity = "auto"` they may fit on another host."""
    of_host = tables.ram.capacity == AUTO
    reserve_bytes = tiers_reserve_bytes(tables, capacity_bytes)
    if capacity_bytes < CAPACITY_BYTES_MIN + reserve_bytes:
        beside = f", and {reserve_bytes // MIB} MiB for lower tiers and peers" if reserve_bytes else ""
        raise ConfigError(
            file, "ram.capacity",
            f"expected at least {(CAPACITY_BYTES_MIN + reserve_bytes) // MIB} MiB, got {capacity_bytes // MIB} MiB: the"
            f" capacity includes the private memory of daemon and checksum worker{beside}", of_host=of_host,
        )  # fmt: skip
    credit_bytes = tables.sessions.credit
    arena_bytes = arena_bytes_of(capacity_bytes, reserve_bytes)
    check_tenants(file, tables, _layout(arena_bytes).data_bytes)
    if "credit" in tables.sessions.model_fields_set and credit_bytes > arena_bytes:
        raise ConfigError(
            file, "sessions.credit",
            f"expected at most the whole arena of {arena_bytes // MIB} MiB, got {credit_bytes // MIB} MiB",
            of_host=of_host,
        )  # fmt: skip


def _check_tiers(file: str, tables: Tables) -> None:
    names: set[str] = set()
    for tier in tables.tier:
        if tier.name in names:
            raise ConfigError(file, "tier.name", f"two tiers have the name {tier.name!r}")
        names.add(tier.name)
        try:
            check_capacity(tables, tier)
        except ConfigError as error:
            raise ConfigError(file, f"tier.{tier.name}.capacity", error.reason) from error


def _check_library(file: str, tables: Tables) -> None:
    if any(tier.kind == OBJECT_KIND for tier in tables.tier) and not has_library():
        raise ConfigError(file, "tier.kind", NO_LIBRARY, advice="pip install 'kvdepot[object]'", of_host=True)


def check_quotas(file: str, tables: Tables) -> None:
    """Raise ConfigError for quotas that contradict each other or the tiers."""
    tiers = [EVERY, "ram", *(tier.name for tier in tables.tier if tier.kind == DISK_KIND)]
    shared = [tier.name for tier in tables.tier if tier.kind != DISK_KIND]
    seen: dict[tuple[str, str | None, str], int] = {}
    for number, quota in enumerate(tables.quota):
        if quota.tier in shared:
            raise ConfigError(
                file, f"quota[{number}].tier", f"{quota.tier!r} is a shared tier, which other nodes use too",
                advice=f"choose one of: {', '.join(tiers)}",
            )  # fmt: skip
        if quota.tier not in tiers:
            raise ConfigError(
                file, f"quota[{number}].tier", f"there is no tier {quota.tier!r}",
                advice=f"choose one of: {', '.join(tiers)}",
            )  # fmt: skip
        names = [EVERY, *(tenant.name for tenant in tables.tenant)]
        if tables.tenant and quota.tenant not in names:
            raise ConfigError(
                file, f"quota[{number}].tenant", f"there is no tenant {quota.tenant!r}",
                advice=f"choose one of: {', '.join(names)}",
            )  # fmt: skip
        first = seen.setdefault((quota.tenant, quota.namespace, quota.tier), number)
        if first != number:
            raise ConfigError(file, f"quota[{number}]", f"has the same tenant, namespace and tier as quota[{first}]")


def _refuse_unavailable(file: str, document: Mapping[str, Any]) -> None:
    for tier in document.get("tier") or () if isinstance(document.get("tier"), list) else ():
        kind = tier.get("kind") if isinstance(tier, Mapping) else None
        if kind in _TIER_KINDS_NOT_AVAILABLE:
            raise ConfigError(file, "tier.kind", f"tiers of kind {kind!r} are not available in this version",
                              advice=f'use "{DISK_KIND}", "{SHARED_KIND}", "{OBJECT_KIND}", "{PEER_KIND}"')  # fmt: skip
