"""What `-o json` and `-o yaml` print of a value of `kvdepot.core`: the same fields by the same names.

Bytes become hexadecimal digits, and null where there are none. An enumeration becomes its name. The kinds of a chunk's
objects become a list of names. Ids of 64 bits become 16 hexadecimal digits, because JSON readers round large numbers;
0 is no id, and becomes null.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum, StrEnum
from functools import cache
from typing import Any, Final, get_args, get_type_hints

import click
from kvdepot.client.ctl.texts import say
from kvdepot.core.bounds import ChunkKinds
from kvdepot.core.kinds import Kind

_IDS: Final = frozenset({"arena_id", "lease_id"})
_YAML: Final = "kvdepot.yaml"  # in the context of a command


def to_json(value: Any) -> Any:
    """Return plain data that `json.dumps` takes."""
    if is_dataclass(value) and not isinstance(value, type):
        kinds = _fields_of_kinds(type(value))
        return {field.name: _field(field.name, getattr(value, field.name), kinds) for field in fields(value)}
    if isinstance(value, Mapping):
        return {_name(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, bytes):
        return value.hex() or None
    return _name(value) if isinstance(value, Enum) else value


def choose_yaml() -> None:
    """Have the command at hand print YAML instead of JSON."""
    click.get_current_context().meta[_YAML] = True


def echo_record(value: Any) -> None:
    """Print the one record that a command has for programs."""
    say(_yaml(value) if _chose_yaml() else json.dumps(to_json(value), indent=2))


def echo_next(value: Any) -> None:
    """Print one of several records: a line of JSON, or a document of YAML."""
    say(f"---\n{_yaml(value)}" if _chose_yaml() else json.dumps(to_json(value)))


def _chose_yaml() -> bool:
    return _YAML in click.get_current_context().meta


def _yaml(value: Any) -> str:
    import yaml  # one command in a thousand

    text: str = yaml.safe_dump(to_json(value), sort_keys=False)
    return text.removesuffix("\n")


def kind_names(kinds: bytes) -> list[str]:
    return [_name(Kind(kind)) for kind in kinds]


def _field(name: str, value: Any, kinds: frozenset[str]) -> Any:
    if name in kinds:
        return kind_names(value) if isinstance(value, bytes) else [kind_names(one) for one in value]
    if name in _IDS:
        return f"{value:016x}" if value else None
    return to_json(value)


def _name(value: Any) -> Any:
    if isinstance(value, StrEnum):
        return value.value
    return value.name.lower() if isinstance(value, Enum) else value


@cache
def _fields_of_kinds(value_type: type) -> frozenset[str]:
    """Fields whose bytes are kinds."""
    hints = get_type_hints(value_type, include_extras=True)
    return frozenset(name for name, hint in hints.items() if ChunkKinds in (hint, *get_args(hint)[:1]))
