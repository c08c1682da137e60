"""Which KV caches vLLM makes for a model, by its `config.json`: the layers of attention, windows and states.

Every architecture of the table is compared with vLLM's own specs (tests/golden/kv_cache_specs.json). Others are
refused: a guess would size a node by a wrong number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvdepot.core.errors import ConfigError, InvalidArgument

ELEMENT_BYTES: Final[Mapping[str, int]] = {
    "float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1,
}  # fmt: skip
AUTO: Final = "auto"
Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Attention:
    """Layers of attention with equal caches.

    Args:
        layers: How many layers.
        heads: KV heads of a layer.
        elements: Elements of a token and a head, keys and values together.
        window_tokens: Tokens to which a token attends; 0: to all before it.
        latent: MLA: each rank holds the same latent.
    """

    layers: int
    heads: int
    elements: int
    window_tokens: int = 0
    latent: bool = False


@dataclass(frozen=True, slots=True)
class States:
    """Recurrent layers with equal states.

    Args:
        layers: How many layers.
        heads: Heads, over which ranks share the temporal state.
        head_elements: Elements of the temporal state of a head.
        conv_channels: Channels of the convolution, without `grouped_channels`.
        conv_tokens: Tokens that the convolution keeps.
        groups: Groups of Mamba 2, each with `group_channels`. Ranks may have copies of a group.
        group_channels: Channels of the convolution of a group.
        dtype: Of the temporal state; `auto`: that of the model.
    """

    layers: int
    heads: int
    head_elements: int
    conv_channels: int
    conv_tokens: int
    groups: int = 0
    group_channels: int = 0
    dtype: str = AUTO


@dataclass(frozen=True, slots=True)
class Model:
    """What decides about the KV caches of a model. `dtype` is the model's, as vLLM serves it by default."""

    architecture: str
    dtype: str
    context_tokens: int
    query_heads: int
    attention: tuple[Attention, ...]
    states: tuple[States, ...] = ()
    kv_cache_dtype: str = AUTO  # of a checkpoint that names the type of its cache

    @property
    def is_hybrid(self) -> bool:
        return bool(self.states)


def describe_model(config: Config) -> Model:
    """Return the caches of a model. Raise ConfigError for an unknown architecture, or a key that is missing."""
    architecture = str((config.get("architectures") or ["none"])[0])
    builder = _BUILDERS.get(architecture)
    if builder is None:
        raise ConfigError(
            "config.json", "architectures", f"the KV caches of {architecture} are not known here",
            advice="start the engine once: kvdepotctl describe NAMESPACE shows its sizes. Known are "
            + ", ".join(sorted(_BUILDERS)),
        )  # fmt: skip
    text = config.get("text_config") or config
    if builder is _gemma3:
        text = {**_GEMMA3, **text}
    attention, states = builder(text)
    return Model(
        architecture,
        _dtype(text, config),
        _integer(text, "max_position_embeddings"),
        _integer(text, "num_attention_heads"),
        tuple(one for one in attention if one.layers),
        tuple(one for one in states if one.layers),
        _kv_cache_dtype(config),
    )


def _dtype(*configs: Config) -> str:
    """Return the type that vLLM serves with `--dtype auto`: float32 checkpoints are served as bfloat16."""
    names = (str(one.get("dtype") or one.get("torch_dtype") or "") for one in configs)
    name = next((name.removeprefix("torch.") for name in names if name), "")
    if name in ("", "float32"):
        return "bfloat16"
    if name not in ELEMENT_BYTES:
        raise ConfigError("config.json", "dtype", f"unknown type {name!r}", advice="name it with --dtype")
    return name


def _kv_cache_dtype(config: Config) -> str:
    """Return fp8 for a checkpoint with scales for its KV cache: vLLM then uses them by default."""
    quantization = config.get("quantization_config") or {}
    scheme = quantization.get("kv_cache_scheme") or {}
    named = str(quantization.get("kv_cache_quant_algo") or (scheme.get("type") and f"fp{scheme.get('num_bits')}") or "")
    if not named:
        return AUTO
    if named.lower() != "fp8":
        raise ConfigError("config.json", "quantization_config", f"a KV cache of type {named} is not known here")
    return "fp8"


