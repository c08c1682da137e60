"""Tiny models with random weights: real input for a KV cache, made locally in a second.

Greedy tokens of such a model are deterministic and differ when bytes of its cache
are wrong. The default initialisation would not do: its attention is nearly uniform,
and its recurrent state forgets within a few tokens, so that a wrong cache yields the
right tokens. `_sharpen` makes attention selective and the state remember hundreds of
tokens; then one changed token, 5 or 690 tokens back, changes what follows (of 4
prompts each: dense 3 to 4 of 4, hybrid 3 to 4 of 4; before: 0 to 1 of 4).

The seed is fixed, so two machines make the same weights, and the weights digest in a
namespace is the same on each run.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VOCABULARY = 2048
CONTEXT_TOKENS_MAX = 8192
SEED = 20261121
_RECIPE = 2  # raise it when what is written for the same fields changes

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": CONTEXT_TOKENS_MAX,
    "initializer_range": 0.06,
}


@dataclass(frozen=True, slots=True)
class Toy:
    """A model to make and how vLLM has to serve it on a CPU."""

    name: str
    config_class: str
    config: dict[str, Any]
    dtype: str
    chunk_tokens: int  # kvdepot's default for it
    checkpoints_per_prompt: int = 0  # with vLLM's default retention
    engine: dict[str, Any] = field(default_factory=dict)
    seed: int = SEED


DENSE = Toy("dense", "Qwen3Config", _COMMON, "float32", chunk_tokens=256)
"""Attention only; float32, where cold, local and external runs agree exactly however a batch was cut."""

HYBRID = Toy(
    "hybrid",
    "Qwen3NextConfig",
    _COMMON
    | {
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_conv_kernel_dim": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
    },
    "bfloat16",
    chunk_tokens=384,
    checkpoints_per_prompt=1,
    engine={"mamba_cache_mode": "align", "block_size": 384},
)
"""Three gated-delta-net groups (recurrent state) and one attention group; serial requests only, see requirements."""


def make_toy(toy: Toy, directory: Path) -> Path:
    """The folder of `toy` below `directory`, written there unless it is complete already.

    The folder's name holds a digest of everything it is made from. It is published by a
    rename, so two processes may make it at once.
    """
    recipe = json.dumps([_RECIPE, toy.config_class, toy.config, toy.dtype, toy.seed], sort_keys=True)
    target = directory / f"{toy.name}-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"
    if target.is_dir():
        return target
    directory.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{toy.name}-", dir=directory))
    try:
        _write(toy, unfinished)
        try:
            unfinished.rename(target)
        except OSError:  # another process published it first
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return target


def _write(toy: Toy, directory: Path) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    import transformers

    torch.manual_seed(toy.seed)
    config = getattr(transformers, toy.config_class)(**toy.config)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, toy.dtype))
    _sharpen(model, norm_is_offset=toy.config_class == "Qwen3NextConfig")
    model.save_pretrained(directory)
    _tokenizer().save_pretrained(directory)


def _sharpen(model: Any, *, norm_is_offset: bool) -> None:
    """Scale queries and keys by two each, and spread the state's decay rates over 0.0003 to 0.03 a token."""
    import torch

    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                weight.fill_(1.0 if norm_is_offset else 2.0)
            elif name.endswith("A_log"):
                weight.copy_(torch.log(10 ** (torch.rand(weight.shape) * 2 - 3.5)))


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<unk>": 0, "<eos>": 1} | {f"w{token}": token for token in range(2, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>")


def prompt(tokens: int, seed: int | str) -> list[int]:
    """Token ids of a random prompt of `tokens` tokens; equal for equal seeds, everywhere."""
    draw = random.Random(f"kvdepot-prompt-{seed}")
    return [draw.randrange(2, VOCABULARY) for _ in range(tokens)]
