"""The API's own schemas of Kubernetes objects: without them tests skip with a reason, and fail in CI."""

from __future__ import annotations

import json
import os
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import pytest
from jsonschema import Draft202012Validator
from referencing import Registry, Resource

VERSIONS: Final = ("1.29.0", "1.37.0")
"""The oldest and the newest that the manifests are for."""


@cache
def _schemas(version: str) -> tuple[Path, Registry[Any]]:
    spec = find_spec("kubernetes_validate")  # only its schemas: its own code needs more
    if spec is None and "CI" not in os.environ:
        pytest.skip("there are no schemas (pip: kubernetes-validate)")
    assert spec is not None
    assert spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0], "kubernetes-json-schema", f"v{version}-local-strict")
    definitions: Resource[Any] = Resource.from_contents(json.loads((folder / "_definitions.json").read_text()))
    return folder, definitions @ Registry()


def complaints(document: dict[str, Any], version: str) -> list[str]:
    """Return what the API's strict schema of a version refuses in a document."""
    folder, registry = _schemas(version)
    group, _, release = document["apiVersion"].rpartition("/")
    name = "-".join(part for part in (document["kind"].lower(), group.split(".")[0], release) if part)
    schema = json.loads((folder / f"{name}.json").read_text())
    return [error.message for error in Draft202012Validator(schema, registry=registry).iter_errors(document)]
