"""The place of the socket of a daemon without a configuration file, and whether a socket there can be trusted."""

from __future__ import annotations

import stat
from collections.abc import Callable, Mapping


def runtime_directory(environment: Mapping[str, str], temporary: Callable[[], str], user: int) -> str:
    """Return this user's directory in XDG_RUNTIME_DIR, or in the temporary directory, under a name that can be guessed.

    `temporary` is called only if needed: it raises without a writable temporary directory.
    """
    base = environment.get("XDG_RUNTIME_DIR")
    return f"{base}/kvdepot" if base else f"{temporary()}/kvdepot-{user}"


def only_writer(user: int, mode: int, owner: int) -> bool:
    """Return whether only `user` can write to the directory (no link). `mode` and `owner` are of lstat(2)."""
    return stat.S_ISDIR(mode) and owner == user and not mode & 0o022
