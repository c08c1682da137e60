"""Find a model's `config.json` on this host: a file, a folder, or Hugging Face's cache. Nothing is downloaded."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Final

from kvdepot.core.errors import InvalidArgument, NotFound

CONFIG: Final = "config.json"
_BYTES_MAX: Final = 4 << 20
_LINKS_MAX: Final = 40  # as the kernel (path_resolution(7))


@dataclass(frozen=True, slots=True)
class View:
    """How a process sees files: by default this one.

    `environment` names Hugging Face's cache and the home directory. `root` is the process's root directory as this
    process sees it, `directory` its working directory as the process sees it.
    """

    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    root: Path = Path("/")
    directory: str = ""

    def path(self, name: str) -> Path:
        """Return the place, for this process, of a path that the process would open. Its links are followed there."""
        place = PurePosixPath(name)
        if place.parts[:1] == ("~",):
            place = PurePosixPath(self.environment.get("HOME", "/"), *place.parts[1:])
        place = PurePosixPath(self.directory, place)
        return Path(place) if self.root == Path("/") else self._inside(place)

    def _inside(self, place: PurePosixPath) -> Path:
        """Follow the links as in a chroot. The kernel would follow an absolute one to this process's own files."""
        todo, done, links = _names(place)[::-1], list[str](), 0
        while todo:
            part = todo.pop()
            if part == "..":
                del done[-1:]
                continue
            at = self.root.joinpath(*done, part)
            if not at.is_symlink() or links >= _LINKS_MAX:
                done.append(part)
                continue
            links += 1
            leads = PurePosixPath(at.readlink())
            if leads.is_absolute():
                done.clear()
            todo += reversed(_names(leads))
        return self.root.joinpath(*done)


def _names(path: PurePosixPath) -> list[str]:
    return [*path.parts[path.is_absolute() :]]


def read_model_config(model: str, view: View | None = None) -> tuple[dict[str, Any], Path]:
    """Return the configuration and its file. Raise NotFound, or InvalidArgument for a file that is no configuration.

    Args:
        model: A `config.json`, the folder that has it, or an id such as `Qwen/Qwen3-8B` in Hugging Face's cache.
        view: Of the process that serves the model.
    """
    path = Path(model)
    try:
        path = _found(model, view or View())
        with path.open("rb") as file:
            config = json.loads(file.read(_BYTES_MAX))
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"{path}: {error}", advice="name a model's config.json") from error
    if not isinstance(config, dict):
        raise InvalidArgument(f"{path} is no JSON object", advice="name a model's config.json")
    return config, path


def _found(model: str, view: View) -> Path:
    path = view.path(model)
    if path.is_dir():
        path = view.path(f"{model}/{CONFIG}")
    return path if path.is_file() else _cached(model, view)


def _cached(model: str, view: View) -> Path:
    """Return the newest version in the cache, that of the branch `main` first."""
    folder = f"{_cache(view.environment)}/models--{model.strip('/').replace('/', '--')}"
    if model.count("/") == 1 and not model.startswith(("/", ".")):
        for version in _versions(view, folder):
            found = view.path(f"{folder}/snapshots/{version}/{CONFIG}")
            if found.is_file():
                return found
    raise NotFound(
        f"no {CONFIG} of {model!r} on this host",
        advice=f"name a file or folder, or download it: hf download {model} {CONFIG}",
    )


def _versions(view: View, folder: str) -> Iterator[str]:
    main, snapshots = view.path(f"{folder}/refs/main"), view.path(f"{folder}/snapshots")
    if main.is_file():
        yield main.read_text().strip()
    if snapshots.is_dir():
        newest_first = sorted(snapshots.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
        yield from (path.name for path in newest_first)


def _cache(environment: Mapping[str, str]) -> str:
    if cache := environment.get("HF_HUB_CACHE"):
        return cache
    return f"{environment.get('HF_HOME') or environment.get('XDG_CACHE_HOME', '~/.cache') + '/huggingface'}/hub"
