"""The message of a command whose package was installed without the extra that the command needs."""

from __future__ import annotations

from collections.abc import Collection


def missing_extra(error: ModuleNotFoundError, command: str, extra: str, modules: Collection[str]) -> str:
    """Return a line about the missing extra. Raise the error again if its module belongs to no extra: that is a bug."""
    if (error.name or "").partition(".")[0] not in modules:
        raise error
    return f"{command} needs the extra `{extra}`: pip install '.[{extra}]' in a clone of kvdepot ({error})\n"
