"""The tables of the configuration file: every key, its type, default and range (design.md#configuration).

Each refusal says what is wrong, what was expected, and the value. It never corrects a value.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from string import hexdigits
from typing import Annotated, Final, Literal, Self
from urllib.parse import urlsplit

from kvdepot.core.arena import SESSIONS_MAX
from kvdepot.core.hit_rate import ENGINE, OTHER_SOURCE
from kvdepot.core.limits import LABEL_BYTES_MAX, TENANT_BYTES_MAX
from kvdepot.core.objectfile import Codec
from kvdepot.core.printable import control_character
from kvdepot.core.units import parse_duration_seconds, parse_rate_bytes_per_second, parse_size_bytes
from kvdepot.core.write_admission import DRIVE_WRITES_PER_DAY
from kvdepot.server.config.bucket_keys import BucketKeys
from kvdepot.server.config.daemon_table import DEFAULT_SOCKET as DEFAULT_SOCKET  # part of this page
from kvdepot.server.config.daemon_table import DaemonTable as DaemonTable
from kvdepot.server.config.operators import GROUP_MARK
from kvdepot.server.config.peer_keys import PEER_KIND as PEER_KIND
from kvdepot.server.config.peer_keys import PeerKeys
from kvdepot.server.config.table import Table
from kvdepot.server.config.tls import TlsTable, check_name
from kvdepot.server.depot.types import EVERY, ID_DIGITS
from pydantic import BeforeValidator, Field, field_validator, model_validator

STREAM_SUFFIX = ".stream-"
"""Suffix of the socket of a stream's proxy; a number follows."""
DATA_SUFFIX = ".data"
"""Suffix of the file of the arena's data, next to its tables, where it is not sealed."""
GENERATIONS_SUFFIX = ".generations"
"""Suffix of the file of the generations, likewise."""
HOLD_SUFFIX = ".hold"
"""Suffix of the holder's socket, next to the tables."""
AUTO: Literal["auto"] = "auto"
NONE = "none"
DISK_KIND: Final = "disk"
SHARED_KIND: Final = "shared"
OBJECT_KIND: Final = "object"
TENANTS_MAX: Final = 64
_CODECS = {"none": Codec.NONE, "lz4": Codec.LZ4, "bitshuffle-lz4": Codec.BITSHUFFLE_LZ4}


def _text(parse: Callable[[str], object], example: str) -> BeforeValidator:
    """Return a validator that parses a string with a unit, and refuses a bare number."""

    def check(value: object) -> object:
        if not isinstance(value, str):
            raise ValueError(f'expected a string with a unit such as "{example}", got {value!r}')
        return parse(value)

    return BeforeValidator(check)


def _none_or_count(value: object) -> object:
    if value == NONE:
        return None
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f'expected a whole number or "{NONE}", got {value!r}')
    return value


def _none_or_size(text: str) -> int | None:
    return None if text == NONE else parse_size_bytes(text)


def _auto_or_size(text: str) -> int | Literal["auto"]:
    return AUTO if text == AUTO else parse_size_bytes(text)


Size = Annotated[int, _text(parse_size_bytes, "64GiB"), Field(gt=0)]
CountOrNone = Annotated[Annotated[int, Field(gt=4)] | None, BeforeValidator(_none_or_count)]
"""A start takes four requests to a bucket."""
SizeOrNone = Annotated[Annotated[int, Field(gt=0)] | None, _text(_none_or_size, "64GiB")]
Rate = Annotated[int, _text(parse_rate_bytes_per_second, "50MiB/s"), Field(ge=0)]
AutoSize = Annotated[int | Literal["auto"], _text(_auto_or_size, "64GiB")]
Seconds = Annotated[float, _text(parse_duration_seconds, "120s"), Field(ge=0)]
Share = Annotated[float, Field(gt=0, le=1)]


class OperatorsTable(Table):
    """The table `[operators]`."""

    admins: list[str] = Field(default=[], max_length=256)
    readers: list[str] = Field(default=[], max_length=256)

    @field_validator("admins", "readers")
    @classmethod
    def _check_names(cls, names: list[str]) -> list[str]:
        for name in names:
            if not name.removeprefix(GROUP_MARK):
                raise ValueError(f'expected a user, or "{GROUP_MARK}" and a group, got {name!r}')
        return names