def _integer(config: Config, key: str, default: int | None = None) -> int:
    value = config.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ConfigError("config.json", key, f"expected a number, got {value!r}")
    return value


def _head_elements(config: Config) -> int:
    """Return the keys and values of a token and a head."""
    if config.get("head_dim"):
        return 2 * _integer(config, "head_dim")
    return 2 * (_integer(config, "hidden_size") // _integer(config, "num_attention_heads"))


def _heads(config: Config) -> int:
    return _integer(config, "num_key_value_heads", _integer(config, "num_attention_heads"))


Caches = tuple[list[Attention], list[States]]


def _windows(window: int, types: list[str]) -> Iterator[tuple[int, int]]:
    """Yield (layers, window) of full and of sliding attention."""
    unknown = set(types) - {"full_attention", "sliding_attention"}
    if unknown:
        raise ConfigError("config.json", "layer_types", f"layers of type {', '.join(sorted(unknown))} are not known")
    yield types.count("full_attention"), 0
    yield types.count("sliding_attention"), window


def _plain(config: Config, default_window: int = 0) -> Caches:
    """Attention of equal layers, or full and sliding ones as `layer_types` says."""
    layers = _integer(config, "num_hidden_layers")
    window = int(config.get("sliding_window", default_window) or 0)
    if "use_sliding_window" in config:  # Qwen's windows are off unless this key says otherwise
        if config["use_sliding_window"]:
            raise ConfigError("config.json", "use_sliding_window", "windows of this architecture are not known here")
        window = 0
    types = config.get("layer_types") or ["sliding_attention" if window else "full_attention"] * layers
    if window and "sliding_attention" not in types:
        raise ConfigError("config.json", "layer_types", f"no layer slides, but sliding_window is {window}")
    heads, elements = _heads(config), _head_elements(config)
    return [Attention(count, heads, elements, size) for count, size in _windows(window, types)], []


def _mistral(config: Config) -> Caches:
    return _plain(config, default_window=4096)


def _gpt_oss(config: Config) -> Caches:
    layers = _integer(config, "num_hidden_layers")
    types = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(layers)]
    return _plain({**config, "layer_types": types}, default_window=128)


_GEMMA3: Final[Mapping[str, int]] = {
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096,
    "num_hidden_layers": 26, "max_position_embeddings": 131072,
}  # fmt: skip
"""Defaults of transformers: published files of Gemma 3 leave keys out."""


def _gemma3(config: Config) -> Caches:
    if config.get("use_bidirectional_attention"):
        raise ConfigError("config.json", "use_bidirectional_attention", "the KV of a prefix depends on what follows")
    pattern = _integer(config, "sliding_window_pattern", 6)
    layers = range(1, _integer(config, "num_hidden_layers") + 1)
    types = ["sliding_attention" if layer % pattern else "full_attention" for layer in layers]
    return _plain({"layer_types": types, **config})


def _mla(config: Config) -> Caches:
    elements = _integer(config, "kv_lora_rank") + _integer(config, "qk_rope_head_dim")
    return [Attention(_integer(config, "num_hidden_layers"), 1, elements, latent=True)], []


def _delta_net(config: Config) -> Caches:
    """Gated delta nets: Qwen3-Next and Qwen3.5."""
    layers = _integer(config, "num_hidden_layers")
    interval = _integer(config, "full_attention_interval", 4)
    types = config.get("layer_types") or [
        "linear_attention" if layer % interval else "full_attention" for layer in range(1, layers + 1)
    ]
    keys, values = _integer(config, "linear_num_key_heads"), _integer(config, "linear_num_value_heads")
    key_dim, value_dim = _integer(config, "linear_key_head_dim"), _integer(config, "linear_value_head_dim")
    states = States(
        types.count("linear_attention"), values, value_dim * key_dim,
        2 * keys * key_dim + values * value_dim, _integer(config, "linear_conv_kernel_dim") - 1,
        dtype=str(config.get("mamba_ssm_dtype") or AUTO),
    )  # fmt: skip
    return [Attention(types.count("full_attention"), _heads(config), _head_elements(config))], [states]


def _mamba2(layers: int, heads: int, head_dim: int, config: Config, names: tuple[str, str, str], dtype: str) -> States:
    """`names`: the keys of the size of a state, of the groups and of the convolution."""
    size, groups, kernel = (_integer(config, name) for name in names)
    return States(layers, heads, head_dim * size, heads * head_dim, kernel - 1, groups, 2 * size, dtype)


