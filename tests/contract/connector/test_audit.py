"""The audit file: one line per object that a rank stores or loads, with digests of the engine's own blocks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.connector_rig import Make, prompt


def lines(path: Path, event: str) -> dict[tuple[Any, ...], list[str]]:
    """Digests by object and rank, of all files of the engines."""
    digests = {}
    for file in path.parent.glob(f"{path.name}.*.jsonl"):
        for line in map(json.loads, file.read_text().splitlines()):
            if line["event"] == event:
                assert bool(line["request"]) is (event == "loaded")
                place = [line[name] for name in ("key", "kind", "group", "rank", "first_block")]
                digests[tuple(place)] = line["blocks"]
    return digests


@pytest.mark.requirement("I1")
@pytest.mark.parametrize("options", [{}, {"hybrid": True}, {"ranks": 2}], ids=["dense", "hybrid", "two ranks"])
def test_what_one_engine_loads_has_the_digests_of_what_another_one_stored(
    make: Make, tmp_path: Path, options: dict[str, Any]
) -> None:
    tokens = prompt(5.5)
    for name in ("first", "second"):
        make(**options, settings={"audit_path": str(tmp_path / name)}).generate(tokens)
    stored, loaded = lines(tmp_path / "first", "stored"), lines(tmp_path / "second", "loaded")
    assert loaded, "an audit that records no load proves nothing"
    assert loaded.items() <= stored.items()
    assert not lines(tmp_path / "first", "loaded")
