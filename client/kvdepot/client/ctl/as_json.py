"""What `--json` prints of a value of `kvdepot.core`: the same fields by the same names.

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

from kvdepot.client.ctl.texts import say
from kvdepot.core.bounds import ChunkKinds
from kvdepot.core.kinds import Kind

_IDS: Final = frozenset({"arena_id", "lease_id"})


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


def echo_json(value: Any) -> None:
    say(json.dumps(to_json(value), indent=2))


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
