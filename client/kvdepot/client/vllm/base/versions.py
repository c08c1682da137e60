"""The versions of vLLM that the connector is for. Nothing of it is imported here, for tools without an engine."""

from __future__ import annotations

import re
from typing import Final

from kvdepot.core.errors import ConfigError

VERSION_MIN: Final = (0, 32)
VERSION_MAX: Final = (0, 33)
RANGE: Final = " to ".join(".".join(map(str, bound)) for bound in (VERSION_MIN, VERSION_MAX))


def check_version(version: str) -> None:
    """Raise ConfigError with the supported range for any other version.

    A newer version is refused too: what its block hashes cover, or where it cuts an offer, may have changed. Builds
    without a number pass; `contract` finds what has moved in them.
    """
    parsed = number(version)
    if parsed is not None and not VERSION_MIN <= parsed <= VERSION_MAX:
        raise ConfigError(
            "vllm", "version", f"{version} is not supported", advice=f"use vLLM {RANGE}, or another kvdepot"
        )


def before(version: str, since: tuple[int, int]) -> bool:
    """Whether it is known to be older. A build without a number counts as the latest."""
    parsed = number(version)
    return parsed is not None and parsed < since


def number(version: str) -> tuple[int, int] | None:
    """Major and minor; None for development builds, which have none."""
    match = re.match(r"(\d+)\.(\d+)", version)
    parsed = (int(match[1]), int(match[2])) if match is not None else (0, 0)
    return None if parsed == (0, 0) else parsed
