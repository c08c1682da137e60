"""LoRA adapters of the dense toy, with random weights that change the next tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import save_file

from demo.toys import DENSE

_RANK: Final = 8


def write_adapter(folder: Path, content: int) -> None:
    """Write an adapter in place. Two contents are two adapters; one content is always the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(content)
    hidden, head = DENSE.config["hidden_size"], DENSE.config["head_dim"]
    outputs = {
        "q_proj": DENSE.config["num_attention_heads"] * head,
        "k_proj": DENSE.config["num_key_value_heads"] * head,
        "v_proj": DENSE.config["num_key_value_heads"] * head,
    }
    tensors = {}
    for layer in range(DENSE.config["num_hidden_layers"]):
        for name, rows in outputs.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(_RANK, hidden, generator=generator) * 0.05
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(rows, _RANK, generator=generator) * 0.3
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": _RANK, "lora_alpha": 16, "bias": "none",
        "lora_dropout": 0.0, "target_modules": list(outputs), "base_model_name_or_path": DENSE.name,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, str(folder / "adapter_model.safetensors"))
