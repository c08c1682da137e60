"""A quantized model (rows P2, P4): int8 weights and activations, as compressed-tensors has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from demo.engine import ROOT
from demo.toys import DENSE, make_toy
from tests.e2e import arena_bytes
from tests.e2e.fleet import Fleet

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
CHUNK = 256
INT8: dict[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True}
W8A8: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": INT8 | {"strategy": "channel", "dynamic": False},
            "input_activations": INT8 | {"strategy": "token", "dynamic": True},
        }
    },
}


def quantized(plain: Path, folder: Path) -> Path:
    """The same model with each linear layer's weights as int8, and a scale for each of its rows."""
    folder.mkdir()
    for file in plain.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(plain / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        weight = tensors[name].float()
        scale = weight.abs().amax(dim=1, keepdim=True) / 127
        tensors[name] = torch.round(weight / scale).to(torch.int8)
        tensors[f"{name}_scale"] = scale
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": W8A8}))
    return folder


@pytest.mark.requirement("P2", "P4")
@pytest.mark.long(seconds=50)
def test_a_quantized_engine_that_was_restarted_loads_what_it_stored_and_no_other_s(
    fleet: Fleet, tmp_path: Path
) -> None:
    plain: dict[str, Any] = {"block_size": 32, "dtype": "bfloat16"}
    model = quantized(make_toy(DENSE, ROOT / "build" / "toys"), tmp_path / "model")
    fleet.define("unquantized", DENSE, plain)
    fleet.define("quantized", DENSE, plain | {"model": str(model)})
    ids = fleet.prompt(3 * CHUNK + 40)
    engine = fleet.engine("quantized")
    before = arena_bytes.committed(fleet.daemon.arena)
    cold = fleet.ask(engine, ids)
    fleet.daemon.settle(summed=True)
    stored = arena_bytes.committed(fleet.daemon.arena) - before
    restarted = fleet.restart("quantized")
    loaded = fleet.ask(restarted, ids)
    assert (cold.external_tokens, loaded.external_tokens) == (0, 3 * CHUNK), fleet.told()
    assert loaded.tokens == cold.tokens

    other = fleet.ask(fleet.engine("unquantized"), ids)
    fleet.end("unquantized")
    assert other.external_tokens == 0

    fleet.forget(restarted)
    arena_bytes.damage(fleet.daemon.arena, max(stored))
    damaged = fleet.ask(restarted, ids)
    fleet.end("quantized")
    assert damaged.external_tokens == 3 * CHUNK
    assert damaged.tokens != cold.tokens, "what is loaded decides what it says"
