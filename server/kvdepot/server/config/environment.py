"""Single keys of the configuration from the environment: `KVDEPOT_<TABLE>__<KEY>`, `KVDEPOT_TIER__<NAME>__<KEY>`.

Only variables with two underscores are keys. Others belong to other programs: `KVDEPOT_ENDPOINT`, and what Kubernetes
sets for a service with the name kvdepot. A variable with two underscores that names no key is refused.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Final, NoReturn

from kvdepot.core.errors import ConfigError
from kvdepot.server.config.schema import Tables, TierTable
from pydantic import BaseModel, BeforeValidator

SOURCE: Final = "environment"
_PREFIX: Final = "KVDEPOT_"
_SEPARATOR: Final = "__"
_TABLES: Final = {name: type(table) for name, table in Tables() if isinstance(table, BaseModel)}
_TIER_KEYS: Final = tuple(key for key in TierTable.model_fields if key not in ("name", "kind"))


@dataclass(frozen=True, slots=True)
class Variable:
    """One of them. `tier`: as it stands in the variable's name, empty for other tables."""

    name: str
    table: str
    key: str
    value: object
    tier: str = ""


def variables(environment: Mapping[str, str]) -> tuple[Variable, ...]:
    """Return the variables that name keys. Raise ConfigError, with the variable as the key."""
    return tuple(
        _variable(name, text)
        for name, text in sorted(environment.items())
        if name.startswith(_PREFIX) and _SEPARATOR in name
    )


def tier_variable_name(name: str) -> str:
    """Return a tier's name as variables spell it: `fast-nvme` is `FAST_NVME`."""
    return name.upper().replace("-", "_")


def applied(document: dict[str, Any], found: Iterable[Variable]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the document with the variables' values, and their names by key: "ram.capacity", "tier[0].write"."""
    names: dict[str, str] = {}
    for one in found:
        if one.table != "tier":
            document = {**document, one.table: {**document.get(one.table, {}), one.key: one.value}}
            names[f"{one.table}.{one.key}"] = one.name
            continue
        tiers = list(document.get("tier", ()))
        number = _tier_number(one, tiers)
        tiers[number] = {**tiers[number], one.key: one.value}
        document = {**document, "tier": tiers}
        names[f"tier[{number}].{one.key}"] = names[f"tier.{tiers[number]['name']}.{one.key}"] = one.name
    return document, names


def _tier_number(one: Variable, tiers: list[Any]) -> int:
    named = [str(tier.get("name", "")) for tier in tiers if isinstance(tier, Mapping)]
    numbers = [number for number, name in enumerate(named) if tier_variable_name(name) == one.tier]
    if len(numbers) != 1:
        known = ", ".join(map(tier_variable_name, named)) or "none"
        _refuse(
            one.name, f"expected the name of one [[tier]], got {one.tier}", f"add the tier to the file; it has: {known}"
        )
    return numbers[0]


def _variable(name: str, text: str) -> Variable:
    table, *rest = name.removeprefix(_PREFIX).split(_SEPARATOR)
    if table in ("QUOTA", "TENANT"):
        _refuse(name, f"{table.lower()}s have no variables", f"use [[{table.lower()}]] in the file")
    if table == "TIER":
        if len(rest) != 2:
            _refuse(name, "is not a variable of a tier", f"write {_PREFIX}TIER__<NAME>__<KEY>")
        tier, key = rest
        _check(name, key, _TIER_KEYS, f"{_PREFIX}TIER__{tier}__")
        return Variable(name, "tier", key.lower(), _value(name, TierTable, key.lower(), text), tier)
    _check(name, table, _TABLES, _PREFIX, "__<KEY>")
    model = _TABLES[table.lower()]
    key = _SEPARATOR.join(rest)
    _check(name, key, model.model_fields, f"{_PREFIX}{table}__")
    return Variable(name, table.lower(), key.lower(), _value(name, model, key.lower(), text))


def _check(name: str, part: str, known: Iterable[str], before: str, behind: str = "") -> None:
    choices = [one.upper() for one in known]
    if part not in choices:
        near = get_close_matches(part.upper(), choices, n=1, cutoff=0.0)
        _refuse(name, f"expected one of {', '.join(choices)}, got {part!r}", f"did you mean {before}{near[0]}{behind}?")


def _value(name: str, model: type[BaseModel], key: str, text: str) -> object:
    """Return a variable's value: strings unchanged, lists split at commas, numbers and booleans as in TOML."""
    field = model.model_fields[key]
    if field.annotation == list[str]:
        return [part.strip() for part in text.split(",")]
    if field.annotation not in (int, float, bool) or any(isinstance(one, BeforeValidator) for one in field.metadata):
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        kind = "true or false" if field.annotation is bool else "a number"
        _refuse(name, f"expected {kind}, got {text!r}", "")


def _refuse(name: str, reason: str, advice: str) -> NoReturn:
    raise ConfigError(SOURCE, name, reason, advice=advice or None)
