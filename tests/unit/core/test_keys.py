"""Chunk keys, canonical identities and namespaces: P2 and P3."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvdepot.core import limits
from kvdepot.core.calls import Kind
from kvdepot.core.errors import InvalidArgument, LimitExceeded, NamespaceError, NamespaceRefused
from kvdepot.core.keys import NamespaceSpec, canonical_identity, check_sizes, chunk_key
from kvdepot.core.planner import GroupSpec, Planner

GROUPS = (
    GroupSpec(Kind.ATTENTION, 16, rank_block_bytes=(4096, 4096), layers=("layers.3.attn",)),
    GroupSpec(Kind.WINDOW, 16, window_tokens=100, rank_block_bytes=(512, 512), layers=("layers.2.attn",)),
    GroupSpec(Kind.STATE, 384, rank_block_bytes=(70_000, 70_000), layers=("layers.0.gdn", "layers.1.gdn")),
)


def _spec() -> NamespaceSpec:
    planner = Planner(GROUPS)
    return NamespaceSpec(
        identity=canonical_identity({"model": "toy", "dtype": {"kv": "bf16", "state": "f32"}, "tp": 2}),
        chunk_tokens=planner.chunk_tokens,
        groups=GROUPS,
        object_bytes={kind: planner.object_bytes(kind) for kind in planner.kinds},
        label="toy",
        tenant="default",
        epoch="00",
    )


def _mutations(value: Any) -> Iterator[Any]:
    """Every way to change a field value of a spec; a type that is not listed fails the test."""
    match value:
        case bool():
            yield not value
        case Kind():
            yield from (kind for kind in Kind if kind is not value)
        case int():
            yield value + 1
        case str():
            yield value + "x"
            yield value[:-1] or "y"
        case dict():
            for key, item in value.items():
                yield {k: v for k, v in value.items() if k != key}
                yield from (value | {key: other} for other in _mutations(item))
            yield value | {(max(value) + "x" if isinstance(max(value), str) else 77): next(iter(value.values()))}
        case tuple():
            yield (*value, value[-1])
            yield value[:-1]
            if len(set(value)) > 1:
                yield value[::-1]
            for index, item in enumerate(value):
                yield from ((*value[:index], other, *value[index + 1 :]) for other in _mutations(item))
        case GroupSpec():
            for member in fields(value):
                yield from (replace(value, **{member.name: o}) for o in _mutations(getattr(value, member.name)))
        case _:
            raise AssertionError(f"no mutation for {type(value)}")


@pytest.mark.requirement("P2")
@pytest.mark.parametrize("name", [member.name for member in fields(NamespaceSpec)])
def test_every_field_of_the_spec_changes_the_namespace(name: str) -> None:
    base = _spec()
    mutants = [replace(base, **{name: other}) for other in _mutations(getattr(base, name))]
    assert mutants
    for mutant in mutants:
        assert mutant.namespace_id() != base.namespace_id(), mutant
        assert any(line.startswith(name) for line in base.differences(mutant)), mutant
    assert len({mutant.namespace_id() for mutant in mutants}) == len({repr(mutant) for mutant in mutants})


@pytest.mark.requirement("P2")
def test_every_group_field_is_mutated() -> None:
    seen = {
        member.name
        for index in range(len(GROUPS))
        for mutant in _mutations(GROUPS)
        if len(mutant) == len(GROUPS)
        for member in fields(GroupSpec)
        if getattr(mutant[index], member.name) != getattr(GROUPS[index], member.name)
    }
    assert seen == {member.name for member in fields(GroupSpec)}


@pytest.mark.requirement("P2")
def test_neither_moved_bytes_nor_moved_text_collide() -> None:
    def spec(identity: dict[str, str]) -> bytes:
        return replace(_spec(), identity=identity).namespace_id()

    assert len({spec({"a": "bc"}), spec({"ab": "c"}), spec({"a": "b", "c": ""}), spec({}), spec({"": "abc"})}) == 5
    a, b = replace(_spec(), label="xy", tenant="z"), replace(_spec(), label="x", tenant="yz")
    assert a.namespace_id() != b.namespace_id()


@pytest.mark.requirement("P3")
def test_the_order_of_mappings_does_not_matter() -> None:
    base = _spec()
    turned = replace(
        base,
        identity=dict(reversed(list(base.identity.items()))),
        object_bytes=dict(reversed(list(base.object_bytes.items()))),
    )
    assert turned.namespace_id() == base.namespace_id()
    assert base.differences(turned) == []


@pytest.mark.requirement("P3")
def test_ids_and_keys_are_the_same_forever() -> None:
    """A change of these values orphans what is stored: it needs another NAMESPACE_FORMAT and a note."""
    assert _spec().namespace_id().hex() == "abec58c295da1c0fac13f1c8ec4373c1"
    assert chunk_key(bytes(range(32))).hex() == "53407e09c46d8ce7b8aeb82da9249881"
    assert chunk_key(bytes(range(32)), b"adapter").hex() == "ffd0f78bdb2cb10d62d809f78f5f50b6"


PROGRAM = """
from kvdepot.core.keys import NamespaceSpec, canonical_identity, chunk_key
from kvdepot.core.planner import GroupSpec
from kvdepot.core.calls import Kind
identity = canonical_identity({"names": {"alpha", "beta", "gamma", "delta"}, "kinds": frozenset(Kind)})
spec = NamespaceSpec(identity, 16, (GroupSpec(Kind.ATTENTION, 16, rank_block_bytes=(1,)),), {Kind.ATTENTION: 1})
print(spec.namespace_id().hex(), chunk_key(b"hash").hex())
"""


@pytest.mark.requirement("P3")
def test_a_fresh_process_with_another_hash_seed_names_the_same() -> None:
    def run(seed: str) -> str:
        env = os.environ | {"PYTHONHASHSEED": seed}
        return subprocess.run(
            [sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, check=True
        ).stdout

    assert len(run("1").split()) == 2
    assert run("1") == run("2")


@pytest.mark.requirement("P2")
def test_a_chunk_key_depends_on_hash_and_salt() -> None:
    keys = [chunk_key(b"ab"), chunk_key(b"a", b"b"), chunk_key(b"ab", b"b"), chunk_key(b"abb"), chunk_key(b"a" * 64)]
    assert len(set(keys)) == len(keys)
    assert {len(key) for key in keys} == {16}


@pytest.mark.parametrize("block_hash", [b"", b"x" * 65])
def test_a_chunk_key_needs_a_hash(block_hash: bytes) -> None:
    with pytest.raises(InvalidArgument, match=f"not {len(block_hash)}"):
        chunk_key(block_hash)


class Colour(Enum):
    RED = 1


class Number(IntEnum):
    ONE = 1


@dataclass
class Inner:
    depth: int = 1
    unset: int = field(init=False, repr=False)


@dataclass
class Outer:
    name: str
    inner: object


@dataclass
class SameAsOuter:
    name: str
    inner: object


class Foreign:
    pass


class Texty(str):
    __slots__ = ()


@pytest.mark.requirement("P2")
def test_identity_flattens_what_it_knows() -> None:
    value: dict[str, object] = {
        "b": True,
        "n": None,
        "i": 7,
        "f": 0.5,
        "s": 'é"1',
        "raw": b"\x01\xff",
        "e": Colour.RED,
        "one": Number.ONE,
        "path": Path("/models/toy"),
        "cls": Foreign,
        "fn": _spec,
        "builtin": len,
        "list": [1, (2, "x")],
        "set": {"b", "a"},
        "empty": {"d": {}, "l": (), "s": set()},
        "dotted.key": {3: "three", "": 0},
        "data": Outer("o", None),
    }
    here = __name__
    assert canonical_identity(value) == {
        "b": "true",
        "n": "null",
        "i": "7",
        "f": "0.5",
        "s": '"\\u00e9\\"1"',
        "raw": "0x01ff",
        "e": f"{here}.Colour.RED",
        "one": f"{here}.Number.ONE",
        "path": 'path:"/models/toy"',
        "cls": f"{here}.Foreign",
        "fn": f"{here}._spec",
        "builtin": "builtins.len",
        "list[0]": "1",
        "list[1][0]": "2",
        "list[1][1]": '"x"',
        "set{0}": '"a"',
        "set{1}": '"b"',
        "empty.d": "{}",
        "empty.l": "[]",
        "empty.s": "set()",
        '"dotted.key".(3)': '"three"',
        '"dotted.key".""': "0",
        "data.@class": f"{here}.Outer",
        "data.name": '"o"',
        "data.inner": "null",
    }


@pytest.mark.requirement("P2")
@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"a": [0, Foreign()]}, "a[1]"),
        ({"a": {"b": {"c": lambda: 0}}}, "a.b.c"),
        ({"a": Outer("x", Foreign())}, "a.inner"),
        ({"a": Inner()}, "a.unset"),
        ({"a": {Foreign(): 1}}, "a"),
        ({"a": {("t",): 1}}, "a"),
        ({"a": {Foreign()}}, "a{}"),
        ({"a": Texty("x")}, "a"),
        ({"a": 1j}, "a"),
        (Foreign(), "(the value itself)"),
    ],
)
def test_identity_denies_what_it_does_not_know(value: object, path: str) -> None:
    with pytest.raises(NamespaceError) as caught:
        canonical_identity(value)
    assert str(caught.value).startswith(f"{path}: ")


def test_identity_denies_local_names_cycles_and_depth() -> None:
    class Local:
        pass

    cycle: list[object] = []
    cycle.append({"again": cycle})
    deep: list[object] = []
    for _ in range(100):
        deep = [deep]
    for value, reason in ((Local, "<locals>"), (cycle, "contains itself"), (deep, "nested deeper")):
        with pytest.raises(NamespaceError, match=reason):
            canonical_identity({"a": value})


def test_identity_takes_the_same_value_twice() -> None:
    shared = [1]
    assert canonical_identity({"a": shared, "b": shared}) == {"a[0]": "1", "b[0]": "1"}


def test_identity_excludes_whole_subtrees_by_path() -> None:
    value = {"model": {"name": "toy", "log": {"level": Foreign()}}, "log": 1}
    assert canonical_identity(value, exclude={"model.log"}) == {"model.name": '"toy"', "log": "1"}


def test_identity_converts_foreign_values_only_when_told_how() -> None:
    def convert(value: object) -> object:
        return {"foreign": True} if isinstance(value, Foreign) else value

    assert canonical_identity({"a": Foreign(), "s": "x"}, convert=convert) == {"a.foreign": "true", "s": '"x"'}
    with pytest.raises(NamespaceError, match="complex"):
        canonical_identity({"a": 1j}, convert=convert)
    with pytest.raises(NamespaceError, match="nested deeper"):
        canonical_identity({"a": Foreign()}, convert=lambda _: Foreign())


leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(0, 2),
    st.sampled_from([0.0, 1.0]),
    st.sampled_from(["", "1", "a", "[0]", "null"]),
)
names = st.sampled_from(["a", "b", "a.b", "[0]", "", "@class", '"a"'])
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(names, st.integers(0, 1)), inner, max_size=3),
        st.frozensets(leaves, max_size=2),
        st.builds(Outer, st.just("a"), inner),
        st.builds(SameAsOuter, st.just("a"), inner),
    ),
    max_leaves=6,
)


def _plain(value: Any) -> Any:
    """A form whose `==` is what the identity should tell apart."""
    match value:
        case dict():
            return ("dict", frozenset((repr(key), _plain(item)) for key, item in value.items()))
        case list():
            return ("list", tuple(map(_plain, value)))
        case frozenset():
            return ("set", frozenset(map(_plain, value)))
        case Outer() | SameAsOuter():
            return (type(value).__name__, value.name, _plain(value.inner))
        case _:
            return (type(value).__name__, value)


@pytest.mark.requirement("P2")
@given(trees, trees)
def test_identities_are_equal_exactly_when_values_are(one: object, other: object) -> None:
    assert (canonical_identity(one) == canonical_identity(other)) == (_plain(one) == _plain(other))


@pytest.mark.requirement("P2")
@given(trees)
def test_identity_of_a_changed_leaf_differs(tree: object) -> None:
    wrapped = {"a": tree, "b": 1}
    assert canonical_identity(wrapped) != canonical_identity(wrapped | {"b": True})
    assert canonical_identity(wrapped) == canonical_identity(dict(reversed(wrapped.items())))


def test_differences_name_the_path_and_both_values() -> None:
    base = _spec()
    other = replace(
        base, identity={**base.identity, "tp": "4"}, groups=(replace(GROUPS[0], block_tokens=32), *GROUPS[1:])
    )
    assert base.differences(other) == ["groups[0].block_tokens: 16 != 32", "identity.tp: 2 != 4"]
    less = replace(base, identity={key: text for key, text in base.identity.items() if key != "tp"})
    assert base.differences(less) == ["identity.tp: 2 != (absent)"]


def test_check_sizes_takes_what_the_groups_imply() -> None:
    check_sizes(_spec())


@pytest.mark.parametrize("kind", list(Kind))
def test_check_sizes_refuses_a_lie_with_both_numbers(kind: Kind) -> None:
    spec = _spec()
    true = spec.object_bytes[kind]
    for said in (true - 1, true + 4096, 0):
        lie = replace(spec, object_bytes={**spec.object_bytes, kind: said})
        with pytest.raises(NamespaceRefused, match=f"{kind.name.lower()} is {said}, but the groups imply {true}"):
            check_sizes(lie)


def test_check_sizes_refuses_an_object_of_a_kind_without_a_group() -> None:
    spec = replace(_spec(), groups=GROUPS[:1], chunk_tokens=384)
    with pytest.raises(NamespaceRefused, match="kind window is 7168, but the groups imply 0"):
        check_sizes(spec)


@pytest.mark.requirement("P1")
def test_check_sizes_passes_the_planners_refusal_on() -> None:
    with pytest.raises(NamespaceRefused, match="chunk_tokens 400 is no multiple of 384"):
        check_sizes(replace(_spec(), chunk_tokens=400))


def test_check_sizes_bounds_every_text() -> None:
    long = "x" * (max(limits.LABEL_BYTES_MAX, limits.TENANT_BYTES_MAX, limits.EPOCH_BYTES_MAX) + 1)
    for name in ("label", "tenant", "epoch"):
        change: dict[str, Any] = {name: long}
        with pytest.raises(LimitExceeded, match=name):
            check_sizes(replace(_spec(), **change))
    with pytest.raises(LimitExceeded, match="identity entries"):
        check_sizes(replace(_spec(), identity={str(n): "" for n in range(limits.IDENTITY_ENTRIES_MAX + 1)}))
    with pytest.raises(LimitExceeded, match="bytes of a namespace spec"):
        check_sizes(replace(_spec(), identity={"a": "x" * limits.SPEC_BYTES_MAX}))
