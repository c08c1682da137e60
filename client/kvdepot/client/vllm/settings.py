"""The connector's settings: `kv_connector_extra_config` of vLLM's KV transfer config (DESIGN 7).

An unknown key, a wrong type or a value out of bounds is the operator's error and is
refused at engine start with the nearest key or the bounds.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from kvdepot.client.attachment import Transport
from kvdepot.client.endpoint import Endpoint, EndpointError
from kvdepot.core.errors import ConfigError

WHERE: Final = "kv_connector_extra_config"
AUDIT_VARIABLE: Final = "KVDEPOT_AUDIT_PATH"

# Bounds, inclusive, in the key's unit.
_BOUNDS: Final[Mapping[str, tuple[float, float]]] = {
    "chunk_tokens": (1, 1 << 20),
    "lookup_timeout_seconds": (0.0, 5.0),
    "load_timeout_seconds": (0.1, 3600.0),
    "min_load_tokens": (1, 1 << 24),
    "load_weight": (0.0, 1000.0),
    "max_pinned_blocks": (1, 1 << 24),
    "loads_in_flight": (1, 4096),
}


@dataclass(frozen=True, slots=True)
class Settings:
    """All keys with their defaults; only `endpoint` has none."""

    endpoint: Endpoint
    chunk_tokens: int | None = None  # None: the planner's default for the model's groups
    lookup_timeout_seconds: float = 0.05
    load_timeout_seconds: float = 30.0  # from allocation to the last rank's copy
    min_load_tokens: int = 64  # a shorter hit costs more than recomputing it
    load_weight: float = 1.0  # 0: offer nothing; a second of loading is worth so many of computing
    loads_in_flight: int = 48  # below the daemon's own limit (64): it hears of a load's end a moment later
    lease_ahead: bool = True  # what a lookup finds in RAM is leased with its answer
    store_decode: bool = True  # generated tokens are stored too
    max_pinned_blocks: int = 4096  # engine blocks held by copies in progress; at most a quarter of them all
    transport: Transport = Transport.AUTO
    model_revision: str = ""  # names the weights when their files are not on this node
    weights_version: str = ""  # names weights changed in place; without it each reset draws a new epoch
    keep_across_sleep: bool = False
    tenant: str = ""
    experimental_cuda: bool = False  # copies on GPUs, until they have been tried on one
    audit_path: str = ""  # JSON lines of what was stored and loaded, with digests; for tests and audits


def parse_settings(extra: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> Settings:
    """Settings from the engine's configuration. Raises ConfigError for anything it does not understand."""
    known = {field.name for field in fields(Settings)} | {"tls"}
    for key in extra:
        if key not in known:
            near = difflib.get_close_matches(str(key), sorted(known), n=1, cutoff=0.0)
            raise ConfigError(WHERE, str(key), "no such key", advice=f"did you mean {near[0]!r}?")
    if not extra.get("endpoint"):
        raise ConfigError(WHERE, "endpoint", "missing", advice="write unix:///run/kvdepot/kvdepot.sock")
    if extra.get("tls"):
        raise ConfigError(WHERE, "tls", "not supported in this version", advice="remove it: unix sockets need none")
    values: dict[str, Any] = {}
    for field in fields(Settings):
        if field.name in extra and field.name != "endpoint":
            values[field.name] = _checked(field.name, field.default, extra[field.name])
    if "transport" in values:
        values["transport"] = _transport(values["transport"])
    values.setdefault("audit_path", environment.get(AUDIT_VARIABLE, ""))
    try:
        endpoint = Endpoint.parse(str(extra["endpoint"]))
    except EndpointError as error:
        raise ConfigError(WHERE, "endpoint", str(error)) from error
    return Settings(endpoint=endpoint, **values)


def _transport(name: str) -> Transport:
    try:
        return Transport(name)
    except ValueError:
        advice = f"use one of {', '.join(Transport)}"
        raise ConfigError(WHERE, "transport", f"{name!r} is none", advice=advice) from None


def _checked(key: str, default: object, value: Any) -> Any:
    wanted: tuple[type, ...]
    if isinstance(default, bool):
        wanted = (bool,)
    elif isinstance(default, float):
        wanted = (int, float)
    elif isinstance(default, str):
        wanted = (str,)
    else:
        wanted = (int,)
    if value is None and default is None:
        return None
    if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
        names = " or ".join(kind.__name__ for kind in wanted)
        raise ConfigError(WHERE, key, f"{value!r} is no {names}")
    if key in _BOUNDS:
        low, high = _BOUNDS[key]
        if not low <= float(value) <= high:
            raise ConfigError(WHERE, key, f"{value} is not between {low:g} and {high:g}")
    return float(value) if isinstance(default, float) else value
