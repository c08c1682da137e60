"""The connector's settings: `kv_connector_extra_config` of vLLM's KV transfer config (design.md#connector).

An unknown key, a wrong type or a value out of bounds is refused at the engine's start, with the nearest key or the
bounds.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from kvdepot.client.attachment import Transport
from kvdepot.client.endpoint import PACKAGED_ENDPOINT, Endpoint, EndpointError, endpoint_url
from kvdepot.core.errors import ConfigError

WHERE: Final = "kv_connector_extra_config"
AUDIT_VARIABLE: Final = "KVDEPOT_AUDIT_PATH"

# Bounds, inclusive, in the key's unit.
_BOUNDS: Final[Mapping[str, tuple[float, float]]] = {
    "chunk_tokens": (1, 1 << 20),
    "lookup_timeout_seconds": (0.0, 5.0),
    "lookup_min_seconds": (0.0, 5.0),
    "load_timeout_seconds": (0.1, 3600.0),
    "min_load_tokens": (1, 1 << 24),
    "load_weight": (0.0, 1000.0),
    "max_pinned_blocks": (1, 1 << 24),
    "loads_in_flight": (1, 4096),
    "verify_first_loads": (0, 1 << 24),
    "verify_loads": (0.0, 1.0),
}

_CHOICES: Final[Mapping[str, tuple[str, ...]]] = {
    "cuda_copies": ("auto", "batch", "gather", "torch"),
    "pin": ("background", "start", "off"),
}

_REMOVED: Final[Mapping[str, str]] = {
    "experimental_cuda": "remove it: copies on GPUs need no setting, and each rank tests them at its start",
}
"""Keys of earlier versions -> what to do."""


@dataclass(frozen=True, slots=True)
class Settings:
    """All keys with their defaults. That of `endpoint` is `KVDEPOT_ENDPOINT`, or else `default_endpoint`."""

    endpoint: Endpoint
    chunk_tokens: int | None = None  # None: the planner's default for the model's groups
    lookup_timeout_seconds: float = 1.0  # at most, that a request waits for a lookup: a tenth of its time to compute
    lookup_min_seconds: float = 0.05  # at least, unless the timeout is shorter
    load_timeout_seconds: float = 30.0  # from allocation to the last rank's copy
    min_load_tokens: int = 64  # recomputing a shorter hit is cheaper
    load_weight: float = 1.0  # seconds of loading that are worth a second of computing; 0: offer nothing
    loads_in_flight: int = 48  # below the daemon's own limit (64): it hears of a load's end a moment later
    speculative_acquire: bool = True  # lease what a lookup finds in RAM with its answer
    store_decode: bool = True  # store generated tokens too
    max_pinned_blocks: int = 4096  # engine blocks held by copies in progress; at most a quarter of them all
    transport: Transport = Transport.AUTO
    model_revision: str = ""  # names the weights when their files are not on this node
    weights_version: str = ""  # names weights changed in place; without it each reset draws a new epoch
    keep_across_sleep: bool = False
    tenant: str = ""
    cuda_copies: str = "auto"  # how batches travel on GPUs; auto: by the length of their runs, and the device
    verify_first_loads: int = 100  # on GPUs: read so many loads back, and stop copying if one is wrong
    verify_loads: float = 0.0  # the share of loads whose bytes in RAM are compared with their checksums
    pin: str = "background"  # the arena: pin it slowly, before the engine serves, or only what copies touch
    audit_path: str = ""  # JSON lines of what was stored and loaded, with digests; for tests and audits


def parse_settings(extra: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> Settings:
    """Return the settings of the engine's configuration. Raise ConfigError for an unknown key or a bad value."""
    known = {field.name for field in fields(Settings)} | {"tls"}
    for key in extra:
        if key in _REMOVED:
            raise ConfigError(WHERE, key, "no longer a key", advice=_REMOVED[key])
        if key not in known:
            near = difflib.get_close_matches(str(key), sorted(known), n=1, cutoff=0.0)
            raise ConfigError(WHERE, str(key), "no such key", advice=f"did you mean {near[0]!r}?")
    url = endpoint_url(extra, environment)
    if not url:
        raise ConfigError(WHERE, "endpoint", "empty", advice=f"write {PACKAGED_ENDPOINT}, or leave it out")
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
        endpoint = Endpoint.parse(url)
    except EndpointError as error:
        raise ConfigError(WHERE, "endpoint", str(error)) from error
    return Settings(endpoint=endpoint, **values)


def _transport(name: str) -> Transport:
    try:
        return Transport(name)
    except ValueError:
        advice = f"use one of {', '.join(Transport)}"
        raise ConfigError(WHERE, "transport", f"unknown transport {name!r}", advice=advice) from None


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
        raise ConfigError(WHERE, key, f"expected {names}, got {value!r}")
    if key in _CHOICES and value not in _CHOICES[key]:
        raise ConfigError(WHERE, key, f"unknown value {value!r}", advice=f"use one of {', '.join(_CHOICES[key])}")
    if key in _BOUNDS:
        low, high = _BOUNDS[key]
        if not low <= float(value) <= high:
            raise ConfigError(WHERE, key, f"expected a number from {low:g} to {high:g}, got {value}")
    return float(value) if isinstance(default, float) else value
