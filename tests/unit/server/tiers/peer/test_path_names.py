"""Which names of a lookup prove where a prompt is (ADR 86)."""

from __future__ import annotations

import pytest
from kvdepot.core.kinds import Kind
from kvdepot.server.storage.shared_layout import object_path
from kvdepot.server.tiers.peer import path_names
from kvdepot.server.tiers.peer.path_names import PathNames

NAMESPACE, OTHER = bytes(16), bytes(15) + b"x"


def files(*kinds: Kind, namespace: bytes = NAMESPACE) -> list[str]:
    """Return the names of three chunks, parents first."""
    return [object_path(namespace, bytes([chunk]) * 16, kind) for chunk in range(3) for kind in kinds]


@pytest.mark.parametrize("kinds", [[kind] for kind in Kind])
def test_the_only_kind_of_a_model_makes_its_paths(kinds: list[Kind]) -> None:
    assert PathNames().of(files(*kinds), files(*kinds)[1:]) == files(*kinds)[1:]


def test_other_kinds_prove_nothing() -> None:
    names = PathNames()
    asked = files(Kind.ATTENTION, Kind.STATE)
    assert names.of(asked, asked[2:]) == files(Kind.ATTENTION)[1:]
    assert names.of(asked, files(Kind.STATE)) == []


def test_where_paths_are_known_a_lookup_of_other_kinds_proves_nothing() -> None:
    names = PathNames()
    states = files(Kind.STATE)
    assert names.of(states, states) == states, "it may be the only kind"
    names.of(files(Kind.ATTENTION), [])
    assert names.of(states, states) == []
    others = files(Kind.STATE, namespace=OTHER)
    assert names.of(others, others) == others


def test_few_namespaces_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(path_names, "NAMESPACES_MAX", 1)
    names = PathNames()
    for namespace in (NAMESPACE, OTHER):
        names.of(files(Kind.ATTENTION, namespace=namespace), [])
    assert names.of(files(Kind.STATE), files(Kind.STATE)) == files(Kind.STATE)
    assert names.of(["x"], ["x"]) == []
