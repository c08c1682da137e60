"""Which speculative decoding an engine does, and which of it kvdepot refuses (docs/vllm.md).

A method is served only if it is in this table. vLLM's own answers must agree with the table: a method that vLLM
changes is refused until somebody has looked at it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvdepot.core.errors import ConfigError

WHERE: Final = "speculative_config"
_OFF: Final = "switch speculative decoding off"

LOOKAHEAD: Final[Mapping[str, int]] = {
    "ngram": 0,
    "ngram_gpu": 0,
    "suffix": 0,
    "draft_model": 0,
    "eagle": 1,
    "eagle3": 1,
    "mtp": 1,
}
"""Tokens after a block's end on which the block's draft KV depends, by the method. Other methods are refused."""
_DRAFTS_FROM_TOKENS: Final = frozenset({"ngram", "ngram_gpu", "suffix"})
REFUSED: Final[Mapping[str, str]] = {
    "medusa": "it has not been tried with kvdepot",
    "mlp_speculator": "it has not been tried with kvdepot",
    "dflash": "its drafter computes a block of draft tokens at once, and has not been tried with kvdepot",
    "dspark": "its drafter computes a block of draft tokens at once, and has not been tried with kvdepot",
    "custom_class": "nothing says on which tokens the KV of such a drafter depends",
    "extract_hidden_states": "it caches hidden states, whose dependence on tokens nobody has checked",
}
"""Known methods that are not served, with the reason."""


@dataclass(frozen=True, slots=True)
class Speculation:
    """Speculative decoding that kvdepot serves.

    Args:
        method: vLLM's name of it.
        draft_tokens: Most draft tokens of a step.
        lookahead_tokens: Tokens after a block's end on which its draft KV depends.
    """

    method: str
    draft_tokens: int
    lookahead_tokens: int

    @property
    def keeps_kv(self) -> bool:
        """Whether the drafter has KV of its own."""
        return self.method not in _DRAFTS_FROM_TOKENS


def speculation(vllm_config: Any) -> Speculation | None:
    """Return the engine's speculative decoding, or None without it. Raise ConfigError for what is not served."""
    config = vllm_config.speculative_config
    if config is None:
        return None
    method, draft_tokens = str(config.method), int(config.num_speculative_tokens)
    lookahead = LOOKAHEAD.get(method)
    if lookahead is None:
        raise refused(method, REFUSED.get(method, "this kvdepot does not know the method"))
    if method == "draft_model" and config.draft_model_config.is_hybrid:
        raise refused("a recurrent draft model", "vLLM does not take rejected draft tokens out of its states")
    if _modules(config) > 1:
        raise refused("several MTP modules", "each reads a token further ahead, and nobody has tried them")
    for option, reason in (
        ("parallel_drafting", "the KV of masked draft tokens has not been tried"),
        ("use_heterogeneous_vocab", "draft KV depends on two tokenizers, which the namespace does not have"),
        ("disable_eagle_block_drop", "vLLM then reuses blocks whose draft KV is of another next token"),
    ):
        if getattr(config, option):
            raise ConfigError(WHERE, option, reason, advice=f"set {option} to false, or {_OFF}")
    says = int(vllm_config.num_prefill_lookahead_tokens)
    if says != lookahead or bool(config.use_eagle()) != (lookahead > 0):
        raise refused(method, f"this vLLM says that it reads {says} tokens ahead, and kvdepot knows {lookahead}")
    return Speculation(method, draft_tokens, lookahead)


def refused(what: str, problem: str) -> ConfigError:
    """Return the error for speculative decoding that is not served."""
    return ConfigError("kvdepot", WHERE, f"{what}: {problem}", advice=_OFF)


def _modules(config: Any) -> int:
    """Return how many MTP modules may draft in one step. Not by vLLM's word alone, which reads one name of several."""
    if config.method != "mtp":
        return 0
    draft = config.draft_model_config.hf_config
    modules = (getattr(draft, name, None) or 1 for name in ("n_predict", "num_nextn_predict_layers"))
    return min(int(config.num_speculative_tokens), max(map(int, modules)))
