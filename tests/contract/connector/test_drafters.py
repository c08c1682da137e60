"""Engines with a draft model: what they share goes by the drafter's weights, not by its place (row C7)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import scripted_engine
from tests.fakes.direct_session import DirectDepot
from tests.fakes.scripted_engine import BLOCK, ScriptedEngine, model_folder
from tests.rigs.connector_rig import Make, cold, prompt
from tests.rigs.speculative_configs import drafting

FULL = 9 * BLOCK


Start = Callable[..., ScriptedEngine]


@pytest.fixture
def start(make: Make, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Starts an engine with a draft model in this folder; None: without one."""
    configure = scripted_engine.engine_config

    def with_drafter(drafter: Path | None, **options: Any) -> ScriptedEngine:
        def configured(*args: Any, **config: Any) -> Any:
            plain = configure(*args, **config)
            return plain if drafter is None else drafting(plain, "draft_model", drafter)

        monkeypatch.setattr(scripted_engine, "engine_config", configured)
        return make(**options)

    return with_drafter


@pytest.mark.requirement("C7")
def test_engines_share_with_the_same_drafter_only(start: Start, tmp_path: Path) -> None:
    first, same, other = (model_folder(tmp_path / name) for name in ("first", "same", "other"))
    (other / "model.safetensors").write_bytes(b"a drafter's weights")
    hits = []
    for drafter in (first, same, other):
        engine = start(drafter)
        assert engine.generate(prompt(9.5)) == cold(prompt(9.5))
        hits.append(list(engine.hits.values())[-1])
        engine.assert_clean()
    assert hits == [0, FULL, 0]


@pytest.mark.requirement("C7")
@pytest.mark.parametrize("speculates", [False, True])
def test_draft_layers_are_not_audited(start: Start, depot: DirectDepot, folder: Path, speculates: bool) -> None:
    """Nobody can compute them again: vLLM may skip the drafter for a step."""
    start(folder if speculates else None).generate(prompt(9.5))
    (namespace,) = depot.engine._tree.namespaces.by_id.values()
    assert bool(namespace.elements) is not speculates
