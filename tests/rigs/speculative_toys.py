"""Toys for speculative decoding: targets that mostly continue a token in one way, and heads that draft for them.

Nothing that a drafter says is accepted by a target with random weights. Here the target's next token follows from its
last one, more often the larger `alpha` is. The rest of the weights are those of the toy, so its cache still counts.
Measured with 3 draft tokens: of the MTP head's, 5 % are accepted at 0.2, 30 % at 0.3 and 99 % at 0.5. Of the EAGLE-3
head's, 23 % are accepted at 0.5 and a third at 1.0, where the target says five tokens in a circle.
"""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

from demo.toys import CONTEXT_TOKENS_MAX, DENSE, HYBRID, VOCABULARY, Toy, make_toy, publish

_RECIPE = 1
_CYCLE = 5
"""Tokens are continued in cycles of this length."""
_ATTENTION_LAYER = "model.layers.3."
"""Of the hybrid toy: the head's own layer is a copy."""
_HIDDEN, _INTERMEDIATE, _HEADS, _KV_HEADS, _HEAD = 256, 512, 4, 2, 64


def make_markov(toy: Toy, alpha: float, models: Path) -> Path:
    """The folder of a toy whose tokens follow from the one before."""
    base = make_toy(toy, models)
    return publish(f"{toy.name}-markov", [_RECIPE, base.name, alpha], models, partial(_write_markov, base, alpha))


def make_hybrid_mtp(alpha: float, models: Path) -> Path:
    """Likewise of the hybrid toy with an MTP head of one module."""
    base = make_toy(HYBRID, models)
    return publish("hybrid-mtp", [_RECIPE, base.name, alpha], models, partial(_write_mtp, base, alpha))


def make_eagle3(alpha: float, models: Path, seed: int = 3) -> Path:
    """The folder of an EAGLE-3 head for the dense toy `make_markov(DENSE, alpha)`."""
    target = make_markov(DENSE, alpha, models)
    return publish("eagle3", [_RECIPE, target.name, seed], models, partial(_write_eagle3, target, seed))


def _successors(vocabulary: int) -> Any:
    import torch

    successors = torch.arange(vocabulary)
    for start in range(2, vocabulary - _CYCLE, _CYCLE):
        successors[start : start + _CYCLE] = torch.roll(torch.arange(start, start + _CYCLE), -1)
    return successors


def _directions(shape: Any) -> Any:
    """One random direction a token: embeddings have it, and the head of the token that follows looks for it."""
    import torch

    return torch.randn(shape, generator=torch.Generator().manual_seed(7))


def _load(base: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return dict(load_file(base / "model.safetensors"))


def _save(weights: dict[str, Any], folder: Path) -> None:
    from safetensors.torch import save_file

    tensors = {name: value.contiguous() for name, value in weights.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _markov_weights(base: Path, alpha: float) -> dict[str, Any]:
    import torch

    weights = _load(base)
    embedding = weights["model.embed_tokens.weight"]
    directions = _directions(embedding.shape)
    head = torch.zeros_like(directions)
    head[_successors(len(head))] = directions * 0.06
    weights["model.embed_tokens.weight"] = (directions * alpha).to(embedding.dtype)
    weights["lm_head.weight"] = head.to(embedding.dtype)
    return weights


def _write_markov(base: Path, alpha: float, folder: Path) -> None:
    shutil.copytree(base, folder, dirs_exist_ok=True)
    _save(_markov_weights(base, alpha), folder)


def _write_mtp(base: Path, alpha: float, folder: Path) -> None:
    import torch

    shutil.copytree(base, folder, dirs_exist_ok=True)
    weights = _markov_weights(base, alpha)
    dtype = weights["model.embed_tokens.weight"].dtype
    weights |= {
        name.replace(_ATTENTION_LAYER, "mtp.layers.0."): value.clone()
        for name, value in weights.items()
        if name.startswith(_ATTENTION_LAYER)
    }
    # Of the two halves that the head combines, embedding and hidden state, it takes the embedding.
    weights["mtp.fc.weight"] = torch.eye(_HIDDEN, 2 * _HIDDEN).to(dtype)
    for name in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding"):
        weights[f"mtp.{name}.weight"] = torch.zeros(_HIDDEN, dtype=dtype)  # an offset: scaled by one
    _save(weights, folder)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_nextn_predict_layers": 1}))


def _write_eagle3(target: Path, seed: int, folder: Path) -> None:
    """The head reads the target's last auxiliary layer and says what follows two tokens later."""
    import torch

    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> Any:
        return torch.randn(rows, columns, generator=generator) * 0.06

    directions = _directions((VOCABULARY, _HIDDEN))
    successors = _successors(VOCABULARY)
    head = torch.zeros_like(directions)
    head[successors[successors]] = directions * 0.06
    fc = torch.zeros(_HIDDEN, 3 * _HIDDEN)
    fc[:, 2 * _HIDDEN :] = torch.eye(_HIDDEN)
    weights = {
        "fc.weight": fc,
        "norm.weight": torch.ones(_HIDDEN),
        "lm_head.weight": head,
        "midlayer.input_layernorm.weight": torch.ones(_HIDDEN),
        "midlayer.hidden_norm.weight": torch.ones(_HIDDEN),
        "midlayer.post_attention_layernorm.weight": torch.ones(_HIDDEN),
        "midlayer.self_attn.q_proj.weight": matrix(_HEADS * _HEAD, 2 * _HIDDEN),
        "midlayer.self_attn.k_proj.weight": matrix(_KV_HEADS * _HEAD, 2 * _HIDDEN),
        "midlayer.self_attn.v_proj.weight": matrix(_KV_HEADS * _HEAD, 2 * _HIDDEN),
        "midlayer.self_attn.o_proj.weight": matrix(_HIDDEN, _HEADS * _HEAD),
        "midlayer.mlp.gate_proj.weight": matrix(_INTERMEDIATE, _HIDDEN),
        "midlayer.mlp.up_proj.weight": matrix(_INTERMEDIATE, _HIDDEN),
        "midlayer.mlp.down_proj.weight": matrix(_HIDDEN, _INTERMEDIATE),
    }
    _save(weights, folder)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": _HIDDEN,
        "intermediate_size": _INTERMEDIATE,
        "num_hidden_layers": 1,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD,
        "vocab_size": VOCABULARY,
        "draft_vocab_size": VOCABULARY,
        "max_position_embeddings": CONTEXT_TOKENS_MAX,
        "rms_norm_eps": 1e-6,
        "torch_dtype": "float32",
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 1,
        # With four target layers vLLM names two by default, and the head needs three.
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
    }
    (folder / "config.json").write_text(json.dumps(config))
