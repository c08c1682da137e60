"""Key files of tiers (`[[tier]] key_file`): read at start and reload, and refused if other users can read them."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from kvdepot.core.errors import ConfigError
from kvdepot.core.object_keys import FILE_BYTES_MAX, KeyRing, parse_keys
from kvdepot.server.config.config import Config

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
    """Return the text of a file that no other user can read. Raise OSError, or ValueError that repeats nothing of it.

    A link is followed: a mounted secret is one. What counts is the file that was opened. A FIFO does not block.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        if found.st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, f"it is of uid {found.st_uid}, and the daemon's uid is {os.geteuid()}")
        if found.st_mode & 0o077:
            mode = stat.S_IMODE(found.st_mode)
            raise OSError(errno.EPERM, f"its mode is {mode:04o}, and no other user may read it: chmod 0600")
        data = os.read(fd, FILE_BYTES_MAX + 1)
    finally:
        os.close(fd)
    if len(data) > FILE_BYTES_MAX:
        raise ValueError(f"expected at most {FILE_BYTES_MAX} bytes")
    if not data.isascii():
        raise ValueError("expected lines of hexadecimal digits")
    return data.decode("ascii")