_MAMBA_KEYS: Final = ("mamba_d_state", "mamba_n_groups", "mamba_d_conv")


def _granite(config: Config) -> Caches:
    types = config.get("layer_types")
    if not types:
        raise ConfigError("config.json", "layer_types", "missing")
    heads = _integer(config, "mamba_n_heads")
    inner = _integer(config, "mamba_expand") * _integer(config, "hidden_size")
    states = _mamba2(types.count("mamba"), heads, inner // heads, config, _MAMBA_KEYS, AUTO)
    elements = _head_elements({**config, "head_dim": None})  # vLLM does not read it
    return [Attention(types.count("attention"), _heads(config), elements)], [states]


def _falcon_h1(config: Config) -> Caches:
    """Attention and a state in every layer."""
    layers, heads = _integer(config, "num_hidden_layers"), _integer(config, "mamba_n_heads")
    inner = config.get("mamba_d_ssm") or int(config["mamba_expand"] * _integer(config, "hidden_size"))
    states = _mamba2(layers, heads, inner // heads, config, _MAMBA_KEYS, AUTO)
    return [Attention(layers, _heads(config), _head_elements(config))], [states]


def _nemotron_h(config: Config) -> Caches:
    pattern = config.get("hybrid_override_pattern")
    if not isinstance(pattern, str) or set(pattern) - set("M*-E"):
        raise ConfigError("config.json", "hybrid_override_pattern", f"expected layers M, *, - and E, got {pattern!r}")
    names = ("ssm_state_size", "n_groups", "conv_kernel")
    states = _mamba2(
        pattern.count("M"), _integer(config, "mamba_num_heads"), _integer(config, "mamba_head_dim"), config, names,
        str(config.get("mamba_ssm_cache_dtype", "float32")),
    )  # fmt: skip
    window = int(config.get("sliding_window") or 0)
    return [Attention(pattern.count("*"), _heads(config), _head_elements(config), window)], [states]


def _jamba(config: Config) -> Caches:
    layers = _integer(config, "num_hidden_layers")
    period, offset = _integer(config, "attn_layer_period", 8), _integer(config, "attn_layer_offset", 4)
    attention = sum(layer % period == offset for layer in range(layers))
    inner = _integer(config, "mamba_expand", 2) * _integer(config, "hidden_size")
    kernel, size = _integer(config, "mamba_d_conv", 4), _integer(config, "mamba_d_state", 16)
    elements = _head_elements({**config, "head_dim": None})
    return (
        [Attention(attention, _heads(config), elements)],
        [States(layers - attention, inner, size, inner, kernel - 1)],
    )


_BUILDERS: Final[Mapping[str, Callable[[Config], Caches]]] = {
    "DeepseekV2ForCausalLM": _mla,
    "DeepseekV3ForCausalLM": _mla,
    "FalconH1ForCausalLM": _falcon_h1,
    "Gemma3ForCausalLM": _gemma3,
    "Gemma3ForConditionalGeneration": _gemma3,
    "GptOssForCausalLM": _gpt_oss,
    "GraniteMoeHybridForCausalLM": _granite,
    "JambaForCausalLM": _jamba,
    "LlamaForCausalLM": _plain,
    "MistralForCausalLM": _mistral,
    "MixtralForCausalLM": _plain,
    "NemotronHForCausalLM": _nemotron_h,
    "Qwen2ForCausalLM": _plain,
    "Qwen3ForCausalLM": _plain,
    "Qwen3MoeForCausalLM": _plain,
    "Qwen3NextForCausalLM": _delta_net,
    "Qwen3_5ForCausalLM": _delta_net,
    "Qwen3_5ForConditionalGeneration": _delta_net,
    "Qwen3_5MoeForCausalLM": _delta_net,
    "Qwen3_5MoeForConditionalGeneration": _delta_net,
}


def divided(amount: int, ranks: int, what: str) -> int:
    """Return a rank's share. Raise InvalidArgument if vLLM cannot share it."""
    if amount % ranks:
        raise InvalidArgument(f"{amount} {what} cannot be shared by {ranks} ranks", advice="choose another --tp")
    return amount // ranks
