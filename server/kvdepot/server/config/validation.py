"""The check of a parsed file against the tables of the configuration, and the refusals that follow from it."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, get_args

from kvdepot.core.errors import ConfigError, together
from kvdepot.server.config.schema import Tables
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails


def validated(file: str, document: Mapping[str, Any]) -> Tables:
    """Return the tables of a parsed file. Raise ConfigError, for each key that is wrong."""
    _refuse_no_names(file, "", document)
    try:
        return Tables.model_validate(document)
    except ValidationError as error:
        raise together([_config_error(file, one) for one in error.errors()]) from error


def _refuse_no_names(file: str, key: str, value: object) -> None:
    """Raise ConfigError for a text with a NUL character, at which the kernel ends a path, or that is not UTF-8."""
    if isinstance(value, str) and ("\0" in value or not _is_unicode(value)):
        reason = "has a NUL character" if "\0" in value else "is not UTF-8"
        raise ConfigError(file, key, f"{value!r} {reason}")
    if isinstance(value, Mapping):
        for name, entry in value.items():
            _refuse_no_names(file, f"{key}.{name}".lstrip("."), entry)
    if isinstance(value, list):
        for number, entry in enumerate(value):
            _refuse_no_names(file, f"{key}[{number}]" if isinstance(entry, Mapping) else key, entry)


def _is_unicode(text: str) -> bool:
    """Return whether a text has no bytes of the environment or the command line that are not UTF-8 (PEP 383)."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _config_error(file: str, error: ErrorDetails) -> ConfigError:
    location = [str(part) for part in error["loc"] if isinstance(part, str)]
    key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error["loc"])[1:]
    if error["type"] == "extra_forbidden":
        near = get_close_matches(location[-1], _keys_beside(location), n=1, cutoff=0.0)
        return ConfigError(file, key, "unknown key", advice=f"did you mean {near[0]!r}?" if near else "delete it")
    return ConfigError(file, key, error["msg"].removeprefix("Value error, "))


def _keys_beside(location: list[str]) -> list[str]:
    model: type[BaseModel] = Tables
    for part in location[:-1]:
        table = model.model_fields[part].annotation
        table = next(iter(get_args(table)), table)  # a list of tables
        assert isinstance(table, type) and issubclass(table, BaseModel)
        model = table
    return list(model.model_fields)
