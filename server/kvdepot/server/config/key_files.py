"""Key files of tiers (`[[tier]] key_file`): read at start and reload, and refused if other users can read them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from kvdepot.core.errors import ConfigError
from kvdepot.core.object_keys import FILE_BYTES_MAX, KeyRing, parse_keys
from kvdepot.server.config.config import Config
from kvdepot.server.platform.secret_files import read_secret

_ADVICE = "umask 077; openssl rand -hex 32 > FILE, as the daemon's user (docs/operations.md, Keys of a shared tier)"


def with_keys(config: Config) -> Config:
    """Return the configuration with the keys of its tiers. Raise ConfigError."""
    return replace(config, keys=read_keys(config))


def read_keys(config: Config) -> Mapping[str, KeyRing]:
    """Return the keys of each tier that has a key file. Raise ConfigError for the first file that cannot be used."""
    return {
        tier.name: read_key_file(Path(tier.key_file), file=config.file, key=f"tier.{tier.name}.key_file")
        for tier in config.tables.tier
        if tier.key_file
    }


def read_key_file(path: Path, *, file: str, key: str) -> KeyRing:
    """Return the keys of one file. Raise ConfigError, which names the setting `key` of `file`."""
    try:
        return parse_keys(_text(path))
    except OSError as error:
        reason = f"{path} cannot be used: {error.strerror}"
        raise ConfigError(file, key, reason, advice=_ADVICE, of_host=True) from error
    except ValueError as error:  # which may name bytes of the file, that somebody is writing
        raise ConfigError(file, key, f"{path}: {error}", advice=_ADVICE, of_host=True) from None


def _text(path: Path) -> str:
    """Return the text of a file that no other user can read. Raise OSError or ValueError."""
    advice = "no other user may read it: chmod 0600"
    data = read_secret(path, FILE_BYTES_MAX, owners={os.geteuid()}, forbidden=0o077, advice=advice)
    if not data.isascii():
        raise ValueError("expected lines of hexadecimal digits")
    return data.decode("ascii")
