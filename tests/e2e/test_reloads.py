"""Weights that vLLM reloads in place (`reload_weights`), without a reset: their KV never gets the former ones' name."""

from __future__ import annotations

import shutil
from pathlib import Path

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


@pytest.mark.long(seconds=35)
@pytest.mark.requirement("I1")
@pytest.mark.parametrize("reset", [False, True], ids=["without_a_reset", "after_a_reset"])
def test_kv_of_reloaded_weights_and_of_former_ones_never_meet(fleet: Fleet, tmp_path: Path, *, reset: bool) -> None:
    name = f"reloaded_{reset}"
    fleet.define(name, DENSE, {"block_size": 32})
    fleet.launch([name, "dense"])
    reloaded, former = fleet.engine(name), fleet.engine("dense")
    old, new = fleet.prompt(PROMPT_TOKENS), fleet.prompt(PROMPT_TOKENS)
    fleet.ask(former, old)
    fleet.forget(former)
    if reset:
        reloaded.reset_connector()
    reloaded.call_workers("reload_weights", None, str(other_weights(tmp_path / "other")))
    wrong = []
    for engine, prompt, writer in ((reloaded, old, None), (former, new, reloaded)):
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