class TenantTable(Table):
    """One `[[tenant]]`. `name` is required, and one user or group."""

    name: str = Field(min_length=1)
    users: list[str] = Field(default=[], max_length=4096)
    groups: list[str] = Field(default=[], max_length=256)
    peers: list[str] = Field(default=[], max_length=256)
    ram: SizeOrNone = None
    credit: SizeOrNone = None
    sessions: int = Field(default=0, ge=0, le=SESSIONS_MAX)  # 0: an equal part

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if name == EVERY or control_character(name):
            raise ValueError(f"expected a name without control characters, and not {EVERY!r}, got {name!r}")
        return _short(name, TENANT_BYTES_MAX)

    @field_validator("users", "groups")
    @classmethod
    def _check_members(cls, names: list[str]) -> list[str]:
        if "" in names:
            raise ValueError("expected names or ids, got an empty text")
        return names

    @field_validator("peers")
    @classmethod
    def _check_peers(cls, names: list[str]) -> list[str]:
        return [check_name(name) for name in names]

    @model_validator(mode="after")
    def _check_somebody(self) -> Self:
        if not self.users and not self.groups:
            raise ValueError("has neither users nor groups, so nobody would be in it")
        return self


class AuditTable(Table):
    """The table `[audit]`."""

    path: str = ""

    @field_validator("path")
    @classmethod
    def _check_path(cls, path: str) -> str:
        if path and (not Path(path).is_absolute() or path.endswith("/")):
            raise ValueError(f"expected the absolute path of a file, got {path!r}")
        return path


class _WatermarkTable(Table):
    """Shares of a tier: eviction starts above the high watermark, and stops at the low one."""

    high_watermark: Share = 0.95
    low_watermark: Share = 0.90

    @model_validator(mode="after")
    def _check_watermarks(self) -> Self:
        if self.low_watermark >= self.high_watermark:
            raise ValueError(f"low_watermark {self.low_watermark} is not below high_watermark {self.high_watermark}")
        return self


class RamTable(_WatermarkTable):
    """The table `[ram]`."""

    capacity: AutoSize = AUTO
    path: str = ""
    sealed: bool = True

    @field_validator("path")
    @classmethod
    def _check_path(cls, path: str) -> str:
        if path and not Path(path).is_absolute():
            raise ValueError(f"expected the absolute path of a directory, got {path!r}")
        return path


class SessionsTable(Table):
    """The table `[sessions]`."""

    credit: Size = 2 << 30
    grace: Seconds = 60.0
    streams: int = Field(default=8, ge=0, le=256)


class PolicyTable(Table):
    """The table `[policy]`."""

    eviction: Literal["adaptive", "gdsf", "lru"] = "adaptive"
    prefetch_share: float = Field(default=0.25, ge=0, le=1)
    pin_share: float = Field(default=0.25, ge=0, le=0.9)
    loads_in_flight: int = Field(default=64, ge=1, le=4096)
    lease_deadline: Annotated[Seconds, Field(gt=0)] = 120.0
    negative_ttl: Seconds = 2.0
    audit_sample: float = Field(default=0.0, ge=0, le=1)


_OF_BUCKETS: Final = (*BucketKeys.model_fields, "read_budget", "request_budget")


