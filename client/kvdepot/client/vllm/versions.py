"""The versions of vLLM that the connector is for. Nothing of it is imported here, for tools without an engine."""

from __future__ import annotations

import re
from typing import Final

from kvdepot.core.errors import ConfigError

VERSION_MIN: Final = (0, 32)
VERSION_MAX: Final = (0, 33)
RANGE: Final = " to ".join(".".join(map(str, bound)) for bound in (VERSION_MIN, VERSION_MAX))


def check_version(version: str) -> None:
    """Raises ConfigError naming the supported range. Development builds without a number pass."""
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        return
    found = (int(match[1]), int(match[2]))
    if found[0] == 0 and found[1] == 0:
        return
    if not VERSION_MIN <= found <= VERSION_MAX:
        raise ConfigError(
            "vllm", "version", f"{version} is not supported", advice=f"use vLLM {RANGE}, or another kvdepot"
        )
