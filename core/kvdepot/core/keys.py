"""The identity of bytes: chunk keys, and the namespace that says whose bytes they are (design.md#identity).

Deny by default: a namespace is a digest of everything in its spec, and a value without a canonical form is an error,
never left out. Python's `hash` is never used, because it differs from process to process.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from hashlib import blake2b
from types import BuiltinFunctionType, FunctionType
from typing import Annotated, Any, Final, Protocol, runtime_checkable

from kvdepot.core import limits
from kvdepot.core.bounds import AtMost, Count, Epoch, Label, MessageBytes, Tenant
from kvdepot.core.calls import KEY_BYTES, Kind
from kvdepot.core.errors import InvalidArgument, NamespaceError, NamespaceRefused, PlannerError
from kvdepot.core.limits import check_limit
from kvdepot.core.planner import GroupSpec, Planner

NAMESPACE_FORMAT: Final = b"kvdepot namespace 1\n"
"""First bytes of the canonical encoding: another encoding is another format, and no id is shared."""
_CHUNK_PERSON: Final = b"kvdepot chunk 1"
_BUMP_PERSON: Final = b"kvdepot bump 1"
_NESTING_MAX: Final = 64
_CONTAINERS: Final = (dict, list, tuple, set, frozenset)

Convert = Callable[[object], object]


@runtime_checkable
class _PathLike(Protocol):
    def __fspath__(self) -> str | bytes: ...


def chunk_key(block_hash: bytes, salt: bytes = b"") -> bytes:
    """Return the key (16 bytes) of the chunk that ends at the block with this chained hash.

    `salt` has what the hash does not cover: the content of a LoRA adapter, and the tokens that draft layers read after
    the boundary (docs/formats/namespace.md). Raise InvalidArgument for an empty or overlong hash.
    """
    if not 0 < len(block_hash) <= limits.BLOCK_HASH_BYTES_MAX:
        raise InvalidArgument(f"a block hash has 1 to {limits.BLOCK_HASH_BYTES_MAX} bytes, not {len(block_hash)}")
    prefix = len(block_hash).to_bytes(2, "little")  # so that hash and salt cannot trade bytes
    return blake2b(prefix + block_hash + salt, digest_size=KEY_BYTES, person=_CHUNK_PERSON).digest()


def bumped_id(base_id: bytes, bumps: int) -> bytes:
    """Return the id after `bumps` bumps of the namespace whose id with a counter of 0 is `base_id`."""
    if not bumps:
        return base_id
    digested = base_id + bumps.to_bytes(4, "little")
    return blake2b(digested, digest_size=limits.NAMESPACE_ID_BYTES, person=_BUMP_PERSON).digest()


def canonical_identity(
    value: object, *, exclude: Collection[str] = (), convert: Convert | None = None
) -> dict[str, str]:
    """Flatten `value` to {dotted path: canonical text}, so that two values differ when any leaf does.

    Takes dataclasses, mappings, lists, tuples, sets, enums, None, bool, int, float, str, bytes, paths,
    and classes and functions by qualified name. Text is unambiguous: strings are JSON, so "1" is not 1.
    Tuples and lists are the same, the order of mappings and sets does not matter. `exclude` names whole
    subtrees by path. `convert` is asked once for a value of another type, and answers with plain data or
    with the value itself.

    Raises NamespaceError naming the path of what it cannot represent: foreign objects, lambdas, local
    functions and classes (their names are not unique), cycles.
    """
    return dict(_Flattener(frozenset(exclude), convert).flatten("", value, ()))


class _Flattener:
    def __init__(self, exclude: frozenset[str], convert: Convert | None) -> None:
        self._exclude = exclude
        self._convert = convert

    def flatten(self, path: str, value: Any, above: tuple[int, ...]) -> Iterator[tuple[str, str]]:
        if path and path in self._exclude:
            return
        leaf = _leaf(path, value)
        if leaf is not None:
            yield path, leaf
            return
        if id(value) in above:
            raise NamespaceError(path, f"{type(value).__name__} contains itself")
        if len(above) >= _NESTING_MAX:
            raise NamespaceError(path, f"nested deeper than {_NESTING_MAX}")
        above = (*above, id(value))
        if is_dataclass(value):
            yield _join(path, "@class"), _qualified(path, type(value))
            members: list[tuple[str, Any]] = [(field.name, _field(path, value, field.name)) for field in fields(value)]
        elif isinstance(value, Mapping):
            members = sorted(((self._segment(path, key), item) for key, item in value.items()), key=_first)
        elif isinstance(value, list | tuple):
            members = [(f"[{index}]", item) for index, item in enumerate(value)]
        elif isinstance(value, set | frozenset):
            members = [(f"{{{index}}}", item) for index, item in enumerate(self._sorted(path, value, above))]
        else:
            yield from self.flatten(path, self._converted(path, value), above)
            return
        if not members:
            yield path, _empty(value)
        for segment, item in members:
            yield from self.flatten(_join(path, segment), item, above)

    def _converted(self, path: str, value: object) -> object:
        converted = value if self._convert is None else self._convert(value)
        if converted is value:
            kind = type(value)
            raise NamespaceError(path, f"a value of type {kind.__module__}.{kind.__qualname__} has no canonical form")
        return converted

    def _segment(self, path: str, key: object) -> str:
        if type(key) is str:
            return key if key.isidentifier() and key.isascii() else json.dumps(key)
        leaf = _leaf(path, key)
        if leaf is None:
            raise NamespaceError(path, f"a mapping key of type {type(key).__name__} has no canonical form")
        return f"({leaf})"

    def _sorted(self, path: str, value: Collection[object], above: tuple[int, ...]) -> list[object]:
        return sorted(value, key=lambda item: sorted(self.flatten(_join(path, "{}"), item, above)))


def _field(path: str, value: object, name: str) -> object:
    if not hasattr(value, name):
        raise NamespaceError(_join(path, name), "the field was never set")
    return getattr(value, name)


def _first(member: tuple[str, Any]) -> str:
    return member[0]


def _join(path: str, segment: str) -> str:
    return path + segment if segment[0] in "[{" or not path else f"{path}.{segment}"


def _empty(value: object) -> str:
    if isinstance(value, list | tuple):
        return "[]"
    return "set()" if isinstance(value, set | frozenset) else "{}"


def _leaf(path: str, value: object) -> str | None:
    """Return the canonical text of a value without parts; None for others, and for subclasses, which may hold more."""
    if value is None or value is True or value is False:
        return json.dumps(value)
    if isinstance(value, Enum):
        return f"{_qualified(path, type(value))}.{value.name}"
    kind = type(value)
    if kind is str:
        return json.dumps(value)
    if kind is int or kind is float:
        return repr(value)
    if type(value) is bytes:
        return f"0x{value.hex()}"
    if kind in _CONTAINERS:
        return None  # before a protocol is asked: that takes longer than all above
    if isinstance(value, type | FunctionType | BuiltinFunctionType):
        return _qualified(path, value)
    if isinstance(value, _PathLike):
        inner = value.__fspath__()
        return f"path:{json.dumps(inner if isinstance(inner, str) else inner.hex())}"
    return None


def _qualified(path: str, value: type | FunctionType | BuiltinFunctionType) -> str:
    name = f"{value.__module__}.{value.__qualname__}"
    if "<lambda>" in name or "<locals>" in name:
        raise NamespaceError(path, f"{name} is not a name that identifies code")
    return name


@dataclass(frozen=True, slots=True)
class NamespaceSpec:
    """Everything that has to be equal for two engines to share bytes.

    `identity` is `canonical_identity` of the resolved engine, weights, hash and format settings;
    `object_bytes` is by kind and must be what the groups imply (`check_sizes`). `label` is for
    people, and is part of the identity like every other field. `bumps` is the operator's bump counter, which the
    daemon says (`kvdepot.core.epochs`).
    """

    identity: Annotated[Mapping[str, str], Count(limits.IDENTITY_ENTRIES_MAX)]
    chunk_tokens: Annotated[int, AtMost(limits.CHUNK_TOKENS_MAX)]
    groups: Annotated[tuple[GroupSpec, ...], Count(limits.GROUPS_MAX)]
    object_bytes: Mapping[Kind, int]
    label: Label = ""
    tenant: Tenant = ""
    epoch: Epoch = ""
    bumps: int = 0

    def planner(self) -> Planner:
        """Return the planner of the spec. Raise PlannerError or LimitExceeded if the groups cannot work."""
        return Planner(self.groups, self.chunk_tokens)

    def canonical(self) -> bytes:
        """Return the bytes that `base_id` digests: every field except `bumps`, sorted by path, with lengths.

        Raise LimitExceeded.
        """
        parts = [NAMESPACE_FORMAT]
        for path, text in sorted(_flat(replace(self, bumps=0)).items()):
            for part in (path.encode(), text.encode()):
                parts += (len(part).to_bytes(4, "little"), part)
        encoded = b"".join(parts)
        check_limit("bytes of a namespace spec", len(encoded), limits.SPEC_BYTES_MAX)
        return encoded

    def base_id(self) -> bytes:
        """Return the id with a bump counter of 0, 16 bytes."""
        return blake2b(self.canonical(), digest_size=limits.NAMESPACE_ID_BYTES).digest()

    def namespace_id(self) -> bytes:
        """Return the id, 16 bytes. Two ids are equal exactly when all fields are equal."""
        return bumped_id(self.base_id(), self.bumps)

    def fields_by_path(self) -> dict[str, str]:
        """Return the canonical text of each field that the id digests. Fields of the engine begin with `identity.`."""
        return _flat(self)

    def differences(self, other: NamespaceSpec) -> list[str]:
        """Return one line per differing path, `path: ours != theirs`, sorted; empty if the ids are equal."""
        ours, theirs = _flat(self), _flat(other)
        return [
            f"{path}: {ours.get(path, '(absent)')} != {theirs.get(path, '(absent)')}"
            for path in sorted(ours.keys() | theirs.keys())
            if ours.get(path) != theirs.get(path)
        ]


SpecField = Annotated[NamespaceSpec, MessageBytes(limits.SPEC_BYTES_MAX)]
"""As part of a message."""


def _flat(spec: NamespaceSpec) -> dict[str, str]:
    """Flatten a value by reflection, so that no field is forgotten, and without class names, so that code can move."""
    plain = {field.name: getattr(spec, field.name) for field in fields(spec) if field.name != "identity"}
    plain["groups"] = [
        {field.name: getattr(group, field.name) for field in fields(group)} | {"kind": int(group.kind)}
        for group in spec.groups
    ]
    if not spec.bumps:
        del plain["bumps"]  # as before there was one
    plain["object_bytes"] = {int(kind): size_bytes for kind, size_bytes in spec.object_bytes.items()}
    # The identity is canonical text already; quoting it again would only make differences unreadable.
    return canonical_identity(plain) | {f"identity.{path}": text for path, text in spec.identity.items()}


def check_sizes(spec: NamespaceSpec) -> None:
    """Raise NamespaceRefused, with numbers, if the spec contradicts itself, and LimitExceeded beyond a limit."""
    check_limit("identity entries of a namespace spec", len(spec.identity), limits.IDENTITY_ENTRIES_MAX)
    for name, text, maximum in (
        ("label", spec.label, limits.LABEL_BYTES_MAX),
        ("tenant", spec.tenant, limits.TENANT_BYTES_MAX),
        ("epoch", spec.epoch, limits.EPOCH_BYTES_MAX),
    ):
        check_limit(f"bytes of the {name} of a namespace spec", len(text.encode()), maximum)
    try:
        planner = spec.planner()
    except PlannerError as error:
        raise NamespaceRefused(error.message, advice=error.advice) from error
    implied = {kind: planner.object_bytes(kind) for kind in planner.kinds}
    for kind in Kind:
        said, true = spec.object_bytes.get(kind, 0), implied.get(kind, 0)
        if said != true:
            raise NamespaceRefused(
                f"object_bytes of kind {kind.name.lower()} is {said}, but the groups imply {true} "
                f"with chunk_tokens {spec.chunk_tokens}"
            )
    spec.canonical()