class TierTable(BucketKeys, PeerKeys, _WatermarkTable):
    """One `[[tier]]`. Required are name, kind, capacity, and path or url."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_-]{0,31}$")
    kind: Literal["disk", "shared", "object", "peer"]
    path: str = ""
    capacity: Size
    write: Literal["auto", "commit", "evict", "second_use"] = "second_use"
    drive_writes_per_day: float = Field(default=DRIVE_WRITES_PER_DAY, ge=0, le=1000)
    write_budget: SizeOrNone = None
    read_budget: SizeOrNone = None
    request_budget: CountOrNone = None
    codec: Literal["none", "lz4", "bitshuffle-lz4"] = "none"
    io_workers: int = Field(default=2, ge=1, le=16)
    deadline: Annotated[Seconds, Field(gt=0)] = 10.0
    load_weight: float = Field(default=1.0, ge=0, le=1000)
    fsync: bool = False
    on_root_filesystem: bool = False
    key_file: str = ""

    @field_validator("path")
    @classmethod
    def _check_path(cls, path: str) -> str:
        if path and not Path(path).is_absolute():
            raise ValueError(f"expected the absolute path of a directory, got {path!r}")
        return path

    @field_validator("key_file")
    @classmethod
    def _check_key_file(cls, path: str) -> str:
        if path and (not Path(path).is_absolute() or path.endswith("/")):
            raise ValueError("expected the absolute path of a file with a key")  # without the value: it may be a key
        return path

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if name == "ram":
            raise ValueError("'ram' is the name of the RAM tier: choose another name")
        if name in (ENGINE, OTHER_SOURCE):
            raise ValueError(f"{name!r} is the name of another source of tokens in metrics: choose another name")
        return name

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        if self.on_root_filesystem and self.kind != SHARED_KIND:
            raise ValueError(f'on_root_filesystem needs kind = "{SHARED_KIND}"')
        if self.key_file and self.kind == DISK_KIND:
            raise ValueError(f'key_file needs kind = "{SHARED_KIND}": a disk tier is its daemon\'s alone')
        if self.write == AUTO and self.kind != DISK_KIND:
            raise ValueError(f'write = "{AUTO}" needs kind = "{DISK_KIND}": others have no drive of this daemon')
        if self.drive_writes_per_day != DRIVE_WRITES_PER_DAY and self.write != AUTO:
            raise ValueError(f'drive_writes_per_day needs write = "{AUTO}"')
        self.check_peer()
        if self.kind == PEER_KIND:
            return self
        if self.kind != OBJECT_KIND:
            fields = type(self).model_fields
            if given := [name for name in _OF_BUCKETS if getattr(self, name) != fields[name].default]:
                raise ValueError(f'{given[0]} needs kind = "{OBJECT_KIND}"')
            if not self.path:
                raise ValueError("path is required: the absolute path of a directory")
            return self
        if self.path or not self.url:
            raise ValueError(f'kind = "{OBJECT_KIND}" needs url instead of path')
        self.check_bucket()
        return self

    @property
    def place(self) -> str:
        """Return where the objects lie, for people: the path, or the URL with its prefix."""
        return "/".join(part for part in (self.url, self.prefix) if part) or self.path

    @property
    def codec_number(self) -> Codec:
        return _CODECS[self.codec]


class BreakerTable(Table):
    """The table `[breaker]`."""

    failures: int = Field(default=5, ge=1, le=1000)
    probe_every: Annotated[Seconds, Field(gt=0)] = 5.0


class ScrubTable(Table):
    """The table `[scrub]`."""

    rate: Rate = 50 << 20
    quarantine_retention: Seconds = 7 * 86400.0
    quarantine_capacity: Size = 10 << 30


class QuotaTable(Table):
    """One `[[quota]]`. `capacity` is required."""

    tenant: str = EVERY
    namespace: str | None = Field(default=None, min_length=1)
    tier: str = EVERY
    capacity: SizeOrNone

    @field_validator("tenant")
    @classmethod
    def _check_tenant(cls, name: str) -> str:
        return _short(name, TENANT_BYTES_MAX)

    @field_validator("namespace")
    @classmethod
    def _check_namespace(cls, name: str | None) -> str | None:
        if name is not None and set(name) <= set(hexdigits) and not ID_DIGITS.fullmatch(name.lower()):
            raise ValueError(f"expected a label, or the first 8 to 32 digits of a namespace's id, got {name!r}")
        if name is None or set(name) <= set(hexdigits):
            return name and name.lower()
        return _short(name, LABEL_BYTES_MAX)


class LogTable(Table):
    """The table `[log]`."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["text", "json"] = "text"


class TraceTable(Table):
    """The table `[trace]`."""

    endpoint: str = ""
    sample: Share = 1.0

    @field_validator("endpoint")
    @classmethod
    def _check_endpoint(cls, url: str) -> str:
        try:
            parts = urlsplit(url)
            usable = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
        except ValueError:
            usable = False
        if url and not usable:
            raise ValueError(f"expected an http:// or https:// URL, got {url!r}")
        return url


class Tables(Table):
    """The whole file."""

    daemon: DaemonTable = DaemonTable()
    ram: RamTable = RamTable()
    sessions: SessionsTable = SessionsTable()
    tier: list[TierTable] = Field(default=[], max_length=8)
    policy: PolicyTable = PolicyTable()
    breaker: BreakerTable = BreakerTable()
    scrub: ScrubTable = ScrubTable()
    quota: list[QuotaTable] = Field(default=[], max_length=256)
    tenant: list[TenantTable] = Field(default=[], max_length=TENANTS_MAX)
    operators: OperatorsTable = OperatorsTable()
    audit: AuditTable = AuditTable()
    log: LogTable = LogTable()
    trace: TraceTable = TraceTable()
    tls: TlsTable = TlsTable()


def _short(text: str, bytes_max: int) -> str:
    length = len(text.encode())
    if length > bytes_max:
        raise ValueError(f"expected at most {bytes_max} bytes, got {length}")
    return text
