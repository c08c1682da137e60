"""What of a vLLM has moved or changed, by name. Nothing of vLLM is imported here, for tools without an engine.

A release that renames a hook, or a field that a refusal reads, must not be met by a connector that is never called,
or that refuses nothing any more. So names are looked up when the connector is made, and when an import fails.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from kvdepot.client.vllm.base import versions
from kvdepot.core.errors import ConfigError

ENGINE: Final = "vllm"
Names = type | Sequence[str]
"""Of a class: a Protocol, whose methods are compared too, or the names alone."""


@dataclass(frozen=True, slots=True)
class Import:
    """A name, and the modules that may have it: several where an import has a fallback."""

    name: str
    modules: tuple[str, ...]
    where: str


def imports_of(paths: Iterable[Path]) -> list[Import]:
    """Return what these files import from vLLM, at the top or within functions. One place of a `try` is enough."""
    imports: list[Import] = []
    for path in paths:
        tree = ast.parse(path.read_text())
        places: defaultdict[tuple[str, int], list[str]] = defaultdict(list)
        fallbacks = {
            id(node): attempt.lineno
            for attempt in ast.walk(tree)
            if isinstance(attempt, ast.Try)
            for node in ast.walk(attempt)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                for module, name in _imported(node):
                    places[name, fallbacks.get(id(node), node.lineno)].append(module)
        imports += [Import(name, tuple(modules), f"{path}:{line}") for (name, line), modules in places.items()]
    return imports


def _imported(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str]]:
    """Return (module, name) of each import. An imported module is a name of the package above it."""
    if isinstance(node, ast.ImportFrom):
        if (node.module or "").split(".")[0] == ENGINE and not node.level:
            yield from ((str(node.module), alias.name) for alias in node.names)
    else:
        for alias in node.names:
            package, _, module = alias.name.rpartition(".")
            if package.split(".")[0] == ENGINE:
                yield package, module


def missing_imports(imports: Iterable[Import]) -> list[str]:
    """Return a sentence for each name that none of its modules has."""
    return [
        f"{wanted.modules[0]}.{wanted.name} {_new_place(wanted.name)} ({wanted.where})"
        for wanted in imports
        if not any(_has(module, wanted.name) for module in wanted.modules)
    ]


def _has(module: str, name: str) -> bool:
    try:
        return hasattr(importlib.import_module(module), name) or _found(f"{module}.{name}")
    except ImportError:
        return False


def _found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # what is above it is no package
        return False


def _new_place(name: str) -> str:
    """Where a module of this vLLM defines it, by its text: importing all of them would take minutes."""
    word = name.encode()
    defined = re.compile(rb"^(?:class|def|async def) %b\b|^%b\s*[:=]" % (word, word), re.MULTILINE)
    spec = importlib.util.find_spec(ENGINE)
    places = []
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        root = Path(folder)
        for path in sorted(root.rglob("*.py")):
            text = path.read_bytes()
            if word in text and defined.search(text):
                parts = path.relative_to(root.parent).with_suffix("").parts
                places.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return f"has moved to {' or '.join(places)}" if places else "is gone"


def changed_overrides(kind: type, not_hooks: Iterable[str] = (), absent: Iterable[str] = ()) -> list[str]:
    """Methods of a connector that this vLLM calls with other arguments, or does not call at all.

    Args:
        kind: The connector.
        not_hooks: Its public methods that vLLM never called.
        absent: Methods that this version of vLLM is known not to have.
    """
    abstract = sorted(getattr(kind, "__abstractmethods__", ()))
    problems = [f"{name} is abstract now, and this kvdepot has none" for name in abstract]
    for name, member in vars(kind).items():
        bases = (vars(base) for base in kind.__mro__[1:])
        above = next((base[name] for base in bases if name in base), None)
        if above is None and not name.startswith("_") and name not in (*not_hooks, *absent) and _function(member):
            base = next((base for base in kind.__mro__ if base.__module__.split(".")[0] == ENGINE), object)
            problems.append(f"{base.__name__}.{name} is gone: nothing calls it any more")
        passed, taken = _function(above), _function(member)
        if passed is None or taken is None or name.startswith("__"):
            continue
        if type(above) is not type(member):
            problems.append(f"{name} is a {type(above).__name__}, in this kvdepot a {type(member).__name__}")
        elif arguments(passed) != arguments(taken):
            passes, takes = _signature(passed), _signature(taken)
            problems.append(f"{name}: called as {name}{passes}, this kvdepot takes {name}{takes}")
    return problems


def missing_names(kind: type, names: Names, absent: Iterable[str] = ()) -> list[str]:
    """Return what kvdepot uses of a class and the class lacks, and methods of a Protocol with other arguments."""
    wanted = names if not isinstance(names, type) else [*names.__annotations__, *_methods(names)]
    has = {*dir(kind), *_set_in_init(kind), *getattr(kind, "__dataclass_fields__", {})}
    place = f"{kind.__module__}.{kind.__qualname__}"
    problems = [f"{place}.{name} is gone" for name in wanted if name not in has and name not in absent]
    for name, method in _methods(names).items() if isinstance(names, type) else ():
        theirs = _function(inspect.getattr_static(kind, name, None))
        if theirs is not None and not _takes(theirs, method):
            problems.append(f"{place}.{name} takes {_signature(theirs)}, kvdepot passes {arguments(method)[1:]}")
    return problems


def _methods(protocol: type) -> dict[str, Callable[..., Any]]:
    functions = {name: _function(member) for name, member in vars(protocol).items() if not name.startswith("_")}
    return {name: function for name, function in functions.items() if function is not None}


def _set_in_init(kind: type) -> set[str]:
    """Names that its constructors assign or read."""
    starts = (vars(base).get("__init__") for base in kind.__mro__)
    return {name for start in starts if inspect.isfunction(start) for name in start.__code__.co_names}


def _function(member: object) -> Callable[..., Any] | None:
    """Return the function below a class's member, or None for other members."""
    if isinstance(member, classmethod | staticmethod):
        member = member.__func__
    if isinstance(member, property):
        member = member.fget
    return member if inspect.isfunction(member) else None


@cache  # each connector of a process asks about the same functions
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(function)


def arguments(function: Callable[..., Any]) -> list[str]:
    """Return the arguments, without those that a method may get in addition to its own."""
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [name for name, parameter in _signature(function).parameters.items() if parameter.kind not in variable]


def _takes(theirs: Callable[..., Any], ours: Callable[..., Any]) -> bool:
    """Whether a call with our arguments is one of theirs: further ones need a default."""
    parameters, passed = list(_signature(theirs).parameters.values()), arguments(ours)
    further = [p for p in parameters[len(passed) :] if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    return [p.name for p in parameters[: len(passed)]] == passed and not further


def refusal(version: str, problems: Sequence[str]) -> ConfigError:
    """Return the error for a vLLM with these problems."""
    return ConfigError(
        ENGINE, "interface", f"{version} is not what this kvdepot was written for: {'; '.join(problems)}",
        advice=f"use vLLM {versions.RANGE}, or another kvdepot",
    )  # fmt: skip


@contextmanager
def by_name(version: str, file: str) -> Iterator[None]:
    """Guard imports of `file` from vLLM: if one fails, raise ConfigError with the new place of each that fails."""
    try:
        yield
    except ImportError as error:
        problems = missing_imports(imports_of([Path(file)]))
        if not problems:
            raise  # the names are there, and something that they need is not
        raise refusal(version, problems) from error
