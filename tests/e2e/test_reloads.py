"""Weights that an engine changes in place, without a reset: their KV never gets the former ones' name."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from demo.engine import ROOT
from demo.toys import DENSE, make_toy
from tests.e2e.fleet import Fleet

PROMPT_TOKENS = 1400
NO_LOAD = {"max_load_tokens": 0}


def other_weights(folder: Path) -> Path:
    """Return a copy of the toy whose first layer computes something else."""
    shutil.copytree(make_toy(DENSE, ROOT / "build" / "toys"), folder)
    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if "layers.0" in name and "norm" in name:
            tensor.mul_(2.0)
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


class Loader:
    """vLLM's `worker_extension_cls`. It loads weights into the model, as those of trainers do."""

    model_runner: Any

    def load_into_model(self, folder: str) -> None:
        """Load what differs. Others' memory vLLM may have packed for its kernels."""
        (path,) = Path(folder).glob("*.safetensors")
        tensors = load_file(path).items()
        self.model_runner.model.load_weights([(name, tensor) for name, tensor in tensors if "norm" in name])


@pytest.mark.long(seconds=35)
@pytest.mark.requirement("I1")
@pytest.mark.parametrize(
    ("way", "reset"),
    [("reload_weights", False), ("reload_weights", True), ("reset_weights", False), ("load_into_model", False)],
)
def test_kv_of_changed_weights_and_of_former_ones_never_meet(
    fleet: Fleet, tmp_path: Path, *, way: str, reset: bool
) -> None:
    names = [f"{name}_{way}_{reset}" for name in ("changed", "former")]
    for name in names:
        fleet.define(name, DENSE, {"block_size": 32, "worker_extension_cls": "tests.e2e.test_reloads.Loader"})
    fleet.launch(names)
    changed, former = map(fleet.engine, names)
    old, new = fleet.prompt(PROMPT_TOKENS), fleet.prompt(PROMPT_TOKENS)
    fleet.ask(former, old)
    fleet.forget(former)
    if reset:
        changed.reset_connector()
    if way == "reload_weights":
        changed.call_workers(way, None, str(other_weights(tmp_path / "other")))
    elif way == "load_into_model":
        changed.call_workers(way, str(other_weights(tmp_path / "other")))
    else:
        changed.call_workers(way)
    wrong = []
    for engine, prompt, writer in ((changed, old, None), (former, new, changed)):
        if writer is not None:
            fleet.ask(writer, prompt)
            fleet.forget(writer)
        fleet.forget(engine)
        answer = fleet.ask(engine, prompt)
        fleet.forget(engine)
        computed = fleet.ask(engine, prompt, params=NO_LOAD)
        if answer.tokens != computed.tokens:
            wrong.append((engine.log.name, answer.external_tokens, answer.tokens, computed.tokens))
    assert not wrong
