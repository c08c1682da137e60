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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
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
"""Attention only; float32, where log probabilities differ by at most 0.0001, however a batch was cut (docs/soak.md)."""

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

GEMMA3 = Toy(
    "gemma3",
    "Gemma3TextConfig",
    _COMMON | {"num_hidden_layers": 6, "sliding_window": 512, "tie_word_embeddings": False},
    "float32",
    chunk_tokens=256,
)
"""Five layers of six look 512 tokens back, one looks at everything."""

GPT_OSS = Toy(
    "gpt_oss",
    "GptOssConfig",
    _COMMON | {"intermediate_size": 256, "sliding_window": 256, "num_local_experts": 4, "num_experts_per_tok": 2},
    "float32",
    chunk_tokens=256,
)
"""Every other layer looks 256 tokens back; attention sinks, and experts."""

MISTRAL = Toy("mistral", "MistralConfig", _COMMON | {"sliding_window": 500}, "float32", chunk_tokens=256)
"""No layer looks further back than 500 tokens, which is no multiple of a block."""

GEMMA4 = Toy(
    "gemma4",
    "Gemma4TextConfig",
    _COMMON
    | {
        "num_hidden_layers": 7,
        "layer_types": ["sliding_attention", *["sliding_attention", "full_attention"] * 3],
        "sliding_window": 700,
        "head_dim": 32,
        "num_key_value_heads": 1,
        "per_layer_config": {str(layer): {"head_dim": 256, "num_key_value_heads": 2} for layer in (2, 4, 6)},
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": VOCABULARY,
        "tie_word_embeddings": False,
    },
    "float32",
    chunk_tokens=512,
)
"""Four layers with windows, three without: their heads are so large that vLLM gives the four blocks 16 times longer."""

ONE_HEAD = Toy("one_head", "Qwen3Config", _COMMON | {"num_key_value_heads": 1}, "float32", chunk_tokens=256)
"""One KV head for all queries: with tensor parallel, vLLM gives each rank a copy of it."""

LATENT = Toy(
    "latent",
    "DeepseekV2Config",
    {name: value for name, value in _COMMON.items() if name != "head_dim"}
    | {
        "num_key_value_heads": 4,
        "first_k_dense_replace": 4,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 64,
        "v_head_dim": 64,
    },
    "bfloat16",
    chunk_tokens=256,
)
"""MLA: one latent vector a token, of the size that vLLM's CPU kernels have. With prefix caching they need AMX."""


def make_toy(toy: Toy, directory: Path) -> Path:
    """The folder of `toy` below `directory`, written there unless it is complete already."""
    recipe = [_RECIPE, toy.config_class, toy.config, toy.dtype, toy.seed]
    return publish(toy.name, recipe, directory, partial(_write, toy))


def publish(name: str, recipe: Sequence[Any], directory: Path, write: Callable[[Path], None]) -> Path:
    """The folder that `write` fills, below `directory`. `recipe` is everything that it is made from.

    The folder's name holds a digest of the recipe. It is published by a rename, so two processes may make it at once.
    """
    digest = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()
    target = directory / f"{name}-{digest[:12]}"
    if target.is_dir():
        return target
    directory.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=directory))
    try:
        write(unfinished)
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
    _sharpen(model, norm_is_offset=toy.config_class in ("Qwen3NextConfig", "Gemma3TextConfig"))
    model.save_pretrained(directory)
    _tokenizer().save_pretrained(directory)


def _sharpen(model: Any, *, norm_is_offset: bool) -> None:
    """Scale queries and keys by two each, and spread the state's decay rates over 0.0003 to 0.03 a token."""
    import torch

    normed = any(name.endswith("q_norm.weight") for name, _ in model.named_parameters())

    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                weight.fill_(1.0 if norm_is_offset else 2.0)
            elif not normed and name.endswith(("q_proj.weight", "k_proj.weight")):
                weight.mul_(2.0)
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
