"""Where the socket of a daemon without a configuration lies, and whether the one that is there can be trusted."""

from __future__ import annotations

import stat
from collections.abc import Callable, Mapping


def runtime_directory(environment: Mapping[str, str], temporary: Callable[[], str], user: int) -> str:
    """This user's, in XDG_RUNTIME_DIR or else in the temporary directory, where its name can be guessed.

    `temporary` is asked only when it is needed: it raises where no such directory can be written to.
    """
    base = environment.get("XDG_RUNTIME_DIR")
    return f"{base}/kvdepot" if base else f"{temporary()}/kvdepot-{user}"


def only_writer(user: int, mode: int, owner: int) -> bool:
    """Whether it is a directory (not a link) to which only `user` can write: `mode` and `owner` are of lstat(2)."""
    return stat.S_ISDIR(mode) and owner == user and not mode & 0o022
