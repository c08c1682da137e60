"""Find a model's `config.json` on this host: a file, a folder, or Hugging Face's cache. Nothing is downloaded."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from kvdepot.core.errors import InvalidArgument, NotFound

CONFIG: Final = "config.json"
_BYTES_MAX: Final = 4 << 20


def read_model_config(model: str, environment: Mapping[str, str] = os.environ) -> tuple[dict[str, Any], Path]:
    """Return the configuration and its file. Raise NotFound, or InvalidArgument for a file that is no configuration.

    Args:
        model: A `config.json`, the folder that has it, or an id such as `Qwen/Qwen3-8B` in Hugging Face's cache.
        environment: Names the cache: `HF_HUB_CACHE`, or `HF_HOME`.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        path /= CONFIG
    if not path.is_file():
        path = _cached(model, environment)
    try:
        with path.open("rb") as file:
            config = json.loads(file.read(_BYTES_MAX))
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"{path}: {error}", advice="name a model's config.json") from error
    if not isinstance(config, dict):
        raise InvalidArgument(f"{path} is no JSON object", advice="name a model's config.json")
    return config, path


def _cached(model: str, environment: Mapping[str, str]) -> Path:
    """Return the newest version in the cache, that of the branch `main` first."""
    folder = _cache(environment) / f"models--{model.strip('/').replace('/', '--')}"
    if model.count("/") == 1 and not model.startswith(("/", ".")):
        for found in _versions(folder):
            if (found / CONFIG).is_file():
                return found / CONFIG
    raise NotFound(
        f"no {CONFIG} of {model!r} on this host",
        advice=f"name a file or folder, or download it: hf download {model} {CONFIG}",
    )


def _versions(folder: Path) -> Iterator[Path]:
    snapshots = folder / "snapshots"
    main = folder / "refs" / "main"
    if main.is_file():
        yield snapshots / main.read_text().strip()
    if snapshots.is_dir():
        yield from sorted(snapshots.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)


def _cache(environment: Mapping[str, str]) -> Path:
    if cache := environment.get("HF_HUB_CACHE"):
        return Path(cache)
    home = environment.get("HF_HOME") or Path(environment.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(home).expanduser() / "hub"
