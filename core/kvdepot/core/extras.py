"""What a command says where the package was installed without the extra that it needs."""

from __future__ import annotations

from collections.abc import Collection


def missing_extra(error: ModuleNotFoundError, command: str, extra: str, modules: Collection[str]) -> str:
    """In a line. Raises the error again where it is not about one of the extra's modules: then it is a bug."""
    if (error.name or "").partition(".")[0] not in modules:
        raise error
    return f"{command} needs the extra `{extra}`: pip install '.[{extra}]' in a clone of kvdepot ({error})\n"
